// The process that spill_crash_test kills: opens the spill store and writes, replaces, erases and
// reclaims until it is killed.
//
//   spill_crash_writer FOLDER JOURNAL LOG SEED VERSION LYING
#include <unistd.h>

#include <cstdlib>
#include <thread>

#include "kernels/base/check.h"
#include "kernels/base/random.h"
#include "kvstore/media/rocksdb_spill_hooks.h"
#include "tests/contract/spill_crash_log.h"
#include "tests/contract/spill_fixture.h"
#include "tests/support/rocksdb_faulty_fs.h"

namespace kvt {
namespace {

constexpr int kWriters = 2;

// Keys of one remainder, so that what a key holds follows from one writer's order.
void Write(SpillStore& store, CrashLogWriter& log, int writer, uint64_t seed, uint64_t version) {
  Random random(Mix64(seed * kWriters + static_cast<uint64_t>(writer)));
  for (;;) {
    const uint64_t what = random.Below(20);
    std::map<uint64_t, CrashState> states;
    std::vector<SpillSample> samples;
    std::vector<SpillKey> keys;
    for (uint64_t n = 1 + random.Below(24); n > 0; --n) {
      const uint64_t key =
          random.Below(kCrashKeys / kWriters) * kWriters + static_cast<uint64_t>(writer);
      if (states.contains(key)) continue;
      if (what < 3) {
        states[key] = {};
        keys.push_back(SampleKey(key));
      } else {
        states[key] = {++version, CrashBytesOf(key)};
        samples.push_back(Sample(key, version, states[key].bytes));
      }
    }
    log.Intend(states);
    const absl::Status status = what < 3 ? store.Erase(keys) : store.Write(WritesOf(samples));
    // Refused for want of room is no failure; all else is.
    KVT_CHECK(status.ok() || absl::IsResourceExhausted(status), status.ToString());
    if (status.ok()) log.Acknowledge(states);
    if (what == 19) {
      const absl::Status reclaimed = store.Reclaim();
      KVT_CHECK(reclaimed.ok(), reclaimed.ToString());
    }
  }
}

// Whatever is there is whole.
void Read(SpillStore& store, uint64_t seed) {
  Random random(seed);
  std::string bytes;
  for (;;) {
    const uint64_t key = random.Below(kCrashKeys);
    const absl::Status status = ReadOne(store, SampleKey(key), CrashBytesOf(key), &bytes);
    KVT_CHECK(status.ok() || absl::IsNotFound(status), status.ToString());
    (void)store.Usage();
  }
}

}  // namespace
}  // namespace kvt

int main(int argc, char** argv) {
  KVT_CHECK(argc == 7);
  kvt::RocksDbSpillOptions options;
  options.folder = argv[1];
  options.quota_bytes = kvt::kCrashQuotaBytes;
  auto fs = std::make_shared<kvt::RocksDbFaultyFs>(argv[2]);
  fs->SetLying(std::atoi(argv[6]) != 0);
  kvt::CrashLogWriter log(argv[3]);
  const uint64_t seed = std::strtoull(argv[4], nullptr, 10);
  const uint64_t version = std::strtoull(argv[5], nullptr, 10);
  auto store = kvt::OpenRocksDbSpillStoreOn(options, fs);
  KVT_CHECK(store.ok(), store.status().ToString());
  KVT_CHECK(write(STDOUT_FILENO, ".", 1) == 1);
  std::vector<std::thread> threads;
  for (int writer = 0; writer < kvt::kWriters; ++writer) {
    threads.emplace_back([&, writer] {
      kvt::Write(**store, log, writer, seed, version + static_cast<uint64_t>(writer) * 1'000'000);
    });
  }
  kvt::Read(**store, seed);
}
