// The layouts that docs/decisions/0005 chose from, on RocksDB itself with the same records and
// batches: plain SST files and blob files, through memtables with and without a log, and SST files
// of ascending sequence that are ingested. Each in its own process, so that none profits from
// another's memory.
#include <rocksdb/db.h>
#include <rocksdb/sst_file_writer.h>
#include <rocksdb/table.h>
#include <rocksdb/write_batch.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/base/random.h"
#include "kernels/base/units.h"
#include "tests/bench/spill_bench.h"

namespace kvt {
namespace {

constexpr int kWriters = 2;
constexpr int kReaders = 4;
constexpr uint64_t kLogBatchBytes = 8 * kMiB;

struct Layout {
  const char* name;
  bool blobs;
  bool log;
  bool ingest;
  bool direct;
};
constexpr Layout kLayouts[] = {
    {"SST, log synced", false, true, false, true},
    {"SST, no log, flush", false, false, false, true},
    {"blobs, log synced", true, true, false, true},
    {"blobs, no log, flush", true, false, false, true},
    {"ingested SST", false, false, true, true},
    {"ingested SST, buffered", false, false, true, false},
};

void Ok(const rocksdb::Status& status) { KVT_CHECK(status.ok(), status.ToString()); }

std::string NumberKey(uint64_t number) {
  const uint64_t big = __builtin_bswap64(number);
  return std::string(reinterpret_cast<const char*>(&big), sizeof big);
}

uint64_t DiskBytesWritten() {
  std::ifstream in("/proc/self/io");
  std::string name;
  uint64_t value = 0;
  while (in >> name >> value) {
    if (name == "write_bytes:") return value;
  }
  return 0;
}

class LayoutRun {
 public:
  LayoutRun(const SpillBenchOptions& options, const Layout& layout)
      : layout_(layout),
        record_(options.record_bytes),
        records_(options.set_mib * kMiB / record_),
        batch_(options.batch_mib * kMiB / record_),
        folder_(options.folder + "/layout"),
        source_(record_ + 8 * kMiB, 'x') {
    for (size_t at = 0; at + 8 <= source_.size(); at += 8) {
      const uint64_t word = Mix64(at);
      std::memcpy(source_.data() + at, &word, 8);
    }
    options_.create_if_missing = options_.create_missing_column_families = true;
    options_.compression = rocksdb::kNoCompression;
    options_.use_direct_reads = options_.use_direct_io_for_flush_and_compaction = layout.direct;
    options_.max_background_jobs = 4;
    options_.write_buffer_size = layout.log ? 64 * kMiB : 2 * options.batch_mib * kMiB;
    options_.atomic_flush = !layout.log && !layout.ingest;
    rocksdb::BlockBasedTableOptions table;
    table.checksum = rocksdb::kXXH3;
    options_.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
    rocksdb::ColumnFamilyOptions values(options_);
    values.enable_blob_files = values.enable_blob_garbage_collection = layout.blobs;
    values.disable_auto_compactions = layout.ingest;
    writer_options_ = rocksdb::Options(options_, values);
    std::filesystem::remove_all(folder_);
    rocksdb::DB* db = nullptr;
    Ok(rocksdb::DB::Open(options_, folder_, {{"default", options_}, {"values", values}}, &families_,
                         &db));
    db_.reset(db);
  }
  ~LayoutRun() {
    for (rocksdb::ColumnFamilyHandle* family : families_)
      (void)db_->DestroyColumnFamilyHandle(family);
    db_.reset();
    std::filesystem::remove_all(folder_);
  }

