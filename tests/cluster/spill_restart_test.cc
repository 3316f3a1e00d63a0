// kvtide-store with RocksDB behind it: memory for a tenth of what is stored, kill -9, restart; what
// the index finds comes back from disk bit for bit. A block's bytes are a function of its key.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/mutex.h"
#include "kvstore/transport/shm_transport.h"
#include "kvstore/wire/wire_rpc.h"
#include "tests/support/store_testing.h"

namespace kvt {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);
const uint32_t kRecord = TestGeometry().RecordBytes();

// The daemon over one folder; starts again on the same disk.
class SpillDaemon {
 public:
  SpillDaemon() {
    folder_ = absl::StrCat(testing::TempDir(), "spill-restart-", getpid());
    std::filesystem::create_directories(folder_);
    std::ofstream(folder_ + "/key") << absl::BytesToHexString(tickets_.PublicKey()) << "\n";
    std::ofstream(folder_ + "/store.toml")
        << "[node]\nname = \"store-t\"\nlog_level = \"warning\"\n[store]\nucx = false\n"
        << "arena_bytes = \"4MiB\"\nspill_one_time = true\nspill_direct_io = false\n"
        << "spill_bytes = \"1GiB\"\nshm_socket = \"" << folder_ << "/s.sock\"\nspill_folder = \""
        << folder_ << "/disk\"\nticket_public_key_file = \"" << folder_
        << "/key\"\naddress_file = \"" << folder_ << "/address\"\n";
  }
  ~SpillDaemon() {
    Kill();
    std::free(memory_);
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }

  // Starts it and opens a session and a channel.
  void Start() {
    std::filesystem::remove(folder_ + "/address");
    pid_ = fork();
    if (pid_ == 0) {
      const std::string program = absl::StrCat(KVT_BINARY_DIR, "/bin/kvtide-store");
      execl(program.c_str(), program.c_str(), "--config", (folder_ + "/store.toml").c_str(),
            nullptr);
      _exit(127);
    }
    const absl::Time deadline = RealClock::Get().Now() + kPatience;
    std::string address;
    Mutex mu;
    CondVar pause;
    while (address.empty() && RealClock::Get().Now() < deadline) {
      std::ifstream(folder_ + "/address") >> address;
      MutexLock lock(mu);
      if (address.empty()) pause.WaitFor(mu, absl::Milliseconds(20));
    }
    ASSERT_FALSE(address.empty()) << "the store did not start";
    api_ = ConnectStore(address, absl::Seconds(20));
    const auto opened = api_->OpenSession(TestOpen("w", ++boots_));
    ASSERT_TRUE(opened.ok()) << opened.status();
    session_ = opened->session;
    SessionToken token;
    token.session = session_;
    std::memcpy(token.secret.data(), opened->secret.data(), token.secret.size());
    token.geometry = TestGeometry();
    auto channel = transport_->Connect(opened->shm_socket, token, deadline);
    ASSERT_TRUE(channel.ok()) << channel.status();
    channel_ = *std::move(channel);
  }
  void Kill() {
    channel_.reset();
    api_.reset();
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  StoreApi& api() { return *api_; }

  // Stores a sequence and lets it go; false when the store refused for now.
  bool Put(uint64_t ticket, const std::vector<BlockName>& names) {
    Renew();
    const auto reserved = api_->Reserve({session_, tickets_.Make(ticket), names, 0, {}});
    if (!reserved.ok()) {
      EXPECT_TRUE(absl::IsResourceExhausted(reserved.status())) << reserved.status();
      return false;
    }
    for (size_t i = 0; i < names.size(); ++i) {
      if (reserved->blocks[i].already_sealed) continue;
      for (const Plane plane : {Plane::kBase, Plane::kResidual}) {
        const std::vector<std::byte> bytes = TestBytes(names[i].key, plane);
        std::memcpy(memory_, bytes.data(), bytes.size());
        EXPECT_EQ(Move(ticket, reserved->blocks[i].place.handle, plane, names[i].key, true),
                  PieceStatus::kOk);
      }
    }
    EXPECT_TRUE(api_->Release({session_, Ref(ticket)}).ok());
    return true;
  }
  // Waits until the disk's writer has made room again: a burst beyond memory is dropped otherwise.
  void AwaitRoom() {
    const absl::Time deadline = RealClock::Get().Now() + kPatience;
    Mutex mu;
    CondVar pause;
    while (RealClock::Get().Now() < deadline) {
      const auto stats = api_->Stats();
      ASSERT_TRUE(stats.ok()) << stats.status();
      if (stats->used_bytes * 10 <= stats->capacity_bytes * 9) return;
      MutexLock lock(mu);
      pause.WaitFor(mu, absl::Milliseconds(10));
    }
    FAIL() << "nothing was spilled";
  }
  // Blocks of the sequence that can be read, from disk if need be; each byte is compared.
  size_t Readable(uint64_t ticket, const std::vector<BlockName>& names, uint64_t* from_disk) {
    Renew();
    const auto found = api_->Lookup({session_, tickets_.Make(ticket), names});
    EXPECT_TRUE(found.ok()) << found.status();
    size_t readable = 0;
    for (size_t i = 0; i < names.size(); ++i) {
      if (found->blocks[i].presence != BlockPresence::kExact) continue;
      const uint64_t handle = found->blocks[i].place.handle;
      bool whole = true;
      for (const Plane plane : {Plane::kBase, Plane::kResidual}) {
        PieceStatus status = Move(ticket, handle, plane, names[i].key, false);
        if (status == PieceStatus::kOnDisk) {
          const auto reply = api_->Promote(
              {session_, Ref(ticket), {PlaneRecordHandle(handle, plane)}, absl::Seconds(10)});
          EXPECT_TRUE(reply.ok()) << reply.status();
          EXPECT_EQ(reply->outcomes[0], PromoteReply::Outcome::kResident);
          *from_disk += reply->bytes_from_disk;
          status = Move(ticket, handle, plane, names[i].key, false);
        }
        EXPECT_EQ(status, PieceStatus::kOk) << PieceStatusName(status);
        const std::vector<std::byte> bytes = TestBytes(names[i].key, plane);
        whole &= std::memcmp(memory_, bytes.data(), bytes.size()) == 0;
      }
      EXPECT_TRUE(whole) << "foreign bytes";
      readable += whole ? 1 : 0;
    }
    EXPECT_TRUE(api_->Release({session_, Ref(ticket)}).ok());
    return readable;
  }

 private:
  // A slow disk may take longer than a lease; no ticket is held between two calls.
  void Renew() { EXPECT_TRUE(api_->Renew({session_, {}}).ok()); }
  // One whole record, between `memory_` and the store.
  PieceStatus Move(uint64_t ticket, uint64_t handle, Plane plane, const BlockKey& key, bool push) {
    Piece piece;
    piece.ticket = ticket;
    piece.ticket_epoch = 1;
    piece.handle = PlaneRecordHandle(handle, plane);
    piece.length = kRecord;
    PieceStatus status = PieceStatus::kNotAttempted;
    std::vector<uint64_t> sums = TestChecksums(key, plane);
    Mutex mu;
    CondVar changed;
    bool done = false;
    const auto end = [&](const BurstResult&) {
      MutexLock lock(mu);
      done = true;
      changed.NotifyAll();
    };
    const absl::Time deadline = RealClock::Get().Now() + kPatience;
    PullItem pull;
    PushItem out;
    absl::Status started;
    if (push) {
      out.piece = piece;
      out.parts = &memory_;
      out.part_bytes = kRecord;
      out.checksums = sums.data();
      out.key_hash = key.Hash64();
      out.plane = plane;
      started = channel_
                    ->Push({absl::MakeSpan(&out, 1), absl::MakeSpan(&status, 1),
                            PushChecksums::kCompute, deadline, end})
                    .status();
    } else {
      pull.piece = piece;
      pull.parts = &memory_;
      pull.part_bytes = kRecord;
      pull.checksums = sums.data();
      pull.key_hash = key.Hash64();
      pull.plane = plane;
      started =
          channel_->Pull({absl::MakeSpan(&pull, 1), absl::MakeSpan(&status, 1), deadline, end})
              .status();
    }
    EXPECT_TRUE(started.ok()) << started;
    MutexLock lock(mu);
    while (started.ok() && !done && RealClock::Get().Now() < deadline + absl::Seconds(5)) {
      changed.WaitFor(mu, absl::Seconds(1));
    }
    EXPECT_TRUE(done);
    return status;
  }

  TicketMaker tickets_;
  std::string folder_;
  pid_t pid_ = -1;
  uint64_t boots_ = 0;
  std::unique_ptr<StoreApi> api_;
  SessionId session_;
  std::unique_ptr<Transport> transport_ = MakeShmTransport(ShmOptions());
  std::unique_ptr<Channel> channel_;
  std::byte* memory_ = static_cast<std::byte*>(std::aligned_alloc(64, kRecord));
};

TEST(SpillRestart, F7_TenTimesTheMemoryThenKillNine_PrefixesComeBackFromDisk) {
  SpillDaemon daemon;
  daemon.Start();
  if (testing::Test::HasFatalFailure()) return;
  constexpr int kSequences = 220, kBlocks = 16;  // 41 MiB in 4 MiB
  std::vector<std::vector<BlockName>> sequences;
  for (int s = 0; s < kSequences; ++s) sequences.push_back(TestNames(kBlocks, 10000 * s));
  for (int s = 0; s < kSequences; ++s) {
    const absl::Time deadline = RealClock::Get().Now() + kPatience;
    while (!daemon.Put(1 + s, sequences[s]) && RealClock::Get().Now() < deadline) {
    }
    daemon.AwaitRoom();
    if (testing::Test::HasFatalFailure()) return;
  }
  auto stats = daemon.api().Stats();
  ASSERT_TRUE(stats.ok()) << stats.status();
  EXPECT_EQ(stats->disk_failing, "");
  EXPECT_GT(stats->spilled[0], 0u);
  const uint64_t on_disk = stats->disk_records[0];
  daemon.Kill();
  daemon.Start();
  if (testing::Test::HasFatalFailure()) return;
  stats = daemon.api().Stats();
  ASSERT_TRUE(stats.ok()) << stats.status();
  EXPECT_EQ(stats->used_bytes, 0u);
  EXPECT_EQ(stats->blocks, stats->disk_records[0]);
  // What was written when it was killed may have come to the disk since.
  EXPECT_GE(stats->disk_records[0], on_disk);
  EXPECT_GT(stats->disk_records[0], uint64_t{kSequences} * kBlocks / 2);
  uint64_t from_disk = 0;
  size_t readable = 0;
  for (int s = 0; s < kSequences; ++s) {
    readable += daemon.Readable(1000 + s, sequences[s], &from_disk);
  }
  const auto end = daemon.api().Stats();
  ASSERT_TRUE(end.ok());
  EXPECT_EQ(end->promote_failures, 0u);
  EXPECT_EQ(readable, stats->disk_records[1]) << "the index equals the readable data";
  EXPECT_GT(from_disk, uint64_t{readable} * kRecord);
}

}  // namespace
}  // namespace kvt
