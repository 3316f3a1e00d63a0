#include "prefill_worker/job_control.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"

namespace kvt {

uint32_t OutputBlocks(uint64_t tokens, uint64_t output_tokens) {
  return static_cast<uint32_t>((tokens + output_tokens) / kBlockTokens - tokens / kBlockTokens);
}

namespace {

// Of these the first so many lie in the tier with both planes.
int LeadingExact(absl::Span<const PlacedBlock> blocks) {
  size_t lead = 0;
  while (lead < blocks.size() && blocks[lead].presence == BlockPresence::kExact) ++lead;
  return static_cast<int>(lead);
}

std::vector<Provenance> ApproximateOf(Fidelity fidelity) {
  if (fidelity == Fidelity::kSparse) return {Provenance::kSparse, Provenance::kBase};
  if (fidelity == Fidelity::kElastic) return {Provenance::kBase};
  return {};
}

// Names that go on approximately where the exact prefix ends, and their places in `found`, when more
// blocks of them lie in the tier than exact ones do behind it. What is approximate follows an exact
// prefix: without one it is not looked for. A suffix job's names are given.
std::optional<SequenceBlocks> FindApproximate(TierClient& tier, const PrefillJob& job,
                                              LookupResult* found) {
  const int lead = LeadingExact(found->blocks);
  const int reusable = static_cast<int>(found->blocks.size());
  if (job.resume || lead == 0 || lead == reusable) return std::nullopt;
  int most = static_cast<int>(std::count_if(
      found->blocks.begin() + lead, found->blocks.end(),
      [](const PlacedBlock& block) { return block.presence == BlockPresence::kExact; }));
  std::optional<SequenceBlocks> best;
  std::vector<PlacedBlock> places;
  const auto tokens = absl::MakeConstSpan(job.tokens);
  const size_t exact_tokens = static_cast<size_t>(lead) * kBlockTokens;
  for (const Provenance provenance : ApproximateOf(job.ticket.ticket.fidelity)) {
    SequenceBlocks names = job.names.Empty();
    names.Append(tokens.first(exact_tokens));
    names.Append(tokens.subspan(exact_tokens), provenance);
    LookupResult result = tier.Lookup(
        job.ticket, names.blocks().subspan(static_cast<size_t>(lead),
                                           static_cast<size_t>(reusable - lead)));
    const int count = LeadingExact(result.blocks);
    if (count <= most) continue;
    most = count;
    best = std::move(names);
    places = std::move(result.blocks);
  }
  if (!best.has_value()) return std::nullopt;
  std::move(places.begin(), places.end(), found->blocks.begin() + lead);
  return best;
}

}  // namespace

OpenOutcome OpenJob(TierClient& tier, const PrefillJob& job, const ReserveTerms& terms) {
  OpenOutcome outcome;
  const int count = job.plan.blocks();
  const int reusable = job.plan.reusable_blocks();
  outcome.blocks.resize(static_cast<size_t>(count));
  outcome.present.resize(static_cast<size_t>(count), false);
  // Admitted while no store was alive: computed, and handed over without a copy in the tier.
  if (job.ticket.ticket.stores.empty()) return outcome;
  // As submitted: exact, or of a suffix job as its decode worker names them.
  LookupResult found =
      tier.Lookup(job.ticket, job.names.blocks().first(static_cast<size_t>(reusable)));
  outcome.names = FindApproximate(tier, job, &found);
  if (!outcome.names.has_value()) outcome.names = job.names;
  std::vector<TierBlock> missing;
  std::vector<int> missing_index;
  for (int b = 0; b < count; ++b) {
    const auto i = static_cast<size_t>(b);
    if (b < reusable && found.blocks[i].presence == BlockPresence::kExact) {
      outcome.blocks[i].place = found.blocks[i];
      outcome.present[i] = true;
      continue;
    }
    missing.push_back(NameOf(*outcome.names, b));
    missing_index.push_back(b);
  }
  const Ticket& ticket = job.ticket.ticket;
  const uint64_t known = job.tokens.size();
  const uint64_t left = ticket.prompt_tokens + ticket.output_tokens_max - known;
  absl::StatusOr<ReserveResult> reserved = tier.Reserve(
      job.ticket, missing, OutputBlocks(known, left), terms);
  if (!reserved.ok()) {
    outcome.status = reserved.status();
    return outcome;
  }
  for (size_t m = 0; m < missing.size(); ++m) {
    const auto i = static_cast<size_t>(missing_index[m]);
    outcome.blocks[i].place = reserved->blocks[m];
    outcome.blocks[i].push = !reserved->already_sealed[m];
    outcome.present[i] = reserved->already_sealed[m] && missing_index[m] < reusable;
  }
  return outcome;
}

SealOutcomes SealBlocks(TierClient& tier, const PrefillJob& job, std::vector<int> blocks,
                        std::vector<PlacedBlock> places) {
  SealOutcomes result;
  std::vector<PlacedBlock*> pointers;
  std::vector<int> asked;
  std::vector<int> lost;
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (places[i].store == kNoStore) {
      lost.push_back(blocks[i]);
      continue;
    }
    pointers.push_back(&places[i]);
    asked.push_back(blocks[i]);
  }
  if (!asked.empty()) {
    const std::vector<SealOutcome> outcomes = tier.Seal(job.ticket.ref(), absl::MakeSpan(pointers));
    KVT_CHECK(outcomes.size() == asked.size());
    for (size_t i = 0; i < asked.size(); ++i) {
      (outcomes[i] == SealOutcome::kSealed ? result.sealed : lost).push_back(asked[i]);
    }
  }
  if (lost.empty()) return result;
  std::vector<TierBlock> names;
  for (const int block : lost) names.push_back(job.Name(block));
  absl::StatusOr<ReserveResult> again =
      tier.Reserve(job.ticket, names, 0, ReserveMode::kKeepGranted);
  for (size_t i = 0; i < lost.size(); ++i) {
    if (!again.ok() || again->blocks[i].store == kNoStore) {
      result.homeless.push_back(lost[i]);
    } else if (again->already_sealed[i]) {
      result.sealed.push_back(lost[i]);
    } else {
      result.repaired.push_back(lost[i]);
      result.repaired_places.push_back(again->blocks[i]);
    }
  }
  return result;
}

