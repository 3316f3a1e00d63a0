// Jobs, steps and the hand-over. What the engine has with the tier: prefill_engine_tier.cc.
#include "prefill_worker/prefill_engine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/log.h"
#include "kvstore/wire/fidelity.h"

namespace kvt {
namespace {

constexpr absl::Duration kIdleWait = absl::Seconds(5);
constexpr absl::Duration kRetryPause = absl::Milliseconds(100);
constexpr absl::Duration kEngineAnswer = absl::Seconds(5);
constexpr size_t kSeenTicketsMax = 4096;
// Control calls and completions that may wait for the engine thread.
constexpr size_t kEngineQueueMax = 64 * 1024;

SampleParams ToSampleParams(const SamplingParams& sampling, uint64_t position) {
  SampleParams params;
  params.temperature = static_cast<float>(sampling.temperature);
  params.top_k = sampling.top_k;
  params.top_p = static_cast<float>(sampling.top_p);
  params.seed = sampling.seed;
  params.position = position;
  return params;
}

}  // namespace

absl::StatusOr<std::unique_ptr<PrefillEngine>> PrefillEngine::Create(const PrefillOptions& options,
                                                                     PrefillEngineDeps deps) {
  std::unique_ptr<PrefillEngine> engine(new PrefillEngine(options, std::move(deps)));
  PrefillEngine* self = engine.get();
  KVT_ASSIGN_OR_RETURN(
      engine->pipeline_,
      LayerPipeline::Create(*engine->deps_.transformer, *engine->deps_.cache, engine->queue_,
                            options.chunk_tokens, options.active_max, engine->deps_.selector,
                            {.layer_written = [self](uint64_t step, int layer) {
                               self->OnLayerWritten(step, layer);
                             },
                             .step_done = [self](const PipelineResult& result) {
                               self->OnStepDone(result);
                             }}));
  return engine;
}

PrefillEngine::PrefillEngine(const PrefillOptions& options, PrefillEngineDeps deps)
    : options_(options),
      deps_(std::move(deps)),
      layers_(deps_.transformer->geometry().layers),
      queue_(kEngineQueueMax),
      pool_(layers_, deps_.cache->options().slot_count),
      admission_(static_cast<size_t>(options.queue_max), options.ageing_bound) {
  for (int row = deps_.cache->options().table_rows - 1; row >= 0; --row) free_rows_.push_back(row);
  Publish();
}

PrefillEngine::~PrefillEngine() { KVT_CHECK(jobs_.empty(), "jobs=", jobs_.size()); }

absl::Status PrefillEngine::Submit(std::shared_ptr<PrefillJob> job) {
  return RunOn(queue_, [this, job] { return OnSubmit(job); }, kEngineAnswer);
}

absl::Status PrefillEngine::Cancel(TicketId ticket, const std::string& capability) {
  return RunOn(
      queue_,
      [this, ticket, capability]() -> absl::Status {
        const auto it = by_ticket_.find(ticket);
        if (it == by_ticket_.end()) return absl::NotFoundError("no such request in this worker");
        const Job job = jobs_.at(it->second);
        if (job->ticket.ticket.capability != capability) {
          return absl::PermissionDeniedError("another capability");
        }
        End(job, absl::CancelledError("cancelled"));
        return absl::OkStatus();
      },
      kEngineAnswer);
}

void PrefillEngine::CancelAll(std::vector<TicketId> tickets) {
  queue_.Post([this, tickets = std::move(tickets)] {
    for (const TicketId ticket : tickets) {
      const auto it = by_ticket_.find(ticket);
      if (it == by_ticket_.end()) continue;
      End(jobs_.at(it->second),
          absl::CancelledError(
              "ended by the coordinator: cancelled, or a node that it needs is gone"));
    }
  });
}

LoadReport PrefillEngine::Load() const {
  MutexLock lock(mu_);
  return load_;
}

void PrefillEngine::Run() {
  while (!stopping_ || !jobs_.empty() || pipeline_->busy()) {
    queue_.RunAll(UntilNextTimer());
    RunTimers();
    Admit();
    StartStep();
    Publish();
  }
  queue_.Close();
}

void PrefillEngine::Drain() {
  queue_.Post([this] { draining_ = true; });
}

bool PrefillEngine::Idle() const {
  MutexLock lock(mu_);
  return load_.running == 0 && load_.waiting == 0;
}

void PrefillEngine::Stop() {
  queue_.Post([this] {
    draining_ = true;
    stopping_ = true;
    while (true) {
      const auto running = std::find_if(jobs_.begin(), jobs_.end(), [](const auto& entry) {
        return entry.second->phase != PrefillPhase::kEnding;
      });
      if (running == jobs_.end()) break;
      End(running->second, absl::UnavailableError("the prefill worker is stopping"));
    }
  });
}

void PrefillEngine::At(absl::Time time, Task task) { timers_.emplace(time, std::move(task)); }

absl::Duration PrefillEngine::UntilNextTimer() const {
  if (timers_.empty()) return kIdleWait;
  return std::clamp(timers_.begin()->first - deps_.clock->Now(), absl::ZeroDuration(), kIdleWait);
}

void PrefillEngine::RunTimers() {
  const absl::Time now = deps_.clock->Now();
  while (!timers_.empty() && timers_.begin()->first <= now) {
    const Task task = std::move(timers_.begin()->second);
    timers_.erase(timers_.begin());
    task();
  }
}

absl::Status PrefillEngine::OnSubmit(const Job& job) {
  KVT_CHECK(!job->digest_chain.has_value() || deps_.selector != nullptr);
  if (draining_) return absl::UnavailableError("the prefill worker is draining");
  const Ticket& ticket = job->ticket.ticket;
  const auto seen = seen_.find(ticket.id);
  if (seen != seen_.end()) {
    if (seen->second >= ticket.epoch) {
      return absl::AlreadyExistsError("this ticket was already presented here");
    }
    const auto running = by_ticket_.find(ticket.id);
    if (running != by_ticket_.end()) {
      End(jobs_.at(running->second), absl::AbortedError("a higher epoch of the ticket came"));
    }
  }
  const uint64_t slots =
      static_cast<uint64_t>(job->plan.blocks()) * pool_.SlotsPerBlock(PoolBlockState::kTarget);
  if (slots > pool_.total()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the prompt of ", job->tokens.size(), " tokens needs ", slots,
                     " slots; this prefill worker has ", pool_.total()));
  }
  const absl::Time now = deps_.clock->Now();
  if (!admission_.TryPush(job->id, slots, now)) {
    return absl::ResourceExhaustedError("this prefill worker's queue is full");
  }
  job->submitted = now;
  jobs_[job->id] = job;
  by_ticket_[ticket.id] = job->id;
  if (seen == seen_.end()) seen_order_.push_back(ticket.id);
  seen_[ticket.id] = ticket.epoch;
  if (seen_order_.size() > kSeenTicketsMax) {
    seen_.erase(seen_order_.front());
    seen_order_.pop_front();
  }
  Report(job, RequestPhase::kPrefill, "");
  return absl::OkStatus();
}

