#include "decode_worker/engine/prompt_chunk.h"

#include <utility>

#include "kernels/base/check.h"

namespace kvt {

absl::StatusOr<std::unique_ptr<PromptChunk>> PromptChunk::Create(const Transformer& transformer,
                                                                 KvCache& cache,
                                                                 TaskQueue& queue) {
  std::unique_ptr<PromptChunk> chunk(new PromptChunk(transformer, cache, queue));
  KVT_ASSIGN_OR_RETURN(chunk->state_,
                       transformer.NewStepState(
                           {.rows = kPromptChunkTokens, .logits_rows = 1, .segments = 1}));
  chunk->stream_ = transformer.device().NewStream(StreamPriority::kNormal);
  return chunk;
}

PromptChunk::PromptChunk(const Transformer& transformer, KvCache& cache, TaskQueue& queue)
    : transformer_(transformer), cache_(cache), queue_(queue) {}

PromptChunk::~PromptChunk() { stream_.reset(); }

void PromptChunk::Enqueue(int table_row, int blocks,
                          std::shared_ptr<const std::vector<SlotPair>> pairs, int first_position,
                          absl::Span<const int32_t> tokens, std::function<void()> done) {
  KVT_CHECK(!busy_ && !tokens.empty() && tokens.size() <= size_t{kPromptChunkTokens},
            "tokens=", tokens.size());
  busy_ = true;
  table_ = std::move(pairs);
  Stream& stream = *stream_;
  cache_.SetTableAllLayers(stream, table_row, 0, blocks, *table_);
  const StepSegment segment{.table_row = table_row,
                            .first_position = first_position,
                            .tokens = tokens,
                            .logits_rows = 0};
  transformer_.Begin(stream, *state_, cache_, absl::MakeConstSpan(&segment, 1));
  for (int layer = 0; layer < transformer_.geometry().layers; ++layer) {
    transformer_.ProjectQkv(stream, *state_, layer);
    transformer_.Attend(stream, *state_, layer);
    transformer_.FinishLayer(stream, *state_, layer);
  }
  stream.Callback([this, done = std::move(done)] {
    queue_.Post([this, done] {
      busy_ = false;
      table_.reset();
      done();
    });
  });
}

}  // namespace kvt
