#include "tests/bench/quality_policies.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/model/block_keys.h"
#include "kernels/model/model_config.h"
#include "kernels/select/attention_stats.h"
#include "kernels/select/hot_set.h"
#include "kernels/select/layer_budgets.h"

namespace kvt {
namespace {

std::vector<int> Positions(int first, int rows) {
  std::vector<int> positions;
  for (int r = 0; r < rows; ++r) positions.push_back(first + r);
  return positions;
}

class FullPolicy final : public Policy {
 public:
  void Refresh(int, int) override {}
  RowSelections Select(int, int, const LayerActivations&, int) override { return RowSelections::Full(); }
};

class WindowPolicy final : public Policy {
 public:
  void Refresh(int, int) override {}
  RowSelections Select(int, int, const LayerActivations& a, int) override {
    RowSelections none;
    none.blocks.resize(static_cast<size_t>(a.rows));
    return none;
  }
};

// By digests: one selector for all heads, or one for each.
class DigestPolicy : public Policy {
 public:
  // `budgets`: whose losses the budget is divided among the layers by; null: equally.
  DigestPolicy(TextRun& run, int bits, std::vector<std::vector<std::vector<CalibrationHead>>> parts,
               const Calibration* budgets)
      : budgets_(budgets) {
    layers_ = run.transformer().geometry().layers;
    for (auto& part : parts) {
      auto selector = DigestSelector::Create(run, bits, std::move(part));
      KVT_CHECK(selector.ok(), selector.status().ToString());
      selectors_.push_back(std::move(selector).value());
    }
  }
  void Refresh(int first, int end) override {
    for (const auto& selector : selectors_) {
      for (int layer = 0; layer < layers_; ++layer) {
        const absl::Status status = selector->MakeDigests(layer, first, end);
        KVT_CHECK(status.ok(), status.ToString());
      }
    }
  }
  RowSelections Select(int layer, int first, const LayerActivations& a, int budget) override {
    if (selectors_[0]->dense(layer)) return RowSelections::Full();
    if (budgets_ != nullptr) {
      const int middle = MiddleOf(first + a.rows - 1).count();
      budget = LayerBudgets(*budgets_, budget, middle)[static_cast<size_t>(layer)];
    }
    const size_t parts = selectors_.size();
    RowSelections out;
    out.by_head = parts > 1;
    out.blocks.resize(static_cast<size_t>(a.rows) * parts);
    for (size_t p = 0; p < parts; ++p) {
      auto lists = selectors_[p]->Select(layer, Positions(first, a.rows), a.qkv, a.qkv_stride, budget);
      KVT_CHECK(lists.ok(), lists.status().ToString());
      for (size_t r = 0; r < lists->size(); ++r) out.blocks[r * parts + p] = std::move((*lists)[r]);
    }
    return out;
  }

 private:
  const Calibration* const budgets_;
  int layers_ = 0;
  std::vector<std::unique_ptr<DigestSelector>> selectors_;
};

// By digests, and besides what a hot set of twice the selection still holds of the steps before.
class ResidentPolicy final : public DigestPolicy {
 public:
  using DigestPolicy::DigestPolicy;
  RowSelections Select(int layer, int first, const LayerActivations& a, int budget) override {
    RowSelections out = DigestPolicy::Select(layer, first, a, budget);
    Held& held = held_[layer];
    if (held.next != first) held.hot = HotSet(0);  // another sequence of steps
    held.next = first + a.rows;
    for (std::vector<int32_t>& blocks : out.blocks) {
      held.hot.SetCapacity(std::max(held.hot.capacity(), 2 * static_cast<int>(blocks.size())));
      (void)held.hot.Use(blocks);
      blocks = held.hot.Blocks();
      std::sort(blocks.begin(), blocks.end());
    }
    return out;
  }

