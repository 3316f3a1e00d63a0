#include "kvstore/wire/worker_convert.h"

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/limits.h"

namespace kvt::rpc {
namespace {

template <typename Field>
void CopyTokens(const std::vector<int32_t>& from, Field* to) {
  to->Reserve(static_cast<int>(from.size()));
  for (const int32_t token : from) to->Add(token);
}

void ToWire(const SamplingParams& from, kvtide::SamplingParams* to) {
  to->set_temperature(from.temperature);
  to->set_top_k(from.top_k);
  to->set_top_p(from.top_p);
  to->set_seed(from.seed);
}

SamplingParams FromWire(const kvtide::SamplingParams& from) {
  SamplingParams to;
  to.temperature = from.temperature();
  to.top_k = from.top_k();
  to.top_p = from.top_p();
  to.seed = from.seed();
  return to;
}

void ToWire(const PrefillFigures& from, kvtide::PrefillFigures* to) {
  to->set_prompt_tokens(from.prompt_tokens);
  to->set_reused_tokens(from.reused_tokens);
  to->set_computed_tokens(from.computed_tokens);
  to->set_pulled_bytes(from.pulled_bytes);
  to->set_pull_bursts(from.pull_bursts);
  to->set_pushed_bytes(from.pushed_bytes);
  to->set_push_bursts(from.push_bursts);
  to->set_saturated_values(from.saturated_values);
  to->set_queued_ns(ToNs(from.queued));
  to->set_compute_ns(ToNs(from.compute));
  to->set_hand_over_ns(ToNs(from.hand_over));
  to->set_disk_blocks(from.disk_blocks);
  to->set_disk_bytes(from.disk_bytes);
  to->set_declined_tokens(from.declined_tokens);
  to->set_declined(from.declined);
}

PrefillFigures FromWire(const kvtide::PrefillFigures& from) {
  PrefillFigures to;
  to.prompt_tokens = from.prompt_tokens();
  to.reused_tokens = from.reused_tokens();
  to.computed_tokens = from.computed_tokens();
  to.pulled_bytes = from.pulled_bytes();
  to.pull_bursts = from.pull_bursts();
  to.pushed_bytes = from.pushed_bytes();
  to.push_bursts = from.push_bursts();
  to.saturated_values = from.saturated_values();
  to.queued = FromNs(from.queued_ns());
  to.compute = FromNs(from.compute_ns());
  to.hand_over = FromNs(from.hand_over_ns());
  to.disk_blocks = from.disk_blocks();
  to.disk_bytes = from.disk_bytes();
  to.declined_tokens = from.declined_tokens();
  to.declined = from.declined();
  return to;
}

void ToWire(const DecodeFigures& from, kvtide::DecodeFigures* to) {
  to->set_output_tokens(from.output_tokens);
  to->set_pulled_bytes(from.pulled_bytes);
  to->set_pull_bursts(from.pull_bursts);
  to->set_blocks_pulled(from.blocks_pulled);
  to->set_block_bytes(from.block_bytes);
  to->set_write_back_bytes(from.write_back_bytes);
  to->set_prompt_tokens_computed(from.prompt_tokens_computed);
  to->set_recomputed_suffixes(from.recomputed_suffixes);
  rpc::ToWire(from.computed, to->mutable_computed());
  to->set_admission_ns(ToNs(from.admission));
  to->set_offloaded(from.offloaded);
  to->set_sequence_bytes(from.sequence_bytes);
  to->set_admission_bytes(from.admission_bytes);
  to->set_digest_bytes(from.digest_bytes);
  to->set_selected_blocks(from.selected_blocks);
  to->set_hot_misses(from.hot_misses);
  to->set_sparse_steps(from.sparse_steps);
  to->set_disk_blocks(from.disk_blocks);
  to->set_disk_bytes(from.disk_bytes);
}

DecodeFigures FromWire(const kvtide::DecodeFigures& from) {
  DecodeFigures to;
  to.output_tokens = from.output_tokens();
  to.pulled_bytes = from.pulled_bytes();
  to.pull_bursts = from.pull_bursts();
  to.blocks_pulled = from.blocks_pulled();
  to.block_bytes = from.block_bytes();
  to.write_back_bytes = from.write_back_bytes();
  to.prompt_tokens_computed = from.prompt_tokens_computed();
  to.recomputed_suffixes = from.recomputed_suffixes();
  to.computed = rpc::FromWire(from.computed());
  to.admission = FromNs(from.admission_ns());
  to.offloaded = from.offloaded();
  to.sequence_bytes = from.sequence_bytes();
  to.admission_bytes = from.admission_bytes();
  to.digest_bytes = from.digest_bytes();
  to.selected_blocks = from.selected_blocks();
  to.hot_misses = from.hot_misses();
  to.sparse_steps = from.sparse_steps();
  to.disk_blocks = from.disk_blocks();
  to.disk_bytes = from.disk_bytes();
  return to;
}

// Of a hand-over or a resume.
template <typename Wire, typename Request>
absl::Status ReadProvenance(const Wire& from, absl::string_view message, Request* to) {
  KVT_ASSIGN_OR_RETURN(to->provenance, ToEnum(from.provenance(), Provenance::kSparse,
                                              absl::StrCat(message, ".provenance")));
  const auto tokens = static_cast<uint32_t>(from.tokens_size());
  to->approximate_tokens = from.approximate_tokens();
  if (to->approximate_tokens == 0) return absl::OkStatus();
  if (to->approximate_tokens > tokens || (tokens - to->approximate_tokens) % kBlockTokens != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(message, ".approximate_tokens: ", to->approximate_tokens, " of ", tokens,
                     " tokens do not begin with a block"));
  }
  return absl::OkStatus();
}

absl::Status ReadSelections(const kvtide::HandOverRequest& from,
                            std::vector<std::vector<int32_t>>* to) {
  if (from.selections_size() > kSelectionLayersMax) {
    return absl::InvalidArgumentError(absl::StrCat("hand_over.selections: ", from.selections_size(),
                                                   " layers, at most ", kSelectionLayersMax));
  }
  for (const kvtide::LayerSelection& layer : from.selections()) {
    int32_t least = 0;  // so that there are no more than kSequenceBlocksMax, too
    for (const int32_t block : layer.blocks()) {
      if (block < least || block >= kSequenceBlocksMax) {
        return absl::InvalidArgumentError(
            absl::StrCat("hand_over.selections[", to->size(), "]: block ", block,
                         " is not in ascending order below ", kSequenceBlocksMax));
      }
      least = block + 1;
    }
    to->push_back(ToVector<int32_t>(layer.blocks()));
  }
  return absl::OkStatus();
}

}  // namespace

