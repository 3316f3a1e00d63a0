#include "prefill_worker/prefill_engine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/log.h"

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

bool IsRetryable(const absl::Status& status) {
  return absl::IsResourceExhausted(status) || absl::IsUnavailable(status) ||
         absl::IsDeadlineExceeded(status);
}

absl::Status Annotate(const absl::Status& status, absl::string_view what) {
  return absl::Status(status.code(), absl::StrCat(what, ": ", status.message()));
}

}  // namespace

struct PrefillEngine::PushSet {
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

absl::StatusOr<std::unique_ptr<PrefillEngine>> PrefillEngine::Create(const PrefillOptions& options,
                                                                     PrefillEngineDeps deps) {
  std::unique_ptr<PrefillEngine> engine(new PrefillEngine(options, std::move(deps)));
  PrefillEngine* self = engine.get();
  KVT_ASSIGN_OR_RETURN(
      engine->pipeline_,
      LayerPipeline::Create(*engine->deps_.transformer, *engine->deps_.cache, engine->queue_,
                            options.chunk_tokens, options.active_max,
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
      if (it != by_ticket_.end()) End(jobs_.at(it->second), absl::CancelledError("cancelled"));
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
    job->wait_until = deps_.clock->Now() + options_.store_wait;
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

void PrefillEngine::Open(const Job& job) {
  Control<OpenOutcome>(
      job, [this, job] { return OpenJob(*deps_.tier, *job); },
      [this, job](OpenOutcome outcome) { OnOpened(job, std::move(outcome)); });
}

void PrefillEngine::OnOpened(const Job& job, OpenOutcome outcome) {
  if (!outcome.status.ok()) {
    if (IsRetryable(outcome.status) && deps_.clock->Now() < job->wait_until) {
      At(deps_.clock->Now() + kRetryPause, [this, job] {
        if (job->phase == PrefillPhase::kOpening) Open(job);
      });
      return;
    }
    End(job, Annotate(outcome.status, absl::StrCat("the stores cannot take this request (",
                                                   job->plan.blocks(), " blocks)")));
    return;
  }
  job->blocks = std::move(outcome.blocks);
  for (int b = 0; b < job->plan.blocks(); ++b) {
    if (!outcome.present[static_cast<size_t>(b)]) continue;
    job->plan.SetPresent(b, true);
    job->pull_blocks.push_back(b);
  }
  if (job->pull_blocks.empty()) {
    StartCompute(job);
  } else {
    Pull(job);
  }
}

void PrefillEngine::Pull(const Job& job) {
  job->Enter(PrefillPhase::kPulling);
  for (const int b : job->pull_blocks) {
    const size_t at = static_cast<size_t>(b) * static_cast<size_t>(layers_);
    job->pull_list.push_back({.ticket = job->ticket.ref(),
                              .block = &job->blocks[static_cast<size_t>(b)].place,
                              .base = &job->base_addresses[at],
                              .residual = &job->residual_addresses[at]});
  }
  job->pull_outcomes.resize(job->pull_list.size(), TransferOutcome::kSkipped);
  ++job->pending;
  job->pull = deps_.tier->Pull(
      {.blocks = job->pull_list,
       .layer_begin = 0,
       .layer_end = layers_,
       .outcomes = absl::MakeSpan(job->pull_outcomes),
       .done = [this, job](const TransferResult& result) {
         queue_.Post([this, job, result] { OnPulled(job, result); });
       }});
}

void PrefillEngine::OnPulled(const Job& job, const TransferResult& result) {
  --job->pending;
  job->pull = TransferId();
  if (job->phase == PrefillPhase::kEnding) return MaybeForget(job);
  job->figures.pulled_bytes += result.bytes;
  job->figures.pull_bursts += result.bursts;
  for (size_t i = 0; i < job->pull_outcomes.size(); ++i) {
    if (job->pull_outcomes[i] == TransferOutcome::kOk) continue;
    const int b = job->pull_blocks[i];
    job->plan.SetPresent(b, false);  // a miss: computed again, and placed again at the end
    job->blocks[static_cast<size_t>(b)] = {.place = {}, .push = true, .sealed = false};
  }
  StartCompute(job);
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
    segments.push_back(segment);
    for (int b = turn.range.begin / kBlockTokens; b * kBlockTokens < turn.range.end; ++b) {
      const JobBlock& block = job->blocks[static_cast<size_t>(b)];
      if (block.push && block.place.store != kNoStore) AddToPushSet(*running_pushes_, job, b);
    }
  }
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
  MaybeSeal(job);
}

PrefillEngine::PushSetPtr PrefillEngine::NewPushSet(uint64_t step) {
  auto set = std::make_shared<PushSet>();
  set->step = step;
  ++unpushed_sets_;
  return set;
}

void PrefillEngine::AddToPushSet(PushSet& set, const Job& job, int block) {
  set.entries.push_back({job, block});
}

void PrefillEngine::SendPushes(const PushSetPtr& set, int layer_begin, int layer_end) {
  auto part = std::make_unique<PushSet::Part>();
  part->layer_begin = layer_begin;
  part->layer_end = layer_end;
  part->began = deps_.clock->Now();
  for (const PushSet::Entry& entry : set->entries) {
    PrefillJob& job = *entry.job;
    if (job.phase == PrefillPhase::kEnding) continue;
    const size_t at = static_cast<size_t>(entry.block) * static_cast<size_t>(layers_) +
                      static_cast<size_t>(layer_begin);
    part->entries.push_back(entry);
    part->blocks.push_back({.ticket = job.ticket.ref(),
                            .block = &job.blocks[static_cast<size_t>(entry.block)].place,
                            .base = &job.base_addresses[at],
                            .residual = &job.residual_addresses[at]});
    ++job.pushes_in_flight;
  }
  if (part->blocks.empty()) return;
  part->outcomes.resize(part->blocks.size(), TransferOutcome::kSkipped);
  const int index = static_cast<int>(set->parts.size());
  PushSet::Part& sent = *part;
  set->parts.push_back(std::move(part));
  ++set->unfinished;
  deps_.tier->Push({.blocks = sent.blocks,
                    .layer_begin = layer_begin,
                    .layer_end = layer_end,
                    .outcomes = absl::MakeSpan(sent.outcomes),
                    .done = [this, set, index](const TransferResult& result) {
                      queue_.Post([this, set, index, result] { OnPushed(set, index, result); });
                    }});
}

void PrefillEngine::OnPushed(const PushSetPtr& set, int index, const TransferResult& result) {
  PushSet::Part& part = *set->parts[static_cast<size_t>(index)];
  if (deps_.trace != nullptr) {
    deps_.trace->Span("push", set->step, part.layer_begin, part.began, deps_.clock->Now(),
                      result.bytes);
  }
  deps_.metrics->Pushed(result.bytes, result.blocks_lost);
  const uint64_t block_bytes = 2 * deps_.transformer->geometry().SlotBytes() *
                               static_cast<uint64_t>(part.layer_end - part.layer_begin);
  for (size_t i = 0; i < part.entries.size(); ++i) {
    PrefillJob& job = *part.entries[i].job;
    --job.pushes_in_flight;
    if (part.outcomes[i] == TransferOutcome::kOk) job.figures.pushed_bytes += block_bytes;
  }
  // Each job once: its part of a burst, and whether it can go on.
  for (size_t i = 0; i < part.entries.size(); ++i) {
    const Job& job = part.entries[i].job;
    if (i + 1 < part.entries.size() && part.entries[i + 1].job == job) continue;
    job->figures.push_bursts += result.bursts;
    if (job->phase == PrefillPhase::kEnding) {
      MaybeForget(job);
    } else {
      MaybeSeal(job);
    }
  }
  part.entries.clear();
  part.blocks.clear();
  if (--set->unfinished == 0 && set->all_sent) --unpushed_sets_;
}

void PrefillEngine::MaybeSeal(const Job& job) {
  if (job->phase != PrefillPhase::kFlushing || job->pushes_in_flight > 0) return;
  job->Enter(PrefillPhase::kSealing);
  if (deps_.trace != nullptr) deps_.trace->Flush();
  std::vector<int> blocks;
  std::vector<PlacedBlock> places;
  for (int b = 0; b < job->plan.blocks(); ++b) {
    const JobBlock& block = job->blocks[static_cast<size_t>(b)];
    if (!block.push || block.sealed) continue;
    blocks.push_back(b);
    places.push_back(block.place);
  }
  Control<SealOutcomes>(
      job,
      [this, job, blocks, places] { return SealBlocks(*deps_.tier, *job, blocks, places); },
      [this, job](SealOutcomes outcomes) { OnSealed(job, std::move(outcomes)); });
}

void PrefillEngine::OnSealed(const Job& job, SealOutcomes outcomes) {
  for (const int b : outcomes.sealed) job->blocks[static_cast<size_t>(b)].sealed = true;
  const bool again = !outcomes.repaired.empty() || !outcomes.homeless.empty();
  if (!again) {
    FreeSlots(job);
    job->Enter(PrefillPhase::kHandingOver);
    job->wait_until = deps_.clock->Now() + options_.hand_over_wait;
    return HandOver(job);
  }
  const bool out_of_time = !outcomes.homeless.empty() && deps_.clock->Now() >= job->wait_until;
  if (++job->repairs > kBlockRepairsMax && (outcomes.homeless.empty() || out_of_time)) {
    return End(job, absl::UnavailableError(absl::StrCat(
                        outcomes.homeless.size() + outcomes.repaired.size(),
                        " blocks of the prompt could not be stored: no store kept them")));
  }
  deps_.metrics->BlocksRepaired(static_cast<int>(outcomes.repaired.size()));
  job->Enter(PrefillPhase::kFlushing);
  for (const int b : outcomes.homeless) job->blocks[static_cast<size_t>(b)].place = PlacedBlock();
  if (outcomes.repaired.empty()) {
    At(deps_.clock->Now() + kRetryPause, [this, job] { MaybeSeal(job); });
    return;
  }
  const PushSetPtr set = NewPushSet(job->last_step);
  for (size_t i = 0; i < outcomes.repaired.size(); ++i) {
    const int b = outcomes.repaired[i];
    job->blocks[static_cast<size_t>(b)].place = outcomes.repaired_places[i];
    AddToPushSet(*set, job, b);
  }
  set->all_sent = true;
  SendPushes(set, 0, layers_);
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
        return OfferHandOver(deps_.connect_decode, placement, *job);
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
  deps_.tier->Release(job->ticket.ref());
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

void PrefillEngine::MaybeForget(const Job& job) {
  if (job->phase != PrefillPhase::kEnding || job->pending > 0 || job->pushes_in_flight > 0) return;
  if (jobs_.erase(job->id) == 0) return;
  FreeSlots(job);
  // Again: a call that was under way at the end may have pinned or reserved.
  deps_.tier->Release(job->ticket.ref());
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
  if (phase == RequestPhase::kHandOver) update.computed.exact = job->figures.computed_tokens;
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
