// Topics of spill_bench: each measures one thing and adds its rows. One file per topic; main
// (spill_bench.cc) calls them in order. Used by one thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvt {

struct SpillBenchOptions {
  std::string folder;  // on the disk that is measured; the topics make and remove theirs in it
  uint64_t memory_mib = 512;  // of the process's data
  uint64_t set_mib = 2048;    // of records
  uint64_t batch_mib = 32;    // of one Write
  uint64_t record_bytes = 180 * 1024;
  int io_threads = 3;
  uint64_t write_buffer_kib = 1024;
  int callers = 2;  // threads that write, or read, as a node's spill threads do
  int rounds = 5;
};

struct BenchRow {
  std::string name;
  double value = 0;
  std::string unit;
};

// write_vs_disk, read_vs_disk.
void RunSpillDisk(const SpillBenchOptions& options, std::vector<BenchRow>* rows);
// index_bytes_per_block, lookups_per_s, lookup_p99_us: a lookup is of 64 blocks among a million.
void RunSpillIndex(std::vector<BenchRow>* rows);
// The layouts that decision 0005 chose from; no rows.
void RunSpillLayouts(const SpillBenchOptions& options);

// What the disk itself does in one file, O_DIRECT, 4 MiB after another: bytes per second. The write
// ends with a sync. The read wants the file that was written and removes it.
double PlainWrite(const std::string& folder, uint64_t bytes);
double PlainRead(const std::string& folder, uint64_t bytes);

}  // namespace kvt
