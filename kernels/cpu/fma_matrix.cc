#include "kernels/cpu/fma_matrix.h"

#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/units.h"
#include "kernels/cpu/fma_matmul.h"

namespace kvt {
namespace {

class FmaMatrix final : public CpuMatrix {
 public:
  FmaMatrix(FmaIsa isa, int threads, ComputeType compute, MatmulEpilogue epilogue, int in_features,
            int out_features, WeightArena::Piece weights, size_t bytes)
      : CpuMatrix(compute, epilogue, in_features, out_features),
        function_(isa == FmaIsa::kAvx512 ? &FmaMatmulAvx512 : &FmaMatmulAvx2),
        threads_(threads),
        weights_(std::move(weights)),
        bytes_(bytes) {
    set_implementation("fma");
  }

  size_t bytes() const override { return bytes_; }

  size_t WorkspaceBytes(int rows) const override {
    return FmaMatmulWorkspaceBytes(in_features(), rows, threads_);
  }

  void Multiply(const MatmulArgs& args, TeamMember& member) const override {
    const bool bf16 = compute() == ComputeType::kBf16;
    FmaMatmulArgs call;
    call.weights = weights_.data;
    call.weights_bf16 = bf16;
    call.a = args.a;
    call.act_bf16 = bf16;
    call.out = args.out;
    call.rows = args.rows;
    call.channels = in_features();
    call.columns = out_features();
    switch (args.epilogue) {
      case MatmulEpilogue::kStore:
        call.epilogue = FmaEpilogue::kStore;
        break;
      case MatmulEpilogue::kAdd:
        call.epilogue = FmaEpilogue::kAdd;
        break;
      case MatmulEpilogue::kSwiGlu:
        call.epilogue = FmaEpilogue::kSwiGlu;
        call.columns = out_features() / 2;
        break;
    }
    call.workspace = static_cast<uint8_t*>(args.workspace);
    call.workspace_bytes = WorkspaceBytes(args.rows);
    function_(call, member.index(), member.count());
  }

 private:
  const FmaMatmulFn function_;
  const int threads_;
  const WeightArena::Piece weights_;
  const size_t bytes_;
};

// Columns [0, out_features) of `part` into the blocks that start at column `first`.
void PackPart(const WeightPart& part, int in_features, int first, ComputeType compute,
              uint8_t* packed) {
  const WeightReader reader(part, in_features);
  const size_t channels = RoundUp(static_cast<uint64_t>(in_features), 2);
  for (int o = 0; o < part.out_features; ++o) {
    const size_t column = static_cast<size_t>(first + o);
    const size_t block = column / kFmaBlockColumns * channels * kFmaBlockColumns;
    const size_t lane = column % kFmaBlockColumns;
    if (compute == ComputeType::kBf16) {
      uint16_t* dst = reinterpret_cast<uint16_t*>(packed) + block;
      for (int i = 0; i < in_features; ++i) {
        const size_t c = static_cast<size_t>(i);
        dst[(c / 2 * kFmaBlockColumns + lane) * 2 + c % 2] = reader.Bf16At(o, i);
      }
    } else {
      float* dst = reinterpret_cast<float*>(packed) + block;
      for (int i = 0; i < in_features; ++i) {
        dst[static_cast<size_t>(i) * kFmaBlockColumns + lane] = reader.At(o, i);
      }
    }
  }
}

}  // namespace

FmaIsa BestFmaIsa() {
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return avx512 ? FmaIsa::kAvx512 : FmaIsa::kAvx2;
}

absl::StatusOr<std::unique_ptr<CpuMatrix>> PackFmaMatrix(WeightArena& arena, FmaIsa isa,
                                                         int threads, ComputeType compute,
                                                         MatmulEpilogue epilogue, int in_features,
                                                         absl::Span<const WeightPart> parts) {
  // Stacked without gaps; gate and up start a block each.
  const bool swiglu = epilogue == MatmulEpilogue::kSwiGlu;
  int columns = 0;
  int out_features = 0;
  for (const WeightPart& part : parts) {
    columns += part.out_features;
    out_features += part.out_features;
    if (swiglu) columns = static_cast<int>(RoundUp(static_cast<uint64_t>(columns), kFmaBlockColumns));
  }
  const size_t element = compute == ComputeType::kBf16 ? 2 : 4;
  const size_t bytes = RoundUp(static_cast<uint64_t>(columns), kFmaBlockColumns) *
                       RoundUp(static_cast<uint64_t>(in_features), 2) * element;
  KVT_ASSIGN_OR_RETURN(WeightArena::Piece piece, arena.Take(bytes));
  int first = 0;
  for (const WeightPart& part : parts) {
    PackPart(part, in_features, first, compute, piece.data);
    first += part.out_features;
    if (swiglu) first = static_cast<int>(RoundUp(static_cast<uint64_t>(first), kFmaBlockColumns));
  }
  return std::make_unique<FmaMatrix>(isa, threads, compute, epilogue, in_features, out_features,
                                     std::move(piece), bytes);
}

}  // namespace kvt
