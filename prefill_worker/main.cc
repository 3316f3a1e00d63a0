// kvtide-prefill: computes the KV of prompts, streams it into the tier, hands over to decode.
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
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/base/log.h"
#include "kernels/model/model_host.h"
#include "kvstore/client/digest_blocks.h"
#include "kvstore/client/rpc_stubs.h"
#include "kvstore/client/worker_daemon.h"
#include "kvstore/wire/wire_rpc.h"
#include "prefill_worker/prefill_engine.h"
#include "prefill_worker/prefill_metrics.h"
#include "prefill_worker/prefill_options.h"
#include "prefill_worker/prefill_service.h"
#include "prefill_worker/trace_file.h"

namespace kvt {
namespace {

constexpr absl::Duration kStopGrace = absl::Seconds(1);
constexpr absl::Duration kHandOverTimeout = absl::Seconds(5);
constexpr absl::Duration kDrainPoll = absl::Milliseconds(50);

struct Options {
  WorkerDaemonOptions worker;
  ModelOptions model;
  PrefillOptions prefill;
};

absl::StatusOr<Options> ReadOptions(const std::string& path) {
  KVT_ASSIGN_OR_RETURN(OptionsFile file, OptionsFile::Load(path));
  Options options;
  options.worker.kind = NodeKind::kPrefill;
  options.worker.node = ReadNodeOptions(file.Table("node"));
  options.worker.tier = ReadClientOptions(file.Table("tier"));
  options.model = ReadModelOptions(file.Table("model"));
  options.prefill = ReadPrefillOptions(file.Table("prefill"));
  KVT_RETURN_IF_ERROR(file.Finish());
  return options;
}

// Waits for SIGTERM or SIGINT, or `timeout`; the signal or 0.
int WaitForSignal(const sigset_t& signals, absl::Duration timeout) {
  const timespec wait = absl::ToTimespec(timeout);
  const int signal = sigtimedwait(&signals, nullptr, &wait);
  return signal > 0 ? signal : 0;
}

// With a calibration: how digests lie in the tier, and what makes them.
struct Offload {
  std::optional<DigestLayout> digests;
  std::unique_ptr<FirstSelector> selector;
};

absl::StatusOr<Offload> MakeOffload(const Options& options, const ModelHost& host,
                                    const KvCache& cache) {
  Offload offload;
  if (host.calibration == nullptr) return offload;
  KVT_ASSIGN_OR_RETURN(offload.digests,
                       DigestLayout::Create(host.calibration->Id(),
                                            host.calibration->DigestBytesByLayer()));
  KVT_ASSIGN_OR_RETURN(offload.selector, FirstSelector::Create(*host.transformer, *host.calibration,
                                                               cache.options().blocks_per_row,
                                                               options.prefill.selection_tokens));
  return offload;
}

WorkerDaemonOptions DaemonOptions(const Options& options, const ModelHost& host,
                                  const KvCache& cache, const Offload& offload) {
  WorkerDaemonOptions worker = options.worker;
  worker.model.name = host.name;
  worker.model.fingerprint = host.fingerprint;
  worker.model.numerics_id = host.transformer->numerics_id();
  worker.model.geometry = host.transformer->geometry();
  worker.model.context_tokens_max =
      static_cast<uint32_t>(host.transformer->config().context_tokens);
  if (offload.digests.has_value()) worker.digest_geometry = offload.digests->geometry();
  worker.capacity_bytes = uint64_t{cache.options().slot_count} * cache.slot_bytes();
  return worker;
}

absl::Status Run(const Options& options, const sigset_t& stop_signals) {
  KVT_RETURN_IF_ERROR(WorkerDaemon::CheckHost(options.worker));
  KVT_ASSIGN_OR_RETURN(const ModelHost host, LoadModelHost(options.model));
  KVT_ASSIGN_OR_RETURN(const auto cache, NewKvCache(host, options.prefill.slots_bytes,
                                                    options.prefill.active_max));
  KVT_ASSIGN_OR_RETURN(const Offload offload, MakeOffload(options, host, *cache));
  const WorkerDaemonOptions worker = DaemonOptions(options, host, *cache, offload);
  KVT_ASSIGN_OR_RETURN(const auto daemon, WorkerDaemon::Create(worker));
  std::unique_ptr<TraceFile> trace;
  if (!options.prefill.trace_file.empty()) {
    KVT_ASSIGN_OR_RETURN(trace, TraceFile::Create(options.prefill.trace_file));
  }
  PrefillMetrics metrics(daemon->metrics());
  RpcStubs<DecodeApi> stubs(
      [](const std::string& address) { return ConnectDecode(address, kHandOverTimeout); });
  PrefillEngineDeps deps;
  deps.node = options.worker.node.name;
  deps.transformer = host.transformer.get();
  deps.cache = cache.get();
  deps.tier = &daemon->tier();
  deps.digest_tier = daemon->digest_tier();
  deps.digests = offload.digests.has_value() ? &*offload.digests : nullptr;
  deps.selector = offload.selector.get();
  deps.coordinator = &daemon->coordinator();
  deps.control = &daemon->control();
  deps.reporter = &daemon->reporter();
  deps.gate = &daemon->gate();
  deps.connect_decode = [&stubs](const std::string& address) { return stubs.Get(address); };
  deps.metrics = &metrics;
  deps.trace = trace.get();
  deps.clock = &RealClock::Get();
  KVT_ASSIGN_OR_RETURN(const auto engine, PrefillEngine::Create(options.prefill, deps));
  PrefillService service(
      {worker.model, host.transformer->config().vocab, daemon->cluster_secret(), deps.digests},
      daemon->gate(), *engine, [&daemon] { return daemon->IsFenced(); });
  KVT_ASSIGN_OR_RETURN(const auto server, ServePrefill(service, options.worker.node.listen));
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
  const absl::Time deadline = RealClock::Get().Now() + options.prefill.drain_timeout;
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
  KVT_RETURN_IF_ERROR(InitLog("kvtide-prefill", options.worker.node.log_level,
                              options.worker.node.log_file));
  return Run(options, stop_signals);
}

}  // namespace
}  // namespace kvt

int main(int argc, char** argv) {
  CLI::App app{"kvtide-prefill: a prefill worker of a kvtide cluster"};
  std::string config;
  app.add_option("--config", config,
                 "TOML file ([node], [model], [tier], [prefill]; see docs/CONFIG.md)")
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
  std::fprintf(stderr, "kvtide-prefill: %s\n", std::string(status.message()).c_str());
  return 1;
}
