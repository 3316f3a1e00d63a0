// Which heads select in each layer (DESIGN 5): the head of largest top-16 excess, then greedily the
// head, of any layer, whose addition lowers the loss most, while the digest bytes allow and the gain
// is worth it. A layer whose loss stays too high is left dense. Pure; thread-safe.
#pragma once

#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/layout/geometry.h"

namespace kvt {

struct SelectingSetOptions {
  int bits = 4;
  double digest_share_max = 0.05;  // of KV bytes, over all layers; dense layers have no digest
  double gain_min = 0;             // least fall of a layer's loss for one more head
  int dense_layers_max = 0;
  double dense_loss_min = 0.5;     // only layers that lose more go dense, the worst first
};

// Of one layer: means over the queries and texts.
struct LayerMeasure {
  std::vector<double> excess;       // by KV head: mean over its query heads
  std::vector<double> middle_mass;  // the same
};

struct LayerChoice {
  std::vector<int> heads;  // by the order in which they were taken; empty: dense
  int best = 0;            // head of largest excess
  int runner_up = -1;      // -1: there is one head only
  double margin = 0;       // (best - runner_up) / best of the excess
  int mam_head = 0;        // of largest middle mass
  int least_head = 0;      // of smallest excess: the reversed control
  double loss = 0;         // of `heads`; 0 where dense
};

// Loss of a layer with these selecting heads (KL of captured attention). Deterministic.
using SetLoss = std::function<double(int layer, const std::vector<int>& heads)>;

// Share of KV bytes that one head's digest takes in its layer: bits / (32 x KV heads).
[[nodiscard]] double DigestShare(const Geometry& geometry, int bits);

// InvalidArgument when not even one head for each layer fits.
[[nodiscard]] absl::StatusOr<std::vector<LayerChoice>> ChooseSelectingSets(
    const Geometry& geometry, const std::vector<LayerMeasure>& measures,
    const SelectingSetOptions& options, const SetLoss& loss);

}  // namespace kvt
