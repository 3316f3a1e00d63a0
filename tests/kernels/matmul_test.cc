// Matrix products of the CPU against a scalar reference in double, over odd sizes, every
// implementation, instruction set, epilogue and number of threads; and that rows are bitwise equal
// for every M.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels/base/check.h"
#include "kernels/base/random.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/cpu_matrix.h"
#include "kernels/cpu/fma_matrix.h"
#include "kernels/cpu/onednn_matrix.h"
#include "kernels/cpu/thread_team.h"

namespace kvt {
namespace {

enum class Path { kFmaAvx2, kFmaAvx512, kOneDnn };

struct Case {
  Path path;
  ComputeType compute;
  int threads;
};

float FromBf16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

class Matmul : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (GetParam().path == Path::kFmaAvx512 && BestFmaIsa() != FmaIsa::kAvx512) {
      GTEST_SKIP() << "no AVX-512";
    }
    CpuDeviceOptions options;
    options.threads = 1;
    device_ = MakeCpuDevice(options).value();
    arena_ = std::make_unique<WeightArena>(*device_);
    onednn_ = NewOneDnnContext(GetParam().threads);
    team_ = std::make_unique<ThreadTeam>(GetParam().threads, false, absl::Microseconds(5), nullptr);
  }

  // Null where oneDNN does not take part.
  std::unique_ptr<CpuMatrix> Pack(MatmulEpilogue epilogue, int in,
                                  absl::Span<const WeightPart> parts) {
    const Case& c = GetParam();
    if (c.path == Path::kOneDnn) {
      return PackOneDnnMatrix(*onednn_, *arena_, c.compute, epilogue, in, parts).value();
    }
    const FmaIsa isa = c.path == Path::kFmaAvx2 ? FmaIsa::kAvx2 : FmaIsa::kAvx512;
    return PackFmaMatrix(*arena_, isa, c.threads, c.compute, epilogue, in, parts).value();
  }

  // `a` as act.
  std::vector<uint8_t> Act(const std::vector<float>& values) const {
    std::vector<uint8_t> bytes;
    for (const float value : values) {
      const uint16_t half = RoundToBf16(value);
      const uint8_t* from = GetParam().compute == ComputeType::kBf16
                                ? reinterpret_cast<const uint8_t*>(&half)
                                : reinterpret_cast<const uint8_t*>(&value);
      bytes.insert(bytes.end(), from, from + (GetParam().compute == ComputeType::kBf16 ? 2 : 4));
    }
    return bytes;
  }

  void Run(const CpuMatrix& matrix, MatmulEpilogue epilogue, const void* a, int rows, void* out) {
    std::vector<uint8_t> workspace(matrix.WorkspaceBytes(rows) + 64);
    void* aligned = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(workspace.data()) + 63) &
                                            ~uintptr_t{63});
    struct Context {
      const CpuMatrix* matrix;
      MatmulArgs args;
    } context{&matrix, {"test", &matrix, epilogue, a, rows, out, aligned}};
    team_->Run(
        [](const void* p, TeamMember& member) {
          const Context& c = *static_cast<const Context*>(p);
          c.matrix->Multiply(c.args, member);
        },
        &context);
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<WeightArena> arena_;
  OneDnnContextPtr onednn_;
  std::unique_ptr<ThreadTeam> team_;
};

std::vector<float> RandomValues(size_t count, uint64_t seed, float scale) {
  Random random(seed);
  std::vector<float> values(count);
  // bf16-exact, so that one reference serves both types.
  for (float& v : values) {
    v = FromBf16(RoundToBf16(static_cast<float>(random.Uniform() * 2 - 1) * scale));
  }
  return values;
}

