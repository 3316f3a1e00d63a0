#include "coordinator/coordinator_options.h"

#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/limits.h"
#include "kernels/base/options.h"
#include "kvstore/wire/fidelity.h"

namespace kvt {
namespace {

void ReadLogLevel(OptionsTable& table, LogLevel* out) {
  std::string level;
  table.Get("log_level", &level);
  if (level.empty() || level == "info") return;
  if (level == "debug") {
    *out = LogLevel::kDebug;
  } else if (level == "warning") {
    *out = LogLevel::kWarning;
  } else if (level == "error") {
    *out = LogLevel::kError;
  } else {
    table.Problem("log_level", "expected \"debug\", \"info\", \"warning\" or \"error\"");
  }
}

void TakeFidelity(OptionsTable& table, absl::string_view key, const std::string& name,
                  Fidelity* out) {
  if (const std::optional<Fidelity> fidelity = FidelityNamed(name); fidelity.has_value()) {
    *out = *fidelity;
  } else {
    table.Problem(key, "expected \"exact\", \"elastic\" or \"sparse\"");
  }
}

void ReadTenant(OptionsTable& table, TenantOptions* out) {
  std::string fidelity(FidelityName(out->fidelity));
  std::string loosest(FidelityName(out->loosest));
  table.Get("fidelity", &fidelity);
  table.Get("loosest_fidelity", &loosest);
  TakeFidelity(table, "fidelity", fidelity, &out->fidelity);
  TakeFidelity(table, "loosest_fidelity", loosest, &out->loosest);
  if (out->fidelity > out->loosest) {
    table.Problem("fidelity", "is looser than loosest_fidelity");
  }
}

void ReadTenants(OptionsTable& table, CoordinatorCoreOptions* core) {
  ReadTenant(table, &core->other_tenants);
  for (OptionsTable& entry : table.Tables("tenants")) {
    std::string name;
    TenantOptions tenant = core->other_tenants;
    entry.Require("name", &name);
    ReadTenant(entry, &tenant);
    if (!core->tenants.emplace(name, tenant).second) {
      entry.Problem("name", absl::StrCat("tenant \"", name, "\" is listed twice"));
    }
  }
  if (core->tenants.size() > kTenantsMax) {
    table.Problem("tenants", absl::StrCat(core->tenants.size(), ", at most ", kTenantsMax));
  }
}

}  // namespace

absl::StatusOr<CoordinatorOptions> ReadCoordinatorOptions(OptionsFile& file) {
  CoordinatorOptions options;
  OptionsTable node = file.Table("node");
  ReadLogLevel(node, &options.log_level);
  node.Get("log_file", &options.log_file);
  node.Get("metrics_listen", &options.metrics_listen);

  OptionsTable table = file.Table("coordinator");
  CoordinatorCoreOptions& core = options.core;
  table.Get("listen", &options.listen);
  table.Get("address_file", &options.address_file);
  table.Get("ticket_key_file", &options.ticket_key_file);
  table.Get("heartbeat_interval", &core.heartbeat_interval, absl::Milliseconds(50),
            absl::Seconds(1));
  // With the longest heartbeat and tick the declaration of a death stays under 3 s.
  table.Get("death_after", &core.death_after, absl::Milliseconds(200), absl::Milliseconds(2500));
  table.Get("lease", &core.lease, absl::Seconds(1), absl::Minutes(1));
  table.Get("present_within", &core.present_within, absl::Milliseconds(100), absl::Minutes(1));
  table.Get("lost_after", &core.lost_after, absl::Seconds(2), absl::Minutes(10));
  table.Get("request_limit", &core.request_limit, 1, 64 * 1024);
  int offload_from = static_cast<int>(core.offload_from_tokens);
  table.Get("offload_from_tokens", &offload_from, 0, kSequenceTokensMax);
  core.offload_from_tokens = static_cast<uint32_t>(offload_from);
  ReadTenants(table, &core);
  if (core.death_after < 2 * core.heartbeat_interval) {
    table.Problem("death_after",
                  absl::StrCat("must be at least two heartbeat_interval (",
                               absl::FormatDuration(core.heartbeat_interval), ")"));
  }
  KVT_RETURN_IF_ERROR(file.Finish());
  return options;
}

}  // namespace kvt
