#include "kernels/model/layer_losses.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/model/block_keys.h"
#include "kernels/model/digest_selector.h"
#include "kernels/model/model_config.h"
#include "kernels/select/attention_stats.h"

namespace kvt {
namespace {

// A budget that selects so many blocks at every position.
int BudgetFor(int blocks) {
  return kSinkTokens + kRecentTokens + kBlockTokens * (blocks + 1) - 1;
}

// Mean KL of the rows of `logits` from `full`, whose rows are log probabilities.
double MeanKl(const std::vector<float>& full, std::vector<float> logits, size_t vocab) {
  double kl = 0;
  for (size_t at = 0; at < logits.size(); at += vocab) {
    const absl::Span<float> row = absl::MakeSpan(logits).subspan(at, vocab);
    LogSoftmax(row);
    for (size_t v = 0; v < vocab; ++v) kl += std::exp(full[at + v]) * (full[at + v] - row[v]);
  }
  return kl / (static_cast<double>(logits.size()) / static_cast<double>(vocab));
}

}  // namespace

absl::StatusOr<std::vector<std::vector<double>>> MeasureLayerLosses(TextRun& run,
                                                                    const Calibration& calibration,
                                                                    absl::Span<const int32_t> tokens,
                                                                    int first) {
  const auto vocab = static_cast<size_t>(run.transformer().config().vocab);
  std::vector<std::vector<CalibrationHead>> heads;
  for (const CalibrationLayer& layer : calibration.layers) heads.push_back(layer.heads);
  KVT_ASSIGN_OR_RETURN(const auto selector, DigestSelector::Create(run, calibration.bits, heads));
  const TextRun::Selector everything = [](int, int, const LayerActivations&) {
    return RowSelections::Full();
  };
  KVT_ASSIGN_OR_RETURN(std::vector<float> full, run.Decode(tokens, first, everything));
  for (size_t at = 0; at < full.size(); at += vocab) {
    LogSoftmax(absl::MakeSpan(full).subspan(at, vocab));
  }
  std::vector<int> positions;
  for (size_t r = 0; r < tokens.size(); ++r) positions.push_back(first + static_cast<int>(r));
  std::vector<std::vector<double>> losses(heads.size());
  for (size_t l = 0; l < heads.size(); ++l) {
    if (heads[l].empty()) continue;
    const int sparse = static_cast<int>(l);
    KVT_RETURN_IF_ERROR(selector->MakeDigests(sparse, 0, first / kBlockTokens));
    for (const int blocks : kLossBlocks) {
      absl::Status failed;
      KVT_ASSIGN_OR_RETURN(
          std::vector<float> logits,
          run.Decode(tokens, first, [&](int layer, int, const LayerActivations& a) {
            if (layer != sparse) return RowSelections::Full();
            auto chosen = selector->Select(layer, positions, a.qkv, a.qkv_stride, BudgetFor(blocks));
            if (chosen.ok()) return RowSelections{false, false, *std::move(chosen)};
            failed.Update(chosen.status());
            return RowSelections::Full();
          }));
      KVT_RETURN_IF_ERROR(failed);
      losses[l].push_back(MeanKl(full, std::move(logits), vocab));
    }
  }
  // Layers behind a sparse one wrote other keys and values.
  KVT_RETURN_IF_ERROR(run.Decode(tokens, first, everything).status());
  return losses;
}

}  // namespace kvt