 private:
  struct Held {
    HotSet hot{0};
    int next = -1;  // position of the step that goes on
  };
  std::map<int, Held> held_;  // by layer
};

// By exact attention weights of every head, sinks and recent tokens counted in: what no digest can
// beat with the same blocks for all heads and the same budget in every layer.
class OraclePolicy final : public Policy {
 public:
  explicit OraclePolicy(TextRun& run) : run_(run) {
    const Geometry& geometry = run.transformer().geometry();
    kv_heads_ = geometry.kv_heads;
    keys_.resize(static_cast<size_t>(geometry.layers * kv_heads_));
  }
  void Refresh(int first, int end) override {
    for (size_t i = 0; i < keys_.size(); ++i) {
      keys_[i].Load(run_, static_cast<int>(i) / kv_heads_, static_cast<int>(i) % kv_heads_, first, end);
    }
  }
  RowSelections Select(int layer, int first, const LayerActivations& a, int budget) override {
    RowSelections out;
    for (int r = 0; r < a.rows; ++r) {
      const MiddleBlocks middle = MiddleOf(first + r);
      std::vector<float> scores(static_cast<size_t>(middle.count()));
      for (int h = 0; h < kv_heads_; ++h) AddWeights(layer, h, first + r, a, r, &scores);
      std::vector<int32_t>& blocks =
          out.blocks.emplace_back(TopBlocks(scores, SelectedBlocks(budget, first + r)));
      for (int32_t& b : blocks) b += middle.first;
    }
    return out;
  }

 private:
  void AddWeights(int layer, int kv_head, int position, const LayerActivations& a, int row,
                  std::vector<float>* scores) {
    const ModelConfig& config = run_.transformer().config();
    const int group = config.GroupSize();
    BlockKeys& keys = keys_[static_cast<size_t>(layer * kv_heads_ + kv_head)];
    keys.Load(run_, layer, kv_head, position / kBlockTokens, position / kBlockTokens + 1);
    const size_t first = static_cast<size_t>(MiddleOf(position).first) * kBlockTokens;
    std::vector<float> weights(static_cast<size_t>(position + 1));
    for (int g = 0; g < group; ++g) {
      const float* q = a.qkv + ptrdiff_t{row} * a.qkv_stride +
                       ptrdiff_t{kv_head * group + g} * config.head_dim;
      keys.Logits(q, 1.0f / std::sqrt(static_cast<float>(config.head_dim)), 0, absl::MakeSpan(weights));
      Softmax(absl::MakeSpan(weights));
      for (size_t i = 0; i < scores->size() * kBlockTokens; ++i) {
        (*scores)[i / kBlockTokens] += weights[first + i];
      }
    }
  }

  TextRun& run_;
  int kv_heads_ = 0;
  std::vector<BlockKeys> keys_;  // [layer][KV head]
};

// By what whole blocks are summarised to: centre and radius (score q.c + radius |q| / 2), or the
// least and the largest value of each channel (an upper bound of q.k). One head a layer.
class SummaryPolicy final : public Policy {
 public:
  SummaryPolicy(TextRun& run, bool bounds, std::vector<int> heads)
      : run_(run), bounds_(bounds), heads_(std::move(heads)) {
    dim_ = run.transformer().geometry().head_dim;
    stride_ = static_cast<size_t>(bounds ? 2 * dim_ : dim_ + 1);
    summaries_.resize(heads_.size());
  }
  void Refresh(int first, int end) override {
    for (size_t l = 0; l < heads_.size(); ++l) {
      BlockKeys keys;  // loaded at their places; only [first, end) is read
      keys.Load(run_, static_cast<int>(l), heads_[l], first, end);
      summaries_[l].resize(static_cast<size_t>(end) * stride_);
      for (int b = first; b < end; ++b) {
        Summarise(keys, b, summaries_[l].data() + static_cast<size_t>(b) * stride_);
      }
    }
  }
  RowSelections Select(int layer, int first, const LayerActivations& a, int budget) override {
    const ModelConfig& config = run_.transformer().config();
    const int group = config.GroupSize();
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim_));
    RowSelections out;
    for (int r = 0; r < a.rows; ++r) {
      const MiddleBlocks middle = MiddleOf(first + r);
      std::vector<float> scores(static_cast<size_t>(middle.count()));
      std::vector<float> logits(scores.size());
      for (int g = 0; g < group && !scores.empty(); ++g) {
        const float* q = a.qkv + ptrdiff_t{r} * a.qkv_stride +
                         ptrdiff_t{heads_[static_cast<size_t>(layer)] * group + g} * dim_;
        for (int b = middle.first; b < middle.end; ++b) {
          logits[static_cast<size_t>(b - middle.first)] =
              scale * BlockLogit(q, summaries_[static_cast<size_t>(layer)].data() +
                                        static_cast<size_t>(b) * stride_);
        }
        Softmax(absl::MakeSpan(logits));
        for (size_t b = 0; b < scores.size(); ++b) scores[b] += logits[b];
      }
      std::vector<int32_t>& blocks =
          out.blocks.emplace_back(TopBlocks(scores, SelectedBlocks(budget, first + r)));
      for (int32_t& b : blocks) b += middle.first;
    }
    return out;
  }