void PrefillEngine::Admit() {
  while (!free_rows_.empty()) {
    const auto id = admission_.Pop(pool_.available(), deps_.clock->Now());
    if (!id.has_value()) return;
    const Job job = jobs_.at(*id);
    GiveSlots(job);
    job->Enter(PrefillPhase::kOpening);
    if (job->asked_first == absl::Time()) {
      job->asked_first = deps_.clock->Now();
      job->wait_until = job->asked_first + options_.store_wait;
    }
    Open(job);
  }
}

void PrefillEngine::GiveSlots(const Job& job) {
  const int blocks = job->plan.blocks();
  const auto layers = static_cast<size_t>(layers_);
  KVT_CHECK(pool_.TryReserve(static_cast<uint64_t>(blocks) *
                             pool_.SlotsPerBlock(PoolBlockState::kTarget)));
  job->table_row = free_rows_.back();
  free_rows_.pop_back();
  job->base_addresses.resize(static_cast<size_t>(blocks) * layers);
  job->residual_addresses.resize(static_cast<size_t>(blocks) * layers);
  job->table = std::make_shared<std::vector<SlotPair>>(static_cast<size_t>(blocks) * layers);
  for (size_t b = 0; b < static_cast<size_t>(blocks); ++b) {
    job->pool_blocks.push_back(pool_.Allocate(PoolBlockState::kTarget));
    const absl::Span<const SlotPair> pairs = pool_.Pairs(job->pool_blocks.back());
    for (size_t l = 0; l < layers; ++l) {
      job->base_addresses[b * layers + l] =
          reinterpret_cast<std::byte*>(deps_.cache->SlotAddress(pairs[l].base));
      job->residual_addresses[b * layers + l] =
          reinterpret_cast<std::byte*>(deps_.cache->SlotAddress(pairs[l].residual));
      (*job->table)[l * static_cast<size_t>(blocks) + b] = pairs[l];
    }
  }
}

