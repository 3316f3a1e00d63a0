// The RocksDB spill store on disks that are full, broken or foreign, and what it does with garbage.
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#include "kvstore/media/rocksdb_spill_hooks.h"
#include "tests/contract/rocksdb_medium.h"
#include "tests/support/rocksdb_faulty_fs.h"

namespace kvt {
namespace {

constexpr size_t kRecord = 180 * 1024;

class SpillFaultsTest : public testing::Test {
 protected:
  SpillFaultsTest() { options_.folder = scratch_.path() + "/spill"; }
  void Open() {
    store_.reset();
    auto store = OpenRocksDbSpillStoreOn(options_, fs_);
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = std::move(*store);
  }
  static std::vector<SpillSample> Samples(uint64_t first, uint64_t count, uint64_t version = 0) {
    std::vector<SpillSample> samples;
    for (uint64_t i = 0; i < count; ++i) samples.push_back(Sample(first + i, version, kRecord));
    return samples;
  }
  absl::Status Write(absl::Span<const SpillSample> samples) {
    return store_->Write(WritesOf(samples));
  }

  const ScratchFolder scratch_;
  RocksDbSpillOptions options_;
  std::shared_ptr<RocksDbFaultyFs> fs_ = std::make_shared<RocksDbFaultyFs>("");
  std::unique_ptr<SpillStore> store_;
};

// A fault at each write of a batch in turn; then it goes away.
void FaultAtEveryWrite(bool full, absl::StatusCode expected) {
  const ScratchFolder scratch;
  RocksDbSpillOptions options;
  options.folder = scratch.path() + "/spill";
  auto fs = std::make_shared<RocksDbFaultyFs>("");
  auto opened = OpenRocksDbSpillStoreOn(options, fs);
  ASSERT_TRUE(opened.ok()) << opened.status();
  std::unique_ptr<SpillStore> store = std::move(*opened);
  std::vector<SpillSample> kept;
  int faults = 0;
  for (int64_t n = 0;; ++n) {
    SCOPED_TRACE(n);
    std::vector<SpillSample> batch;
    for (uint64_t i = 0; i < 4; ++i)
      batch.push_back(Sample(static_cast<uint64_t>(n) * 4 + i, 0, kRecord));
    fs->FailAfter(n, full);
    const absl::Status status = store->Write(WritesOf(batch));
    fs->FailAfter(-1, full);
    if (!status.ok()) {
      ++faults;
      EXPECT_EQ(status.code(), expected) << status;
      EXPECT_TRUE(store->Usage().failing);
      EXPECT_EQ(store->Usage().failure, status);
    } else {
      EXPECT_FALSE(store->Usage().failing);
    }
    // Reads go on while the fault lasts.
    EXPECT_EQ(ReadAll(*store, kept), absl::OkStatus());
    fs->SetFull(false);
    fs->SetWriteErrors(false);
    const absl::Status again = store->Write(WritesOf(batch));
    ASSERT_EQ(again, absl::OkStatus());
    EXPECT_FALSE(store->Usage().failing);
    kept.insert(kept.end(), batch.begin(), batch.end());
    EXPECT_EQ(ReadAll(*store, kept), absl::OkStatus());
    EXPECT_EQ(store->Usage().records, kept.size());
    if (status.ok()) break;
  }
  EXPECT_GE(faults, 5) << "file, sync, folder, manifest and log are written";
  store.reset();
  opened = OpenRocksDbSpillStoreOn(options, fs);
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ(ReadAll(**opened, kept), absl::OkStatus());
  EXPECT_EQ(ScanAll(**opened).size(), kept.size());
}

TEST(SpillFaultTest, DiskFullAtEveryWrite_RefusedAndGoesOnWhenSpaceReturns) {
  FaultAtEveryWrite(/*full=*/true, absl::StatusCode::kResourceExhausted);
}

TEST(SpillFaultTest, WriteErrorAtEveryWrite_UnavailableAndGoesOnWhenItIsOver) {
  FaultAtEveryWrite(/*full=*/false, absl::StatusCode::kUnavailable);
}

TEST_F(SpillFaultsTest, ReadError_UnavailableAndNothingErased) {
  Open();
  const auto samples = Samples(0, 8);
  ASSERT_EQ(Write(samples), absl::OkStatus());
  Open();  // nothing of it in memory
  std::string bytes;
  fs_->SetReadErrors(true);
  EXPECT_EQ(ReadOne(*store_, samples[0].key, kRecord, &bytes).code(),
            absl::StatusCode::kUnavailable);
  fs_->SetReadErrors(false);
  EXPECT_EQ(ReadAll(*store_, samples), absl::OkStatus());
}

TEST_F(SpillFaultsTest, SmallDiskFilled_RefusedAndUsableAfterErase) {
  const std::string disk = scratch_.path() + "/disk";
  ASSERT_EQ(mkdir(disk.c_str(), 0700), 0);
  if (mount("tmpfs", disk.c_str(), "tmpfs", 0, "size=48m") != 0) {
    GTEST_SKIP() << "no permission to mount a small file system: " << std::strerror(errno);
  }
  options_.folder = disk + "/spill";
  options_.free_bytes_min = 0;  // up to the last byte
  options_.direct_io = false;
  Open();
  std::vector<SpillSample> kept;
  absl::Status refused;
  for (uint64_t i = 0; i < 60 && refused.ok(); ++i) {
    const auto batch = Samples(i * 10, 10);
    refused = Write(batch);
    if (refused.ok()) kept.insert(kept.end(), batch.begin(), batch.end());
  }
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_GE(kept.size(), 150u) << "the disk holds 270 records";
  EXPECT_EQ(ReadAll(*store_, kept), absl::OkStatus());
  // Another one takes the rest: now the system itself says that there is no space.
  {
    std::ofstream other(disk + "/other", std::ios::binary);
    const std::string block(64 * 1024, 'x');
    while (other.write(block.data(), static_cast<std::streamsize>(block.size())).flush()) {
    }
  }
  const SpillSample one = Sample(9'000, 0, kRecord);
  EXPECT_EQ(Write({&one, 1}).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReadAll(*store_, kept), absl::OkStatus());
  std::filesystem::remove(disk + "/other");
  std::vector<SpillKey> keys;
  for (size_t i = 0; i < 50; ++i) keys.push_back(kept[i].key);
  ASSERT_EQ(store_->Erase(keys), absl::OkStatus());
  kept.erase(kept.begin(), kept.begin() + 50);
  EXPECT_EQ(Write({&one, 1}), absl::OkStatus());
  kept.push_back(one);
  Open();
  EXPECT_EQ(ReadAll(*store_, kept), absl::OkStatus());
  EXPECT_EQ(ScanAll(*store_).size(), kept.size());
  store_.reset();
  EXPECT_EQ(umount(disk.c_str()), 0) << std::strerror(errno);
}

TEST_F(SpillFaultsTest, Rewriting_HalfOfEachSegmentReplaced_StaysWithinQuotaAndWhole) {
  options_.quota_bytes = 64u << 20;
  Open();
  // Every batch replaces every second record of the batch before: no segment dies by itself.
  std::vector<SpillSample> live(80);
  for (uint64_t round = 0; round < 40; ++round) {
    std::vector<SpillSample> batch;
    for (uint64_t i = 0; i < 40; ++i) {
      const uint64_t key = (i * 2 + round) % 80;
      live[key] = Sample(key, round, kRecord);
      batch.push_back(live[key]);
    }
    for (uint64_t i = 0; i < 10; ++i) {  // and some of the others
      const uint64_t key = (i * 7 + 3 * round) % 80;
      live[key] = Sample(key, 1'000 + round, kRecord);
      batch.push_back(live[key]);
    }
    ASSERT_EQ(Write(batch), absl::OkStatus()) << "round " << round;
    EXPECT_LE(FolderBytes(options_.folder), options_.quota_bytes) << "round " << round;
  }
  EXPECT_EQ(ReadAll(*store_, live), absl::OkStatus());
  const uint64_t folder = FolderBytes(options_.folder);
  const SpillUsage usage = store_->Usage();
  EXPECT_LT(folder, usage.disk_bytes + (1u << 20));
  EXPECT_LT(usage.disk_bytes, folder + (3u << 20));
  EXPECT_EQ(usage.records, 80u);
  Open();
  EXPECT_EQ(store_->Usage().records, 80u);
  EXPECT_EQ(store_->Usage().live_bytes, usage.live_bytes);
  EXPECT_EQ(ReadAll(*store_, live), absl::OkStatus());
}

TEST_F(SpillFaultsTest, Tidy_GarbageOverAThird_IsRewrittenWithoutAQuota) {
  Open();
  auto live = Samples(0, 1'000);  // 176 MiB
  ASSERT_EQ(Write(live), absl::OkStatus());
  // Two of three go: no segment dies.
  std::vector<SpillKey> keys;
  std::vector<SpillSample> rest;
  for (size_t i = 0; i < live.size(); ++i) {
    if (i % 3 == 0) {
      rest.push_back(live[i]);
    } else {
      keys.push_back(live[i].key);
    }
  }
  ASSERT_EQ(store_->Erase(keys), absl::OkStatus());
  const uint64_t before = store_->Usage().disk_bytes;
  EXPECT_GT(before, 170u << 20);
  for (uint64_t i = 0; i < 4; ++i) {  // each write brings some tidying
    rest.push_back(Sample(5'000 + i, 0, kRecord));
    ASSERT_EQ(Write({&rest.back(), 1}), absl::OkStatus());
  }
  EXPECT_LT(store_->Usage().disk_bytes, before - (45u << 20));
  EXPECT_EQ(ReadAll(*store_, rest), absl::OkStatus());
  Open();
  EXPECT_EQ(ReadAll(*store_, rest), absl::OkStatus());
}

TEST_F(SpillFaultsTest, Tidy_ManySmallSegments_BecomeFew) {
  options_.segments_max = 8;
  Open();
  const auto files = [&] {
    int count = 0;
    for (const auto& entry : std::filesystem::directory_iterator(options_.folder + "/db")) {
      count += entry.path().extension() == ".sst" ? 1 : 0;
    }
    return count;
  };
  std::vector<SpillSample> live;
  for (uint64_t i = 0; i < 40; ++i) {
    live.push_back(Sample(i, 0, 10'000));
    ASSERT_EQ(Write({&live.back(), 1}), absl::OkStatus());
    EXPECT_LE(files(), 10) << "after " << i;
  }
  EXPECT_EQ(ReadAll(*store_, live), absl::OkStatus());
  EXPECT_EQ(store_->Usage().records, live.size());
  Open();
  EXPECT_EQ(ReadAll(*store_, live), absl::OkStatus());
}

TEST_F(SpillFaultsTest, Open_OtherFormat_IsRefusedByName) {
  Open();
  store_.reset();
  std::ofstream(options_.folder + "/FORMAT") << "kvtide spill 7\n";
  auto store = OpenRocksDbSpillStore(options_);
  ASSERT_EQ(store.status().code(), absl::StatusCode::kFailedPrecondition) << store.status();
  EXPECT_NE(store.status().message().find("format 7, this version opens 1"), std::string::npos)
      << store.status();
  EXPECT_NE(store.status().message().find(options_.folder), std::string::npos);
  std::ofstream(options_.folder + "/FORMAT") << "something else\n";
  EXPECT_EQ(OpenRocksDbSpillStore(options_).status().code(), absl::StatusCode::kFailedPrecondition);
  std::filesystem::remove(options_.folder + "/FORMAT");
  EXPECT_EQ(OpenRocksDbSpillStore(options_).status().code(), absl::StatusCode::kFailedPrecondition)
      << "a db that is not known to be ours";
}

TEST_F(SpillFaultsTest, Open_FolderInUse_IsUnavailable) {
  Open();
  EXPECT_EQ(OpenRocksDbSpillStore(options_).status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(SpillFaultsTest, Open_BadOptions_NamesThem) {
  options_.quota_bytes = 1;
  EXPECT_EQ(OpenRocksDbSpillStore(options_).status().code(), absl::StatusCode::kInvalidArgument);
  options_.quota_bytes = 0;
  options_.folder = "";
  EXPECT_EQ(OpenRocksDbSpillStore(options_).status().code(), absl::StatusCode::kInvalidArgument);
  options_.folder = "/proc/nowhere";
  EXPECT_EQ(OpenRocksDbSpillStore(options_).status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace kvt
