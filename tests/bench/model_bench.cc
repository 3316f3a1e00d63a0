// model_bench: prefill and decode of a model beside llama.cpp on the same weights in bf16, in
// alternating rounds, and each operation's share of a step and distance from the roofline.
//
//   model_bench MODEL --json FILE [--llamacpp PYTHON WORKER GGUF] [--rounds 5] [--threads 0]
//
// Ratios are ours over theirs, the median over rounds; more is better.
#include <sched.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/base/units.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/model/model_config.h"
#include "kernels/model/transformer.h"
#include "tests/bench/llamacpp_process.h"
#include "tests/bench/roofline.h"

namespace kvt {
namespace {

constexpr int kPrefillTokens = 2048;
constexpr int kDecodeContext = 128;
constexpr int kDecodeSteps = 48;
constexpr int kBatchMax = 8;
constexpr absl::Duration kDeadline = absl::Seconds(300);

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Our side: sequences in a KvCache of its own, steps enqueued and waited for.
class OwnModel {
 public:
  OwnModel(const std::string& folder, int threads, CpuProfile profile, int chunk,
           TransformerOptions::Compute compute)
      : chunk_(chunk) {
    CpuDeviceOptions options;
    options.threads = threads;
    options.pin = true;
    options.profile = profile;
    auto device = MakeCpuDevice(options);
    KVT_CHECK(device.ok(), device.status().ToString());
    device_ = std::move(device).value();
    auto model = Transformer::Load(folder, *device_, {.compute = compute});
    KVT_CHECK(model.ok(), model.status().ToString());
    model_ = std::move(model).value();
    stream_ = device_->NewStream(StreamPriority::kNormal);
    event_ = device_->NewEvent();
    state_ = model_->NewStepState({.rows = chunk, .logits_rows = kBatchMax, .segments = kBatchMax})
                 .value();
    mailbox_ = device_->NewMailbox(1, StepResultBytes(kBatchMax)).value();
    const int blocks = kPrefillTokens / kBlockTokens;
    const int layers = model_->geometry().layers;
    const uint32_t slots = 2u * static_cast<uint32_t>(kBatchMax * layers * blocks);
    cache_ = KvCache::Create(*device_, model_->geometry(),
                             {.slot_count = slots, .table_rows = kBatchMax,
                              .blocks_per_row = blocks}).value();
    uint32_t next = 0;
    for (int row = 0; row < kBatchMax; ++row) {
      std::vector<SlotPair> pairs(static_cast<size_t>(layers * blocks));
      for (SlotPair& pair : pairs) pair = {next++, next++};
      cache_->SetTableAllLayers(*stream_, row, 0, blocks, pairs);
    }
  }

  double Prefill(int tokens) {
    const absl::Time start = RealClock::Get().Now();
    PrefillRow(0, tokens);
    return absl::ToDoubleSeconds(RealClock::Get().Now() - start);
  }

  // Median seconds of a step.
  double Decode(int batch, int context, int steps) {
    for (int s = 0; s < batch; ++s) PrefillRow(s, context);
    (void)TakeCpuProfile(*device_);
    std::vector<int32_t> tokens(static_cast<size_t>(batch), 100);
    std::vector<double> seconds;
    for (int step = 0; step < steps; ++step) {
      const absl::Time start = RealClock::Get().Now();
      std::vector<StepSegment> segments;
      for (int s = 0; s < batch; ++s) {
        segments.push_back({s, context + step, {&tokens[static_cast<size_t>(s)], 1}, 1});
      }
      Step(segments);
      const StepResult* result = static_cast<const StepResult*>(mailbox_->HostPayload(0));
      std::copy(result->tokens, result->tokens + batch, tokens.begin());
      seconds.push_back(absl::ToDoubleSeconds(RealClock::Get().Now() - start));
    }
    return Median(seconds);
  }

  const Transformer& model() const { return *model_; }
  Device& device() { return *device_; }

