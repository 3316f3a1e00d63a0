#include "kernels/model/calibrator.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/units.h"
#include "kernels/model/block_keys.h"
#include "kernels/model/digest_selector.h"
#include "kernels/model/layer_losses.h"
#include "kernels/model/model_config.h"
#include "kernels/select/hot_set.h"
#include "kernels/select/layer_budgets.h"

namespace kvt {
namespace {

constexpr int kLengthTokensMin = 1024;
constexpr int kSpreadTokens = 512;  // before the end of a length
constexpr int kTraceRows = 128;
static_assert(kTraceRows <= kSparseRowsMax);
// Channels of fewer than 4 bits clip this share of the deviations (FACTS: 3 bits at 99.9 %).
constexpr double kClippedShare = 0.001;
constexpr float kScaleMin = 1e-6f;
// Capacities of a miss curve: k, k + k / 4, ...; 9 of them reach 3 k.
constexpr int kMissPoints = 9;

// As spread over [length - 512, length).
std::vector<int> SpreadPositions(int length, int queries) {
  std::vector<int> positions;
  const int step = kSpreadTokens / queries;
  for (int i = 0; i < queries; ++i) positions.push_back(length - kSpreadTokens + (i + 1) * step - 1);
  return positions;
}

}  // namespace

struct Calibrator::Text {
  std::unique_ptr<TextRun> run;
  std::vector<int32_t> tokens;  // of the longest length
  std::vector<int> lengths;    // that it reaches
  std::vector<int> positions;  // whose queries are kept, ascending
  absl::flat_hash_map<int, int> index;
  std::vector<std::vector<float>> q;  // [layer][position index][heads * head_dim]

  // The last 128 positions of the longest length.
  std::vector<int> TracePositions() const {
    std::vector<int> trace;
    for (int p = lengths.back() - kTraceRows; p < lengths.back(); ++p) trace.push_back(p);
    return trace;
  }
};

struct Calibrator::Probe {
  std::vector<int> positions;
  std::vector<HeadStats> heads;  // [KV head]: means over its query heads
  // [row][query head][middle block]: attention weight of the block; and what lies outside the middle.
  std::vector<std::vector<float>> mass;
  std::vector<std::vector<float>> rest;    // [row][query head]
  std::vector<std::vector<float>> scores;  // [KV head][row * blocks]
  std::vector<size_t> row_at;              // [row]: its first score; blocks of the row follow
  std::vector<int> blocks;                 // [row]
};

Calibrator::Calibrator(const Transformer& transformer, std::string fingerprint,
                       CalibratorOptions options)
    : transformer_(transformer), fingerprint_(std::move(fingerprint)), options_(std::move(options)) {}
Calibrator::~Calibrator() = default;

absl::StatusOr<std::unique_ptr<Calibrator>> Calibrator::Create(const Transformer& transformer,
                                                               std::string fingerprint,
                                                               CalibratorOptions options) {
  const int context = transformer.config().context_tokens;
  if (options.lengths.empty()) return absl::InvalidArgumentError("lengths: none");
  std::sort(options.lengths.begin(), options.lengths.end());
  if (options.lengths.front() < kLengthTokensMin || options.lengths.back() > context) {
    return absl::InvalidArgumentError(absl::StrCat("lengths: not within [", kLengthTokensMin, ", ",
                                                   context, "], the model's context"));
  }
  if (options.queries < 2 || options.queries > kSparseRowsMax || kSpreadTokens % options.queries != 0) {
    return absl::InvalidArgumentError(absl::StrCat("queries: ", options.queries, " does not divide ",
                                                   kSpreadTokens, " or is not in [2, ",
                                                   kSparseRowsMax, "]"));
  }
  if (options.set.bits < kDigestBitsMin || options.set.bits > kDigestBitsMax) {
    return absl::InvalidArgumentError(absl::StrCat("bits: ", options.set.bits, " is not in [",
                                                   kDigestBitsMin, ", ", kDigestBitsMax, "]"));
  }
  return std::unique_ptr<Calibrator>(
      new Calibrator(transformer, std::move(fingerprint), std::move(options)));
}

absl::Status Calibrator::AddText(absl::Span<const int32_t> tokens) {
  auto text = std::make_unique<Text>();
  for (const int length : options_.lengths) {
    if (static_cast<size_t>(length) > tokens.size()) break;
    text->lengths.push_back(length);
    for (const int p : SpreadPositions(length, options_.queries)) text->positions.push_back(p);
  }
  if (text->lengths.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("has ", tokens.size(), " tokens, fewer than the ",
                                                   options_.lengths.front(),
                                                   " of the shortest length"));
  }
  for (const int p : text->TracePositions()) text->positions.push_back(p);
  std::sort(text->positions.begin(), text->positions.end());
  text->positions.erase(std::unique(text->positions.begin(), text->positions.end()),
                        text->positions.end());
  for (size_t i = 0; i < text->positions.size(); ++i) {
    text->index[text->positions[i]] = static_cast<int>(i);
  }
  const ModelConfig& config = transformer_.config();
  const auto width = static_cast<size_t>(config.heads * config.head_dim);
  text->q.assign(static_cast<size_t>(config.layers),
                 std::vector<float>(text->positions.size() * width));
  KVT_ASSIGN_OR_RETURN(text->run, TextRun::Create(transformer_, text->lengths.back()));
  const TextRun::Observer keep = [&](int layer, int first, const LayerActivations& a) {
    for (int r = 0; r < a.rows; ++r) {
      const auto it = text->index.find(first + r);
      if (it == text->index.end()) continue;
      std::copy_n(a.qkv + ptrdiff_t{r} * a.qkv_stride, width,
                  text->q[static_cast<size_t>(layer)].data() +
                      static_cast<size_t>(it->second) * width);
    }
  };
  KVT_RETURN_IF_ERROR(text->run->Prefill(
      tokens.first(static_cast<size_t>(text->lengths.back())), 0, keep));
  text->tokens.assign(tokens.begin(), tokens.begin() + text->lengths.back());
  texts_.push_back(std::move(text));
  return absl::OkStatus();
}

