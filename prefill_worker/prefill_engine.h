// The prefill worker's state machine: jobs from submission to hand-over (DESIGN 5, 7). One engine
// thread owns everything here; RPC threads, control threads, the transport and the device only post
// into its queue. A job goes
//
//   queued -> opening (lookup, pins, reservation) -> pulling (what exists) -> computing (chunks take
//   turns; each layer's finished blocks are pushed while the next layer computes) -> flushing ->
//   sealing (lost blocks are placed again) -> handing over
//
// Slots are freed as soon as every block is sealed; pins and reservations are released when the
// decode worker has acknowledged, for it pins the blocks itself.
//
// Life cycle: Run() on a thread of the composition root until Stop(); jobs that still run then end
// with Unavailable. Everything borrowed outlives the engine.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/base/clock.h"
#include "kernels/base/mutex.h"
#include "kernels/model/kv_cache.h"
#include "kernels/model/slot_pool.h"
#include "kernels/model/transformer.h"
#include "kvstore/client/call_pool.h"
#include "kvstore/client/rate_average.h"
#include "kvstore/client/task_queue.h"
#include "kvstore/client/ticket_reporter.h"
#include "kvstore/client/tier_client.h"
#include "prefill_worker/admission_queue.h"
#include "prefill_worker/chunk_schedule.h"
#include "prefill_worker/digest_write.h"
#include "prefill_worker/first_selection.h"
#include "prefill_worker/job_control.h"
#include "prefill_worker/layer_pipeline.h"
#include "prefill_worker/prefill_job.h"
#include "prefill_worker/prefill_metrics.h"
#include "prefill_worker/prefill_options.h"
#include "prefill_worker/trace_file.h"

namespace kvt {

// Times blocks that a store lost are placed and pushed again.
inline constexpr int kBlockRepairsMax = 3;
// Steps whose pushes may be unfinished while another step starts.
inline constexpr size_t kUnpushedStepsMax = 2;

struct PrefillEngineDeps {
  NodeName node;
  const Transformer* transformer = nullptr;
  KvCache* cache = nullptr;
  TierClient* tier = nullptr;
  // All three or, without a calibration, none.
  TierClient* digest_tier = nullptr;
  const DigestLayout* digests = nullptr;
  FirstSelector* selector = nullptr;
  CoordinatorApi* coordinator = nullptr;
  CallPool* control = nullptr;  // not the tier client's own
  TicketReporter* reporter = nullptr;
  const TicketGate* gate = nullptr;
  DecodeConnector connect_decode;
  PrefillMetrics* metrics = nullptr;
  TraceFile* trace = nullptr;  // null: none
  const Clock* clock = nullptr;
};

class PrefillEngine {
 public:
  static absl::StatusOr<std::unique_ptr<PrefillEngine>> Create(const PrefillOptions& options,
                                                               PrefillEngineDeps deps);
  ~PrefillEngine();

  // Any thread. ResourceExhausted: queue full, or the prompt needs more slots than there are;
  // AlreadyExists: the ticket is in work or was; Unavailable: draining.
  absl::Status Submit(std::shared_ptr<PrefillJob> job);
  // NotFound: not here (any more). PermissionDenied: another capability.
  absl::Status Cancel(TicketId ticket, const std::string& capability);
  // By the coordinator's word. Unknown tickets are left alone.
  void CancelAll(std::vector<TicketId> tickets);
  [[nodiscard]] LoadReport Load() const;
  [[nodiscard]] uint64_t NextJobId() { return next_job_.fetch_add(1); }

  // The body of the engine thread.
  void Run();
  // Refuses new jobs; Idle() tells when the others have ended.
  void Drain();
  [[nodiscard]] bool Idle() const;
  // Ends what runs and makes Run return.
  void Stop();

 private:
  using Job = std::shared_ptr<PrefillJob>;
  // The pushes of one step or one repair.
  struct PushSet {
    struct Entry {
      Job job;
      int block;
    };
    // What one TierPush borrows until it is done: one layer of a step, or all layers of a repair.
    struct Part {
      std::vector<Entry> entries;
      std::vector<PushBlock> blocks;
      std::vector<TransferOutcome> outcomes;
      int layer_begin = 0;
      int layer_end = 0;
      absl::Time began;
    };
    uint64_t step = 0;
    std::vector<Entry> entries;
    std::vector<std::unique_ptr<Part>> parts;
    int unfinished = 0;
    bool all_sent = false;
  };
  using PushSetPtr = std::shared_ptr<PushSet>;

