// kvtide-calibrate: which heads select in each layer of a model, measured over texts, and the scales
// of their digests. Exit codes: 0 done; 1 the device failed or a file cannot be written; 2 usage; 3 a
// text was refused; 4 the model folder cannot be used.
#include <CLI/CLI.hpp>
#include <climits>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "kernels/base/check.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/model/calibrator.h"
#include "kernels/model/model_config.h"
#include "kernels/model/model_host.h"
#include "kernels/model/needles.h"
#include "kernels/model/text_run.h"
#include "kernels/model/tokenizer.h"
#include "kernels/select/layer_budgets.h"

namespace kvt {
namespace {

constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;
constexpr int kExitText = 3;
constexpr int kExitModel = 4;
constexpr uint64_t kNeedleSeed = 20261130;

struct Flags {
  std::string model;
  std::vector<std::string> texts;
  std::string out;
  std::string out_every_head;
  std::string output = "table";
  std::string compute = "auto";
  int threads = 0;
  int needles = 4;
  int needle_tokens = 4000;
  CalibratorOptions options;
};

int Fail(int code, const absl::Status& status) {
  std::cerr << "kvtide-calibrate: " << status.message() << "\n";
  return code;
}

absl::StatusOr<std::vector<int32_t>> ReadText(const std::string& path, const Tokenizer& tokenizer) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return absl::NotFoundError(absl::StrCat(path, ": cannot be read"));
  const std::string text(std::istreambuf_iterator<char>(in), {});
  KVT_ASSIGN_OR_RETURN(const std::vector<int32_t> ids,
                       tokenizer.Encode(text, SpecialTokens::kAsText));
  std::vector<int32_t> tokens = tokenizer.prefix_ids();
  tokens.insert(tokens.end(), ids.begin(), ids.end());
  return tokens;
}

nlohmann::json CapturedJson(const Captured& captured) {
  return {{"mass", captured.mass}, {"kl", captured.kl}};
}

// Layers in which every text has the same arg-max.
int Agreement(const CalibrationReport& report, std::vector<int> LayerReport::*by_text) {
  int agree = 0;
  for (const LayerReport& layer : report.layers) {
    const std::vector<int>& best = layer.*by_text;
    agree += std::count(best.begin(), best.end(), best.front()) == static_cast<ptrdiff_t>(best.size());
  }
  return agree;
}

nlohmann::json ReportJson(const CalibrationReport& report, const NeedlesFound& needles) {
  nlohmann::json layers = nlohmann::json::array();
  for (size_t l = 0; l < report.layers.size(); ++l) {
    const LayerReport& layer = report.layers[l];
    const LayerChoice& choice = layer.choice;
    layers.push_back({{"layer", l},
                      {"head", choice.best},
                      {"runner_up", choice.runner_up},
                      {"margin", choice.margin},
                      {"set", choice.heads},
                      {"dense", choice.heads.empty()},
                      {"mam_head", choice.mam_head},
                      {"reversed_head", choice.least_head},
                      {"top16_excess", layer.measure.excess},
                      {"middle_mass", layer.measure.middle_mass},
                      {"head_by_text", layer.best_by_text},
                      {"mam_head_by_text", layer.mam_by_text},
                      {"losses", report.calibration.layers[l].losses},
                      {"misses", report.calibration.layers[l].misses},
                      {"captured",
                       {{"headwise", CapturedJson(layer.captured.headwise)},
                        {"set", CapturedJson(layer.captured.set)},
                        {"all", CapturedJson(layer.captured.all)},
                        {"mam", CapturedJson(layer.captured.mam)},
                        {"reversed", CapturedJson(layer.captured.reversed)}}}});
  }
  return {{"id", report.calibration.Id()},
          {"model", report.calibration.model},
          {"bits", report.calibration.bits},
          {"digest_bytes_share", report.calibration.DigestBytesShare()},
          {"layers_agree", Agreement(report, &LayerReport::best_by_text)},
          {"mam_layers_agree", Agreement(report, &LayerReport::mam_by_text)},
          {"needles",
           {{"planted", needles.planted}, {"found_full", needles.full}, {"found_set", needles.sparse}}},
          {"layers", layers}};
}

void PrintTable(const CalibrationReport& report, const NeedlesFound& needles, int budget) {
  const std::vector<int> budgets = LayerBudgets(report.calibration, budget, INT_MAX);
  std::printf("%5s %4s %9s %7s %-8s %4s %6s  KL of captured attention\n", "layer", "head", "runner_up",
              "margin", "set", "mam", "budget");
  std::printf("%51s %8s %8s %8s %8s %8s\n", "", "headwise", "set", "all", "mam", "reversed");
  for (size_t l = 0; l < report.layers.size(); ++l) {
    const LayerReport& layer = report.layers[l];
    std::string set = layer.choice.heads.empty() ? "dense" : "";
    for (const int head : layer.choice.heads) set += std::to_string(head) + " ";
    std::printf("%5zu %4d %9d %7.3f %-8s %4d %6d %4s %8.4f %8.4f %8.4f %8.4f %8.4f\n", l,
                layer.choice.best, layer.choice.runner_up, layer.choice.margin, set.c_str(),
                layer.choice.mam_head, budgets[l], "", layer.captured.headwise.kl, layer.captured.set.kl,
                layer.captured.all.kl, layer.captured.mam.kl, layer.captured.reversed.kl);
  }
  std::printf("digests: %.2f %% of the KV bytes; texts agree on the head in %d of %zu layers (MAM: %d)\n",
              100 * report.calibration.DigestBytesShare(),
              Agreement(report, &LayerReport::best_by_text), report.layers.size(),
              Agreement(report, &LayerReport::mam_by_text));
  if (needles.planted > 0) {
    std::printf("needles: %d planted; full attention finds %d, the set at %d tokens %d\n",
                needles.planted, needles.full, budget, needles.sparse);
  }
}

// Over all texts, each of which has its own needles.
absl::StatusOr<NeedlesFound> CheckNeedles(const Flags& flags, const Transformer& transformer,
                                          const Tokenizer& tokenizer, const Calibration& calibration,
                                          const std::vector<std::vector<int32_t>>& texts) {
  NeedlesFound sum;
  for (size_t i = 0; i < texts.size() && flags.needles > 0; ++i) {
    const int tokens = std::min({flags.needle_tokens, static_cast<int>(texts[i].size()),
                                 transformer.config().context_tokens - kSparseRowsMax});
    KVT_ASSIGN_OR_RETURN(
        const NeedlesFound found,
        FindNeedles(transformer, calibration,
                    PlantNeedles(tokenizer, texts[i], tokens, flags.needles, 0, kNeedleSeed + i),
                    flags.options.budget));
    sum.planted += found.planted;
    sum.full += found.full;
    sum.sparse += found.sparse;
  }
  return sum;
}

int Run(const Flags& flags) {
  ModelOptions model;
  model.folder = flags.model;
  model.threads = flags.threads;
  if (flags.compute == "f32") model.compute = TransformerOptions::Compute::kF32;
  if (flags.compute == "bf16") model.compute = TransformerOptions::Compute::kBf16;
  const auto tokenizer = Tokenizer::Load(flags.model);
  if (!tokenizer.ok()) return Fail(kExitModel, tokenizer.status());
  const auto host = LoadModelHost(model);
  if (!host.ok()) return Fail(kExitModel, host.status());
  const auto calibrator = Calibrator::Create(*host->transformer, host->fingerprint, flags.options);
  if (!calibrator.ok()) return Fail(kExitUsage, calibrator.status());
  std::vector<std::vector<int32_t>> texts;
  for (const std::string& path : flags.texts) {
    auto tokens = ReadText(path, **tokenizer);
    if (!tokens.ok()) return Fail(kExitText, tokens.status());
    if (const absl::Status status = (*calibrator)->AddText(*tokens); !status.ok()) {
      return Fail(kExitText, absl::Status(status.code(), absl::StrCat(path, ": ", status.message())));
    }
    texts.push_back(*std::move(tokens));
  }
  const auto report = (*calibrator)->Finish();
  if (!report.ok()) {
    return Fail(absl::IsInvalidArgument(report.status()) ? kExitUsage : kExitFailed, report.status());
  }
  for (const auto& [path, calibration] :
       {std::pair(flags.out, &report->calibration), std::pair(flags.out_every_head, &report->every_head)}) {
    if (path.empty()) continue;
    std::ofstream out(path, std::ios::binary);
    out << calibration->ToText();
    if (!out.flush()) return Fail(kExitFailed, absl::InternalError(path + ": cannot be written"));
  }
  const auto needles =
      CheckNeedles(flags, *host->transformer, **tokenizer, report->calibration, texts);
  if (!needles.ok()) return Fail(kExitFailed, needles.status());
  if (flags.output == "json") {
    std::cout << ReportJson(*report, *needles).dump() << "\n";
  } else {
    PrintTable(*report, *needles, flags.options.budget);
  }
  return 0;
}

int Main(int argc, char** argv) {
  Flags flags;
  CLI::App app{
      "Finds the selecting heads of a model over long texts and writes the calibration file that "
      "digests are made with.\nExit codes: 0 done, 1 device or output failed, 2 usage, 3 text "
      "refused, 4 model folder unusable.",
      "kvtide-calibrate"};
  CalibratorOptions& options = flags.options;
  app.add_option("model", flags.model, "Hugging Face folder of the model")->required();
  app.add_option("--text", flags.texts, "long texts, UTF-8")->required();
  app.add_option("--out", flags.out, "calibration file to write");
  app.add_option("--out-every-head", flags.out_every_head,
                 "a second file, with digests of every head, for comparisons");
  app.add_option("--lengths", options.lengths, "context lengths, in tokens")
      ->delimiter(',')->capture_default_str();
  app.add_option("--queries", options.queries, "queries of each length; divides 512")
      ->capture_default_str();
  app.add_option("--budget", options.budget, "tokens, for captured attention")
      ->check(CLI::Range(256, kSequenceTokensMax))->capture_default_str();
  app.add_option("--bits", options.set.bits, "of a digest's channel: 2, 3 or 4")
      ->capture_default_str();
  app.add_option("--digest-share", options.set.digest_share_max, "most digest bytes, of the KV's")
      ->check(CLI::Range(0.0, 1.0))->capture_default_str();
  app.add_option("--gain-min", options.set.gain_min, "least fall of a layer's KL for one more head")
      ->capture_default_str();
  app.add_option("--dense-layers", options.set.dense_layers_max, "most layers left dense")
      ->check(CLI::Range(0, 256))->capture_default_str();
  app.add_option("--dense-loss", options.set.dense_loss_min, "least KL of a layer left dense")
      ->capture_default_str();
  app.add_option("--loss-rows", options.loss_rows,
                 "positions at which each layer's loss is measured; 0: layers get equal budgets")
      ->check(CLI::Range(0, kSparseRowsMax))->capture_default_str();
  app.add_option("--needles", flags.needles,
                 "planted in each text to check the result; 0: no check")
      ->check(CLI::Range(0, 16))->capture_default_str();
  app.add_option("--needle-tokens", flags.needle_tokens, "of a text with needles")
      ->check(CLI::Range(1024, kSequenceTokensMax - kSparseRowsMax))->capture_default_str();
  app.add_option("--compute", flags.compute, "arithmetic of the products")
      ->check(CLI::IsMember({"auto", "f32", "bf16"}))->capture_default_str();
  app.add_option("--threads", flags.threads, "0: all processors")
      ->check(CLI::Range(0, kTeamThreadsMax))->capture_default_str();
  app.add_option("-o,--output", flags.output, "table or json")
      ->check(CLI::IsMember({"table", "json"}))->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  return Run(flags);
}

}  // namespace
}  // namespace kvt

int main(int argc, char** argv) { return kvt::Main(argc, argv); }
