// All tickets of this coordinator: where each request stands, who holds it, under which epoch, and a
// bounded history of the finished ones. Pure: time is an argument (monotonic). Not thread-safe;
// owned by Cluster.
//
// Invariants:
//   R1  done, failed and cancelled are final.
//   R2  Within an epoch the phase only rises; an update of a lower epoch changes nothing.
//   R3  admitted = running + done + failed + cancelled (adopted tickets count as admitted).
//   R4  The debits of a worker equal its running tickets (and their prompt tokens).
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "coordinator/core/core_options.h"
#include "kvstore/wire/coordinator_api.h"
#include "kvstore/wire/ticket.h"

namespace kvt {

struct RequestRecord {
  Ticket ticket;  // as granted last
  RequestPhase phase = RequestPhase::kAdmitted;
  absl::Time admitted;
  absl::Time ended;
  absl::Time seen;         // last sign of life from its holder
  absl::Time presented_by;  // kAdmitted: fails when not presented until then
  // kHandOver whose one side died: fails unless placed again or reported decoding until then.
  absl::Time hand_over_by = absl::InfiniteFuture();
  std::string hand_over_error;
  TokenCounts computed;
  uint64_t output_tokens = 0;
  std::string error;
  TicketEpoch regranted_from;  // zero: not regranted
};

bool IsFinal(RequestPhase phase);
absl::string_view RequestPhaseName(RequestPhase phase);
std::string FormatTicketId(TicketId id);  // 16 hex digits

// What a worker was given and has not finished.
struct Debit {
  int tickets = 0;
  uint64_t prompt_tokens = 0;
};

struct RequestCounts {
  uint64_t admitted = 0, running = 0, done = 0, failed = 0, cancelled = 0, refused = 0;
};

class RequestTable {
 public:
  explicit RequestTable(const CoordinatorCoreOptions& options) : options_(options) {}

  // The next id of this boot.
  [[nodiscard]] TicketId NextId();
  // A new request, or one that another boot of the coordinator granted.
  RequestRecord& Insert(absl::Time now, const Ticket& ticket, RequestPhase phase);
  [[nodiscard]] RequestRecord* Find(TicketId id);  // null: unknown or forgotten
  // True when an id of this boot is not in the table any more, so it is over.
  [[nodiscard]] bool IsForgotten(TicketId id) const;

  // Moves to `phase` with the ticket as regranted or placed, moving debits with it.
  void Grant(absl::Time now, RequestRecord& record, const Ticket& ticket, RequestPhase phase);
  // Applies a worker's report; false when it is stale or not from the holder.
  bool Update(absl::Time now, const TicketUpdate& update);
  void End(absl::Time now, RequestRecord& record, RequestPhase phase, absl::string_view error);
  // A holder listed these in its heartbeat.
  void Seen(absl::Time now, const NodeName& node, const std::vector<TicketRef>& tickets);
  // Fails what was not presented in time, and what a live holder lost. Ids that failed.
  std::vector<TicketId> Tick(absl::Time now);
  void Extend(absl::Duration stall);
  void CountRefused() { ++counts_.refused; }

  // `worker` is gone. Fails what it held; a request in hand-over may still be saved by the other side
  // and gets present_within for it. Returns how many failed at once.
  int WorkerGone(absl::Time now, const NodeName& worker, absl::string_view error);
  [[nodiscard]] Debit DebitOf(const NodeName& worker) const;
  // Tickets of `node` that ended in failure or cancellation lately, or that it listed and are over.
  [[nodiscard]] std::vector<TicketId> EndedFor(absl::Time now, const NodeName& node,
                                               const std::vector<TicketRef>& listed) const;
  [[nodiscard]] const RequestCounts& counts() const { return counts_; }
  // Running first, then the finished, latest first.
  [[nodiscard]] std::vector<RequestStatus> List(absl::Time now) const;

 private:
  void AddDebit(const RequestRecord& record, int sign);

  const CoordinatorCoreOptions options_;
  uint64_t next_ = 1;
  absl::flat_hash_map<TicketId, RequestRecord> records_;
  absl::flat_hash_set<TicketId> running_;
  std::deque<TicketId> finished_;  // oldest first
  absl::flat_hash_map<NodeName, Debit> debits_;
  RequestCounts counts_;
};

}  // namespace kvt
