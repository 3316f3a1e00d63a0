// Bursts of very many pieces: bounded whatever their number.
#include <gtest/gtest.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>

#include "kernels/base/random.h"
#include "kvstore/media/shared_mapping.h"
#include "kvstore/transport/shm_transport.h"
#include "kvstore/transport/ucx_transport.h"
#include "tests/contract/transport_fixture.h"
#include "tests/support/forwarding_resolver.h"

namespace kvt {
namespace {

constexpr uint32_t kPieces = 100'000;
constexpr uint32_t kPieceBytes = 4096;
constexpr uint32_t kRecords = 64;

// The resolver, and how much of it was in use at once.
class WatchedResolver final : public ForwardingResolver {
 public:
  explicit WatchedResolver(ArenaResolver& resolver)
      : ForwardingResolver(resolver), resolver_(resolver) {}
  [[nodiscard]] int held_max() const { return held_max_.load(); }
  [[nodiscard]] size_t asked_max() const { return asked_max_.load(); }

  void ResolvePull(SessionId session, absl::Span<const Piece> pieces,
                   absl::Span<ResolvedPull> out) override {
    ForwardingResolver::ResolvePull(session, pieces, out);
    held_max_ = std::max(held_max_.load(), resolver_.in_flight());
    asked_max_ = std::max(asked_max_.load(), pieces.size());
  }

 private:
  ArenaResolver& resolver_;
  std::atomic<int> held_max_{0};
  std::atomic<size_t> asked_max_{0};
};

size_t OpenFiles() {
  size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    (void)entry;
    ++files;
  }
  return files;
}

double ThreadSeconds() {
  timespec ts{};
  KVT_CHECK(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts) == 0);
  return static_cast<double>(ts.tv_sec) + 1e-9 * static_cast<double>(ts.tv_nsec);
}

class ManyPiecesTest : public testing::TestWithParam<Backend> {
 protected:
  ManyPiecesTest() : resolver_(MakeResolver(kRecords)), watched_(*resolver_) {
    for (uint32_t i = 0; i < kRecords; ++i) {
      handles_.push_back(resolver_->Seal(i));
      sums_.push_back(resolver_->Checksums(i));
    }
    if (GetParam() == Backend::kUcx) {
      UcxServerOptions options;
      options.ucx.tls = "tcp";
      options.ucx.net_devices = "lo";
      const SharedMapping& arena = resolver_->arena();
      Take(StartUcxServer(options, absl::MakeSpan(arena.mutable_data(), arena.size()), watched_));
    } else if (GetParam() == Backend::kShm) {
      ShmServerOptions options;
      options.socket_path = testing::TempDir() + "kvt-many-" + std::to_string(getpid()) + ".sock";
      Take(StartShmServer(options, resolver_->arena(), resolver_->table(), watched_));
    } else {
      Take(StartLoopbackServer("many-" + std::to_string(getpid()), watched_));
    }
    transport_ = MakeTransport(GetParam());
    auto channel = transport_->Connect(server_->Address(), TestToken(), In(kPatience));
    KVT_CHECK(channel.ok(), channel.status().ToString());
    channel_ = std::move(*channel);
  }
  template <typename Server>
  void Take(absl::StatusOr<std::unique_ptr<Server>> server) {
    KVT_CHECK(server.ok(), server.status().ToString());
    server_ = std::move(*server);
  }

  std::unique_ptr<ArenaResolver> resolver_;
  WatchedResolver watched_;
  std::vector<uint64_t> handles_;
  std::vector<std::vector<uint64_t>> sums_;
  std::unique_ptr<TransportServer> server_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Channel> channel_;
};

INSTANTIATE_TEST_SUITE_P(All, ManyPiecesTest,
                         testing::Values(Backend::kLoopback, Backend::kShm, Backend::kUcx), NameOf);

