// The SpillStore contract (kvstore/media/spill_store.h) over every implementation.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <thread>

#include "tests/contract/rocksdb_medium.h"
#include "tests/contract/spill_fixture.h"
#include "tests/support/memory_spill_store.h"

namespace kvt {
namespace {

constexpr size_t kRecord = 180 * 1024;  // a plane of SmolLM2-135M

class MemoryMedium final : public SpillMedium {
 public:
  absl::StatusOr<std::unique_ptr<SpillStore>> Open(uint64_t quota_bytes) override {
    medium_->SetQuota(quota_bytes);
    return std::make_unique<MemorySpillStore>(medium_);
  }
  void Damage(const SpillKey& key, const std::string& bytes) override {
    ASSERT_FALSE(bytes.empty());
    ASSERT_TRUE(medium_->Damage(key));
  }
  bool Contains(const std::string& pattern) override { return medium_->ContainsBytes(pattern); }

 private:
  const std::shared_ptr<MemorySpillMedium> medium_ = std::make_shared<MemorySpillMedium>();
};

class SpillStoreTest : public testing::TestWithParam<SpillMediumKind> {
 protected:
  void SetUp() override { Open(); }
  void Open(uint64_t quota_bytes = 0) {
    store_.reset();
    auto store = medium_->Open(quota_bytes);
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = std::move(*store);
  }
  std::vector<SpillSample> Samples(uint64_t first, uint64_t count, size_t bytes,
                                   uint64_t version = 0) {
    std::vector<SpillSample> samples;
    for (uint64_t i = 0; i < count; ++i) samples.push_back(Sample(first + i, version, bytes));
    return samples;
  }
  absl::Status Write(absl::Span<const SpillSample> samples) {
    return store_->Write(WritesOf(samples));
  }

  std::unique_ptr<SpillMedium> medium_ = GetParam().make();
  std::unique_ptr<SpillStore> store_;
};

TEST_P(SpillStoreTest, Write_AllPartsAndSizes_ReadBackEqualAfterReopening) {
  std::vector<SpillSample> samples;
  uint64_t number = 0;
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{100}, size_t{4096}, size_t{10'000},
                             kRecord, size_t{3} << 20}) {
    for (const SpillPart part : {SpillPart::kBase, SpillPart::kResidual, SpillPart::kDigest}) {
      samples.push_back(Sample(number, 0, bytes, part));
    }
    ++number;
  }
  ASSERT_TRUE(Write(samples).ok());
  EXPECT_EQ(ReadAll(*store_, samples), absl::OkStatus());
  Open();
  EXPECT_EQ(ReadAll(*store_, samples), absl::OkStatus());
}

TEST_P(SpillStoreTest, Write_SameKeyAgain_IsReplaced) {
  for (uint64_t version = 0; version < 3; ++version) {
    const SpillSample sample = Sample(7, version, 20'000 + version * 1'000);
    ASSERT_TRUE(Write({&sample, 1}).ok());
    EXPECT_EQ(ReadAll(*store_, {&sample, 1}), absl::OkStatus());
    const auto all = ScanAll(*store_);
    ASSERT_EQ(all.size(), 1u);
    EXPECT_EQ(all[0].meta, sample.meta);
    EXPECT_EQ(all[0].bytes, sample.bytes.size());
    EXPECT_EQ(store_->Usage().records, 1u);
  }
  // Within one batch the last one counts.
  const SpillSample twice[] = {Sample(7, 10, 5'000), Sample(7, 11, 6'000)};
  ASSERT_TRUE(Write(twice).ok());
  EXPECT_EQ(ReadAll(*store_, {&twice[1], 1}), absl::OkStatus());
  EXPECT_EQ(store_->Usage().records, 1u);
}

TEST_P(SpillStoreTest, Erase_OnePart_OnlyThatPartIsGone) {
  const SpillSample samples[] = {Sample(1, 0, kRecord),
                                 Sample(1, 0, kRecord, SpillPart::kResidual)};
  ASSERT_TRUE(Write(samples).ok());
  const SpillKey keys[] = {samples[1].key, SampleKey(999)};
  ASSERT_TRUE(store_->Erase(keys).ok());
  std::string bytes;
  EXPECT_EQ(ReadOne(*store_, samples[1].key, kRecord, &bytes).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReadAll(*store_, {&samples[0], 1}), absl::OkStatus());
  Open();
  EXPECT_EQ(ReadOne(*store_, samples[1].key, kRecord, &bytes).code(), absl::StatusCode::kNotFound);
  const auto all = ScanAll(*store_);
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all[0].key, samples[0].key);
}

