// Requests and steps. What the engine has with the tier: decode_engine_tier.cc.
#include "decode_worker/engine/decode_engine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/log.h"
#include "kvstore/wire/fidelity.h"

namespace kvt {
namespace {

constexpr absl::Duration kIdleWait = absl::Seconds(5);
constexpr absl::Duration kTickInterval = absl::Milliseconds(250);
constexpr absl::Duration kEngineAnswer = absl::Seconds(5);
// Control calls and completions that may wait for the engine thread.
constexpr size_t kEngineQueueMax = 64 * 1024;
// Ended requests whose tokens can still be fetched.
constexpr size_t kFinishedMax = kWorkerRequestsMax;

}  // namespace

// A checked hand-over on its way into the engine, and what it became.
struct DecodeEngine::Admission {
  HeldTicket ticket;
  KeyDomain domain;
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
  KVT_RETURN_IF_ERROR(engine->CreateOffloaded());
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

absl::Status DecodeEngine::HandOver(HeldTicket ticket, const KeyDomain& domain,
                                    HandOverRequest request) {
  auto admission = std::make_shared<Admission>(
      Admission{std::move(ticket), domain, std::move(request), nullptr});
  KVT_RETURN_IF_ERROR(
      RunOn(queue_, [this, admission] { return OnHandOver(admission); }, kEngineAnswer));
  const Seq seq = std::move(admission->opened);
  if (seq == nullptr) return absl::OkStatus();  // a repeated call, or it ended with its first token
  auto places = std::make_shared<std::vector<PlacedBlock>>(OpenSequence(*deps_.tier, *seq));
  auto digests = std::make_shared<std::vector<PlacedBlock>>();
  if (seq->offload != nullptr && deps_.digest_tier != nullptr) {
    *digests = FindDigests(*deps_.digest_tier, KeyChain(deps_.digest_layout->Domain(domain)), *seq);
  }
  queue_.Post([this, seq, places, digests] {
    OnOpened(seq, std::move(*places), std::move(*digests));
  });
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
  while (!stopping_ || !sequences_.empty() || !stepping_.empty()) {
    queue_.RunAll(UntilNextTimer());
    RunTimers();
    StartPulls();
    StartStep();
    StartChunk();
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

absl::Status DecodeEngine::NoSlots(uint64_t needed) const {
  return absl::ResourceExhaustedError(
      absl::StrCat(pool_.available(), " of ", pool_.total(), " slots free; ", needed));
}

absl::Status DecodeEngine::Accept(const std::shared_ptr<Admission>& admission) {
  if (draining_) return absl::UnavailableError("the decode worker is draining");
  const Ticket& ticket = admission->ticket.ticket;
  HandOverRequest& request = admission->request;
  const int blocks = BlocksFor(uint64_t{ticket.prompt_tokens} + ticket.output_tokens_max);
  const bool has_row =
      static_cast<int>(sequences_.size()) < options_.batch_max && !free_rows_.empty();
  const bool offloaded =
      ticket.request_class == RequestClass::kOffloaded && offloaded_step_ != nullptr;
  std::optional<SequenceSlots> slots;
  std::unique_ptr<OffloadedSequence> offload;
  absl::Status no_room = NoSlots(SlotsFor(pool_, blocks));
  if (has_row && offloaded) {
    auto made = TryOffload(blocks);
    no_room = made.status();
    if (made.ok()) offload = *std::move(made);
    if (offload != nullptr) slots.emplace(SequenceSlots::None());
  } else if (has_row) {
    std::optional<SequenceSlots> whole = SequenceSlots::TryCreate(pool_, blocks);
    if (whole.has_value()) slots.emplace(std::move(*whole));
  }
  if (!slots.has_value()) {
    deps_.metrics->Refused();
    return absl::ResourceExhaustedError(
        absl::StrCat(deps_.node, " has ", sequences_.size(), " of ", options_.batch_max,
                     " sequences and ", no_room.message(), " are needed"));
  }
  const absl::Time now = deps_.clock->Now();
  const auto seq = std::make_shared<Sequence>(next_sequence_++, admission->ticket,
                                              KeyChain(admission->domain), std::move(*slots));
  seq->offload = std::move(offload);
  const bool digests = seq->offload != nullptr || ticket.fidelity == Fidelity::kSparse;
  if (digests && deps_.digest_tier != nullptr) {
    seq->digest_write.chain.emplace(deps_.digest_layout->Domain(admission->domain));
  }
  seq->tokens = std::move(request.tokens);
  const size_t exact = seq->tokens.size() - request.approximate_tokens;
  seq->names.Append(absl::MakeConstSpan(seq->tokens).first(exact));
  seq->names.Append(absl::MakeConstSpan(seq->tokens).subspan(exact), request.provenance);
  if (seq->offload != nullptr) seq->offload->sparse = request.approximate_tokens > 0;
  seq->handed_over = seq->names.worst();
  seq->prompt_tokens = request.prompt_tokens;
  seq->sampling = request.sampling;
  seq->stop_tokens = std::move(request.stop_tokens);
  seq->prefill = request.figures;
  seq->figures.block_bytes = 2 * deps_.transformer->geometry().RecordBytes();
  seq->written_back = static_cast<int>(seq->names.blocks().size());
  if (seq->offload != nullptr) TakeFirstSelection(*seq, request);
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
  ReleaseTicket(*seq);
  seq->ticket = admission->ticket;
  if (seq->offload != nullptr) BeginAgain(*seq);
  // A partial block that was pulled before is another block now that it has one more token.
  seq->loaded.resize(std::min(seq->loaded.size(), seq->names.blocks().size()));
  seq->names.Append(absl::MakeConstSpan(request.tokens)
                        .subspan(static_cast<size_t>(seq->names.tokens())));
  seq->written_back = static_cast<int>(seq->names.blocks().size());
  if (seq->offload != nullptr) TakeFirstSelection(*seq, request);
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

void DecodeEngine::StartRunning(const Seq& seq) {
  seq->Enter(SequencePhase::kRunning);
  if (seq->offload != nullptr) return offloaded_schedule_.Add(seq->id);
  const int blocks = seq->slots.blocks_max();
  device_step_->SetTable(
      seq->table_row, blocks,
      std::make_shared<const std::vector<SlotPair>>(seq->slots.Table(0, blocks)));
  schedule_.Add(seq->id);
}

void DecodeEngine::StartStep() {
  if (!stepping_.empty() || ChunkRuns()) return;
  if (chunks_turn_ && ChunkWaits()) return;
  if (!offloaded_schedule_.empty() && (schedule_.empty() || !last_offloaded_)) {
    last_offloaded_ = true;
    if (StartOffloadedStep()) return;
  }
  if (schedule_.empty()) return;
  last_offloaded_ = false;
  chunks_turn_ = true;
  ++step_;
  step_began_ = deps_.clock->Now();
  std::vector<DecodeRow> rows;
  for (const uint64_t id : schedule_.TakeBatch(options_.batch_max)) {
    const Seq seq = sequences_.at(id);
    DecodeRow row;
    row.table_row = seq->table_row;
    row.position = static_cast<int>(seq->tokens.size()) - 1;
    row.token = seq->tokens.back();
    row.sample = seq->NextSample();
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
    CountOf(seq->names.worst(), seq->figures.computed) += 1;
    if (!seq->names.HasTail() && seq->digest_write.chain.has_value()) {
      seq->digest_write.unwritten.push_back(static_cast<int>(seq->names.blocks().size()) - 1);
    }
    WriteBack(seq);
    WriteDigests(seq);
    TakeToken(seq, result.tokens[i]);
  }
}

// Several times a second while there are sequences: those nobody listens to, progress, forgotten streams.
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
    ReleaseTicket(*seq);  // at once, whatever still runs
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
  ReleaseTicket(*seq);  // at once, whatever still runs
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
  offloaded_schedule_.Remove(seq->id);
  seq->Enter(SequencePhase::kDraining);
  if (seq->pull != TransferId()) deps_.tier->Cancel(seq->pull);
  if (seq->offload != nullptr) {
    for (const auto& pull : seq->offload->pulls) pull->Cancel();
  }
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
  if (seq->offload != nullptr) EndOffload(*seq);
  free_rows_.push_back(seq->table_row);
  ReleaseTicket(*seq);
  const auto it = by_ticket_.find(seq->ticket.ticket.id);
  if (it != by_ticket_.end() && it->second == seq->id) by_ticket_.erase(it);
}

void DecodeEngine::ReleaseTicket(const Sequence& seq) {
  deps_.tier->Release(seq.ticket.ref());
  if (seq.digest_write.chain.has_value()) deps_.digest_tier->Release(seq.ticket.ref());
}

void DecodeEngine::Report(const Sequence& seq, RequestPhase phase, const std::string& error) {
  TicketUpdate update;
  update.id = seq.ticket.ticket.id;
  update.epoch = seq.ticket.ticket.epoch;
  update.node = deps_.node;
  update.phase = phase;
  update.error = error;
  update.computed = seq.figures.computed;
  CountOf(seq.handed_over, update.computed) += seq.prefill.computed_tokens;
  update.output_tokens = seq.output_tokens();
  deps_.reporter->Report(std::move(update));
}

void DecodeEngine::Publish() {
  LoadReport load;
  load.running = static_cast<uint32_t>(schedule_.size() + offloaded_schedule_.size());
  load.waiting = static_cast<uint32_t>(sequences_.size()) - load.running;
  load.slots_free = pool_.available();
  load.slots_total = pool_.total();
  load.tokens_done = tokens_done_;
  for (const auto& [id, seq] : sequences_) {
    if (seq->phase != SequencePhase::kDraining) load.tickets.push_back(seq->ticket.ref());
  }
  deps_.metrics->Occupancy(pool_.total() - pool_.free(), load.waiting, load.running);
  deps_.metrics->DigestBytes(digest_bytes_, options_.DigestBytesMax());
  MutexLock lock(mu_);
  load_ = std::move(load);
}

}  // namespace kvt