void PrefillEngine::FreeSlots(const Job& job) {
  for (const PoolBlock block : job->pool_blocks) pool_.Release(block, job->last_step);
  job->pool_blocks.clear();
  if (job->table_row >= 0) free_rows_.push_back(job->table_row);
  job->table_row = -1;
}

void PrefillEngine::StartCompute(const Job& job) {
  job->Enter(PrefillPhase::kComputing);
  job->figures.prompt_tokens = job->tokens.size();
  job->figures.computed_tokens = static_cast<uint64_t>(job->plan.computed_tokens_total());
  job->figures.reused_tokens = job->tokens.size() - job->figures.computed_tokens;
  pipeline_->SetTable(job->table_row, job->plan.blocks(), job->table);
  schedule_.Add(job->id, &job->plan);
}

void PrefillEngine::StartStep() {
  if (pipeline_->busy() || schedule_.empty() || unpushed_sets_ >= kUnpushedStepsMax) return;
  const std::vector<ChunkTurn> turns =
      schedule_.TakeStep(options_.chunk_tokens, options_.active_max);
  KVT_CHECK(!turns.empty());
  ++step_;
  running_pushes_ = NewPushSet(step_);
  std::vector<PipelineSegment> segments;
  const absl::Time now = deps_.clock->Now();
  for (const ChunkTurn& turn : turns) {
    const Job job = jobs_.at(turn.job);
    if (job->compute_began == absl::Time()) {
      job->compute_began = now;
      job->figures.queued = now - job->submitted;
    }
    ++job->pending;
    job->last_step = step_;
    running_.emplace_back(job, turn);
    PipelineSegment segment;
    segment.table_row = job->table_row;
    segment.first_position = turn.range.begin;
    segment.tokens = absl::MakeConstSpan(job->tokens)
                         .subspan(static_cast<size_t>(turn.range.begin),
                                  static_cast<size_t>(turn.range.size()));
    if (turn.last) segment.sample = ToSampleParams(job->sampling, job->tokens.size());
    if (turn.last && job->digest_chain.has_value()) {
      job->selection = deps_.selector->New(static_cast<int>(job->tokens.size()));
      segment.selection = job->selection.get();
    }
    segments.push_back(segment);
    for (int b = turn.range.begin / kBlockTokens; b * kBlockTokens < turn.range.end; ++b) {
      const JobBlock& block = job->blocks[static_cast<size_t>(b)];
      if (block.push && block.place.store != kNoStore) AddToPushSet(*running_pushes_, job, b);
    }
  }
  step_began_ = now;
  pipeline_->Enqueue(step_, segments);
  // Near the last chunk, so that the answer is there when it is needed.
  for (const auto& [job, turn] : running_) {
    if (turn.last) Place(job);
  }
}

void PrefillEngine::OnLayerWritten(uint64_t step, int layer) {
  KVT_CHECK(step == step_ && running_pushes_ != nullptr, "step=", step);
  SendPushes(running_pushes_, layer, layer + 1);
}

