// What the pure core is told: durations and bounds. Read from [coordinator] in main.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "absl/time/time.h"
#include "kvstore/wire/ticket.h"

namespace kvt {

// What a tenant's requests get and may ask for.
struct TenantOptions {
  Fidelity fidelity = Fidelity::kExact;   // of a request that names none
  Fidelity loosest = Fidelity::kSparse;   // a request that names a looser one is refused
};

struct CoordinatorCoreOptions {
  absl::Duration heartbeat_interval = absl::Milliseconds(500);
  // Silence after which a node is declared dead. With the tick it must stay under 3 s (DESIGN 7).
  absl::Duration death_after = absl::Seconds(2);
  // A worker that could not renew for this long fences itself.
  absl::Duration lease = absl::Seconds(10);
  // A grant is void unless presented within this.
  absl::Duration present_within = absl::Seconds(5);
  // A live worker that does not list a ticket it holds for so long has lost it.
  absl::Duration lost_after = absl::Seconds(30);
  // Sparse requests of more tokens than this, output included, are of the offloaded class.
  uint32_t offload_from_tokens = 4096;
  std::map<std::string, TenantOptions> tenants;
  TenantOptions other_tenants;  // those that are not listed
  // Requests admitted and not finished.
  int request_limit = 1024;
  // View versions of a restarted coordinator go on from here: the start in Unix seconds.
  uint64_t view_version_base = 1;
  // Upper 24 bits of every ticket id: differs between starts of the coordinator.
  uint32_t ticket_boot = 1;
};

// Finished requests that stay visible.
inline constexpr size_t kRequestHistoryMax = 4096;
// Events that `kvtide status` can show.
inline constexpr size_t kEventsMax = 256;
// Dead nodes that stay visible.
inline constexpr size_t kDeadNodesMax = 64;
// Nodes, dead ones included.
inline constexpr size_t kNodesMax = 1024;
// How long a ticket's end is repeated to the nodes it touched.
inline constexpr absl::Duration kEndNoticeFor = absl::Seconds(3);
// A gap between ticks from which on the coordinator itself has stalled: nodes are not to blame.
inline constexpr absl::Duration kStallFrom = absl::Seconds(1);
inline constexpr size_t kNodeNameBytesMax = 64;
inline constexpr size_t kAddressBytesMax = 256;
inline constexpr size_t kTenantBytesMax = 128;
// Listed in the configuration.
inline constexpr size_t kTenantsMax = 4096;
inline constexpr size_t kErrorBytesMax = 512;

}  // namespace kvt