TEST_P(Matmul, OddSizes_EqualTheScalarReference) {
  uint64_t seed = 5;
  for (const auto& [in, out] : {std::pair{64, 64}, {63, 33}, {576, 97}, {130, 1}, {1030, 160}}) {
    for (const int rows : {1, 2, 5, 7, 14, 15, 29, 57, 131}) {
      const std::vector<float> w = RandomValues(static_cast<size_t>(in * out), ++seed, 0.2f);
      const std::vector<float> a = RandomValues(static_cast<size_t>(in * rows), ++seed, 2.0f);
      // Two parts of unequal size where there is more than one column.
      const int first = (out + 1) / 2;
      std::vector<WeightPart> parts = {{nullptr, w.data(), first}};
      if (out > first) parts.push_back({nullptr, w.data() + first * in, out - first});
      for (const MatmulEpilogue epilogue : {MatmulEpilogue::kStore, MatmulEpilogue::kAdd}) {
        const auto matrix = Pack(epilogue, in, parts);
        if (matrix == nullptr) GTEST_SKIP() << "oneDNN does not keep rows equal here";
        std::vector<float> got(static_cast<size_t>(rows * out), 1.5f);
        const std::vector<uint8_t> act = Act(a);
        Run(*matrix, epilogue, act.data(), rows, got.data());
        for (int r = 0; r < rows; ++r) {
          for (int o = 0; o < out; ++o) {
            double want = epilogue == MatmulEpilogue::kAdd ? 1.5 : 0;
            for (int i = 0; i < in; ++i) {
              want += static_cast<double>(a[static_cast<size_t>(r * in + i)]) *
                      w[static_cast<size_t>(o * in + i)];
            }
            ASSERT_NEAR(got[static_cast<size_t>(r * out + o)], want, 2e-5 * (1 + std::abs(want)))
                << in << "x" << out << " rows " << rows << " at " << r << "," << o;
          }
        }
      }
    }
  }
}

TEST_P(Matmul, SwiGlu_EqualsTheScalarReference) {
  uint64_t seed = 500;
  for (const auto& [in, inner] : {std::pair{64, 64}, {63, 33}, {576, 97}}) {
    for (const int rows : {1, 4, 9, 33}) {
      const std::vector<float> gate = RandomValues(static_cast<size_t>(in * inner), ++seed, 0.3f);
      const std::vector<float> up = RandomValues(static_cast<size_t>(in * inner), ++seed, 0.3f);
      const std::vector<float> a = RandomValues(static_cast<size_t>(in * rows), ++seed, 2.0f);
      const auto matrix = Pack(MatmulEpilogue::kSwiGlu, in,
                               {{nullptr, gate.data(), inner}, {nullptr, up.data(), inner}});
      if (matrix == nullptr) GTEST_SKIP() << "oneDNN does not keep rows equal here";
      const std::vector<uint8_t> act = Act(a);
      const bool bf16 = GetParam().compute == ComputeType::kBf16;
      std::vector<uint8_t> got(static_cast<size_t>(rows * inner) * (bf16 ? 2 : 4));
      Run(*matrix, MatmulEpilogue::kSwiGlu, act.data(), rows, got.data());
      for (int r = 0; r < rows; ++r) {
        for (int o = 0; o < inner; ++o) {
          double g = 0, u = 0;
          for (int i = 0; i < in; ++i) {
            const double x = a[static_cast<size_t>(r * in + i)];
            g += x * gate[static_cast<size_t>(o * in + i)];
            u += x * up[static_cast<size_t>(o * in + i)];
          }
          const double want = g / (1 + std::exp(-g)) * u;
          const size_t at = static_cast<size_t>(r * inner + o);
          const float value = bf16 ? FromBf16(reinterpret_cast<const uint16_t*>(got.data())[at])
                                   : reinterpret_cast<const float*>(got.data())[at];
          ASSERT_NEAR(value, want, (bf16 ? 5e-3 : 5e-5) * (1 + std::abs(want)))
              << in << "x" << inner << " rows " << rows << " at " << r << "," << o;
        }
      }
    }
  }
}

TEST_P(Matmul, EveryRowCount_GivesTheSameRowsBitwise) {
  const int in = 575, out = 161, most = 300;
  const std::vector<float> w = RandomValues(static_cast<size_t>(in * out), 1, 0.2f);
  const std::vector<uint8_t> a =
      Act(RandomValues(static_cast<size_t>(in * most), 2, 2.0f));
  const size_t row_bytes = a.size() / static_cast<size_t>(most);
  const auto matrix = Pack(MatmulEpilogue::kStore, in, {{nullptr, w.data(), out}});
  if (matrix == nullptr) GTEST_SKIP() << "oneDNN does not keep rows equal here";
  std::vector<float> want(static_cast<size_t>(most * out));
  Run(*matrix, MatmulEpilogue::kStore, a.data(), most, want.data());
  for (const int rows : {1, 2, 3, 4, 6, 8, 13, 14, 15, 17, 28, 29, 42, 43, 64, 100, 128, 129, 257}) {
    // Rows from the middle, so that they also stand at another place.
    const int first = (most - rows) / 2;
    std::vector<float> got(static_cast<size_t>(rows * out));
    Run(*matrix, MatmulEpilogue::kStore, a.data() + static_cast<size_t>(first) * row_bytes, rows,
        got.data());
    ASSERT_EQ(std::memcmp(got.data(), want.data() + first * out, got.size() * sizeof(float)), 0)
        << rows << " rows";
  }
}

