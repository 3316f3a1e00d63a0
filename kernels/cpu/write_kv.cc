#include "kernels/cpu/write_kv.h"

#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "kernels/base/check.h"
#include "kernels/layout/named_layout.h"
#include "kernels/layout/planes.h"

namespace kvt {
namespace {

// Eight f32 to fp16 bits, as FloatToStoredHalf, counting what it counts.
__m128i StoreHalves(__m256 x, WriteKvResult& result) {
  const __m256 magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
  const int saturated = _mm256_movemask_ps(
      _mm256_cmp_ps(magnitude, _mm256_set1_ps(65520.0f), _CMP_GE_OQ));
  const int nan = _mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  if ((saturated | nan) != 0) [[unlikely]] {
    result.saturated += static_cast<uint64_t>(std::popcount(static_cast<unsigned>(saturated)));
    result.nan += static_cast<uint64_t>(std::popcount(static_cast<unsigned>(nan)));
  }
  // minps and maxps return the second operand where one is NaN.
  const __m256 clamped = _mm256_max_ps(_mm256_set1_ps(-kHalfMax),
                                       _mm256_min_ps(_mm256_set1_ps(kHalfMax), x));
  return _mm256_cvtps_ph(clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

struct SlicePlanes {
  uint8_t* base;
  uint8_t* residual;
};

// One row's K and V of one head to token `token` of a slice.
void WriteRow(const float* k, const float* v, int head_dim, int token, SlicePlanes to,
              WriteKvResult& result) {
  alignas(16) uint16_t half[8];
  for (int d = 0; d < head_dim; d += 8) {
    _mm_store_si128(reinterpret_cast<__m128i*>(half), StoreHalves(_mm256_loadu_ps(k + d), result));
    for (int i = 0; i < 8; ++i) {
      const uint32_t offset = KOffset(token, d + i);
      to.base[offset] = BaseByte(half[i]);
      to.residual[offset] = ResidualByte(half[i]);
    }
  }
  // Eight channels of V are eight bytes in a row (named_layout.h).
  const __m128i split = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
  for (int d = 0; d < head_dim; d += 8) {
    const __m128i bytes = _mm_shuffle_epi8(StoreHalves(_mm256_loadu_ps(v + d), result), split);
    const uint32_t offset = VOffset(head_dim, token, d);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to.residual + offset), bytes);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to.base + offset), _mm_unpackhi_epi64(bytes, bytes));
  }
}

}  // namespace

WriteKvResult CpuWriteKv(const WriteKvArgs& args, int thread, int threads) {
  const Geometry& geometry = args.geometry;
  const int head_dim = geometry.head_dim;
  KVT_CHECK(head_dim % 32 == 0 && head_dim >= 32 && head_dim <= 256 &&
                geometry.layout == NamedLayout::kPairSwizzle,
            geometry.ToString());
  KVT_CHECK(thread >= 0 && thread < threads, "thread=", thread, " threads=", threads);
  int64_t rows = 0;
  for (const AttentionSegment& segment : args.segments) rows += segment.rows;
  const int64_t total = rows * geometry.kv_heads;
  const size_t slot_bytes = geometry.SlotBytes();

  WriteKvResult result;
  int64_t before = 0;
  for (const AttentionSegment& segment : args.segments) {
    for (int head = 0; head < geometry.kv_heads; ++head) {
      for (int row = 0; row < segment.rows;) {
        const int position = segment.first_position + row;
        const int end = std::min(segment.rows, row + kBlockTokens - position % kBlockTokens);
        // A thread takes the pieces of blocks whose middle lies in its share of the rows.
        const int64_t middle = 2 * before + (end - row);
        before += end - row;
        if (middle * threads / (2 * total) == thread) {
          const SlotPair pair = segment.blocks[position / kBlockTokens];
          KVT_CHECK(pair.base != kSlotNone && pair.residual != kSlotNone,
                    "write to a block that is not TARGET, position ", position);
          const size_t slice = static_cast<size_t>(head) * geometry.SliceBytes();
          const SlicePlanes planes = {args.slots + pair.base * slot_bytes + slice,
                                      args.slots + pair.residual * slot_bytes + slice};
          for (int r = row; r < end; ++r) {
            const ptrdiff_t at = segment.first_row + r;
            WriteRow(args.k + at * args.k_stride + ptrdiff_t{head} * head_dim,
                     args.v + at * args.v_stride + ptrdiff_t{head} * head_dim, head_dim,
                     (segment.first_position + r) % kBlockTokens, planes, result);
          }
        }
        row = end;
      }
    }
  }
  return result;
}

}  // namespace kvt