  [[nodiscard]] double Write() {
    return Timed(
        kWriters, [this](uint64_t at) { WriteBatch(at, std::min(records_, at + batch_)); }, batch_);
  }
  [[nodiscard]] double Read() {
    return Timed(
        kReaders, [this](uint64_t at) { ReadOne((at * 7'919) % records_); }, 1);
  }
  [[nodiscard]] uint64_t bytes() const { return records_ * record_; }

 private:
  rocksdb::Slice Value(uint64_t i) const {
    return {source_.data() + Mix64(i) % (8 * kMiB), record_};
  }
  static std::string Key(uint64_t i) { return NumberKey(Mix64(i)); }
  static std::string Meta(uint64_t i) { return NumberKey(i) + std::string(96, 'm'); }

  template <typename Work>
  double Timed(int threads, Work work, uint64_t step) {
    std::atomic<uint64_t> next{0};
    std::vector<std::thread> running;
    const absl::Time start = RealClock::Get().Now();
    for (int t = 0; t < threads; ++t) {
      running.emplace_back([&] {
        for (uint64_t at = next.fetch_add(step); at < records_; at = next.fetch_add(step)) work(at);
      });
    }
    for (std::thread& thread : running) thread.join();
    return static_cast<double>(bytes()) / absl::ToDoubleSeconds(RealClock::Get().Now() - start);
  }

  void WriteBatch(uint64_t begin, uint64_t end) {
    rocksdb::WriteOptions options;
    options.sync = layout_.log || layout_.ingest;
    options.disableWAL = !options.sync;
    rocksdb::WriteBatch batch;
    if (layout_.ingest) {
      rocksdb::EnvOptions env(options_);
      env.use_direct_writes = layout_.direct;
      const std::string path = absl::StrCat(folder_, "/staged-", begin);
      rocksdb::SstFileWriter file(env, writer_options_);
      Ok(file.Open(path));
      for (uint64_t i = begin; i < end; ++i) {
        Ok(file.Put(NumberKey(i), Value(i)));
        Ok(batch.Put(families_[0], Key(i), Meta(i)));
      }
      Ok(file.Finish());
      rocksdb::IngestExternalFileOptions ingest;
      ingest.move_files = true;
      ingest.write_global_seqno = false;
      Ok(db_->IngestExternalFile(families_[1], {path}, ingest));
      Ok(db_->Write(options, &batch));
      return;
    }
    for (uint64_t i = begin; i < end; ++i) {
      Ok(batch.Put(families_[1], Key(i), Value(i)));
      Ok(batch.Put(families_[0], Key(i), Meta(i)));
      if (batch.GetDataSize() > kLogBatchBytes || i + 1 == end) {
        Ok(db_->Write(options, &batch));
        batch.Clear();
      }
    }
    if (!layout_.log) Ok(db_->Flush(rocksdb::FlushOptions(), families_));
  }

  void ReadOne(uint64_t i) {
    rocksdb::ReadOptions options;
    rocksdb::PinnableSlice value;
    std::string meta;
    Ok(db_->Get(options, families_[0], Key(i), &meta));
    options.fill_cache = false;
    options.verify_checksums = false;
    Ok(db_->Get(options, families_[1], layout_.ingest ? meta.substr(0, 8) : Key(i), &value));
    KVT_CHECK(value.size() == record_);
    thread_local std::string copy;
    copy.assign(value.data(), value.size());
  }

  const Layout layout_;
  const uint64_t record_;
  const uint64_t records_;
  const uint64_t batch_;
  const std::string folder_;
  std::string source_;
  rocksdb::Options options_;
  rocksdb::Options writer_options_;
  std::vector<rocksdb::ColumnFamilyHandle*> families_;
  std::unique_ptr<rocksdb::DB> db_;
};

void MeasureOne(const SpillBenchOptions& options, const Layout& layout) {
  const uint64_t bytes = options.set_mib * kMiB;
  const double disk_write = PlainWrite(options.folder, bytes);
  const double disk_read = PlainRead(options.folder, bytes);
  LayoutRun run(options, layout);
  const uint64_t before = DiskBytesWritten();
  const double write = run.Write();
  const double amplification =
      static_cast<double>(DiskBytesWritten() - before) / static_cast<double>(run.bytes());
  const double read = run.Read();
  std::printf("%-24s %9.0f %6.2f %9.2f %9.0f %6.2f\n", layout.name, write / 1e6, write / disk_write,
              amplification, read / 1e6, read / disk_read);
  std::fflush(stdout);
}

}  // namespace

void RunSpillLayouts(const SpillBenchOptions& options) {
  std::printf("records of %lu KiB, batches of %lu MiB, %d writers, %d readers at random\n",
              options.record_bytes / 1024, options.batch_mib, kWriters, kReaders);
  std::printf("%-24s %9s %6s %9s %9s %6s\n", "layout", "write", "/disk", "written x", "read",
              "/disk");
  std::fflush(stdout);
  for (int round = 0; round < options.rounds; ++round) {
    for (const Layout& layout : kLayouts) {
      const pid_t child = fork();
      KVT_CHECK(child >= 0);
      if (child == 0) {
        MeasureOne(options, layout);
        _exit(0);
      }
      int status = 0;
      KVT_CHECK(waitpid(child, &status, 0) == child && status == 0, layout.name, " failed");
    }
  }
}

}  // namespace kvt
