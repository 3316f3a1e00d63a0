#include "decode_worker/engine/sequence_control.h"

#include <algorithm>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/select/attention_stats.h"

namespace kvt {
namespace {

// How long a sequence waits for stores that could not be asked for its blocks.
constexpr absl::Duration kStoreWait = absl::Seconds(1);

}  // namespace

std::vector<PlacedBlock> OpenSequence(TierClient& tier, const Sequence& sequence) {
  std::vector<TierBlock> names(sequence.names.blocks().begin(), sequence.names.blocks().end());
  if (sequence.names.HasTail()) names.push_back(sequence.names.Tail());
  LookupResult found = tier.Lookup(sequence.ticket, names, LookupReach::kEveryStore);
  if (!found.unreachable.empty() && !sequence.ticket.ticket.stores.empty()) {
    // Just started, or a store is coming back: a moment is cheaper than computing again.
    (void)tier.WaitConnected(kStoreWait);
    found = tier.Lookup(sequence.ticket, names, LookupReach::kEveryStore);
  }
  const Ticket& ticket = sequence.ticket.ticket;
  const uint64_t known = static_cast<uint64_t>(sequence.names.tokens());
  const uint64_t all = uint64_t{ticket.prompt_tokens} + ticket.output_tokens_max;
  const auto output_blocks =
      static_cast<uint32_t>(all / kBlockTokens - std::min(all, known) / kBlockTokens);
  if (output_blocks > 0) {
    (void)tier.Reserve(sequence.ticket, {}, output_blocks, ReserveMode::kKeepGranted);
  }
  return std::move(found.blocks);
}

std::vector<PlacedBlock> FindDigests(TierClient& tier, const KeyChain& chain,
                                     const Sequence& sequence) {
  const SequenceBlocks names = sequence.names.Under(chain);
  const MiddleBlocks middle = MiddleOf(static_cast<int>(sequence.names.tokens()));
  if (middle.count() == 0) return {};
  std::vector<PlacedBlock> places(static_cast<size_t>(middle.end));
  const auto first = static_cast<size_t>(middle.first);
  LookupResult found =
      tier.Lookup(sequence.ticket, names.blocks().subspan(first, static_cast<size_t>(middle.count())),
                  LookupReach::kEveryStore);
  std::move(found.blocks.begin(), found.blocks.end(), places.begin() + middle.first);
  return places;
}

absl::Status ResumeSequence(CoordinatorApi& coordinator, const PrefillConnector& connect,
                            const SignedTicket& ticket, ResumeRequest request,
                            const std::string& reason) {
  KVT_ASSIGN_OR_RETURN(RegrantReply grant, coordinator.Regrant({ticket, reason}));
  request.ticket = std::move(grant.ticket);
  return connect(grant.prefill_address)->Resume(request);
}

}  // namespace kvt
