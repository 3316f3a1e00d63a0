// PackedMatrix over fma_matmul.h: f32 multiply-adds, weights kept as bf16 or f32.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/cpu/cpu_matrix.h"

namespace kvt {

// Which instruction set the multiply-adds use: bits are the same.
enum class FmaIsa : uint8_t { kAvx2, kAvx512 };
[[nodiscard]] FmaIsa BestFmaIsa();

// ResourceExhausted. `threads`: members of the team that will call Multiply.
[[nodiscard]] absl::StatusOr<std::unique_ptr<CpuMatrix>> PackFmaMatrix(
    WeightArena& arena, FmaIsa isa, int threads, ComputeType compute, MatmulEpilogue epilogue,
    int in_features, absl::Span<const WeightPart> parts);

}  // namespace kvt
