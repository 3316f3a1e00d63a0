// The tier as a worker or an inference engine sees it: lookup, reserve, pull, push, seal, release,
// over all stores of the cluster. It plans who is asked and combines what goes to one store into one
// burst; a StoreLink (store_link.h) holds the session and the channel of each store.
//
//   lookup  ->  pull      a prefix that exists: blocks are pinned for the ticket until Release
//   reserve ->  push ...  blocks to write: each seals when its last slice has arrived
//   Tick                  renewals, reconnects, probes
//
// Failure. A store that is dead, slow or unreachable never makes an operation of the others fail or
// wait beyond its deadline: its blocks are absent or lost, which means "compute them". A breaker
// skips it and Tick probes it in the background. When a session ended (a restart of the store, a
// lease that ran out) a new one is opened and the old one's places are lost.
//
// Owned by a worker's composition root; CallPool, Clock and transports outlive it. Thread-safe.
// Lookup, Reserve and Seal block up to the deadlines of ClientOptions; the others do not block.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/base/clock.h"
#include "kernels/base/ids.h"
#include "kvstore/client/call_pool.h"
#include "kvstore/client/client_options.h"
#include "kvstore/client/tier_types.h"
#include "kvstore/transport/transport.h"
#include "kvstore/wire/coordinator_api.h"
#include "kvstore/wire/store_api.h"

namespace kvt {

// Makes the control stub of a store at an address ("host:port").
using StoreConnector = std::function<std::shared_ptr<StoreApi>(const std::string& address)>;

struct TierClientConfig {
  NodeName worker;
  BootEpoch worker_epoch;
  ModelInfo model;  // geometry, fingerprint and numerics id of every session
  ClientOptions options;
  // Borrowed. At most one per scheme: "shm", "ucx", "loopback".
  std::vector<Transport*> transports;
  // Default: the gRPC stub (kvstore/wire/wire_rpc.h) with options.control_timeout.
  StoreConnector connect_store;
  WireVersionRange versions{};  // what this worker claims to speak; for tests
};

class TierClient {
 public:
  TierClient(TierClientConfig config, CallPool& calls, const Clock& clock);
  ~TierClient();  // Close()
  TierClient(const TierClient&) = delete;
  TierClient& operator=(const TierClient&) = delete;

  // The stores that are alive, from one caller in the order received (a restarted coordinator counts
  // its views anew). An empty view changes nothing. Connects to new ones in the background; a store
  // with a new boot epoch gets a new session; one that left keeps its session while tickets live
  // there.
  void SetView(const ClusterView& view);
  // Waits until every store of the view, and those that tickets named before the view did, has a
  // session and a channel, or `timeout`. Unavailable names
  // those that have none, and why. A worker serves without them, too.
  absl::Status WaitConnected(absl::Duration timeout);

  // Whether any store has a session and a channel now. Does not block.
  [[nodiscard]] bool IsReachable() const;

  // Finds and pins `blocks` (any of one sequence, in order) for the ticket. Asks each group's owner
  // in the ticket's placement, all at once; for what is absent there the owner in the client's
  // current view and in the previous one, and those next in order where an owner is dead, and
  // then as `reach` says. Never fails: what no store answers for is absent.
  [[nodiscard]] LookupResult Lookup(const HeldTicket& ticket, absl::Span<const TierBlock> blocks,
                                    LookupReach reach = LookupReach::kOwners);

  // Reserves room for `blocks` at their owners (or the next in order) in the ticket's placement, and
  // for `output_blocks` more whose names are not known yet: those that still fit the last group at
  // its owner, the rest divided among the placement's stores. Stores are asked in order of name, so
  // that of two callers one always goes on; a refusal leaves nothing held, unless the ticket is aged
  // (ReserveTerms). The caller tries again later: with pauses, and aged after a while.
  // ResourceExhausted (retryable): a store has no room. Unavailable: no store of the placement is
  // reachable. Others: the ticket is refused (Unauthenticated, a fenced epoch: FailedPrecondition).
  [[nodiscard]] absl::StatusOr<ReserveResult> Reserve(const HeldTicket& ticket,
                                                      absl::Span<const TierBlock> blocks,
                                                      uint32_t output_blocks, ReserveTerms terms);

  // Starts a pull or a push: one burst per store (more above kBurstPiecesMax pieces). Push makes each
  // slice's checksum where it is sent. A pull of what a store has on disk alone has it read first, and
  // takes one burst more.
  TransferId Pull(TierPull pull);
  TransferId Push(TierPush push);
  // Ends the transfer early; its `done` still comes, once. Unknown or ended: nothing.
  void Cancel(TransferId id);

  // How the pushed blocks ended. Where another writer was first, the block's place becomes the
  // winner's, pinned, and the outcome is kSealed.
  std::vector<SealOutcome> Seal(TicketRef ticket, absl::Span<PlacedBlock* const> blocks);

  // Lets go of the ticket's pins and unsealed reservations everywhere, in the background; transfers
  // of it that still run end as they may. Idempotent.
  void Release(TicketRef ticket);

  // Starts what is due by `now`: renewals (every third of a lease), reconnects, probes. Cheap;
  // called by the owner every 100 ms or so. Returns when it wants to be called next, at the latest.
  absl::Time Tick(absl::Time now);

  // How fast pulls from a store (PlacedBlock::store) came lately.
  [[nodiscard]] PullRates Rates(uint32_t store) const;
  // Name of a store by PlacedBlock::store.
  [[nodiscard]] NodeName StoreName(uint32_t store) const;
  [[nodiscard]] std::vector<StoreLinkFigures> Figures() const;

  // Closes sessions and channels; every transfer has ended when it returns. Idempotent.
  void Close();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvt
