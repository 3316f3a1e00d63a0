// kvtide-run: one model in one process, without a tier. Exit codes: 0 answered; 1 the model or the
// device failed; 2 usage; 3 the prompt was refused (empty, not UTF-8, beyond the context); 4 the
// model folder cannot be used.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>

#include "kernels/base/check.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/model/chat_template.h"
#include "kernels/model/model_config.h"
#include "kernels/model/reference_run.h"
#include "kernels/model/tokenizer.h"
#include "kernels/model/transformer.h"

namespace kvt {
namespace {

constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;
constexpr int kExitPrompt = 3;
constexpr int kExitModel = 4;

struct Flags {
  std::string model;
  std::string prompt;
  std::string file;
  bool chat = false;
  int max_tokens = 128;
  double temperature = 0;
  int top_k = 0;
  double top_p = 1;
  uint64_t seed = 0;
  std::string compute = "auto";
  int threads = 0;
  int chunk = 512;
  std::string output = "text";
};

int Fail(int code, const absl::Status& status) {
  std::cerr << "kvtide-run: " << status.message() << "\n";
  return code;
}

absl::StatusOr<std::string> ReadPrompt(const Flags& flags, bool prompt_given) {
  if (prompt_given) return flags.prompt;
  if (!flags.file.empty() && flags.file != "-") {
    std::ifstream in(flags.file, std::ios::binary);
    if (!in) return absl::NotFoundError(absl::StrCat(flags.file, ": cannot be read"));
    return std::string(std::istreambuf_iterator<char>(in), {});
  }
  return std::string(std::istreambuf_iterator<char>(std::cin), {});
}

absl::StatusOr<std::vector<int32_t>> EncodePrompt(const Flags& flags, const Tokenizer& tokenizer,
                                                  const std::string& text) {
  if (text.empty()) return absl::InvalidArgumentError("the prompt is empty");
  if (flags.chat) {
    KVT_ASSIGN_OR_RETURN(const ChatTemplate chat, ChatTemplate::Load(flags.model));
    const ChatMessage message{"user", text};
    return chat.Encode(tokenizer, {&message, 1});
  }
  KVT_ASSIGN_OR_RETURN(const std::vector<int32_t> ids,
                       tokenizer.Encode(text, SpecialTokens::kAsText));
  std::vector<int32_t> prompt = tokenizer.prefix_ids();
  prompt.insert(prompt.end(), ids.begin(), ids.end());
  return prompt;
}

TransformerOptions::Compute ParseCompute(const std::string& name) {
  if (name == "f32") return TransformerOptions::Compute::kF32;
  if (name == "bf16") return TransformerOptions::Compute::kBf16;
  return TransformerOptions::Compute::kAuto;
}

void PrintFigures(const Flags& flags, const Transformer& transformer, int prompt_tokens,
                  const ReferenceResult& result, const std::string& text) {
  const double ttft = absl::ToDoubleSeconds(result.time_to_first_token);
  const double rest = absl::ToDoubleSeconds(result.total) - ttft;
  const size_t later = result.tokens.size() - 1;
  const double tpot = later > 0 ? rest / static_cast<double>(later) : 0;
  if (flags.output == "json") {
    const nlohmann::json json = {{"text", text},
                                 {"tokens", result.tokens},
                                 {"prompt_tokens", prompt_tokens},
                                 {"stopped", result.stopped},
                                 {"ttft_s", ttft},
                                 {"tpot_s", tpot},
                                 {"prefill_tokens_per_s", prompt_tokens / ttft},
                                 {"numerics_id", transformer.numerics_id()}};
    std::cout << json.dump() << "\n";
    return;
  }
  std::fprintf(stderr,
               "\nprompt %d tokens, answer %zu; first token %.3f s (%.0f tokens/s), then %.2f ms a "
               "token (%.1f tokens/s)\n",
               prompt_tokens, result.tokens.size(), ttft, prompt_tokens / ttft, tpot * 1e3,
               tpot > 0 ? 1 / tpot : 0.0);
}

int Run(const Flags& flags, bool prompt_given) {
  const absl::StatusOr<ModelConfig> config = LoadModelConfig(flags.model);
  if (!config.ok()) return Fail(kExitModel, config.status());
  const auto tokenizer = Tokenizer::Load(flags.model);
  if (!tokenizer.ok()) return Fail(kExitModel, tokenizer.status());
  const auto text = ReadPrompt(flags, prompt_given);
  if (!text.ok()) return Fail(kExitPrompt, text.status());
  const auto prompt = EncodePrompt(flags, **tokenizer, *text);
  if (!prompt.ok()) return Fail(kExitPrompt, prompt.status());
  if (static_cast<int64_t>(prompt->size()) >= config->context_tokens) {
    return Fail(kExitPrompt, absl::OutOfRangeError(absl::StrCat(
                                 "the prompt has ", prompt->size(), " tokens; the model's context "
                                 "of ", config->context_tokens, " leaves no room for an answer")));
  }
  ReferenceRequest request;
  request.prompt = *prompt;
  request.max_tokens = flags.max_tokens;
  request.sampling.temperature = static_cast<float>(flags.temperature);
  request.sampling.top_k = flags.top_k;
  request.sampling.top_p = static_cast<float>(flags.top_p);
  request.sampling.seed = flags.seed;
  request.stop_ids = config->eos_ids;
  if (const absl::Status status = request.sampling.Validate(); !status.ok()) {
    return Fail(kExitUsage, status);
  }
  CpuDeviceOptions device_options;
  device_options.threads = flags.threads;
  const auto device = MakeCpuDevice(device_options);
  if (!device.ok()) return Fail(kExitUsage, device.status());
  const auto transformer =
      Transformer::Load(flags.model, **device, {.compute = ParseCompute(flags.compute)});
  if (!transformer.ok()) return Fail(kExitModel, transformer.status());
  const auto run = ReferenceRun::Create(**transformer, {.chunk_tokens = flags.chunk});
  if (!run.ok()) return Fail(kExitUsage, run.status());

  TokenStream stream(**tokenizer, Tokenizer::Special::kSkip);
  std::string answer;
  const auto result = (*run)->Generate(request, [&](int32_t token) {
    const std::string piece = stream.Append(token);
    answer += piece;
    if (flags.output == "text") std::cout << piece << std::flush;
  });
  if (!result.ok()) return Fail(kExitFailed, result.status());
  const std::string rest = stream.Finish();
  answer += rest;
  if (flags.output == "text") std::cout << rest << std::flush;
  PrintFigures(flags, **transformer, static_cast<int>(prompt->size()), *result, answer);
  return 0;
}

int Main(int argc, char** argv) {
  Flags flags;
  CLI::App app{
      "Runs one model in one process, without a tier, and prints its answer: the reference for the "
      "cluster.\nThe prompt is an argument, or comes from --file or stdin.\nExit codes: 0 answered, "
      "1 model or device failed, 2 usage, 3 prompt refused (empty, not UTF-8, beyond the context), "
      "4 model folder unusable.",
      "kvtide-run"};
  app.add_option("model", flags.model, "Hugging Face folder of the model")->required();
  CLI::Option* prompt = app.add_option("prompt", flags.prompt, "the prompt's text");
  app.add_option("-f,--file", flags.file, "read the prompt from this file (-: stdin)")
      ->excludes(prompt);
  app.add_flag("--chat", flags.chat, "put the prompt into the model's chat template");
  app.add_option("--max-tokens", flags.max_tokens, "longest answer, in tokens")
      ->check(CLI::Range(1, kSequenceTokensMax))->capture_default_str();
  app.add_option("--temperature", flags.temperature, "0: greedy")
      ->check(CLI::Range(0.0, 100.0))->capture_default_str();
  app.add_option("--top-k", flags.top_k, "0: off")
      ->check(CLI::Range(0, kTopKMax))->capture_default_str();
  app.add_option("--top-p", flags.top_p, "1: off")->capture_default_str();
  app.add_option("--seed", flags.seed, "of sampling")->capture_default_str();
  app.add_option("--compute", flags.compute, "arithmetic of the products")
      ->check(CLI::IsMember({"auto", "f32", "bf16"}))->capture_default_str();
  app.add_option("--threads", flags.threads, "0: all processors")
      ->check(CLI::Range(0, kTeamThreadsMax))->capture_default_str();
  app.add_option("--chunk", flags.chunk, "tokens of one prefill step")
      ->check(CLI::Range(1, kPrefillChunkTokensMax))->capture_default_str();
  app.add_option("-o,--output", flags.output, "text or json")
      ->check(CLI::IsMember({"text", "json"}))->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  return Run(flags, prompt->count() > 0);
}

}  // namespace
}  // namespace kvt

int main(int argc, char** argv) { return kvt::Main(argc, argv); }
