// kvtide-decode: pulls KV from the tier, writes the answers and streams them.
// Exit codes: 0 stopped by SIGTERM or SIGINT; 1 could not start; 2 bad command line.
#include <signal.h>

#include <cstdio>
#include <cstring>
#include <ctime>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include <CLI/CLI.hpp>

#include "absl/strings/str_cat.h"
#include "decode_worker/decode_metrics.h"
#include "decode_worker/decode_options.h"
#include "decode_worker/decode_service.h"
#include "decode_worker/engine/decode_engine.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/base/log.h"
#include "kernels/model/model_host.h"
#include "kvstore/client/rpc_stubs.h"
#include "kvstore/client/worker_daemon.h"
#include "kvstore/wire/wire_rpc.h"

namespace kvt {
namespace {

constexpr absl::Duration kStopGrace = absl::Seconds(1);
constexpr absl::Duration kResumeTimeout = absl::Seconds(5);
constexpr absl::Duration kDrainPoll = absl::Milliseconds(50);

struct Options {
  WorkerDaemonOptions worker;
  ModelOptions model;
  DecodeOptions decode;
};

absl::StatusOr<Options> ReadOptions(const std::string& path) {
  KVT_ASSIGN_OR_RETURN(OptionsFile file, OptionsFile::Load(path));
  Options options;
  options.worker.kind = NodeKind::kDecode;
  options.worker.node = ReadNodeOptions(file.Table("node"));
  options.worker.tier = ReadClientOptions(file.Table("tier"));
  options.model = ReadModelOptions(file.Table("model"));
  options.decode = ReadDecodeOptions(file.Table("decode"));
  KVT_RETURN_IF_ERROR(file.Finish());
  return options;
}

// Waits for SIGTERM or SIGINT, or `timeout`; the signal or 0.
int WaitForSignal(const sigset_t& signals, absl::Duration timeout) {
  const timespec wait = absl::ToTimespec(timeout);
  const int signal = sigtimedwait(&signals, nullptr, &wait);
  return signal > 0 ? signal : 0;
}

absl::Status Run(const Options& options, const sigset_t& stop_signals) {
  KVT_RETURN_IF_ERROR(WorkerDaemon::CheckHost(options.worker));
  KVT_ASSIGN_OR_RETURN(const ModelHost host, LoadModelHost(options.model));
  KVT_ASSIGN_OR_RETURN(const auto cache, NewKvCache(host, options.decode.slots_bytes,
                                                    2 * options.decode.batch_max));
  WorkerDaemonOptions worker = options.worker;
  worker.model.name = host.name;
  worker.model.fingerprint = host.fingerprint;
  worker.model.numerics_id = host.transformer->numerics_id();
  worker.model.geometry = host.transformer->geometry();
  worker.model.context_tokens_max =
      static_cast<uint32_t>(host.transformer->config().context_tokens);
  worker.batch_max = static_cast<uint32_t>(options.decode.batch_max);
  worker.capacity_bytes = uint64_t{cache->options().slot_count} * cache->slot_bytes();
  std::optional<DigestLayout> digests;
  if (host.calibration != nullptr) {
    KVT_ASSIGN_OR_RETURN(digests, DigestLayout::Create(host.calibration->Id(),
                                                       host.calibration->DigestBytesByLayer()));
    worker.digest_geometry = digests->geometry();
  }
  KVT_ASSIGN_OR_RETURN(const auto daemon, WorkerDaemon::Create(worker));
  DecodeMetrics metrics(daemon->metrics());
  RpcStubs<PrefillApi> stubs(
      [](const std::string& address) { return ConnectPrefill(address, kResumeTimeout); });
  DecodeEngineDeps deps;
  deps.node = options.worker.node.name;
  deps.transformer = host.transformer.get();
  deps.cache = cache.get();
  deps.tier = &daemon->tier();
  deps.coordinator = &daemon->coordinator();
  deps.control = &daemon->control();
  deps.reporter = &daemon->reporter();
  deps.connect_prefill = [&stubs](const std::string& address) { return stubs.Get(address); };
  deps.metrics = &metrics;
  deps.clock = &RealClock::Get();
  if (digests.has_value()) {
    deps.calibration = host.calibration.get();
    deps.digest_layout = &*digests;
    deps.digest_tier = daemon->digest_tier();
  }
  KVT_ASSIGN_OR_RETURN(const auto engine, DecodeEngine::Create(options.decode, deps));
  DecodeService service(
      {worker.model, host.transformer->config().vocab, daemon->cluster_secret()}, daemon->gate(),
      *engine, [&daemon] { return daemon->IsFenced(); });
  KVT_ASSIGN_OR_RETURN(const auto server, ServeDecode(service, options.worker.node.listen));
  KVT_ASSIGN_OR_RETURN(const HostPort at, ParseHostPort(options.worker.node.listen));
  const std::string address = absl::StrCat(at.host, ":", server->port());
  std::thread engine_thread([&engine] { engine->Run(); });
  KVT_LOG(kInfo, options.worker.node.name, " serves ", host.name, " (",
          host.transformer->numerics_id(), ") on ", address);
  daemon->Join(address, {.load = [&engine] { return engine->Load(); },
                         .cancelled = [&engine](const std::vector<TicketId>& tickets) {
                           engine->CancelAll(tickets);
                         },
                         .drain = [&engine] { engine->Drain(); }});
  int signal = 0;
  while (signal == 0) signal = WaitForSignal(stop_signals, absl::Hours(1));
  KVT_LOG(kInfo, "stopping: ", strsignal(signal));
  daemon->AnnounceDrain();
  engine->Drain();
  const absl::Time deadline = RealClock::Get().Now() + options.decode.drain_timeout;
  while (!engine->Idle() && RealClock::Get().Now() < deadline) {
    if (WaitForSignal(stop_signals, kDrainPoll) != 0) break;  // a second signal: at once
  }
  engine->Stop();
  engine_thread.join();
  server->Shutdown(kStopGrace);
  daemon->Stop();
  return absl::OkStatus();
}

absl::Status Main(const std::string& config, const sigset_t& stop_signals) {
  KVT_ASSIGN_OR_RETURN(const Options options, ReadOptions(config));
  KVT_RETURN_IF_ERROR(InitLog("kvtide-decode", options.worker.node.log_level,
                              options.worker.node.log_file));
  return Run(options, stop_signals);
}

}  // namespace
}  // namespace kvt

int main(int argc, char** argv) {
  CLI::App app{"kvtide-decode: a decode worker of a kvtide cluster"};
  std::string config;
  app.add_option("--config", config,
                 "TOML file ([node], [model], [tier], [decode]; see docs/CONFIG.md)")
      ->required();
  app.footer("Exit codes: 0 stopped by SIGTERM or SIGINT, 1 could not start, 2 bad command line.");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  // Before any thread, so that every thread inherits the mask and only main takes them.
  sigset_t stop_signals;
  sigemptyset(&stop_signals);
  sigaddset(&stop_signals, SIGTERM);
  sigaddset(&stop_signals, SIGINT);
  sigprocmask(SIG_BLOCK, &stop_signals, nullptr);
  signal(SIGPIPE, SIG_IGN);
  const absl::Status status = kvt::Main(config, stop_signals);
  if (status.ok()) return 0;
  std::fprintf(stderr, "kvtide-decode: %s\n", std::string(status.message()).c_str());
  return 1;
}
