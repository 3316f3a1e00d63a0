// quality_bench: what sparse attention costs. A text is computed densely up to its last positions;
// those are decoded teacher-forced, sparse, with each way of choosing blocks and at each budget, and
// compared with full attention: perplexity, KL of the next token, agreement of its arg-max. Then
// needles in long texts: is the answer still the arg-max, token by token? The question is decoded
// sparsely too. Then misses of the hot set on the recorded selections, and selection's share of a
// decode step.
//
//   quality_bench MODEL --calibration FILE --every-head FILE --text FILE... --json FILE [bounds]
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/model/block_keys.h"
#include "kernels/model/model_config.h"
#include "kernels/model/needles.h"
#include "kernels/model/text_run.h"
#include "kernels/model/tokenizer.h"
#include "kernels/select/attention_stats.h"
#include "kernels/select/hot_set.h"
#include "tests/bench/offloaded_steps.h"
#include "tests/bench/quality_policies.h"

namespace kvt {
namespace {

constexpr int kMissBudget = 1024;
constexpr uint64_t kSeed = 20261129;

struct Flags {
  std::string model, calibration, every_head, json;
  std::vector<std::string> texts;
  std::vector<std::string> extra;  // NAME=CALIBRATION
  std::vector<int> budgets = {256, 512, 1024, 2048};
  std::vector<std::string> policies;
  int context = 7500, positions = 256;
  int needle_texts = 6, needles_each = 4, single_needles = 16, needle_tokens = 4000;
  int threads = 0;
  double minutes = 90;
};

struct Rows {
  nlohmann::json rows = nlohmann::json::array();
  void Add(const std::string& name, double value, const char* unit) {
    rows.push_back({{"name", name}, {"value", value}, {"unit", unit}});
  }
};

std::string ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  KVT_CHECK(in.good(), path, ": cannot be read");
  return std::string(std::istreambuf_iterator<char>(in), {});
}

Calibration ReadCalibration(const std::string& path) {
  auto calibration = Calibration::Parse(ReadFile(path), path);
  KVT_CHECK(calibration.ok(), calibration.status().ToString());
  return std::move(calibration).value();
}

size_t ArgMax(absl::Span<const float> row) {
  return static_cast<size_t>(std::max_element(row.begin(), row.end()) - row.begin());
}

// Of one policy and budget, over all texts.
struct Quality {
  double nll = 0, kl = 0, nll_rise_squares = 0;
  int agree = 0, positions = 0;
  int found = 0, needles = 0;
  double answer_logprob = 0;
};

class QualityBench {
 public:
  explicit QualityBench(Flags flags) : flags_(std::move(flags)) {}
  void Run();

 private:
  void Load();
  void ReadTexts();
  bool Out(const char* what);
  // Budgets at which a policy differs.
  std::vector<int> Budgets(const PolicyKind& kind) const;
  std::vector<float> DecodeAll(TextRun& run, Policy& policy, const std::vector<int32_t>& tokens,
                               int first, int rows, int budget,
                               std::map<int, SelectionTrace>* trace);
  void Perplexity(const std::vector<int32_t>& tokens);
  void Needles(const NeedleText& text);
  void Misses();
  void SelectShare();
  void Report();
  std::string Key(const PolicyKind& kind, int budget) const {
    return absl::StrCat(kind.name, kind.name.empty() ? "" : "_", budget);
  }