void ToWire(const SubmitRequest& from, kvtide::SubmitRequest* to) {
  ToWire(from.ticket, to->mutable_ticket());
  CopyTokens(from.tokens, to->mutable_tokens());
  ToWire(from.sampling, to->mutable_sampling());
  CopyTokens(from.stop_tokens, to->mutable_stop_tokens());
}

SubmitRequest FromWire(const kvtide::SubmitRequest& from) {
  SubmitRequest to;
  to.ticket = FromWire(from.ticket());
  to.tokens = ToVector<int32_t>(from.tokens());
  to.sampling = FromWire(from.sampling());
  to.stop_tokens = ToVector<int32_t>(from.stop_tokens());
  return to;
}

void ToWire(const PrefillEvent& from, kvtide::PrefillEvent* to) {
  to->set_kind(static_cast<uint32_t>(from.kind));
  to->set_tokens_done(from.tokens_done);
  to->set_token(from.token);
  to->set_decode_address(from.decode_address);
  to->set_decode_worker(from.decode_worker);
  ToWire(from.ticket, to->mutable_ticket());
  ToWire(from.figures, to->mutable_figures());
}

absl::StatusOr<PrefillEvent> FromWire(const kvtide::PrefillEvent& from) {
  PrefillEvent to;
  KVT_ASSIGN_OR_RETURN(
      to.kind, ToEnum(from.kind(), PrefillEvent::Kind::kHandedOver, "prefill_event.kind"));
  to.tokens_done = from.tokens_done();
  to.token = from.token();
  to.decode_address = from.decode_address();
  to.decode_worker = from.decode_worker();
  to.ticket = FromWire(from.ticket());
  to.figures = FromWire(from.figures());
  return to;
}

