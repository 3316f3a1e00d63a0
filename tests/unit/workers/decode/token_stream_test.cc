#include "decode_worker/engine/token_stream.h"

#include <algorithm>
#include <thread>

#include "decode_worker/engine/sequence.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/clock.h"

namespace kvt {
namespace {

using testing::ElementsAre;

const std::string kCapability = "0123456789abcdef";

struct Reader {
  std::vector<int32_t> tokens;
  FinishReason finish = FinishReason::kRunning;
  TokenSink sink = [this](const TokenEvent& event) {
    tokens.insert(tokens.end(), event.tokens.begin(), event.tokens.end());
    finish = event.finish;
    return true;
  };
};

TEST(TokenStream_Test, Read_AfterTheEnd_GetsEverythingWithFigures) {
  TokenStream stream(kCapability, absl::UnixEpoch());
  stream.Append({1, 2, 3});
  DecodeFigures figures;
  figures.output_tokens = 3;
  stream.Finish(FinishReason::kLength, figures, {});
  Reader reader;
  EXPECT_TRUE(stream.Read(kCapability, 0, reader.sink).ok());
  EXPECT_THAT(reader.tokens, ElementsAre(1, 2, 3));
  EXPECT_EQ(reader.finish, FinishReason::kLength);
}

TEST(TokenStream_Test, Read_FromAToken_SkipsWhatTheReaderHas) {
  TokenStream stream(kCapability, absl::UnixEpoch());
  stream.Append({1, 2, 3});
  stream.Finish(FinishReason::kStop, {}, {});
  Reader reader;
  EXPECT_TRUE(stream.Read(kCapability, 2, reader.sink).ok());
  EXPECT_THAT(reader.tokens, ElementsAre(3));
  Reader beyond;
  EXPECT_TRUE(absl::IsOutOfRange(stream.Read(kCapability, 4, beyond.sink)));
}

TEST(TokenStream_Test, Read_WhileItIsWritten_GetsEveryTokenOnceInOrder) {
  TokenStream stream(kCapability, absl::UnixEpoch());
  std::thread writer([&] {
    for (int32_t token = 0; token < 500; ++token) stream.Append({token});
    stream.Finish(FinishReason::kLength, {}, {});
  });
  Reader reader;
  EXPECT_TRUE(stream.Read(kCapability, 0, reader.sink).ok());
  writer.join();
  ASSERT_EQ(reader.tokens.size(), 500u);
  for (int32_t token = 0; token < 500; ++token) {
    EXPECT_EQ(reader.tokens[static_cast<size_t>(token)], token);
  }
}

TEST(TokenStream_Test, Fail_ReaderGetsTheTokensAndThenTheFailure) {
  TokenStream stream(kCapability, absl::UnixEpoch());
  stream.Append({7});
  stream.Fail(absl::UnavailableError("stopping"));
  stream.Append({8});  // after the end: dropped
  stream.Finish(FinishReason::kLength, {}, {});
  Reader reader;
  EXPECT_EQ(stream.Read(kCapability, 0, reader.sink), absl::UnavailableError("stopping"));
  EXPECT_THAT(reader.tokens, ElementsAre(7));
  EXPECT_EQ(reader.finish, FinishReason::kRunning);
}

TEST(TokenStream_Test, Read_WrongCapability_IsRefused) {
  TokenStream stream(kCapability, absl::UnixEpoch());
  Reader reader;
  EXPECT_TRUE(absl::IsPermissionDenied(stream.Read("another", 0, reader.sink)));
  EXPECT_TRUE(reader.tokens.empty());
}

TEST(TokenStream_Test, DetachedFor_ReaderWentAway_CountsFromThen) {
  const absl::Time start = RealClock::Get().Now();
  TokenStream stream(kCapability, start);
  EXPECT_EQ(stream.DetachedFor(start + absl::Seconds(3)), absl::Seconds(3));
  stream.Append({1});
  EXPECT_TRUE(absl::IsCancelled(
      stream.Read(kCapability, 0, [&](const TokenEvent&) {
        EXPECT_EQ(stream.DetachedFor(start + absl::Hours(1)), absl::ZeroDuration());
        return false;
      })));
  EXPECT_LT(stream.DetachedFor(RealClock::Get().Now()), absl::Seconds(30));
  EXPECT_GE(stream.DetachedFor(RealClock::Get().Now() + absl::Seconds(30)), absl::Seconds(30));
}

TEST(SequencePhase_Test, MayFollow_EveryPair_IsAsDrawn) {
  using P = SequencePhase;
  const std::vector<std::pair<P, P>> allowed = {
      {P::kOpening, P::kPulling},   {P::kOpening, P::kResuming},  {P::kPulling, P::kRunning},
      {P::kPulling, P::kResuming},  {P::kResuming, P::kOpening},  {P::kOpening, P::kDraining},
      {P::kPulling, P::kDraining},  {P::kRunning, P::kDraining},  {P::kResuming, P::kDraining},
      // An offloaded sequence that lost a miss, and prompts computed here.
      {P::kRunning, P::kResuming},  {P::kRunning, P::kComputing}, {P::kOpening, P::kComputing},
      {P::kPulling, P::kComputing}, {P::kResuming, P::kComputing}, {P::kComputing, P::kRunning},
      {P::kComputing, P::kDraining}};
  for (int from = 0; from <= static_cast<int>(P::kDraining); ++from) {
    for (int to = 0; to <= static_cast<int>(P::kDraining); ++to) {
      const std::pair<P, P> pair{static_cast<P>(from), static_cast<P>(to)};
      EXPECT_EQ(MayFollow(pair.first, pair.second),
                std::find(allowed.begin(), allowed.end(), pair) != allowed.end())
          << SequencePhaseName(pair.first) << " to " << SequencePhaseName(pair.second);
    }
  }
}

}  // namespace
}  // namespace kvt
