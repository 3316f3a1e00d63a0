#include "kernels/cpu/paged_attention.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/kernels/attention_fixture.h"

namespace kvt {
namespace {

constexpr uint64_t kSeed = 20261129;

bool NoBase(int) { return false; }
bool AllBase(int) { return true; }
bool SomeBase(int block) { return block % 3 == 1; }

// A sequence with queries for all of its positions.
struct Sequence {
  Sequence(const Geometry& geometry, int query_heads, int tokens, uint64_t seed)
      : values(geometry, tokens, seed), query_heads(query_heads) {
    std::mt19937_64 random(seed + 1);
    std::normal_distribution<float> normal;
    q.resize(static_cast<size_t>(tokens * query_heads * geometry.head_dim));
    for (float& x : q) x = normal(random) * 1.5f;
  }
  SequenceValues values;
  int query_heads;
  std::vector<float> q;  // [token][query_head][head_dim]
};

float OutValue(const std::vector<uint8_t>& out, ComputeType compute, size_t i) {
  if (compute == ComputeType::kF32) {
    float value;
    std::memcpy(&value, out.data() + 4 * i, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, out.data() + 2 * i, 2);
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

struct Part {
  const Sequence* sequence;
  const SlotPair* table;
  int first;
  int rows;
};

// Runs one step over the parts; returns each part's output bytes.
std::vector<std::vector<uint8_t>> Step(SlotPool& pool, ComputeType compute, int query_heads,
                                       const std::vector<Part>& parts, int threads,
                                       int decode_rows_max = 64) {
  const int dim = pool.geometry().head_dim;
  const int width = query_heads * dim;
  const size_t element = compute == ComputeType::kF32 ? 4 : 2;
  std::vector<float> q;
  std::vector<AttentionSegment> segments;
  int rows = 0;
  int context = 0;
  for (const Part& part : parts) {
    segments.push_back({.blocks = part.table, .first_position = part.first, .first_row = rows,
                        .rows = part.rows});
    const float* from = part.sequence->q.data() + part.first * width;
    q.insert(q.end(), from, from + part.rows * width);
    rows += part.rows;
    context = std::max(context, part.first + part.rows);
  }
  std::vector<uint8_t> out(static_cast<size_t>(rows * width) * element, 0xee);
  const PagedAttentionArgs args = {.geometry = pool.geometry(), .query_heads = query_heads,
                                   .compute = compute,
                                   .scale = 1.0f / std::sqrt(static_cast<float>(dim)),
                                   .slots = pool.data(), .q = q.data(), .q_stride = width,
                                   .out = out.data(), .out_stride = width, .segments = segments};
  RunAttention(args, threads, context, decode_rows_max);
  std::vector<std::vector<uint8_t>> results;
  for (const AttentionSegment& segment : segments) {
    const auto* begin = out.data() + static_cast<size_t>(segment.first_row * width) * element;
    results.emplace_back(begin, begin + static_cast<size_t>(segment.rows * width) * element);
  }
  return results;
}

// One row and head in double precision over the stored values.
std::vector<double> Reference(const Sequence& sequence, int position, int head,
                              const std::function<bool(int)>& is_base) {
  const int dim = sequence.values.dim;
  const int kv_head = head / (sequence.query_heads / sequence.values.heads);
  const auto value = [&](const std::vector<uint16_t>& from, int token, int d) {
    const uint16_t bits = from[sequence.values.At(token, kv_head, d)];
    return static_cast<double>(
        HalfToFloat(is_base(token / kBlockTokens) ? JoinBase(BaseByte(bits)) : bits));
  };
  std::vector<double> score(static_cast<size_t>(position) + 1);
  double top = -std::numeric_limits<double>::infinity();
  const float* q = sequence.q.data() + (position * sequence.query_heads + head) * dim;
  for (int t = 0; t <= position; ++t) {
    double dot = 0;
    for (int d = 0; d < dim; ++d) dot += static_cast<double>(q[d]) * value(sequence.values.k, t, d);
    score[static_cast<size_t>(t)] = dot / std::sqrt(static_cast<double>(dim));
    top = std::max(top, score[static_cast<size_t>(t)]);
  }
  double sum = 0;
  std::vector<double> out(static_cast<size_t>(dim));
  for (int t = 0; t <= position; ++t) {
    const double weight = std::exp(score[static_cast<size_t>(t)] - top);
    sum += weight;
    for (int d = 0; d < dim; ++d) {
      out[static_cast<size_t>(d)] += weight * value(sequence.values.v, t, d);
    }
  }
  for (double& x : out) x /= sum;
  return out;
}

struct Variant {
  ComputeType compute;
  int isa;
};

std::vector<Variant> Variants() {
  std::vector<Variant> variants;
  for (const ComputeType compute : {ComputeType::kF32, ComputeType::kBf16}) {
    for (int i = 0; i < CpuAttentionIsaCount(compute); ++i) variants.push_back({compute, i});
  }
  return variants;
}

// Every implementation that this processor can run.
class PagedAttention : public testing::TestWithParam<Variant> {
 protected:
  void SetUp() override { CpuAttentionUseIsa(GetParam().compute, GetParam().isa); }
  void TearDown() override { CpuAttentionUseIsa(GetParam().compute, 0); }
  [[nodiscard]] ComputeType compute() const { return GetParam().compute; }

  void ExpectNearReference(const Geometry& geometry, int query_heads, int tokens,
                           const std::function<bool(int)>& is_base) {
    SlotPool pool(geometry, static_cast<uint32_t>(2 * (tokens / kBlockTokens + 1)), kSeed);
    const Sequence sequence(geometry, query_heads, tokens, kSeed + static_cast<uint64_t>(tokens));
    const auto table = StoreSequence(pool, sequence.values, tokens, is_base);
    const auto out = Step(pool, compute(), query_heads, {{&sequence, table.data(), 0, tokens}}, 2)[0];
    // Standard-normal V, weights that sum to 1: f32 rounding; bf16 rounds every factor to 2^-9.
    const double bound = compute() == ComputeType::kF32 ? 4e-6 : 4e-2;
    double worst = 0;
    for (int position = 0; position < tokens; position += std::max(1, tokens / 40) | 1) {
      for (int head = 0; head < query_heads; ++head) {
        const auto expected = Reference(sequence, position, head, is_base);
        for (int d = 0; d < geometry.head_dim; ++d) {
          const float actual = OutValue(
              out, compute(),
              static_cast<size_t>((position * query_heads + head) * geometry.head_dim + d));
          const double error = std::abs(actual - expected[static_cast<size_t>(d)]);
          ASSERT_LE(error, bound) << geometry.ToString() << " position " << position << " head "
                                  << head << " channel " << d;
          worst = std::max(worst, error);
        }
      }
    }
    // In bf16 mode the errors are real: were they absent, the products would not be bf16.
    if (compute() == ComputeType::kBf16) {
      EXPECT_GT(worst, 1e-5);
    }
  }
};

std::string VariantName(const testing::TestParamInfo<Variant>& info) {
  std::string name =
      absl::StrCat(info.param.compute == ComputeType::kF32 ? "F32_" : "Bf16_",
                   CpuAttentionIsaName(info.param.compute, info.param.isa));
  for (char& c : name) {
    if (c == '-') c = '_';
  }
  return name;
}

INSTANTIATE_TEST_SUITE_P(Isa, PagedAttention, testing::ValuesIn(Variants()), VariantName);

TEST_P(PagedAttention, OddSizes_AreNearDoubleReference) {
  for (const int tokens : {1, 2, 15, 16, 17, 127, 129, 333, 515, 1051}) {
    ExpectNearReference({.layers = 1, .kv_heads = 3, .head_dim = 64}, 9, tokens, NoBase);
  }
}

TEST_P(PagedAttention, EveryHeadDimAndGroup_IsNearDoubleReference) {
  for (const int head_dim : {32, 64, 96, 128, 160, 256}) {
    for (const int group : {1, 4, 7, 16}) {
      ExpectNearReference({.layers = 1, .kv_heads = 2, .head_dim = head_dim}, 2 * group, 187,
                          SomeBase);
    }
  }
}

TEST_P(PagedAttention, BaseBlocks_ReadAsMidpoints) {
  const Geometry geometry = {.layers = 1, .kv_heads = 2, .head_dim = 64};
  ExpectNearReference(geometry, 4, 300, AllBase);
  ExpectNearReference(geometry, 4, 700, SomeBase);
}

// Every group size that one row keeps in registers, and some that it does not, against a chunk.
TEST_P(PagedAttention, OneRow_EveryGroupAndHeadDim_EqualsTheChunk) {
  for (const int head_dim : {32, 64, 96, 128, 256}) {
    for (const int group : {1, 2, 3, 4, 5, 6, 7, 16}) {
      const Geometry geometry = {.layers = 1, .kv_heads = 2, .head_dim = head_dim};
      SlotPool pool(geometry, 64, kSeed);
      const Sequence sequence(geometry, 2 * group, 157, kSeed);
      const auto table = StoreSequence(pool, sequence.values, 157, SomeBase);
      const auto chunk =
          Step(pool, compute(), 2 * group, {{&sequence, table.data(), 0, 157}}, 2)[0];
      const size_t row_bytes = chunk.size() / 157;
      for (const int position : {0, 15, 16, 63, 127, 128, 156}) {
        const auto row =
            Step(pool, compute(), 2 * group, {{&sequence, table.data(), position, 1}}, 2)[0];
        ASSERT_TRUE(std::equal(row.begin(), row.end(),
                               chunk.begin() + static_cast<ptrdiff_t>(row_bytes) * position))
            << geometry.ToString() << " group " << group << " position " << position;
      }
    }
  }
}

// The contract (DESIGN 2): every way to compute a row gives the same bits as one row on one thread.
class PagedAttentionIdentity : public PagedAttention {
 protected:
  static constexpr int kTokens = 1200;
  static constexpr int kQueryHeads = 9;

  PagedAttentionIdentity()
      : geometry_{.layers = 1, .kv_heads = 3, .head_dim = 64},
        pool_(geometry_, 1000, kSeed),
        sequence_(geometry_, kQueryHeads, kTokens, kSeed),
        table_(StoreSequence(pool_, sequence_.values, kTokens, SomeBase)) {}

  void SetUp() override {
    PagedAttention::SetUp();
    for (int position = 0; position < kTokens; ++position) {
      const auto row = Step(pool_, compute(), kQueryHeads,
                            {{&sequence_, table_.data(), position, 1}}, 1)[0];
      expected_.insert(expected_.end(), row.begin(), row.end());
    }
  }
  void ExpectRows(const std::vector<uint8_t>& rows, int first, const std::string& what) {
    const size_t row_bytes = expected_.size() / kTokens;
    const auto begin = expected_.begin() + static_cast<ptrdiff_t>(row_bytes) * first;
    ASSERT_TRUE(std::equal(rows.begin(), rows.end(), begin)) << what << ", from row " << first;
  }

  Geometry geometry_;
  SlotPool pool_;
  Sequence sequence_;
  std::vector<SlotPair> table_;
  std::vector<uint8_t> expected_;
};

INSTANTIATE_TEST_SUITE_P(Isa, PagedAttentionIdentity, testing::ValuesIn(Variants()), VariantName);

TEST_P(PagedAttentionIdentity, ChunksAndThreads_AnyBounds_GiveTheSameBits) {
  for (const int threads : {1, 2, 3}) {
    for (const int chunk : {16, 100, 512, kTokens}) {
      for (int first = 0; first < kTokens; first += chunk) {
        const int rows = std::min(chunk, kTokens - first);
        ExpectRows(Step(pool_, compute(), kQueryHeads, {{&sequence_, table_.data(), first, rows}},
                        threads)[0],
                   first, absl::StrCat("chunk ", chunk, " threads ", threads));
      }
    }
  }
}

TEST_P(PagedAttentionIdentity, DecodeRowsSplitOverThreads_GiveTheSameBits) {
  for (const int threads : {2, 3, 5}) {
    for (const int position : {511, 512, 513, 1023, 1024, 1199}) {
      ExpectRows(Step(pool_, compute(), kQueryHeads, {{&sequence_, table_.data(), position, 1}},
                      threads)[0],
                 position, absl::StrCat("decode, threads ", threads));
    }
    // Several rows across the start of a range, split as well.
    ExpectRows(Step(pool_, compute(), kQueryHeads, {{&sequence_, table_.data(), 1018, 12}},
                    threads)[0],
               1018, absl::StrCat("small chunk, threads ", threads));
  }
}

TEST_P(PagedAttentionIdentity, LittleWorkspace_SplitsLessWithTheSameBits) {
  const std::vector<Part> parts = {{&sequence_, table_.data(), 1100, 1},
                                   {&sequence_, table_.data(), 900, 1},
                                   {&sequence_, table_.data(), 777, 1}};
  for (const int decode_rows_max : {0, 1, 2, 3}) {
    const auto out = Step(pool_, compute(), kQueryHeads, parts, 2, decode_rows_max);
    for (size_t i = 0; i < parts.size(); ++i) {
      ExpectRows(out[i], parts[i].first, absl::StrCat("room for ", decode_rows_max));
    }
  }
}

TEST(PagedAttentionPlan, IsSplit_OnlyForFewRowsWithLongContextAndRoom) {
  const Geometry geometry = {.layers = 1, .kv_heads = 3, .head_dim = 64};
  const AttentionLimits limits = {geometry, 9, 2, 1, 2048};
  const size_t bytes = CpuPagedAttentionWorkspaceBytes(limits);
  const AlignedBytes memory = AllocateAligned(bytes);
  const auto split = [&](int position, int rows, int threads, size_t room) {
    const AttentionSegment segment = {.blocks = nullptr, .first_position = position,
                                      .first_row = 0, .rows = rows};
    PagedAttentionArgs args;
    args.geometry = geometry;
    args.query_heads = 9;
    args.segments = {&segment, 1};
    return CpuPagedAttentionIsSplit(args, {memory.get(), room}, threads);
  };
  EXPECT_TRUE(split(2000, 1, 2, bytes));
  EXPECT_FALSE(split(2000, 1, 1, bytes));
  EXPECT_FALSE(split(511, 1, 2, bytes));
  EXPECT_FALSE(split(1500, 500, 2, bytes));
  const AttentionLimits no_context = {geometry, 9, 2, 1, 0};
  EXPECT_FALSE(split(2000, 1, 2, CpuPagedAttentionWorkspaceBytes(no_context)));
}

TEST_P(PagedAttentionIdentity, BatchMates_DoNotEnter) {
  const Sequence other(geometry_, kQueryHeads, 700, kSeed + 77);
  const auto other_table = StoreSequence(pool_, other.values, 700, NoBase);
  for (const int threads : {1, 2}) {
    const auto out = Step(pool_, compute(), kQueryHeads,
                          {{&other, other_table.data(), 0, 130},
                           {&sequence_, table_.data(), 1150, 1},
                           {&sequence_, table_.data(), 64, 200},
                           {&other, other_table.data(), 699, 1},
                           {&sequence_, table_.data(), 3, 1}},
                          threads);
    ExpectRows(out[1], 1150, "decode row among others");
    ExpectRows(out[2], 64, "chunk among others");
    ExpectRows(out[4], 3, "short row among others");
  }
}

TEST_P(PagedAttentionIdentity, SlotPlacement_DoesNotEnter) {
  SlotPool other_pool(geometry_, 400, kSeed + 5);
  const auto table = StoreSequence(other_pool, sequence_.values, kTokens, SomeBase);
  ExpectRows(Step(other_pool, compute(), kQueryHeads, {{&sequence_, table.data(), 0, kTokens}}, 2)[0],
             0, "other slots");
}

TEST_P(PagedAttentionIdentity, LaterTokensNanOrAbsent_DoNotEnter) {
  // Chunk 0..99 in a pool where nothing beyond was written (NaN), and where a later V is NaN.
  SlotPool fresh(geometry_, 400, kSeed + 6);
  const auto table = StoreSequence(fresh, sequence_.values, 100, SomeBase);
  ExpectRows(Step(fresh, compute(), kQueryHeads, {{&sequence_, table.data(), 0, 100}}, 2)[0], 0,
             "NaN beyond the last row");
  for (const int end : {1, 81, 82, 96, 97, 113}) {  // TARGET and BASE blocks, odd and even tails
    SlotPool pool(geometry_, 400, kSeed + 8);
    const auto tail = StoreSequence(pool, sequence_.values, end, SomeBase);
    ExpectRows(Step(pool, compute(), kQueryHeads, {{&sequence_, tail.data(), end - 1, 1}}, 2)[0],
               end - 1, "decode row, NaN beyond it");
  }

  Sequence poisoned = sequence_;
  for (int head = 0; head < 3; ++head) {
    for (int d = 0; d < 64; ++d) {
      poisoned.values.v[poisoned.values.At(90, head, d)] = 0x7e00;
      poisoned.values.k[poisoned.values.At(90, head, d)] = 0x7e00;
    }
  }
  SlotPool pool(geometry_, 400, kSeed + 7);
  const auto poisoned_table = StoreSequence(pool, poisoned.values, 100, SomeBase);
  const auto out =
      Step(pool, compute(), kQueryHeads, {{&poisoned, poisoned_table.data(), 0, 100}}, 2)[0];
  const size_t row_bytes = expected_.size() / kTokens;
  ExpectRows({out.begin(), out.begin() + static_cast<ptrdiff_t>(90 * row_bytes)}, 0,
             "rows before a NaN of the same chunk");
  for (size_t i = 90 * 9 * 64; i < 100 * 9 * 64; ++i) {
    ASSERT_TRUE(std::isnan(OutValue(out, compute(), i))) << "rows from the NaN on must show it";
  }
}

TEST_P(PagedAttention, ExtremeScores_StayFinite) {
  const Geometry geometry = {.layers = 1, .kv_heads = 1, .head_dim = 32};
  SlotPool pool(geometry, 64, kSeed);
  Sequence sequence(geometry, 2, 260, kSeed);
  for (size_t i = 0; i < sequence.values.k.size(); ++i) {
    sequence.values.k[i] = i % 7 == 0 ? 0x7bff : 0xfbff;  // +-65504
  }
  const auto table = StoreSequence(pool, sequence.values, 260, NoBase);
  const auto out = Step(pool, compute(), 2, {{&sequence, table.data(), 0, 260}}, 2)[0];
  for (size_t i = 0; i < 260 * 2 * 32; ++i) ASSERT_TRUE(std::isfinite(OutValue(out, compute(), i)));
}

}  // namespace
}  // namespace kvt