  const Flags flags_;
  absl::Time start_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Transformer> model_;
  std::unique_ptr<Tokenizer> tokenizer_;
  Calibration calibration_, every_head_;
  std::vector<std::unique_ptr<Calibration>> extra_;
  std::vector<PolicyKind> kinds_;
  std::vector<std::vector<int32_t>> texts_;
  std::map<std::string, Quality> quality_;  // by Key
  std::vector<std::map<int, SelectionTrace>> traces_;  // [text]: layer -> steps
  Rows rows_;
};

void QualityBench::Load() {
  CpuDeviceOptions options;
  options.threads = flags_.threads;
  options.profile = CpuProfile::kWall;
  device_ = MakeCpuDevice(options).value();
  auto model = Transformer::Load(flags_.model, *device_, {});
  KVT_CHECK(model.ok(), model.status().ToString());
  model_ = std::move(model).value();
  tokenizer_ = Tokenizer::Load(flags_.model).value();
  calibration_ = ReadCalibration(flags_.calibration);
  every_head_ = ReadCalibration(flags_.every_head);
  KVT_CHECK(calibration_.geometry == model_->geometry() && every_head_.geometry == model_->geometry());
  std::vector<int> mam, least, best;
  for (const CalibrationLayer& layer : calibration_.layers) {
    mam.push_back(layer.mam_head);
    least.push_back(layer.least_head);
    best.push_back(layer.best);
  }
  using Way = PolicyKind::Way;
  const std::vector<PolicyKind> all = {{"full", Way::kFull, nullptr, {}},
                                       {"", Way::kDigests, &calibration_, {}},
                                       {"equal", Way::kEqual, &calibration_, {}},
                                       {"resident", Way::kResident, &calibration_, {}},
                                       {"oracle", Way::kOracle, nullptr, {}},
                                       {"headwise", Way::kHeadwise, &every_head_, {}},
                                       {"mam", Way::kCentres, nullptr, mam},
                                       {"reversed", Way::kOneHead, &every_head_, least},
                                       {"window", Way::kWindow, nullptr, {}},
                                       {"one", Way::kOneHead, &every_head_, best},
                                       {"mam_keys", Way::kOneHead, &every_head_, mam},
                                       {"all", Way::kDigests, &every_head_, {}},
                                       {"centres", Way::kCentres, nullptr, best},
                                       {"bounds", Way::kBounds, nullptr, best}};
  for (const PolicyKind& kind : all) {
    const std::string name = kind.name.empty() ? "set" : kind.name;
    const auto& wanted = flags_.policies;
    if (kind.way == Way::kFull || std::find(wanted.begin(), wanted.end(), name) != wanted.end()) {
      kinds_.push_back(kind);
    }
  }
  for (const std::string& extra : flags_.extra) {
    const size_t at = extra.find('=');
    KVT_CHECK(at != std::string::npos, extra, ": expected NAME=CALIBRATION");
    extra_.push_back(std::make_unique<Calibration>(ReadCalibration(extra.substr(at + 1))));
    kinds_.push_back({extra.substr(0, at), Way::kDigests, extra_.back().get(), {}});
    rows_.Add(extra.substr(0, at) + "_digest_bytes_pct", 100 * extra_.back()->DigestBytesShare(), "%");
  }
}

void QualityBench::ReadTexts() {
  for (const std::string& path : flags_.texts) {
    auto ids = tokenizer_->Encode(ReadFile(path), SpecialTokens::kAsText);
    KVT_CHECK(ids.ok(), path, ": ", ids.status().ToString());
    KVT_CHECK(static_cast<int>(ids->size()) > flags_.context + flags_.positions, path, " has ",
              ids->size(), " tokens");
    texts_.push_back(std::move(ids).value());
  }
}

bool QualityBench::Out(const char* what) {
  const double minutes = absl::ToDoubleMinutes(RealClock::Get().Now() - start_);
  if (minutes < flags_.minutes) return false;
  std::fprintf(stderr, "quality_bench: %.1f minutes: no more %s\n", minutes, what);
  return true;
}

std::vector<int> QualityBench::Budgets(const PolicyKind& kind) const {
  using Way = PolicyKind::Way;
  if (kind.way == Way::kFull || kind.way == Way::kWindow) return {0};
  return flags_.budgets;
}

std::vector<float> QualityBench::DecodeAll(TextRun& run, Policy& policy,
                                           const std::vector<int32_t>& tokens, int first, int rows,
                                           int budget, std::map<int, SelectionTrace>* trace) {
  std::vector<float> logits;
  // The rows' own blocks belong to this policy: digests of completed ones are made anew.
  int digested = first / kBlockTokens;
  for (int at = 0; at < rows; at += kSparseRowsMax) {
    const int n = std::min(kSparseRowsMax, rows - at);
    const int complete = (first + at) / kBlockTokens;
    policy.Refresh(digested, complete);
    digested = complete;
    auto part = run.Decode(
        absl::MakeConstSpan(tokens).subspan(static_cast<size_t>(first + at), static_cast<size_t>(n)),
        first + at, [&](int layer, int position, const LayerActivations& a) {
          RowSelections selections = policy.Select(layer, position, a, budget);
          if (trace != nullptr && !selections.full) {
            SelectionTrace& steps = (*trace)[layer];
            steps.insert(steps.end(), selections.blocks.begin(), selections.blocks.end());
          }
          return selections;
        });
    KVT_CHECK(part.ok(), part.status().ToString());
    logits.insert(logits.end(), part->begin(), part->end());
  }
  return logits;
}

void QualityBench::Perplexity(const std::vector<int32_t>& tokens) {
  const int first = flags_.context, rows = flags_.positions;
  const auto vocab = static_cast<size_t>(model_->config().vocab);
  auto run = TextRun::Create(*model_, first + rows).value();
  absl::Status status = run->Prefill(absl::MakeConstSpan(tokens).first(static_cast<size_t>(first)), 0,
                                     nullptr);
  KVT_CHECK(status.ok(), status.ToString());
  std::vector<float> full;
  for (const PolicyKind& kind : kinds_) {
    const auto policy = MakePolicy(kind, *run);
    policy->Refresh(0, first / kBlockTokens);
    for (const int budget : Budgets(kind)) {
      const bool record = kind.name.empty() && budget == kMissBudget;
      if (record) traces_.emplace_back();
      std::vector<float> logits = DecodeAll(*run, *policy, tokens, first, rows, budget,
                                            record ? &traces_.back() : nullptr);
      Quality& q = quality_[Key(kind, budget)];
      for (int r = 0; r < rows; ++r) {
        const absl::Span<float> row = absl::MakeSpan(logits).subspan(static_cast<size_t>(r) * vocab,
                                                                     vocab);
        LogSoftmax(row);
        const auto target = static_cast<size_t>(tokens[static_cast<size_t>(first + r + 1)]);
        const float* want = full.empty() ? row.data() : full.data() + static_cast<size_t>(r) * vocab;
        double kl = 0;
        for (size_t v = 0; v < vocab; ++v) kl += std::exp(want[v]) * (want[v] - row[v]);
        const double rise = want[target] - row[target];
        q.nll -= row[target];
        q.nll_rise_squares += rise * rise;
        q.kl += kl;
        q.agree += ArgMax(row) == ArgMax({want, vocab});
        ++q.positions;
      }
      if (full.empty()) full = std::move(logits);
    }
    std::fprintf(stderr, "  %s\n", kind.name.empty() ? "set" : kind.name.c_str());
  }
}

void QualityBench::Needles(const NeedleText& text) {
  const int first = static_cast<int>(text.prefix.size());
  const auto vocab = static_cast<size_t>(model_->config().vocab);
  auto run = TextRun::Create(*model_, first + kSparseRowsMax).value();
  const absl::Status status = run->Prefill(text.prefix, 0, nullptr);
  KVT_CHECK(status.ok(), status.ToString());
  for (const PolicyKind& kind : kinds_) {
    const auto policy = MakePolicy(kind, *run);
    policy->Refresh(0, first / kBlockTokens);
    for (const int budget : Budgets(kind)) {
      Quality& q = quality_[Key(kind, budget)];
      for (const NeedleQuestion& question : text.questions) {
        std::vector<int32_t> tokens = text.prefix;
        tokens.insert(tokens.end(), question.tokens.begin(), question.tokens.end());
        const int rows = static_cast<int>(question.tokens.size()) - 1;
        std::vector<float> logits = DecodeAll(*run, *policy, tokens, first, rows, budget, nullptr);
        bool found = true;
        for (int i = rows - question.answer; i < rows; ++i) {
          const absl::Span<float> row = absl::MakeSpan(logits).subspan(static_cast<size_t>(i) * vocab,
                                                                       vocab);
          const auto target = static_cast<size_t>(question.tokens[static_cast<size_t>(i) + 1]);
          LogSoftmax(row);
          q.answer_logprob += row[target];
          found = found && ArgMax(row) == target;
        }
        q.found += found;
        ++q.needles;
      }
    }
  }
}

// The hot sets of all layers together, at `times` the selection: for every layer so many times its own,
// and divided by the calibration's miss curves, beside Belady.
void QualityBench::Misses() {
  for (const int times : {1, 2}) {
    double selected = 0, equal = 0, divided = 0, belady = 0, belady_divided = 0;
    std::vector<double> by_step;
    std::map<int, double> by_layer, selected_by_layer;
    for (const auto& trace : traces_) {
      // As a decode worker divides them (decode_worker/offload/offload_shape.cc).
      std::vector<MissCurve> curves;
      std::vector<int> equals;
      for (const auto& [layer, steps] : trace) {
        size_t most = 0;
        for (const auto& step : steps) most = std::max(most, step.size());
        const CalibrationLayer& of = calibration_.layers[static_cast<size_t>(layer)];
        const int least = static_cast<int>(most);
        const double scale = static_cast<double>(least) / of.miss_least;
        curves.push_back({least, std::max(1, static_cast<int>(std::lround(of.miss_step * scale))),
                          of.misses});
        equals.push_back(times * least);
      }
      const std::vector<int> slots =
          DivideSlots(curves, std::accumulate(equals.begin(), equals.end(), 0));
      size_t index = 0;
      std::vector<double> steps_misses(trace.begin()->second.size() - 1);
      for (const auto& [layer, steps] : trace) {
        for (size_t s = 1; s < steps.size(); ++s) selected += static_cast<double>(steps[s].size());
        const auto sum = [](const std::vector<int>& v) {
          return static_cast<double>(std::accumulate(v.begin(), v.end(), 0));
        };
        const double missed = sum(HotSetMisses(steps, equals[index]));
        equal += missed;
        by_layer[layer] += missed;
        selected_by_layer[layer] += static_cast<double>(steps.size() - 1) * equals[index] / times;
        belady += sum(BeladyMisses(steps, equals[index]));
        const std::vector<int> misses = HotSetMisses(steps, slots[index]);
        divided += sum(misses);
        belady_divided += sum(BeladyMisses(steps, slots[index]));
        for (size_t s = 0; s < misses.size(); ++s) steps_misses[s] += misses[s];
        ++index;
      }
      by_step.insert(by_step.end(), steps_misses.begin(), steps_misses.end());
    }
    if (selected == 0) return;
    const std::string x = absl::StrCat("_", times, "x");
    std::sort(by_step.begin(), by_step.end());
    const double steps = static_cast<double>(by_step.size());
    rows_.Add("miss_pct" + x, 100 * divided / selected, "%");
    rows_.Add("miss_equal_pct" + x, 100 * equal / selected, "%");
    rows_.Add("miss_belady_pct" + x, 100 * belady_divided / selected, "%");
    rows_.Add("miss_belady_equal_pct" + x, 100 * belady / selected, "%");
    rows_.Add("miss_vs_belady" + x, divided / belady_divided, "x");
    rows_.Add("miss_p99_pct" + x,
              100 * by_step[static_cast<size_t>(0.99 * (steps - 1))] * steps / selected, "%");
    for (const auto& [layer, missed] : by_layer) {
      rows_.Add(absl::StrCat("miss_equal_layer", layer, x),
                100 * missed / selected_by_layer[layer], "%");
    }
  }
}

// Digest, score and top blocks within single decode steps at the end of a text: their share of the time
// of all operations of a step as a decode worker computes it, and of one with full attention.
void QualityBench::SelectShare() {
  constexpr int kSteps = 32, kWarmUp = 8, kBudget = 2048;
  const std::vector<int32_t>& tokens = texts_[0];
  const int first =
      std::min(8000, static_cast<int>(tokens.size()) - kSteps - kWarmUp - 1) / kBlockTokens * kBlockTokens;
  auto run = TextRun::Create(*model_, first + kSteps + kWarmUp).value();
  const absl::Status status =
      run->Prefill(absl::MakeConstSpan(tokens).first(static_cast<size_t>(first)), 0, nullptr);
  KVT_CHECK(status.ok(), status.ToString());
  const auto sparse = OffloadedSteps::Create(*run, calibration_, first, kSteps + kWarmUp, kBudget);
  KVT_CHECK(sparse.ok(), sparse.status().ToString());
  const auto full = [](int, int, const LayerActivations&) { return RowSelections::Full(); };
  // Milliseconds of each operation in a step, once hot slots have been filled.
  const auto profile = [&](const std::function<void(int)>& step) {
    std::map<std::string, double> ms;
    for (int s = 0; s < kWarmUp + kSteps; ++s) {
      if (s == kWarmUp) (void)TakeCpuProfile(*device_);
      step(s);
    }
    for (const CpuOpTime& op : TakeCpuProfile(*device_)) {
      // Hand-overs to the engine's thread: what they take is the operating system's switches.
      if (op.name == "callback") continue;
      ms[op.name] += absl::ToDoubleMilliseconds(op.time) / kSteps;
    }
    return ms;
  };
  const auto sum = [](const std::map<std::string, double>& ops) {
    double all = 0;
    for (const auto& [name, ms] : ops) all += ms;
    return all;
  };
  const std::map<std::string, double> ops = profile([&](int s) {
    const auto row = (*sparse)->Step(tokens[static_cast<size_t>(first + s)]);
    KVT_CHECK(row.ok(), row.status().ToString());
    KVT_CHECK(row->lost == 0 && row->left_out == 0, "step ", s);
  });
  const double full_ms = sum(profile([&](int s) {
    const auto logits = run->Decode({&tokens[static_cast<size_t>(first + s)], 1}, first + s, full);
    KVT_CHECK(logits.ok(), logits.status().ToString());
  }));
  double select_ms = 0;
  for (const char* name : {"digest", "score", "top_blocks"}) {
    const auto op = ops.find(name);
    const double ms = op == ops.end() ? 0 : op->second;  // a short text: nothing to choose
    rows_.Add(absl::StrCat("select_", name, "_ms"), ms, "ms");
    select_ms += ms;
  }
  const double sparse_ms = sum(ops);
  rows_.Add("sparse_step_ms", sparse_ms, "ms");
  rows_.Add("select_ms", select_ms, "ms");
  rows_.Add("select_share_pct", 100 * select_ms / sparse_ms, "%");
  rows_.Add("full_step_ms", full_ms, "ms");
  rows_.Add("select_share_of_full_step_pct", 100 * select_ms / full_ms, "%");
}

// Writes what is known so far.
void QualityBench::Report() {
  Rows rows = rows_;
  const Quality& full = quality_["full_0"];
  if (full.needles > 0) {
    rows.Add("needles_total", full.needles, "");
    rows.Add("needles_full", full.found, "");
  }
  if (full.positions > 0) {
    rows.Add("ppl_full", std::exp(full.nll / full.positions), "");
    rows.Add("positions", full.positions, "");
  }
  rows.Add("digest_bytes_pct", 100 * calibration_.DigestBytesShare(), "%");
  for (const PolicyKind& kind : kinds_) {
    const std::string prefix = kind.name.empty() ? "" : kind.name + "_";
    for (const int budget : Budgets(kind)) {
      const Quality& q = quality_[Key(kind, budget)];
      const std::string suffix = budget > 0 ? absl::StrCat("_", budget) : "";
      if (kind.name != "full" && q.positions > 0) {
        const double n = q.positions;
        const double rise = (q.nll - full.nll) / n;
        const double error = std::sqrt(std::max(0.0, q.nll_rise_squares / n - rise * rise) / n);
        rows.Add(prefix + "ppl_rise_pct" + suffix, 100 * (std::exp(rise) - 1), "%");
        rows.Add(prefix + "ppl_rise_error_pct" + suffix, 100 * error, "%");
        rows.Add(prefix + "kl" + suffix, q.kl / n, "nats");
        rows.Add(prefix + "agree_pct" + suffix, 100 * q.agree / n, "%");
      }
      if (q.needles > 0) {
        if (kind.name != "full") rows.Add(prefix + "needles" + suffix, q.found, "");
        // Wilson's interval, 95 %.
        const double n = q.needles, p = q.found / n, z = 1.96;
        const double centre = (p + z * z / (2 * n)) / (1 + z * z / n);
        const double half = z * std::sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n);
        rows.Add(prefix + "needles_low" + suffix, n * (centre - half), "");
        rows.Add(prefix + "needles_high" + suffix, n * (centre + half), "");
        rows.Add(prefix + "needle_logprob" + suffix, q.answer_logprob / n, "nats");
      }
    }
  }
  rows.Add("minutes", absl::ToDoubleMinutes(RealClock::Get().Now() - start_), "min");
  std::ofstream(flags_.json) << nlohmann::json({{"rows", rows.rows}}).dump(1) << "\n";
}

