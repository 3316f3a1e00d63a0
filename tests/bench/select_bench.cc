// What choosing blocks costs a core, by part and instruction set: digests of blocks, products of codes
// and queries, the whole first phase of scores (from cache, and from memory), joining, top blocks. One
// layer with one selecting head of 64 channels in 4 bits, 3 queries, the middle of 8,000 tokens, 120
// blocks to choose. The least of many turns of one thread's processor time.
// select_bench [--json FILE]. Rows as tests/bench/run.sh writes them.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/random.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/select_blocks.h"
#include "kernels/cpu/workspace.h"

namespace kvt {
namespace {

constexpr uint64_t kSeed = 20261130;
constexpr int kBlocks = 490, kChosen = 120, kDim = 64, kQueries = 3;
// Copies of the digests: more than any cache holds, so that each turn reads its own from memory.
constexpr int kCopies = 600;
constexpr int kTurns = 600;

double ThreadMicroseconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) * 1e-3;
}

double Least(const std::function<void(int)>& turn) {
  double least = 1e30;
  for (int i = 0; i < kTurns; ++i) {
    const double start = ThreadMicroseconds();
    turn(i);
    least = std::min(least, ThreadMicroseconds() - start);
  }
  return least;
}

class Bench {
 public:
  Bench() : device_(MakeCpuDevice({.threads = 1}).value()) {
    Random random(kSeed);
    offset_.assign(kDim, 0.1f);
    scale_.assign(kDim, 0.3f);
    heads_ = {{0, offset_.data(), scale_.data()}};
    for (int i = 0; i < kQueries * kDim; ++i) q_.push_back(static_cast<float>(random.Uniform() * 6 - 3));
    const size_t bytes = size_t{kBlocks} * Spec().Bytes(kDim);
    digests_ = device_->Allocate(kCopies * bytes).value();
    for (size_t i = 0; i < bytes; ++i) digests_.as<uint8_t>()[i] = static_cast<uint8_t>(random.Below(256));
    for (size_t c = 1; c < kCopies; ++c) {
      std::memcpy(digests_.as<uint8_t>() + c * bytes, digests_.data(), bytes);
    }
    slots_ = device_->Allocate(2 * size_t{kBlocks} * kGeometry.SlotBytes()).value();
    for (size_t i = 0; i < slots_.bytes(); ++i) {
      slots_.as<uint8_t>()[i] = static_cast<uint8_t>(random.Below(128));
    }
    for (uint32_t b = 0; b < kBlocks; ++b) table_.push_back({2 * b, 2 * b + 1});
    workspace_ = device_->Allocate(std::max(CpuScoreWorkspaceBytes(kQueries, 1, kBlocks),
                                            CpuSelectWorkspaceBytes(1, kBlocks))).value();
    scores_.resize(kBlocks);
    selected_.resize(kBlocks);
    segment_ = {nullptr, 0, kBlocks, 0, scores_.data()};
  }

  void Run() {
    TeamMember all(0, 1);
    MakeDigestArgs make;
    make.geometry = kGeometry;
    make.spec = Spec();
    make.slots = slots_.as<uint8_t>();
    make.blocks = table_.data();
    make.count = kBlocks;
    make.digests = digests_.as<uint8_t>();
    Add("digest_us", Least([&](int) { CpuMakeDigest(make, all); }));
    for (int isa = 0; isa < CpuScoreIsaCount(); ++isa) {
      CpuScoreUseIsa(isa);
      const std::string name = CpuScoreIsaAt(isa).name;
      Add(name + "_products_us", Products(CpuScoreIsaAt(isa)));
      Add(name + "_score_us", Least([&](int) { CpuScoreBlocks(Args(0), Work(), all); }));
      Add(name + "_score_memory_us",
          Least([&](int turn) { CpuScoreBlocks(Args(turn % kCopies), Work(), all); }));
      Add(name + "_combine_us", Least([&](int) { CpuScoreBlocksCombine(Args(0), Work(), all); }));
    }
    const SelectSegment select{scores_.data(), kBlocks, kChosen, selected_.data()};
    Add("top_blocks_us", Least([&](int) { CpuSelectTopBlocks({{&select, 1}, kBlocks}, Work(), all); }));
  }
  [[nodiscard]] const nlohmann::json& rows() const { return rows_; }

 private:
  static constexpr Geometry kGeometry{1, 1, kDim};
  [[nodiscard]] DigestSpec Spec() const { return {4, heads_}; }
  [[nodiscard]] Workspace Work() const { return {workspace_.as<uint8_t>(), workspace_.bytes()}; }
  [[nodiscard]] ScoreBlocksArgs Args(int copy) const {
    ScoreBlocksArgs args;
    args.geometry = kGeometry;
    args.spec = Spec();
    args.query_heads = kQueries;
    args.scale = 0.125f;
    args.q = q_.data();
    args.q_stride = kQueries * kDim;
    args.digests = digests_.as<uint8_t>() +
                   static_cast<size_t>(copy) * size_t{kBlocks} * Spec().Bytes(kDim);
    args.segments = {&segment_, 1};
    return args;
  }
  double Products(const ScoreIsa& isa) const {
    alignas(64) int8_t q[kQueries * kDim];
    for (int i = 0; i < kQueries; ++i) {
      (void)DigestQuantiseQuery(q_.data() + i * kDim, scale_.data(), kDim, q + i * kDim);
    }
    ScoreTask task;
    task.q = q;
    task.queries = kQueries;
    task.head_dim = kDim;
    task.bits = 4;
    task.digests = digests_.as<uint8_t>();
    task.stride = Spec().Bytes(kDim);
    task.blocks = kBlocks;
    alignas(64) int32_t logits[kScoreQueriesMax * kScoreBurstBlocks * kBlockTokens];
    return Least([&](int) {
      for (int burst = 0; burst < ScoreBursts(kBlocks); ++burst) isa.logits(task, 0, kQueries, burst, logits);
    });
  }
  void Add(const std::string& name, double us) {
    std::printf("%-28s %8.2f us\n", name.c_str(), us);
    rows_.push_back({{"name", name}, {"value", us}, {"unit", "us"}});
  }

  std::unique_ptr<Device> device_;
  std::vector<float> offset_, scale_, q_, scores_;
  std::vector<DigestHead> heads_;
  std::vector<SlotPair> table_;
  std::vector<int32_t> selected_;
  DeviceBuffer digests_, slots_, workspace_;
  ScoreSegment segment_{};
  nlohmann::json rows_ = nlohmann::json::array();
};

int Main(int argc, char** argv) {
  Bench bench;
  bench.Run();
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--json") != 0) continue;
    std::ofstream out(argv[i + 1]);
    out << nlohmann::json({{"rows", bench.rows()}}).dump(1) << "\n";
    if (!out) {
      std::fprintf(stderr, "select_bench: cannot write %s\n", argv[i + 1]);
      return 1;
    }
  }
  return 0;
}

}  // namespace
}  // namespace kvt

int main(int argc, char** argv) { return kvt::Main(argc, argv); }
