// The store node behind each real data plane: push, seal, lookup, pull, and foreign bytes never,
// also while blocks are evicted under their readers.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "absl/strings/str_cat.h"
#include "kernels/base/mutex.h"
#include "kernels/base/random.h"
#include "kvstore/transport/loopback.h"
#include "kvstore/transport/shm_transport.h"
#include "kvstore/transport/ucx_transport.h"
#include "tests/support/store_testing.h"

namespace kvt {
namespace {

enum class Plan { kLoopback, kShm, kUcx };

std::string PlanName(const testing::TestParamInfo<Plan>& info) {
  switch (info.param) {
    case Plan::kLoopback:
      return "Loopback";
    case Plan::kShm:
      return "Shm";
    case Plan::kUcx:
      return "Ucx";
  }
  return "";
}

constexpr absl::Duration kPatience = absl::Seconds(60);

// Whole records, one part each, with their memory.
class Burst {
 public:
  explicit Burst(size_t pieces)
      : pulls_(pieces),
        pushes_(pieces),
        statuses_(pieces, PieceStatus::kNotAttempted),
        sums_(pieces),
        parts_(pieces),
        memory_(static_cast<std::byte*>(std::aligned_alloc(64, pieces * kRecord))) {
    for (size_t i = 0; i < pieces; ++i) parts_[i] = memory_ + i * kRecord;
  }
  ~Burst() { std::free(memory_); }

  void SetPull(size_t i, uint64_t ticket, uint64_t handle, Plane plane) {
    pulls_[i].piece = PieceOf(ticket, handle, plane);
    pulls_[i].parts = &parts_[i];
    pulls_[i].part_bytes = kRecord;
    pulls_[i].plane = plane;
  }
  void SetExpected(size_t i, const BlockKey& key, const std::vector<uint64_t>& checksums) {
    sums_[i] = checksums;
    pulls_[i].checksums = sums_[i].data();
    pulls_[i].key_hash = key.Hash64();
  }
  void SetPush(size_t i, uint64_t ticket, uint64_t handle, Plane plane, const BlockKey& key) {
    const std::vector<std::byte> bytes = TestBytes(key, plane);
    std::memcpy(parts_[i], bytes.data(), bytes.size());
    sums_[i].resize(TestGeometry().SlicesPerRecord());
    pushes_[i].piece = PieceOf(ticket, handle, plane);
    pushes_[i].parts = &parts_[i];
    pushes_[i].part_bytes = kRecord;
    pushes_[i].checksums = sums_[i].data();
    pushes_[i].key_hash = key.Hash64();
    pushes_[i].plane = plane;
  }
  void StartPull(Channel& channel) {
    const auto id = channel.Pull(
        {pulls_, absl::MakeSpan(statuses_), RealClock::Get().Now() + kPatience, Done()});
    ASSERT_TRUE(id.ok()) << id.status();
  }
  void StartPush(Channel& channel) {
    const auto id = channel.Push({pushes_, absl::MakeSpan(statuses_), PushChecksums::kCompute,
                                  RealClock::Get().Now() + kPatience, Done()});
    ASSERT_TRUE(id.ok()) << id.status();
  }
  BurstResult Await() {
    MutexLock lock(mu_);
    const absl::Time deadline = RealClock::Get().Now() + 2 * kPatience;
    while (!done_ && RealClock::Get().Now() < deadline) changed_.WaitFor(mu_, absl::Seconds(1));
    EXPECT_TRUE(done_) << "the burst never ended";
    return result_;
  }
  PieceStatus status(size_t i) const { return statuses_[i]; }
  bool Holds(size_t i, const BlockKey& key, Plane plane) const {
    const std::vector<std::byte> bytes = TestBytes(key, plane);
    return std::memcmp(parts_[i], bytes.data(), bytes.size()) == 0;
  }

 private:
  static inline const uint32_t kRecord = TestGeometry().RecordBytes();
  static Piece PieceOf(uint64_t ticket, uint64_t handle, Plane plane) {
    Piece piece;
    piece.ticket = ticket;
    piece.ticket_epoch = 1;
    piece.handle = PlaneRecordHandle(handle, plane);
    piece.length = kRecord;
    return piece;
  }
  BurstDone Done() {
    return [this](const BurstResult& result) {
      MutexLock lock(mu_);
      result_ = result;
      done_ = true;
      changed_.NotifyAll();
    };
  }

