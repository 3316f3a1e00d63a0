// Paged attention beside the machine's rooflines, measured in turns in the same run.
//   decode   bytes of planes read per second, against a plain read of the same pool
//   prefill  floating-point operations per second, against a register-only loop of products
// attention_bench [--threads N] [--isa INDEX] [--only prefill|decode] [--json FILE]; INDEX is of the
// implementations of bf16 mode, best first. Rows as tests/bench/run.sh writes them.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/bench/attention_peak.h"
#include "tests/kernels/attention_fixture.h"

namespace kvt {
namespace {

constexpr int kRepeats = 9;

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double ThreadSeconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// Processor seconds of the member that takes longest for fn(thread): what other processes do on this
// machine enters less than it would in elapsed time. No member waits for another.
double TimeTeam(int threads, const std::function<void(int)>& fn) {
  std::vector<double> seconds(static_cast<size_t>(threads));
  const auto member = [&](int t) {
    const double start = ThreadSeconds();
    fn(t);
    seconds[static_cast<size_t>(t)] = ThreadSeconds() - start;
  };
  std::vector<std::thread> team;
  for (int t = 1; t < threads; ++t) team.emplace_back(member, t);
  member(0);
  for (std::thread& thread : team) thread.join();
  return *std::max_element(seconds.begin(), seconds.end());
}

struct Row {
  std::string name;
  double value;
  std::string unit;
};

class Bench {
 public:
  explicit Bench(int threads) : threads_(threads) {}

  // The first phase of all steps on one member. (The second moves 1/100 of the bytes; its barrier
  // would measure the neighbours on this machine.)
  void Attend(const std::vector<PagedAttentionArgs>& steps, Workspace workspace, int thread) {
    for (const PagedAttentionArgs& args : steps) {
      CpuPagedAttention(args, workspace, thread, threads_);
    }
  }

  void Decode(ComputeType compute, int group, bool base) {
    const Geometry geometry = {.layers = 1, .kv_heads = 3, .head_dim = 64};
    constexpr int kContext = 4096;
    constexpr int kSequences = 80;
    constexpr int kBlocks = kContext / kBlockTokens;
    const int planes = base ? 1 : 2;
    SlotPool pool(geometry, static_cast<uint32_t>(kSequences * kBlocks * planes), 3);
    std::mt19937_64 random(5);
    std::vector<std::vector<SlotPair>> tables(kSequences);
    const size_t pool_bytes =
        static_cast<size_t>(kSequences * kBlocks * planes) * geometry.SlotBytes();
    for (size_t i = 0; i < pool_bytes; ++i) pool.data()[i] = static_cast<uint8_t>(0x30 + i % 17);
    for (auto& table : tables) {
      for (int b = 0; b < kBlocks; ++b) {
        SlotPair pair = {.base = pool.Take()};
        if (!base) pair.residual = pool.Take();
        table.push_back(pair);
      }
    }
    const int heads = 3 * group;
    const int width = heads * 64;
    std::vector<float> q(static_cast<size_t>(width), 0.3f);
    std::vector<float> out(static_cast<size_t>(width));
    std::vector<AttentionSegment> segments;
    for (const auto& table : tables) {
      segments.push_back({.blocks = table.data(), .first_position = kContext - 1, .first_row = 0,
                          .rows = 1});
    }
    std::vector<PagedAttentionArgs> steps;
    for (size_t i = 0; i < segments.size(); ++i) {
      steps.push_back(Args(geometry, heads, compute, pool, q, out, {&segments[i], 1}));
    }
    const AttentionLimits limits = {geometry, heads, threads_, 1, kContext};
    const Memory memory(limits);
    std::vector<double> ours, plain;
    for (int i = 0; i < kRepeats; ++i) {
      ours.push_back(TimeTeam(threads_, [&](int t) { Attend(steps, memory.workspace, t); }));
      plain.push_back(TimeTeam(threads_, [&](int t) {
        const size_t share = pool_bytes / static_cast<size_t>(threads_) / 128 * 128;
        sink_ += ReadAll(pool.data() + static_cast<size_t>(t) * share, share);
      }));
    }
    const std::string name = absl::StrCat("decode_", Name(compute), base ? "_base" : "_target",
                                          "_g", group);
    const double gb = static_cast<double>(pool_bytes) * 1e-9;
    const double tokens = kSequences * kContext * 3.0;
    std::printf("%-28s %7.2f GB/s  plain read %7.2f GB/s  ratio %.2f  %6.1f ns a token and head\n",
                name.c_str(), gb / Median(ours), gb / Median(plain), Median(plain) / Median(ours),
                Median(ours) / tokens * 1e9);
    rows_.push_back({absl::StrCat(name, "_vs_read"), Median(plain) / Median(ours), "ratio"});
    rows_.push_back({absl::StrCat(name, "_ns_per_token_head"), Median(ours) / tokens * 1e9, "ns"});
  }