void PrefillEngine::OnStepDone(const PipelineResult& result) {
  pool_.Retire(result.step);
  const absl::Status health = deps_.transformer->device().Health();
  KVT_CHECK(health.ok(), health.ToString());
  if (deps_.trace != nullptr) {
    for (size_t l = 0; l < pipeline_->times().size(); ++l) {
      const LayerTimes& times = pipeline_->times()[l];
      deps_.trace->Span("compute", result.step, static_cast<int>(l), times.began, times.ended, 0);
      deps_.trace->Span("write", result.step, static_cast<int>(l), times.began, times.written, 0);
    }
  }
  running_pushes_->all_sent = true;
  if (running_pushes_->unfinished == 0) --unpushed_sets_;
  running_pushes_.reset();
  size_t sampled = 0;
  uint64_t tokens = 0;
  for (const auto& [job, turn] : running_) tokens += static_cast<uint64_t>(turn.range.size());
  const absl::Time now = deps_.clock->Now();
  tokens_rate_.Add(tokens, now - step_began_, now);
  for (auto& [job, turn] : std::exchange(running_, {})) {
    --job->pending;
    tokens_done_ += static_cast<uint64_t>(turn.range.size());
    const int32_t token = turn.last ? result.tokens[sampled++] : 0;
    if (job->phase == PrefillPhase::kEnding) {
      MaybeForget(job);
      continue;
    }
    if (turn.last) {
      job->figures.saturated_values += result.saturated;
      OnFirstToken(job, token);
    } else {
      PrefillEvent event;
      event.tokens_done = static_cast<uint64_t>(job->plan.tokens_done());
      job->stream->Write(std::move(event));
    }
  }
}

void PrefillEngine::OnFirstToken(const Job& job, int32_t token) {
  if (token == kTokenInvalid) {
    return End(job, absl::InternalError("the model produced NaN for this prompt"));
  }
  job->first_token = token;
  job->first_token_at = deps_.clock->Now();
  job->figures.compute = job->first_token_at - job->compute_began;
  deps_.metrics->Computed(job->figures);
  PrefillEvent event;
  event.kind = PrefillEvent::Kind::kFirstToken;
  event.tokens_done = job->tokens.size();
  event.token = token;
  job->stream->Write(std::move(event));
  job->Enter(PrefillPhase::kFlushing);
  job->wait_until = deps_.clock->Now() + options_.store_wait;
  Report(job, RequestPhase::kHandOver, "");
  if (job->selection != nullptr) WriteDigests(job);
  MaybeSeal(job);
}

void PrefillEngine::Place(const Job& job) {
  if (job->resume) {
    const Ticket& ticket = job->ticket.ticket;
    job->placement =
        Placement{job->ticket.signed_ticket, ticket.decode_address, ticket.decode_worker};
    if (job->phase == PrefillPhase::kHandingOver) HandOver(job);
    return;
  }
  if (job->placing) return;
  job->placing = true;
  const PlaceRequest request{job->ticket.signed_ticket, job->refused_by};
  Control<absl::StatusOr<Placement>>(
      job, [this, request] { return PlaceJob(*deps_.coordinator, *deps_.gate, request); },
      [this, job](absl::StatusOr<Placement> placement) {
        job->placing = false;
        job->placement = std::move(placement);
        if (job->phase == PrefillPhase::kHandingOver) HandOver(job);
      });
}

void PrefillEngine::HandOver(const Job& job) {
  if (job->awaits_digests) return;
  if (!job->placement.has_value()) return Place(job);
  if (!job->placement->ok()) {
    const absl::Status status = job->placement->status();
    if (!IsRetryable(status) || deps_.clock->Now() >= job->wait_until) {
      return End(job, Annotate(status, "no decode worker takes this request"));
    }
    job->refused_by.clear();
    job->placement.reset();
    At(deps_.clock->Now() + kRetryPause, [this, job] {
      if (job->phase == PrefillPhase::kHandingOver) Place(job);
    });
    return;
  }
  Control<absl::Status>(
      job,
      [this, job, placement = **job->placement] {
        return OfferHandOver(deps_.connect_decode, placement, *job,
                             deps_.digests == nullptr ? "" : deps_.digests->calibration_id());
      },
      [this, job](absl::Status status) { OnHandOver(job, status); });
}