TEST_P(Matmul, Nan_StaysInItsRow) {
  const int in = 64, out = 40, rows = 20;
  const std::vector<float> w = RandomValues(static_cast<size_t>(in * out), 1, 0.2f);
  std::vector<float> a = RandomValues(static_cast<size_t>(in * rows), 2, 1.0f);
  a[static_cast<size_t>(7 * in + 3)] = NAN;
  const auto matrix = Pack(MatmulEpilogue::kStore, in, {{nullptr, w.data(), out}});
  if (matrix == nullptr) GTEST_SKIP() << "oneDNN does not keep rows equal here";
  std::vector<float> got(static_cast<size_t>(rows * out));
  Run(*matrix, MatmulEpilogue::kStore, Act(a).data(), rows, got.data());
  for (int r = 0; r < rows; ++r) {
    for (int o = 0; o < out; ++o) {
      ASSERT_EQ(std::isnan(got[static_cast<size_t>(r * out + o)]), r == 7) << r << "," << o;
    }
  }
}

// The multiply-adds are one chain a result on either instruction set.
TEST(FmaMatrix, InstructionSets_GiveTheSameBits) {
  if (BestFmaIsa() != FmaIsa::kAvx512) GTEST_SKIP() << "no AVX-512";
  CpuDeviceOptions options;
  options.threads = 1;
  const auto device = MakeCpuDevice(options).value();
  WeightArena arena(*device);
  TeamMember member(0, 1);
  const int in = 577, inner = 97, rows = 31;
  const std::vector<float> w = RandomValues(static_cast<size_t>(2 * in * inner), 3, 0.2f);
  const std::vector<float> a = RandomValues(static_cast<size_t>(in * rows), 4, 2.0f);
  for (const MatmulEpilogue epilogue : {MatmulEpilogue::kStore, MatmulEpilogue::kSwiGlu}) {
    std::vector<float> results[2];
    for (const FmaIsa isa : {FmaIsa::kAvx2, FmaIsa::kAvx512}) {
      const auto matrix =
          PackFmaMatrix(arena, isa, 1, ComputeType::kF32, epilogue, in,
                        {{nullptr, w.data(), inner}, {nullptr, w.data() + in * inner, inner}})
              .value();
      const size_t columns = epilogue == MatmulEpilogue::kSwiGlu ? inner : 2 * inner;
      std::vector<float>& result = results[isa == FmaIsa::kAvx2 ? 0 : 1];
      result.resize(columns * rows);
      std::vector<uint8_t> workspace(matrix->WorkspaceBytes(rows) + 64);
      void* aligned = reinterpret_cast<void*>(
          (reinterpret_cast<uintptr_t>(workspace.data()) + 63) & ~uintptr_t{63});
      matrix->Multiply({"test", matrix.get(), epilogue, a.data(), rows, result.data(), aligned},
                       member);
    }
    EXPECT_EQ(std::memcmp(results[0].data(), results[1].data(), results[0].size() * 4), 0);
  }
}

std::string CaseName(const ::testing::TestParamInfo<Case>& info) {
  constexpr const char* kPaths[] = {"FmaAvx2", "FmaAvx512", "OneDnn"};
  return std::string(kPaths[static_cast<int>(info.param.path)]) +
         (info.param.compute == ComputeType::kF32 ? "F32" : "Bf16") + "Threads" +
         std::to_string(info.param.threads);
}

INSTANTIATE_TEST_SUITE_P(Paths, Matmul,
                         ::testing::Values(Case{Path::kFmaAvx2, ComputeType::kF32, 2},
                                           Case{Path::kFmaAvx2, ComputeType::kBf16, 1},
                                           Case{Path::kFmaAvx512, ComputeType::kF32, 3},
                                           Case{Path::kFmaAvx512, ComputeType::kBf16, 2},
                                           Case{Path::kOneDnn, ComputeType::kF32, 2},
                                           Case{Path::kOneDnn, ComputeType::kF32, 3},
                                           Case{Path::kOneDnn, ComputeType::kBf16, 2}),
                         &CaseName);

}  // namespace
}  // namespace kvt
