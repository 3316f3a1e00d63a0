// write_vs_disk and read_vs_disk: sustained write-behind and read-back in batches, as a node does
// them, beside a plain sequential O_DIRECT writer and reader of as many bytes; interleaved, ratios
// of the same round.
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/base/random.h"
#include "kernels/base/units.h"
#include "kvstore/media/rocksdb_spill_store.h"
#include "tests/bench/spill_bench.h"

namespace kvt {
namespace {

constexpr size_t kPlainBytes = 4 * kMiB;
constexpr size_t kAlign = 4096;
constexpr size_t kReadBatch = 64;  // records of one Read: a prefix

struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<std::byte[], Free>;

Buffer MakeBuffer(size_t bytes) {
  auto* p = static_cast<std::byte*>(std::aligned_alloc(kAlign, RoundUp(bytes, kAlign)));
  KVT_CHECK(p != nullptr, "no memory for ", bytes);
  for (size_t at = 0; at + 8 <= bytes; at += 8) {
    const uint64_t word = Mix64(at);
    std::memcpy(p + at, &word, 8);
  }
  return Buffer(p);
}

double Seconds(absl::Time since) { return absl::ToDoubleSeconds(RealClock::Get().Now() - since); }

double CpuSeconds() {
  rusage usage{};
  KVT_CHECK(getrusage(RUSAGE_SELF, &usage) == 0);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

SpillKey KeyOf(uint64_t number) {
  SpillKey key;
  const uint64_t words[2] = {Mix64(number), number};
  std::memcpy(key.block.data(), words, sizeof words);
  return key;
}

class DiskTopic {
 public:
  explicit DiskTopic(const SpillBenchOptions& options)
      : options_(options),
        record_(options.record_bytes),
        records_(options.set_mib * kMiB / record_),
        batch_(std::max<uint64_t>(1, options.batch_mib * kMiB / record_)) {
    for (int i = 0; i < options.callers; ++i) {
      buffers_.push_back(MakeBuffer(std::max<uint64_t>(batch_, kReadBatch) * record_));
    }
  }

  [[nodiscard]] uint64_t bytes() const { return records_ * record_; }

  void Open() {
    const std::string folder = options_.folder + "/store";
    std::filesystem::remove_all(folder);
    RocksDbSpillOptions options;
    options.folder = folder;
    options.io_threads = options_.io_threads;
    options.write_buffer_bytes = options_.write_buffer_kib * kKiB;
    auto store = OpenRocksDbSpillStore(options);
    KVT_CHECK(store.ok(), store.status().ToString());
    store_ = std::move(*store);
  }
  void Close() { store_.reset(); }

  // Each thread takes the next batch.
  double Write() {
    return Timed([this](size_t caller, uint64_t n) { return WriteBatch(caller, n); },
                 CeilDiv(records_, batch_));
  }
  // Prefixes in random order.
  double Read(uint64_t seed) {
    std::vector<uint64_t> prefixes(CeilDiv(records_, kReadBatch));
    for (size_t i = 0; i < prefixes.size(); ++i) prefixes[i] = i * kReadBatch;
    Random random(seed);
    for (size_t i = prefixes.size(); i > 1; --i)
      std::swap(prefixes[i - 1], prefixes[random.Below(i)]);
    return Timed([&](size_t caller, uint64_t n) { ReadPrefix(caller, prefixes[n]); },
                 prefixes.size());
  }

 private:
  template <typename Work>
  double Timed(Work work, uint64_t count) {
    std::atomic<uint64_t> next{0};
    std::vector<std::thread> threads;
    const absl::Time start = RealClock::Get().Now();
    for (size_t caller = 0; caller < buffers_.size(); ++caller) {
      threads.emplace_back([&, caller] {
        for (uint64_t n = next++; n < count; n = next++) work(caller, n);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return static_cast<double>(bytes()) / Seconds(start);
  }

  void WriteBatch(size_t caller, uint64_t n) {
    std::vector<SpillWrite> writes;
    const std::string meta(64, 'm');
    for (uint64_t i = n * batch_; i < std::min(records_, (n + 1) * batch_); ++i) {
      // The number makes each record its own.
      std::byte* bytes = buffers_[caller].get() + (i - n * batch_) * record_;
      std::memcpy(bytes, &i, sizeof i);
      writes.push_back({KeyOf(i), meta, absl::MakeConstSpan(bytes, record_)});
    }
    const absl::Status status = store_->Write(writes);
    KVT_CHECK(status.ok(), status.ToString());
  }

  void ReadPrefix(size_t caller, uint64_t at) {
    std::vector<SpillRead> reads;
    for (uint64_t i = at; i < std::min(records_, at + kReadBatch); ++i) {
      reads.push_back(
          {KeyOf(i), absl::MakeSpan(buffers_[caller].get() + (i - at) * record_, record_)});
    }
    std::vector<absl::Status> statuses(reads.size());
    store_->Read(reads, absl::MakeSpan(statuses));
    for (size_t i = 0; i < reads.size(); ++i) {
      uint64_t number = 0;
      std::memcpy(&number, reads[i].bytes.data(), sizeof number);
      KVT_CHECK(statuses[i].ok() && number == at + i, statuses[i].ToString());
    }
  }

  const SpillBenchOptions options_;
  const uint64_t record_;
  const uint64_t records_;
  const uint64_t batch_;
  std::vector<Buffer> buffers_;  // of each caller
  std::unique_ptr<SpillStore> store_;
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

double PlainWrite(const std::string& folder, uint64_t bytes) {
  const std::string path = folder + "/plain";
  const Buffer buffer = MakeBuffer(kPlainBytes);
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_DIRECT | O_CLOEXEC, 0600);
  KVT_CHECK(fd >= 0, "no O_DIRECT in ", folder);
  const absl::Time start = RealClock::Get().Now();
  for (uint64_t at = 0; at < bytes; at += kPlainBytes) {
    KVT_CHECK(pwrite(fd, buffer.get(), kPlainBytes, static_cast<off_t>(at)) ==
              static_cast<ssize_t>(kPlainBytes));
  }
  KVT_CHECK(fdatasync(fd) == 0);
  const double seconds = Seconds(start);
  close(fd);
  return static_cast<double>(RoundUp(bytes, kPlainBytes)) / seconds;
}

double PlainRead(const std::string& folder, uint64_t bytes) {
  const std::string path = folder + "/plain";
  const Buffer buffer = MakeBuffer(kPlainBytes);
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
  KVT_CHECK(fd >= 0, path);
  const absl::Time start = RealClock::Get().Now();
  for (uint64_t at = 0; at < bytes; at += kPlainBytes) {
    KVT_CHECK(pread(fd, buffer.get(), kPlainBytes, static_cast<off_t>(at)) ==
              static_cast<ssize_t>(kPlainBytes));
  }
  const double seconds = Seconds(start);
  close(fd);
  unlink(path.c_str());
  return static_cast<double>(RoundUp(bytes, kPlainBytes)) / seconds;
}

void RunSpillDisk(const SpillBenchOptions& options, std::vector<BenchRow>* rows) {
  DiskTopic topic(options);
  std::vector<double> write_ratios;
  std::vector<double> read_ratios;
  std::printf("records of %lu KiB, batches of %lu MiB; MB/s\n", options.record_bytes / 1024,
              options.batch_mib);
  std::printf(
      "round   disk write  store write  ratio   disk read  store read  ratio   CPU s/GB write, "
      "read\n");
  const double gb = static_cast<double>(topic.bytes()) / 1e9;
  for (int round = 0; round < options.rounds; ++round) {
    const double disk_write = PlainWrite(options.folder, topic.bytes());
    topic.Open();
    const double cpu0 = CpuSeconds();
    const double store_write = topic.Write();
    const double cpu1 = CpuSeconds();
    const double disk_read = PlainRead(options.folder, topic.bytes());
    const double cpu2 = CpuSeconds();
    const double store_read = topic.Read(static_cast<uint64_t>(round));
    const double cpu3 = CpuSeconds();
    topic.Close();
    write_ratios.push_back(store_write / disk_write);
    read_ratios.push_back(store_read / disk_read);
    std::printf("%5d %12.0f %12.0f %6.2f %11.0f %11.0f %6.2f   %.2f, %.2f\n", round,
                disk_write / 1e6, store_write / 1e6, write_ratios.back(), disk_read / 1e6,
                store_read / 1e6, read_ratios.back(), (cpu1 - cpu0) / gb, (cpu3 - cpu2) / gb);
    std::fflush(stdout);
  }
  rows->push_back({"write_vs_disk", Median(write_ratios), "ratio"});
  rows->push_back({"read_vs_disk", Median(read_ratios), "ratio"});
}

}  // namespace kvt