void PrefillEngine::OnHandOver(const Job& job, const absl::Status& status) {
  if (status.ok()) {
    job->figures.hand_over = deps_.clock->Now() - job->first_token_at;
    deps_.metrics->HandedOver(job->figures);
    PrefillEvent event;
    event.kind = PrefillEvent::Kind::kHandedOver;
    event.tokens_done = job->tokens.size();
    event.token = job->first_token;
    event.decode_address = (*job->placement)->decode_address;
    event.ticket = (*job->placement)->ticket;
    event.figures = job->figures;
    event.decode_worker = (*job->placement)->decode_worker;
    job->stream->Write(std::move(event));
    return End(job, absl::OkStatus());
  }
  if (!IsRetryable(status) || deps_.clock->Now() >= job->wait_until) {
    return End(job, Annotate(status, absl::StrCat("decode worker at ",
                                                  (*job->placement)->decode_address,
                                                  " refused the hand-over")));
  }
  if (job->resume) {
    At(deps_.clock->Now() + kRetryPause, [this, job] {
      if (job->phase == PrefillPhase::kHandingOver) HandOver(job);
    });
    return;
  }
  job->refused_by.push_back((*job->placement)->decode_worker);
  job->placement.reset();
  Place(job);
}

void PrefillEngine::End(const Job& job, absl::Status status) {
  if (job->phase == PrefillPhase::kEnding) return;
  job->Enter(PrefillPhase::kEnding);
  job->end_status = status;
  admission_.Remove(job->id);
  schedule_.Remove(job->id);
  if (job->pull != TransferId()) deps_.tier->Cancel(job->pull);
  Release(job);
  deps_.metrics->JobEnded(status);
  if (absl::IsCancelled(status)) {
    Report(job, RequestPhase::kCancelled, "");
  } else if (!status.ok() && !absl::IsAborted(status)) {
    KVT_LOG(kWarning, "request ", job->ticket.ticket.id.value(), " failed: ", status.ToString());
    Report(job, RequestPhase::kFailed, std::string(status.message()));
  }
  job->stream->Finish(std::move(status));
  MaybeForget(job);
}

void PrefillEngine::Release(const Job& job) {
  deps_.tier->Release(job->ticket.ref());
  if (job->digest_chain.has_value()) deps_.digest_tier->Release(job->ticket.ref());
}

void PrefillEngine::MaybeForget(const Job& job) {
  if (job->phase != PrefillPhase::kEnding || job->pending > 0 || job->pushes_in_flight > 0) return;
  if (jobs_.erase(job->id) == 0) return;
  FreeSlots(job);
  // Again: a call that was under way at the end may have pinned or reserved.
  Release(job);
  const auto it = by_ticket_.find(job->ticket.ticket.id);
  if (it != by_ticket_.end() && it->second == job->id) by_ticket_.erase(it);
}

void PrefillEngine::Report(const Job& job, RequestPhase phase, const std::string& error) {
  TicketUpdate update;
  update.id = job->ticket.ticket.id;
  update.epoch = job->ticket.ticket.epoch;
  update.node = deps_.node;
  update.phase = phase;
  update.error = error;
  if (phase == RequestPhase::kHandOver) {
    CountOf(job->names.worst(), update.computed) = job->figures.computed_tokens;
  }
  deps_.reporter->Report(std::move(update));
}

void PrefillEngine::Publish() {
  LoadReport load;
  load.waiting = static_cast<uint32_t>(admission_.size());
  load.running = static_cast<uint32_t>(jobs_.size() - admission_.size());
  load.slots_total = pool_.total();
  load.slots_free = pool_.free();
  load.tokens_done = tokens_done_;
  for (const auto& [id, job] : jobs_) {
    if (job->phase != PrefillPhase::kEnding) load.tickets.push_back(job->ticket.ref());
  }
  deps_.metrics->Occupancy(pool_.total() - pool_.free(), load.waiting, load.running);
  MutexLock lock(mu_);
  load_ = std::move(load);
}

}  // namespace kvt