void ToWire(const ResumeRequest& from, kvtide::ResumeRequest* to) {
  ToWire(from.ticket, to->mutable_ticket());
  CopyTokens(from.tokens, to->mutable_tokens());
  to->set_prompt_tokens(from.prompt_tokens);
  ToWire(from.sampling, to->mutable_sampling());
  CopyTokens(from.stop_tokens, to->mutable_stop_tokens());
  to->set_approximate_tokens(from.approximate_tokens);
  to->set_provenance(static_cast<uint32_t>(from.provenance));
}

absl::StatusOr<ResumeRequest> FromWire(const kvtide::ResumeRequest& from) {
  ResumeRequest to;
  KVT_RETURN_IF_ERROR(ReadProvenance(from, "resume", &to));
  to.ticket = FromWire(from.ticket());
  to.tokens = ToVector<int32_t>(from.tokens());
  to.prompt_tokens = from.prompt_tokens();
  to.sampling = FromWire(from.sampling());
  to.stop_tokens = ToVector<int32_t>(from.stop_tokens());
  return to;
}

void ToWire(const HandOverRequest& from, kvtide::HandOverRequest* to) {
  ToWire(from.ticket, to->mutable_ticket());
  CopyTokens(from.tokens, to->mutable_tokens());
  to->set_prompt_tokens(from.prompt_tokens);
  to->set_next_token(from.next_token);
  ToWire(from.sampling, to->mutable_sampling());
  CopyTokens(from.stop_tokens, to->mutable_stop_tokens());
  ToWire(from.figures, to->mutable_figures());
  for (const std::vector<int32_t>& blocks : from.selections) {
    CopyTokens(blocks, to->add_selections()->mutable_blocks());
  }
  to->set_calibration_id(from.calibration_id);
  to->set_approximate_tokens(from.approximate_tokens);
  to->set_provenance(static_cast<uint32_t>(from.provenance));
}

absl::StatusOr<HandOverRequest> FromWire(const kvtide::HandOverRequest& from) {
  HandOverRequest to;
  KVT_RETURN_IF_ERROR(ReadSelections(from, &to.selections));
  if (from.calibration_id().size() > kCalibrationIdBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("hand_over.calibration_id: ", from.calibration_id().size(), " bytes, at most ",
                     kCalibrationIdBytesMax));
  }
  to.calibration_id = from.calibration_id();
  KVT_RETURN_IF_ERROR(ReadProvenance(from, "hand_over", &to));
  to.ticket = FromWire(from.ticket());
  to.tokens = ToVector<int32_t>(from.tokens());
  to.prompt_tokens = from.prompt_tokens();
  to.next_token = from.next_token();
  to.sampling = FromWire(from.sampling());
  to.stop_tokens = ToVector<int32_t>(from.stop_tokens());
  to.figures = FromWire(from.figures());
  return to;
}

void ToWire(const TokenEvent& from, kvtide::TokenEvent* to) {
  CopyTokens(from.tokens, to->mutable_tokens());
  to->set_finish(static_cast<uint32_t>(from.finish));
  if (from.finish == FinishReason::kRunning) return;  // figures come with the last event
  ToWire(from.figures, to->mutable_figures());
  ToWire(from.prefill, to->mutable_prefill());
}

absl::StatusOr<TokenEvent> FromWire(const kvtide::TokenEvent& from) {
  TokenEvent to;
  to.tokens = ToVector<int32_t>(from.tokens());
  KVT_ASSIGN_OR_RETURN(to.finish,
                       ToEnum(from.finish(), FinishReason::kCancelled, "token_event.finish"));
  to.figures = FromWire(from.figures());
  to.prefill = FromWire(from.prefill());
  return to;
}

void ToWire(const AttachRequest& from, kvtide::AttachRequest* to) {
  to->set_id(from.id.value());
  to->set_capability(from.capability);
  to->set_from_token(from.from_token);
}

AttachRequest FromWire(const kvtide::AttachRequest& from) {
  AttachRequest to;
  to.id = TicketId(from.id());
  to.capability = from.capability();
  to.from_token = from.from_token();
  return to;
}

}  // namespace kvt::rpc
