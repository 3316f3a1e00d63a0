// The small operations of the CPU through the Ops interface: embedding, norm, rope, sampling,
// against plain scalar references over odd sizes.
#include "kernels/ops.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "kernels/base/random.h"
#include "kernels/cpu/cpu_device.h"

namespace kvt {
namespace {

float FromBf16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

std::vector<float> RandomValues(size_t count, uint64_t seed, double scale) {
  Random random(seed);
  std::vector<float> values(count);
  for (float& v : values) v = static_cast<float>((random.Uniform() * 2 - 1) * scale);
  return values;
}

// The CPU device reads host memory in place.
class OpsTest : public ::testing::Test {
 protected:
  OpsTest() {
    CpuDeviceOptions options;
    options.threads = 3;
    device_ = MakeCpuDevice(options).value();
    stream_ = device_->NewStream(StreamPriority::kNormal);
    event_ = device_->NewEvent();
  }
  void Finish() {
    stream_->Record(*event_);
    ASSERT_TRUE(event_->HostWait(absl::Seconds(20)));
  }
  Ops& ops() { return device_->ops(); }

  std::vector<int32_t> Sample(const std::vector<float>& logits, int vocabulary,
                              const std::vector<SampleParams>& params) {
    SampleArgs args;
    args.logits = logits.data();
    args.rows = static_cast<int>(params.size());
    args.vocabulary = vocabulary;
    args.params = params.data();
    std::vector<int32_t> out(params.size());
    args.out = out.data();
    std::vector<uint8_t> workspace(ops().SampleWorkspaceBytes(args.rows, vocabulary));
    args.workspace = workspace.data();
    ops().Sample(*stream_, args);
    Finish();
    return out;
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Event> event_;
};

TEST_F(OpsTest, Embed_CopiesRowsOfEitherType) {
  for (const int width : {1, 7, 64, 129}) {
    const int vocabulary = 50, rows = 23;
    const std::vector<float> table =
        RandomValues(static_cast<size_t>(vocabulary * width), 1, 1.0);
    std::vector<uint16_t> half(table.size());
    for (size_t i = 0; i < half.size(); ++i) half[i] = static_cast<uint16_t>(i * 977);
    std::vector<int32_t> tokens(rows);
    for (int r = 0; r < rows; ++r) tokens[static_cast<size_t>(r)] = r * 13 % vocabulary;
    for (const ComputeType type : {ComputeType::kF32, ComputeType::kBf16}) {
      std::vector<float> out(static_cast<size_t>(rows * width));
      EmbedArgs args;
      args.tokens = tokens.data();
      args.rows = rows;
      args.table = type == ComputeType::kF32 ? static_cast<const void*>(table.data()) : half.data();
      args.table_type = type;
      args.width = width;
      args.out = out.data();
      ops().Embed(*stream_, args);
      Finish();
      for (int r = 0; r < rows; ++r) {
        for (int i = 0; i < width; ++i) {
          const size_t from = static_cast<size_t>(tokens[static_cast<size_t>(r)] * width + i);
          const float want = type == ComputeType::kF32 ? table[from] : FromBf16(half[from]);
          ASSERT_EQ(std::memcmp(&out[static_cast<size_t>(r * width + i)], &want, 4), 0);
        }
      }
    }
  }
}

TEST_F(OpsTest, RmsNorm_EqualsTheReferenceAndPicksRows) {
  for (const int width : {1, 9, 64, 577}) {
    const int rows = 11;
    const std::vector<float> x = RandomValues(static_cast<size_t>(rows * width), 2, 30.0);
    const std::vector<float> weight = RandomValues(static_cast<size_t>(width), 3, 2.0);
    const std::vector<int32_t> picked = {10, 0, 5};
    for (const bool pick : {false, true}) {
      for (const ComputeType type : {ComputeType::kF32, ComputeType::kBf16}) {
        const int count = pick ? 3 : rows;
        std::vector<uint8_t> out(static_cast<size_t>(count * width) * 4);
        RmsNormArgs args;
        args.x = x.data();
        args.row_index = pick ? picked.data() : nullptr;
        args.rows = count;
        args.width = width;
        args.weight = weight.data();
        args.epsilon = 1e-5f;
        args.out = out.data();
        args.out_type = type;
        ops().RmsNorm(*stream_, args);
        Finish();
        for (int r = 0; r < count; ++r) {
          const int from = pick ? picked[static_cast<size_t>(r)] : r;
          double sum = 0;
          for (int i = 0; i < width; ++i) {
            const double v = x[static_cast<size_t>(from * width + i)];
            sum += v * v;
          }
          const double scale = 1 / std::sqrt(sum / width + 1e-5);
          for (int i = 0; i < width; ++i) {
            const size_t at = static_cast<size_t>(r * width + i);
            const double want = x[static_cast<size_t>(from * width + i)] * scale *
                                weight[static_cast<size_t>(i)];
            const float got = type == ComputeType::kF32
                                  ? reinterpret_cast<const float*>(out.data())[at]
                                  : FromBf16(reinterpret_cast<const uint16_t*>(out.data())[at]);
            ASSERT_NEAR(got, want, (type == ComputeType::kF32 ? 2e-6 : 4e-3) *
                                       (1e-3 + std::abs(want)));
          }
        }
      }
    }
  }
}

TEST_F(OpsTest, AddBias_AddsToEveryRowAndNothingBeyond) {
  const int rows = 3, width = 37, stride = 41;
  std::vector<float> x = RandomValues(static_cast<size_t>(rows * stride), 6, 1.0);
  const std::vector<float> before = x, bias = RandomValues(width, 7, 1.0);
  ops().AddBias(*stream_, {x.data(), stride, rows, width, bias.data()});
  Finish();
  for (int r = 0; r < rows; ++r) {
    for (int i = 0; i < stride; ++i) {
      const auto at = static_cast<size_t>(r * stride + i);
      ASSERT_EQ(x[at], i < width ? before[at] + bias[static_cast<size_t>(i)] : before[at]);
    }
  }
}

TEST_F(OpsTest, NormHeads_NormsEachHeadByItself) {
  for (const int head_dim : {7, 64, 130}) {
    const int rows = 4, heads = 3, stride = heads * head_dim + 5;
    std::vector<float> x = RandomValues(static_cast<size_t>(rows * stride), 8, 2.0);
    const std::vector<float> before = x;
    const std::vector<float> weight = RandomValues(static_cast<size_t>(head_dim), 9, 1.0);
    ops().NormHeads(*stream_, {x.data(), stride, rows, heads, head_dim, weight.data(), 1e-5f});
    Finish();
    for (int r = 0; r < rows; ++r) {
      for (int h = 0; h < heads; ++h) {
        const auto at = static_cast<size_t>(r * stride + h * head_dim);
        double squares = 0;
        for (int i = 0; i < head_dim; ++i) {
          squares += double{before[at + static_cast<size_t>(i)]} * before[at + static_cast<size_t>(i)];
        }
        const double scale = 1.0 / std::sqrt(squares / head_dim + 1e-5);
        for (size_t i = 0; i < static_cast<size_t>(head_dim); ++i) {
          ASSERT_NEAR(x[at + i], before[at + i] * scale * weight[i], 1e-5);
        }
      }
      for (int i = heads * head_dim; i < stride; ++i) {
        ASSERT_EQ(x[static_cast<size_t>(r * stride + i)], before[static_cast<size_t>(r * stride + i)]);
      }
    }
  }
}

TEST_F(OpsTest, Rope_RotatesHalvesByPosition) {
  for (const int head_dim : {2, 14, 32, 64, 130}) {
    const int rows = 5, heads = 3, stride = heads * head_dim + 7, positions_max = 40;
    std::vector<float> qk = RandomValues(static_cast<size_t>(rows * stride), 4, 3.0);
    const std::vector<float> before = qk;
    const std::vector<int32_t> positions = {0, 7, 39, 7, 12};
    std::vector<float> table(static_cast<size_t>(positions_max * head_dim));
    for (int p = 0; p < positions_max; ++p) {
      for (int i = 0; i < head_dim / 2; ++i) {
        const double angle = p * std::pow(10000.0, -2.0 * i / head_dim);
        table[static_cast<size_t>(p * head_dim + i)] = static_cast<float>(std::cos(angle));
        table[static_cast<size_t>(p * head_dim + head_dim / 2 + i)] =
            static_cast<float>(std::sin(angle));
      }
    }
    RopeArgs args;
    args.qk = qk.data();
    args.stride = stride;
    args.heads = heads;
    args.head_dim = head_dim;
    args.rows = rows;
    args.positions = positions.data();
    args.cos_sin = table.data();
    ops().Rope(*stream_, args);
    Finish();
    for (int r = 0; r < rows; ++r) {
      for (int h = 0; h < heads; ++h) {
        for (int i = 0; i < head_dim / 2; ++i) {
          const double angle = positions[static_cast<size_t>(r)] *
                               std::pow(10000.0, -2.0 * i / head_dim);
          const size_t at = static_cast<size_t>(r * stride + h * head_dim + i);
          const size_t other = at + static_cast<size_t>(head_dim / 2);
          const double x = before[at], y = before[other];
          ASSERT_NEAR(qk[at], x * std::cos(angle) - y * std::sin(angle), 2e-6);
          ASSERT_NEAR(qk[other], y * std::cos(angle) + x * std::sin(angle), 2e-6);
        }
      }
      for (int i = heads * head_dim; i < stride; ++i) {
        const size_t at = static_cast<size_t>(r * stride + i);
        ASSERT_EQ(qk[at], before[at]);  // beyond the heads nothing is touched
      }
    }
  }
}

TEST_F(OpsTest, SampleGreedy_TakesTheFirstLargestAndReportsNan) {
  const int vocabulary = 1003;
  std::vector<float> logits = RandomValues(static_cast<size_t>(4 * vocabulary), 5, 1.0);
  logits[17] = logits[900] = 5;                                   // a tie
  logits[static_cast<size_t>(vocabulary + 1002)] = 7;             // in the tail
  logits[static_cast<size_t>(2 * vocabulary + 1001)] = NAN;       // in the tail
  logits[static_cast<size_t>(3 * vocabulary)] = INFINITY;
  EXPECT_EQ(Sample(logits, vocabulary, std::vector<SampleParams>(4)),
            (std::vector<int32_t>{17, 1002, kTokenInvalid, 0}));
}

TEST_F(OpsTest, Sample_IsAFunctionOfSeedAndPosition) {
  const int vocabulary = 501;
  const std::vector<float> row = RandomValues(static_cast<size_t>(vocabulary), 6, 1.0);
  std::vector<float> logits;
  std::vector<SampleParams> params;
  for (int i = 0; i < 30; ++i) {
    logits.insert(logits.end(), row.begin(), row.end());
    params.push_back({.temperature = 1, .seed = 9, .position = static_cast<uint64_t>(i % 10)});
  }
  const std::vector<int32_t> tokens = Sample(logits, vocabulary, params);
  for (size_t i = 10; i < 30; ++i) EXPECT_EQ(tokens[i], tokens[i - 10]);
  EXPECT_GT(std::count_if(tokens.begin(), tokens.begin() + 10,
                          [&](int32_t t) { return t != tokens[0]; }), 5);
  params[0].seed = 10;
  // Alone in another batch: the same.
  EXPECT_EQ(Sample(row, vocabulary, {params[1]})[0], tokens[1]);
}

// Frequencies of many draws against the distribution, by a chi-squared bound.
void ExpectDistribution(const std::map<int32_t, int>& counts, const std::vector<double>& p,
                        int draws) {
  double chi = 0;
  int cells = 0;
  for (size_t i = 0; i < p.size(); ++i) {
    const auto it = counts.find(static_cast<int32_t>(i));
    const double got = it == counts.end() ? 0 : it->second;
    if (p[i] == 0) {
      ASSERT_EQ(got, 0) << "token " << i << " is outside the candidates";
      continue;
    }
    chi += (got - p[i] * draws) * (got - p[i] * draws) / (p[i] * draws);
    ++cells;
  }
  // Mean cells - 1, variance 2 (cells - 1): six deviations.
  EXPECT_LT(chi, cells - 1 + 6 * std::sqrt(2.0 * cells));
}

TEST_F(OpsTest, Sample_FollowsTemperatureTopKAndTopP) {
  const int vocabulary = 40, draws = 20000, batch = 100;
  const std::vector<float> row = RandomValues(static_cast<size_t>(vocabulary), 7, 2.0);
  std::vector<int32_t> order(static_cast<size_t>(vocabulary));
  for (int i = 0; i < vocabulary; ++i) order[static_cast<size_t>(i)] = i;
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return row[static_cast<size_t>(a)] > row[static_cast<size_t>(b)];
  });
  for (const SampleParams base : {SampleParams{.temperature = 1},
                                  SampleParams{.temperature = 0.5f, .top_k = 7},
                                  SampleParams{.temperature = 2, .top_p = 0.6f},
                                  SampleParams{.temperature = 1, .top_k = 10, .top_p = 0.5f}}) {
    std::vector<double> p(static_cast<size_t>(vocabulary));
    const int k = base.top_k == 0 ? vocabulary : base.top_k;
    double total = 0, kept = 0;
    for (int i = 0; i < k; ++i) {
      const size_t id = static_cast<size_t>(order[static_cast<size_t>(i)]);
      total += p[id] = std::exp(row[id] / static_cast<double>(base.temperature));
    }
    for (int i = 0; i < k; ++i) {
      double& weight = p[static_cast<size_t>(order[static_cast<size_t>(i)])];
      if (i > 0 && kept >= base.top_p * total) weight = 0;
      kept += weight;
    }
    for (double& weight : p) weight /= kept;
    std::vector<float> logits;
    for (int i = 0; i < batch; ++i) logits.insert(logits.end(), row.begin(), row.end());
    std::map<int32_t, int> counts;
    for (int i = 0; i < draws; i += batch) {
      std::vector<SampleParams> params(batch, base);
      for (int b = 0; b < batch; ++b) {
        params[static_cast<size_t>(b)].seed = 11;
        params[static_cast<size_t>(b)].position = static_cast<uint64_t>(i + b);
      }
      for (const int32_t token : Sample(logits, vocabulary, params)) ++counts[token];
    }
    ExpectDistribution(counts, p, draws);
  }
}

TEST(SampleParams, OutOfRange_NamesTheField) {
  EXPECT_TRUE(SampleParams{}.Validate().ok());
  for (const auto& [params, field] :
       {std::pair{SampleParams{.temperature = -1}, "temperature"},
        {SampleParams{.temperature = NAN}, "temperature"},
        {SampleParams{.top_k = -1}, "top_k"},
        {SampleParams{.top_k = kTopKMax + 1}, "top_k"},
        {SampleParams{.top_p = 0}, "top_p"},
        {SampleParams{.top_p = NAN}, "top_p"}}) {
    const absl::Status status = params.Validate();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(field), absl::string_view::npos) << status;
  }
}

}  // namespace
}  // namespace kvt