  std::vector<PullItem> pulls_;
  std::vector<PushItem> pushes_;
  std::vector<PieceStatus> statuses_;
  std::vector<std::vector<uint64_t>> sums_;
  std::vector<std::byte*> parts_;
  std::byte* memory_;
  Mutex mu_;
  CondVar changed_;
  BurstResult result_ ABSL_GUARDED_BY(mu_);
  bool done_ ABSL_GUARDED_BY(mu_) = false;
};

class StoreDataTest : public testing::TestWithParam<Plan> {
 protected:
  static constexpr int kBlocks = 40;

  StoreDataTest() : store_(kBlocks) {
    switch (GetParam()) {
      case Plan::kLoopback: {
        auto server = StartLoopbackServer(absl::StrCat("store-data-", getpid()), store_.node());
        EXPECT_TRUE(server.ok()) << server.status();
        if (server.ok()) server_ = *std::move(server);
        transport_ = MakeLoopbackTransport();
        break;
      }
      case Plan::kShm: {
        ShmServerOptions options;
        options.socket_path = absl::StrCat(testing::TempDir(), "kvt-store-", getpid(), ".sock");
        Take(StartShmServer(options, store_.arena().mapping(), store_.arena().table(),
                            store_.node()));
        transport_ = MakeShmTransport(ShmOptions());
        break;
      }
      case Plan::kUcx: {
        UcxServerOptions options;
        options.ucx.tls = "tcp";
        options.ucx.net_devices = "lo";
        Take(StartUcxServer(options, store_.arena().bytes(), store_.node()));
        auto transport = MakeUcxTransport(options.ucx);
        EXPECT_TRUE(transport.ok()) << transport.status();
        if (transport.ok()) transport_ = *std::move(transport);
        break;
      }
    }
  }
  void Take(absl::StatusOr<std::unique_ptr<TransportServer>> server) {
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  StoreNode& node() { return store_.node(); }

  // A worker's session and its channel.
  struct Worker {
    SessionId session;
    std::unique_ptr<Channel> channel;
  };
  Worker Attach(const std::string& name) {
    Worker worker;
    const auto reply = node().OpenSession(TestOpen(name));
    EXPECT_TRUE(reply.ok()) << reply.status();
    worker.session = reply->session;
    SessionToken token;
    token.session = reply->session;
    std::memcpy(token.secret.data(), reply->secret.data(), token.secret.size());
    token.geometry = TestGeometry();
    auto channel =
        transport_->Connect(server_->Address(), token, RealClock::Get().Now() + kPatience);
    EXPECT_TRUE(channel.ok()) << channel.status();
    if (channel.ok()) worker.channel = *std::move(channel);
    return worker;
  }

  // Reserves and pushes what is not there; true when everything was pushed and sealed.
  bool Store(Worker& worker, uint64_t ticket, const std::vector<BlockName>& names) {
    const auto reserved = node().Reserve({worker.session, store_.tickets().Make(ticket), names, 0, {}});
    if (!reserved.ok()) {
      EXPECT_EQ(reserved.status().code(), absl::StatusCode::kResourceExhausted)
          << reserved.status();
      return false;
    }
    std::vector<size_t> fresh;
    for (size_t i = 0; i < names.size(); ++i) {
      if (!reserved->blocks[i].already_sealed) fresh.push_back(i);
    }
    if (fresh.empty()) return true;
    Burst burst(2 * fresh.size());
    for (size_t f = 0; f < fresh.size(); ++f) {
      for (const Plane plane : {Plane::kBase, Plane::kResidual}) {
        burst.SetPush(2 * f + static_cast<size_t>(plane), ticket,
                      reserved->blocks[fresh[f]].place.handle, plane, names[fresh[f]].key);
      }
    }
    burst.StartPush(*worker.channel);
    const BurstResult result = burst.Await();
    EXPECT_TRUE(result.status.ok()) << result.status;
    EXPECT_EQ(result.pieces_ok, 2 * fresh.size());
    SealRequest seal{worker.session, Ref(ticket), {}};
    for (const size_t i : fresh) seal.handles.push_back(reserved->blocks[i].place.handle);
    const auto sealed = node().Seal(seal);
    bool all = sealed.ok();
    for (const auto& block : sealed->blocks) {
      all &= block.outcome == SealReply::Outcome::kSealed ||
             block.outcome == SealReply::Outcome::kWinnerElsewhere;
    }
    return all;
  }

  // Reserves three quarters of the store, which evicts what nobody pins, and writes to their BASE
  // planes only: new bytes where old records lay, and nothing sealed. Held until the next renewal.
  void Overwrite(Worker& worker, uint64_t ticket, int seed) {
    const auto names = TestNames(kBlocks * 3 / 4, seed);
    const auto reserved = node().Reserve({worker.session, store_.tickets().Make(ticket), names, 0, {}});
    if (!reserved.ok()) return;  // the others hold too much just now
    Burst burst(names.size());
    for (size_t i = 0; i < names.size(); ++i) {
      burst.SetPush(i, ticket, reserved->blocks[i].place.handle, Plane::kBase, names[i].key);
    }
    burst.StartPush(*worker.channel);
    EXPECT_TRUE(burst.Await().status.ok());
  }

  StoreUnderTest store_;
  std::unique_ptr<TransportServer> server_;
  std::unique_ptr<Transport> transport_;
};

TEST_P(StoreDataTest, F12_WrongSecretOrGeometry_CannotAttach) {
  const auto reply = node().OpenSession(TestOpen("w"));
  ASSERT_TRUE(reply.ok());
  SessionToken token;
  token.session = reply->session;
  token.geometry = TestGeometry();
  const absl::Time deadline = RealClock::Get().Now() + kPatience;
  EXPECT_EQ(transport_->Connect(server_->Address(), token, deadline).status().code(),
            absl::StatusCode::kPermissionDenied);
  std::memcpy(token.secret.data(), reply->secret.data(), token.secret.size());
  token.geometry.layers = 9;
  EXPECT_EQ(transport_->Connect(server_->Address(), token, deadline).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_P(StoreDataTest, PushedBlocks_ComeBackToAnotherWorkerBitForBit) {
  Worker writer = Attach("prefill");
  Worker reader = Attach("decode");
  const auto names = TestNames(12, 1);
  ASSERT_TRUE(Store(writer, 1, names));
  const auto found = node().Lookup({reader.session, store_.tickets().Make(1), names});
  ASSERT_TRUE(found.ok());
  ASSERT_TRUE(node().Release({writer.session, Ref(1)}).ok());
  Burst burst(2 * names.size());
  for (size_t i = 0; i < names.size(); ++i) {
    const LookupReply::Block& block = found->blocks[i];
    ASSERT_EQ(block.presence, BlockPresence::kExact);
    // Also what the worker computed on the way equals what the bytes sum to.
    EXPECT_EQ(block.place.base_checksums, TestChecksums(names[i].key, Plane::kBase));
    for (const Plane plane : {Plane::kBase, Plane::kResidual}) {
      const size_t at = 2 * i + static_cast<size_t>(plane);
      burst.SetPull(at, 1, block.place.handle, plane);
      burst.SetExpected(
          at, names[i].key,
          plane == Plane::kBase ? block.place.base_checksums : block.place.residual_checksums);
    }
  }
  burst.StartPull(*reader.channel);
  const BurstResult result = burst.Await();
  EXPECT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(result.pieces_ok, 2 * names.size());
  for (size_t i = 0; i < names.size(); ++i) {
    EXPECT_TRUE(burst.Holds(2 * i, names[i].key, Plane::kBase)) << i;
    EXPECT_TRUE(burst.Holds(2 * i + 1, names[i].key, Plane::kResidual)) << i;
  }
}

TEST_P(StoreDataTest, StoredByteThatFlipped_IsCorruptAtTheReader) {
  Worker worker = Attach("w");
  const auto names = TestNames(1, 1);
  ASSERT_TRUE(Store(worker, 1, names));
  const auto found = node().Lookup({worker.session, store_.tickets().Make(2), names});
  ASSERT_TRUE(found.ok());
  const BlockPlace& place = found->blocks[0].place;
  store_.arena().data()[place.base_offset + 1234] ^= std::byte{1};
  Burst burst(2);
  burst.SetPull(0, 2, place.handle, Plane::kBase);
  burst.SetExpected(0, names[0].key, place.base_checksums);
  burst.SetPull(1, 2, place.handle, Plane::kResidual);
  burst.SetExpected(1, names[0].key, place.residual_checksums);
  burst.StartPull(*worker.channel);
  const BurstResult result = burst.Await();
  EXPECT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(burst.status(0), PieceStatus::kCorrupt);
  EXPECT_EQ(burst.status(1), PieceStatus::kOk);
}

TEST_P(StoreDataTest, F1_EvictionUnderLoad_NeverGivesForeignBytes) {
  constexpr int kWorkers = 2;
  constexpr int kRounds = 400;
  const uint64_t seed = 20261129;
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::atomic<uint64_t> read{0}, lost{0}, foreign{0}, next_ticket{1};
  std::atomic<uint64_t> evicted{0};  // pieces that lookup found and that went before they were read
  std::vector<std::thread> threads;
  for (int w = 0; w < kWorkers; ++w) {
    threads.emplace_back([&, w] {
      Worker worker = Attach(absl::StrCat("w", w));
      Random random(seed + w);
      for (int round = 0; round < kRounds && !testing::Test::HasFatalFailure(); ++round) {
        // Eight sequences of up to eight blocks: more than what fits.
        const int sequence = static_cast<int>(random.Below(8));
        const auto names = TestNames(1 + static_cast<int>(random.Below(8)), 100000 * sequence);
        const uint64_t ticket = next_ticket.fetch_add(1);
        const auto found = node().Lookup({worker.session, store_.tickets().Make(ticket), names});
        ASSERT_TRUE(found.ok()) << found.status();
        Burst burst(2 * names.size());
        for (size_t i = 0; i < names.size(); ++i) {
          // Absent ones, too: the store refuses them.
          for (const Plane plane : {Plane::kBase, Plane::kResidual}) {
            burst.SetPull(2 * i + static_cast<size_t>(plane), ticket, found->blocks[i].place.handle,
                          plane);
          }
        }
        // The pins go before the burst, while it runs, or after it; others evict what it reads.
        const uint64_t when = random.Below(3);
        const auto let_go = [&] {
          (void)node().Release({worker.session, Ref(ticket)});
          Overwrite(worker, next_ticket.fetch_add(1), 10000000 * (w + 1) + 1000 * round);
        };
        const bool early = when < 2;
        if (when == 0) let_go();
        burst.StartPull(*worker.channel);
        if (when == 1) let_go();
        const BurstResult result = burst.Await();
        ASSERT_TRUE(result.status.ok()) << result.status;
        for (size_t i = 0; i < names.size(); ++i) {
          for (const Plane plane : {Plane::kBase, Plane::kResidual}) {
            const size_t at = 2 * i + static_cast<size_t>(plane);
            const bool ok = burst.status(at) == PieceStatus::kOk;
            const bool present = found->blocks[i].presence == BlockPresence::kExact;
            EXPECT_TRUE(present || !ok) << "read what lookup did not find";
            EXPECT_TRUE(ok || early || !present)
                << "lost under a pin: " << PieceStatusName(burst.status(at));
            ++(ok ? read : lost);
            if (present && !ok) ++evicted;
            if (ok && !burst.Holds(at, names[i].key, plane)) ++foreign;
          }
        }
        // Lets go of everything that is not listed.
        ASSERT_TRUE(node().Renew({worker.session, {Ref(ticket)}}).ok());
        (void)Store(worker, ticket, names);
        (void)node().Release({worker.session, Ref(ticket)});
      }
      worker.channel->Close();
      EXPECT_TRUE(node().CloseSession(worker.session).ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(foreign.load(), 0u);
  EXPECT_GT(read.load(), 100u);
  EXPECT_GT(lost.load(), 100u);
  EXPECT_GT(evicted.load(), 10u);
  server_->Stop();
  const StoreStats stats = node().StatsNow();
  EXPECT_GT(stats.evicted_blocks, 100u);
  EXPECT_EQ(stats.pins, 0u);
  EXPECT_EQ(stats.in_flight, 0u);
  EXPECT_EQ(stats.tickets, 0u);
  EXPECT_EQ(stats.used_bytes, stats.blocks * 2 * TestGeometry().RecordBytes());
  EXPECT_EQ(stats.checksum_failures, 0u);
}

INSTANTIATE_TEST_SUITE_P(Plans, StoreDataTest,
                         testing::Values(Plan::kLoopback, Plan::kShm, Plan::kUcx), PlanName);

}  // namespace
}  // namespace kvt
