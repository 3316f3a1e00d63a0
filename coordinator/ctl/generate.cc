#include "coordinator/ctl/generate.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <memory>
#include <optional>
#include <sstream>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "coordinator/ctl/generate_report.h"
#include "coordinator/ctl/generate_session.h"
#include "coordinator/ctl/run_state.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/model/chat_template.h"
#include "kernels/model/model_config.h"
#include "kernels/model/tokenizer.h"
#include "kernels/model/utf8.h"
#include "kvstore/wire/fidelity.h"
#include "kvstore/wire/wire_rpc.h"

namespace kvt::ctl {
namespace {

// After Ctrl-C the streams end within milliseconds; a worker that hangs does not hold the user.
constexpr absl::Duration kCancelCallTimeout = absl::Milliseconds(800);
constexpr absl::Duration kAfterCancel = absl::Seconds(2);

absl::StatusOr<std::string> ReadPrompt(const GenerateOptions& options) {
  std::string text;
  std::string name = "the prompt";
  if (options.has_text) {
    text = options.text;
  } else if (!options.file.empty() && options.file != "-") {
    name = options.file;
    std::ifstream in(options.file, std::ios::binary);
    if (!in) return absl::NotFoundError(absl::StrCat(options.file, ": ", std::strerror(errno)));
    std::ostringstream all;
    all << in.rdbuf();
    text = all.str();
  } else {
    if (options.file.empty() && isatty(STDIN_FILENO) != 0) {
      return absl::InvalidArgumentError(
          "no prompt: give it as an argument, with --file FILE, or on stdin");
    }
    name = "stdin";
    std::ostringstream all;
    all << std::cin.rdbuf();
    text = all.str();
  }
  if (text.size() > kEncodeBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " has ", text.size(), " bytes, more than ", kEncodeBytesMax));
  }
  const size_t valid = ValidUtf8Prefix(text);
  if (valid != text.size()) {
    return absl::InvalidArgumentError(absl::StrCat(name, " is not UTF-8: byte ", valid));
  }
  if (text.empty()) return absl::InvalidArgumentError(absl::StrCat(name, " is empty"));
  return text;
}

absl::StatusOr<std::optional<Fidelity>> ParseFidelity(const std::string& name) {
  if (name.empty()) return std::nullopt;
  const std::optional<Fidelity> fidelity = FidelityNamed(name);
  if (fidelity.has_value()) return fidelity;
  return absl::InvalidArgumentError(
      absl::StrCat("--fidelity ", name, ": none of exact, elastic, sparse"));
}

absl::StatusOr<std::string> FindModelFolder(const Cli& cli, const GenerateOptions& options) {
  if (!options.model_folder.empty()) return options.model_folder;
  const auto state = ReadRunState(cli.run_dir);
  if (state.ok() && !state->model_folder.empty()) return state->model_folder;
  return absl::InvalidArgumentError(
      absl::StrCat("no model folder for the tokenizer: give --model-folder, or --run-dir of a "
                   "cluster that `kvtide up` started (looked in ",
                   cli.run_dir, ")"));
}

// The model to ask for and its context.
absl::StatusOr<ModelInfo> ChooseModel(CoordinatorApi& coordinator, const GenerateOptions& options) {
  KVT_ASSIGN_OR_RETURN(const std::vector<ModelInfo> models, coordinator.Models());
  const auto names = [&] {
    return absl::StrJoin(models, ", ", [](std::string* out, const ModelInfo& model) {
      absl::StrAppend(out, model.name);
    });
  };
  if (options.model.empty() && models.size() > 1) {
    return absl::InvalidArgumentError(absl::StrCat("several models are served, choose with --model: ",
                                                   names()));
  }
  for (const ModelInfo& model : models) {
    if (options.model.empty() || model.name == options.model) return model;
  }
  // Admit says what is wrong: unknown name, or dead workers.
  ModelInfo unknown;
  unknown.name = options.model;
  return unknown;
}

struct Prompt {
  std::unique_ptr<Tokenizer> tokenizer;
  std::vector<int32_t> tokens;
  std::vector<int32_t> stop_tokens;
};

