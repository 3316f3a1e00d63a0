#include "kernels/select/selecting_set.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/layout/digest.h"

namespace kvt {
namespace {

// KV heads by falling value; equal ones by number.
std::vector<int> Ranked(const std::vector<double>& values) {
  std::vector<int> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return values[static_cast<size_t>(a)] > values[static_cast<size_t>(b)];
  });
  return order;
}

LayerChoice RankLayer(const LayerMeasure& measure) {
  const std::vector<int> order = Ranked(measure.excess);
  LayerChoice choice;
  choice.best = order.front();
  choice.least_head = order.back();
  choice.mam_head = Ranked(measure.middle_mass).front();
  if (order.size() > 1) {
    choice.runner_up = order[1];
    const double best = measure.excess[static_cast<size_t>(choice.best)];
    if (best > 0) choice.margin = 1 - measure.excess[static_cast<size_t>(order[1])] / best;
  }
  choice.heads = {choice.best};
  return choice;
}

// The best head to add to one layer.
struct Addition {
  int head = -1;
  double loss = 0;
};
Addition BestAddition(int layer, const LayerChoice& choice, int kv_heads, const SetLoss& loss) {
  Addition best;
  if (static_cast<int>(choice.heads.size()) >= std::min(kv_heads, kDigestHeadsMax)) return best;
  for (int head = 0; head < kv_heads; ++head) {
    if (std::find(choice.heads.begin(), choice.heads.end(), head) != choice.heads.end()) continue;
    std::vector<int> heads = choice.heads;
    heads.push_back(head);
    const double value = loss(layer, heads);
    if (best.head < 0 || value < best.loss) best = {head, value};
  }
  return best;
}

// Leaves the layers of largest loss dense; returns how many.
int LeaveDense(const SelectingSetOptions& options, std::vector<LayerChoice>& choices) {
  std::vector<double> losses;
  for (const LayerChoice& choice : choices) losses.push_back(choice.loss);
  int dense = 0;
  for (const int layer : Ranked(losses)) {
    LayerChoice& choice = choices[static_cast<size_t>(layer)];
    if (dense >= options.dense_layers_max || choice.loss < options.dense_loss_min) break;
    choice.heads.clear();
    choice.loss = 0;
    ++dense;
  }
  return dense;
}

}  // namespace

double DigestShare(const Geometry& geometry, int bits) {
  return static_cast<double>(DigestHeadBytes(geometry.head_dim, bits)) /
         static_cast<double>(2 * geometry.SlotBytes());
}

absl::StatusOr<std::vector<LayerChoice>> ChooseSelectingSets(
    const Geometry& geometry, const std::vector<LayerMeasure>& measures,
    const SelectingSetOptions& options, const SetLoss& loss) {
  KVT_CHECK(static_cast<int>(measures.size()) == geometry.layers, "layers=", measures.size());
  std::vector<LayerChoice> choices;
  for (int layer = 0; layer < geometry.layers; ++layer) {
    const LayerMeasure& measure = measures[static_cast<size_t>(layer)];
    KVT_CHECK(static_cast<int>(measure.excess.size()) == geometry.kv_heads &&
              measure.middle_mass.size() == measure.excess.size());
    choices.push_back(RankLayer(measure));
    choices.back().loss = loss(layer, choices.back().heads);
  }
  const int dense = LeaveDense(options, choices);
  // In units of one head's digest.
  const double share = DigestShare(geometry, options.bits);
  const int units = static_cast<int>(options.digest_share_max * geometry.layers / share + 1e-9);
  int used = geometry.layers - dense;
  if (used > units) {
    return absl::InvalidArgumentError(absl::StrCat(
        "digest share: ", options.digest_share_max, " of the KV holds ", units,
        " digests of heads, fewer than the ", used, " layers; one head takes ", share,
        " of its layer: raise the share, or use fewer bits"));
  }
  std::vector<Addition> additions;
  for (int layer = 0; layer < geometry.layers; ++layer) {
    const LayerChoice& choice = choices[static_cast<size_t>(layer)];
    additions.push_back(choice.heads.empty()
                            ? Addition{}
                            : BestAddition(layer, choice, geometry.kv_heads, loss));
  }
  for (; used < units; ++used) {
    int best = -1;
    double best_gain = options.gain_min;
    for (int layer = 0; layer < geometry.layers; ++layer) {
      const Addition& addition = additions[static_cast<size_t>(layer)];
      const double gain = choices[static_cast<size_t>(layer)].loss - addition.loss;
      if (addition.head >= 0 && gain > best_gain) {
        best = layer;
        best_gain = gain;
      }
    }
    if (best < 0) break;
    LayerChoice& choice = choices[static_cast<size_t>(best)];
    Addition& addition = additions[static_cast<size_t>(best)];
    choice.heads.push_back(addition.head);
    choice.loss = addition.loss;
    addition = BestAddition(best, choice, geometry.kv_heads, loss);
  }
  return choices;
}

}  // namespace kvt
