// The blocking control calls of a prefill job: stores, coordinator, decode worker. Each runs on a
// control thread, reads of the job only what does not change in that phase (ticket, names, tokens,
// plan), and returns what the engine then applies. Every call ends by the deadlines of its stubs.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kvstore/client/ticket_gate.h"
#include "kvstore/client/tier_client.h"
#include "kvstore/wire/coordinator_api.h"
#include "kvstore/wire/worker_api.h"
#include "prefill_worker/prefill_job.h"

namespace kvt {

using DecodeConnector = std::function<std::shared_ptr<DecodeApi>(const std::string& address)>;

struct OpenOutcome {
  absl::Status status;
  std::vector<JobBlock> blocks;  // one per block; push set where this job is to write
  std::vector<bool> present;     // lies in the tier, pinned: to be pulled
  // The names of the sequence's blocks: exact, or from some block on approximate because that much
  // more lies in the tier and the ticket's fidelity permits it.
  std::optional<SequenceBlocks> names;
};
// Looks up and pins what the tier has, reserves room for the rest and for the output. On a refusal
// nothing is held, but as `terms` say of an aged ticket. ResourceExhausted and Unavailable are worth
// a retry.
OpenOutcome OpenJob(TierClient& tier, const PrefillJob& job, const ReserveTerms& terms);

struct SealOutcomes {
  // Blocks that are not in the tier and got a new reservation: to be pushed again.
  std::vector<int> repaired;
  std::vector<PlacedBlock> repaired_places;
  std::vector<int> sealed;     // in the tier now
  std::vector<int> homeless;   // no store has room for them, or none is reachable
};
// Asks how `blocks` (indices, with their places) ended, and places again what was lost.
SealOutcomes SealBlocks(TierClient& tier, const PrefillJob& job, std::vector<int> blocks,
                        std::vector<PlacedBlock> places);

// Asks the coordinator for grant D.
absl::StatusOr<Placement> PlaceJob(CoordinatorApi& coordinator, const TicketGate& gate,
                                   const PlaceRequest& request);

// Offers the request to `placement`'s decode worker, with its first selection if it has one.
absl::Status OfferHandOver(const DecodeConnector& connect, const Placement& placement,
                           const PrefillJob& job, const std::string& calibration_id);

// Blocks that decoding will complete behind `tokens` known ones, at most.
uint32_t OutputBlocks(uint64_t tokens, uint64_t output_tokens);

// Whether the same call may succeed a little later.
bool IsRetryable(const absl::Status& status);
// The status with "what: " before its message.
absl::Status Annotate(const absl::Status& status, absl::string_view what);

}  // namespace kvt
