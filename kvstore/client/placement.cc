#include "kvstore/client/placement.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/string_view.h"
#include "kernels/base/random.h"

namespace kvt {
namespace {

// FNV-1a, finished by a mixer: the same in every process and build.
uint64_t NameHash(absl::string_view name) {
  uint64_t hash = 0xcbf29ce484222325ull;
  for (const char c : name) {
    hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3ull;
  }
  return Mix64(hash);
}

uint64_t KeyHash(const BlockKey& key) {
  uint64_t low = 0;
  uint64_t high = 0;
  std::memcpy(&low, key.bytes.data(), sizeof(low));
  std::memcpy(&high, key.bytes.data() + sizeof(low), sizeof(high));
  return low ^ Mix64(high);
}

// weight / -ln(u), u uniform in (0, 1) for (group, store): the largest wins, in proportion to the
// weights.
double Score(uint64_t key_hash, const StoreRef& store) {
  const uint64_t bits = CounterRandom(key_hash, NameHash(store.name));
  const double u = (static_cast<double>(bits >> 11) + 0.5) * 0x1.0p-53;
  return static_cast<double>(store.weight) / -std::log(u);
}

}  // namespace

std::vector<int> RankStores(const BlockKey& group_key, absl::Span<const StoreRef> stores) {
  const uint64_t key_hash = KeyHash(group_key);
  std::vector<double> scores(stores.size());
  std::vector<int> order;
  for (size_t i = 0; i < stores.size(); ++i) {
    if (stores[i].weight == 0) continue;
    scores[i] = Score(key_hash, stores[i]);
    order.push_back(static_cast<int>(i));
  }
  std::sort(order.begin(), order.end(), [&](int a, int b) {
    if (scores[a] != scores[b]) return scores[a] > scores[b];
    return stores[a].name < stores[b].name;
  });
  return order;
}

int OwnerOf(const BlockKey& group_key, absl::Span<const StoreRef> stores) {
  const uint64_t key_hash = KeyHash(group_key);
  int best = -1;
  double best_score = 0;
  for (size_t i = 0; i < stores.size(); ++i) {
    if (stores[i].weight == 0) continue;
    const double score = Score(key_hash, stores[i]);
    if (best < 0 || score > best_score ||
        (score == best_score && stores[i].name < stores[best].name)) {
      best = static_cast<int>(i);
      best_score = score;
    }
  }
  return best;
}

}  // namespace kvt
