// What a sequence of the offloaded class has beyond a resident one. Owned by the sequence; the engine
// thread's.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "decode_worker/offload/block_pull.h"
#include "decode_worker/offload/digest_buffer.h"
#include "decode_worker/offload/digest_stage.h"
#include "decode_worker/offload/offloaded_slots.h"
#include "kvstore/client/sequence_blocks.h"
#include "kvstore/client/tier_types.h"
#include "kvstore/index/block_key.h"

namespace kvt {

struct OffloadedSequence {
  OffloadedSequence(OffloadedSlots slots_in, DigestBuffer digests_in)
      : shape(slots_in.shape()), digests(std::move(digests_in)) {
    slots.emplace(std::move(slots_in));
  }

  const OffloadedShape shape;
  std::optional<OffloadedSlots> slots;  // always there; replaced when the sequence begins again
  DigestBuffer digests;
  std::vector<bool> stored;      // by block: the tier has a sealed copy, pinned, at Sequence::places
  std::vector<int> digests_due;  // complete, made before the next step
  bool sparse = false;           // a step has left something out
  bool stepping = false;         // in the step in flight
  bool step_lost = false;        // a fetch of the step in flight failed
  int lost = 0;                  // of the last step: to be computed again, once nothing is written back

  // By layer, from the hand-over; middle blocks, ascending.
  std::vector<std::vector<int32_t>> first_selection;

  // Admission: what the digest tier has of the blocks, and the pulls in progress.
  std::vector<PlacedBlock> digest_places;  // by block
  std::optional<DigestStage> stage;
  std::vector<std::shared_ptr<BlockPull>> pulls;
  std::function<void()> then;  // when they have ended
  int pulls_left = 0;
  int blocks_lost = 0;
  std::vector<int> missing;  // blocks whose digests are made from planes
  size_t missing_done = 0;

  std::vector<int> digests_in_step;  // made by the step in flight
};

}  // namespace kvt
