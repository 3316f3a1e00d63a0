// A store's index with a million blocks, two thirds of them with a plane or both on disk alone: its
// heap by block, and prefix lookups of 64 blocks (1,024 tokens). In a child process: the parent's
// memory is limited.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <vector>

#include "kernels/base/check.h"
#include "kernels/base/random.h"
#include "kvstore/index/block_index.h"
#include "tests/bench/spill_bench.h"

namespace kvt {
namespace {

constexpr int kPrefixBlocks = 64;
constexpr int kPrefixes = 15'625;  // a million blocks
constexpr int kLookups = 20'000;

struct Figures {
  double bytes_per_block = 0;
  double lookups_per_s = 0;
  double p50_us = 0;
  double p99_us = 0;
};

class NoEvents final : public RecordEvents {
 public:
  void OnSealed(uint64_t, uint64_t) override {}
  void OnMovedToDisk(uint64_t) override {}
  void OnWithdrawn(uint64_t) override {}
};

std::vector<BlockName> PrefixOf(uint64_t number) {
  Random random(number + 1);
  std::vector<BlockName> names(kPrefixBlocks);
  BlockKey parent;
  for (BlockName& name : names) {
    for (uint8_t& byte : name.key.bytes) byte = static_cast<uint8_t>(random.Next());
    name.parent = parent;
    name.tokens.assign(kBlockTokens, static_cast<int32_t>(number));
    parent = name.key;
  }
  return names;
}

Geometry Small() { return Geometry{.layers = 1, .kv_heads = 1, .head_dim = 32}; }

// Stores a prefix as a writer does, has a second ticket use it, and lets the disk's writer follow.
void Store(BlockIndex& index, absl::Time now, uint64_t number) {
  const SessionId session(1);
  const std::vector<BlockName> names = PrefixOf(number);
  for (const uint64_t id : {2 * number + 1, 2 * number + 2}) {
    const TicketClaim claim{TicketId(id), TicketEpoch(1), "", Provenance::kExact};
    std::vector<ReservedBlock> reserved;
    KVT_CHECK(index.Reserve(now, session, claim, names, 0, &reserved).ok());
    for (const ReservedBlock& block : reserved) {
      for (const Plane plane : {Plane::kBase, Plane::kResidual}) {
        if (block.already_sealed) continue;
        const RecordRange range{claim.id, claim.epoch, PlaneRecordHandle(block.handle, plane), 0,
                                Small().RecordBytes()};
        uint64_t offset = 0;
        KVT_CHECK(index.BeginWrite(session, range, &offset) == Access::kOk);
        index.EndWrite(range, true);
      }
    }
    std::vector<FoundBlock> found;
    KVT_CHECK(index.Lookup(now, session, claim, names, &found).ok());
    KVT_CHECK(index.Release(now, session, LiveTicket{claim.id, claim.epoch}).ok());
  }
  std::vector<SpillJob> jobs;
  do {
    index.TakeSpills(now, 1 << 20, &jobs);
    for (const SpillJob& job : jobs) index.EndSpill(now, job.record_handle, true);
  } while (!jobs.empty());
}

Figures MeasureIndex() {
  IndexOptions options;
  options.slab_bytes = 2 << 20;
  // Room for a third of the records.
  options.arena_bytes = uint64_t{kPrefixes} * kPrefixBlocks * 2 * Small().RecordBytes() / 3 /
                        options.slab_bytes * options.slab_bytes;
  options.blocks_max = 2 * kPrefixes * kPrefixBlocks;
  options.lease = absl::Hours(10);
  options.has_disk = true;
  NoEvents events;
  const auto index = std::make_unique<BlockIndex>(options, events);
  const absl::Time now = absl::UnixEpoch() + absl::Hours(1);
  SessionSpec spec;
  spec.id = SessionId(1);
  spec.worker = "w";
  spec.geometry = Small();
  KVT_CHECK(index->OpenSession(now, spec).ok());
  for (uint64_t number = 0; number < kPrefixes; ++number) Store(*index, now, number);
  const IndexStats stats = index->Stats();
  KVT_CHECK(stats.blocks == uint64_t{kPrefixes} * kPrefixBlocks, "blocks ", stats.blocks);
  Figures figures;
  figures.bytes_per_block =
      static_cast<double>(stats.index_bytes) / static_cast<double>(stats.blocks);

  Random random(7);
  std::vector<double> micros;
  std::vector<FoundBlock> found;
  double seconds = 0;
  for (uint64_t i = 0; i < kLookups; ++i) {
    const std::vector<BlockName> names = PrefixOf(random.Below(kPrefixes));
    const TicketClaim claim{TicketId(1'000'000 + i), TicketEpoch(1), "", Provenance::kExact};
    const auto begin = std::chrono::steady_clock::now();
    KVT_CHECK(index->Lookup(now, SessionId(1), claim, names, &found).ok());
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    KVT_CHECK(found.back().presence == BlockPresence::kExact);
    KVT_CHECK(index->Release(now, SessionId(1), LiveTicket{claim.id, claim.epoch}).ok());
    micros.push_back(took.count() * 1e6);
    seconds += took.count();
  }
  std::sort(micros.begin(), micros.end());
  figures.lookups_per_s = kLookups / seconds;
  figures.p50_us = micros[micros.size() / 2];
  figures.p99_us = micros[micros.size() * 99 / 100];
  return figures;
}

}  // namespace

void RunSpillIndex(std::vector<BenchRow>* rows) {
  int ends[2];
  KVT_CHECK(pipe(ends) == 0);
  const pid_t child = fork();
  if (child == 0) {
    const Figures figures = MeasureIndex();
    KVT_CHECK(write(ends[1], &figures, sizeof(figures)) == sizeof(figures));
    _exit(0);
  }
  close(ends[1]);
  Figures figures;
  KVT_CHECK(read(ends[0], &figures, sizeof(figures)) == sizeof(figures),
            "the index's process ended");
  close(ends[0]);
  waitpid(child, nullptr, 0);
  std::printf(
      "index of 1,000,000 blocks: %.0f bytes a block; lookups of %d blocks: %.0f/s, p50 %.1f us, "
      "p99 %.1f us\n",
      figures.bytes_per_block, kPrefixBlocks, figures.lookups_per_s, figures.p50_us,
      figures.p99_us);
  rows->push_back({"index_bytes_per_block", figures.bytes_per_block, "bytes"});
  rows->push_back({"lookups_per_s", figures.lookups_per_s, "1/s"});
  rows->push_back({"lookup_p99_us", figures.p99_us, "us"});
}

}  // namespace kvt
