#include "kernels/cpu/write_kv.h"

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/layout/named_layout.h"
#include "kernels/layout/planes.h"
#include "tests/kernels/attention_fixture.h"

namespace kvt {
namespace {

constexpr uint64_t kSeed = 7;

struct Rows {
  Rows(const Geometry& geometry, int rows) : width(geometry.kv_heads * geometry.head_dim) {
    std::mt19937_64 random(kSeed);
    std::normal_distribution<float> normal;
    k.resize(static_cast<size_t>(rows * width));
    v.resize(k.size());
    for (float& x : k) x = normal(random) * 30.0f;
    for (float& x : v) x = normal(random) * 1e-5f;  // many subnormal in fp16
  }
  int width;
  std::vector<float> k;
  std::vector<float> v;
};

WriteKvResult Write(SlotPool& pool, const Rows& rows, const std::vector<AttentionSegment>& segments,
                    int threads) {
  const WriteKvArgs args = {.geometry = pool.geometry(), .slots = pool.data(), .k = rows.k.data(),
                            .v = rows.v.data(), .k_stride = rows.width, .v_stride = rows.width,
                            .segments = segments};
  WriteKvResult sum;
  for (int t = 0; t < threads; ++t) {
    const WriteKvResult part = CpuWriteKv(args, t, threads);
    sum.saturated += part.saturated;
    sum.nan += part.nan;
  }
  return sum;
}

void ExpectRow(SlotPool& pool, const Rows& rows, const std::vector<SlotPair>& table, int row,
               int position) {
  const Geometry& geometry = pool.geometry();
  const SlotPair pair = table[static_cast<size_t>(position / kBlockTokens)];
  const int token = position % kBlockTokens;
  for (int head = 0; head < geometry.kv_heads; ++head) {
    for (int d = 0; d < geometry.head_dim; ++d) {
      const auto at = static_cast<size_t>(row * rows.width + head * geometry.head_dim + d);
      const uint32_t k_at = KOffset(token, d);
      const uint32_t v_at = VOffset(geometry.head_dim, token, d);
      const auto* base = pool.Slice(pair.base, head);
      const auto* residual = pool.Slice(pair.residual, head);
      ASSERT_EQ(JoinTarget(base[k_at], residual[k_at]), FloatToStoredHalf(rows.k[at]).bits);
      ASSERT_EQ(JoinTarget(base[v_at], residual[v_at]), FloatToStoredHalf(rows.v[at]).bits);
    }
  }
}

std::vector<SlotPair> TakeTable(SlotPool& pool, int blocks) {
  std::vector<SlotPair> table;
  for (int i = 0; i < blocks; ++i) {
    const uint32_t base = pool.Take();
    table.push_back({.base = base, .residual = pool.Take()});
  }
  return table;
}

TEST(WriteKv, SegmentsOfAnyBounds_StoreRoundedValuesAndNothingElse) {
  for (const int head_dim : {32, 64, 96, 128, 256}) {
    for (const int threads : {1, 2, 3}) {
      const Geometry geometry = {.layers = 1, .kv_heads = 3, .head_dim = head_dim};
      SlotPool pool(geometry, 64, kSeed);
      const Rows rows(geometry, 60);
      const auto first = TakeTable(pool, 4);
      const auto second = TakeTable(pool, 2);
      const WriteKvResult result =
          Write(pool, rows,
                {{.blocks = first.data(), .first_position = 5, .first_row = 0, .rows = 50},
                 {.blocks = second.data(), .first_position = 16, .first_row = 50, .rows = 1}},
                threads);
      EXPECT_EQ(result.saturated, 0u);
      EXPECT_EQ(result.nan, 0u);
      for (int r = 0; r < 50; ++r) ExpectRow(pool, rows, first, r, 5 + r);
      ExpectRow(pool, rows, second, 50, 16);
      // Neighbours keep the pool's bytes.
      for (int token = 0; token < 5; ++token) {
        ASSERT_EQ(pool.Slice(first[0].base, 1)[KOffset(token, 3)], 0xff);
      }
      ASSERT_EQ(pool.Slice(second[1].residual, 2)[VOffset(head_dim, 1, 0)], 0xff);
      const auto* untouched = pool.Slice(second[0].base, 0);
      ASSERT_TRUE(std::all_of(untouched, untouched + geometry.SlotBytes(),
                              [](uint8_t byte) { return byte == 0xff; }));
    }
  }
}

TEST(WriteKv, OutOfRangeAndNan_AreStoredAsStatedAndCounted) {
  const Geometry geometry = {.layers = 1, .kv_heads = 1, .head_dim = 64};
  SlotPool pool(geometry, 8, kSeed);
  Rows rows(geometry, 16);
  rows.k[3] = 70000.0f;
  rows.k[64 + 9] = -std::numeric_limits<float>::infinity();
  rows.v[128 + 5] = 65520.0f;
  rows.v[128 + 6] = 65519.0f;  // rounds to 65504
  rows.v[200] = std::numeric_limits<float>::quiet_NaN();
  const auto table = TakeTable(pool, 1);
  const WriteKvResult result =
      Write(pool, rows, {{.blocks = table.data(), .first_position = 0, .first_row = 0, .rows = 16}}, 2);
  EXPECT_EQ(result.saturated, 3u);
  EXPECT_EQ(result.nan, 1u);
  for (int r = 0; r < 16; ++r) ExpectRow(pool, rows, table, r, r);
}

TEST(WriteKvDeathTest, BaseBlock_IsABug) {
  const Geometry geometry = {.layers = 1, .kv_heads = 1, .head_dim = 32};
  SlotPool pool(geometry, 4, kSeed);
  const Rows rows(geometry, 1);
  const std::vector<SlotPair> table = {{.base = pool.Take()}};
  EXPECT_DEATH(Write(pool, rows, {{.blocks = table.data(), .first_position = 0, .first_row = 0,
                                   .rows = 1}}, 1),
               "not TARGET");
}

}  // namespace
}  // namespace kvt
