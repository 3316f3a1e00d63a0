// Digests, scores and top blocks through the Ops interface, against plain scalar references over odd
// sizes, on every instruction set this processor has.
#include "kernels/selection.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/base/random.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/select_blocks.h"
#include "kernels/layout/named_layout.h"
#include "kernels/layout/planes.h"
#include "kernels/ops.h"

namespace kvt {
namespace {

constexpr uint64_t kSeed = 20261201;

// Blocks of one layer in scattered slots, with a calibration that covers most keys. The CPU device
// reads host memory in place.
struct Layer {
  Layer(int kv_heads, int head_dim, int blocks, uint64_t seed)
      : geometry{1, kv_heads, head_dim}, random(seed), table(static_cast<size_t>(blocks)) {
    slots.resize(static_cast<size_t>(2 * blocks) * geometry.SlotBytes());
    keys.resize(static_cast<size_t>(blocks * kBlockTokens * kv_heads * head_dim));
    for (int b = 0; b < blocks; ++b) {
      const auto index = static_cast<uint32_t>(b);
      table[index] = {2 * static_cast<uint32_t>(blocks - 1 - b), 2 * index + 1};
      for (int h = 0; h < kv_heads; ++h) WriteSlice(b, h);
    }
    offset.resize(static_cast<size_t>(kv_heads * head_dim));
    scale.resize(offset.size());
    for (float& x : offset) x = static_cast<float>(random.Uniform() - 0.5);
    for (float& x : scale) x = 0.2f + static_cast<float>(random.Uniform()) * 0.2f;
  }
  void WriteSlice(int block, int head) {
    std::vector<uint16_t> values(geometry.SliceBytes());
    for (uint16_t& bits : values) {
      bits = FloatToStoredHalf(static_cast<float>(random.Uniform() * 4 - 2)).bits;
    }
    const int dim = geometry.head_dim;
    for (int t = 0; t < kBlockTokens; ++t) {
      for (int d = 0; d < dim; ++d) {
        Key(block, t, head, d) = HalfToFloat(values[static_cast<size_t>(t * dim + d)]);
      }
    }
    const SlotPair pair = table[static_cast<size_t>(block)];
    const size_t at = static_cast<size_t>(head) * geometry.SliceBytes();
    SplitSlice(dim, values, {slots.data() + pair.base * geometry.SlotBytes() + at,
                             geometry.SliceBytes()},
               {slots.data() + pair.residual * geometry.SlotBytes() + at, geometry.SliceBytes()});
  }
  float& Key(int block, int token, int head, int channel) {
    return keys[static_cast<size_t>(
        ((block * kBlockTokens + token) * geometry.kv_heads + head) * geometry.head_dim + channel)];
  }
  DigestHead Head(int kv_head) const {
    const size_t at = static_cast<size_t>(kv_head * geometry.head_dim);
    return {kv_head, offset.data() + at, scale.data() + at};
  }
  Geometry geometry;
  Random random;
  std::vector<SlotPair> table;
  std::vector<uint8_t> slots;
  std::vector<float> keys, offset, scale;
};

class SelectionTest : public ::testing::Test {
 protected:
  SelectionTest() : device_(MakeCpuDevice({.threads = 3}).value()) {
    stream_ = device_->NewStream(StreamPriority::kNormal);
    event_ = device_->NewEvent();
  }
  ~SelectionTest() override { CpuScoreUseIsa(0); }
  void Wait() {
    stream_->Record(*event_);
    ASSERT_TRUE(event_->HostWait(absl::Seconds(30)));
  }
  std::vector<uint8_t> Digest(const Layer& layer, const DigestSpec& spec) {
    MakeDigestArgs args;
    args.geometry = layer.geometry;
    args.spec = spec;
    args.slots = layer.slots.data();
    args.blocks = layer.table.data();
    args.count = static_cast<int>(layer.table.size());
    std::vector<uint8_t> digests(layer.table.size() * spec.Bytes(layer.geometry.head_dim), 0xee);
    args.digests = digests.data();
    device_->ops().MakeDigest(*stream_, args);
    Wait();
    return digests;
  }
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Event> event_;
};

TEST(DigestLayout, Codes_ReadBackWhatWasSet) {
  for (const int bits : {2, 3, 4}) {
    for (const int dim : {32, 64, 96, 256}) {
      std::vector<uint8_t> digest(DigestHeadBytes(dim, bits));
      const auto code = [&](int t, int d) {
        return static_cast<uint8_t>((t * 7 + d * 3 + d / 5) & ((1 << bits) - 1));
      };
      for (int t = 0; t < kBlockTokens; ++t) {
        for (int d = 0; d < dim; ++d) SetDigestCode(digest.data(), dim, bits, t, d, code(t, d));
      }
      for (int t = 0; t < kBlockTokens; ++t) {
        for (int d = 0; d < dim; ++d) {
          ASSERT_EQ(DigestCode(digest.data(), dim, bits, t, d), code(t, d))
              << "bits " << bits << " dim " << dim << " token " << t << " channel " << d;
        }
      }
    }
  }
}

// The bytes of version 2: another order needs another kDigestLayoutVersion, which is in stored keys.
TEST(DigestLayout, Bytes_AreThoseOfVersion2) {
  static_assert(kDigestLayoutVersion == 2);
  struct Place {
    int bits, token, channel;
    uint32_t byte;
    int shift, mask;
  };
  for (const Place& place : {Place{4, 0, 0, 0, 0, 15}, Place{4, 3, 2, 14, 0, 15},
                             Place{4, 3, 6, 14, 4, 15}, Place{4, 15, 63, 7 * 64 + 63, 4, 15},
                             Place{2, 5, 21, 64 + 21, 2, 3}, Place{2, 15, 63, 3 * 64 + 63, 6, 3},
                             Place{3, 5, 21, 64 + 21, 2, 3}, Place{3, 5, 21, 4 * 64 + 21, 5, 4},
                             Place{3, 0, 36, 2 * 64, 2, 3}, Place{3, 0, 36, 5 * 64, 1, 4}}) {
    std::vector<uint8_t> digest(DigestHeadBytes(64, place.bits));
    SetDigestCode(digest.data(), 64, place.bits, place.token, place.channel,
                  static_cast<uint8_t>(place.mask));
    const int value = place.mask == 4 ? 1 : place.mask;  // the third bit lies alone
    EXPECT_EQ(digest[place.byte], value << place.shift)
        << "bits " << place.bits << " token " << place.token << " channel " << place.channel;
    digest[place.byte] = 0;
    EXPECT_EQ(std::count(digest.begin(), digest.end(), 0), static_cast<ptrdiff_t>(digest.size()));
  }
}

TEST(DigestLayout, QuantiseQuery_OneStepForTheLargestChannel) {
  std::vector<float> q(32), scale(32, 2.0f);
  for (int d = 0; d < 32; ++d) q[static_cast<size_t>(d)] = static_cast<float>(d) - 12.0f;
  std::vector<int8_t> codes(32);
  const float step = DigestQuantiseQuery(q.data(), scale.data(), 32, codes.data());
  EXPECT_FLOAT_EQ(step, 38.0f / 127);
  EXPECT_EQ(codes[31], 127);
  for (size_t d = 0; d < 32; ++d) EXPECT_NEAR(step * codes[d], 2 * q[d], 0.5001 * step) << d;
  for (const float odd : {INFINITY, std::numeric_limits<float>::quiet_NaN()}) {
    q[3] = odd;
    EXPECT_EQ(DigestQuantiseQuery(q.data(), scale.data(), 32, codes.data()), 1);
    EXPECT_EQ(codes, std::vector<int8_t>(32));
  }
  std::fill(q.begin(), q.end(), 1e-37f);
  EXPECT_EQ(DigestQuantiseQuery(q.data(), scale.data(), 32, codes.data()), 1);
  EXPECT_EQ(codes, std::vector<int8_t>(32));
}

TEST(DigestLayout, Quantise_RoundsToNearestAndClamps) {
  for (const int bits : {2, 3, 4}) {
    const int levels = 1 << bits;
    for (int code = 0; code < levels; ++code) {
      const float centre = 1.5f + 0.25f * (static_cast<float>(code) - 0.5f * (levels - 1));
      EXPECT_EQ(DigestQuantise(centre + 0.1f, 1.5f, 4.0f, bits), code);
      EXPECT_EQ(DigestQuantise(centre - 0.1f, 1.5f, 4.0f, bits), code);
    }
    EXPECT_EQ(DigestQuantise(1e30f, 1.5f, 4.0f, bits), levels - 1);
    EXPECT_EQ(DigestQuantise(-1e30f, 1.5f, 4.0f, bits), 0);
    EXPECT_EQ(DigestQuantise(std::numeric_limits<float>::quiet_NaN(), 1.5f, 4.0f, bits), 0);
  }
}

TEST_F(SelectionTest, MakeDigest_HoldsTheNearestCodeOfEveryKey) {
  for (const int bits : {2, 3, 4}) {
    Layer layer(3, 64, 13, kSeed + static_cast<uint64_t>(bits));
    const std::vector<DigestHead> heads = {layer.Head(2), layer.Head(0)};
    const std::vector<uint8_t> digests = Digest(layer, {bits, heads});
    const uint32_t bytes = DigestHeadBytes(64, bits);
    for (int b = 0; b < 13; ++b) {
      for (size_t h = 0; h < heads.size(); ++h) {
        const uint8_t* digest = digests.data() + (static_cast<size_t>(b) * 2 + h) * bytes;
        for (int t = 0; t < kBlockTokens; ++t) {
          for (int d = 0; d < 64; ++d) {
            const float key = layer.Key(b, t, heads[h].kv_head, d);
            // Nearest in value: no other code's value lies closer.
            const auto value = [&](int code) {
              return heads[h].offset[d] +
                     heads[h].scale[d] * (static_cast<float>(code) - 0.5f * ((1 << bits) - 1));
            };
            const float error = std::fabs(value(DigestCode(digest, 64, bits, t, d)) - key);
            for (int code = 0; code < 1 << bits; ++code) {
              ASSERT_LE(error, std::fabs(value(code) - key) + 1e-5f);
            }
          }
        }
      }
    }
  }
}

TEST_F(SelectionTest, MakeDigest_EqualsScalarCodesForEveryHalf) {
  // Every fp16 bit pattern, infinities and NaNs too, in both fidelities.
  constexpr int kDim = 256, kBlocks = 65536 / (kDim * kBlockTokens);
  for (const int bits : {2, 3, 4}) {
    Layer layer(1, kDim, kBlocks, kSeed + 3);
    const auto half = [](int b, int t, int d) {
      return static_cast<uint16_t>((b * kBlockTokens + t) * kDim + d);
    };
    for (int b = 0; b < kBlocks; ++b) {
      SlotPair& pair = layer.table[static_cast<size_t>(b)];
      for (int t = 0; t < kBlockTokens; ++t) {
        for (int d = 0; d < kDim; ++d) {
          const uint32_t at = KOffset(t, d);
          layer.slots[pair.base * layer.geometry.SlotBytes() + at] = half(b, t, d) >> 8;
          layer.slots[pair.residual * layer.geometry.SlotBytes() + at] = half(b, t, d) & 0xff;
        }
      }
      if (b % 2 == 1) pair.residual = kSlotNone;
    }
    const std::vector<DigestHead> heads = {layer.Head(0)};
    const std::vector<uint8_t> digests = Digest(layer, {bits, heads});
    std::vector<uint8_t> want(digests.size());
    for (int b = 0; b < kBlocks; ++b) {
      for (int t = 0; t < kBlockTokens; ++t) {
        for (int d = 0; d < kDim; ++d) {
          const uint16_t stored = half(b, t, d);
          const auto base = static_cast<uint8_t>(stored >> 8);
          const float key = HalfToFloat(b % 2 == 1 ? JoinBase(base) : stored);
          SetDigestCode(want.data() + static_cast<size_t>(b) * DigestHeadBytes(kDim, bits), kDim, bits,
                        t, d, DigestQuantise(key, heads[0].offset[d], 1.0f / heads[0].scale[d], bits));
        }
      }
    }
    EXPECT_EQ(digests, want) << "bits " << bits;
  }
}

// The query as the scores' definition has it: in 8 bits, or as it is.
std::vector<double> QueryOf(const float* q, const float* scale, int dim, bool quantised) {
  std::vector<double> out(static_cast<size_t>(dim));
  double most = 0;
  for (int d = 0; d < dim; ++d) most = std::max(most, std::fabs(double{q[d] * scale[d]}));
  for (int d = 0; d < dim; ++d) {
    const double x = double{q[d] * scale[d]} / most * 127;
    out[static_cast<size_t>(d)] = (quantised ? std::nearbyint(x) : x) * most / 127;
  }
  return out;
}

// In double, with the codes of the digest.
std::vector<double> ReferenceScores(const Layer& layer, const DigestSpec& spec, int query_heads,
                                    const float* q, float scale, const std::vector<uint8_t>& digests,
                                    int first, int blocks, bool quantised) {
  const int dim = layer.geometry.head_dim;
  const int group = query_heads / layer.geometry.kv_heads;
  std::vector<double> scores(static_cast<size_t>(blocks));
  for (size_t h = 0; h < spec.heads.size(); ++h) {
    const DigestHead& head = spec.heads[h];
    for (int g = 0; g < group; ++g) {
      const std::vector<double> query =
          QueryOf(q + (head.kv_head * group + g) * dim, head.scale, dim, quantised);
      std::vector<double> logits;
      double max = -INFINITY, sum = 0;
      for (int b = 0; b < blocks; ++b) {
        const uint8_t* digest = digests.data() +
                                static_cast<size_t>(first + b) * spec.Bytes(dim) +
                                h * DigestHeadBytes(dim, spec.bits);
        for (int t = 0; t < kBlockTokens; ++t) {
          double dot = 0;
          for (int d = 0; d < dim; ++d) {
            dot += query[static_cast<size_t>(d)] * DigestCode(digest, dim, spec.bits, t, d);
          }
          logits.push_back(dot * scale);
          max = std::max(max, logits.back());
        }
      }
      for (const double logit : logits) sum += std::exp(logit - max);
      for (size_t i = 0; i < logits.size(); ++i) {
        scores[i / kBlockTokens] += std::exp(logits[i] - max) / sum /
                                    static_cast<double>(spec.heads.size() *
                                                        static_cast<size_t>(group));
      }
    }
  }
  return scores;
}

// Rows of queries over a layer's digests.
struct ScoreCase {
  struct Shape {
    int kv_heads, group, dim, heads, bits;
  };
  static constexpr int kBlocks = 41;
  static constexpr int kRows = 4;
  static constexpr float kScale = 0.125f;

