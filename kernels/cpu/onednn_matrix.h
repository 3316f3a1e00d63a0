// PackedMatrix through oneDNN's matmul, weights packed once in the order oneDNN asks for at M = 64
// and reused for every M. Each member multiplies with a slice of columns of its own, through
// primitives created for one thread: the team is ours and oneDNN starts no threads. Results go to a
// dense panel of the member (2.6 takes its packed kernels for dense outputs only) and from there,
// with the epilogue, to their place.
//
// Primitives exist for a closed set of M; other row counts are padded up to it, more rows than the
// largest go in turns. At start each shape is probed: the set's members must give the rows of the
// largest M bit for bit, at any place in the batch and in any split into slices; a member that does
// not is taken out of the set (its rows are padded further).
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/cpu/cpu_matrix.h"

namespace kvt {

// Largest M of one primitive.
inline constexpr int kOneDnnRowsMax = 128;

class OneDnnContext;
struct OneDnnContextDeleter {
  void operator()(OneDnnContext* context) const;
};
using OneDnnContextPtr = std::unique_ptr<OneDnnContext, OneDnnContextDeleter>;

// Engine, streams, and primitives by shape, shared by all matrices of a device.
[[nodiscard]] OneDnnContextPtr NewOneDnnContext(int threads);

// Null when the probe finds that rows differ between M in a way padding cannot heal, or oneDNN
// refuses the shape: the caller takes another implementation. ResourceExhausted.
[[nodiscard]] absl::StatusOr<std::unique_ptr<CpuMatrix>> PackOneDnnMatrix(
    OneDnnContext& context, WeightArena& arena, ComputeType compute, MatmulEpilogue epilogue,
    int in_features, absl::Span<const WeightPart> parts);

// Whether oneDNN's bf16 products beat f32 multiply-adds on this processor: with AMX, and on AMD,
// whose 512-bit bf16 dot products are as fast as its f32 multiply-adds. A rule and not a timing:
// equal machines must choose alike, because the choice is part of the numerics id.
[[nodiscard]] bool OneDnnBf16IsFaster();

}  // namespace kvt