 private:
  void Summarise(const BlockKeys& keys, int block, float* out) const {
    if (bounds_) {
      for (int d = 0; d < dim_; ++d) {
        const float* channel = keys.Token(block, 0) + d * kBlockTokens;
        out[2 * d] = *std::min_element(channel, channel + kBlockTokens);
        out[2 * d + 1] = *std::max_element(channel, channel + kBlockTokens);
      }
      return;
    }
    float squares[kBlockTokens] = {};
    for (int d = 0; d < dim_; ++d) {
      const float* channel = keys.Token(block, 0) + d * kBlockTokens;
      float mean = 0;
      for (int t = 0; t < kBlockTokens; ++t) mean += channel[t] / kBlockTokens;
      out[d] = mean;
      for (int t = 0; t < kBlockTokens; ++t) squares[t] += (channel[t] - mean) * (channel[t] - mean);
    }
    out[dim_] = std::sqrt(*std::max_element(squares, squares + kBlockTokens));
  }
  float BlockLogit(const float* q, const float* summary) const {
    float sum = 0, norm = 0;
    for (int d = 0; d < dim_; ++d) {
      sum += bounds_ ? std::max(q[d] * summary[2 * d], q[d] * summary[2 * d + 1]) : q[d] * summary[d];
      norm += q[d] * q[d];
    }
    return bounds_ ? sum : sum + 0.5f * summary[dim_] * std::sqrt(norm);
  }

  TextRun& run_;
  const bool bounds_;
  const std::vector<int> heads_;
  int dim_ = 0;
  size_t stride_ = 0;
  std::vector<std::vector<float>> summaries_;
};

}  // namespace

std::unique_ptr<Policy> MakePolicy(const PolicyKind& kind, TextRun& run) {
  using Way = PolicyKind::Way;
  switch (kind.way) {
    case Way::kFull:
      return std::make_unique<FullPolicy>();
    case Way::kWindow:
      return std::make_unique<WindowPolicy>();
    case Way::kCentres:
    case Way::kBounds:
      return std::make_unique<SummaryPolicy>(run, kind.way == Way::kBounds, kind.heads);
    case Way::kOracle:
      return std::make_unique<OraclePolicy>(run);
    case Way::kDigests:
    case Way::kEqual:
    case Way::kResident:
    case Way::kHeadwise:
    case Way::kOneHead:
      break;
  }
  std::vector<std::vector<std::vector<CalibrationHead>>> parts;
  const size_t count = kind.way == Way::kHeadwise ? kind.calibration->layers[0].heads.size() : 1;
  for (size_t p = 0; p < count; ++p) {
    auto& layers = parts.emplace_back();
    for (size_t l = 0; l < kind.calibration->layers.size(); ++l) {
      const auto& heads = kind.calibration->layers[l].heads;
      if (kind.way == Way::kHeadwise) {
        layers.push_back({heads[p]});
      } else if (kind.way == Way::kOneHead) {
        layers.push_back({heads[static_cast<size_t>(kind.heads[l])]});
      } else {
        layers.push_back(heads);
      }
    }
  }
  const int bits = kind.calibration->bits;
  if (kind.way == Way::kResident) {
    return std::make_unique<ResidentPolicy>(run, bits, std::move(parts), kind.calibration);
  }
  return std::make_unique<DigestPolicy>(run, bits, std::move(parts),
                                        kind.way == Way::kDigests ? kind.calibration : nullptr);
}

}  // namespace kvt