// Mean and deviation of each channel over all texts, without the sinks, which are never scored.
CalibrationHead Calibrator::Channels(int layer, int kv_head) const {
  const auto dim = static_cast<size_t>(transformer_.geometry().head_dim);
  const int bits = options_.set.bits;
  std::vector<std::vector<float>> values(dim);
  for (const auto& text : texts_) {
    const int blocks = text->lengths.back() / kBlockTokens;
    BlockKeys keys;
    keys.Load(*text->run, layer, kv_head, 0, blocks);
    for (int b = 1; b < blocks; ++b) {
      for (size_t d = 0; d < dim; ++d) {
        const float* channel = keys.Token(b, 0) + d * kBlockTokens;
        values[d].insert(values[d].end(), channel, channel + kBlockTokens);
      }
    }
  }
  CalibrationHead head{kv_head, {}, {}};
  for (std::vector<float>& channel : values) {
    const double mean = std::accumulate(channel.begin(), channel.end(), 0.0) /
                        static_cast<double>(channel.size());
    for (float& x : channel) x = std::fabs(x - static_cast<float>(mean));
    const double share = bits == 4 ? 0 : kClippedShare;
    const auto at = channel.end() - 1 -
                    static_cast<ptrdiff_t>(share * static_cast<double>(channel.size()));
    std::nth_element(channel.begin(), at, channel.end());
    head.offset.push_back(static_cast<float>(mean));
    head.scale.push_back(std::max(kScaleMin, *at / (0.5f * static_cast<float>((1 << bits) - 1))));
  }
  return head;
}

absl::Status Calibrator::MeasureTexts() {
  const Geometry& geometry = transformer_.geometry();
  channels_.clear();
  for (int layer = 0; layer < geometry.layers; ++layer) {
    auto& heads = channels_.emplace_back();
    for (int h = 0; h < geometry.kv_heads; ++h) heads.push_back(Channels(layer, h));
  }
  probes_.clear();
  probes_.resize(static_cast<size_t>(geometry.layers));
  for (size_t text = 0; text < texts_.size(); ++text) KVT_RETURN_IF_ERROR(MeasureText(text));
  return absl::OkStatus();
}

