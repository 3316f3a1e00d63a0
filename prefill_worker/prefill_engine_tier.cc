// Of PrefillEngine: what it has with the tier: opening, pulls, pushes, sealing. Jobs, steps and the
// hand-over: prefill_engine.cc.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/log.h"
#include "prefill_worker/fetch_plan.h"
#include "prefill_worker/prefill_engine.h"

namespace kvt {
namespace {

constexpr absl::Duration kRetryPause = absl::Milliseconds(100);
// Beyond the end of its wait a last round of calls may take so long.
constexpr absl::Duration kReserveGrace = absl::Seconds(1);

// No store answered in time, as against one that has no room.
bool IsUnreachable(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
}

// Different for each job, so that those that were refused together do not come back together.
absl::Duration ReservePause(const PrefillJob& job) {
  const uint64_t spread = (job.ticket.ticket.id.value() * 7 + job.reserve_refusals * 3u) % 10;
  return kRetryPause * (5 + static_cast<int>(spread)) / 10;
}

}  // namespace

void PrefillEngine::Open(const Job& job) {
  ReserveTerms terms = ReserveMode::kAllOrNothing;
  const absl::Duration waited = deps_.clock->Now() - job->asked_first;
  if (job->reserve_refusals > 0 && waited >= options_.reserve_ageing) terms.waited = waited;
  terms.deadline = job->wait_until + kReserveGrace;
  Control<OpenOutcome>(
      job, [this, job, terms] { return OpenJob(*deps_.tier, *job, terms); },
      [this, job](OpenOutcome outcome) { OnOpened(job, std::move(outcome)); });
}

void PrefillEngine::OnOpened(const Job& job, OpenOutcome outcome) {
  if (!outcome.status.ok()) {
    if (IsRetryable(outcome.status) && deps_.clock->Now() < job->wait_until) {
      return OpenLater(job);
    }
    if (IsUnreachable(outcome.status) && !deps_.tier->IsReachable()) return OpenWithoutTier(job);
    End(job, Annotate(outcome.status, absl::StrCat("the stores cannot take this request (",
                                                   job->plan.blocks(), " blocks)")));
    return;
  }
  if (job->ticket.ticket.stores.empty()) return OpenWithoutTier(job);
  if (outcome.names.has_value()) job->names = *std::move(outcome.names);
  job->blocks = std::move(outcome.blocks);
  if (options_.fetch_planner) DeclineSlow(job, outcome.present);
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

void PrefillEngine::OpenWithoutTier(const Job& job) {
  KVT_LOG(kInfo, "request ", job->ticket.ticket.id.value(),
          ": no store is reachable; computed without a copy in the tier");
  deps_.metrics->WithoutTier();
  StartCompute(job);
}

void PrefillEngine::DeclineSlow(const Job& job, std::vector<bool>& present) {
  std::vector<FetchSource> sources;
  std::vector<std::pair<uint32_t, bool>> keys;  // store and on disk, by source
  std::vector<size_t> source_of(present.size());
  const uint64_t block_bytes = uint64_t{kPlanes} * deps_.transformer->geometry().RecordBytes();
  for (size_t b = 0; b < present.size(); ++b) {
    if (!present[b]) continue;
    const PlacedBlock& place = job->blocks[b].place;
    const std::pair<uint32_t, bool> key{place.store, place.on_disk()};
    source_of[b] = static_cast<size_t>(std::find(keys.begin(), keys.end(), key) - keys.begin());
    if (source_of[b] == keys.size()) {
      keys.push_back(key);
      const PullRates rates = deps_.tier->Rates(place.store);
      sources.push_back({.medium = place.on_disk() ? FetchMedium::kDisk : FetchMedium::kMemory,
                         .store = deps_.tier->StoreName(place.store),
                         .bytes_per_s = place.on_disk() ? rates.disk : rates.memory});
    }
    sources[source_of[b]].tokens += kBlockTokens;
    sources[source_of[b]].bytes += block_bytes;
  }
  FetchDecision decision = DecideFetch(sources, tokens_rate_.PerSecond(deps_.clock->Now()));
  if (decision.declined_tokens == 0) return;
  // They stay pinned where they are: the decode worker finds them there, and nothing is pushed.
  for (size_t b = 0; b < present.size(); ++b) {
    if (present[b] && !decision.fetch[source_of[b]]) present[b] = false;
  }
  deps_.metrics->Declined(decision.declined_tokens);
  job->figures.declined_tokens = decision.declined_tokens;
  job->figures.declined = std::move(decision.declined);
}

void PrefillEngine::OpenLater(const Job& job) {
  ++job->reserve_refusals;
  deps_.metrics->ReserveRefused();
  const absl::Time now = deps_.clock->Now();
  const absl::Time again = now + ReservePause(*job);
  if (again - job->asked_first >= options_.reserve_ageing) {
    // Aged: it may hold room already, and keeps its device slots.
    At(again, [this, job] {
      if (job->phase == PrefillPhase::kOpening) Open(job);
    });
    return;
  }
  const uint64_t slots =
      static_cast<uint64_t>(job->plan.blocks()) * pool_.SlotsPerBlock(PoolBlockState::kTarget);
  FreeSlots(job);
  job->Enter(PrefillPhase::kQueued);
  admission_.Return(job->id, slots, job->submitted, again);
  At(again, [] {});  // Run looks at the queue after every timer
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
  job->figures.disk_blocks += static_cast<uint64_t>(result.blocks_from_disk);
  job->figures.disk_bytes += result.bytes_from_disk;
  for (size_t i = 0; i < job->pull_outcomes.size(); ++i) {
    if (job->pull_outcomes[i] == TransferOutcome::kOk) continue;
    const int b = job->pull_blocks[i];
    job->plan.SetPresent(b, false);  // a miss: computed again, and placed again at the end
    job->blocks[static_cast<size_t>(b)] = {.place = {}, .push = true, .sealed = false};
  }
  StartCompute(job);
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
  const bool out_of_time = !outcomes.homeless.empty() && deps_.clock->Now() >= job->wait_until;
  const bool nowhere = out_of_time && outcomes.repaired.empty() && !deps_.tier->IsReachable();
  if (nowhere) {
    KVT_LOG(kInfo, "request ", job->ticket.ticket.id.value(), ": no store is reachable; ",
            outcomes.homeless.size(), " blocks are handed over without a copy in the tier");
    deps_.metrics->WithoutTier();
  }
  if (!again || nowhere) {
    FreeSlots(job);
    job->Enter(PrefillPhase::kHandingOver);
    job->wait_until = deps_.clock->Now() + options_.hand_over_wait;
    return HandOverWithDigests(job);
  }
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

}  // namespace kvt