 private:
  void PrefillRow(int row, int tokens) {
    std::vector<int32_t> ids(static_cast<size_t>(tokens));
    for (size_t i = 0; i < ids.size(); ++i) {
      ids[i] = static_cast<int32_t>((100 + (i + static_cast<size_t>(row)) * 7 % 20000) %
                                    static_cast<size_t>(model_->config().vocab));
    }
    for (int at = 0; at < tokens; at += chunk_) {
      const int n = std::min(chunk_, tokens - at);
      Step({{row, at, absl::MakeConstSpan(ids).subspan(static_cast<size_t>(at),
                                                       static_cast<size_t>(n)),
             at + n == tokens ? 1 : 0}});
    }
  }

  void Step(const std::vector<StepSegment>& segments) {
    model_->Begin(*stream_, *state_, *cache_, segments);
    for (int layer = 0; layer < model_->geometry().layers; ++layer) {
      model_->ProjectQkv(*stream_, *state_, layer);
      model_->Attend(*stream_, *state_, layer);
      model_->FinishLayer(*stream_, *state_, layer);
    }
    model_->Logits(*stream_, *state_);
    int logits_rows = 0;
    for (const StepSegment& segment : segments) logits_rows += segment.logits_rows;
    model_->Sample(*stream_, *state_, std::vector<SampleParams>(static_cast<size_t>(logits_rows)),
                   *mailbox_, 0, ++tag_);
    KVT_CHECK(mailbox_->WaitTag(0, tag_, kDeadline), "a step took too long");
  }

