// Of DecodeEngine: digests that were made here, of blocks that decoding completed or whose digests the
// tier lacked, on their way into the tier beside the planes. A store that refuses costs the next reader
// the making of them; nothing is tried again.
#include <utility>

#include "decode_worker/engine/decode_engine.h"
#include "kernels/base/check.h"

namespace kvt {

void DecodeEngine::WriteDigests(const Seq& seq) {
  OffloadedSequence& o = *seq->offload;
  if (!o.digest_chain.has_value() || o.digests_run || o.digests_unwritten.empty() || o.lost > 0) return;
  if (!o.digest_names.has_value()) o.digest_names.emplace(*o.digest_chain, seq->ticket.ticket.id);
  // The same tokens and provenance as the planes'.
  for (size_t b = o.digest_names->blocks().size(); b < seq->names.blocks().size(); ++b) {
    const BlockName& name = seq->names.blocks()[b].name;
    o.digest_names->Append(name.tokens, name.provenance);
  }
  const std::vector<int> blocks = std::exchange(o.digests_unwritten, {});
  absl::StatusOr<DigestStage> stage =
      DigestStage::Create(deps_.transformer->device(), *deps_.digest_layout,
                          static_cast<int>(blocks.size()));
  if (!stage.ok()) return;
  std::vector<TierBlock> names;
  for (size_t i = 0; i < blocks.size(); ++i) {
    stage->CopyFrom(o.digests, blocks[i], static_cast<int>(i));
    names.push_back(o.digest_names->blocks()[static_cast<size_t>(blocks[i])]);
  }
  o.digest_write.emplace(*std::move(stage));
  o.digests_run = true;
  Control<absl::StatusOr<ReserveResult>>(
      seq,
      [this, ticket = seq->ticket, names] {
        return deps_.digest_tier->Reserve(ticket, names, 0, ReserveMode::kKeepGranted);
      },
      [this, seq](absl::StatusOr<ReserveResult> reserved) {
        OnDigestsReserved(seq, std::move(reserved));
      });
}

void DecodeEngine::OnDigestsReserved(const Seq& seq, absl::StatusOr<ReserveResult> reserved) {
  OffloadedSequence& o = *seq->offload;
  o.digest_write_list.clear();
  o.digest_write_addresses.clear();
  if (reserved.ok()) {
    o.digest_write_places = std::move(reserved->blocks);
    const size_t count = o.digest_write_places.size();
    for (size_t i = 0; i < count; ++i) {
      o.digest_write_addresses.push_back(o.digest_write->Base(static_cast<int>(i)));
      o.digest_write_addresses.push_back(o.digest_write->Residual(static_cast<int>(i)));
    }
    for (size_t i = 0; i < count; ++i) {
      if (reserved->already_sealed[i] || o.digest_write_places[i].store == kNoStore) continue;
      o.digest_write_list.push_back({.ticket = seq->ticket.ref(),
                                     .block = &o.digest_write_places[i],
                                     .base = &o.digest_write_addresses[kPlanes * i],
                                     .residual = &o.digest_write_addresses[kPlanes * i + 1]});
    }
  }
  if (o.digest_write_list.empty() || !seq->write_to_end) return EndWriteDigests(seq);
  o.digest_write_outcomes.assign(o.digest_write_list.size(), TransferOutcome::kSkipped);
  ++seq->pending;
  deps_.digest_tier->Push({.blocks = o.digest_write_list,
                           .layer_begin = 0,
                           .layer_end = 1,
                           .outcomes = absl::MakeSpan(o.digest_write_outcomes),
                           .done = [this, seq](const TransferResult& result) {
                             queue_.Post([this, seq, result] {
                               --seq->pending;
                               deps_.metrics->DigestsWritten(result.blocks_ok);
                               EndWriteDigests(seq);
                               MaybeForget(seq);
                             });
                           }});
}

void DecodeEngine::EndWriteDigests(const Seq& seq) {
  seq->offload->digests_run = false;
  if (!ResumeAtLast(seq) && seq->write_to_end) WriteDigests(seq);
}

}  // namespace kvt
