#include "decode_worker/engine/decode_engine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/log.h"

namespace kvt {
namespace {

constexpr absl::Duration kIdleWait = absl::Seconds(5);
constexpr absl::Duration kTickInterval = absl::Seconds(1);
constexpr absl::Duration kRetryPause = absl::Milliseconds(200);
constexpr absl::Duration kResumePause = absl::Milliseconds(500);
constexpr absl::Duration kEngineAnswer = absl::Seconds(5);
// Control calls and completions that may wait for the engine thread.
constexpr size_t kEngineQueueMax = 64 * 1024;
// Ended requests whose tokens can still be fetched.
constexpr size_t kFinishedMax = kWorkerRequestsMax;

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

}  // namespace

// A checked hand-over on its way into the engine, and what it became.
struct DecodeEngine::Admission {
  HeldTicket ticket;
  KeyChain chain;
  HandOverRequest request;
  Seq opened;  // set: the caller looks its blocks up and posts OnOpened
};

absl::StatusOr<std::unique_ptr<DecodeEngine>> DecodeEngine::Create(const DecodeOptions& options,
                                                                   DecodeEngineDeps deps) {
  std::unique_ptr<DecodeEngine> engine(new DecodeEngine(options, std::move(deps)));
  DecodeEngine* self = engine.get();
  KVT_ASSIGN_OR_RETURN(
      engine->device_step_,
      DecodeStep::Create(*engine->deps_.transformer, *engine->deps_.cache, engine->queue_,
                         options.batch_max,
                         [self](const DecodeStepResult& result) { self->OnStepDone(result); }));
  return engine;
}

DecodeEngine::DecodeEngine(const DecodeOptions& options, DecodeEngineDeps deps)
    : options_(options),
      deps_(std::move(deps)),
      layers_(deps_.transformer->geometry().layers),
      queue_(kEngineQueueMax),
      pool_(layers_, deps_.cache->options().slot_count),
      pulls_(options.pulls_max) {
  for (int row = deps_.cache->options().table_rows - 1; row >= 0; --row) free_rows_.push_back(row);
  Publish();
}

DecodeEngine::~DecodeEngine() { KVT_CHECK(sequences_.empty(), "sequences=", sequences_.size()); }

absl::Status DecodeEngine::HandOver(HeldTicket ticket, const KeyChain& chain,
                                    HandOverRequest request) {
  auto admission = std::make_shared<Admission>(
      Admission{std::move(ticket), chain, std::move(request), nullptr});
  KVT_RETURN_IF_ERROR(
      RunOn(queue_, [this, admission] { return OnHandOver(admission); }, kEngineAnswer));
  const Seq seq = std::move(admission->opened);
  if (seq == nullptr) return absl::OkStatus();  // a repeated call, or it ended with its first token
  auto places = std::make_shared<std::vector<PlacedBlock>>(OpenSequence(*deps_.tier, *seq));
  queue_.Post([this, seq, places] { OnOpened(seq, std::move(*places)); });
  return absl::OkStatus();
}

std::shared_ptr<TokenStream> DecodeEngine::Stream(TicketId ticket) const {
  MutexLock lock(mu_);
  const auto it = streams_.find(ticket);
  return it == streams_.end() ? nullptr : it->second;
}

absl::Status DecodeEngine::Cancel(TicketId ticket, const std::string& capability) {
  return RunOn(
      queue_,
      [this, ticket, capability]() -> absl::Status {
        const auto it = by_ticket_.find(ticket);
        if (it == by_ticket_.end()) return absl::NotFoundError("no such request in this worker");
        const Seq seq = sequences_.at(it->second);
        if (!seq->stream->MayUse(capability)) {
          return absl::PermissionDeniedError("another capability");
        }
        Finish(seq, FinishReason::kCancelled);
        return absl::OkStatus();
      },
      kEngineAnswer);
}

void DecodeEngine::CancelAll(std::vector<TicketId> tickets) {
  queue_.Post([this, tickets = std::move(tickets)] {
    for (const TicketId ticket : tickets) {
      const auto it = by_ticket_.find(ticket);
      if (it == by_ticket_.end()) continue;
      const Seq seq = sequences_.at(it->second);
      Fail(seq, absl::CancelledError(
                    "ended by the coordinator: cancelled, or a node that it needs is gone"));
    }
  });
}

LoadReport DecodeEngine::Load() const {
  MutexLock lock(mu_);
  return load_;
}

void DecodeEngine::Run() {
  while (!stopping_ || !sequences_.empty() || device_step_->busy()) {
    queue_.RunAll(UntilNextTimer());
    RunTimers();
    StartPulls();
    StartStep();
    Publish();
  }
  queue_.Close();
}

void DecodeEngine::Drain() {
  queue_.Post([this] { draining_ = true; });
}

bool DecodeEngine::Idle() const {
  MutexLock lock(mu_);
  return load_.running == 0 && load_.waiting == 0;
}

void DecodeEngine::Stop() {
  queue_.Post([this] {
    draining_ = true;
    stopping_ = true;
    std::vector<Seq> running;
    for (const auto& [id, seq] : sequences_) running.push_back(seq);
    for (const Seq& seq : running) {
      Fail(seq, absl::UnavailableError("the decode worker is stopping"));
    }
  });
}

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

void DecodeEngine::At(absl::Time time, Task task) { timers_.emplace(time, std::move(task)); }

absl::Duration DecodeEngine::UntilNextTimer() const {
  if (timers_.empty()) return kIdleWait;
  return std::clamp(timers_.begin()->first - deps_.clock->Now(), absl::ZeroDuration(), kIdleWait);
}

void DecodeEngine::RunTimers() {
  const absl::Time now = deps_.clock->Now();
  while (!timers_.empty() && timers_.begin()->first <= now) {
    const Task task = std::move(timers_.begin()->second);
    timers_.erase(timers_.begin());
    task();
  }
}

absl::Status DecodeEngine::OnHandOver(const std::shared_ptr<Admission>& admission) {
  const Ticket& ticket = admission->ticket.ticket;
  const auto known = by_ticket_.find(ticket.id);
  if (known == by_ticket_.end()) return Accept(admission);
  const Seq seq = sequences_.at(known->second);
  if (ticket.epoch == seq->ticket.ticket.epoch) return absl::OkStatus();  // repeated
  if (ticket.epoch < seq->ticket.ticket.epoch) {
    return absl::FailedPreconditionError("a higher epoch of the ticket is here");
  }
  return AcceptResumed(seq, admission);
}

absl::Status DecodeEngine::Accept(const std::shared_ptr<Admission>& admission) {
  if (draining_) return absl::UnavailableError("the decode worker is draining");
  const Ticket& ticket = admission->ticket.ticket;
  HandOverRequest& request = admission->request;
  const int blocks = BlocksFor(uint64_t{ticket.prompt_tokens} + ticket.output_tokens_max);
  const bool has_row =
      static_cast<int>(sequences_.size()) < options_.batch_max && !free_rows_.empty();
  std::optional<SequenceSlots> slots =
      has_row ? SequenceSlots::TryCreate(pool_, blocks) : std::nullopt;
  if (!slots.has_value()) {
    deps_.metrics->Refused();
    return absl::ResourceExhaustedError(
        absl::StrCat(deps_.node, " has ", sequences_.size(), " of ", options_.batch_max,
                     " sequences and ", pool_.available(), " of ", pool_.total(), " slots free; ",
                     SlotsFor(pool_, blocks), " are needed"));
  }
  const absl::Time now = deps_.clock->Now();
  const auto seq = std::make_shared<Sequence>(next_sequence_++, admission->ticket,
                                              admission->chain, std::move(*slots));
  seq->tokens = std::move(request.tokens);
  seq->names.Append(seq->tokens);
  seq->prompt_tokens = request.prompt_tokens;
  seq->sampling = request.sampling;
  seq->stop_tokens = std::move(request.stop_tokens);
  seq->prefill = request.figures;
  seq->figures.block_bytes = 2 * deps_.transformer->geometry().RecordBytes();
  seq->written_back = static_cast<int>(seq->names.blocks().size());
  seq->accepted = now;
  seq->stream = std::make_shared<TokenStream>(ticket.capability, now);
  seq->table_row = free_rows_.back();
  free_rows_.pop_back();
  sequences_[seq->id] = seq;
  by_ticket_[ticket.id] = seq->id;
  {
    MutexLock lock(mu_);
    streams_[ticket.id] = seq->stream;
  }
  if (!ticking_) {
    ticking_ = true;
    At(now + kTickInterval, [this] { Tick(); });
  }
  // A request that was resumed on another worker brings its output along.
  seq->stream->Append(absl::MakeConstSpan(seq->tokens).subspan(seq->prompt_tokens));
  Report(*seq, RequestPhase::kDecode, "");
  if (TakeToken(seq, request.next_token)) return absl::OkStatus();
  ++seq->pending;  // until OnOpened
  admission->opened = seq;
  return absl::OkStatus();
}

absl::Status DecodeEngine::AcceptResumed(const Seq& seq,
                                         const std::shared_ptr<Admission>& admission) {
  const HandOverRequest& request = admission->request;
  if (seq->phase != SequencePhase::kResuming) {
    return absl::FailedPreconditionError(
        absl::StrCat("the request is ", SequencePhaseName(seq->phase), " here, not resuming"));
  }
  if (request.tokens != seq->tokens) {
    return absl::InvalidArgumentError("tokens: not those of the request that waits here");
  }
  deps_.tier->Release(seq->ticket.ref());
  seq->ticket = admission->ticket;
  // A partial block that was pulled before is another block now that it has one more token.
  seq->loaded.resize(std::min(seq->loaded.size(), seq->names.blocks().size()));
  seq->names.Append(absl::MakeConstSpan(request.tokens)
                        .subspan(static_cast<size_t>(seq->names.tokens())));
  seq->written_back = static_cast<int>(seq->names.blocks().size());
  ++seq->figures.recomputed_suffixes;
  seq->Enter(SequencePhase::kOpening);
  Report(*seq, RequestPhase::kDecode, "");
  if (TakeToken(seq, request.next_token)) return absl::OkStatus();
  ++seq->pending;
  admission->opened = seq;
  return absl::OkStatus();
}

bool DecodeEngine::TakeToken(const Seq& seq, int32_t token) {
  if (token == kTokenInvalid) {
    Fail(seq, absl::InternalError("the model produced NaN for this sequence"));
    return true;
  }
  seq->tokens.push_back(token);
  seq->stream->Append(absl::MakeConstSpan(&token, 1));
  ++tokens_done_;
  const std::vector<int32_t>& stops = seq->stop_tokens;
  if (std::find(stops.begin(), stops.end(), token) != stops.end()) {
    Finish(seq, FinishReason::kStop);  // the stop token is part of the answer's tokens
    return true;
  }
  if (seq->output_tokens() >= seq->ticket.ticket.output_tokens_max) {
    Finish(seq, FinishReason::kLength);
    return true;
  }
  return false;
}

void DecodeEngine::OnOpened(const Seq& seq, std::vector<PlacedBlock> places) {
  --seq->pending;
  if (seq->phase == SequencePhase::kDraining) {
    deps_.tier->Release(seq->ticket.ref());  // the lookup may have pinned after the end
    return MaybeForget(seq);
  }
  seq->places = std::move(places);
  const int lost = static_cast<int>(
      std::count_if(seq->places.begin(), seq->places.end(), [](const PlacedBlock& place) {
        return place.presence != BlockPresence::kExact;
      }));
  if (lost > 0) {
    deps_.metrics->Pulled(0, 0, lost);
    return Resume(seq, lost);
  }
  seq->Enter(SequencePhase::kPulling);
  seq->pull_started = false;
  pulls_.Add(seq->id, static_cast<uint64_t>(seq->blocks()) * seq->figures.block_bytes,
             deps_.clock->Now());
}

void DecodeEngine::StartPulls() {
  for (auto next = pulls_.Start(); next.has_value(); next = pulls_.Start()) {
    Pull(sequences_.at(*next));
  }
}

void DecodeEngine::Pull(const Seq& seq) {
  seq->pull_started = true;
  const int blocks = seq->blocks();
  const auto layers = static_cast<size_t>(layers_);
  seq->loaded.resize(static_cast<size_t>(blocks), false);
  int shared = 0;
  for (int b = static_cast<int>(seq->slots.blocks().size()); b < seq->slots.blocks_max(); ++b) {
    const bool full = b < static_cast<int>(seq->names.blocks().size());
    const auto found =
        full ? shared_.Find(seq->names.blocks()[static_cast<size_t>(b)].name.key) : std::nullopt;
    if (found.has_value()) {
      seq->slots.AppendShared(*found);
      seq->loaded[static_cast<size_t>(b)] = true;
      ++shared;
    } else {
      seq->slots.AppendOwn();
    }
    for (const SlotPair& pair : pool_.Pairs(seq->slots.blocks().back())) {
      seq->base_addresses.push_back(
          reinterpret_cast<std::byte*>(deps_.cache->SlotAddress(pair.base)));
      seq->residual_addresses.push_back(
          reinterpret_cast<std::byte*>(deps_.cache->SlotAddress(pair.residual)));
    }
  }
  deps_.metrics->Shared(shared);
  seq->pull_blocks.clear();
  seq->pull_list.clear();
  for (int b = 0; b < blocks; ++b) {
    const auto i = static_cast<size_t>(b);
    if (seq->loaded[i]) continue;
    seq->pull_blocks.push_back(b);
    seq->pull_list.push_back({.ticket = seq->ticket.ref(),
                              .block = &seq->places[i],
                              .base = &seq->base_addresses[i * layers],
                              .residual = &seq->residual_addresses[i * layers]});
  }
  seq->pull_outcomes.assign(seq->pull_list.size(), TransferOutcome::kSkipped);
  if (seq->pull_list.empty()) {
    pulls_.Finished();
    return StartRunning(seq);
  }
  ++seq->pending;
  seq->pull = deps_.tier->Pull({.blocks = seq->pull_list,
                                .layer_begin = 0,
                                .layer_end = layers_,
                                .outcomes = absl::MakeSpan(seq->pull_outcomes),
                                .done = [this, seq](const TransferResult& result) {
                                  queue_.Post([this, seq, result] { OnPulled(seq, result); });
                                }});
}

void DecodeEngine::OnPulled(const Seq& seq, const TransferResult& result) {
  --seq->pending;
  seq->pull = TransferId();
  pulls_.Finished();
  deps_.metrics->Pulled(result.bytes, result.blocks_ok, result.blocks_lost);
  if (seq->phase == SequencePhase::kDraining) return MaybeForget(seq);
  seq->figures.pulled_bytes += result.bytes;
  seq->figures.pull_bursts += result.bursts;
  int lost = 0;
  for (size_t i = 0; i < seq->pull_blocks.size(); ++i) {
    const auto b = static_cast<size_t>(seq->pull_blocks[i]);
    if (seq->pull_outcomes[i] != TransferOutcome::kOk) {
      ++lost;
      continue;
    }
    seq->loaded[b] = true;
    ++seq->figures.blocks_pulled;
    if (b < seq->names.blocks().size()) {
      shared_.Publish(seq->names.blocks()[b].name.key, seq->slots.blocks()[b]);
    }
  }
  if (lost > 0) return Resume(seq, lost);
  StartRunning(seq);
}

void DecodeEngine::StartRunning(const Seq& seq) {
  seq->Enter(SequencePhase::kRunning);
  const int blocks = seq->slots.blocks_max();
  device_step_->SetTable(
      seq->table_row, blocks,
      std::make_shared<const std::vector<SlotPair>>(seq->slots.Table(0, blocks)));
  schedule_.Add(seq->id);
}

void DecodeEngine::Resume(const Seq& seq, int blocks_lost) {
  if (++seq->resumes > kResumesMax) {
    return Fail(seq, absl::UnavailableError(
                         absl::StrCat(blocks_lost, " stored blocks of the request were lost, and ",
                                      kResumesMax, " attempts to compute them again failed")));
  }
  KVT_LOG(kInfo, "request ", seq->ticket.ticket.id.value(), ": ", blocks_lost,
          " stored blocks are lost; back to prefill");
  deps_.metrics->Resumed();
  seq->Enter(SequencePhase::kResuming);
  seq->resume_until = deps_.clock->Now() + options_.resume_timeout;
  // The first attempt at once; others give the stores time.
  At(deps_.clock->Now() + (seq->resumes - 1) * kResumePause, [this, seq, blocks_lost] {
    if (seq->phase == SequencePhase::kResuming) SendResume(seq, blocks_lost);
  });
  At(seq->resume_until, [this, seq, attempt = seq->resumes] {
    if (seq->phase != SequencePhase::kResuming || seq->resumes != attempt) return;
    Fail(seq, absl::DeadlineExceededError("lost blocks of the request were not computed in time"));
  });
}

void DecodeEngine::SendResume(const Seq& seq, int blocks_lost) {
  ResumeRequest request;
  request.tokens = seq->tokens;
  request.prompt_tokens = seq->prompt_tokens;
  request.sampling = seq->sampling;
  request.stop_tokens = seq->stop_tokens;
  Control<absl::Status>(
      seq,
      [this, ticket = seq->ticket.signed_ticket, request, blocks_lost] {
        return ResumeSequence(*deps_.coordinator, deps_.connect_prefill, ticket, request,
                              absl::StrCat(blocks_lost, " stored blocks are lost"));
      },
      [this, seq, blocks_lost](absl::Status status) {
        if (status.ok() || seq->phase != SequencePhase::kResuming) return;
        if (!IsRetryable(status) || deps_.clock->Now() + kRetryPause >= seq->resume_until) {
          return Fail(seq, absl::Status(status.code(),
                                        absl::StrCat("lost blocks cannot be computed again: ",
                                                     status.message())));
        }
        At(deps_.clock->Now() + kRetryPause, [this, seq, blocks_lost] {
          if (seq->phase == SequencePhase::kResuming) SendResume(seq, blocks_lost);
        });
      });
}

void DecodeEngine::StartStep() {
  if (device_step_->busy() || schedule_.empty()) return;
  ++step_;
  step_began_ = deps_.clock->Now();
  std::vector<DecodeRow> rows;
  for (const uint64_t id : schedule_.TakeBatch(options_.batch_max)) {
    const Seq seq = sequences_.at(id);
    DecodeRow row;
    row.table_row = seq->table_row;
    row.position = static_cast<int>(seq->tokens.size()) - 1;
    row.token = seq->tokens.back();
    row.sample = ToSampleParams(seq->sampling, seq->tokens.size());
    rows.push_back(row);
    seq->last_step = step_;
    if (!seq->stepped) seq->figures.admission = step_began_ - seq->accepted;
    seq->stepped = true;
    stepping_.push_back(seq);
  }
  device_step_->Enqueue(step_, rows);
}

void DecodeEngine::OnStepDone(const DecodeStepResult& result) {
  const absl::Status health = deps_.transformer->device().Health();
  KVT_CHECK(health.ok(), health.ToString());
  pool_.Retire(result.step);
  deps_.metrics->Step(static_cast<int>(result.tokens.size()), deps_.clock->Now() - step_began_,
                      result.saturated);
  const std::vector<Seq> stepped = std::exchange(stepping_, {});
  for (size_t i = 0; i < stepped.size(); ++i) {
    const Seq& seq = stepped[i];
    if (seq->phase != SequencePhase::kRunning) continue;  // it ended while the step ran
    seq->names.Append(absl::MakeConstSpan(&seq->tokens.back(), 1));
    ++seq->figures.computed.exact;
    WriteBack(seq);
    TakeToken(seq, result.tokens[i]);
  }
}

void DecodeEngine::WriteBack(const Seq& seq) {
  const int first = seq->written_back;
  const auto complete = static_cast<int>(seq->names.blocks().size());
  if (seq->write_back_runs || first >= complete) return;
  seq->write_back_runs = true;
  const absl::Span<const TierBlock> all = seq->names.blocks();
  const std::vector<TierBlock> names(all.begin() + first, all.begin() + complete);
  for (int b = first; b < complete; ++b) {
    shared_.Publish(all[static_cast<size_t>(b)].name.key,
                    seq->slots.blocks()[static_cast<size_t>(b)]);
  }
  Control<absl::StatusOr<ReserveResult>>(
      seq,
      [this, ticket = seq->ticket, names] {
        return deps_.tier->Reserve(ticket, names, 0, ReserveMode::kKeepGranted);
      },
      [this, seq, first](absl::StatusOr<ReserveResult> reserved) {
        OnWriteReserved(seq, first, std::move(reserved));
      });
}

void DecodeEngine::OnWriteReserved(const Seq& seq, int first,
                                   absl::StatusOr<ReserveResult> reserved) {
  int refused = 0;
  seq->write_places.clear();
  seq->write_list.clear();
  if (!reserved.ok()) {
    // Written back no more: the tier lacks these blocks, which costs a later reader a recompute.
    refused = static_cast<int>(seq->names.blocks().size()) - first;
    seq->written_back = static_cast<int>(seq->names.blocks().size());
  } else {
    seq->written_back = first + static_cast<int>(reserved->blocks.size());
    seq->write_places = std::move(reserved->blocks);
    for (size_t i = 0; i < seq->write_places.size(); ++i) {
      if (reserved->already_sealed[i]) continue;
      if (seq->write_places[i].store == kNoStore) {
        ++refused;
        continue;
      }
      const size_t at = (static_cast<size_t>(first) + i) * static_cast<size_t>(layers_);
      seq->write_list.push_back({.ticket = seq->ticket.ref(),
                                 .block = &seq->write_places[i],
                                 .base = &seq->base_addresses[at],
                                 .residual = &seq->residual_addresses[at]});
    }
  }
  if (refused > 0) deps_.metrics->WrittenBack(0, 0, refused);
  if (seq->write_list.empty() || !seq->write_to_end) {
    seq->write_back_runs = false;
    if (seq->write_to_end) WriteBack(seq);
    return;
  }
  seq->write_outcomes.assign(seq->write_list.size(), TransferOutcome::kSkipped);
  ++seq->pending;
  deps_.tier->Push({.blocks = seq->write_list,
                    .layer_begin = 0,
                    .layer_end = layers_,
                    .outcomes = absl::MakeSpan(seq->write_outcomes),
                    .done = [this, seq](const TransferResult& result) {
                      queue_.Post([this, seq, result] { OnWrittenBack(seq, result); });
                    }});
}

void DecodeEngine::OnWrittenBack(const Seq& seq, const TransferResult& result) {
  --seq->pending;
  seq->write_back_runs = false;
  seq->figures.write_back_bytes += result.bytes;
  deps_.metrics->WrittenBack(result.bytes, result.blocks_ok, result.blocks_lost);
  if (seq->write_to_end) WriteBack(seq);
  MaybeForget(seq);
}

void DecodeEngine::Tick() {
  const absl::Time now = deps_.clock->Now();
  std::vector<Seq> lonely;
  for (const auto& [id, seq] : sequences_) {
    if (seq->phase == SequencePhase::kDraining) continue;
    if (seq->stream->DetachedFor(now) >= options_.detach_timeout) lonely.push_back(seq);
    if (seq->output_tokens() != seq->reported_tokens) {
      seq->reported_tokens = seq->output_tokens();
      Report(*seq, RequestPhase::kDecode, "");
    }
  }
  for (const Seq& seq : lonely) Finish(seq, FinishReason::kCancelled);
  bool streams_left = false;
  {
    MutexLock lock(mu_);
    while (!finished_.empty() && (finished_.front().first + options_.keep_finished <= now ||
                                  finished_.size() > kFinishedMax)) {
      streams_.erase(finished_.front().second);
      finished_.pop_front();
    }
    streams_left = !finished_.empty();
  }
  ticking_ = !sequences_.empty() || streams_left;
  if (ticking_) At(now + kTickInterval, [this] { Tick(); });
}

void DecodeEngine::Finish(const Seq& seq, FinishReason reason) {
  if (seq->phase == SequencePhase::kDraining) return;
  seq->figures.output_tokens = seq->output_tokens();
  if (reason == FinishReason::kCancelled) {
    seq->write_to_end = false;
    deps_.tier->Release(seq->ticket.ref());  // at once, whatever still runs
    deps_.metrics->Ended(absl::CancelledError());
    Report(*seq, RequestPhase::kCancelled, "");
  } else {
    deps_.metrics->Ended(absl::OkStatus());
    Report(*seq, RequestPhase::kDone, "");
  }
  seq->stream->Finish(reason, seq->figures, seq->prefill);
  Drop(seq);
}

void DecodeEngine::Fail(const Seq& seq, absl::Status status) {
  if (seq->phase == SequencePhase::kDraining) return;
  seq->write_to_end = false;
  deps_.tier->Release(seq->ticket.ref());  // at once, whatever still runs
  deps_.metrics->Ended(status);
  if (absl::IsCancelled(status)) {
    Report(*seq, RequestPhase::kCancelled, "");
  } else {
    KVT_LOG(kWarning, "request ", seq->ticket.ticket.id.value(), " failed: ", status.ToString());
    Report(*seq, RequestPhase::kFailed, std::string(status.message()));
  }
  seq->stream->Fail(std::move(status));
  Drop(seq);
}

void DecodeEngine::Drop(const Seq& seq) {
  if (seq->phase == SequencePhase::kPulling && !seq->pull_started) pulls_.Remove(seq->id);
  schedule_.Remove(seq->id);
  seq->Enter(SequencePhase::kDraining);
  if (seq->pull != TransferId()) deps_.tier->Cancel(seq->pull);
  {
    MutexLock lock(mu_);
    finished_.emplace_back(deps_.clock->Now(), seq->ticket.ticket.id);
  }
  MaybeForget(seq);
}

void DecodeEngine::MaybeForget(const Seq& seq) {
  if (seq->phase != SequencePhase::kDraining || seq->pending > 0) return;
  if (sequences_.erase(seq->id) == 0) return;
  std::vector<PoolBlock> last;
  seq->slots.Release(seq->last_step, &last);
  for (const PoolBlock block : last) shared_.Forget(block);
  free_rows_.push_back(seq->table_row);
  deps_.tier->Release(seq->ticket.ref());
  const auto it = by_ticket_.find(seq->ticket.ticket.id);
  if (it != by_ticket_.end() && it->second == seq->id) by_ticket_.erase(it);
}

void DecodeEngine::Report(const Sequence& seq, RequestPhase phase, const std::string& error) {
  TicketUpdate update;
  update.id = seq.ticket.ticket.id;
  update.epoch = seq.ticket.ticket.epoch;
  update.node = deps_.node;
  update.phase = phase;
  update.error = error;
  update.computed = seq.figures.computed;
  update.computed.exact += seq.prefill.computed_tokens;
  update.output_tokens = seq.output_tokens();
  deps_.reporter->Report(std::move(update));
}

void DecodeEngine::Publish() {
  LoadReport load;
  load.running = static_cast<uint32_t>(schedule_.size());
  load.waiting = static_cast<uint32_t>(sequences_.size() - schedule_.size());
  load.slots_free = pool_.available();
  load.slots_total = pool_.total();
  load.tokens_done = tokens_done_;
  for (const auto& [id, seq] : sequences_) {
    if (seq->phase != SequencePhase::kDraining) load.tickets.push_back(seq->ticket.ref());
  }
  deps_.metrics->Occupancy(pool_.total() - pool_.free(), load.waiting, load.running);
  MutexLock lock(mu_);
  load_ = std::move(load);
}

}  // namespace kvt