  PrefillEngine(const PrefillOptions& options, PrefillEngineDeps deps);

  // Runs `call` on a control thread and `then` with its result on the engine thread, unless the job
  // has ended meanwhile.
  template <typename Result>
  void Control(const Job& job, std::function<Result()> call, std::function<void(Result)> then);
  void At(absl::Time time, Task task);
  [[nodiscard]] absl::Duration UntilNextTimer() const;
  void RunTimers();

  absl::Status OnSubmit(const Job& job);
  void Admit();
  void GiveSlots(const Job& job);
  void FreeSlots(const Job& job);
  void Open(const Job& job);
  void OnOpened(const Job& job, OpenOutcome outcome);
  // The stores had no room, or could not be reached: back to the queue, with its age.
  void OpenLater(const Job& job);
  // No store is reachable: everything is computed and nothing is stored; the decode worker computes
  // the prompt again (docs/decisions/0006).
  void OpenWithoutTier(const Job& job);
  // Takes out of `present` what would take longer to fetch than to compute.
  void DeclineSlow(const Job& job, std::vector<bool>& present);
  void Pull(const Job& job);
  void OnPulled(const Job& job, const TransferResult& result);
  void StartCompute(const Job& job);

  void StartStep();
  void OnLayerWritten(uint64_t step, int layer);
  void OnStepDone(const PipelineResult& result);
  void OnFirstToken(const Job& job, int32_t token);
  PushSetPtr NewPushSet(uint64_t step);
  void AddToPushSet(PushSet& set, const Job& job, int block);
  void SendPushes(const PushSetPtr& set, int layer_begin, int layer_end);
  void OnPushed(const PushSetPtr& set, int part, const TransferResult& result);

  void MaybeSeal(const Job& job);
  void OnSealed(const Job& job, SealOutcomes outcomes);
  void Place(const Job& job);
  // Of an offloaded request: what its last step made goes into the tier beside the planes.
  void WriteDigests(const Job& job);
  void PushDigests(const Job& job, std::shared_ptr<DigestWrite> write);
  void SealDigests(const Job& job, std::shared_ptr<DigestWrite> write);
  void EndDigests(const Job& job);
  // Once the digests are in the tier too, or have had their time.
  void HandOverWithDigests(const Job& job);
  void HandOver(const Job& job);
  void OnHandOver(const Job& job, const absl::Status& status);

  void End(const Job& job, absl::Status status);
  void Release(const Job& job);
  void MaybeForget(const Job& job);
  void Report(const Job& job, RequestPhase phase, const std::string& error);
  void Publish();

  const PrefillOptions options_;
  const PrefillEngineDeps deps_;
  const int layers_;
  TaskQueue queue_;
  std::unique_ptr<LayerPipeline> pipeline_;
  std::atomic<uint64_t> next_job_{1};

  // Of the engine thread.
  SlotPool pool_;
  AdmissionQueue admission_;
  ChunkSchedule schedule_;
  std::map<uint64_t, Job> jobs_;
  absl::flat_hash_map<TicketId, uint64_t> by_ticket_;
  absl::flat_hash_map<TicketId, TicketEpoch> seen_;  // bounded: of the latest tickets
  std::deque<TicketId> seen_order_;
  std::vector<int> free_rows_;
  std::multimap<absl::Time, Task> timers_;
  uint64_t step_ = 0;
  absl::Time step_began_;
  RateAverage tokens_rate_;  // of steps, tokens
  std::vector<std::pair<Job, ChunkTurn>> running_;  // of the step in flight
  PushSetPtr running_pushes_;
  size_t unpushed_sets_ = 0;
  bool draining_ = false;
  bool stopping_ = false;
  uint64_t tokens_done_ = 0;

  mutable Mutex mu_;
  LoadReport load_ ABSL_GUARDED_BY(mu_);
};

template <typename Result>
void PrefillEngine::Control(const Job& job, std::function<Result()> call,
                            std::function<void(Result)> then) {
  ++job->pending;
  const bool queued = deps_.control->TryRun([this, job, call = std::move(call),
                                             then = std::move(then)] {
    auto result = std::make_shared<Result>(call());
    queue_.Post([this, job, result, then] {
      --job->pending;
      if (job->phase == PrefillPhase::kEnding) {
        MaybeForget(job);
      } else {
        then(std::move(*result));
      }
    });
  });
  if (!queued) {
    --job->pending;
    End(job, absl::ResourceExhaustedError("the prefill worker has too many calls in progress"));
  }
}

}  // namespace kvt
