// Of DecodeEngine: what it has with the tier: pulls, lost blocks, write-back. Requests and steps:
// decode_engine.cc.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "decode_worker/engine/decode_engine.h"
#include "kernels/base/check.h"
#include "kernels/base/log.h"

namespace kvt {
namespace {

constexpr absl::Duration kRetryPause = absl::Milliseconds(200);
constexpr absl::Duration kResumePause = absl::Milliseconds(500);

bool IsRetryable(const absl::Status& status) {
  return absl::IsResourceExhausted(status) || absl::IsUnavailable(status) ||
         absl::IsDeadlineExceeded(status);
}

}  // namespace

void DecodeEngine::OnOpened(const Seq& seq, std::vector<PlacedBlock> places,
                            std::vector<PlacedBlock> digests) {
  --seq->pending;
  if (seq->phase == SequencePhase::kDraining) {
    ReleaseTicket(*seq);  // the lookup may have pinned after the end
    return MaybeForget(seq);
  }
  seq->places = std::move(places);
  if (seq->offload != nullptr) seq->offload->digest_places = std::move(digests);
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
  const uint64_t bytes = seq->offload != nullptr
                             ? seq->offload->slots->slots() * deps_.cache->slot_bytes()
                             : static_cast<uint64_t>(seq->blocks()) * seq->figures.block_bytes;
  pulls_.Add(seq->id, bytes, deps_.clock->Now());
}

void DecodeEngine::StartPulls() {
  for (auto next = pulls_.Start(); next.has_value(); next = pulls_.Start()) {
    Pull(sequences_.at(*next));
  }
}

void DecodeEngine::AppendSlots(const Seq& seq) {
  seq->loaded.resize(static_cast<size_t>(seq->blocks()), false);
  int shared = 0;
  for (int b = static_cast<int>(seq->slots.blocks().size()); b < seq->slots.blocks_max(); ++b) {
    const BlockKey* const key = seq->ShareableKey(static_cast<size_t>(b));
    const auto found = key != nullptr ? shared_.Find(*key) : std::nullopt;
    if (found.has_value()) {
      seq->slots.AppendShared(*found);
      seq->loaded[static_cast<size_t>(b)] = true;
      ++shared;
    } else {
      seq->slots.AppendOwn();
    }
    for (const SlotPair& pair : pool_.Pairs(seq->slots.blocks().back())) {
      seq->base_addresses.push_back(Address(pair.base));
      seq->residual_addresses.push_back(Address(pair.residual));
    }
  }
  deps_.metrics->Shared(shared);
}

void DecodeEngine::Pull(const Seq& seq) {
  seq->pull_started = true;
  if (seq->offload != nullptr) return LoadOffloaded(seq);
  const int blocks = seq->blocks();
  const auto layers = static_cast<size_t>(layers_);
  AppendSlots(seq);
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
  seq->figures.disk_blocks += static_cast<uint64_t>(result.blocks_from_disk);
  seq->figures.disk_bytes += result.bytes_from_disk;
  int lost = 0;
  for (size_t i = 0; i < seq->pull_blocks.size(); ++i) {
    const auto b = static_cast<size_t>(seq->pull_blocks[i]);
    if (seq->pull_outcomes[i] != TransferOutcome::kOk) {
      ++lost;
      continue;
    }
    seq->loaded[b] = true;
    ++seq->figures.blocks_pulled;
    if (const BlockKey* const key = seq->ShareableKey(b); key != nullptr) {
      shared_.Publish(*key, seq->slots.blocks()[b]);
    }
  }
  if (lost > 0) return Resume(seq, lost);
  StartRunning(seq);
}

void DecodeEngine::Resume(const Seq& seq, int blocks_lost) {
  if (seq->ticket.ticket.stores.empty() || !deps_.tier->IsReachable()) return ComputeHere(seq);
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
  // An offloaded sequence begins again, with what prefill computes exactly.
  if (seq->offload == nullptr) {
    request.approximate_tokens = seq->names.approximate_tokens();
    request.provenance = seq->names.worst();
  }
  Control<absl::Status>(
      seq,
      [this, ticket = seq->ticket.signed_ticket, request, blocks_lost] {
        return ResumeSequence(*deps_.coordinator, deps_.connect_prefill, ticket, request,
                              absl::StrCat(blocks_lost, " stored blocks are lost"));
      },
      [this, seq, blocks_lost](absl::Status status) {
        if (status.ok() || seq->phase != SequencePhase::kResuming) return;
        if (IsRetryable(status) && !deps_.tier->IsReachable()) return ComputeHere(seq);
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

void DecodeEngine::WriteBack(const Seq& seq) {
  const int first = seq->written_back;
  const auto complete = static_cast<int>(seq->names.blocks().size());
  const int stored = seq->write_back_runs ? seq->write_back_begin : first;
  const bool behind = complete - stored > kWriteBackBehindMax;
  if (behind && !seq->write_back_behind) deps_.metrics->FellBehind();
  seq->write_back_behind = behind;
  if (seq->write_back_runs || first >= complete) return;
  seq->write_back_runs = true;
  seq->write_back_begin = first;
  const absl::Span<const TierBlock> all = seq->names.blocks();
  const std::vector<TierBlock> names(all.begin() + first, all.begin() + complete);
  for (int b = first; b < complete && seq->offload == nullptr; ++b) {
    const BlockKey* const key = seq->ShareableKey(static_cast<size_t>(b));
    if (key != nullptr) shared_.Publish(*key, seq->slots.blocks()[static_cast<size_t>(b)]);
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
  if (seq->write_list.empty() || !seq->write_to_end) return FindWrittenBack(seq);
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
  seq->figures.write_back_bytes += result.bytes;
  deps_.metrics->WrittenBack(result.bytes, result.blocks_ok, result.blocks_lost);
  FindWrittenBack(seq);
  MaybeForget(seq);
}

void DecodeEngine::EndWriteBack(const Seq& seq) {
  seq->write_back_runs = false;
  if (ResumeAtLast(seq)) return;
  if (seq->write_to_end) WriteBack(seq);
}

}  // namespace kvt