  void Prefill(ComputeType compute, int tokens, int chunk, int group, int head_dim) {
    const Geometry geometry = {.layers = 1, .kv_heads = 3, .head_dim = head_dim};
    SlotPool pool(geometry, static_cast<uint32_t>(2 * (tokens / kBlockTokens + 1)), 3);
    const SequenceValues values(geometry, tokens, 9);
    const auto table = StoreSequence(pool, values, tokens, [](int) { return false; });
    const int heads = 3 * group;
    const int width = heads * head_dim;
    std::mt19937_64 random(5);
    std::normal_distribution<float> normal;
    std::vector<float> q(static_cast<size_t>(tokens * width));
    for (float& x : q) x = normal(random);
    std::vector<float> out(q.size());
    std::vector<AttentionSegment> segments;
    double flop = 0;
    for (int first = 0; first < tokens; first += chunk) {
      const int rows = std::min(chunk, tokens - first);
      segments.push_back({.blocks = table.data(), .first_position = first, .first_row = first,
                          .rows = rows});
      flop += 4.0 * heads * head_dim * rows * (first + (rows + 1) / 2.0);
    }
    std::vector<PagedAttentionArgs> steps;
    for (const AttentionSegment& segment : segments) {
      steps.push_back(Args(geometry, heads, compute, pool, q, out, {&segment, 1}));
    }
    const Memory memory({geometry, heads, threads_, 1, tokens});
    std::vector<double> ours, peak;
    for (int i = 0; i < kRepeats; ++i) {
      ours.push_back(TimeTeam(threads_, [&](int t) { Attend(steps, memory.workspace, t); }));
      // What this machine does at best for the compute type: bf16 mode may use f32 products.
      const auto loop = [&](double (*peak_loop)(long)) {
        std::atomic<double> done{0};
        const double seconds = TimeTeam(threads_, [&](int) { done += peak_loop(500'000); });
        return done / seconds;
      };
      const double f32 = loop(PeakFmaF32);
      peak.push_back(compute == ComputeType::kBf16 ? std::max(f32, loop(PeakDotBf16)) : f32);
    }
    const std::string name = absl::StrCat("prefill_", Name(compute), "_", tokens, "_chunk", chunk,
                                          "_d", head_dim, "_g", group);
    std::printf("%-34s %7.1f GFLOP/s  peak loop %7.1f  ratio %.2f  %.2f ms a layer\n", name.c_str(),
                flop / Median(ours) * 1e-9, Median(peak) * 1e-9,
                flop / Median(ours) / Median(peak), Median(ours) * 1e3);
    rows_.push_back({absl::StrCat(name, "_vs_peak"), flop / Median(ours) / Median(peak), "ratio"});
    rows_.push_back({absl::StrCat(name, "_ms"), Median(ours) * 1e3, "ms"});
  }

  [[nodiscard]] const std::vector<Row>& rows() const { return rows_; }

 private:
  struct Memory {
    explicit Memory(const AttentionLimits& limits)
        : bytes(AllocateAligned(CpuPagedAttentionWorkspaceBytes(limits))),
          workspace{bytes.get(), CpuPagedAttentionWorkspaceBytes(limits)} {}
    AlignedBytes bytes;
    Workspace workspace;
  };

  static std::string Name(ComputeType compute) {
    return compute == ComputeType::kBf16 ? "bf16" : "f32";
  }
  static PagedAttentionArgs Args(const Geometry& geometry, int heads, ComputeType compute,
                                 SlotPool& pool, const std::vector<float>& q,
                                 std::vector<float>& out,
                                 absl::Span<const AttentionSegment> segments) {
    const int width = heads * geometry.head_dim;
    return {.geometry = geometry, .query_heads = heads, .compute = compute,
            .scale = 1.0f / std::sqrt(static_cast<float>(geometry.head_dim)),
            .slots = pool.data(), .q = q.data(), .q_stride = width, .out = out.data(),
            .out_stride = width, .segments = segments};
  }
  const int threads_;
  std::atomic<uint64_t> sink_{0};
  std::vector<Row> rows_;
};

bool WriteJson(const char* path, const std::vector<Row>& rows) {
  std::FILE* file = std::fopen(path, "w");
  if (file == nullptr) return false;
  std::fprintf(file, "{\"rows\":[");
  for (size_t i = 0; i < rows.size(); ++i) {
    std::fprintf(file, "%s{\"name\":\"%s\",\"value\":%.6g,\"unit\":\"%s\"}", i == 0 ? "" : ",",
                 rows[i].name.c_str(), rows[i].value, rows[i].unit.c_str());
  }
  std::fprintf(file, "]}\n");
  return std::fclose(file) == 0;
}

int Main(int argc, char** argv) {
  int threads = 2;
  const char* json = nullptr;
  std::string only;
  int isa = 0;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--threads") == 0) threads = std::max(1, std::atoi(argv[i + 1]));
    if (std::strcmp(argv[i], "--json") == 0) json = argv[i + 1];
    if (std::strcmp(argv[i], "--isa") == 0) isa = std::atoi(argv[i + 1]);
    if (std::strcmp(argv[i], "--only") == 0) only = argv[i + 1];
  }
  if (!HasPeakLoops()) {
    std::printf("attention_bench: this processor has no AVX512_BF16; no roofline to compare with\n");
    return 1;
  }
  CpuAttentionUseIsa(ComputeType::kBf16, isa);
  std::printf("isa: bf16 %s, f32 %s; %d threads\n",
              std::string(CpuAttentionIsa(ComputeType::kBf16)).c_str(),
              std::string(CpuAttentionIsa(ComputeType::kF32)).c_str(), threads);
  Bench bench(threads);
  for (const ComputeType compute : {ComputeType::kBf16, ComputeType::kF32}) {
    if (only.empty() || only == "prefill") {
      bench.Prefill(compute, 2048, 512, 3, 64);
      bench.Prefill(compute, 2048, 64, 3, 64);
      bench.Prefill(compute, 2048, 512, 4, 128);
    }
    if (only.empty() || only == "decode") {
      bench.Decode(compute, 3, false);
      bench.Decode(compute, 3, true);
      bench.Decode(compute, 8, false);
    }
  }
  if (json != nullptr && !WriteJson(json, bench.rows())) {
    std::fprintf(stderr, "attention_bench: cannot write %s\n", json);
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace kvt

int main(int argc, char** argv) { return kvt::Main(argc, argv); }
