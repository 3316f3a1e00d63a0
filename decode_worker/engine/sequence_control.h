// The blocking control calls of a sequence: stores, coordinator, prefill worker. Each runs on a
// control or RPC thread, reads of the sequence only what does not change in that phase, and returns
// what the engine then applies. Every call ends by the deadlines of its stubs.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "decode_worker/engine/sequence.h"
#include "kvstore/client/tier_client.h"
#include "kvstore/wire/coordinator_api.h"
#include "kvstore/wire/worker_api.h"

namespace kvt {

using PrefillConnector = std::function<std::shared_ptr<PrefillApi>(const std::string& address)>;

// Looks up and pins every block of the sequence, and asks for room for its output (a refusal only
// means that write-back may be refused later).
std::vector<PlacedBlock> OpenSequence(TierClient& tier, const Sequence& sequence);

// Looks up and pins the digests of the sequence's middle blocks; by block, absent where the tier has
// none or the block is not of the middle. `chain` names digests.
std::vector<PlacedBlock> FindDigests(TierClient& tier, const KeyChain& chain,
                                     const Sequence& sequence);

// Asks for a higher epoch and gives all known tokens to a prefill worker: it computes what the tier
// has lost, samples the next token and hands over again.
absl::Status ResumeSequence(CoordinatorApi& coordinator, const PrefillConnector& connect,
                            const SignedTicket& ticket, ResumeRequest request,
                            const std::string& reason);

}  // namespace kvt