TEST_P(SpillStoreTest, Read_UnknownAmongKnown_OnlyThatOneIsNotFound) {
  const auto samples = Samples(0, 40, kRecord);
  ASSERT_TRUE(Write(samples).ok());
  std::vector<std::string> buffers(80, std::string(kRecord, '\0'));
  std::vector<SpillRead> reads;
  for (uint64_t i = 0; i < 80; ++i) {  // in no order: every second one is unknown
    const uint64_t number = (i * 37) % 80;
    reads.push_back({SampleKey(number),
                     absl::MakeSpan(reinterpret_cast<std::byte*>(buffers[i].data()), kRecord)});
  }
  std::vector<absl::Status> statuses(80, absl::UnknownError("not set"));
  store_->Read(reads, absl::MakeSpan(statuses));
  for (uint64_t i = 0; i < 80; ++i) {
    const uint64_t number = (i * 37) % 80;
    if (number < 40) {
      EXPECT_EQ(statuses[i], absl::OkStatus());
      EXPECT_EQ(buffers[i], samples[number].bytes);
    } else {
      EXPECT_EQ(statuses[i].code(), absl::StatusCode::kNotFound);
    }
  }
  store_->Read({}, {});
}

TEST_P(SpillStoreTest, Scan_AfterReplaceAndErase_GivesExactlyTheLiveRecords) {
  std::map<uint64_t, SpillSample> live;
  for (uint64_t round = 0; round < 4; ++round) {
    std::vector<SpillSample> batch;
    for (uint64_t i = 0; i < 60; ++i) {
      const uint64_t number = (i * 7 + round * 13) % 100;
      batch.push_back(Sample(number, round, 2'000 + 100 * number));
      live[number] = batch.back();
    }
    ASSERT_TRUE(Write(batch).ok());
    std::vector<SpillKey> gone;
    for (uint64_t number = round; number < 100; number += 9) {
      gone.push_back(SampleKey(number));
      live.erase(number);
    }
    ASSERT_TRUE(store_->Erase(gone).ok());
    if (round == 1) Open();
    if (round == 2) {
      ASSERT_TRUE(store_->Reclaim().ok());
    }
    std::map<std::string, SpillScanned> scanned;
    for (const auto& record : ScanAll(*store_)) scanned[record.meta] = record;
    ASSERT_EQ(scanned.size(), live.size()) << "round " << round;
    for (const auto& [number, sample] : live) {
      ASSERT_TRUE(scanned.contains(sample.meta));
      EXPECT_EQ(scanned[sample.meta].key, sample.key);
      EXPECT_EQ(scanned[sample.meta].bytes, sample.bytes.size());
    }
  }
  // False stops it.
  int visits = 0;
  ASSERT_TRUE(
      store_->Scan([&](const SpillKey&, absl::string_view, uint64_t) { return ++visits < 3; })
          .ok());
  EXPECT_EQ(visits, 3);
}

TEST_P(SpillStoreTest, Write_BatchLargerThanTheWriteBuffer_IsAllThere) {
  const auto samples = Samples(0, 400, kRecord);  // 70 MiB in one call
  ASSERT_TRUE(Write(samples).ok());
  EXPECT_EQ(ReadAll(*store_, samples), absl::OkStatus());
  Open();
  EXPECT_EQ(ReadAll(*store_, samples), absl::OkStatus());
  EXPECT_EQ(ScanAll(*store_).size(), samples.size());
}

TEST_P(SpillStoreTest, Write_OverTheQuota_IsRefusedAndNothingIsLost) {
  constexpr uint64_t kQuota = 24u << 20;
  Open(kQuota);
  std::vector<SpillSample> kept;
  absl::Status refused;
  for (uint64_t i = 0; i < 60 && refused.ok(); ++i) {  // 10 records of 180 KiB each: at most 13 fit
    const auto batch = Samples(i * 10, 10, kRecord);
    refused = Write(batch);
    if (refused.ok()) kept.insert(kept.end(), batch.begin(), batch.end());
  }
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_GE(kept.size(), 40u) << "the quota holds 136 records";
  EXPECT_EQ(ReadAll(*store_, kept), absl::OkStatus());
  const SpillUsage usage = store_->Usage();
  EXPECT_EQ(usage.quota_bytes, kQuota);
  EXPECT_LE(usage.disk_bytes, kQuota);
  EXPECT_EQ(usage.records, kept.size());
  EXPECT_TRUE(usage.failing);
  EXPECT_EQ(usage.failure.code(), absl::StatusCode::kResourceExhausted);
  // Erased and reclaimed space can be used again.
  std::vector<SpillKey> keys;
  for (const SpillSample& sample : kept) keys.push_back(sample.key);
  ASSERT_TRUE(store_->Erase(keys).ok());
  ASSERT_TRUE(store_->Reclaim().ok());
  const auto batch = Samples(5'000, 10, kRecord);
  EXPECT_EQ(Write(batch), absl::OkStatus());
  EXPECT_FALSE(store_->Usage().failing);
  EXPECT_EQ(ReadAll(*store_, batch), absl::OkStatus());
}

TEST_P(SpillStoreTest, Write_ReplacingForLongUnderAQuota_NeedsNoReclaim) {
  Open(64u << 20);
  std::vector<SpillSample> samples;
  for (uint64_t version = 0; version < 30; ++version) {  // 210 MiB through 7 MiB of live records
    samples = Samples(0, 40, kRecord, version);
    ASSERT_EQ(Write(samples), absl::OkStatus()) << "version " << version;
    EXPECT_LE(store_->Usage().disk_bytes, 64u << 20);
  }
  EXPECT_EQ(ReadAll(*store_, samples), absl::OkStatus());
}

TEST_P(SpillStoreTest, Read_DamagedRecord_IsDataLossAndErased) {
  const auto samples = Samples(0, 8, kRecord);
  ASSERT_TRUE(Write(samples).ok());
  store_.reset();
  medium_->Damage(samples[3].key, samples[3].bytes);
  Open();
  std::string bytes;
  EXPECT_EQ(ReadOne(*store_, samples[3].key, kRecord, &bytes).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(ReadOne(*store_, samples[3].key, kRecord, &bytes).code(), absl::StatusCode::kNotFound);
  for (size_t i = 0; i < samples.size(); ++i) {
    if (i != 3) {
      EXPECT_EQ(ReadAll(*store_, {&samples[i], 1}), absl::OkStatus()) << i;
    }
  }
  EXPECT_EQ(ScanAll(*store_).size(), samples.size() - 1);
  EXPECT_EQ(store_->Usage().records, samples.size() - 1);
  // The key can be written again.
  ASSERT_TRUE(Write({&samples[3], 1}).ok());
  EXPECT_EQ(ReadAll(*store_, samples), absl::OkStatus());
}

TEST_P(SpillStoreTest, Read_DamagedAmongSmallNeighbours_OnlyThatOneIsDataLoss) {
  constexpr size_t kSmall = 10'000;
  const auto samples = Samples(0, 32, kSmall);
  ASSERT_TRUE(Write(samples).ok());
  store_.reset();
  medium_->Damage(samples[7].key, samples[7].bytes);
  Open();
  std::vector<std::string> buffers(samples.size(), std::string(kSmall, '\0'));
  std::vector<SpillRead> reads;
  for (size_t i = 0; i < samples.size(); ++i) {
    reads.push_back(
        {samples[i].key, absl::MakeSpan(reinterpret_cast<std::byte*>(buffers[i].data()), kSmall)});
  }
  std::vector<absl::Status> statuses(samples.size(), absl::UnknownError("not set"));
  store_->Read(reads, absl::MakeSpan(statuses));
  for (size_t i = 0; i < samples.size(); ++i) {
    if (i == 7) {
      EXPECT_EQ(statuses[i].code(), absl::StatusCode::kDataLoss) << statuses[i];
    } else {
      EXPECT_EQ(statuses[i], absl::OkStatus()) << i;
      EXPECT_EQ(buffers[i], samples[i].bytes) << i;
    }
  }
  EXPECT_EQ(ScanAll(*store_).size(), samples.size() - 1);
}

TEST_P(SpillStoreTest, Read_OtherSizeThanWritten_IsDataLossAndErased) {
  const auto samples = Samples(0, 2, kRecord);
  ASSERT_TRUE(Write(samples).ok());
  std::string bytes;
  EXPECT_EQ(ReadOne(*store_, samples[0].key, kRecord - 64, &bytes).code(),
            absl::StatusCode::kDataLoss);
  EXPECT_EQ(ReadOne(*store_, samples[0].key, kRecord, &bytes).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReadAll(*store_, {&samples[1], 1}), absl::OkStatus());
}

TEST_P(SpillStoreTest, Reclaim_AfterErase_BytesAreNotOnTheMedium) {
  auto samples = Samples(0, 32, kRecord);
  const std::string secret = "purged: the quick brown fox jumps over the lazy dog";
  samples[5].bytes.replace(1'000, secret.size(), secret);
  samples[6].meta += secret;
  ASSERT_TRUE(Write(samples).ok());
  store_.reset();
  ASSERT_TRUE(medium_->Contains(secret)) << "this test could not fail";
  Open();
  const SpillKey keys[] = {samples[5].key, samples[6].key};
  ASSERT_TRUE(store_->Erase(keys).ok());
  ASSERT_TRUE(store_->Reclaim().ok());
  const SpillUsage usage = store_->Usage();
  EXPECT_GE(usage.disk_bytes, usage.live_bytes);
  EXPECT_LT(usage.disk_bytes - usage.live_bytes, 2u << 20);
  store_.reset();
  EXPECT_FALSE(medium_->Contains(secret));
  Open();
  samples.erase(samples.begin() + 5, samples.begin() + 7);
  EXPECT_EQ(ReadAll(*store_, samples), absl::OkStatus());
}

TEST_P(SpillStoreTest, Usage_ThroughWriteReplaceErase_AddsUp) {
  const auto live_of = [](absl::Span<const SpillSample> samples) {
    uint64_t bytes = 0;
    for (const SpillSample& sample : samples) bytes += sample.bytes.size() + sample.meta.size();
    return bytes;
  };
  EXPECT_EQ(store_->Usage().records, 0u);
  EXPECT_EQ(store_->Usage().live_bytes, 0u);
  auto samples = Samples(0, 20, kRecord);
  ASSERT_TRUE(Write(samples).ok());
  const auto check = [&](const char* when) {
    const SpillUsage usage = store_->Usage();
    EXPECT_EQ(usage.records, samples.size()) << when;
    EXPECT_GE(usage.live_bytes, live_of(samples)) << when;
    EXPECT_LE(usage.live_bytes, live_of(samples) + samples.size() * 128) << when;
    EXPECT_GE(usage.disk_bytes, usage.live_bytes) << when;
    EXPECT_GT(usage.free_bytes, 0u) << when;
    EXPECT_FALSE(usage.failing) << when;
  };
  check("written");
  samples[4] = Sample(4, 9, 50'000);
  ASSERT_TRUE(Write({&samples[4], 1}).ok());
  check("replaced");
  ASSERT_TRUE(store_->Erase({&samples[19].key, 1}).ok());
  ASSERT_TRUE(store_->Erase({&samples[19].key, 1}).ok());
  samples.pop_back();
  check("erased");
  Open();
  (void)ScanAll(*store_);
  check("opened again");
}

TEST_P(SpillStoreTest, ReadersAndWriters_AtOnce_SeeOneWholeVersionOrNone) {
  constexpr uint64_t kKeys = 24;
  constexpr uint64_t kVersions = 12;
  constexpr size_t kBytes = 64 * 1024;
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> seen{0};
  std::vector<std::thread> threads;
  for (int writer = 0; writer < 2; ++writer) {
    threads.emplace_back([&, writer] {
      for (uint64_t version = 0; version < kVersions; ++version) {
        std::vector<SpillSample> batch;
        for (uint64_t key = writer; key < kKeys; key += 2)
          batch.push_back(Sample(key, version, kBytes));
        EXPECT_TRUE(store_->Write(WritesOf(batch)).ok());
        const SpillKey gone = SampleKey((version * 2 + writer) % kKeys);
        EXPECT_TRUE(store_->Erase({&gone, 1}).ok());
      }
    });
  }
  for (int reader = 0; reader < 2; ++reader) {
    threads.emplace_back([&, reader] {
      std::vector<std::string> buffers(kKeys, std::string(kBytes, '\0'));
      while (!stop.load()) {
        std::vector<SpillRead> reads;
        for (uint64_t key = 0; key < kKeys; ++key) {
          reads.push_back(
              {SampleKey(key),
               absl::MakeSpan(reinterpret_cast<std::byte*>(buffers[key].data()), kBytes)});
        }
        std::vector<absl::Status> statuses(kKeys);
        store_->Read(reads, absl::MakeSpan(statuses));
        for (uint64_t key = 0; key < kKeys; ++key) {
          if (!statuses[key].ok()) {
            EXPECT_EQ(statuses[key].code(), absl::StatusCode::kNotFound) << statuses[key];
            continue;
          }
          bool whole = false;
          for (uint64_t version = 0; version < kVersions && !whole; ++version) {
            whole = buffers[key] == Sample(key, version, kBytes).bytes;
          }
          EXPECT_TRUE(whole) << "key " << key;
          ++seen;
        }
        if (reader == 0) (void)ScanAll(*store_);
        (void)store_->Usage();
      }
    });
  }
  threads[0].join();
  threads[1].join();
  stop = true;
  threads[2].join();
  threads[3].join();
  EXPECT_GT(seen.load(), 0u);
}

INSTANTIATE_TEST_SUITE_P(
    All, SpillStoreTest,
    testing::Values(
        SpillMediumKind{"Memory", [] { return std::make_unique<MemoryMedium>(); }},
        SpillMediumKind{"RocksDbDirect", [] { return std::make_unique<RocksDbMedium>(true); }},
        SpillMediumKind{"RocksDbBuffered", [] { return std::make_unique<RocksDbMedium>(false); }}),
    [](const testing::TestParamInfo<SpillMediumKind>& info) { return info.param.name; });

// The faults of the store in memory are what the node's crash tests rest on.
TEST(MemorySpillStoreTest, CrashAtEveryStep_AcknowledgedRecordsStay) {
  for (const Unsynced unsynced : {Unsynced::kLost, Unsynced::kKept, Unsynced::kTorn}) {
    uint64_t steps = 0;
    for (;; ++steps) {
      auto medium = std::make_shared<MemorySpillMedium>();
      medium->CrashAtStep(steps, unsynced);
      MemorySpillStore store(medium);
      size_t acknowledged = 0;
      for (uint64_t batch = 0; batch < 2; ++batch) {
        std::vector<SpillSample> samples;
        for (uint64_t i = 0; i < 3; ++i) samples.push_back(Sample(batch * 3 + i, 0, 1'000));
        const absl::Status status = store.Write(WritesOf(samples));
        if (!status.ok()) break;
        acknowledged += 3;
      }
      if (!medium->crashed()) break;
      std::string bytes;
      EXPECT_EQ(ReadOne(store, SampleKey(0), 1'000, &bytes).code(), absl::StatusCode::kUnavailable);
      MemorySpillStore again(medium);
      std::vector<bool> scanned(6);
      for (const auto& record : ScanAll(again)) {
        uint64_t number = 0;
        while (!(SampleKey(number) == record.key)) ++number;
        scanned[number] = true;
        const SpillSample sample = Sample(number, 0, 1'000);
        EXPECT_EQ(ReadAll(again, {&sample, 1}), absl::OkStatus());
      }
      for (size_t i = 0; i < acknowledged; ++i) EXPECT_TRUE(scanned[i]) << "step " << steps;
    }
    EXPECT_EQ(steps, 10u);  // (3 records, sync, acknowledgement) x 2
  }
}

TEST(MemorySpillStoreTest, OrderedFaults_HitTheRecordTheyName) {
  auto medium = std::make_shared<MemorySpillMedium>();
  MemorySpillStore store(medium);
  std::vector<SpillSample> samples;
  for (uint64_t i = 0; i < 4; ++i) samples.push_back(Sample(i, 0, 1'000));
  medium->FailWrite(2, absl::UnavailableError("no disk"));
  EXPECT_EQ(store.Write(WritesOf(samples)).code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(store.Usage().failing);
  EXPECT_TRUE(medium->Holds(samples[1].key));
  EXPECT_FALSE(medium->Holds(samples[2].key));
  medium->TearWrite(1);
  EXPECT_EQ(store.Write(WritesOf(samples)), absl::OkStatus());
  std::string bytes;
  EXPECT_EQ(ReadOne(store, samples[1].key, 1'000, &bytes).code(), absl::StatusCode::kDataLoss);
  medium->SetFreeBytes(100);
  EXPECT_EQ(store.Write(WritesOf(samples)).code(), absl::StatusCode::kResourceExhausted);
}

TEST(MemorySpillStoreTest, Delay_UntilSetToZero_HoldsCalls) {
  auto medium = std::make_shared<MemorySpillMedium>();
  MemorySpillStore store(medium);
  medium->SetDelay(absl::InfiniteDuration());
  std::thread writer([&] {
    const SpillSample sample = Sample(1, 0, 1'000);
    EXPECT_EQ(store.Write({{sample.Write()}}), absl::OkStatus());
  });
  while (medium->waiting() == 0) std::this_thread::yield();
  EXPECT_FALSE(medium->Holds(SampleKey(1)));
  medium->SetDelay(absl::ZeroDuration());
  writer.join();
  EXPECT_TRUE(medium->Holds(SampleKey(1)));
}

}  // namespace
}  // namespace kvt
