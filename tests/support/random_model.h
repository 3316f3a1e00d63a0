// Small Llama, Qwen2 and Qwen3 folders with weights from a seed: what tests/support/goldens/make_random_model.py
// makes, bit for bit (its comment has the rule), so that goldens made there hold for folders made
// here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvt {

struct RandomModelSpec {
  const char* name;
  uint64_t seed;
  int heads, kv_heads, head_dim;
  int hidden, intermediate, vocab;
  bool tied;
  const char* dtype;  // of the file: "BF16", "F16" or "F32"; the values are the same
  int shards;
  const char* family = "llama";  // "qwen2": biases of q, k, v; "qwen3": norms of q's and k's heads
};
inline constexpr int kRandomModelLayers = 2;

// The ones that random_goldens.bin has goldens for.
const std::vector<RandomModelSpec>& RandomModelSpecs();

// Writes config.json and the weights into `folder`, which exists.
void WriteRandomModel(const RandomModelSpec& spec, const std::string& folder);

}  // namespace kvt
