// MakeDigest with AVX2, which every processor of the default build has: the codes of a block, channel
// by channel (16 tokens are a vector), then packed into the rows of kernels/layout/digest.h.
#include <immintrin.h>

#include "kernels/base/check.h"
#include "kernels/cpu/select_blocks.h"
#include "kernels/layout/named_layout.h"
#include "kernels/layout/planes.h"

namespace kvt {
namespace {

// What DigestQuantise does, for 8 tokens of a channel.
__m256i Quantise(__m128i halves, __m256 offset, __m256 inverse, float levels) {
  const __m256 key = _mm256_cvtph_ps(halves);
  const __m256 code = _mm256_add_ps(_mm256_mul_ps(_mm256_sub_ps(key, offset), inverse),
                                    _mm256_set1_ps(0.5f * levels));
  // The maximum of a NaN and zero is the second.
  const __m256 low = _mm256_max_ps(code, _mm256_setzero_ps());
  return _mm256_cvtps_epi32(_mm256_min_ps(low, _mm256_set1_ps(levels)));
}

// One channel: its fp16 values are 8 of `first` and 8 of `second`.
__m128i Codes(__m128i first, __m128i second, float offset, float inverse, float levels) {
  const __m256 from = _mm256_set1_ps(offset), times = _mm256_set1_ps(inverse);
  const __m256i words = _mm256_permute4x64_epi64(
      _mm256_packus_epi32(Quantise(first, from, times, levels), Quantise(second, from, times, levels)),
      0xd8);
  return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

// codes[channel][token] of a slice of keys; a null residual reads as BASE.
void SliceCodes(const uint8_t* base, const uint8_t* residual, int head_dim, const float* offset,
                const float* inverse, int bits, uint8_t* codes) {
  const auto levels = static_cast<float>((1 << bits) - 1);
  const __m256i midpoint = _mm256_set1_epi8(static_cast<char>(kResidualMidpoint));
  for (int d = 0; d < head_dim; d += 2) {
    const uint32_t at = KOffset(0, d);
    const __m256i upper = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(base + at));
    const __m256i lower =
        residual == nullptr ? midpoint
                            : _mm256_loadu_si256(reinterpret_cast<const __m256i*>(residual + at));
    const __m256i even = _mm256_unpacklo_epi8(lower, upper);  // channel d
    const __m256i odd = _mm256_unpackhi_epi8(lower, upper);
    auto* out = reinterpret_cast<__m128i*>(codes + d * kBlockTokens);
    _mm_store_si128(out, Codes(_mm256_castsi256_si128(even), _mm256_extracti128_si256(even, 1),
                               offset[d], inverse[d], levels));
    _mm_store_si128(out + 1, Codes(_mm256_castsi256_si128(odd), _mm256_extracti128_si256(odd, 1),
                                   offset[d + 1], inverse[d + 1], levels));
  }
}

// Rows that hold `width` bits of each code, from `shift` up. Returns their end.
uint8_t* PackRows(const uint8_t* codes, int head_dim, int width, int shift, uint8_t* out) {
  const int groups = 8 / width;
  const __m128i mask = _mm_set1_epi8(static_cast<char>((1 << width) - 1));
  for (int first = 0; first < head_dim; first += 4 * groups, out += kDigestRowBytes) {
    __m128i bytes[4];
    for (int c = 0; c < 4; ++c) {
      bytes[c] = _mm_setzero_si128();
      for (int g = 0; g < groups; ++g) {
        const __m128i code = _mm_load_si128(
            reinterpret_cast<const __m128i*>(codes + (first + 4 * g + c) * kBlockTokens));
        const __m128i field = _mm_and_si128(_mm_srli_epi16(code, shift), mask);
        bytes[c] = _mm_or_si128(bytes[c], _mm_slli_epi16(field, g * width));
      }
    }
    // Channels next to each other for every token.
    const __m128i low01 = _mm_unpacklo_epi8(bytes[0], bytes[1]);
    const __m128i low23 = _mm_unpacklo_epi8(bytes[2], bytes[3]);
    const __m128i high01 = _mm_unpackhi_epi8(bytes[0], bytes[1]);
    const __m128i high23 = _mm_unpackhi_epi8(bytes[2], bytes[3]);
    auto* row = reinterpret_cast<__m128i*>(out);
    _mm_storeu_si128(row, _mm_unpacklo_epi16(low01, low23));
    _mm_storeu_si128(row + 1, _mm_unpackhi_epi16(low01, low23));
    _mm_storeu_si128(row + 2, _mm_unpacklo_epi16(high01, high23));
    _mm_storeu_si128(row + 3, _mm_unpackhi_epi16(high01, high23));
  }
  return out;
}

}  // namespace

void CpuMakeDigest(const MakeDigestArgs& args, TeamMember& member) {
  const Geometry& geometry = args.geometry;
  CheckDigestSpec(geometry, args.spec);
  const int dim = geometry.head_dim;
  const uint32_t head_bytes = DigestHeadBytes(dim, args.spec.bits);
  const uint32_t bytes = args.spec.Bytes(dim);
  float inverse[kDigestHeadDimMax];
  alignas(32) uint8_t codes[kDigestHeadDimMax * kBlockTokens];
  const auto [begin, end] = member.Share(args.count);
  for (size_t h = 0; h < args.spec.heads.size(); ++h) {
    const DigestHead& head = args.spec.heads[h];
    for (int d = 0; d < dim; ++d) inverse[d] = 1.0f / head.scale[d];
    const size_t slice = static_cast<size_t>(head.kv_head) * geometry.SliceBytes();
    for (int i = begin; i < end; ++i) {
      const SlotPair pair = args.blocks[i];
      KVT_CHECK(pair.base != kSlotNone, "block ", i, " has no slot");
      const uint8_t* slots = args.slots + slice;
      SliceCodes(slots + size_t{pair.base} * geometry.SlotBytes(),
                 pair.residual == kSlotNone ? nullptr
                                            : slots + size_t{pair.residual} * geometry.SlotBytes(),
                 dim, head.offset, inverse, args.spec.bits, codes);
      const uint32_t entry = args.entries == nullptr ? static_cast<uint32_t>(i) : args.entries[i];
      uint8_t* digest = args.digests + size_t{entry} * bytes + h * head_bytes;
      const int low = args.spec.bits == 4 ? 4 : 2;
      digest = PackRows(codes, dim, low, 0, digest);
      if (args.spec.bits == 3) PackRows(codes, dim, 1, 2, digest);
    }
  }
}

}  // namespace kvt
