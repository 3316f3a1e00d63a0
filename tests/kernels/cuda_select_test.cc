// Selection on the CUDA device, and its arithmetic on the host (select_math.h), equal the CPU's bit
// for bit.
#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>

#include "kernels/base/random.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/cuda/select_blocks.h"
#include "kernels/cuda/select_math.h"
#include "kernels/layout/named_layout.h"
#include "kernels/layout/planes.h"
#include "kernels/ops.h"
#include "tests/kernels/cuda_fixture.h"

namespace kvt {
namespace {

constexpr uint64_t kSeed = 20261202;

std::vector<uint8_t> RandomBytes(Random& random, size_t count) {
  std::vector<uint8_t> bytes(count);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.Below(256));
  return bytes;
}
std::vector<float> RandomFloats(Random& random, size_t count, float least, float most) {
  std::vector<float> values(count);
  for (float& x : values) x = least + static_cast<float>(random.Uniform()) * (most - least);
  return values;
}

struct Shape {
  int kv_heads, group, dim, heads, bits;
};
constexpr Shape kShapes[] = {{3, 3, 64, 1, 4}, {3, 3, 64, 2, 4},  {2, 1, 128, 2, 4},
                             {2, 7, 64, 1, 4}, {1, 8, 32, 1, 3},  {3, 2, 64, 2, 2},
                             {1, 4, 96, 1, 3}, {1, 20, 96, 1, 2}, {2, 2, 256, 2, 3}};

// Slots of random bytes, NaNs and infinities among them; any bytes are a digest too.
struct SelectCase {
  static constexpr int kBlocks = 301;
  static constexpr int kManyRows = 67;  // more than one launch takes
  static constexpr int kFewRows = 14;

  SelectCase(const Shape& s, uint64_t seed)
      : shape(s),
        rows(&s == &kShapes[0] ? kManyRows : kFewRows),
        geometry{1, s.kv_heads, s.dim},
        random(seed) {
    slots = RandomBytes(random, size_t{2 * kBlocks} * geometry.SlotBytes());
    for (uint32_t b = 0; b < kBlocks; ++b) {
      pairs.push_back({2 * (kBlocks - 1 - b), b % 5 == 4 ? kSlotNone : 2 * b + 1});
      entries.push_back((b * 11 + 3) % kBlocks);  // each once
    }
    const auto channels = static_cast<size_t>(s.kv_heads * s.dim);
    offset = RandomFloats(random, channels, -0.5f, 0.5f);
    scale = RandomFloats(random, channels, 0.2f, 0.4f);
    digests = RandomBytes(random, kBlocks * Spec(offset.data(), scale.data()).Bytes(s.dim));
    const int query_heads = s.kv_heads * s.group;
    q = RandomFloats(random, static_cast<size_t>(rows * query_heads * s.dim), -2.0f, 2.0f);
    std::fill_n(q.begin(), s.dim, std::numeric_limits<float>::quiet_NaN());
    for (int row = 0; row < rows; ++row) {
      // All, odd numbers, few, one, none.
      blocks.push_back(row == 0       ? kBlocks
                       : row % 9 == 8 ? row / 9 % 2
                       : row % 9 == 0 ? row * 37 % kBlocks
                                      : row % 23);
    }
  }
  // Both arrays in the memory of the device that will read them.
  DigestSpec Spec(const float* offsets, const float* scales) {
    heads.clear();
    for (int h = 0; h < shape.heads; ++h) {
      const int kv_head = shape.kv_heads - 1 - h;
      heads.push_back({kv_head, offsets + kv_head * shape.dim, scales + kv_head * shape.dim});
    }
    return {shape.bits, heads};
  }
  MakeDigestArgs DigestArgs(const float* offsets, const float* scales, const uint8_t* slot_bytes,
                            const SlotPair* table, const uint32_t* into, uint8_t* out) {
    MakeDigestArgs args;
    args.geometry = geometry;
    args.spec = Spec(offsets, scales);
    args.slots = slot_bytes;
    args.blocks = table;
    args.entries = into;
    args.count = kBlocks;
    args.digests = out;
    return args;
  }
  ScoreBlocksArgs ScoreArgs(const float* offsets, const float* scales, const float* queries,
                            const uint8_t* from, const uint32_t* list, float* scores) {
    segments.clear();
    for (int row = 0; row < rows; ++row) {
      const size_t at = static_cast<size_t>(row);
      segments.push_back(
          {row % 2 == 0 ? nullptr : list, static_cast<uint32_t>(row == 0 ? 0 : row % 3),
           std::min(blocks[at], kBlocks - (row == 0 ? 0 : row % 3)), row, scores + row * kBlocks});
    }
    ScoreBlocksArgs args;
    args.geometry = geometry;
    args.spec = Spec(offsets, scales);
    args.query_heads = shape.kv_heads * shape.group;
    args.scale = 0.125f;
    args.q = queries;
    args.q_stride = args.query_heads * shape.dim;
    args.digests = from;
    args.segments = segments;
    return args;
  }
  [[nodiscard]] int Queries() const { return shape.heads * shape.group; }