absl::StatusOr<Placement> PlaceJob(CoordinatorApi& coordinator, const TicketGate& gate,
                                   const PlaceRequest& request) {
  KVT_ASSIGN_OR_RETURN(PlaceReply reply, coordinator.Place(request));
  KVT_ASSIGN_OR_RETURN(const Ticket granted, gate.Verify(reply.ticket));
  return Placement{std::move(reply.ticket), std::move(reply.decode_address),
                   granted.decode_worker};
}

absl::Status OfferHandOver(const DecodeConnector& connect, const Placement& placement,
                           const PrefillJob& job, const std::string& calibration_id) {
  const std::shared_ptr<DecodeApi> decode = connect(placement.decode_address);
  HandOverRequest request;
  request.ticket = placement.ticket;
  request.tokens = job.tokens;
  request.prompt_tokens = job.prompt_tokens;
  request.next_token = job.first_token;
  request.sampling = job.sampling;
  request.stop_tokens = job.stop_tokens;
  request.figures = job.figures;
  request.approximate_tokens = job.names.approximate_tokens();
  request.provenance = job.names.worst();
  if (job.selection != nullptr) {
    request.selections = job.selection->selected;
    request.calibration_id = calibration_id;
  }
  return decode->HandOver(request);
}

bool IsRetryable(const absl::Status& status) {
  return absl::IsResourceExhausted(status) || absl::IsUnavailable(status) ||
         absl::IsDeadlineExceeded(status);
}

absl::Status Annotate(const absl::Status& status, absl::string_view what) {
  return absl::Status(status.code(), absl::StrCat(what, ": ", status.message()));
}

}  // namespace kvt
