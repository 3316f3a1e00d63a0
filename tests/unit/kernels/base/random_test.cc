#include "kernels/base/random.h"

#include <gtest/gtest.h>

namespace kvt {
namespace {

TEST(Random, CounterUniform_IsAFunctionOfSeedAndCounterAndUniform) {
  EXPECT_EQ(CounterRandom(1, 2), CounterRandom(1, 2));
  EXPECT_NE(CounterRandom(1, 2), CounterRandom(2, 1));
  double sum = 0;
  int buckets[16] = {};
  for (int i = 0; i < 16000; ++i) {
    const double u = CounterUniform(42, i);
    ASSERT_GE(u, 0.0);
    ASSERT_LT(u, 1.0);
    sum += u;
    ++buckets[static_cast<int>(u * 16)];
  }
  EXPECT_NEAR(sum / 16000, 0.5, 0.01);
  for (const int count : buckets) EXPECT_NEAR(count, 1000, 150);
}

}  // namespace
}  // namespace kvt
