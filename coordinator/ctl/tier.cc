// `kvtide tier`: what lies in the stores, by medium and plane; `tier purge`.
#include <algorithm>
#include <array>
#include <cstdio>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "coordinator/ctl/show.h"
#include "coordinator/ctl/table.h"
#include "kernels/base/check.h"
#include "kernels/base/units.h"
#include "kernels/layout/geometry.h"
#include "kvstore/wire/wire_rpc.h"

namespace kvt::ctl {
namespace {

using nlohmann::json;

void Print(const json& all) {
  std::printf("%s\n", all.dump(2, ' ', false, json::error_handler_t::replace).c_str());
}

json ByPlane(const std::array<uint64_t, kPlanes>& values) {
  return {{"base", values[static_cast<size_t>(Plane::kBase)]},
          {"residual", values[static_cast<size_t>(Plane::kResidual)]}};
}

std::string ByPlaneText(const std::array<uint64_t, kPlanes>& values) {
  return absl::StrCat(values[0], "/", values[1]);
}

json ToJson(const StoreStats& stats) {
  json tenants = json::array();
  for (const TenantBytes& tenant : stats.tenants) {
    tenants.push_back({{"tenant", tenant.tenant},
                       {"memory_bytes", tenant.memory_bytes},
                       {"disk_bytes", tenant.disk_bytes}});
  }
  return {{"capacity_bytes", stats.capacity_bytes},
          {"used_bytes", stats.used_bytes},
          {"resident_bytes", ByPlane(stats.resident_bytes)},
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
          {"checksum_failures", stats.checksum_failures},
          {"mismatched_blocks", stats.mismatched_blocks},
          {"lapsed_leases", stats.lapsed_leases},
          {"tenant_refused", stats.tenant_refused},
          {"index_bytes", stats.index_bytes},
          {"disk",
           {{"quota_bytes", stats.disk_quota_bytes},
            {"used_bytes", stats.disk_used_bytes},
            {"bytes", ByPlane(stats.disk_bytes)},
            {"records", ByPlane(stats.disk_records)},
            {"spill_queue_bytes", stats.spill_queue_bytes},
            {"promote_queue_bytes", stats.promote_queue_bytes},
            {"spilled", ByPlane(stats.spilled)},
            {"promoted", ByPlane(stats.promoted)},
            {"dropped", ByPlane(stats.dropped)},
            {"spill_failures", stats.spill_failures},
            {"promote_failures", stats.promote_failures},
            {"promote_retries", stats.promote_retries},
            {"spill_waits", stats.spill_waits},
            {"limit_bytes", stats.disk_limit_bytes},
            {"failing", stats.disk_failing}}},
          {"tenants", std::move(tenants)}};
}

void AddTo(StoreStats& sum, const StoreStats& one) {
  for (uint64_t StoreStats::*field :
       {&StoreStats::capacity_bytes, &StoreStats::used_bytes, &StoreStats::reserved_bytes,
        &StoreStats::writing_bytes, &StoreStats::evicting_bytes, &StoreStats::blocks,
        &StoreStats::pinned_blocks, &StoreStats::pins, &StoreStats::in_flight,
        &StoreStats::output_reserved_blocks, &StoreStats::sessions, &StoreStats::tickets,
        &StoreStats::lookups, &StoreStats::lookup_blocks, &StoreStats::hit_blocks,
        &StoreStats::base_only_blocks, &StoreStats::evicted_blocks, &StoreStats::refused,
        &StoreStats::pulled_bytes, &StoreStats::pushed_bytes, &StoreStats::checksum_failures,
        &StoreStats::mismatched_blocks, &StoreStats::lapsed_leases, &StoreStats::index_bytes,
        &StoreStats::disk_used_bytes, &StoreStats::disk_quota_bytes,
        &StoreStats::spill_queue_bytes, &StoreStats::promote_queue_bytes,
        &StoreStats::spill_failures, &StoreStats::promote_failures,
        &StoreStats::promote_retries, &StoreStats::spill_waits, &StoreStats::tenant_refused,
        &StoreStats::disk_limit_bytes}) {
    sum.*field += one.*field;
  }
  for (std::array<uint64_t, kPlanes> StoreStats::*field :
       {&StoreStats::resident_bytes, &StoreStats::disk_bytes, &StoreStats::disk_records,
        &StoreStats::spilled, &StoreStats::promoted, &StoreStats::dropped}) {
    for (size_t p = 0; p < kPlanes; ++p) (sum.*field)[p] += (one.*field)[p];
  }
  for (const TenantBytes& tenant : one.tenants) {
    const auto known =
        std::find_if(sum.tenants.begin(), sum.tenants.end(),
                     [&](const TenantBytes& t) { return t.tenant == tenant.tenant; });
    TenantBytes& to = known == sum.tenants.end() ? sum.tenants.emplace_back() : *known;
    to.tenant = tenant.tenant;
    to.memory_bytes += tenant.memory_bytes;
    to.disk_bytes += tenant.disk_bytes;
  }
  std::stable_sort(sum.tenants.begin(), sum.tenants.end(),
                   [](const TenantBytes& a, const TenantBytes& b) {
                     return a.memory_bytes + a.disk_bytes > b.memory_bytes + b.disk_bytes;
                   });
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

std::string DiskState(const StoreStats& stats) {
  if (!stats.disk_failing.empty()) return Printable(stats.disk_failing);
  if (stats.disk_limit_bytes == 0) return "ok";
  return absl::StrCat("full, at most ", FormatBytes(stats.disk_limit_bytes), " of blocks");
}

void AddDiskRow(TextTable& table, const std::string& name, const StoreStats& stats) {
  if (stats.disk_quota_bytes == 0) {
    table.Row({name, "-", "", "", "", "", "", "", "", "none"});
    return;
  }
  table.Row({name, FormatBytes(stats.disk_quota_bytes), FormatBytes(stats.disk_used_bytes),
             FormatBytes(stats.disk_bytes[0]), FormatBytes(stats.disk_bytes[1]),
             ByPlaneText(stats.spilled), ByPlaneText(stats.promoted), ByPlaneText(stats.dropped),
             absl::StrCat(FormatBytes(stats.spill_queue_bytes), "/",
                          FormatBytes(stats.promote_queue_bytes)),
             DiskState(stats)});
}

void PrintTenants(const StoreStats& sum) {
  const bool named = std::any_of(sum.tenants.begin(), sum.tenants.end(),
                                 [](const TenantBytes& t) { return !t.tenant.empty(); });
  if (!named) return;
  TextTable table({"TENANT", ">MEMORY", ">DISK"});
  for (const TenantBytes& tenant : sum.tenants) {
    table.Row({tenant.tenant.empty() ? "-" : Printable(tenant.tenant),
               FormatBytes(tenant.memory_bytes), FormatBytes(tenant.disk_bytes)});
  }
  std::printf("\n%s", table.Render().c_str());
}

}  // namespace

int RunTier(const Cli& cli) {
  const auto coordinator = cli.Connect();
  if (!coordinator.ok()) return Fail(cli, coordinator.status());
  const auto view = (*coordinator)->View();
  if (!view.ok()) return Fail(cli, view.status());
  json all = {{"view_version", view->version}, {"stores", json::array()}};
  TextTable table({"STORE", ">CAPACITY", ">USED", ">BASE", ">RESIDUAL", ">RESERVED", ">WRITING",
                   ">BLOCKS", ">PINNED", ">IN FLIGHT", ">HITS", ">EVICTED", ">PULLED", ">PUSHED"});
  TextTable disk({"DISK OF", ">QUOTA", ">USED", ">BASE", ">RESIDUAL", ">SPILLED B/R",
                  ">PROMOTED B/R", ">DROPPED B/R", ">WRITING/READING", "STATE"});
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
    AddDiskRow(disk, store.name, *stats);
    AddTo(sum, *stats);
  }
  all["sum"] = ToJson(sum);
  AddTierRow(table, "sum", sum);
  if (cli.json) {
    Print(all);
  } else {
    std::printf("%s", table.Render().c_str());
    if (sum.disk_quota_bytes > 0) {
      AddDiskRow(disk, "sum", sum);
      std::printf("\n%s", disk.Render().c_str());
    }
    PrintTenants(sum);
    for (const std::string& text : unreachable) std::printf("%s\n", Printable(text).c_str());
  }
  return unreachable.empty() ? kExitOk : kExitFailed;
}

int RunTierPurge(const Cli& cli, const PurgeOptions& options) {
  const auto coordinator = cli.Connect();
  if (!coordinator.ok()) return Fail(cli, coordinator.status());
  // All stores known, draining and dead ones too: what those keep is not gone.
  const auto status = (*coordinator)->Status();
  if (!status.ok()) return Fail(cli, status.status());
  PurgeTenantRequest request;
  request.tenant = options.tenant;
  request.wait = absl::Seconds(options.wait_s);
  json all = {{"tenant", options.tenant}, {"stores", json::array()}};
  TextTable table({"STORE", ">BLOCKS", ">STILL IN MEMORY", "DISK"});
  std::vector<std::string> problems;
  uint64_t blocks = 0;
  for (const NodeStatus& node : status->nodes) {
    if (node.kind != NodeKind::kStore) continue;
    absl::StatusOr<PurgeTenantReply> reply = absl::UnavailableError("the store is dead");
    if (node.state != "dead") {
      reply = ConnectStore(node.control_address, request.wait + kCallTimeout)->PurgeTenant(request);
    }
    if (!reply.ok()) {
      problems.push_back(absl::StrCat(node.name, ": ", reply.status().message()));
      all["stores"].push_back(
          {{"name", node.name}, {"error", std::string(reply.status().message())}});
      continue;
    }
    blocks += reply->blocks;
    if (reply->memory_bytes > 0) {
      problems.push_back(absl::StrCat(node.name, ": ", FormatBytes(reply->memory_bytes),
                                      " are in use by running requests and go with them"));
    }
    if (!reply->disk_reclaimed) {
      problems.push_back(absl::StrCat(node.name, ": its disk is not done yet"));
    }
    all["stores"].push_back({{"name", node.name},
                             {"blocks", reply->blocks},
                             {"memory_bytes", reply->memory_bytes},
                             {"disk_reclaimed", reply->disk_reclaimed}});
    table.Row({node.name, absl::StrCat(reply->blocks), FormatBytes(reply->memory_bytes),
               reply->disk_reclaimed ? "clean" : "not yet"});
  }
  all["blocks"] = blocks;
  all["complete"] = problems.empty();
  if (cli.json) {
    Print(all);
  } else {
    std::printf("%s", table.Render().c_str());
    for (const std::string& text : problems) std::printf("%s\n", Printable(text).c_str());
    if (!problems.empty()) std::printf("not complete: run it again\n");
  }
  return problems.empty() ? kExitOk : kExitFailed;
}

}  // namespace kvt::ctl