  const int chunk_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Transformer> model_;
  std::unique_ptr<KvCache> cache_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Event> event_;
  std::unique_ptr<StepState> state_;
  std::unique_ptr<Mailbox> mailbox_;
  uint64_t tag_ = 0;
};

// Work of one kind of operation over a whole measurement: floating-point operations and bytes that
// have to come from memory.
struct Work {
  double flops = 0;
  double bytes = 0;
};

// `rows` rows in `steps` steps; `positions`: sum over rows of the keys each attends to.
std::map<std::string, Work> StepWork(const ModelConfig& c, double rows, double steps,
                                     double positions, double logits_rows, double kv_bytes_read,
                                     double weight_bytes) {
  const double l = c.layers, hidden = c.hidden, q = c.heads * c.head_dim;
  const double kv = c.kv_heads * c.head_dim, inner = c.intermediate;
  std::map<std::string, Work> work;
  const auto matmul = [&](const char* name, double in, double out) {
    work[name] = {2 * rows * in * out * l, steps * in * out * l * weight_bytes};
  };
  matmul("qkv", hidden, q + 2 * kv);
  matmul("output", q, hidden);
  matmul("gate_up", hidden, 2 * inner);
  matmul("down", inner, hidden);
  work["head"] = {2 * logits_rows * hidden * c.vocab,
                  (logits_rows > 0 ? steps : 0) * hidden * c.vocab * weight_bytes};
  work["attention"] = {4 * positions * q * l, kv_bytes_read};
  return work;
}

struct Roofline {
  double f32_gflops, bf16_gflops, gbps;
};

// Each operation's time, share, rates, and the share of what the binding limit allows.
void PrintShares(const std::string& title, OwnModel& own, const std::map<std::string, Work>& work,
                 const Roofline& roof) {
  const std::vector<CpuOpTime> times = TakeCpuProfile(own.device());
  double total = 0;
  for (const CpuOpTime& t : times) total += absl::ToDoubleSeconds(t.time);
  std::printf("\n%s: operations %.1f ms\n", title.c_str(), total * 1e3);
  std::printf("  %-10s %8s %9s %7s %9s %8s  %s\n", "operation", "calls", "us/call", "share",
              "GFLOP/s", "GB/s", "of the roofline");
  const double peak = std::max(roof.f32_gflops, roof.bf16_gflops);
  for (const CpuOpTime& t : times) {
    const double s = absl::ToDoubleSeconds(t.time);
    if (s < total * 0.002) continue;
    std::printf("  %-10s %8llu %9.1f %6.1f%%", t.name.c_str(),
                static_cast<unsigned long long>(t.calls), s * 1e6 / static_cast<double>(t.calls),
                100 * s / total);
    if (const auto it = work.find(t.name); it != work.end() && it->second.flops > 0) {
      const double needed = std::max(it->second.flops / (peak * 1e9),
                                     it->second.bytes / (roof.gbps * 1e9));
      std::printf(" %9.0f %8.1f  %3.0f%%", it->second.flops / s / 1e9, it->second.bytes / s / 1e9,
                  100 * needed / s);
    }
    std::printf("\n");
  }
}

struct Flags {
  std::string model;
  std::string json;
  std::vector<std::string> llamacpp;  // python, worker, gguf
  int rounds = 5;
  int threads = 0;
  int chunk = 512;
  std::string compute = "bf16";
  std::string profile = "wall";
  bool only_profile = false;
};

TransformerOptions::Compute ParseCompute(const std::string& name) {
  return name == "f32" ? TransformerOptions::Compute::kF32 : TransformerOptions::Compute::kBf16;
}

void ProfileSteps(const Flags& flags, int threads, const Roofline& roof) {
  OwnModel own(flags.model, threads,
               flags.profile == "thread" ? CpuProfile::kThreadTime : CpuProfile::kWall, flags.chunk,
               ParseCompute(flags.compute));
  const ModelConfig& c = own.model().config();
  const double weight_bytes = own.model().compute() == ComputeType::kBf16 ? 2 : 4;
  const double kv_row = 2.0 * c.layers * c.kv_heads * c.head_dim * 2;
  std::printf("numerics id: %s\n", own.model().numerics_id().c_str());
  own.Prefill(kPrefillTokens);
  (void)TakeCpuProfile(own.device());
  own.Prefill(kPrefillTokens);
  const double n = kPrefillTokens;
  PrintShares(absl::StrCat("prefill of ", kPrefillTokens), own,
              StepWork(c, n, n / flags.chunk, n * (n + 1) / 2, 1, n * kv_row, weight_bytes), roof);
  for (const int batch : {1, kBatchMax}) {
    own.Decode(batch, kDecodeContext, kDecodeSteps);
    const double keys = kDecodeContext + kDecodeSteps / 2.0;
    const double rows = static_cast<double>(batch) * kDecodeSteps;
    PrintShares(absl::StrCat("decode at batch ", batch, ", ", kDecodeSteps, " steps"), own,
                StepWork(c, rows, kDecodeSteps, rows * keys, rows, rows * keys * kv_row,
                         weight_bytes), roof);
  }
}

int Run(const Flags& flags) {
  cpu_set_t allowed;
  sched_getaffinity(0, sizeof(allowed), &allowed);
  const int threads = flags.threads > 0 ? flags.threads : CPU_COUNT(&allowed);
  const Roofline roof{PeakF32Gflops(threads), PeakBf16Gflops(threads), PeakReadGbps(threads)};
  std::printf("%d threads; peaks in this run: f32 %.0f GFLOP/s, bf16 dot products %.0f GFLOP/s, "
              "memory %.1f GB/s\n", threads, roof.f32_gflops, roof.bf16_gflops, roof.gbps);
  ProfileSteps(flags, threads, roof);
  if (flags.only_profile) return 0;

  std::optional<LlamacppProcess> theirs;
  if (!flags.llamacpp.empty()) {
    auto started = LlamacppProcess::Start(flags.llamacpp[0], flags.llamacpp[1], flags.llamacpp[2],
                                          threads);
    if (!started.ok()) {
      std::cerr << "model_bench: " << started.status().message() << "\n";
      return 1;
    }
    theirs.emplace(std::move(started).value());
  }
  OwnModel own(flags.model, threads, CpuProfile::kOff, flags.chunk, ParseCompute(flags.compute));
  struct Row {
    std::string name;
    std::function<double()> ours;
    std::string command;
    double tokens;
    std::vector<double> own_rate, their_rate, ratio;
  };
  const auto decode = [&own](int batch) {
    return [&own, batch] { return own.Decode(batch, kDecodeContext, kDecodeSteps); };
  };
  std::vector<Row> rows;
  rows.push_back({"prefill_2048_vs_llamacpp", [&own] { return own.Prefill(kPrefillTokens); },
                  absl::StrCat("prefill ", kPrefillTokens), kPrefillTokens, {}, {}, {}});
  rows.push_back({"decode_b1_vs_llamacpp", decode(1),
                  absl::StrCat("decode 1 ", kDecodeContext, " ", kDecodeSteps), 1, {}, {}, {}});
  rows.push_back({"decode_b8_vs_llamacpp", decode(8),
                  absl::StrCat("decode 8 ", kDecodeContext, " ", kDecodeSteps), 8, {}, {}, {}});
  // Round 0 warms both sides up and does not count.
  for (int round = 0; round <= flags.rounds; ++round) {
    for (Row& row : rows) {
      const double ours = row.ours();
      double their_seconds = 0;
      if (theirs.has_value()) {
        const auto answer = theirs->Ask(row.command);
        if (!answer.ok()) {
          std::cerr << "model_bench: " << answer.status().message() << "\n";
          return 1;
        }
        their_seconds = *answer;
      }
      if (round == 0) continue;
      row.own_rate.push_back(row.tokens / ours);
      if (theirs.has_value()) {
        row.their_rate.push_back(row.tokens / their_seconds);
        row.ratio.push_back(their_seconds / ours);
      }
    }
  }
  nlohmann::json json = {{"rows", nlohmann::json::array()}};
  std::printf("\n%-28s %14s %16s %8s  (median of %d rounds; least and most)\n", "row",
              "ours tokens/s", "llama.cpp", "ratio", flags.rounds);
  for (Row& row : rows) {
    std::printf("%-28s %14.1f", row.name.c_str(), Median(row.own_rate));
    const std::string base = row.name.substr(0, row.name.find("_vs_"));
    json["rows"].push_back({{"name", base + "_tokens_per_s"}, {"value", Median(row.own_rate)},
                            {"unit", "tokens/s"}});
    if (!row.ratio.empty()) {
      const auto [low, high] = std::minmax_element(row.ratio.begin(), row.ratio.end());
      std::printf(" %16.1f %8.2f  %.2f to %.2f", Median(row.their_rate), Median(row.ratio), *low,
                  *high);
      json["rows"].push_back({{"name", base + "_llamacpp_tokens_per_s"},
                              {"value", Median(row.their_rate)}, {"unit", "tokens/s"}});
      json["rows"].push_back({{"name", row.name}, {"value", Median(row.ratio)}, {"unit", "ratio"}});
    }
    std::printf("\n");
  }
  json["rows"].push_back({{"name", "peak_f32"}, {"value", roof.f32_gflops}, {"unit", "GFLOP/s"}});
  json["rows"].push_back({{"name", "peak_bf16"}, {"value", roof.bf16_gflops}, {"unit", "GFLOP/s"}});
  json["rows"].push_back({{"name", "peak_read"}, {"value", roof.gbps}, {"unit", "GB/s"}});
  if (!flags.json.empty()) std::ofstream(flags.json) << json.dump(1) << "\n";
  return 0;
}

}  // namespace
}  // namespace kvt

int main(int argc, char** argv) {
  kvt::Flags flags;
  CLI::App app{"Prefill and decode beside llama.cpp, and where the time goes", "model_bench"};
  app.add_option("model", flags.model, "Hugging Face folder")->required();
  app.add_option("--json", flags.json, "write the rows here");
  app.add_option("--llamacpp", flags.llamacpp, "PYTHON WORKER GGUF")->expected(3);
  app.add_option("--rounds", flags.rounds)->check(CLI::Range(1, 100))->capture_default_str();
  app.add_option("--threads", flags.threads, "0: all processors")->capture_default_str();
  app.add_option("--chunk", flags.chunk)->check(CLI::Range(1, 512))->capture_default_str();
  app.add_option("--compute", flags.compute)->check(CLI::IsMember({"bf16", "f32"}));
  app.add_option("--profile", flags.profile, "clock of the operations' times")
      ->check(CLI::IsMember({"wall", "thread"}));
  app.add_flag("--only-profile", flags.only_profile);
  CLI11_PARSE(app, argc, argv);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  return kvt::Run(flags);
}
