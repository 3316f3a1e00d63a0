// Attention over a chosen set of blocks (Transformer::AttendOver), in a step of a seeded random
// model: a table of everything is full attention bit for bit; a chosen set equals plain attention in
// double over the same keys.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels/base/random.h"
#include "kernels/base/units.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/layout/planes.h"
#include "kernels/model/model_config.h"
#include "kernels/model/transformer.h"
#include "tests/support/model_folder.h"
#include "tests/support/random_model.h"

namespace kvt {
namespace {

constexpr absl::Duration kDeadline = absl::Seconds(60);
constexpr uint64_t kSeed = 20261130;
constexpr int kTokens = 330;
constexpr int kBlocks = (kTokens + kBlockTokens - 1) / kBlockTokens;
constexpr int kRows = 7;  // decoded at the end, over tables of their own

struct Case {
  int spec;
  TransformerOptions::Compute compute;
};

class SparseAttention : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    WriteRandomModel(RandomModelSpecs()[static_cast<size_t>(GetParam().spec)], temp_.path());
    device_ = MakeCpuDevice({.threads = 2}).value();
    model_ = Transformer::Load(temp_.path(), *device_, {.compute = GetParam().compute}).value();
    layers_ = model_->geometry().layers;
    stream_ = device_->NewStream(StreamPriority::kNormal);
    event_ = device_->NewEvent();
    state_ = model_->NewStepState({.rows = kTokens, .logits_rows = kTokens, .segments = kRows})
                 .value();
    const auto slots = static_cast<uint32_t>(2 * layers_ * kBlocks);
    cache_ = KvCache::Create(*device_, model_->geometry(),
                             {.slot_count = slots, .table_rows = 1, .blocks_per_row = kBlocks})
                 .value();
    std::vector<SlotPair> pairs(slots / 2);
    for (uint32_t i = 0; i < slots / 2; ++i) pairs[i] = {i, slots - 1 - i};
    cache_->SetTableAllLayers(*stream_, 0, 0, kBlocks, pairs);
    tables_ = device_->Allocate(sizeof(SlotPair) * kRows * kBlocks).value();
    Random random(kSeed);
    for (int i = 0; i < kTokens; ++i) {
      tokens_.push_back(static_cast<int32_t>(
          random.Below(static_cast<uint64_t>(model_->config().vocab))));
    }
  }

  void Wait() {
    stream_->Record(*event_);
    ASSERT_TRUE(event_->HostWait(kDeadline));
  }
  void Begin(int first, int count) {
    const StepSegment segment{0, first,
                              absl::MakeConstSpan(tokens_).subspan(static_cast<size_t>(first),
                                                                   static_cast<size_t>(count)),
                              count};
    model_->Begin(*stream_, *state_, *cache_, {&segment, 1});
  }
  std::vector<float> Logits(int count) {
    std::vector<float> logits(static_cast<size_t>(count * model_->config().vocab));
    model_->Logits(*stream_, *state_);
    model_->ReadLogits(*stream_, *state_, logits.data());
    Wait();
    return logits;
  }
  void Prefill(int count) {
    Begin(0, count);
    for (int layer = 0; layer < layers_; ++layer) {
      model_->ProjectQkv(*stream_, *state_, layer);
      model_->Attend(*stream_, *state_, layer);
      model_->FinishLayer(*stream_, *state_, layer);
    }
    Wait();
  }
  // A segment for each row at `first` + r, over the blocks of `chosen`, which end with the row's own.
  std::vector<AttentionSegment> Tables(int layer, int first,
                                       const std::vector<std::vector<int>>& chosen) {
    std::vector<AttentionSegment> segments;
    for (int r = 0; r < static_cast<int>(chosen.size()); ++r) {
      std::vector<SlotPair> pairs;
      for (const int block : chosen[static_cast<size_t>(r)]) {
        pairs.push_back(cache_->Table(0, layer)[block]);
      }
      SlotPair* table = tables_.as<SlotPair>() + r * kBlocks;
      stream_->WriteToDevice(table, pairs.data(), pairs.size() * sizeof(SlotPair));
      const int last = static_cast<int>(pairs.size()) - 1;
      segments.push_back({table, last * kBlockTokens + (first + r) % kBlockTokens, r, 1});
    }
    return segments;
  }
  // K and V of one block and head, [K or V][token][channel].
  std::vector<uint16_t> Values(int layer, int block, int head) const {
    const Geometry& g = model_->geometry();
    const SlotPair pair = cache_->Table(0, layer)[block];
    std::vector<uint16_t> values(g.SliceBytes());
    const size_t at = static_cast<size_t>(head) * g.SliceBytes();
    JoinSlice(g.head_dim, {cache_->SlotAddress(pair.base) + at, g.SliceBytes()},
              {cache_->SlotAddress(pair.residual) + at, g.SliceBytes()}, absl::MakeSpan(values));
    return values;
  }
  // Row at `position`, query head `head`, over the tokens of `blocks` up to its own, in double.
  std::vector<double> Reference(int layer, int position, int head, const float* q,
                                const std::vector<int>& blocks) const {
    const int dim = model_->geometry().head_dim;
    const int kv_head = head / model_->config().GroupSize();
    std::vector<double> out(static_cast<size_t>(dim));
    double sum = 0;
    for (const int block : blocks) {
      const std::vector<uint16_t> values = Values(layer, block, kv_head);
      for (int t = 0; t < kBlockTokens && block * kBlockTokens + t <= position; ++t) {
        double dot = 0;
        for (int d = 0; d < dim; ++d) {
          dot += double{q[d]} * HalfToFloat(values[static_cast<size_t>(t * dim + d)]);
        }
        const double weight = std::exp(dot / std::sqrt(static_cast<double>(dim)));
        sum += weight;
        for (int d = 0; d < dim; ++d) {
          out[static_cast<size_t>(d)] +=
              weight * HalfToFloat(values[static_cast<size_t>((kBlockTokens + t) * dim + d)]);
        }
      }
    }
    for (double& x : out) x /= sum;
    return out;
  }
  float Attended(const LayerActivations& a, int row, int at) const {
    const uint8_t* bytes = static_cast<const uint8_t*>(a.attended) +
                           static_cast<size_t>(row) * a.attended_row_bytes;
    if (model_->compute() == ComputeType::kF32) return reinterpret_cast<const float*>(bytes)[at];
    const uint32_t bits = reinterpret_cast<const uint16_t*>(bytes)[at];
    return std::bit_cast<float>(bits << 16);
  }

