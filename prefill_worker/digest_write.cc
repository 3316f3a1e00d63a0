#include "prefill_worker/digest_write.h"

#include <algorithm>
#include <cstring>

#include "kernels/base/check.h"

namespace kvt {
namespace {

// The joined digest of one block, zeros behind it.
void Join(const DigestLayout& layout, const FirstSelection& selection, int block, std::byte* out) {
  std::memset(out + layout.DigestBytes(), 0, layout.BlockBytes() - layout.DigestBytes());
  for (int layer = 0; layer < layout.layers(); ++layer) {
    const size_t bytes = layout.LayerBytes(layer);
    if (bytes == 0) continue;
    std::memcpy(out + layout.LayerOffset(layer),
                selection.digests[static_cast<size_t>(layer)].data() +
                    static_cast<size_t>(block) * bytes,
                bytes);
  }
}

}  // namespace

std::shared_ptr<DigestWrite> OpenDigestWrite(TierClient& tier, const HeldTicket& ticket,
                                             const SequenceBlocks& names,
                                             const DigestLayout& layout,
                                             const FirstSelection& selection) {
  auto write = std::make_shared<DigestWrite>();
  const absl::Span<const TierBlock> blocks = names.blocks();
  KVT_CHECK(blocks.size() == static_cast<size_t>(selection.blocks), "blocks=", blocks.size());
  if (blocks.empty()) return write;
  absl::StatusOr<ReserveResult> reserved =
      tier.Reserve(ticket, blocks, 0, ReserveMode::kKeepGranted);
  if (!reserved.ok()) {
    write->refused = static_cast<int>(blocks.size());
    return write;
  }
  std::vector<int> wanted;
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (reserved->already_sealed[i]) {
      ++write->present;
    } else if (reserved->blocks[i].store == kNoStore) {
      ++write->refused;
    } else {
      wanted.push_back(static_cast<int>(i));
      write->places.push_back(std::move(reserved->blocks[i]));
    }
  }
  const size_t block_bytes = layout.BlockBytes();
  write->memory.reset(static_cast<std::byte*>(
      ::operator new(std::max<size_t>(wanted.size() * block_bytes, 64), std::align_val_t{64})));
  for (size_t i = 0; i < wanted.size(); ++i) {
    std::byte* const memory = write->memory.get() + i * block_bytes;
    Join(layout, selection, wanted[i], memory);
    write->addresses.push_back(memory);
    write->addresses.push_back(memory + block_bytes / kPlanes);
  }
  for (size_t i = 0; i < wanted.size(); ++i) {
    write->list.push_back({.ticket = ticket.ref(),
                           .block = &write->places[i],
                           .base = &write->addresses[kPlanes * i],
                           .residual = &write->addresses[kPlanes * i + 1]});
  }
  write->outcomes.resize(write->list.size(), TransferOutcome::kSkipped);
  return write;
}

int SealDigestWrite(TierClient& tier, TicketRef ticket, DigestWrite& write) {
  if (write.places.empty()) return 0;
  std::vector<PlacedBlock*> places;
  for (PlacedBlock& place : write.places) places.push_back(&place);
  const std::vector<SealOutcome> outcomes = tier.Seal(ticket, absl::MakeSpan(places));
  return static_cast<int>(std::count(outcomes.begin(), outcomes.end(), SealOutcome::kSealed));
}

}  // namespace kvt