  ScoreCase(const Shape& s, uint64_t seed)
      : shape(s), layer(s.kv_heads, s.dim, kBlocks, seed), scores(kRows, std::vector<float>(kBlocks)) {
    for (int h = 0; h < s.heads; ++h) heads.push_back(layer.Head(s.kv_heads - 1 - h));
    const int query_heads = s.kv_heads * s.group;
    q.resize(static_cast<size_t>(kRows * query_heads * s.dim));
    Random random(seed + 1);
    for (float& x : q) x = static_cast<float>(random.Uniform() * 6 - 3);
    for (uint32_t b = 0; b < kBlocks; ++b) entries.push_back(b);
    // Of the middle: all, a part by entries, one block, none.
    segments = {{nullptr, 0, kBlocks, 0, scores[0].data()},
                {entries.data() + 3, 0, 17, 1, scores[1].data()},
                {nullptr, 40, 1, 2, scores[2].data()},
                {nullptr, 0, 0, 3, scores[3].data()}};
    args.geometry = layer.geometry;
    args.spec = {s.bits, heads};
    args.query_heads = query_heads;
    args.scale = kScale;
    args.q = q.data();
    args.q_stride = query_heads * s.dim;
    args.segments = segments;
  }
  const float* Query(size_t row) const { return q.data() + row * static_cast<size_t>(args.q_stride); }