  const Shape shape;
  const int rows;
  const Geometry geometry;
  Random random;
  std::vector<uint8_t> slots, digests;
  std::vector<SlotPair> pairs;
  std::vector<uint32_t> entries;
  std::vector<float> offset, scale, q;
  std::vector<int> blocks;
  std::vector<DigestHead> heads;
  std::vector<ScoreSegment> segments;
};

// What the CPU device makes of a case.
class CpuSelection {
 public:
  CpuSelection() : device_(MakeCpuDevice({.threads = 2}).value()) {
    stream_ = device_->NewStream(StreamPriority::kNormal);
    done_ = device_->NewEvent();
  }
  std::vector<uint8_t> Digests(SelectCase& c) {
    std::vector<uint8_t> out(c.digests.size());
    device_->ops().MakeDigest(
        *stream_, c.DigestArgs(c.offset.data(), c.scale.data(), c.slots.data(), c.pairs.data(),
                               c.entries.data(), out.data()));
    Wait();
    return out;
  }
  std::vector<float> Scores(SelectCase& c) {
    std::vector<float> out(static_cast<size_t>(c.rows * SelectCase::kBlocks), -1.0f);
    const size_t bytes =
        device_->ops().ScoreWorkspaceBytes(c.Queries(), c.rows, SelectCase::kBlocks);
    const DeviceBuffer workspace = device_->Allocate(bytes).value();
    device_->ops().ScoreBlocks(*stream_,
                               c.ScoreArgs(c.offset.data(), c.scale.data(), c.q.data(),
                                           c.digests.data(), c.entries.data(), out.data()),
                               workspace.data(), bytes);
    Wait();
    return out;
  }
  std::vector<int32_t> Top(const std::vector<float>& scores, int count) {
    const int blocks = static_cast<int>(scores.size());
    std::vector<int32_t> out(static_cast<size_t>(std::min(count, blocks)));
    const SelectSegment segments[] = {{scores.data(), blocks, count, out.data()}};
    const size_t bytes = device_->ops().SelectWorkspaceBytes(1, blocks);
    const DeviceBuffer workspace = device_->Allocate(bytes).value();
    device_->ops().SelectTopBlocks(*stream_, {segments, blocks}, workspace.data(), bytes);
    Wait();
    return out;
  }

