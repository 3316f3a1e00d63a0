#include "kernels/base/random.h"

#include <sys/random.h>

#include "kernels/base/check.h"

namespace kvt {

Random Random::FromEntropy() {
  uint64_t seed = 0;
  const ssize_t got = getrandom(&seed, sizeof(seed), 0);
  KVT_CHECK(got == sizeof(seed), "getrandom returned ", got);
  return Random(seed);
}

}  // namespace kvt