  TempFolder temp_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Transformer> model_;
  std::unique_ptr<KvCache> cache_;
  std::unique_ptr<StepState> state_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Event> event_;
  DeviceBuffer tables_;
  int layers_ = 0;
  std::vector<int32_t> tokens_;
};

std::vector<int> AllBlocks(int position) {
  std::vector<int> blocks;
  for (int b = 0; b <= position / kBlockTokens; ++b) blocks.push_back(b);
  return blocks;
}

TEST_P(SparseAttention, TableOfEverything_EqualsFullAttentionBitForBit) {
  constexpr int kFirst = kTokens - kRows;
  Prefill(kFirst);
  Begin(kFirst, kRows);
  for (int layer = 0; layer < layers_; ++layer) {
    model_->ProjectQkv(*stream_, *state_, layer);
    model_->Attend(*stream_, *state_, layer);
    model_->FinishLayer(*stream_, *state_, layer);
  }
  const std::vector<float> full = Logits(kRows);

  std::vector<std::vector<int>> chosen;
  for (int r = 0; r < kRows; ++r) chosen.push_back(AllBlocks(kFirst + r));
  Begin(kFirst, kRows);
  for (int layer = 0; layer < layers_; ++layer) {
    model_->ProjectQkv(*stream_, *state_, layer);
    const std::vector<AttentionSegment> segments = Tables(layer, kFirst, chosen);
    model_->AttendOver(*stream_, *state_, segments);
    model_->FinishLayer(*stream_, *state_, layer);
    Wait();
  }
  const std::vector<float> over = Logits(kRows);
  EXPECT_EQ(std::memcmp(full.data(), over.data(), full.size() * sizeof(float)), 0);
}

TEST_P(SparseAttention, ChosenBlocks_EqualPlainAttentionOverThem) {
  constexpr int kFirst = kTokens - kRows;
  const double tolerance = model_->compute() == ComputeType::kF32 ? 2e-5 : 2e-2;
  const int dim = model_->geometry().head_dim;
  Prefill(kFirst);
  Begin(kFirst, kRows);
  Random random(kSeed + 1);
  for (int layer = 0; layer < layers_; ++layer) {
    model_->ProjectQkv(*stream_, *state_, layer);
    std::vector<std::vector<int>> chosen;  // another set for each row and layer
    for (int r = 0; r < kRows; ++r) {
      std::vector<int> blocks;
      const int own = (kFirst + r) / kBlockTokens;
      for (int b = 0; b < own; ++b) {
        if (random.Below(3) == 0) blocks.push_back(b);
      }
      blocks.push_back(own);
      chosen.push_back(blocks);
    }
    const std::vector<AttentionSegment> segments = Tables(layer, kFirst, chosen);
    model_->AttendOver(*stream_, *state_, segments);
    const LayerActivations a = model_->Activations(*state_);
    ASSERT_EQ(a.rows, kRows);
    std::vector<float> qkv(static_cast<size_t>(a.rows * a.qkv_stride));
    stream_->CopyToHost(qkv.data(), a.qkv, qkv.size() * sizeof(float));
    Wait();
    for (int r = 0; r < kRows; ++r) {
      for (int head = 0; head < model_->config().heads; ++head) {
        const std::vector<double> want =
            Reference(layer, kFirst + r, head, qkv.data() + r * a.qkv_stride + head * dim,
                      chosen[static_cast<size_t>(r)]);
        for (int d = 0; d < dim; ++d) {
          ASSERT_NEAR(Attended(a, r, head * dim + d), want[static_cast<size_t>(d)], tolerance)
              << "layer " << layer << " row " << r << " head " << head << " channel " << d;
        }
      }
    }
    model_->FinishLayer(*stream_, *state_, layer);
  }
  Wait();
}

INSTANTIATE_TEST_SUITE_P(Models, SparseAttention,
                         ::testing::Values(Case{1, TransformerOptions::Compute::kF32},
                                           Case{1, TransformerOptions::Compute::kBf16},
                                           Case{5, TransformerOptions::Compute::kF32}),
                         [](const auto& info) {
                           return std::string(RandomModelSpecs()[static_cast<size_t>(
                                      info.param.spec)].name) +
                                  (info.param.compute == TransformerOptions::Compute::kF32
                                       ? "_f32" : "_bf16");
                         });

}  // namespace
}  // namespace kvt
