// A pool of slots with sequences in it, for tests and the benchmark of attention and KV write.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "kernels/base/check.h"
#include "kernels/cpu/paged_attention.h"
#include "kernels/layout/named_layout.h"
#include "kernels/layout/planes.h"
#include "kernels/paged_kv.h"

namespace kvt {

struct AlignedFree {
  void operator()(void* p) const { std::free(p); }
};
using AlignedBytes = std::unique_ptr<uint8_t[], AlignedFree>;

// On huge pages from 2 MiB on, as device memory is (kernels/device.h).
inline AlignedBytes AllocateAligned(size_t bytes) {
  constexpr size_t kHuge = size_t{2} << 20;
  const size_t alignment = bytes >= kHuge ? kHuge : 64;
  const size_t size = (bytes + alignment - 1) / alignment * alignment;
  void* p = std::aligned_alloc(alignment, size);
  KVT_CHECK(p != nullptr, "bytes=", bytes);
  if (alignment == kHuge) madvise(p, size, MADV_HUGEPAGE);
  return AlignedBytes(static_cast<uint8_t*>(p));
}

// Slots filled with NaN (every byte 0xff), handed out in a shuffled order.
class SlotPool {
 public:
  SlotPool(const Geometry& geometry, uint32_t slots, uint64_t seed)
      : geometry_(geometry), data_(AllocateAligned(size_t{slots} * geometry.SlotBytes())) {
    std::fill_n(data_.get(), size_t{slots} * geometry.SlotBytes(), uint8_t{0xff});
    free_.resize(slots);
    std::iota(free_.begin(), free_.end(), 0u);
    std::mt19937_64 random(seed);
    std::shuffle(free_.begin(), free_.end(), random);
  }
  uint32_t Take() {
    KVT_CHECK(!free_.empty());
    const uint32_t slot = free_.back();
    free_.pop_back();
    return slot;
  }
  [[nodiscard]] uint8_t* data() { return data_.get(); }
  [[nodiscard]] uint8_t* Slice(uint32_t slot, int head) {
    return data_.get() + size_t{slot} * geometry_.SlotBytes() +
           static_cast<size_t>(head) * geometry_.SliceBytes();
  }
  [[nodiscard]] const Geometry& geometry() const { return geometry_; }

 private:
  Geometry geometry_;
  AlignedBytes data_;
  std::vector<uint32_t> free_;
};

// K and V of one sequence as fp16 bits, [token][kv_head][head_dim], a function of the seed alone.
struct SequenceValues {
  SequenceValues(const Geometry& geometry, int tokens, uint64_t seed)
      : tokens(tokens), heads(geometry.kv_heads), dim(geometry.head_dim) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    k.resize(static_cast<size_t>(tokens * heads * dim));
    v.resize(k.size());
    for (auto* values : {&k, &v}) {
      for (uint16_t& bits : *values) bits = FloatToStoredHalf(normal(random)).bits;
    }
  }
  [[nodiscard]] size_t At(int token, int head, int d) const {
    return static_cast<size_t>((token * heads + head) * dim + d);
  }
  int tokens;
  int heads;
  int dim;
  std::vector<uint16_t> k;
  std::vector<uint16_t> v;
};

// Puts tokens [0, end) of the values into slots; blocks for which is_base(block) is true get none
// for the residual plane. Positions beyond `end` keep the pool's NaN.
inline std::vector<SlotPair> StoreSequence(SlotPool& pool, const SequenceValues& values, int end,
                                           const std::function<bool(int)>& is_base) {
  std::vector<SlotPair> table;
  for (int block = 0; block * kBlockTokens < end; ++block) {
    SlotPair pair = {.base = pool.Take()};
    if (!is_base(block)) pair.residual = pool.Take();
    for (int head = 0; head < values.heads; ++head) {
      for (int t = 0; t < kBlockTokens && block * kBlockTokens + t < end; ++t) {
        for (int d = 0; d < values.dim; ++d) {
          const size_t at = values.At(block * kBlockTokens + t, head, d);
          const uint32_t k_at = KOffset(t, d);
          const uint32_t v_at = VOffset(values.dim, t, d);
          pool.Slice(pair.base, head)[k_at] = BaseByte(values.k[at]);
          pool.Slice(pair.base, head)[v_at] = BaseByte(values.v[at]);
          if (pair.residual == kSlotNone) continue;
          pool.Slice(pair.residual, head)[k_at] = ResidualByte(values.k[at]);
          pool.Slice(pair.residual, head)[v_at] = ResidualByte(values.v[at]);
        }
      }
    }
    table.push_back(pair);
  }
  return table;
}

// Runs both phases as a team of `threads` does.
inline void RunAttention(const PagedAttentionArgs& args, int threads, int context_tokens_max,
                         int decode_rows_max = 64) {
  const AttentionLimits limits = {.geometry = args.geometry,
                                  .query_heads = args.query_heads,
                                  .threads = threads,
                                  .decode_rows_max = decode_rows_max,
                                  .context_tokens_max = context_tokens_max};
  const size_t bytes = CpuPagedAttentionWorkspaceBytes(limits);
  const AlignedBytes memory = AllocateAligned(bytes);
  std::fill_n(memory.get(), bytes, uint8_t{0xff});
  const Workspace workspace = {memory.get(), bytes};
  for (const auto phase : {CpuPagedAttention, CpuPagedAttentionCombine}) {
    std::vector<std::thread> team;
    for (int t = 1; t < threads; ++t) {
      team.emplace_back([&, t] { phase(args, workspace, t, threads); });
    }
    phase(args, workspace, 0, threads);
    for (std::thread& member : team) member.join();
  }
}

}  // namespace kvt
