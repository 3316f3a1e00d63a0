// Of DecodeEngine: digests that are made here on their way into the tier beside the planes: of blocks that
// decoding completes, and of those whose digests the tier lacked at the admission of an offloaded request.
// An offloaded sequence has its digests on the device; those of a resident one are made for the tier alone,
// when its ticket permits sparse: the dialogue may go on offloaded. A store that refuses costs the next
// reader the making of them; nothing is tried again.
#include <algorithm>
#include <utility>

#include "decode_worker/engine/decode_engine.h"
#include "kernels/base/check.h"

namespace kvt {
namespace {

// Of one write of a resident sequence: memory for that many on the device and once more on their way.
constexpr size_t kResidentDigestsMax = 8;

}  // namespace

void DecodeEngine::WriteDigests(const Seq& seq) {
  DigestWriteBack& w = seq->digest_write;
  if (!w.chain.has_value() || w.runs || w.unwritten.empty()) return;
  if (seq->offload != nullptr && seq->offload->lost > 0) return;
  if (!w.names.has_value()) w.names.emplace(*w.chain, seq->ticket.ticket.id);
  // The same tokens and provenance as the planes'.
  for (size_t b = w.names->blocks().size(); b < seq->names.blocks().size(); ++b) {
    const BlockName& name = seq->names.blocks()[b].name;
    w.names->Append(name.tokens, name.provenance);
  }
  std::vector<int> blocks = std::exchange(w.unwritten, {});
  if (seq->offload != nullptr) {
    return ReserveDigests(seq, blocks, seq->offload->digests, blocks);
  }
  if (blocks.size() > kResidentDigestsMax) {
    w.unwritten.assign(blocks.begin() + kResidentDigestsMax, blocks.end());
    blocks.resize(kResidentDigestsMax);
  }
  absl::StatusOr<DigestBuffer> made =
      DigestBuffer::Create(deps_.transformer->device(), deps_.calibration->DigestBytesByLayer(),
                           static_cast<int>(blocks.size()));
  if (!made.ok()) return;
  w.made.emplace(*std::move(made));
  w.runs = true;
  std::vector<uint32_t> entries;
  for (size_t i = 0; i < blocks.size(); ++i) entries.push_back(static_cast<uint32_t>(i));
  for (int l = 0; l < layers_; ++l) {
    if (heads_->dense(l)) continue;
    std::vector<SlotPair> pairs;
    for (const int b : blocks) {
      const PoolBlock block = seq->slots.blocks()[static_cast<size_t>(b)];
      pairs.push_back(pool_.Pairs(block)[static_cast<size_t>(l)]);
    }
    offloaded_step_->MakeDigests(*w.made, l, pairs, entries);
  }
  ++seq->pending;  // its slots are read
  offloaded_step_->Then([this, seq, blocks, entries] {
    --seq->pending;
    DigestWriteBack& write = seq->digest_write;
    if (seq->write_to_end) {
      ReserveDigests(seq, blocks, *write.made, std::vector<int>(entries.begin(), entries.end()));
    }
    write.made.reset();
    if (!seq->write_to_end) write.runs = false;
    MaybeForget(seq);
  });
}

// entries[i] of `from` is block blocks[i].
void DecodeEngine::ReserveDigests(const Seq& seq, const std::vector<int>& blocks,
                                  const DigestBuffer& from, const std::vector<int>& entries) {
  DigestWriteBack& w = seq->digest_write;
  w.runs = false;
  absl::StatusOr<DigestStage> stage =
      DigestStage::Create(deps_.transformer->device(), *deps_.digest_layout,
                          static_cast<int>(blocks.size()));
  if (!stage.ok()) return;
  std::vector<TierBlock> names;
  for (size_t i = 0; i < blocks.size(); ++i) {
    stage->CopyFrom(from, entries[i], static_cast<int>(i));
    names.push_back(w.names->blocks()[static_cast<size_t>(blocks[i])]);
  }
  w.stage.emplace(*std::move(stage));
  w.runs = true;
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
  DigestWriteBack& w = seq->digest_write;
  w.list.clear();
  w.addresses.clear();
  if (reserved.ok()) {
    w.places = std::move(reserved->blocks);
    const size_t count = w.places.size();
    for (size_t i = 0; i < count; ++i) {
      w.addresses.push_back(w.stage->Base(static_cast<int>(i)));
      w.addresses.push_back(w.stage->Residual(static_cast<int>(i)));
    }
    for (size_t i = 0; i < count; ++i) {
      if (reserved->already_sealed[i] || w.places[i].store == kNoStore) continue;
      w.list.push_back({.ticket = seq->ticket.ref(),
                        .block = &w.places[i],
                        .base = &w.addresses[kPlanes * i],
                        .residual = &w.addresses[kPlanes * i + 1]});
    }
  }
  if (w.list.empty() || !seq->write_to_end) return EndWriteDigests(seq);
  w.outcomes.assign(w.list.size(), TransferOutcome::kSkipped);
  ++seq->pending;
  deps_.digest_tier->Push({.blocks = w.list,
                           .layer_begin = 0,
                           .layer_end = 1,
                           .outcomes = absl::MakeSpan(w.outcomes),
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
  seq->digest_write.runs = false;
  if (!ResumeAtLast(seq) && seq->write_to_end) WriteDigests(seq);
}

}  // namespace kvt