absl::Status Calibrator::MeasureText(size_t index) {
  Text& text = *texts_[index];
  const Geometry& geometry = transformer_.geometry();
  const ModelConfig& config = transformer_.config();
  const auto width = static_cast<size_t>(config.heads * config.head_dim);
  // A selector for each KV head alone: the scores of a set are the mean of its heads'.
  std::vector<std::unique_ptr<DigestSelector>> selectors;
  for (int h = 0; h < geometry.kv_heads; ++h) {
    std::vector<std::vector<CalibrationHead>> layers;
    for (const auto& heads : channels_) layers.push_back({heads[static_cast<size_t>(h)]});
    KVT_ASSIGN_OR_RETURN(auto selector,
                         DigestSelector::Create(*text.run, options_.set.bits, std::move(layers)));
    selectors.push_back(std::move(selector));
  }
  for (int layer = 0; layer < geometry.layers; ++layer) {
    KVT_RETURN_IF_ERROR(MeasureLayer(index, layer));
    auto& probes = probes_[static_cast<size_t>(layer)];
    const size_t first = probes.size() - text.lengths.size();
    for (int h = 0; h < geometry.kv_heads; ++h) {
      DigestSelector& selector = *selectors[static_cast<size_t>(h)];
      KVT_RETURN_IF_ERROR(selector.MakeDigests(layer, 0, text.lengths.back() / kBlockTokens));
      for (size_t l = 0; l < text.lengths.size(); ++l) {
        Probe& probe = *probes[first + l];
        std::vector<float> q;
        for (const int p : probe.positions) {
          const float* row = text.q[static_cast<size_t>(layer)].data() +
                             static_cast<size_t>(text.index[p]) * width;
          q.insert(q.end(), row, row + width);
        }
        KVT_ASSIGN_OR_RETURN(const auto scores, selector.Score(layer, probe.positions, q.data(),
                                                               static_cast<int>(width)));
        auto& out = probe.scores.emplace_back();
        for (const auto& row : scores) out.insert(out.end(), row.begin(), row.end());
      }
    }
  }
  return absl::OkStatus();
}

// Exact attention weights of every kept query of a layer.
absl::Status Calibrator::MeasureLayer(size_t index, int layer) {
  Text& text = *texts_[index];
  const ModelConfig& config = transformer_.config();
  const int group = config.GroupSize();
  const auto width = static_cast<size_t>(config.heads * config.head_dim);
  const float scale = 1.0f / std::sqrt(static_cast<float>(config.head_dim));
  const size_t first = probes_[static_cast<size_t>(layer)].size();
  for (const int length : text.lengths) {
    auto probe = std::make_unique<Probe>();
    probe->positions = SpreadPositions(length, options_.queries);
    probe->heads.resize(static_cast<size_t>(config.kv_heads));
    size_t scores = 0;
    for (const int p : probe->positions) {
      probe->blocks.push_back(MiddleOf(p).count());
      probe->row_at.push_back(scores);
      scores += static_cast<size_t>(MiddleOf(p).count());
      probe->mass.emplace_back(static_cast<size_t>(config.heads * MiddleOf(p).count()));
      probe->rest.emplace_back(static_cast<size_t>(config.heads));
    }
    probes_[static_cast<size_t>(layer)].push_back(std::move(probe));
  }
  BlockKeys keys;
  std::vector<float> weights, middle_weights;
  for (int head = 0; head < config.heads; ++head) {
    if (head % group == 0) {
      keys.Load(*text.run, layer, head / group, 0,
                static_cast<int>(CeilDiv(static_cast<uint64_t>(text.lengths.back()), kBlockTokens)));
    }
    for (size_t l = 0; l < text.lengths.size(); ++l) {
      Probe& probe = *probes_[static_cast<size_t>(layer)][first + l];
      // Rows of the last query's middle; zero where an earlier query's ends.
      const auto tokens = static_cast<size_t>(probe.blocks.back() * kBlockTokens);
      middle_weights.assign(tokens * probe.positions.size(), 0);
      for (size_t r = 0; r < probe.positions.size(); ++r) {
        const int position = probe.positions[r];
        weights.resize(static_cast<size_t>(position + 1));
        keys.Logits(text.q[static_cast<size_t>(layer)].data() +
                        static_cast<size_t>(text.index[position]) * width +
                        static_cast<size_t>(head * config.head_dim),
                    scale, 0, absl::MakeSpan(weights));
        Softmax(absl::MakeSpan(weights));
        const MiddleBlocks middle = MiddleOf(position);
        const float* from = weights.data() + middle.first * kBlockTokens;
        std::copy_n(from, middle.count() * kBlockTokens, middle_weights.data() + r * tokens);
        double inside = 0;
        for (int b = 0; b < middle.count(); ++b) {
          const float mass = std::accumulate(from + b * kBlockTokens, from + (b + 1) * kBlockTokens,
                                             0.0f);
          probe.mass[r][static_cast<size_t>(head * middle.count() + b)] = mass;
          inside += mass;
        }
        probe.rest[r][static_cast<size_t>(head)] = static_cast<float>(1 - inside);
      }
      const HeadStats stats = MeasureHead(middle_weights, options_.queries);
      HeadStats& sum = probe.heads[static_cast<size_t>(head / group)];
      sum.top16_excess += stats.top16_excess / group;
      sum.middle_mass += stats.middle_mass / group;
    }
  }
  return absl::OkStatus();
}

