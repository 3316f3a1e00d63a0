// Digests of a sequence that were made here, on their way into the tier beside the planes
// (decode_engine_digests.cc); one push at a time. Plain values, of the engine thread; the transfer borrows
// places, addresses and list until its end.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "decode_worker/offload/digest_buffer.h"
#include "decode_worker/offload/digest_stage.h"
#include "kvstore/client/sequence_blocks.h"
#include "kvstore/client/tier_types.h"

namespace kvt {

struct DigestWriteBack {
  std::optional<KeyChain> chain;        // none: nothing is written
  std::optional<SequenceBlocks> names;  // of the first blocks
  std::vector<int> unwritten;           // blocks; of an offloaded sequence their digests are made
  bool runs = false;
  std::optional<DigestBuffer> made;  // of a resident sequence, while it runs
  std::optional<DigestStage> stage;
  std::vector<PlacedBlock> places;
  std::vector<std::byte*> addresses;  // [block][plane]
  std::vector<PushBlock> list;
  std::vector<TransferOutcome> outcomes;
};

}  // namespace kvt