 private:
  void Wait() {
    stream_->Record(*done_);
    ASSERT_TRUE(done_->HostWait(absl::Seconds(30)));
  }
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Event> done_;
};

// Scores with ties, NaNs and both zeros.
std::vector<float> TopScores(Random& random, int blocks) {
  std::vector<float> scores(static_cast<size_t>(blocks));
  for (float& x : scores) {
    x = static_cast<float>(static_cast<int>(random.Below(40)) - 10) / 7.0f;
    if (random.Below(20) == 0) x = std::numeric_limits<float>::quiet_NaN();
    if (random.Below(20) == 0) x = -0.0f;
    if (random.Below(50) == 0) x = random.Below(2) == 0 ? INFINITY : -INFINITY;
  }
  return scores;
}

// ---- the arithmetic, on the host

template <int kBits>
std::vector<uint8_t> HostDigests(const SelectCase& c) {
  const int dim = c.shape.dim;
  const uint32_t head_bytes = DigestHeadBytes(dim, kBits);
  std::vector<uint32_t> words(c.digests.size() / sizeof(uint32_t));
  for (size_t b = 0; b < c.pairs.size(); ++b) {
    for (size_t h = 0; h < c.heads.size(); ++h) {
      const DigestHead& head = c.heads[h];
      const auto plane = [&](uint32_t slot) {
        return c.slots.data() + size_t{slot} * c.geometry.SlotBytes() +
               static_cast<size_t>(head.kv_head) * c.geometry.SliceBytes();
      };
      uint32_t* digest = words.data() + (c.entries[b] * c.heads.size() + h) * head_bytes / 4;
      for (int t = 0; t < kBlockTokens; ++t) {
        for (int first = 0; first < dim; first += 32) {
          SelectWriteCodes<kBits>(digest, dim, t, first, [&](int i) {
            const uint32_t at = KOffset(t, first + i);
            const uint8_t base = plane(c.pairs[b].base)[at];
            const uint16_t bits = c.pairs[b].residual == kSlotNone
                                      ? JoinBase(base)
                                      : JoinTarget(base, plane(c.pairs[b].residual)[at]);
            return SelectKeyCode(HalfToFloat(bits), head.offset[first + i],
                                 1.0f / head.scale[first + i], kBits);
          });
        }
      }
    }
  }
  std::vector<uint8_t> out(c.digests.size());
  std::memcpy(out.data(), words.data(), out.size());
  return out;
}

// The sum of 16 lanes by the steps that the lanes of a warp take.
float Butterfly(std::vector<float> lanes, std::initializer_list<size_t> steps) {
  for (const size_t other : steps) {
    std::vector<float> next(lanes.size());
    for (size_t i = 0; i < lanes.size(); ++i) next[i] = lanes[i] + lanes[i ^ other];
    lanes = next;
  }
  return lanes[0];
}

// One query's shares of a row are added to `scores` as the three launches do it.
template <int kBits>
void HostAddScores(const SelectCase& c, const ScoreBlocksArgs& args, const ScoreSegment& segment,
                   size_t h, int g, std::vector<float>& scores) {
  const int dim = c.shape.dim;
  const DigestHead& head = args.spec.heads[h];
  const float* q = args.q + segment.row * args.q_stride + (head.kv_head * c.shape.group + g) * dim;
  uint32_t largest = 0;
  for (int d = 0; d < dim; ++d) largest = std::max(largest, SelectMagnitude(q[d] * head.scale[d]));
  const SelectQueryScale query = SelectQueryScaleOf(largest);
  std::vector<int32_t> words(static_cast<size_t>(dim / 4));
  auto* codes = reinterpret_cast<int8_t*>(words.data());
  for (int d = 0; d < dim; ++d) codes[d] = SelectQueryCode(q[d] * head.scale[d], query);
  const float step2 = query.step * args.scale * kScoreLog2E;

  const int bursts = (segment.blocks + kScoreBurstBlocks - 1) / kScoreBurstBlocks;
  std::vector<std::vector<float>> sums;
  std::vector<int32_t> max;
  for (int burst = 0; burst < bursts; ++burst) {
    const int first = burst * kScoreBurstBlocks;
    const int last = std::min(first + kScoreBurstBlocks, segment.blocks);
    std::vector<int32_t> logits;
    for (int b = first; b < last; ++b) {
      const uint32_t entry = segment.entries == nullptr
                                 ? segment.first_entry + static_cast<uint32_t>(b)
                                 : segment.entries[b];
      const uint8_t* digest =
          args.digests + size_t{entry} * args.spec.Bytes(dim) + h * DigestHeadBytes(dim, kBits);
      for (int t = 0; t < kBlockTokens; ++t) {
        int32_t logit[1];
        SelectLogits<kBits>(reinterpret_cast<const uint32_t*>(digest), dim, t, words.data(), logit);
        logits.push_back(logit[0]);
      }
    }
    max.push_back(*std::max_element(logits.begin(), logits.end()));
    sums.emplace_back(kScoreBurstBlocks, 0.0f);
    for (int b = first; b < last; ++b) {
      std::vector<float> weights;
      for (int t = 0; t < kBlockTokens; ++t) {
        weights.push_back(SelectWeight(logits[static_cast<size_t>((b - first) * kBlockTokens + t)],
                                       max.back(), step2));
      }
      sums.back()[static_cast<size_t>(b - first)] = Butterfly(weights, {2, 1, 4, 8});
    }
  }
  const int32_t most = *std::max_element(max.begin(), max.end());
  std::vector<float> mass(kScoreBurstBlocks, 0.0f);
  for (size_t i = 0; i < sums.size(); ++i) {
    const float factor = SelectWeight(max[i], most, step2);
    for (size_t b = 0; b < mass.size(); ++b) mass[b] = fmaf(factor, sums[i][b], mass[b]);
  }
  const float share = 1.0f / (Butterfly(mass, {8, 4, 2, 1}) * static_cast<float>(c.Queries()));
  for (size_t b = 0; b < static_cast<size_t>(segment.blocks); ++b) {
    const float factor = SelectWeight(max[b / kScoreBurstBlocks], most, step2);
    scores[b] =
        fmaf(factor * share, sums[b / kScoreBurstBlocks][b % kScoreBurstBlocks], scores[b]);
  }
}

template <int kBits>
void CheckHostArithmetic(SelectCase& c) {
  CpuSelection cpu;
  EXPECT_EQ(cpu.Digests(c), HostDigests<kBits>(c));
  std::vector<float> ignored(static_cast<size_t>(c.rows * SelectCase::kBlocks));
  const ScoreBlocksArgs args = c.ScoreArgs(c.offset.data(), c.scale.data(), c.q.data(),
                                           c.digests.data(), c.entries.data(), ignored.data());
  std::vector<float> want = cpu.Scores(c);
  for (const int row : {0, 1, 2, 8, 9, 13, 17, 33}) {
    if (row >= c.rows) break;
    const ScoreSegment& segment = args.segments[static_cast<size_t>(row)];
    std::vector<float> scores(static_cast<size_t>(segment.blocks), 0.0f);
    for (size_t h = 0; h < args.spec.heads.size() && segment.blocks > 0; ++h) {
      for (int g = 0; g < c.shape.group; ++g) HostAddScores<kBits>(c, args, segment, h, g, scores);
    }
    const float* cpu_scores = want.data() + row * SelectCase::kBlocks;
    EXPECT_EQ(std::memcmp(scores.data(), cpu_scores, scores.size() * sizeof(float)), 0)
        << "bits " << kBits << " dim " << c.shape.dim << " group " << c.shape.group << " row "
        << row;
  }
}

TEST(CudaSelectMath, OnTheHost_EqualsTheCpuBitForBit) {
  for (const Shape& shape : kShapes) {
    SelectCase c(shape, kSeed);
    switch (shape.bits) {
      case 2:
        CheckHostArithmetic<2>(c);
        break;
      case 3:
        CheckHostArithmetic<3>(c);
        break;
      default:
        CheckHostArithmetic<4>(c);
    }
  }
}

TEST(CudaSelectMath, Ranks_OrderScoresAsTheCpuDoes) {
  CpuSelection cpu;
  Random random(kSeed + 1);
  for (const int blocks : {1, 2, 17, 600}) {
    const std::vector<float> scores = TopScores(random, blocks);
    std::vector<int32_t> order(scores.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return SelectRank(scores[static_cast<size_t>(a)]) >
             SelectRank(scores[static_cast<size_t>(b)]);
    });
    for (const int count : {1, blocks / 2, blocks}) {
      std::vector<int32_t> want(order.begin(), order.begin() + count);
      std::sort(want.begin(), want.end());
      EXPECT_EQ(cpu.Top(scores, count), want) << blocks << " " << count;
    }
  }
}

