// The decode worker's state machine: sequences from hand-over to their last token (DESIGN 5, 7). One
// engine thread owns everything here; RPC threads, control threads, the transport and the device
// only post into its queue. A sequence goes
//
//   opening (lookup, pins) -> pulling (all blocks, both planes) -> running (steps with all others)
//   -> draining
//
// and from opening or pulling to resuming and back when stored blocks are lost: a prefill worker
// computes them again under a higher epoch. Only while no store is reachable decode computes prompt
// tokens itself (computing, then running): chunks take turns with steps. Each block that decoding
// completes is pushed to the tier; a store that refuses or is dead is counted and ignored.
//
// Resident sequences step together, offloaded ones (decode_engine_offload.cc) together; one step is in
// flight, of either class in turn. An offloaded sequence pulls a part of its blocks, may resume from
// running too (a miss is lost), and lets go of a block only when the tier has a sealed copy of it.
//
// Life cycle: Run() on a thread of the composition root until Stop(); sequences that still run then
// end with Unavailable. Everything borrowed outlives the engine.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "decode_worker/decode_metrics.h"
#include "decode_worker/decode_options.h"
#include "decode_worker/engine/decode_step.h"
#include "decode_worker/engine/prompt_chunk.h"
#include "decode_worker/engine/sequence.h"
#include "decode_worker/engine/sequence_control.h"
#include "decode_worker/offload/offloaded_step.h"
#include "decode_worker/pool/shared_blocks.h"
#include "decode_worker/schedule/batch_schedule.h"
#include "decode_worker/schedule/pull_schedule.h"
#include "kernels/base/clock.h"
#include "kernels/base/mutex.h"
#include "kernels/model/digest_heads.h"
#include "kernels/model/kv_cache.h"
#include "kernels/model/slot_pool.h"
#include "kernels/model/transformer.h"
#include "kernels/select/calibration.h"
#include "kvstore/client/call_pool.h"
#include "kvstore/client/digest_blocks.h"
#include "kvstore/client/task_queue.h"
#include "kvstore/client/ticket_reporter.h"
#include "kvstore/client/tier_client.h"

namespace kvt {

// Times a sequence is sent back to prefill for lost blocks.
inline constexpr int kResumesMax = 3;

// Completed blocks that a running sequence may have without a copy in the tier; a sequence with more
// is counted (DESIGN 6: it could not be demoted or moved now).
inline constexpr int kWriteBackBehindMax = 2;

struct DecodeEngineDeps {
  NodeName node;
  const Transformer* transformer = nullptr;
  KvCache* cache = nullptr;
  TierClient* tier = nullptr;
  CoordinatorApi* coordinator = nullptr;
  CallPool* control = nullptr;  // not the tier client's own
  TicketReporter* reporter = nullptr;
  PrefillConnector connect_prefill;
  DecodeMetrics* metrics = nullptr;
  const Clock* clock = nullptr;
  // For the offloaded class; null: requests of that class are served resident.
  const Calibration* calibration = nullptr;
  const DigestLayout* digest_layout = nullptr;  // null: digests are always made from planes
  TierClient* digest_tier = nullptr;            // with digest_layout
};

class DecodeEngine {
 public:
  static absl::StatusOr<std::unique_ptr<DecodeEngine>> Create(const DecodeOptions& options,
                                                              DecodeEngineDeps deps);
  ~DecodeEngine();

  // Any thread; blocks for the lookup. Checked request; `domain` names its blocks. OK: accepted.
  // ResourceExhausted: no slots or rows. FailedPrecondition: fenced by a higher epoch, or a resume
  // nobody waits for. Unavailable: draining.
  absl::Status HandOver(HeldTicket ticket, const KeyDomain& domain, HandOverRequest request);
  // The output of a request that is here or ended lately; null: unknown.
  [[nodiscard]] std::shared_ptr<TokenStream> Stream(TicketId ticket) const;
  // NotFound: not here (any more). PermissionDenied: another capability.
  absl::Status Cancel(TicketId ticket, const std::string& capability);
  // By the coordinator's word: cancelled there, or a node it needs died.
  void CancelAll(std::vector<TicketId> tickets);
  [[nodiscard]] LoadReport Load() const;

  // The body of the engine thread.
  void Run();
  // Refuses new sequences; Idle() tells when the others have ended.
  void Drain();
  [[nodiscard]] bool Idle() const;
  // Ends what runs and makes Run return.
  void Stop();

 private:
  using Seq = std::shared_ptr<Sequence>;
  struct Admission;

  DecodeEngine(const DecodeOptions& options, DecodeEngineDeps deps);

  // Runs `call` on a control thread and `then` with its result on the engine thread, unless the
  // sequence has ended meanwhile.
  template <typename Result>
  void Control(const Seq& seq, std::function<Result()> call, std::function<void(Result)> then);
  void At(absl::Time time, Task task);
  [[nodiscard]] absl::Duration UntilNextTimer() const;
  void RunTimers();

  absl::Status OnHandOver(const std::shared_ptr<Admission>& admission);
  absl::Status Accept(const std::shared_ptr<Admission>& admission);
  [[nodiscard]] absl::Status NoSlots(uint64_t needed) const;
  absl::Status AcceptResumed(const Seq& seq, const std::shared_ptr<Admission>& admission);
  // Appends a token to the output; true when the sequence has ended by it.
  bool TakeToken(const Seq& seq, int32_t token);
  void OnOpened(const Seq& seq, std::vector<PlacedBlock> places, std::vector<PlacedBlock> digests);
  void StartPulls();
  void Pull(const Seq& seq);
  void OnPulled(const Seq& seq, const TransferResult& result);
  void StartRunning(const Seq& seq);
  void Resume(const Seq& seq, int blocks_lost);
  void SendResume(const Seq& seq, int blocks_lost);
  // Slots for all blocks; those that another sequence holds are shared and count as loaded.
  void AppendSlots(const Seq& seq);
  void ComputeHere(const Seq& seq);
  [[nodiscard]] bool ChunkWaits();
  [[nodiscard]] bool ChunkRuns() const { return chunk_ != nullptr && chunk_->busy(); }
  void StartChunk();
  void OnChunkDone(const Seq& seq, int first, int end, uint64_t tokens);