absl::StatusOr<Prompt> Encode(const std::string& folder, const std::string& text,
                              const GenerateOptions& options) {
  Prompt prompt;
  KVT_ASSIGN_OR_RETURN(prompt.tokenizer, Tokenizer::Load(folder));
  if (options.chat) {
    KVT_ASSIGN_OR_RETURN(const ChatTemplate chat, ChatTemplate::Load(folder));
    std::vector<ChatMessage> messages;
    if (options.has_system) messages.push_back({"system", options.system});
    messages.push_back({"user", text});
    KVT_ASSIGN_OR_RETURN(prompt.tokens, chat.Encode(*prompt.tokenizer, messages));
  } else {
    KVT_ASSIGN_OR_RETURN(std::vector<int32_t> body,
                         prompt.tokenizer->Encode(text, SpecialTokens::kAsText));
    prompt.tokens = prompt.tokenizer->prefix_ids();
    prompt.tokens.insert(prompt.tokens.end(), body.begin(), body.end());
  }
  if (options.ignore_eos) return prompt;
  KVT_ASSIGN_OR_RETURN(const ModelConfig config, LoadModelConfig(folder));
  prompt.stop_tokens = config.eos_ids;
  const auto turn_end = prompt.tokenizer->FindAdded("<|im_end|>");
  if (options.chat && turn_end &&
      std::find(config.eos_ids.begin(), config.eos_ids.end(), *turn_end) == config.eos_ids.end()) {
    prompt.stop_tokens.push_back(*turn_end);
  }
  return prompt;
}

// Takes SIGINT and SIGTERM on a thread of its own: cancels the session, or ends the program when
// there is nothing to cancel yet.
class Interrupts {
 public:
  Interrupts() {
    sigemptyset(&signals_);
    sigaddset(&signals_, SIGINT);
    sigaddset(&signals_, SIGTERM);
    sigaddset(&signals_, SIGUSR1);  // ours, to end the thread
    pthread_sigmask(SIG_BLOCK, &signals_, nullptr);
    thread_ = std::thread([this] { Wait(); });
  }
  ~Interrupts() {
    stop_ = true;
    pthread_kill(thread_.native_handle(), SIGUSR1);
    thread_.join();
  }
  // `session` outlives this object, or Watch(nullptr) comes first.
  void Watch(GenerateSession* session) { session_ = session; }
  // What Ctrl-C cancelled; waits for the cancelling to end.
  std::string CancelledAt() {
    MutexLock lock(mu_);
    while (cancelling_ && !cancelled_) done_.WaitFor(mu_, absl::Milliseconds(100));
    return cancelled_at_;
  }

 private:
  void Wait() {
    const timespec step = absl::ToTimespec(absl::Seconds(1));
    while (!stop_) {
      const int signal = sigtimedwait(&signals_, nullptr, &step);
      if (signal <= 0 || signal == SIGUSR1) continue;
      GenerateSession* session = session_.load();
      if (session == nullptr) _exit(kExitInterrupted);
      Cancel(*session);
    }
  }
  void Cancel(GenerateSession& session) {
    {
      MutexLock lock(mu_);
      cancelling_ = true;
    }
    std::string done = session.Cancel();
    {
      MutexLock lock(mu_);
      cancelled_at_ = std::move(done);
      cancelled_ = true;
      done_.NotifyAll();
    }
    const absl::Time deadline = RealClock::Get().Now() + kAfterCancel;
    const timespec step = absl::ToTimespec(absl::Milliseconds(500));
    while (!stop_ && RealClock::Get().Now() < deadline) {
      if (sigtimedwait(&signals_, nullptr, &step) > 0) break;  // a second Ctrl-C: at once
    }
    if (!stop_) {
      std::fprintf(stderr, "\nkvtide: cancelled at %s; the stream did not end\n",
                   cancelled_at_.c_str());
      _exit(kExitInterrupted);
    }
  }

  sigset_t signals_;
  std::thread thread_;
  std::atomic<bool> stop_{false};
  std::atomic<GenerateSession*> session_{nullptr};
  Mutex mu_;
  CondVar done_;
  bool cancelling_ ABSL_GUARDED_BY(mu_) = false;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  std::string cancelled_at_;  // written before cancelled_
};

