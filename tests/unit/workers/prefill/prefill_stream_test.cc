#include "prefill_worker/prefill_stream.h"

#include <algorithm>
#include <thread>

#include "gtest/gtest.h"
#include "prefill_worker/prefill_job.h"

namespace kvt {
namespace {

PrefillEvent Event(PrefillEvent::Kind kind, uint64_t tokens_done) {
  PrefillEvent event;
  event.kind = kind;
  event.tokens_done = tokens_done;
  return event;
}

TEST(PrefillStream_Test, Write_ProgressNobodyRead_OnlyTheLatestStays) {
  PrefillStream stream;
  for (uint64_t n = 1; n <= 5; ++n) stream.Write(Event(PrefillEvent::Kind::kProgress, n * 256));
  stream.Write(Event(PrefillEvent::Kind::kFirstToken, 1300));
  stream.Finish(absl::OkStatus());
  std::optional<absl::Status> end;
  std::optional<PrefillEvent> event = stream.Read(absl::ZeroDuration(), &end);
  ASSERT_TRUE(event.has_value());
  EXPECT_EQ(event->tokens_done, 1280u);
  event = stream.Read(absl::ZeroDuration(), &end);
  ASSERT_TRUE(event.has_value());
  EXPECT_EQ(event->kind, PrefillEvent::Kind::kFirstToken);
  EXPECT_FALSE(end.has_value());
  EXPECT_FALSE(stream.Read(absl::ZeroDuration(), &end).has_value());
  EXPECT_EQ(end, absl::OkStatus());
}

TEST(PrefillStream_Test, Finish_FirstEndCountsAndLaterWritesAreDropped) {
  PrefillStream stream;
  stream.Finish(absl::CancelledError("cancelled"));
  stream.Finish(absl::OkStatus());
  stream.Write(Event(PrefillEvent::Kind::kProgress, 1));
  std::optional<absl::Status> end;
  EXPECT_FALSE(stream.Read(absl::Seconds(10), &end).has_value());
  EXPECT_EQ(end, absl::CancelledError("cancelled"));
}

TEST(PrefillStream_Test, Read_NothingComes_ReturnsAtTheTimeout) {
  PrefillStream stream;
  std::optional<absl::Status> end;
  EXPECT_FALSE(stream.Read(absl::Milliseconds(2), &end).has_value());
  EXPECT_FALSE(end.has_value());
}

TEST(PrefillPhase_Test, MayFollow_EveryPair_IsAsDrawn) {
  using P = PrefillPhase;
  std::vector<std::pair<P, P>> allowed = {
      {P::kQueued, P::kOpening},     {P::kOpening, P::kPulling},   {P::kOpening, P::kComputing},
      {P::kPulling, P::kComputing},  {P::kComputing, P::kFlushing}, {P::kFlushing, P::kSealing},
      {P::kSealing, P::kFlushing},   {P::kSealing, P::kHandingOver},
      {P::kOpening, P::kQueued}};  // no room: back with its age
  for (int from = 0; from < static_cast<int>(P::kEnding); ++from) {
    allowed.emplace_back(static_cast<P>(from), P::kEnding);
  }
  for (int from = 0; from <= static_cast<int>(P::kEnding); ++from) {
    for (int to = 0; to <= static_cast<int>(P::kEnding); ++to) {
      const std::pair<P, P> pair{static_cast<P>(from), static_cast<P>(to)};
      EXPECT_EQ(MayFollow(pair.first, pair.second),
                std::find(allowed.begin(), allowed.end(), pair) != allowed.end())
          << PrefillPhaseName(pair.first) << " to " << PrefillPhaseName(pair.second);
    }
  }
}

}  // namespace
}  // namespace kvt
