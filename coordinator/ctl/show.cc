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

const char* FidelityName(Fidelity fidelity) {
  switch (fidelity) {
    case Fidelity::kExact: return "exact";
    case Fidelity::kElastic: return "elastic";
    case Fidelity::kSparse: return "sparse";
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

json ToJson(const StoreStats& stats) {
  return {{"capacity_bytes", stats.capacity_bytes},
          {"used_bytes", stats.used_bytes},
          {"resident_bytes",
           {{"base", stats.resident_bytes[static_cast<size_t>(Plane::kBase)]},
            {"residual", stats.resident_bytes[static_cast<size_t>(Plane::kResidual)]}}},
          {"reserved_bytes", stats.reserved_bytes},
          {"writing_bytes", stats.writing_bytes},
          {"evicting_bytes", stats.evicting_bytes},
          {"blocks", stats.blocks},
          {"pinned_blocks", stats.pinned_blocks},
          {"pins", stats.pins},
          {"in_flight", stats.in_flight},
          {"output_reserved_blocks", stats.output_reserved_blocks},
          {"sessions", stats.sessions},
          {"tickets", stats.tickets},
          {"lookups", stats.lookups},
          {"lookup_blocks", stats.lookup_blocks},
          {"hit_blocks", stats.hit_blocks},
          {"base_only_blocks", stats.base_only_blocks},
          {"evicted_blocks", stats.evicted_blocks},
          {"refused", stats.refused},
          {"pulled_bytes", stats.pulled_bytes},
          {"pushed_bytes", stats.pushed_bytes},
          {"checksum_failures", stats.checksum_failures}};
}

void AddTo(StoreStats& sum, const StoreStats& one) {
  for (uint64_t StoreStats::*field :
       {&StoreStats::capacity_bytes, &StoreStats::used_bytes, &StoreStats::reserved_bytes,
        &StoreStats::writing_bytes, &StoreStats::evicting_bytes, &StoreStats::blocks,
        &StoreStats::pinned_blocks, &StoreStats::pins, &StoreStats::in_flight,
        &StoreStats::output_reserved_blocks, &StoreStats::sessions, &StoreStats::tickets,
        &StoreStats::lookups, &StoreStats::lookup_blocks, &StoreStats::hit_blocks,
        &StoreStats::base_only_blocks, &StoreStats::evicted_blocks, &StoreStats::refused,
        &StoreStats::pulled_bytes, &StoreStats::pushed_bytes, &StoreStats::checksum_failures}) {
    sum.*field += one.*field;
  }
  for (size_t p = 0; p < sum.resident_bytes.size(); ++p) {
    sum.resident_bytes[p] += one.resident_bytes[p];
  }
}

std::string HitText(const StoreStats& stats) {
  if (stats.lookup_blocks == 0) return "-";
  return absl::StrFormat("%d/%d (%.0f %%)", stats.hit_blocks, stats.lookup_blocks,
                         100.0 * static_cast<double>(stats.hit_blocks) /
                             static_cast<double>(stats.lookup_blocks));
}

void AddTierRow(TextTable& table, const std::string& name, const StoreStats& stats) {
  table.Row({name, FormatBytes(stats.capacity_bytes), FormatBytes(stats.used_bytes),
             FormatBytes(stats.resident_bytes[0]), FormatBytes(stats.resident_bytes[1]),
             FormatBytes(stats.reserved_bytes), FormatBytes(stats.writing_bytes),
             absl::StrCat(stats.blocks), absl::StrCat(stats.pinned_blocks),
             absl::StrCat(stats.in_flight), HitText(stats), absl::StrCat(stats.evicted_blocks),
             FormatBytes(stats.pulled_bytes), FormatBytes(stats.pushed_bytes)});
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
              {"fidelity", FidelityName(request.fidelity)},
              {"class",
               request.request_class == RequestClass::kResident ? "resident" : "offloaded"},
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

int RunTier(const Cli& cli) {
  const auto coordinator = cli.Connect();
  if (!coordinator.ok()) return Fail(cli, coordinator.status());
  const auto view = (*coordinator)->View();
  if (!view.ok()) return Fail(cli, view.status());
  json all = {{"view_version", view->version}, {"stores", json::array()}};
  TextTable table({"STORE", ">CAPACITY", ">USED", ">BASE", ">RESIDUAL", ">RESERVED", ">WRITING",
                   ">BLOCKS", ">PINNED", ">IN FLIGHT", ">HITS", ">EVICTED", ">PULLED", ">PUSHED"});
  StoreStats sum;
  std::vector<std::string> unreachable;
  for (const StoreRef& store : view->stores) {
    const auto stats = ConnectStore(store.control_address, kCallTimeout)->Stats();
    if (!stats.ok()) {
      unreachable.push_back(absl::StrCat(store.name, ": ", stats.status().message()));
      all["stores"].push_back(
          {{"name", store.name}, {"error", std::string(stats.status().message())}});
      continue;
    }
    json entry = ToJson(*stats);
    entry["name"] = store.name;
    entry["address"] = store.control_address;
    all["stores"].push_back(std::move(entry));
    AddTierRow(table, store.name, *stats);
    AddTo(sum, *stats);
  }
  all["sum"] = ToJson(sum);
  AddTierRow(table, "sum", sum);
  if (cli.json) {
    Print(all);
  } else {
    std::printf("%s", table.Render().c_str());
    for (const std::string& text : unreachable) std::printf("%s\n", Printable(text).c_str());
  }
  return unreachable.empty() ? kExitOk : kExitFailed;
}

int RunRequests(const Cli& cli, const RequestsOptions& options) {
  const auto coordinator = cli.Connect();
  if (!coordinator.ok()) return Fail(cli, coordinator.status());
  const auto requests = (*coordinator)->Requests();
  if (!requests.ok()) return Fail(cli, requests.status());
  json all = {{"requests", json::array()}};
  TextTable table({"REQUEST", "PHASE", "MODEL", "PREFILL", "DECODE", ">PROMPT", ">OUTPUT",
                   ">EXACT/BASE/SPARSE", ">AGE", "ERROR"});
  int finished = 0;
  for (const RequestStatus& request : *requests) {
    finished += IsFinal(request.phase) ? 1 : 0;
    if (options.limit > 0 && finished > options.limit) break;
    all["requests"].push_back(ToJson(request));
    table.Row({FormatTicketId(request.id), std::string(RequestPhaseName(request.phase)),
               request.model, request.prefill_worker, request.decode_worker,
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