Captured Calibrator::CapturedWith(int layer, const std::vector<int>& heads) const {
  Captured captured;
  std::vector<float> scores;
  for (const auto& probe : probes_[static_cast<size_t>(layer)]) {
    for (size_t r = 0; r < probe->positions.size(); ++r) {
      const auto blocks = static_cast<size_t>(probe->blocks[r]);
      scores.assign(blocks, 0);
      for (const int h : heads) {
        const float* from = probe->scores[static_cast<size_t>(h)].data() + probe->row_at[r];
        for (size_t b = 0; b < blocks; ++b) scores[b] += from[b];
      }
      const std::vector<int32_t> chosen =
          TopBlocks(scores, SelectedBlocks(options_.budget, probe->positions[r]));
      for (size_t head = 0; head < probe->rest[r].size(); ++head) {
        double mass = probe->rest[r][head];
        for (const int32_t b : chosen) mass += probe->mass[r][head * blocks + static_cast<size_t>(b)];
        captured.Add(mass);
      }
    }
  }
  return captured;
}

Captured Calibrator::CapturedHeadwise(int layer) const {
  Captured captured;
  const auto group = static_cast<size_t>(transformer_.config().GroupSize());
  for (const auto& probe : probes_[static_cast<size_t>(layer)]) {
    for (size_t r = 0; r < probe->positions.size(); ++r) {
      const auto blocks = static_cast<size_t>(probe->blocks[r]);
      const int count = SelectedBlocks(options_.budget, probe->positions[r]);
      for (size_t h = 0; h < probe->scores.size(); ++h) {
        const std::vector<int32_t> chosen =
            TopBlocks({probe->scores[h].data() + probe->row_at[r], blocks}, count);
        for (size_t head = h * group; head < (h + 1) * group; ++head) {
          double mass = probe->rest[r][head];
          for (const int32_t b : chosen) {
            mass += probe->mass[r][head * blocks + static_cast<size_t>(b)];
          }
          captured.Add(mass);
        }
      }
    }
  }
  return captured;
}

absl::Status Calibrator::Losses(Calibration* calibration) {
  std::vector<std::vector<double>> sums(calibration->layers.size());
  for (const auto& text : texts_) {
    const int end = text->lengths[text->lengths.size() / 2];
    const int rows = std::min(options_.loss_rows, kSparseRowsMax);
    const absl::Span<const int32_t> tokens =
        absl::MakeConstSpan(text->tokens).subspan(static_cast<size_t>(end - rows),
                                                  static_cast<size_t>(rows));
    KVT_ASSIGN_OR_RETURN(const std::vector<std::vector<double>> losses,
                         MeasureLayerLosses(*text->run, *calibration, tokens, end - rows));
    for (size_t l = 0; l < losses.size(); ++l) {
      sums[l].resize(losses[l].size());
      for (size_t i = 0; i < losses[l].size(); ++i) {
        sums[l][i] += losses[l][i] / static_cast<double>(texts_.size());
      }
    }
  }
  for (size_t l = 0; l < sums.size(); ++l) {
    for (size_t i = sums[l].size(); i > 0; --i) {  // noise does not make more blocks lose more
      sums[l][i - 1] = std::max({sums[l][i - 1], i < sums[l].size() ? sums[l][i] : 0.0, 0.0});
    }
    calibration->layers[l].losses = std::move(sums[l]);
  }
  return absl::OkStatus();
}

absl::Status Calibrator::MissCurves(Calibration* calibration) {
  const ModelConfig& config = transformer_.config();
  const auto width = static_cast<size_t>(config.heads * config.head_dim);
  std::vector<std::vector<CalibrationHead>> heads;
  for (const CalibrationLayer& layer : calibration->layers) heads.push_back(layer.heads);
  const int last = config.context_tokens - 1;
  const std::vector<int> budgets =
      LayerBudgets(*calibration, options_.trace_budget, MiddleOf(last).count());
  for (size_t l = 0; l < heads.size(); ++l) {
    CalibrationLayer& layer = calibration->layers[l];
    if (heads[l].empty()) continue;
    layer.miss_least = SelectedBlocks(budgets[l], last) + 1;
    layer.miss_step = std::max(1, layer.miss_least / 4);
    layer.misses.assign(kMissPoints, 0);
  }
  for (const auto& text : texts_) {
    const std::vector<int> positions = text->TracePositions();
    KVT_ASSIGN_OR_RETURN(const auto selector,
                         DigestSelector::Create(*text->run, calibration->bits, heads));
    for (size_t l = 0; l < heads.size(); ++l) {
      if (heads[l].empty()) continue;
      const int index = static_cast<int>(l);
      KVT_RETURN_IF_ERROR(selector->MakeDigests(index, 0, text->lengths.back() / kBlockTokens));
      const float* q = text->q[l].data() +
                       static_cast<size_t>(text->index[positions.front()]) * width;
      KVT_ASSIGN_OR_RETURN(const SelectionTrace trace,
                           selector->Select(index, positions, q, static_cast<int>(width), budgets[l]));
      CalibrationLayer& layer = calibration->layers[l];
      for (int i = 0; i < kMissPoints; ++i) {
        const std::vector<int> misses = HotSetMisses(trace, layer.miss_least + i * layer.miss_step);
        layer.misses[static_cast<size_t>(i)] +=
            std::accumulate(misses.begin(), misses.end(), 0.0) /
            static_cast<double>(misses.size() * texts_.size());
      }
    }
  }
  return absl::OkStatus();
}

