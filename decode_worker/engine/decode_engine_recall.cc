// Of DecodeEngine: steps of the offloaded class by the policy `sync-recall` (DESIGN 5): select, pull what
// is not there, attend; and what happens to blocks that decoding completes: they stay on the device
// until the tier has a sealed copy. How such sequences begin: decode_engine_offload.cc.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "decode_worker/engine/decode_engine.h"
#include "decode_worker/engine/step_fetch.h"
#include "kernels/base/check.h"
#include "kernels/base/log.h"
#include "kernels/select/attention_stats.h"
#include "kvstore/wire/fidelity.h"

namespace kvt {

bool DecodeEngine::StartOffloadedStep() {
  std::vector<OffloadedRow> rows;
  for (const uint64_t id : offloaded_schedule_.TakeBatch(options_.batch_max)) {
    const Seq seq = sequences_.at(id);
    OffloadedSequence& o = *seq->offload;
    const int position = static_cast<int>(seq->tokens.size()) - 1;
    if (position / kBlockTokens == o.slots->blocks()) {
      if (!AppendWhole(*seq)) {
        if (seq->write_back_runs) continue;  // its end makes room, or not
        Fail(seq, absl::UnavailableError(absl::StrCat(
                      deps_.node, " has no device memory for blocks that the tier does not take")));
        continue;
      }
      offloaded_step_->SetBlock(seq->table_row, *o.slots, position / kBlockTokens);
    }
    for (const int block : std::exchange(o.digests_due, {})) {
      const auto entry = static_cast<uint32_t>(block);
      for (int l = 0; l < layers_; ++l) {
        if (heads_->dense(l)) continue;
        const SlotPair pair = o.slots->Pair(l, block);
        offloaded_step_->MakeDigests(o.digests, l, {&pair, 1}, {&entry, 1});
      }
      o.digests_in_step.push_back(block);
    }
    rows.push_back({.slots = &*o.slots,
                    .digests = &o.digests,
                    .table_row = seq->table_row,
                    .position = position,
                    .token = seq->tokens.back(),
                    .sample = seq->NextSample()});
    o.stepping = true;
    o.step_lost = false;
    if (!seq->stepped) seq->figures.admission = deps_.clock->Now() - seq->accepted;
    seq->stepped = true;
    seq->last_step = step_ + 1;
    ++seq->pending;  // the step reads its slots and digests to the end
    stepping_.push_back(seq);
  }
  if (rows.empty()) return false;
  ++step_;
  step_began_ = deps_.clock->Now();
  offloaded_step_->Enqueue(step_, rows);
  return true;
}

void DecodeEngine::FetchForStep(int layer, absl::Span<const OffloadedFetch> fetches,
                                std::function<void(const std::vector<bool>&)> done) {
  const StepFetch::Deps deps{.tier = *deps_.tier,
                             .queue = queue_,
                             .control = *deps_.control,
                             .clock = *deps_.clock,
                             .cache = *deps_.cache,
                             .metrics = *deps_.metrics,
                             .at = [this](absl::Time time, Task task) { At(time, std::move(task)); }};
  std::make_shared<StepFetch>(deps, layer, stepping_, fetches, std::move(done))->Start();
}

void DecodeEngine::OnOffloadedStepDone(const OffloadedStepResult& result) {
  const absl::Status health = deps_.transformer->device().Health();
  KVT_CHECK(health.ok(), health.ToString());
  pool_.Retire(result.step);
  deps_.metrics->Step(static_cast<int>(result.rows.size()), deps_.clock->Now() - step_began_,
                      result.saturated);
  deps_.metrics->OffloadedStep();
  const std::vector<Seq> stepped = std::exchange(stepping_, {});
  for (size_t i = 0; i < stepped.size(); ++i) {
    const Seq& seq = stepped[i];
    const OffloadedRowResult& row = result.rows[i];
    --seq->pending;
    seq->offload->stepping = false;
    if (seq->phase != SequencePhase::kRunning) {  // it ended while the step ran
      MaybeForget(seq);
      continue;
    }
    OffloadedSequence& o = *seq->offload;
    std::vector<int>& unwritten = seq->digest_write.unwritten;
    unwritten.insert(unwritten.end(), o.digests_in_step.begin(), o.digests_in_step.end());
    o.digests_in_step.clear();
    deps_.metrics->Recalled(row.selected, row.misses, row.left_out);
    seq->figures.selected_blocks += static_cast<uint64_t>(row.selected);
    seq->figures.hot_misses += static_cast<uint64_t>(row.misses);
    if (row.lost > 0) {
      // The step is computed again; its selection may change, what it wrote is written again.
      offloaded_schedule_.Remove(seq->id);
      o.lost = row.lost;
      ResumeAtLast(seq);
      continue;
    }
    seq->resumes = 0;  // it went on
    if (!row.exact) ++seq->figures.sparse_steps;
    o.sparse = o.sparse || !row.exact;
    seq->names.Append(absl::MakeConstSpan(&seq->tokens.back(), 1),
                      o.sparse ? Provenance::kSparse : Provenance::kExact);
    CountOf(seq->names.worst(), seq->figures.computed) += 1;
    if (!seq->names.HasTail()) {
      o.digests_due.push_back(static_cast<int>(seq->names.blocks().size()) - 1);
      if (!seq->write_back_runs) RetryWriteBack(*seq);
    }
    WriteBack(seq);
    WriteDigests(seq);
    LetGoStored(*seq);
    o.slots->EndStep();
    TakeToken(seq, row.token);
  }
}

// An offloaded sequence that lost blocks goes back to prefill once nothing of it is written back. True:
// it does, or will.
bool DecodeEngine::ResumeAtLast(const Seq& seq) {
  if (seq->offload == nullptr || seq->offload->lost == 0) return false;
  if (seq->phase != SequencePhase::kRunning) return false;
  if (!seq->write_back_runs && !seq->digest_write.runs) Resume(seq, seq->offload->lost);
  return true;
}

// Blocks that no store took are offered again with the next one: they hold device memory.
void DecodeEngine::RetryWriteBack(Sequence& seq) {
  const std::vector<bool>& stored = seq.offload->stored;
  const auto refused = std::find(stored.begin(), stored.begin() + seq.written_back, false);
  seq.written_back = static_cast<int>(refused - stored.begin());
}

void DecodeEngine::LetGoStored(Sequence& seq) {
  OffloadedSequence& o = *seq.offload;
  if (seq.phase != SequencePhase::kRunning) return;
  const MiddleBlocks middle = MiddleOf(static_cast<int>(seq.names.tokens()));
  for (int b = middle.first; b < std::min(middle.end, o.slots->blocks()); ++b) {
    if (o.slots->whole(b) && o.stored[static_cast<size_t>(b)]) o.slots->LetGo(b, seq.last_step);
  }
}

void DecodeEngine::FindWrittenBack(const Seq& seq) {
  if (seq->offload == nullptr || seq->phase != SequencePhase::kRunning) return EndWriteBack(seq);
  // Where the blocks lie now, pinned: another writer may have been first. One that is not found
  // stays on the device.
  const int first = seq->write_back_begin;
  const absl::Span<const TierBlock> all = seq->names.blocks();
  const std::vector<TierBlock> names(all.begin() + first, all.begin() + seq->written_back);
  if (names.empty()) return EndWriteBack(seq);
  Control<LookupResult>(
      seq,
      [this, ticket = seq->ticket, names] {
        return deps_.tier->Lookup(ticket, names, LookupReach::kEveryStore);
      },
      [this, seq, first](LookupResult found) {
        if (seq->phase == SequencePhase::kRunning) {
          OffloadedSequence& o = *seq->offload;
          const size_t end = static_cast<size_t>(first) + found.blocks.size();
          if (seq->places.size() < end) seq->places.resize(end);
          for (size_t i = 0; i < found.blocks.size(); ++i) {
            if (found.blocks[i].presence != BlockPresence::kExact) continue;
            seq->places[static_cast<size_t>(first) + i] = found.blocks[i];
            o.stored[static_cast<size_t>(first) + i] = true;
          }
          if (!o.stepping) LetGoStored(*seq);
        }
        EndWriteBack(seq);
      });
}

}  // namespace kvt