TEST(CudaSelectLaunchers, BadArguments_AreRefusedBeforeAnyLaunch) {
  SelectCase c(kShapes[0], kSeed);
  std::vector<float> scores(static_cast<size_t>(c.rows * SelectCase::kBlocks));
  const auto refused = [](const absl::Status& status, absl::string_view what) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_NE(status.message().find(what), absl::string_view::npos) << status;
  };
  MakeDigestArgs digest = c.DigestArgs(c.offset.data(), c.scale.data(), c.slots.data(),
                                       c.pairs.data(), nullptr, c.digests.data());
  digest.spec.bits = 5;
  refused(CudaMakeDigest(digest, nullptr), "bits = 5");
  digest.spec.bits = 4;
  digest.digests = c.digests.data() + 1;
  refused(CudaMakeDigest(digest, nullptr), "4-byte aligned");
  digest.spec.heads = {};
  refused(CudaMakeDigest(digest, nullptr), "0 selecting heads");

  ScoreBlocksArgs score = c.ScoreArgs(c.offset.data(), c.scale.data(), c.q.data(), c.digests.data(),
                                      c.entries.data(), scores.data());
  const size_t bytes = CudaScoreWorkspaceBytes(c.Queries(), c.rows, SelectCase::kBlocks);
  alignas(16) uint8_t workspace[16];
  refused(CudaScoreBlocks(score, workspace, bytes - 1, nullptr), "workspace");
  refused(CudaScoreBlocks(score, workspace + 1, bytes, nullptr), "16-byte aligned");
  score.query_heads = 4;
  refused(CudaScoreBlocks(score, workspace, bytes, nullptr), "query_heads = 4, kv_heads = 3");
  score.query_heads = 9;
  c.segments[3].blocks = -1;
  refused(CudaScoreBlocks(score, workspace, bytes, nullptr), "blocks = -1");

  int32_t selected[4];
  const SelectSegment segments[] = {{scores.data(), 5, 4, selected}};
  refused(CudaSelectTopBlocks({segments, 4}, nullptr), "blocks = 5 (at most 4)");
}

