#include "kernels/cpu/cpu_ops.h"

#include <atomic>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/cpu/cpu_matrix.h"
#include "kernels/cpu/cpu_stream.h"
#include "kernels/cpu/elementwise.h"
#include "kernels/cpu/fma_matrix.h"
#include "kernels/cpu/gather_scatter.h"
#include "kernels/cpu/onednn_matrix.h"
#include "kernels/cpu/paged_attention.h"
#include "kernels/cpu/sample.h"
#include "kernels/cpu/select_blocks.h"
#include "kernels/cpu/write_kv.h"

namespace kvt {
namespace {

CpuStream& Cpu(Stream& stream) { return static_cast<CpuStream&>(stream); }

struct WriteKvCall {
  WriteKvArgs args;
  KvWriteStats* stats;
};

void WriteKvKernel(const WriteKvCall& call, TeamMember& member) {
  const WriteKvResult result = CpuWriteKv(call.args, member.index(), member.count());
  if (result.saturated != 0) std::atomic_ref(call.stats->saturated).fetch_add(result.saturated);
  if (result.nan != 0) std::atomic_ref(call.stats->nan).fetch_add(result.nan);
}

struct AttentionCall {
  PagedAttentionArgs args;
  Workspace workspace;
};

// Both phases; the second joins what the first left in the workspace.
void RunAttention(const AttentionCall& call, ThreadTeam& team) {
  team.Run(
      [](const void* context, TeamMember& member) {
        const AttentionCall& c = *static_cast<const AttentionCall*>(context);
        CpuPagedAttention(c.args, c.workspace, member.index(), member.count());
      },
      &call);
  if (!CpuPagedAttentionIsSplit(call.args, call.workspace, team.threads())) return;
  team.Run(
      [](const void* context, TeamMember& member) {
        const AttentionCall& c = *static_cast<const AttentionCall*>(context);
        CpuPagedAttentionCombine(c.args, c.workspace, member.index(), member.count());
      },
      &call);
}

struct ScoreCall {
  ScoreBlocksArgs args;
  Workspace workspace;
};

// Both phases; the second joins what the first left in the workspace.
void RunScore(const ScoreCall& call, ThreadTeam& team) {
  team.Run(
      [](const void* context, TeamMember& member) {
        const ScoreCall& c = *static_cast<const ScoreCall*>(context);
        CpuScoreBlocks(c.args, c.workspace, member);
      },
      &call);
  if (call.args.segments.size() == 1) {  // one member's work: no second round
    TeamMember all(0, 1);
    CpuScoreBlocksCombine(call.args, call.workspace, all);
    return;
  }
  team.Run(
      [](const void* context, TeamMember& member) {
        const ScoreCall& c = *static_cast<const ScoreCall*>(context);
        CpuScoreBlocksCombine(c.args, c.workspace, member);
      },
      &call);
}

struct SelectCall {
  SelectTopBlocksArgs args;
  Workspace workspace;
};

// Below this many values an operation is over before a second member has seen it.
constexpr int64_t kTeamValuesMin = 8192;

class CpuOps final : public Ops {
 public:
  CpuOps(Device& device, int threads)
      : threads_(threads), arena_(device), onednn_(NewOneDnnContext(threads)) {}

  ComputeType PreferredCompute() const override {
    return __builtin_cpu_supports("avx512bf16") ? ComputeType::kBf16 : ComputeType::kF32;
  }

  std::string NumericsTag(ComputeType compute) const override {
    return absl::StrCat("cpu ", compute == ComputeType::kBf16 ? "bf16" : "f32",
                        " attention:", CpuAttentionIsa(compute));
  }

  absl::StatusOr<std::unique_ptr<PackedMatrix>> PackWeights(ComputeType compute,
                                                            MatmulEpilogue epilogue,
                                                            int in_features,
                                                            absl::Span<const WeightPart> parts,
                                                            int max_rows) override;

  size_t MatmulWorkspaceBytes(const PackedMatrix& weights, int rows) const override {
    return static_cast<const CpuMatrix&>(weights).WorkspaceBytes(rows);
  }
  size_t AttentionWorkspaceBytes(const Geometry& geometry, int query_heads, int segments,
                                 int context_tokens_max) const override {
    return CpuPagedAttentionWorkspaceBytes(
        {geometry, query_heads, threads_, segments, context_tokens_max});
  }
  size_t SampleWorkspaceBytes(int rows, int vocabulary) const override {
    return CpuSampleWorkspaceBytes(rows, vocabulary);
  }