TEST_P(ManyPiecesTest, F11_HundredThousandScatteredPiecesAtOnce_BoundedAndCorrect) {
  constexpr uint64_t kSeed = 11;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  Random random(kSeed);
  const uint32_t places = TestGeometry().RecordBytes() / kPieceBytes;
  const uint32_t slice = TestGeometry().SliceBytes();
  auto memory = PrivateMapping::Create(uint64_t{kPieces} * kPieceBytes, SharedMappingOptions{});
  ASSERT_TRUE(memory.ok()) << memory.status();
  std::vector<std::byte*> parts(kPieces);
  std::vector<PullItem> items(kPieces);
  std::vector<PieceStatus> statuses(kPieces);
  std::vector<uint32_t> order(kPieces);
  for (uint32_t i = 0; i < kPieces; ++i) order[i] = i;
  for (uint32_t i = kPieces - 1; i > 0; --i) std::swap(order[i], order[random.Below(i + 1)]);
  for (uint32_t i = 0; i < kPieces; ++i) {
    const auto record = static_cast<uint32_t>(random.Below(kRecords));
    const auto place = static_cast<uint32_t>(random.Below(places));
    parts[i] = memory->data() + uint64_t{order[i]} * kPieceBytes;
    items[i].piece.ticket = 1;
    items[i].piece.handle = handles_[record];
    items[i].piece.offset = place * kPieceBytes;
    items[i].piece.length = kPieceBytes;
    items[i].parts = &parts[i];
    items[i].part_bytes = kPieceBytes;
    items[i].key_hash = ArenaResolver::KeyHash(record);
    items[i].checksums = &sums_[record][place * kPieceBytes / slice];
  }
  const size_t files = OpenFiles();
  Mutex mu;
  CondVar changed;
  bool done = false;
  BurstResult result;
  PullRequest request;
  request.items = items;
  request.statuses = absl::MakeSpan(statuses);
  request.deadline = In(kPatience);
  request.done = [&](const BurstResult& r) {
    MutexLock lock(mu);
    result = r;
    done = true;
    changed.NotifyAll();
  };
  const absl::Time start = RealClock::Get().Now();
  const double before = ThreadSeconds();
  ASSERT_TRUE(channel_->Pull(std::move(request)).ok());
  const double posting = ThreadSeconds() - before;
  size_t files_max = 0;
  {
    MutexLock lock(mu);
    while (!done) {
      ASSERT_LT(RealClock::Get().Now(), start + 2 * kPatience) << "the burst did not end";
      changed.WaitFor(mu, absl::Milliseconds(5));
      files_max = std::max(files_max, OpenFiles());
    }
  }
  const double total = absl::ToDoubleSeconds(RealClock::Get().Now() - start);
  EXPECT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(result.pieces_ok, kPieces);
  EXPECT_LE(files_max, files);
  // Posting is the caller's part; processor time, for other programs may run in between.
  EXPECT_LE(posting, 0.1 * total);
  if (GetParam() == Backend::kUcx) {
    EXPECT_LE(watched_.asked_max(), static_cast<size_t>(kMessagePiecesMax));
    EXPECT_LE(watched_.held_max(), kMessagePiecesMax * (kMessagesInFlightMax + 1));
    EXPECT_GT(watched_.held_max(), 0);
  }
  std::vector<std::byte> expected(kPieceBytes);
  for (uint32_t i = 0; i < kPieces; ++i) {
    ASSERT_EQ(statuses[i], PieceStatus::kOk) << i;
    ArenaResolver::FillPattern(RecordIndexOf(items[i].piece.handle), 1, expected.data(), kPieceBytes,
                               items[i].piece.offset);
    ASSERT_EQ(std::memcmp(parts[i], expected.data(), kPieceBytes), 0) << i;
  }
  channel_->Close();
  server_->Stop();
  EXPECT_EQ(resolver_->in_flight(), 0);
}

TEST(UcxTransport, F10_UnknownNetDevice_IsRefusedAtOnceNamingThoseThatExist) {
  UcxOptions options;
  options.net_devices = "lo,nope0";
  const auto transport = MakeUcxTransport(options);
  ASSERT_EQ(transport.status().code(), absl::StatusCode::kInvalidArgument) << transport.status();
  EXPECT_NE(transport.status().message().find("'nope0'"), std::string::npos) << transport.status();
  EXPECT_NE(transport.status().message().find("there are: "), std::string::npos);
  auto resolver = MakeResolver(1);
  UcxServerOptions server_options;
  server_options.ucx = options;
  const SharedMapping& arena = resolver->arena();
  EXPECT_EQ(StartUcxServer(server_options, absl::MakeSpan(arena.mutable_data(), arena.size()),
                           *resolver)
                .status()
                .code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kvt