struct Job {
  std::unique_ptr<CoordinatorApi> coordinator;
  Prompt prompt;
  GenerateRequest request;
};

absl::StatusOr<Job> Prepare(const Cli& cli, const GenerateOptions& options) {
  Job job;
  KVT_ASSIGN_OR_RETURN(job.request.fidelity, ParseFidelity(options.fidelity));
  KVT_ASSIGN_OR_RETURN(const std::string text, ReadPrompt(options));
  KVT_ASSIGN_OR_RETURN(job.coordinator, cli.Connect());
  KVT_ASSIGN_OR_RETURN(const ModelInfo model, ChooseModel(*job.coordinator, options));
  KVT_ASSIGN_OR_RETURN(const std::string folder, FindModelFolder(cli, options));
  KVT_ASSIGN_OR_RETURN(job.prompt, Encode(folder, text, options));
  GenerateRequest& request = job.request;
  request.model = model.name;
  request.tenant = options.tenant;
  request.tokens = job.prompt.tokens;
  request.stop_tokens = job.prompt.stop_tokens;
  request.sampling = SamplingParams{.temperature = options.temperature,
                                    .top_k = options.top_k,
                                    .top_p = options.top_p,
                                    .seed = options.seed};
  request.output_tokens_max = static_cast<uint32_t>(options.max_tokens);
  const uint32_t context = model.context_tokens_max;
  const auto prompt_tokens = static_cast<uint32_t>(request.tokens.size());
  if (context > prompt_tokens && request.output_tokens_max > context - prompt_tokens) {
    request.output_tokens_max = context - prompt_tokens;  // as much as the context has room for
  }
  return job;
}

}  // namespace

int RunGenerate(const Cli& cli, const GenerateOptions& options) {
  Interrupts interrupts;
  absl::StatusOr<Job> job = Prepare(cli, options);
  if (!job.ok()) return Fail(cli, job.status());
  const WorkerConnector connect{
      .prefill = [](absl::string_view at) { return ConnectPrefill(at, kCancelCallTimeout); },
      .decode = [](absl::string_view at) { return ConnectDecode(at, kCancelCallTimeout); }};
  GenerateSession session(*job->coordinator, connect, RealClock::Get());
  interrupts.Watch(&session);
  TokenStream stream(*job->prompt.tokenizer, Tokenizer::Special::kSkip);
  std::string text;
  const auto show = [&](const std::string& piece) {
    text += piece;
    if (cli.json || piece.empty()) return;
    std::fwrite(piece.data(), 1, piece.size(), stdout);
    std::fflush(stdout);
  };
  GenerateResult result;
  absl::Status status = session.Run(
      job->request, [&](int32_t token) { show(stream.Append(token)); }, &result);
  show(stream.Finish());
  std::string cancelled_at;
  const bool cancelled = session.IsCancelled();
  if (cancelled) cancelled_at = interrupts.CancelledAt();
  interrupts.Watch(nullptr);
  if (!status.ok() && !cancelled && !session.IsAdmitted()) return Fail(cli, status);
  if (cli.json) {
    GenerateReport report{.result = &result,
                          .model = job->request.model,
                          .text = text,
                          .prompt_tokens = job->request.tokens.size(),
                          .status = status,
                          .cancelled_at = cancelled_at};
    std::printf("%s\n", GenerateJson(report).c_str());
  } else {
    if (!text.empty() && text.back() != '\n') std::printf("\n");
    std::fflush(stdout);
    if (status.ok() && !options.quiet) {
      std::fprintf(stderr, "%s", FiguresForPeople(result).c_str());
    }
    if (cancelled) {
      std::fprintf(stderr, "kvtide: cancelled request %s after %zu tokens, at: %s\n",
                   absl::StrCat(absl::Hex(result.id.value(), absl::kZeroPad16)).c_str(),
                   result.tokens.size(), cancelled_at.c_str());
    } else if (!status.ok()) {
      std::fprintf(stderr, "kvtide: %s\n", std::string(status.message()).c_str());
    }
  }
  if (cancelled) return kExitInterrupted;
  return status.ok() ? kExitOk : kExitFailed;
}

}  // namespace kvt::ctl
