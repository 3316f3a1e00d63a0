// Digests, scores and top blocks through the Ops interface, against plain scalar references over odd
// sizes, on every instruction set this processor has.
#include "kernels/selection.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "kernels/base/random.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/select_blocks.h"
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

// In double, with keys decoded from the digest, offset included.
std::vector<double> ReferenceScores(const Layer& layer, const DigestSpec& spec, int query_heads,
                                    const float* q, float scale, const std::vector<uint8_t>& digests,
                                    int first, int blocks) {
  const int dim = layer.geometry.head_dim;
  const int group = query_heads / layer.geometry.kv_heads;
  std::vector<double> scores(static_cast<size_t>(blocks));
  for (size_t h = 0; h < spec.heads.size(); ++h) {
    const DigestHead& head = spec.heads[h];
    for (int g = 0; g < group; ++g) {
      std::vector<double> logits;
      double max = -INFINITY, sum = 0;
      for (int b = 0; b < blocks; ++b) {
        const uint8_t* digest = digests.data() +
                                static_cast<size_t>(first + b) * spec.Bytes(dim) +
                                h * DigestHeadBytes(dim, spec.bits);
        for (int t = 0; t < kBlockTokens; ++t) {
          double dot = 0;
          for (int d = 0; d < dim; ++d) {
            const double key = head.offset[d] +
                               double{head.scale[d]} * (DigestCode(digest, dim, spec.bits, t, d) -
                                                        0.5 * ((1 << spec.bits) - 1));
            dot += key * q[(head.kv_head * group + g) * dim + d];
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

TEST_F(SelectionTest, ScoreBlocks_EqualsScalarReference) {
  struct Shape {
    int kv_heads, group, dim, heads, bits;
  };
  for (const Shape& shape : {Shape{3, 3, 64, 1, 4}, Shape{3, 3, 64, 2, 4}, Shape{2, 1, 128, 2, 4},
                             Shape{2, 7, 64, 1, 4}, Shape{1, 8, 32, 1, 3}, Shape{3, 3, 64, 2, 2}}) {
    constexpr int kBlocks = 41;
    constexpr float kScale = 0.125f;
    Layer layer(shape.kv_heads, shape.dim, kBlocks, kSeed + 7);
    std::vector<DigestHead> heads;
    for (int h = 0; h < shape.heads; ++h) heads.push_back(layer.Head(shape.kv_heads - 1 - h));
    const DigestSpec spec{shape.bits, heads};
    const std::vector<uint8_t> digests = Digest(layer, spec);
    const int query_heads = shape.kv_heads * shape.group;
    constexpr int kRows = 4;
    std::vector<float> q(static_cast<size_t>(kRows * query_heads * shape.dim));
    Random random(kSeed + 8);
    for (float& x : q) x = static_cast<float>(random.Uniform() * 6 - 3);
    std::vector<uint32_t> entries(kBlocks);
    for (uint32_t b = 0; b < kBlocks; ++b) entries[b] = b;
    std::vector<std::vector<float>> scores(kRows, std::vector<float>(kBlocks, -1));
    // Of the middle: all, a part by entries, one block, none.
    const std::vector<ScoreSegment> segments = {
        {nullptr, 0, kBlocks, 0, scores[0].data()},
        {entries.data() + 3, 0, 17, 1, scores[1].data()},
        {nullptr, 40, 1, 2, scores[2].data()},
        {nullptr, 0, 0, 3, scores[3].data()}};
    const std::vector<int> first = {0, 3, 40, 0};
    ScoreBlocksArgs args;
    args.geometry = layer.geometry;
    args.spec = spec;
    args.query_heads = query_heads;
    args.scale = kScale;
    args.q = q.data();
    args.q_stride = query_heads * shape.dim;
    args.digests = digests.data();
    args.segments = segments;
    const size_t bytes = device_->ops().ScoreWorkspaceBytes(shape.heads * shape.group, kRows, kBlocks);
    DeviceBuffer workspace = device_->Allocate(bytes).value();
    for (int isa = 0; isa < CpuScoreIsaCount(); ++isa) {
      SCOPED_TRACE(std::string(CpuScoreIsaName(isa)));
      CpuScoreUseIsa(isa);
      device_->ops().ScoreBlocks(*stream_, args, workspace.data(), bytes);
      Wait();
      for (size_t r = 0; r < kRows; ++r) {
        const std::vector<double> want =
            ReferenceScores(layer, spec, query_heads, q.data() + r * static_cast<size_t>(args.q_stride),
                            kScale, digests, first[r], segments[r].blocks);
        double sum = 0;
        for (size_t b = 0; b < want.size(); ++b) {
          ASSERT_NEAR(scores[r][b], want[b], 1e-6 + 1e-4 * want[b]) << "row " << r << " block " << b;
          sum += scores[r][b];
        }
        EXPECT_NEAR(sum, want.empty() ? 0 : 1, 1e-5);
        for (size_t b = want.size(); b < kBlocks; ++b) ASSERT_EQ(scores[r][b], -1) << "overrun";
      }
    }
  }
}

TEST_F(SelectionTest, SelectTopBlocks_LargestScoresAscendingLowerIndexFirst) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> few = {0.1f, 0.5f, 0.5f, 0.2f, 0.5f};
  const std::vector<float> nans = {nan, 0.1f, nan, 0.3f};
  std::vector<float> many(997);
  Random random(kSeed + 9);
  for (float& x : many) x = static_cast<float>(random.Below(50));  // with ties
  std::vector<std::vector<int32_t>> selected = {std::vector<int32_t>(2), std::vector<int32_t>(5),
                                                std::vector<int32_t>(2), std::vector<int32_t>(100)};
  const std::vector<SelectSegment> segments = {{few.data(), 5, 2, selected[0].data()},
                                               {few.data(), 5, 9, selected[1].data()},
                                               {nans.data(), 4, 2, selected[2].data()},
                                               {many.data(), 997, 100, selected[3].data()}};
  const size_t bytes = device_->ops().SelectWorkspaceBytes(4, 997);
  DeviceBuffer workspace = device_->Allocate(bytes).value();
  device_->ops().SelectTopBlocks(*stream_, {segments, 997}, workspace.data(), bytes);
  Wait();
  EXPECT_EQ(selected[0], (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(selected[1], (std::vector<int32_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(selected[2], (std::vector<int32_t>{1, 3}));
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