void QualityBench::Run() {
  start_ = RealClock::Get().Now();
  Load();
  ReadTexts();
  for (size_t i = 0; i < texts_.size() && !Out("texts"); ++i) {
    std::fprintf(stderr, "text %zu\n", i);
    Perplexity(texts_[i]);
    Report();
  }
  Misses();
  SelectShare();
  Report();
  for (int i = 0; i < flags_.needle_texts && !Out("needles"); ++i) {
    std::fprintf(stderr, "needles %d\n", i);
    Needles(PlantNeedles(*tokenizer_, texts_[static_cast<size_t>(i) % texts_.size()],
                         flags_.needle_tokens, flags_.needles_each, 0,
                         kSeed + static_cast<uint64_t>(i)));
    Report();
  }
  for (int i = 0; i < flags_.single_needles && !Out("single needles"); ++i) {
    std::fprintf(stderr, "single needle %d\n", i);
    Needles(PlantNeedles(*tokenizer_, texts_[static_cast<size_t>(i) % texts_.size()],
                         flags_.needle_tokens, 1, (i + 0.5) / flags_.single_needles,
                         kSeed + 100 + static_cast<uint64_t>(i)));
    Report();
  }
}

int Main(int argc, char** argv) {
  Flags flags;
  flags.policies = {"set", "equal", "resident", "headwise", "mam", "reversed", "window"};
  CLI::App app{"The quality of sparse attention, by the way blocks are chosen"};
  app.add_option("model", flags.model)->required();
  app.add_option("--calibration", flags.calibration)->required();
  app.add_option("--every-head", flags.every_head, "calibration with every head")->required();
  app.add_option("--extra", flags.extra, "NAME=CALIBRATION, also measured");
  app.add_option("--text", flags.texts)->required();
  app.add_option("--json", flags.json)->required();
  app.add_option("--budgets", flags.budgets)->delimiter(',');
  app.add_option("--policies", flags.policies,
                 "of set, equal, resident, oracle, headwise, mam, reversed, window, one, mam_keys, all, "
                 "centres, bounds")
      ->delimiter(',');
  app.add_option("--context", flags.context);
  app.add_option("--positions", flags.positions);
  app.add_option("--needle-texts", flags.needle_texts, "texts with several needles");
  app.add_option("--needles-each", flags.needles_each);
  app.add_option("--single-needles", flags.single_needles, "texts with one");
  app.add_option("--needle-tokens", flags.needle_tokens, "length of those texts");
  app.add_option("--threads", flags.threads);
  app.add_option("--minutes", flags.minutes, "begin nothing after this long");
  CLI11_PARSE(app, argc, argv);
  QualityBench(std::move(flags)).Run();
  return 0;
}

}  // namespace
}  // namespace kvt

int main(int argc, char** argv) { return kvt::Main(argc, argv); }