// ---- the kernels

TEST_F(CudaTest, MakeDigest_EqualsTheCpu) {
  CpuSelection cpu;
  for (const Shape& shape : kShapes) {
    SelectCase c(shape, kSeed + 2);
    const std::vector<uint8_t> want = cpu.Digests(c);
    const DeviceBuffer offset = Upload(c.offset), scale = Upload(c.scale), slots = Upload(c.slots),
                       pairs = Upload(c.pairs), entries = Upload(c.entries),
                       digests = Upload(c.digests);
    const absl::Status status = CudaMakeDigest(
        c.DigestArgs(offset.as<float>(), scale.as<float>(), slots.as<uint8_t>(),
                     pairs.as<SlotPair>(), entries.as<uint32_t>(), digests.as<uint8_t>()),
        Handle());
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(Download<uint8_t>(digests, want.size()), want)
        << "bits " << shape.bits << " dim " << shape.dim;
  }
}

TEST_F(CudaTest, ScoreBlocks_EqualsTheCpuBitForBit) {
  CpuSelection cpu;
  for (const Shape& shape : kShapes) {
    SelectCase c(shape, kSeed + 3);
    const std::vector<float> want = cpu.Scores(c);
    const DeviceBuffer offset = Upload(c.offset), scale = Upload(c.scale), q = Upload(c.q),
                       entries = Upload(c.entries), digests = Upload(c.digests),
                       scores = Upload(std::vector<float>(want.size(), -1.0f));
    const size_t bytes = CudaScoreWorkspaceBytes(c.Queries(), c.rows, SelectCase::kBlocks);
    const DeviceBuffer workspace = Upload(std::vector<uint8_t>(bytes, 0xff));
    const absl::Status status = CudaScoreBlocks(
        c.ScoreArgs(offset.as<float>(), scale.as<float>(), q.as<float>(), digests.as<uint8_t>(),
                    entries.as<uint32_t>(), scores.as<float>()),
        workspace.data(), bytes, Handle());
    ASSERT_TRUE(status.ok()) << status;
    const std::vector<float> got = Download<float>(scores, want.size());
    // What lies past a row's blocks is as it was, too.
    EXPECT_EQ(std::memcmp(got.data(), want.data(), want.size() * sizeof(float)), 0)
        << "bits " << shape.bits << " dim " << shape.dim << " group " << shape.group;
  }
}

TEST_F(CudaTest, SelectTopBlocks_EqualsTheCpu) {
  CpuSelection cpu;
  Random random(kSeed + 4);
  constexpr int kMost = 8192;
  struct Row {
    DeviceBuffer scores, selected;
    std::vector<int32_t> want;
  };
  std::vector<Row> rows;
  std::vector<SelectSegment> segments;
  for (const int blocks : {1, 2, 31, 32, 33, 511, 512, 513, 1025, kMost}) {
    for (const int count : {0, 1, 7, blocks / 3, blocks - 1, blocks, blocks + 5}) {
      const std::vector<float> scores = TopScores(random, blocks);
      Row row;
      row.want = cpu.Top(scores, count);
      row.scores = Upload(scores);
      row.selected = Upload(std::vector<int32_t>(row.want.size() + 1, -1));
      segments.push_back({row.scores.as<float>(), blocks, count, row.selected.as<int32_t>()});
      row.want.push_back(-1);  // nothing is written past the last
      rows.push_back(std::move(row));
    }
  }
  const absl::Status status = CudaSelectTopBlocks({segments, kMost}, Handle());
  ASSERT_TRUE(status.ok()) << status;
  for (size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(Download<int32_t>(rows[i].selected, rows[i].want.size()), rows[i].want)
        << segments[i].count << " of " << segments[i].blocks;
  }
}

}  // namespace
}  // namespace kvt