// What was measured with the sets does not hold for it.
Calibration Calibrator::WithEveryHead(Calibration calibration) const {
  for (size_t l = 0; l < channels_.size(); ++l) {
    calibration.layers[l].heads = channels_[l];
    calibration.layers[l].misses.clear();
    calibration.layers[l].losses.clear();
  }
  return calibration;
}

absl::StatusOr<CalibrationReport> Calibrator::Finish() {
  KVT_CHECK(!texts_.empty());
  KVT_RETURN_IF_ERROR(MeasureTexts());
  const Geometry& geometry = transformer_.geometry();
  const auto kv_heads = static_cast<size_t>(geometry.kv_heads);
  CalibrationReport report;
  std::vector<LayerMeasure> measures;
  for (const auto& probes : probes_) {
    LayerReport& layer = report.layers.emplace_back();
    layer.measure = {std::vector<double>(kv_heads), std::vector<double>(kv_heads)};
    size_t at = 0;
    for (const auto& text : texts_) {
      std::vector<double> excess(kv_heads), mass(kv_heads);
      for (size_t l = 0; l < text->lengths.size(); ++l, ++at) {
        for (size_t h = 0; h < kv_heads; ++h) {
          excess[h] += probes[at]->heads[h].top16_excess / static_cast<double>(text->lengths.size());
          mass[h] += probes[at]->heads[h].middle_mass / static_cast<double>(text->lengths.size());
        }
      }
      const auto best = [](const std::vector<double>& v) {
        return static_cast<int>(std::max_element(v.begin(), v.end()) - v.begin());
      };
      layer.best_by_text.push_back(best(excess));
      layer.mam_by_text.push_back(best(mass));
      for (size_t h = 0; h < kv_heads; ++h) {
        layer.measure.excess[h] += excess[h] / static_cast<double>(texts_.size());
        layer.measure.middle_mass[h] += mass[h] / static_cast<double>(texts_.size());
      }
    }
    measures.push_back(layer.measure);
  }
  KVT_ASSIGN_OR_RETURN(const std::vector<LayerChoice> choices,
                       ChooseSelectingSets(geometry, measures, options_.set,
                                           [this](int layer, const std::vector<int>& heads) {
                                             return CapturedWith(layer, heads).Mean().kl;
                                           }));
  Calibration& calibration = report.calibration;
  calibration.model = fingerprint_;
  calibration.geometry = geometry;
  calibration.bits = options_.set.bits;
  std::vector<int> all(kv_heads);
  std::iota(all.begin(), all.end(), 0);
  for (int l = 0; l < geometry.layers; ++l) {
    LayerReport& layer = report.layers[static_cast<size_t>(l)];
    layer.choice = choices[static_cast<size_t>(l)];
    layer.captured.headwise = CapturedHeadwise(l).Mean();
    layer.captured.set = layer.choice.heads.empty() ? Captured{1, 0, 1}
                                                    : CapturedWith(l, layer.choice.heads).Mean();
    layer.captured.all = CapturedWith(l, all).Mean();
    layer.captured.mam = CapturedWith(l, {layer.choice.mam_head}).Mean();
    layer.captured.reversed = CapturedWith(l, {layer.choice.least_head}).Mean();
    CalibrationLayer& out = calibration.layers.emplace_back();
    for (const int h : layer.choice.heads) {
      out.heads.push_back(channels_[static_cast<size_t>(l)][static_cast<size_t>(h)]);
    }
    out.best = layer.choice.best;
    out.runner_up = layer.choice.runner_up;
    out.margin = layer.choice.margin;
    out.mam_head = layer.choice.mam_head;
    out.least_head = layer.choice.least_head;
  }
  if (options_.loss_rows > 0) KVT_RETURN_IF_ERROR(Losses(&calibration));
  KVT_RETURN_IF_ERROR(MissCurves(&calibration));
  report.every_head = WithEveryHead(calibration);
  return report;
}

}  // namespace kvt