  const Shape shape;
  Layer layer;
  std::vector<DigestHead> heads;
  std::vector<float> q;
  std::vector<uint32_t> entries;
  std::vector<std::vector<float>> scores;
  std::vector<ScoreSegment> segments;
  const std::vector<int> first = {0, 3, 40, 0};
  ScoreBlocksArgs args;
};

constexpr ScoreCase::Shape kShapes[] = {{3, 3, 64, 1, 4}, {3, 3, 64, 2, 4},  {2, 1, 128, 2, 4},
                                        {2, 7, 64, 1, 4}, {1, 8, 32, 1, 3},  {3, 3, 64, 2, 2},
                                        {1, 4, 96, 1, 3}, {1, 20, 96, 1, 2}, {2, 2, 256, 2, 3}};

class ScoreTest : public SelectionTest {
 protected:
  // Digests of the case's layer, then its scores on an implementation.
  void Score(ScoreCase& c, int isa) {
    if (digests_.empty()) digests_ = Digest(c.layer, c.args.spec);
    c.args.digests = digests_.data();
    for (std::vector<float>& row : c.scores) std::fill(row.begin(), row.end(), -1.0f);
    const size_t bytes = device_->ops().ScoreWorkspaceBytes(c.shape.heads * c.shape.group,
                                                            ScoreCase::kRows, ScoreCase::kBlocks);
    DeviceBuffer workspace = device_->Allocate(bytes).value();
    std::memset(workspace.data(), 0xff, bytes);
    CpuScoreUseIsa(isa);
    device_->ops().ScoreBlocks(*stream_, c.args, workspace.data(), bytes);
    Wait();
  }
  std::vector<double> Reference(const ScoreCase& c, size_t row, bool quantised) const {
    return ReferenceScores(c.layer, c.args.spec, c.args.query_heads, c.Query(row), c.args.scale,
                           digests_, c.first[row], c.segments[row].blocks, quantised);
  }
  std::vector<uint8_t> digests_;
};

TEST_F(ScoreTest, ScoreBlocks_EqualsScalarReference) {
  for (const ScoreCase::Shape& shape : kShapes) {
    ScoreCase c(shape, kSeed + 7);
    digests_.clear();
    for (int isa = 0; isa < CpuScoreIsaCount(); ++isa) {
      SCOPED_TRACE(CpuScoreIsaAt(isa).name);
      Score(c, isa);
      for (size_t r = 0; r < ScoreCase::kRows; ++r) {
        const std::vector<double> want = Reference(c, r, true);
        double sum = 0;
        for (size_t b = 0; b < want.size(); ++b) {
          ASSERT_NEAR(c.scores[r][b], want[b], 1e-6 + 1e-4 * want[b])
              << "bits " << shape.bits << " dim " << shape.dim << " row " << r << " block " << b;
          sum += c.scores[r][b];
        }
        EXPECT_NEAR(sum, want.empty() ? 0 : 1, 1e-5);
        for (size_t b = want.size(); b < ScoreCase::kBlocks; ++b) {
          ASSERT_EQ(c.scores[r][b], -1) << "overrun";
        }
      }
    }
  }
}

TEST_F(ScoreTest, ScoreBlocks_EveryInstructionSetGivesTheSameBits) {
  for (const ScoreCase::Shape& shape : kShapes) {
    ScoreCase c(shape, kSeed + 11);
    digests_.clear();
    std::vector<std::vector<float>> first;
    for (int isa = 0; isa < CpuScoreIsaCount(); ++isa) {
      Score(c, isa);
      if (isa == 0) first = c.scores;
      EXPECT_EQ(c.scores, first) << CpuScoreIsaAt(isa).name << " bits " << shape.bits << " dim "
                                 << shape.dim;
    }
  }
}

// The products themselves, with codes and queries at their ends: nothing saturates.
TEST_F(ScoreTest, Logits_AreTheExactIntegersOnEveryInstructionSet) {
  Random random(kSeed + 12);
  for (const int bits : {2, 3, 4}) {
    for (const int dim : {32, 64, 96, 256}) {
      constexpr int kBlocks = 21, kQueries = 7;
      const uint32_t bytes = DigestHeadBytes(dim, bits);
      std::vector<uint8_t> digests(kBlocks * bytes);
      for (uint8_t& x : digests) x = static_cast<uint8_t>(random.Below(256));
      std::fill_n(digests.begin(), bytes, uint8_t{0xff});
      std::vector<int8_t> q(static_cast<size_t>(kQueries * dim));
      for (int8_t& x : q) x = static_cast<int8_t>(static_cast<int>(random.Below(255)) - 127);
      std::fill_n(q.begin(), dim, int8_t{127});
      std::fill_n(q.begin() + dim, dim, int8_t{-127});
      ScoreTask task;
      task.q = q.data();
      task.queries = kQueries;
      task.head_dim = dim;
      task.bits = bits;
      task.digests = digests.data();
      task.stride = bytes;
      task.blocks = kBlocks;
      for (int isa = 0; isa < CpuScoreIsaCount(); ++isa) {
        for (const auto& [first, count] : {std::pair{0, 4}, {4, 3}, {1, 2}, {6, 1}}) {
          for (const int burst : {0, 1}) {
            alignas(64) int32_t logits[kScoreQueriesMax * kScoreBurstBlocks * kBlockTokens];
            CpuScoreIsaAt(isa).logits(task, first, count, burst, logits);
            for (int i = 0; i < count; ++i) {
              for (int b = burst * kScoreBurstBlocks; b < std::min(kBlocks, (burst + 1) * kScoreBurstBlocks);
                   ++b) {
                for (int t = 0; t < kBlockTokens; ++t) {
                  int want = 0;
                  for (int d = 0; d < dim; ++d) {
                    want += q[static_cast<size_t>((first + i) * dim + d)] *
                            DigestCode(digests.data() + static_cast<uint32_t>(b) * bytes, dim, bits, t,
                                       d);
                  }
                  const int at = (i * kScoreBurstBlocks + b % kScoreBurstBlocks) * kBlockTokens + t;
                  ASSERT_EQ(logits[at], want)
                      << CpuScoreIsaAt(isa).name << " bits " << bits << " dim " << dim << " query "
                      << first + i << " block " << b << " token " << t;
                }
              }
            }
          }
        }
      }
    }
  }
}

// What 8 bits of the query cost: a channel's error is at most half a step, and a code at most
// (2^bits - 1) / 2 from its centre, so a logit moves by e <= scale * step * head_dim * (2^bits - 1) / 4,
// and a share of the softmax by less than a factor of e^(2 e). These queries stay far below.
TEST_F(ScoreTest, ScoreBlocks_StaysNearTheExactQuery) {
  for (const ScoreCase::Shape& shape : kShapes) {
    ScoreCase c(shape, kSeed + 13);
    digests_.clear();
    Score(c, 0);
    const std::vector<double> want = Reference(c, 0, false);
    for (size_t b = 0; b < want.size(); ++b) {
      EXPECT_NEAR(c.scores[0][b], want[b], 0.05 * want[b] + 1e-6)
          << "bits " << shape.bits << " dim " << shape.dim << " block " << b;
    }
  }
}

TEST_F(ScoreTest, ScoreBlocks_QueryThatIsNoNumberScoresAllBlocksAlike) {
  for (const float odd : {0.0f, INFINITY, std::numeric_limits<float>::quiet_NaN()}) {
    ScoreCase c(kShapes[0], kSeed + 14);
    digests_.clear();
    std::fill(c.q.begin(), c.q.end(), odd);
    for (int isa = 0; isa < CpuScoreIsaCount(); ++isa) {
      Score(c, isa);
      for (const float score : c.scores[0]) EXPECT_NEAR(score, 1.0 / ScoreCase::kBlocks, 1e-6);
    }
  }
}

TEST_F(SelectionTest, SelectTopBlocks_LargestScoresAscendingLowerIndexFirst) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> few = {0.1f, 0.5f, 0.5f, 0.2f, 0.5f};
  const std::vector<float> nans = {nan, 0.1f, nan, 0.3f};
  const std::vector<float> signs = {-0.0f, -2.0f, 0.0f, nan, -INFINITY, INFINITY, -1.0f};
  std::vector<float> many(997);
  Random random(kSeed + 9);
  for (float& x : many) x = static_cast<float>(random.Below(50));  // with ties
  std::vector<std::vector<int32_t>> selected = {std::vector<int32_t>(2), std::vector<int32_t>(5),
                                                std::vector<int32_t>(2), std::vector<int32_t>(100),
                                                std::vector<int32_t>(2), std::vector<int32_t>(4),
                                                std::vector<int32_t>(6)};
  const std::vector<SelectSegment> segments = {{few.data(), 5, 2, selected[0].data()},
                                               {few.data(), 5, 9, selected[1].data()},
                                               {nans.data(), 4, 2, selected[2].data()},
                                               {many.data(), 997, 100, selected[3].data()},
                                               {signs.data(), 7, 2, selected[4].data()},
                                               {signs.data(), 7, 4, selected[5].data()},
                                               {signs.data(), 7, 6, selected[6].data()},
                                               {signs.data(), 7, 0, nullptr},
                                               {signs.data(), 0, 3, nullptr}};
  const size_t bytes = device_->ops().SelectWorkspaceBytes(9, 997);
  DeviceBuffer workspace = device_->Allocate(bytes).value();
  device_->ops().SelectTopBlocks(*stream_, {segments, 997}, workspace.data(), bytes);
  Wait();
  EXPECT_EQ(selected[0], (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(selected[1], (std::vector<int32_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(selected[2], (std::vector<int32_t>{1, 3}));
  EXPECT_EQ(selected[4], (std::vector<int32_t>{0, 5}));  // -0 is 0, and comes first
  EXPECT_EQ(selected[5], (std::vector<int32_t>{0, 2, 5, 6}));
  EXPECT_EQ(selected[6], (std::vector<int32_t>{0, 1, 2, 3, 5, 6}));  // a NaN as minus infinity
  std::vector<int32_t> order(997);
  for (int32_t i = 0; i < 997; ++i) order[static_cast<size_t>(i)] = i;
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return many[static_cast<size_t>(a)] > many[static_cast<size_t>(b)];
  });
  order.resize(100);
  std::sort(order.begin(), order.end());
  EXPECT_EQ(selected[3], order);
}

}  // namespace
}  // namespace kvt
