// A prefill job: a sequence of tokens whose KV is to lie in the tier, what it holds meanwhile, and
// its phases. Owned by the engine thread; control calls and transfers borrow it through shared_ptr
// and touch only what their comment says.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/model/slot_pool.h"
#include "kvstore/client/sequence_blocks.h"
#include "kvstore/client/tier_types.h"
#include "kvstore/wire/worker_api.h"
#include "prefill_worker/first_selection.h"
#include "prefill_worker/prefill_plan.h"
#include "prefill_worker/prefill_stream.h"

namespace kvt {

// In order; from any of them a job may go to kEnding, from kOpening back to kQueued when the stores
// have no room, and from kSealing back to kFlushing when blocks that were lost meanwhile are pushed
// again.
enum class PrefillPhase : uint8_t {
  kQueued = 0,     // waits for device slots, or for room in the stores
  kOpening,        // lookup, pins, reservation
  kPulling,        // blocks that exist fly into slots
  kComputing,      // chunks take turns
  kFlushing,       // all is computed; pushes are in flight
  kSealing,        // asks whether every block is in the tier; lost ones are placed again
  kHandingOver,    // a decode worker takes the request
  kEnding,         // waits for what still touches the job
};
absl::string_view PrefillPhaseName(PrefillPhase phase);
// Whether a job may go from one phase to the other.
bool MayFollow(PrefillPhase from, PrefillPhase to);

// Unit of pushes and reservations; index b covers tokens [16 b, 16 b + 16).
struct JobBlock {
  PlacedBlock place;
  bool push = false;    // reserved by this job: to be pushed and sealed
  bool sealed = false;  // known to be in the tier
};

// Grant D: who decodes.
struct Placement {
  SignedTicket ticket;
  std::string decode_address;
  NodeName decode_worker;
};

// Name of block `index`, the partial tail included.
inline TierBlock NameOf(const SequenceBlocks& names, int index) {
  const auto i = static_cast<size_t>(index);
  return i < names.blocks().size() ? names.blocks()[i] : names.Tail();
}

struct PrefillJob {
  PrefillJob(uint64_t id_in, HeldTicket ticket_in, const KeyChain& chain,
             std::vector<int32_t> tokens_in)
      : id(id_in),
        ticket(std::move(ticket_in)),
        tokens(std::move(tokens_in)),
        names(chain, ticket.ticket.id),
        plan(static_cast<int>(tokens.size())),
        blocks(static_cast<size_t>(plan.blocks())) {
    names.Append(tokens);
  }

  void Enter(PrefillPhase next);
  [[nodiscard]] TierBlock Name(int index) const { return NameOf(names, index); }
  // Names the last so many tokens' blocks as of this provenance.
  void NameApproximate(uint32_t count, Provenance provenance) {
    const size_t exact = tokens.size() - count;
    names = names.Empty();
    names.Append(absl::MakeConstSpan(tokens).first(exact));
    names.Append(absl::MakeConstSpan(tokens).subspan(exact), provenance);
  }

  const uint64_t id;
  HeldTicket ticket;
  std::vector<int32_t> tokens;
  uint32_t prompt_tokens = 0;
  bool resume = false;  // a suffix job: the decode worker is given
  SamplingParams sampling;
  std::vector<int32_t> stop_tokens;
  std::shared_ptr<PrefillStream> stream = std::make_shared<PrefillStream>();

  PrefillPhase phase = PrefillPhase::kQueued;
  absl::Status end_status;  // once kEnding
  int pending = 0;          // control calls, transfers and steps that still touch the job

  // Device.
  SequenceBlocks names;
  PrefillPlan plan;
  std::vector<PoolBlock> pool_blocks;
  int table_row = -1;
  uint64_t last_step = 0;  // the last step that reads its slots
  // Slot addresses, [block * layers + layer], and the block table, [layer * blocks + block].
  std::vector<std::byte*> base_addresses;
  std::vector<std::byte*> residual_addresses;
  std::shared_ptr<std::vector<SlotPair>> table;

  // Tier.
  std::vector<JobBlock> blocks;
  std::vector<int> pull_blocks;  // indices
  std::vector<PullBlock> pull_list;
  std::vector<TransferOutcome> pull_outcomes;
  TransferId pull;
  int pushes_in_flight = 0;
  int repairs = 0;

  // Offloaded class: the chain of the digests' keys, and what the last step made.
  std::optional<KeyChain> digest_chain;
  std::shared_ptr<FirstSelection> selection;
  bool digests_pending = false;
  bool awaits_digests = false;  // with the hand-over

  // Result and hand-over.
  int32_t first_token = -1;
  std::optional<absl::StatusOr<Placement>> placement;
  bool placing = false;
  std::vector<NodeName> refused_by;
  PrefillFigures figures;
  absl::Time submitted;
  absl::Time asked_first;  // the stores for room
  int reserve_refusals = 0;
  absl::Time compute_began;
  absl::Time first_token_at;
  absl::Time wait_until;  // of the phase's retries
};

}  // namespace kvt
