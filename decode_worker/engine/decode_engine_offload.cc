// Of DecodeEngine: how sequences of the offloaded class begin (DESIGN 5). Admission pulls whole blocks
// (sinks, recent ones), the digests of middle blocks, dense layers of all, and the first selection;
// digests that the tier lacks are made from planes, through the hot slots. Their steps and misses:
// decode_engine_recall.cc.
#include <algorithm>
#include <climits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "decode_worker/engine/decode_engine.h"
#include "kernels/base/check.h"
#include "kernels/base/log.h"
#include "kernels/base/units.h"
#include "kernels/select/attention_stats.h"

namespace kvt {

absl::Status DecodeEngine::CreateOffloaded() {
  if (deps_.calibration == nullptr) return absl::OkStatus();
  KVT_CHECK((deps_.digest_layout == nullptr) == (deps_.digest_tier == nullptr));
  KVT_ASSIGN_OR_RETURN(heads_, DigestHeads::Create(deps_.transformer->device(), *deps_.calibration));
  KVT_ASSIGN_OR_RETURN(
      offloaded_step_,
      OffloadedStep::Create(
          *deps_.transformer, *deps_.cache, *heads_, options_.offload, device_step_->stream(), queue_,
          options_.batch_max,
          {.fetch = [this](int layer, absl::Span<const OffloadedFetch> fetches,
                           std::function<void(const std::vector<bool>&)> done) {
             FetchForStep(layer, fetches, std::move(done));
           },
           .step_done = [this](const OffloadedStepResult& result) { OnOffloadedStepDone(result); }}));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<OffloadedSequence>> DecodeEngine::TryOffload(int blocks) {
  const std::vector<uint32_t> layer_bytes = deps_.calibration->DigestBytesByLayer();
  const uint64_t bytes = DigestBuffer::BytesFor(layer_bytes, blocks);
  const uint64_t bytes_max = options_.DigestBytesMax();
  if (bytes > bytes_max - digest_bytes_) {
    return absl::ResourceExhaustedError(
        absl::StrCat(FormatBytes(bytes_max - digest_bytes_), " of ", FormatBytes(bytes_max),
                     " for digests free ([decode] digest_bytes); ", FormatBytes(bytes)));
  }
  const OffloadedShape shape = ShapeFor(*deps_.calibration, options_.offload, blocks);
  std::optional<OffloadedSlots> slots = OffloadedSlots::TryCreate(pool_, shape);
  if (!slots.has_value()) return NoSlots(shape.Slots());
  absl::StatusOr<DigestBuffer> digests =
      DigestBuffer::Create(deps_.transformer->device(), layer_bytes, blocks);
  if (!digests.ok()) {
    slots->Release(0);
    return absl::ResourceExhaustedError(
        absl::StrCat("no memory for digests (", digests.status().message(), "); ", FormatBytes(bytes)));
  }
  digest_bytes_ += bytes;
  return std::make_unique<OffloadedSequence>(std::move(*slots), *std::move(digests));
}

void DecodeEngine::EndOffload(Sequence& seq) {
  seq.offload->slots->Release(seq.last_step);
  digest_bytes_ -= seq.offload->digests.bytes();
}

void DecodeEngine::TakeFirstSelection(Sequence& seq, const HandOverRequest& request) {
  OffloadedSequence& o = *seq.offload;
  o.first_selection.assign(static_cast<size_t>(layers_), {});
  seq.figures.offloaded = true;
  seq.figures.sequence_bytes = static_cast<uint64_t>(seq.blocks()) * seq.figures.block_bytes;
  if (request.calibration_id != deps_.calibration->Id() ||
      request.selections.size() != o.first_selection.size()) {
    return;  // the first step misses
  }
  const MiddleBlocks middle = MiddleOf(static_cast<int>(seq.names.tokens()));
  for (size_t l = 0; l < o.first_selection.size(); ++l) {
    if (heads_->dense(static_cast<int>(l))) continue;
    // A wish from outside: what does not fit is ignored.
    std::vector<int32_t>& blocks = o.first_selection[l];
    for (const int32_t b : request.selections[l]) {
      const bool ascends = blocks.empty() || b > blocks.back();
      if (b >= middle.first && b < middle.end && ascends) blocks.push_back(b);
    }
    if (static_cast<int>(blocks.size()) > o.shape.hot_slots[l]) {
      blocks.resize(static_cast<size_t>(o.shape.hot_slots[l]));
    }
  }
}

void DecodeEngine::BeginAgain(Sequence& seq) {
  OffloadedSequence& o = *seq.offload;
  o.slots->Release(seq.last_step);
  std::optional<OffloadedSlots> slots = OffloadedSlots::TryCreate(pool_, o.shape);
  KVT_CHECK(slots.has_value(), "what was released a moment ago is free");
  o.slots.emplace(std::move(*slots));
  o.stored.clear();
  o.digests_due.clear();
  o.digest_places.clear();
  seq.digest_write.names.reset();
  o.digests_in_step.clear();
  seq.digest_write.unwritten.clear();
  o.sparse = false;
  o.lost = 0;
  // Prefill computes what it lacks with full attention.
  const std::vector<int32_t> tokens(seq.names.token_ids().begin(), seq.names.token_ids().end());
  seq.names = SequenceBlocks(seq.chain, seq.ticket.ticket.id);
  seq.names.Append(tokens);
}

bool DecodeEngine::BecomeResident(Sequence& seq) {
  OffloadedSequence& o = *seq.offload;
  if (deps_.digest_tier != nullptr) deps_.digest_tier->Release(seq.ticket.ref());
  BeginAgain(seq);
  o.slots->Release(seq.last_step);
  std::optional<SequenceSlots> slots = SequenceSlots::TryCreate(pool_, o.shape.blocks_max);
  if (!slots.has_value()) return false;
  seq.slots = std::move(*slots);
  EndOffload(seq);
  seq.offload.reset();
  seq.loaded.clear();
  seq.base_addresses.clear();
  seq.residual_addresses.clear();
  return true;
}

bool DecodeEngine::AppendWhole(Sequence& seq) {
  OffloadedSlots& slots = *seq.offload->slots;
  if (!slots.AppendWhole()) return false;
  const int block = slots.blocks() - 1;
  const auto at = static_cast<size_t>(block) * static_cast<size_t>(layers_);
  for (int l = 0; l < layers_; ++l) {
    const SlotPair pair = slots.Pair(l, block);
    seq.base_addresses[at + static_cast<size_t>(l)] = Address(pair.base);
    seq.residual_addresses[at + static_cast<size_t>(l)] = Address(pair.residual);
  }
  return true;
}

void DecodeEngine::LoadOffloaded(const Seq& seq) {
  OffloadedSequence& o = *seq->offload;
  const auto addresses = static_cast<size_t>(o.shape.blocks_max) * static_cast<size_t>(layers_);
  seq->base_addresses.assign(addresses, nullptr);
  seq->residual_addresses.assign(addresses, nullptr);
  // Pulls borrow places while blocks are added.
  seq->places.reserve(static_cast<size_t>(o.shape.blocks_max));
  const int blocks = seq->blocks();
  const MiddleBlocks middle = MiddleOf(static_cast<int>(seq->names.tokens()));
  o.stored.assign(static_cast<size_t>(o.shape.blocks_max), false);
  std::fill_n(o.stored.begin(), seq->names.blocks().size(), true);
  o.missing.clear();
  o.missing_done = 0;
  o.blocks_lost = 0;
  const TicketRef ticket = seq->ticket.ref();
  const bool selects = std::any_of(o.shape.hot_slots.begin(), o.shape.hot_slots.end(),
                                   [](int slots) { return slots > 0; });
  auto whole = std::make_shared<BlockPull>(0, layers_);
  std::vector<int> digested;
  for (int b = 0; b < blocks; ++b) {
    const auto i = static_cast<size_t>(b);
    if (b >= middle.first && b < middle.end) {
      o.slots->AppendStored();
      if (!selects) continue;
      const bool found = i < o.digest_places.size() &&
                         o.digest_places[i].presence == BlockPresence::kExact;
      (found ? digested : o.missing).push_back(b);
      continue;
    }
    KVT_CHECK(AppendWhole(*seq), "block=", b);
    const size_t at = i * static_cast<size_t>(layers_);
    whole->Add(ticket, &seq->places[i],
               absl::MakeConstSpan(seq->base_addresses).subspan(at, static_cast<size_t>(layers_)),
               absl::MakeConstSpan(seq->residual_addresses).subspan(at, static_cast<size_t>(layers_)));
  }
  seq->figures.blocks_pulled += whole->size();
  RunPulls(seq, *deps_.tier, {whole}, [this, seq, digested] {
    if (digested.empty()) return RebuildDigests(seq);
    OffloadedSequence& offload = *seq->offload;
    absl::StatusOr<DigestStage> stage =
        DigestStage::Create(deps_.transformer->device(), *deps_.digest_layout,
                            static_cast<int>(digested.size()));
    if (!stage.ok()) {
      offload.missing.insert(offload.missing.end(), digested.begin(), digested.end());
      return RebuildDigests(seq);
    }
    offload.stage.emplace(*std::move(stage));
    auto pull = std::make_shared<BlockPull>(0, 1);
    for (size_t i = 0; i < digested.size(); ++i) {
      std::byte* const base = offload.stage->Base(static_cast<int>(i));
      std::byte* const residual = offload.stage->Residual(static_cast<int>(i));
      pull->Add(seq->ticket.ref(), &offload.digest_places[static_cast<size_t>(digested[i])],
                {&base, 1}, {&residual, 1});
    }
    RunPulls(seq, *deps_.digest_tier, {pull},
             [this, seq, digested, pull] { TakeDigests(seq, digested, *pull); });
  });
}

void DecodeEngine::RunPulls(const Seq& seq, TierClient& tier,
                            std::vector<std::shared_ptr<BlockPull>> pulls,
                            std::function<void()> then) {
  OffloadedSequence& o = *seq->offload;
  KVT_CHECK(o.pulls_left == 0);
  pulls.erase(std::remove_if(pulls.begin(), pulls.end(),
                             [](const auto& pull) { return pull->size() == 0; }),
              pulls.end());
  if (pulls.empty()) return then();
  o.pulls = std::move(pulls);
  o.then = std::move(then);
  o.pulls_left = static_cast<int>(o.pulls.size());
  const bool digests = &tier == deps_.digest_tier;
  for (const auto& pull : o.pulls) {
    ++seq->pending;
    pull->Start(tier, queue_, [this, seq, digests](const TransferResult& result) {
      OnLoadPulled(seq, digests, result);
    });
  }
}

void DecodeEngine::OnLoadPulled(const Seq& seq, bool digests, const TransferResult& result) {
  OffloadedSequence& o = *seq->offload;
  --seq->pending;
  seq->figures.pulled_bytes += result.bytes;
  if (!seq->stepped) seq->figures.admission_bytes += result.bytes;
  seq->figures.pull_bursts += result.bursts;
  seq->figures.disk_blocks += static_cast<uint64_t>(result.blocks_from_disk);
  seq->figures.disk_bytes += result.bytes_from_disk;
  if (digests) {
    if (!seq->stepped) seq->figures.digest_bytes += result.bytes;  // lost ones are made here
  } else {
    o.blocks_lost += result.blocks_lost;
  }
  deps_.metrics->Pulled(result.bytes, result.blocks_ok, digests ? 0 : result.blocks_lost);
  if (--o.pulls_left > 0) return;
  const std::function<void()> then = std::exchange(o.then, nullptr);
  o.pulls.clear();
  if (seq->phase != SequencePhase::kDraining && o.blocks_lost == 0) return then();
  FinishLoad(seq);
}

void DecodeEngine::TakeDigests(const Seq& seq, const std::vector<int>& blocks,
                               const BlockPull& pull) {
  OffloadedSequence& o = *seq->offload;
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (pull.ok(i)) {
      o.stage->CopyTo(o.digests, static_cast<int>(i), blocks[i]);
    } else {
      o.missing.push_back(blocks[i]);
    }
  }
  o.stage.reset();
  RebuildDigests(seq);
}

void DecodeEngine::RebuildDigests(const Seq& seq) {
  OffloadedSequence& o = *seq->offload;
  if (o.missing_done == 0) std::sort(o.missing.begin(), o.missing.end());
  if (o.missing_done == o.missing.size()) return LoadSelection(seq);
  // As many at once as the smallest layer has hot slots; nothing has been selected yet.
  size_t count = o.missing.size() - o.missing_done;
  for (int l = 0; l < layers_; ++l) {
    if (!heads_->dense(l)) count = std::min(count, o.slots->HotPairs(l).size());
  }
  const std::vector<int> blocks(o.missing.begin() + static_cast<ptrdiff_t>(o.missing_done),
                                o.missing.begin() + static_cast<ptrdiff_t>(o.missing_done + count));
  auto pull = std::make_shared<BlockPull>(0, layers_);
  for (size_t i = 0; i < count; ++i) {
    std::vector<std::byte*> base, residual;
    for (int l = 0; l < layers_; ++l) {
      const SlotPair pair =
          heads_->dense(l) ? o.slots->Pair(l, blocks[i]) : o.slots->HotPairs(l)[i];
      base.push_back(Address(pair.base));
      residual.push_back(Address(pair.residual));
    }
    pull->Add(seq->ticket.ref(), &seq->places[static_cast<size_t>(blocks[i])], base, residual);
  }
  seq->figures.blocks_pulled += count;
  RunPulls(seq, *deps_.tier, {pull}, [this, seq, blocks, count] {
    OffloadedSequence& offload = *seq->offload;
    const std::vector<uint32_t> entries(blocks.begin(), blocks.end());
    for (int l = 0; l < layers_; ++l) {
      if (heads_->dense(l)) continue;
      offloaded_step_->MakeDigests(offload.digests, l, offload.slots->HotPairs(l).first(count),
                                   entries);
    }
    offload.missing_done += count;
    deps_.metrics->DigestsMade(count);
    ++seq->pending;
    offloaded_step_->Then([this, seq] {
      --seq->pending;
      if (seq->phase == SequencePhase::kDraining) return FinishLoad(seq);
      RebuildDigests(seq);
    });
  });
}

void DecodeEngine::LoadSelection(const Seq& seq) {
  OffloadedSequence& o = *seq->offload;
  const MiddleBlocks middle = MiddleOf(static_cast<int>(seq->names.tokens()));
  std::vector<std::shared_ptr<BlockPull>> pulls;
  for (int l = 0; l < layers_; ++l) {
    auto pull = std::make_shared<BlockPull>(l, l + 1);
    const auto add = [&](int block, SlotPair pair) {
      std::byte* const base = Address(pair.base);
      std::byte* const residual = Address(pair.residual);
      pull->Add(seq->ticket.ref(), &seq->places[static_cast<size_t>(block)], {&base, 1},
                {&residual, 1});
    };
    if (heads_->dense(l)) {
      for (int b = middle.first; b < std::min(middle.end, o.slots->blocks()); ++b) {
        const bool loaded = std::binary_search(o.missing.begin(), o.missing.end(), b);
        if (!loaded) add(b, o.slots->Pair(l, b));
      }
    } else {
      const std::vector<int32_t>& wanted = o.first_selection[static_cast<size_t>(l)];
      for (const BlockFetch& fetch : o.slots->Select(l, wanted, {}, INT_MAX).fetches) {
        add(fetch.block, fetch.pair);
      }
    }
    pulls.push_back(std::move(pull));
  }
  RunPulls(seq, *deps_.tier, std::move(pulls), [this, seq, middle] {
    // Recent blocks will be of the middle soon.
    OffloadedSequence& offload = *seq->offload;
    std::vector<uint32_t> blocks;
    for (int b = middle.end; b < static_cast<int>(seq->names.blocks().size()); ++b) {
      blocks.push_back(static_cast<uint32_t>(b));
    }
    for (int l = 0; l < layers_ && !blocks.empty(); ++l) {
      if (heads_->dense(l)) continue;
      std::vector<SlotPair> pairs;
      for (const uint32_t b : blocks) pairs.push_back(offload.slots->Pair(l, static_cast<int>(b)));
      offloaded_step_->MakeDigests(offload.digests, l, pairs, blocks);
    }
    ++seq->pending;
    offloaded_step_->Then([this, seq] {
      --seq->pending;
      FinishLoad(seq);
    });
  });
}

void DecodeEngine::FinishLoad(const Seq& seq) {
  pulls_.Finished();
  if (seq->phase == SequencePhase::kDraining) return MaybeForget(seq);
  OffloadedSequence& o = *seq->offload;
  if (deps_.digest_tier != nullptr) deps_.digest_tier->Release(seq->ticket.ref());
  o.digest_places.clear();
  o.stage.reset();
  if (o.blocks_lost > 0) return Resume(seq, o.blocks_lost);
  seq->digest_write.unwritten = o.missing;
  for (int b = 0; b < o.slots->blocks(); ++b) {
    offloaded_step_->SetBlock(seq->table_row, *o.slots, b);
  }
  StartRunning(seq);
}

}  // namespace kvt
