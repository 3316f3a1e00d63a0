#include "kernels/cpu/elementwise.h"

#include <immintrin.h>

#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/cpu/cpu_matrix.h"

namespace kvt {
namespace {

constexpr int kLanes = 8;

// Eight floats rounded to nearest even as bf16; a NaN stays a NaN.
__m128i ToBf16(__m256 v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  rounded = _mm256_blendv_epi8(_mm256_set1_epi32(0x7fc00000), rounded,
                               _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_ORD_Q)));
  rounded = _mm256_srli_epi32(rounded, 16);
  const __m256i packed = _mm256_packus_epi32(rounded, rounded);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}

float SumOfSquares(const float* x, int width) {
  __m256 sums[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(),
                    _mm256_setzero_ps()};
  int i = 0;
  for (; i + 4 * kLanes <= width; i += 4 * kLanes) {
    for (int s = 0; s < 4; ++s) {
      const __m256 v = _mm256_loadu_ps(x + i + s * kLanes);
      sums[s] = _mm256_fmadd_ps(v, v, sums[s]);
    }
  }
  alignas(32) float lanes[kLanes];
  _mm256_store_ps(lanes, _mm256_add_ps(_mm256_add_ps(sums[0], sums[1]),
                                       _mm256_add_ps(sums[2], sums[3])));
  float total = 0;
  for (const float lane : lanes) total += lane;
  for (; i < width; ++i) total += x[i] * x[i];
  return total;
}

}  // namespace

void CpuEmbed(const EmbedArgs& args, TeamMember& member) {
  const TeamMember::Range rows = member.Share(args.rows);
  const size_t width = static_cast<size_t>(args.width);
  for (int r = rows.begin; r < rows.end; ++r) {
    const size_t at = static_cast<size_t>(args.tokens[r]) * width;
    float* out = args.out + static_cast<size_t>(r) * width;
    if (args.table_type == ComputeType::kF32) {
      std::memcpy(out, static_cast<const float*>(args.table) + at, width * sizeof(float));
      continue;
    }
    const uint16_t* row = static_cast<const uint16_t*>(args.table) + at;
    for (size_t i = 0; i < width; ++i) {
      out[i] = std::bit_cast<float>(static_cast<uint32_t>(row[i]) << 16);
    }
  }
}

void CpuRmsNorm(const RmsNormArgs& args, TeamMember& member) {
  const TeamMember::Range rows = member.Share(args.rows);
  const size_t width = static_cast<size_t>(args.width);
  for (int r = rows.begin; r < rows.end; ++r) {
    const int from = args.row_index != nullptr ? args.row_index[r] : r;
    const float* x = args.x + static_cast<size_t>(from) * width;
    const float scale =
        1.0f / std::sqrt(SumOfSquares(x, args.width) / static_cast<float>(args.width) + args.epsilon);
    const __m256 scales = _mm256_set1_ps(scale);
    int i = 0;
    if (args.out_type == ComputeType::kBf16) {
      uint16_t* out = static_cast<uint16_t*>(args.out) + static_cast<size_t>(r) * width;
      for (; i + kLanes <= args.width; i += kLanes) {
        const __m256 y = _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(x + i), scales),
                                       _mm256_loadu_ps(args.weight + i));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), ToBf16(y));
      }
      for (; i < args.width; ++i) out[i] = RoundToBf16(x[i] * scale * args.weight[i]);
    } else {
      float* out = static_cast<float*>(args.out) + static_cast<size_t>(r) * width;
      for (; i < args.width; ++i) out[i] = x[i] * scale * args.weight[i];
    }
  }
}

void CpuAddBias(const AddBiasArgs& args, TeamMember& member) {
  const TeamMember::Range rows = member.Share(args.rows);
  for (int r = rows.begin; r < rows.end; ++r) {
    float* x = args.x + static_cast<size_t>(r) * static_cast<size_t>(args.stride);
    for (int i = 0; i < args.width; ++i) x[i] += args.bias[i];
  }
}

void CpuNormHeads(const NormHeadsArgs& args, TeamMember& member) {
  const TeamMember::Range pieces = member.Share(args.rows * args.heads);
  for (int p = pieces.begin; p < pieces.end; ++p) {
    float* x = args.x + static_cast<size_t>(p / args.heads) * static_cast<size_t>(args.stride) +
               static_cast<size_t>(p % args.heads) * static_cast<size_t>(args.head_dim);
    const float mean = SumOfSquares(x, args.head_dim) / static_cast<float>(args.head_dim);
    const float scale = 1.0f / std::sqrt(mean + args.epsilon);
    for (int i = 0; i < args.head_dim; ++i) x[i] = x[i] * scale * args.weight[i];
  }
}

void CpuRope(const RopeArgs& args, TeamMember& member) {
  const int half = args.head_dim / 2;
  // Shared by (row, head), so that few rows keep all members busy.
  const TeamMember::Range pieces = member.Share(args.rows * args.heads);
  for (int p = pieces.begin; p < pieces.end; ++p) {
    const int row = p / args.heads;
    const int head = p % args.heads;
    float* x = args.qk + static_cast<size_t>(row) * static_cast<size_t>(args.stride) +
               static_cast<size_t>(head) * static_cast<size_t>(args.head_dim);
    float* y = x + half;
    const float* cosines =
        args.cos_sin + static_cast<size_t>(args.positions[row]) * static_cast<size_t>(args.head_dim);
    const float* sines = cosines + half;
    int i = 0;
    for (; i + kLanes <= half; i += kLanes) {
      const __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(y + i);
      const __m256 c = _mm256_loadu_ps(cosines + i), s = _mm256_loadu_ps(sines + i);
      _mm256_storeu_ps(x + i, _mm256_sub_ps(_mm256_mul_ps(a, c), _mm256_mul_ps(b, s)));
      _mm256_storeu_ps(y + i, _mm256_add_ps(_mm256_mul_ps(b, c), _mm256_mul_ps(a, s)));
    }
    for (; i < half; ++i) {
      const float a = x[i], b = y[i];
      x[i] = a * cosines[i] - b * sines[i];
      y[i] = b * cosines[i] + a * sines[i];
    }
  }
}

void CpuSwiGluRow(const float* gate, const float* up, int width, ComputeType out_type, void* out) {
  for (int i = 0; i < width; ++i) {
    const float y = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
    if (out_type == ComputeType::kBf16) {
      static_cast<uint16_t*>(out)[i] = RoundToBf16(y);
    } else {
      static_cast<float*>(out)[i] = y;
    }
  }
}

}  // namespace kvt