  void Embed(Stream& stream, const EmbedArgs& args) override {
    EnqueueSized(stream, "embed", &CpuEmbed, args, int64_t{args.rows} * args.width);
  }
  void RmsNorm(Stream& stream, const RmsNormArgs& args) override {
    EnqueueSized(stream, "norm", &CpuRmsNorm, args, int64_t{args.rows} * args.width);
  }
  void Matmul(Stream& stream, const MatmulArgs& args) override;
  void AddBias(Stream& stream, const AddBiasArgs& args) override {
    EnqueueSized(stream, "bias", &CpuAddBias, args, int64_t{args.rows} * args.width);
  }
  void NormHeads(Stream& stream, const NormHeadsArgs& args) override {
    EnqueueSized(stream, "head_norm", &CpuNormHeads, args,
                 int64_t{args.rows} * args.heads * args.head_dim);
  }
  void Rope(Stream& stream, const RopeArgs& args) override {
    KVT_CHECK(args.head_dim % 2 == 0, "head_dim=", args.head_dim);
    EnqueueSized(stream, "rope", &CpuRope, args,
                 int64_t{args.rows} * args.heads * args.head_dim);
  }
  void WriteKv(Stream& stream, const WriteKvArgs& args, KvWriteStats* stats) override {
    int64_t rows = 0;
    for (const AttentionSegment& segment : args.segments) rows += segment.rows;
    EnqueueSized(stream, "write_kv", &WriteKvKernel, WriteKvCall{args, stats},
                 rows * args.geometry.kv_heads * args.geometry.head_dim * 2);
  }
  void PagedAttention(Stream& stream, const PagedAttentionArgs& args, void* workspace,
                      size_t workspace_bytes) override {
    const AttentionCall call{args, {static_cast<uint8_t*>(workspace), workspace_bytes}};
    Cpu(stream).Enqueue("attention", [call](ThreadTeam& team) { RunAttention(call, team); });
  }
  void Sample(Stream& stream, const SampleArgs& args) override {
    Cpu(stream).EnqueueKernel("sample", &CpuSample, args);
  }
  void GatherSlots(Stream& stream, const GatherSlotsArgs& args) override {
    Cpu(stream).EnqueueKernel("gather", +[](const GatherSlotsArgs& a, TeamMember& member) {
      CpuGatherSlots(a, member.index(), member.count());
    }, args);
  }
  size_t ScoreWorkspaceBytes(int queries, int rows, int blocks) const override {
    return CpuScoreWorkspaceBytes(queries, rows, blocks);
  }
  size_t SelectWorkspaceBytes(int rows, int blocks) const override {
    return CpuSelectWorkspaceBytes(rows, blocks);
  }
  void MakeDigest(Stream& stream, const MakeDigestArgs& args) override {
    EnqueueSized(stream, "digest", &CpuMakeDigest, args,
                 int64_t{args.count} * args.geometry.head_dim * kBlockTokens);
  }
  void ScoreBlocks(Stream& stream, const ScoreBlocksArgs& args, void* workspace,
                   size_t workspace_bytes) override {
    const ScoreCall call{args, {static_cast<uint8_t*>(workspace), workspace_bytes}};
    Cpu(stream).Enqueue("score", [call](ThreadTeam& team) { RunScore(call, team); });
  }
  void SelectTopBlocks(Stream& stream, const SelectTopBlocksArgs& args, void* workspace,
                       size_t workspace_bytes) override {
    EnqueueSized(stream, "top_blocks", +[](const SelectCall& call, TeamMember& member) {
      CpuSelectTopBlocks(call.args, call.workspace, member);
    }, SelectCall{args, {static_cast<uint8_t*>(workspace), workspace_bytes}},
                 static_cast<int64_t>(args.segments.size()) * args.blocks_max * 4);
  }
  void ScatterSlots(Stream& stream, const ScatterSlotsArgs& args) override {
    Cpu(stream).EnqueueKernel("scatter", +[](const ScatterSlotsArgs& a, TeamMember& member) {
      CpuScatterSlots(a, member.index(), member.count());
    }, args);
  }

 private:
  // `kernel` on the whole team, or on the executor alone when there are few values to work on.
  template <typename Args>
  static void EnqueueSized(Stream& stream, const char* name,
                           void (*kernel)(const Args&, TeamMember&), const Args& args,
                           int64_t values) {
    if (values >= kTeamValuesMin) {
      Cpu(stream).EnqueueKernel(name, kernel, args);
      return;
    }
    Cpu(stream).Enqueue(name, [kernel, args](ThreadTeam&) {
      TeamMember all(0, 1);
      kernel(args, all);
    });
  }

  const int threads_;
  WeightArena arena_;
  const OneDnnContextPtr onednn_;
};

absl::StatusOr<std::unique_ptr<PackedMatrix>> CpuOps::PackWeights(
    ComputeType compute, MatmulEpilogue epilogue, int in_features,
    absl::Span<const WeightPart> parts, int max_rows) {
  KVT_CHECK(in_features > 0 && !parts.empty() && max_rows > 0);
  KVT_CHECK(epilogue != MatmulEpilogue::kSwiGlu ||
            (parts.size() == 2 && parts[0].out_features == parts[1].out_features));
  for (const WeightPart& part : parts) {
    KVT_CHECK((part.bf16 == nullptr) != (part.f32 == nullptr) && part.out_features > 0);
  }
  const FmaIsa isa = BestFmaIsa();
  // f32 with AVX2 alone and bf16 where the dot product is slow go by multiply-adds.
  const bool onednn =
      compute == ComputeType::kF32 ? isa == FmaIsa::kAvx512 : OneDnnBf16IsFaster();
  if (onednn) {
    KVT_ASSIGN_OR_RETURN(std::unique_ptr<CpuMatrix> matrix,
                         PackOneDnnMatrix(*onednn_, arena_, compute, epilogue, in_features, parts));
    if (matrix != nullptr) return matrix;
  }
  KVT_ASSIGN_OR_RETURN(
      std::unique_ptr<CpuMatrix> matrix,
      PackFmaMatrix(arena_, isa, threads_, compute, epilogue, in_features, parts));
  return matrix;
}

void CpuOps::Matmul(Stream& stream, const MatmulArgs& args) {
  const CpuMatrix& matrix = static_cast<const CpuMatrix&>(*args.weights);
  KVT_CHECK(args.rows > 0 && args.workspace != nullptr, "rows=", args.rows);
  KVT_CHECK((args.epilogue == MatmulEpilogue::kSwiGlu) ==
            (matrix.epilogue_kind() == MatmulEpilogue::kSwiGlu));
  Cpu(stream).EnqueueKernel(args.name, +[](const MatmulArgs& a, TeamMember& member) {
    static_cast<const CpuMatrix*>(a.weights)->Multiply(a, member);
  }, args);
}

}  // namespace

std::unique_ptr<Ops> MakeCpuOps(Device& device, int threads) {
  return std::make_unique<CpuOps>(device, threads);
}

}  // namespace kvt
