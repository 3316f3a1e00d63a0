// kvtide-coordinator: membership, admission and grants of one cluster.
// Exit codes: 0 stopped by SIGTERM or SIGINT; 1 could not start; 2 bad command line.
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <memory>
#include <string>

#include <CLI/CLI.hpp>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "coordinator/coordinator_metrics.h"
#include "coordinator/coordinator_options.h"
#include "coordinator/coordinator_service.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/base/log.h"
#include "kernels/base/metrics.h"
#include "kvstore/wire/wire_rpc.h"

namespace kvt {
namespace {

constexpr absl::Duration kTickInterval = absl::Milliseconds(250);
constexpr uint64_t kTicksPerObservation = 4;
constexpr absl::Duration kStopGrace = absl::Seconds(1);

absl::StatusOr<std::unique_ptr<TicketSigner>> MakeSigner(const std::string& path) {
  if (path.empty()) return TicketSigner::Generate();
  return TicketSigner::LoadOrCreate(path);
}

// Splits "host:port".
absl::Status SplitAddress(const std::string& address, std::string* host, int* port) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos || !absl::SimpleAtoi(address.substr(colon + 1), port) ||
      *port < 0 || *port > 65535) {
    return absl::InvalidArgumentError(absl::StrCat("\"", address, "\": expected \"host:port\""));
  }
  *host = address.substr(0, colon);
  return absl::OkStatus();
}

// Appears whole or not at all.
absl::Status WriteAddressFile(const std::string& path, const std::string& address) {
  const std::string temporary = path + ".new";
  std::ofstream out(temporary, std::ios::trunc);
  out << address << "\n";
  out.close();
  if (!out || std::rename(temporary.c_str(), path.c_str()) != 0) {
    return absl::UnavailableError(absl::StrCat("address_file ", path, ": ", std::strerror(errno)));
  }
  return absl::OkStatus();
}

absl::Status Run(const CoordinatorOptions& options, const sigset_t& stop_signals) {
  CoordinatorCoreOptions core = options.core;
  const absl::Time unix_start = absl::Now();
  core.view_version_base = static_cast<uint64_t>(absl::ToUnixSeconds(unix_start));
  core.ticket_boot = static_cast<uint32_t>(core.view_version_base & 0xffffff);
  std::string host;
  int port = 0;
  KVT_RETURN_IF_ERROR(SplitAddress(options.listen, &host, &port));
  KVT_ASSIGN_OR_RETURN(auto signer, MakeSigner(options.ticket_key_file));
  CoordinatorService service(core, RealClock::Get(), unix_start, std::move(signer));
  MetricsRegistry registry;
  CoordinatorMetrics metrics(registry);
  if (!options.metrics_listen.empty()) {
    std::string metrics_host;
    int metrics_port = 0;
    KVT_RETURN_IF_ERROR(SplitAddress(options.metrics_listen, &metrics_host, &metrics_port));
    KVT_ASSIGN_OR_RETURN(metrics_port, registry.Serve(metrics_host, metrics_port));
    KVT_LOG(kInfo, "metrics on ", metrics_host, ":", metrics_port);
  }
  KVT_ASSIGN_OR_RETURN(auto server, ServeCoordinator(service, options.listen));
  const std::string address = absl::StrCat(host, ":", server->port());
  if (!options.address_file.empty()) {
    KVT_RETURN_IF_ERROR(WriteAddressFile(options.address_file, address));
  }
  KVT_LOG(kInfo, "listening on ", address);
  for (uint64_t ticks = 0;; ++ticks) {
    const absl::Time now = RealClock::Get().Now();
    const timespec tick = absl::ToTimespec(NextOnGrid(now, kTickInterval) - now);
    const int signal = sigtimedwait(&stop_signals, nullptr, &tick);
    if (signal > 0) {
      KVT_LOG(kInfo, "stopping: ", strsignal(signal));
      break;
    }
    service.Tick();
    if (ticks % kTicksPerObservation != 0) continue;
    if (const auto status = service.Status(); status.ok()) metrics.Observe(*status);
  }
  service.StopAdmitting();
  server->Shutdown(kStopGrace);
  if (!options.address_file.empty()) unlink(options.address_file.c_str());
  return absl::OkStatus();
}

absl::Status Main(const std::string& config, const sigset_t& stop_signals) {
  CoordinatorOptions options;
  if (config.empty()) {
    KVT_ASSIGN_OR_RETURN(OptionsFile file, OptionsFile::Parse("", "defaults"));
    KVT_ASSIGN_OR_RETURN(options, ReadCoordinatorOptions(file));
  } else {
    KVT_ASSIGN_OR_RETURN(OptionsFile file, OptionsFile::Load(config));
    KVT_ASSIGN_OR_RETURN(options, ReadCoordinatorOptions(file));
  }
  KVT_RETURN_IF_ERROR(InitLog("kvtide-coordinator", options.log_level, options.log_file));
  return Run(options, stop_signals);
}

}  // namespace
}  // namespace kvt

int main(int argc, char** argv) {
  CLI::App app{"kvtide-coordinator: membership, admission and grants of one kvtide cluster"};
  std::string config;
  app.add_option("--config", config, "TOML file ([node], [coordinator]; see docs/CONFIG.md)");
  app.footer("Exit codes: 0 stopped by SIGTERM or SIGINT, 1 could not start, 2 bad command line.");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  // Before any thread, so that every thread inherits the mask and only the main loop takes them.
  sigset_t stop_signals;
  sigemptyset(&stop_signals);
  sigaddset(&stop_signals, SIGTERM);
  sigaddset(&stop_signals, SIGINT);
  sigprocmask(SIG_BLOCK, &stop_signals, nullptr);
  signal(SIGPIPE, SIG_IGN);
  const absl::Status status = kvt::Main(config, stop_signals);
  if (status.ok()) return 0;
  std::fprintf(stderr, "kvtide-coordinator: %s\n", std::string(status.message()).c_str());
  return 1;
}
