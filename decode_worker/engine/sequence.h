// A request at a decode worker: its tokens, the blocks it holds, and its phases. Owned by the engine
// thread; control calls and transfers borrow it through shared_ptr and touch only what their comment
// says.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "decode_worker/engine/digest_write_back.h"
#include "decode_worker/engine/token_stream.h"
#include "decode_worker/offload/offloaded_sequence.h"
#include "decode_worker/pool/sequence_slots.h"
#include "kernels/sampling.h"
#include "kvstore/client/sequence_blocks.h"
#include "kvstore/client/tier_types.h"
#include "kvstore/wire/worker_api.h"

namespace kvt {

enum class SequencePhase : uint8_t {
  kOpening = 0,  // lookup and pins; the hand-over is not acknowledged yet
  kPulling,      // blocks fly into slots, or wait for their turn
  kRunning,      // steps
  kResuming,     // blocks were lost; a prefill worker computes them again
  kComputing,    // no store is reachable: the blocks that are not here are computed here
  kDraining,     // ended; transfers and calls that touch it still run
};
absl::string_view SequencePhaseName(SequencePhase phase);
// Whether a sequence may go from one phase to the other.
bool MayFollow(SequencePhase from, SequencePhase to);

struct Sequence {
  Sequence(uint64_t id_in, HeldTicket ticket_in, const KeyChain& chain_in, SequenceSlots slots_in)
      : id(id_in),
        ticket(std::move(ticket_in)),
        slots(std::move(slots_in)),
        chain(chain_in),
        names(chain, ticket.ticket.id) {}

  void Enter(SequencePhase next);
  // Blocks whose KV `names` stands for, the partial tail included.
  [[nodiscard]] int blocks() const {
    return static_cast<int>(names.blocks().size()) + (names.HasTail() ? 1 : 0);
  }
  // By which other sequences of this worker find the block's slots: none of the tail, nor of what is
  // approximate, which is its request's alone.
  [[nodiscard]] const BlockKey* ShareableKey(size_t block) const {
    if (block >= names.blocks().size()) return nullptr;
    const BlockName& name = names.blocks()[block].name;
    return name.provenance == Provenance::kExact ? &name.key : nullptr;
  }
  // Of the token after the last one.
  [[nodiscard]] SampleParams NextSample() const;
  [[nodiscard]] uint64_t output_tokens() const { return tokens.size() - prompt_tokens; }

  const uint64_t id;
  HeldTicket ticket;
  SequencePhase phase = SequencePhase::kOpening;
  int pending = 0;  // control calls and transfers that still touch the sequence

  // Prompt and output; the last one's KV does not exist yet. `names` covers all but the last.
  std::vector<int32_t> tokens;
  uint32_t prompt_tokens = 0;
  SamplingParams sampling;
  std::vector<int32_t> stop_tokens;
  std::shared_ptr<TokenStream> stream;

  // Device.
  SequenceSlots slots;
  int table_row = -1;
  uint64_t last_step = 0;
  std::vector<bool> loaded;  // per block: its bytes are in the slots

  std::unique_ptr<OffloadedSequence> offload;  // null: resident; else `slots` is None

  // Tier.
  const KeyChain chain;
  SequenceBlocks names;
  Provenance handed_over = Provenance::kExact;  // of what prefill computed
  std::vector<PlacedBlock> places;  // as of the last lookup
  std::vector<std::byte*> base_addresses;      // [block * layers + layer]
  std::vector<std::byte*> residual_addresses;
  std::vector<int> pull_blocks;
  std::vector<PullBlock> pull_list;
  std::vector<TransferOutcome> pull_outcomes;
  TransferId pull;
  bool pull_started = false;
  int resumes = 0;
  absl::Time resume_until;

  // Write-back: full blocks [0, written_back) are in the tier or were given up.
  int written_back = 0;
  bool write_back_runs = false;
  int write_back_begin = 0;        // first block of the one that runs
  bool write_back_behind = false;  // by more than kWriteBackBehindMax blocks
  bool write_to_end = true;  // what is complete is still written when the sequence has ended well
  std::vector<PlacedBlock> write_places;
  std::vector<PushBlock> write_list;
  std::vector<TransferOutcome> write_outcomes;

  DigestWriteBack digest_write;

  DecodeFigures figures;
  PrefillFigures prefill;
  absl::Time accepted;
  bool stepped = false;
  uint64_t reported_tokens = 0;
};

}  // namespace kvt
