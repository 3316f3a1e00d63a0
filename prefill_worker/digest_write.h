// The digests of a sequence on their way into the tier (docs/decisions/0007). A refusal, or a store
// that is gone, costs nothing here: who needs a digest that is not there makes it again.
//
// OpenDigestWrite and SealDigestWrite block (control threads); in between one Push of `list`. Not
// thread-safe; owned by one job at a time, kept alive by its transfer.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <vector>

#include "kvstore/client/digest_blocks.h"
#include "kvstore/client/sequence_blocks.h"
#include "kvstore/client/tier_client.h"
#include "prefill_worker/first_selection.h"

namespace kvt {

struct DigestWrite {
  struct Free {
    void operator()(std::byte* p) const { ::operator delete(p, std::align_val_t{64}); }
  };

  std::vector<PlacedBlock> places;  // of the blocks that are to be pushed
  std::unique_ptr<std::byte[], Free> memory;  // [places][both records]
  std::vector<std::byte*> addresses;  // [places][planes]
  std::vector<PushBlock> list;
  std::vector<TransferOutcome> outcomes;
  int present = 0;  // were in the tier already; pinned
  int refused = 0;
};

// Reserves what is not there and lays it out. `selection` has a digest for each of the names, which
// are the planes' under the digests' chain.
[[nodiscard]] std::shared_ptr<DigestWrite> OpenDigestWrite(TierClient& tier,
                                                           const HeldTicket& ticket,
                                                           const SequenceBlocks& names,
                                                           const DigestLayout& layout,
                                                           const FirstSelection& selection);
// How many of the pushed blocks are in the tier.
[[nodiscard]] int SealDigestWrite(TierClient& tier, TicketRef ticket, DigestWrite& write);

}  // namespace kvt
