// Of DecodeEngine: prompts computed here, when no store is reachable (docs/decisions/0006).
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "decode_worker/engine/decode_engine.h"
#include "kernels/base/check.h"
#include "kernels/base/log.h"

namespace kvt {

// No store is reachable: the blocks that are not loaded are computed on this device.
void DecodeEngine::ComputeHere(const Seq& seq) {
  KVT_LOG(kInfo, "request ", seq->ticket.ticket.id.value(),
          ": no store is reachable; its prompt is computed here");
  if (seq->offload != nullptr && !BecomeResident(*seq)) {
    return Fail(seq, absl::UnavailableError(absl::StrCat(
                         "no store is reachable, and ", deps_.node,
                         " has no room to compute the whole sequence of the offloaded class")));
  }
  seq->Enter(SequencePhase::kComputing);
  AppendSlots(seq);
  computing_.push_back(seq);
}

bool DecodeEngine::ChunkWaits() {
  while (!computing_.empty() && computing_.front()->phase != SequencePhase::kComputing) {
    computing_.pop_front();  // it ended
  }
  return !computing_.empty();
}

void DecodeEngine::StartChunk() {
  if (!ChunkWaits() || !stepping_.empty() || ChunkRuns()) return;
  if (!chunks_turn_ && !(schedule_.empty() && offloaded_schedule_.empty())) return;  // a step first
  const Seq seq = computing_.front();
  if (chunk_ == nullptr) {
    auto chunk = PromptChunk::Create(*deps_.transformer, *deps_.cache, queue_);
    if (!chunk.ok()) return Fail(seq, chunk.status());
    chunk_ = *std::move(chunk);
  }
  // The first hole: blocks up to the next one that is here, or a chunk's worth.
  const auto blocks = static_cast<int>(seq->loaded.size());
  const auto here = [&](int b) -> bool { return seq->loaded[static_cast<size_t>(b)]; };
  int first = 0;
  while (first < blocks && here(first)) ++first;
  if (first == blocks) {
    computing_.pop_front();
    return StartRunning(seq);
  }
  int end = first;
  while (end < blocks && !here(end) && (end - first) * kBlockTokens < kPromptChunkTokens) ++end;
  const auto begin_token = static_cast<size_t>(first) * kBlockTokens;
  const size_t end_token = std::min<size_t>(static_cast<size_t>(end) * kBlockTokens,
                                            static_cast<size_t>(seq->names.tokens()));
  chunks_turn_ = false;
  ++seq->pending;
  const int row_blocks = seq->slots.blocks_max();
  chunk_->Enqueue(
      seq->table_row, row_blocks,
      std::make_shared<const std::vector<SlotPair>>(seq->slots.Table(0, row_blocks)),
      static_cast<int>(begin_token),
      absl::MakeConstSpan(seq->tokens).subspan(begin_token, end_token - begin_token),
      [this, seq, first, end, tokens = end_token - begin_token] {
        OnChunkDone(seq, first, end, tokens);
      });
}

void DecodeEngine::OnChunkDone(const Seq& seq, int first, int end, uint64_t tokens) {
  --seq->pending;
  const absl::Status health = deps_.transformer->device().Health();
  KVT_CHECK(health.ok(), health.ToString());
  deps_.metrics->ComputedHere(tokens);
  seq->figures.prompt_tokens_computed += tokens;
  if (seq->phase != SequencePhase::kComputing) return MaybeForget(seq);
  for (int b = first; b < end; ++b) {
    const auto i = static_cast<size_t>(b);
    seq->loaded[i] = true;
    if (const BlockKey* const key = seq->ShareableKey(i); key != nullptr) {
      shared_.Publish(*key, seq->slots.blocks()[i]);
    }
  }
  // To the back: prompts take turns, so a long one does not hold up the others.
  computing_.pop_front();
  computing_.push_back(seq);
}

}  // namespace kvt
