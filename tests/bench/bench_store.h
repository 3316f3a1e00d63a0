// A store in a process of its own for the benchmarks: a StoreNode over an arena, behind the servers
// of production, with blocks to be pulled and neighbours around them; and the worker's hold on it.
//
//   arena: in turn 12 blocks that the benchmark's ticket pins, 2 that another ticket pins, 2 that
//   nobody pins, until 13/16 are full; then more that nobody pins until some went to disk.
//   The bytes of a record are a function of its key and plane.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/layout/geometry.h"
#include "kvstore/media/shared_mapping.h"
#include "kvstore/transport/shm_transport.h"
#include "kvstore/transport/ucx_transport.h"
#include "tests/bench/malloc_count.h"

namespace kvt {

inline constexpr int kStoreCpu = 0;
inline constexpr int kWorkerCpu = 1;
inline constexpr uint64_t kBenchTicket = 1;

// Pieces of a benchmark: one layer of one record each, or (whole) the record.
struct SizeCase {
  std::string name;
  int layers = 0;
  int kv_heads = 0;
  int head_dim = 0;
  bool whole = false;
  int bursts = 0;          // of 512 pieces (whole: of 16), in one measurement
  uint64_t arena_mib = 0;  // of the store

  [[nodiscard]] Geometry geometry() const {
    Geometry geometry;
    geometry.layers = layers;
    geometry.kv_heads = kv_heads;
    geometry.head_dim = head_dim;
    return geometry;
  }
  [[nodiscard]] uint32_t PieceBytes() const {
    return whole ? geometry().RecordBytes() : geometry().SlotBytes();
  }
};
// "8k", "12k", "64k", "16m"; dies for another name.
const SizeCase& CaseOf(const std::string& name);

// How both ends are set up. Travels to the store's process.
struct StoreSettings {
  int poll_us = 50;    // UcxOptions::poll_before_sleep of every end; as in production
  bool pinned = true;  // both ends bound to a processor each
  uint64_t arena_mib = 0;  // of the store; 0: the case's
};
UcxOptions UcxOf(const StoreSettings& settings, int cpu);

// A record as the store holds it.
struct StoredRecord {
  uint64_t handle = 0;  // of the plane's record
  uint64_t key_hash = 0;
  uint64_t offset = 0;  // in the arena
  uint64_t plane = 0;
};
void FillRecordBytes(const StoredRecord& record, uint32_t from, uint32_t bytes, std::byte* out);

// If the arguments are those of a store's process: runs it and returns true.
bool MaybeStoreMain(int argc, char** argv, int* exit_status);

// The store as this process's child. Not thread-safe.
class BenchStore {
 public:
  BenchStore(const SizeCase& size, const StoreSettings& settings);
  ~BenchStore();
  [[nodiscard]] double CpuSeconds() const;
  // Seconds that its threads and this process's waited for a processor.
  [[nodiscard]] double Waited() const;
  // All its threads to kStoreCpu, or to any processor.
  void Bind(bool pinned) const;
  [[nodiscard]] SharedMapping MapArena() const;
  void StartMallocCount();
  MallocCounts StopMallocCount();

  std::string ucx, shm, probe;  // addresses
  int socket_port = 0;
  SessionToken token;
  std::vector<StoredRecord> records;  // that kBenchTicket pins; base and residual in turn
  uint64_t spilled_records = 0;       // of their neighbours

 private:
  std::string ReadLine() const;
  pid_t pid_ = -1;
  int in_ = -1;
  int out_ = -1;
  int arena_fd_ = 0;
  clockid_t clock_ = 0;
};

}  // namespace kvt
