#include "coordinator/ctl/show.h"

#include <cstdio>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "coordinator/core/request_table.h"
#include "coordinator/ctl/table.h"
#include "kernels/base/check.h"
#include "kernels/base/units.h"
#include "kvstore/wire/fidelity.h"
#include "kvstore/wire/wire_rpc.h"

namespace kvt::ctl {
namespace {

using nlohmann::json;

const char* KindName(NodeKind kind) {
  switch (kind) {
    case NodeKind::kStore: return "store";
    case NodeKind::kPrefill: return "prefill";
    case NodeKind::kDecode: return "decode";
    case NodeKind::kClient: return "client";
  }
  return "unknown";
}

double Seconds(absl::Duration d) { return absl::ToDoubleSeconds(d); }

void Print(const json& all) {
  std::printf("%s\n", all.dump(2, ' ', false, json::error_handler_t::replace).c_str());
}

json ToJson(const TokenCounts& counts) {
  return {{"exact", counts.exact}, {"base", counts.base}, {"sparse", counts.sparse}};
}

json ToJson(const NodeStatus& node) {
  json out = {{"kind", KindName(node.kind)},
              {"name", node.name},
              {"state", node.state},
              {"address", node.control_address},
              {"pid", node.pid},
              {"epoch", absl::StrFormat("%016x", node.epoch.value())},
              {"since_heartbeat_s", Seconds(node.since_heartbeat)},
              {"capacity_bytes", node.capacity_bytes}};
  if (!node.load.condition.empty()) out["condition"] = node.load.condition;
  if (node.state == "starting") out["starting_percent"] = node.load.starting_percent;
  if (node.kind == NodeKind::kStore) return out;
  out["load"] = {{"running", node.load.running},
                 {"waiting", node.load.waiting},
                 {"slots_free", node.load.slots_free},
                 {"slots_total", node.load.slots_total},
                 {"tokens_done", node.load.tokens_done}};
  out["model"] = {{"name", node.model.name},
                  {"fingerprint", node.model.fingerprint},
                  {"numerics_id", node.model.numerics_id},
                  {"geometry", node.model.geometry.ToString()},
                  {"context_tokens_max", node.model.context_tokens_max}};
  return out;
}

std::string StateText(const NodeStatus& node) {
  if (node.state != "starting") return node.state;
  return absl::StrFormat("starting %d %%", node.load.starting_percent);
}

std::string NodeTable(const std::vector<NodeStatus>& nodes) {
  TextTable table({"NODE", "KIND", "STATE", ">PID", "ADDRESS", ">RUNNING", ">WAITING",
                   ">SLOTS FREE", ">CAPACITY", ">HEARD"});
  for (const NodeStatus& node : nodes) {
    const bool worker = node.kind != NodeKind::kStore && node.state != "dead";
    table.Row({node.name, KindName(node.kind), StateText(node), absl::StrCat(node.pid),
               node.control_address, worker ? absl::StrCat(node.load.running) : "",
               worker ? absl::StrCat(node.load.waiting) : "",
               worker ? absl::StrCat(node.load.slots_free, "/", node.load.slots_total) : "",
               node.capacity_bytes > 0 ? FormatBytes(node.capacity_bytes) : "",
               absl::StrFormat("%.1f s ago", Seconds(node.since_heartbeat))});
  }
  return table.Render();
}

json ToJson(const RequestStatus& request) {
  json out = {{"id", FormatTicketId(request.id)},
              {"epoch", request.epoch.value()},
              {"model", request.model},
              {"tenant", request.tenant},
              {"phase", std::string(RequestPhaseName(request.phase))},
              {"prefill_worker", request.prefill_worker},
              {"decode_worker", request.decode_worker},
              {"prompt_tokens", request.prompt_tokens},
              {"output_tokens", request.output_tokens},
              {"fidelity", std::string(FidelityName(request.fidelity))},
              {"class", std::string(RequestClassName(request.request_class))},
              {"computed", ToJson(request.computed)},
              {"age_s", Seconds(request.age)},
              {"error", request.error}};
  return out;
}

}  // namespace

int RunStatus(const Cli& cli) {
  const auto address = cli.CoordinatorAddress();
  if (!address.ok()) return Fail(cli, address.status());
  const auto status = ConnectCoordinator(*address, kCallTimeout)->Status();
  if (!status.ok()) return Fail(cli, status.status());
  if (cli.json) {
    json all = {{"coordinator",
                 {{"address", *address},
                  {"epoch", status->coordinator_epoch},
                  {"uptime_s", Seconds(status->uptime)}}},
                {"view_version", status->view_version},
                {"requests",
                 {{"admitted", status->admitted},
                  {"running", status->running},
                  {"done", status->done},
                  {"failed", status->failed},
                  {"cancelled", status->cancelled},
                  {"refused", status->refused}}},
                {"nodes", json::array()},
                {"events", json::array()}};
    for (const NodeStatus& node : status->nodes) all["nodes"].push_back(ToJson(node));
    for (const ClusterEvent& event : status->events) {
      all["events"].push_back({{"unix_ms", event.unix_ms}, {"text", event.text}});
    }
    Print(all);
    return kExitOk;
  }
  std::printf("coordinator %s, up %s, cluster view %d\n", address->c_str(),
              absl::FormatDuration(absl::Trunc(status->uptime, absl::Seconds(1))).c_str(),
              static_cast<int>(status->view_version));
  std::printf("requests: %d running, %d done, %d failed, %d cancelled, %d refused\n\n",
              static_cast<int>(status->running), static_cast<int>(status->done),
              static_cast<int>(status->failed), static_cast<int>(status->cancelled),
              static_cast<int>(status->refused));
  std::printf("%s", NodeTable(status->nodes).c_str());
  if (!status->events.empty()) std::printf("\nlatest events\n");
  const size_t from = status->events.size() > 20 ? status->events.size() - 20 : 0;
  for (size_t i = from; i < status->events.size(); ++i) {
    const ClusterEvent& event = status->events[i];
    std::printf("  %s  %s\n",
                absl::FormatTime("%H:%M:%E1S", absl::FromUnixMillis(event.unix_ms),
                                 absl::LocalTimeZone())
                    .c_str(),
                Printable(event.text).c_str());
  }
  return kExitOk;
}

int RunNodes(const Cli& cli) {
  const auto coordinator = cli.Connect();
  if (!coordinator.ok()) return Fail(cli, coordinator.status());
  const auto status = (*coordinator)->Status();
  if (!status.ok()) return Fail(cli, status.status());
  if (!cli.json) {
    std::printf("%s", NodeTable(status->nodes).c_str());
    return kExitOk;
  }
  json all = {{"nodes", json::array()}};
  for (const NodeStatus& node : status->nodes) all["nodes"].push_back(ToJson(node));
  Print(all);
  return kExitOk;
}

int RunRequests(const Cli& cli, const RequestsOptions& options) {
  const auto coordinator = cli.Connect();
  if (!coordinator.ok()) return Fail(cli, coordinator.status());
  const auto requests = (*coordinator)->Requests();
  if (!requests.ok()) return Fail(cli, requests.status());
  json all = {{"requests", json::array()}};
  TextTable table({"REQUEST", "PHASE", "MODEL", "FIDELITY", "CLASS", "PREFILL", "DECODE", ">PROMPT",
                   ">OUTPUT", ">EXACT/BASE/SPARSE", ">AGE", "ERROR"});
  int finished = 0;
  for (const RequestStatus& request : *requests) {
    finished += IsFinal(request.phase) ? 1 : 0;
    if (options.limit > 0 && finished > options.limit) break;
    all["requests"].push_back(ToJson(request));
    table.Row({FormatTicketId(request.id), std::string(RequestPhaseName(request.phase)),
               request.model, std::string(FidelityName(request.fidelity)),
               std::string(RequestClassName(request.request_class)), request.prefill_worker,
               request.decode_worker,
               absl::StrCat(request.prompt_tokens), absl::StrCat(request.output_tokens),
               absl::StrCat(request.computed.exact, "/", request.computed.base, "/",
                            request.computed.sparse),
               absl::StrFormat("%.1f s", Seconds(request.age)), request.error});
  }
  if (cli.json) {
    Print(all);
  } else {
    std::printf("%s", table.Render().c_str());
  }
  return kExitOk;
}

}  // namespace kvt::ctl