  // The offloaded class: decode_engine_offload.cc.
  absl::Status CreateOffloaded();
  absl::StatusOr<std::unique_ptr<OffloadedSequence>> TryOffload(int blocks);
  void EndOffload(Sequence& seq);  // gives back what TryOffload took
  void TakeFirstSelection(Sequence& seq, const HandOverRequest& request);
  // Back to an empty sequence whose KV lies in the tier, or will, as exact; it is in no step.
  void BeginAgain(Sequence& seq);
  bool BecomeResident(Sequence& seq);
  bool AppendWhole(Sequence& seq);
  void LoadOffloaded(const Seq& seq);
  void RunPulls(const Seq& seq, TierClient& tier, std::vector<std::shared_ptr<BlockPull>> pulls,
                std::function<void()> then);
  void OnLoadPulled(const Seq& seq, bool digests, const TransferResult& result);
  void TakeDigests(const Seq& seq, const std::vector<int>& blocks, const BlockPull& pull);
  void RebuildDigests(const Seq& seq);
  void LoadSelection(const Seq& seq);
  void FinishLoad(const Seq& seq);
  bool StartOffloadedStep();
  void FetchForStep(int layer, absl::Span<const OffloadedFetch> fetches,
                    std::function<void(const std::vector<bool>&)> done);
  void OnOffloadedStepDone(const OffloadedStepResult& result);
  // Digests that were made here, into the tier: decode_engine_digests.cc.
  void WriteDigests(const Seq& seq);
  void ReserveDigests(const Seq& seq, const std::vector<int>& blocks, const DigestBuffer& from,
                      const std::vector<int>& entries);
  void OnDigestsReserved(const Seq& seq, absl::StatusOr<ReserveResult> reserved);
  void EndWriteDigests(const Seq& seq);
  void FindWrittenBack(const Seq& seq);
  void RetryWriteBack(Sequence& seq);
  void LetGoStored(Sequence& seq);
  void EndWriteBack(const Seq& seq);
  bool ResumeAtLast(const Seq& seq);
  [[nodiscard]] std::byte* Address(uint32_t slot) const {
    return reinterpret_cast<std::byte*>(deps_.cache->SlotAddress(slot));
  }
  void ReleaseTicket(const Sequence& seq);

  void StartStep();
  void OnStepDone(const DecodeStepResult& result);
  void WriteBack(const Seq& seq);
  void OnWriteReserved(const Seq& seq, int first, absl::StatusOr<ReserveResult> reserved);
  void OnWrittenBack(const Seq& seq, const TransferResult& result);

  void Tick();
  void Finish(const Seq& seq, FinishReason reason);
  void Fail(const Seq& seq, absl::Status status);
  void Drop(const Seq& seq);
  void MaybeForget(const Seq& seq);
  void Report(const Sequence& seq, RequestPhase phase, const std::string& error);
  void Publish();

  const DecodeOptions options_;
  const DecodeEngineDeps deps_;
  const int layers_;
  TaskQueue queue_;
  std::unique_ptr<DecodeStep> device_step_;
  std::unique_ptr<DigestHeads> heads_;  // null: without calibration
  std::unique_ptr<OffloadedStep> offloaded_step_;

  // Of the engine thread.
  SlotPool pool_;
  SharedBlocks shared_;
  PullSchedule pulls_;
  BatchSchedule schedule_;
  BatchSchedule offloaded_schedule_;
  std::map<uint64_t, Seq> sequences_;
  absl::flat_hash_map<TicketId, uint64_t> by_ticket_;
  std::vector<int> free_rows_;
  std::multimap<absl::Time, Task> timers_;
  uint64_t next_sequence_ = 1;
  uint64_t step_ = 0;
  std::vector<Seq> stepping_;  // in the step in flight, of either class
  bool last_offloaded_ = false;
  std::unique_ptr<PromptChunk> chunk_;  // made when first needed
  std::deque<Seq> computing_;           // in turn; ended ones are dropped when they come up
  bool chunks_turn_ = false;            // the device ran a step last
  absl::Time step_began_;
  bool ticking_ = false;
  bool draining_ = false;
  bool stopping_ = false;
  uint64_t tokens_done_ = 0;
  uint64_t digest_bytes_ = 0;  // of offloaded sequences; at most DecodeOptions::DigestBytesMax

  mutable Mutex mu_;
  LoadReport load_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<TicketId, std::shared_ptr<TokenStream>> streams_ ABSL_GUARDED_BY(mu_);
  std::deque<std::pair<absl::Time, TicketId>> finished_ ABSL_GUARDED_BY(mu_);  // oldest first
};

template <typename Result>
void DecodeEngine::Control(const Seq& seq, std::function<Result()> call,
                           std::function<void(Result)> then) {
  ++seq->pending;
  const bool queued = deps_.control->TryRun([this, seq, call = std::move(call),
                                             then = std::move(then)] {
    auto result = std::make_shared<Result>(call());
    queue_.Post([this, seq, result, then] {
      --seq->pending;
      then(std::move(*result));
      MaybeForget(seq);
    });
  });
  if (!queued) {
    --seq->pending;
    Fail(seq, absl::ResourceExhaustedError("the decode worker has too many calls in progress"));
  }
}

}  // namespace kvt
