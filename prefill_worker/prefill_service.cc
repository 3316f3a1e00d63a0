#include "prefill_worker/prefill_service.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/check.h"

namespace kvt {
namespace {

// How long a read of the stream waits before it looks again.
constexpr absl::Duration kStreamPoll = absl::Seconds(5);
// Stop tokens of one request.
constexpr size_t kStopTokensMax = 64;

absl::Status CheckSampling(const SamplingParams& sampling) {
  SampleParams params;
  params.temperature = static_cast<float>(sampling.temperature);
  params.top_k = sampling.top_k;
  params.top_p = static_cast<float>(sampling.top_p);
  return params.Validate();
}

}  // namespace

PrefillService::PrefillService(PrefillServiceOptions options, const TicketGate& gate,
                               PrefillEngine& engine, std::function<bool()> is_fenced)
    : options_(std::move(options)),
      gate_(gate),
      engine_(engine),
      is_fenced_(std::move(is_fenced)) {}

absl::StatusOr<std::shared_ptr<PrefillJob>> PrefillService::MakeJob(
    const SignedTicket& signed_ticket, const std::vector<int32_t>& tokens,
    const SamplingParams& sampling, const std::vector<int32_t>& stop_tokens) {
  if (is_fenced_()) {
    return absl::UnavailableError("this prefill worker lost its lease at the coordinator");
  }
  KVT_ASSIGN_OR_RETURN(HeldTicket ticket, gate_.Check(signed_ticket, absl::Now()));
  if (tokens.empty()) return absl::InvalidArgumentError("tokens: the prompt is empty");
  const uint64_t context = options_.model.context_tokens_max;
  if (tokens.size() >= context ||
      ticket.ticket.prompt_tokens + uint64_t{ticket.ticket.output_tokens_max} > context) {
    return absl::InvalidArgumentError(
        absl::StrCat("tokens: ", tokens.size(), " and ", ticket.ticket.output_tokens_max,
                     " to come are beyond the context of ", context, " tokens"));
  }
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || tokens[i] >= options_.vocabulary) {
      return absl::InvalidArgumentError(absl::StrCat("tokens[", i, "]: ", tokens[i],
                                                     " is not in the vocabulary of ",
                                                     options_.vocabulary));
    }
  }
  if (stop_tokens.size() > kStopTokensMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("stop_tokens: ", stop_tokens.size(), ", at most ", kStopTokensMax));
  }
  KVT_RETURN_IF_ERROR(CheckSampling(sampling));
  KeyDomain domain;
  domain.cluster_secret = options_.cluster_secret;
  domain.model_fingerprint = options_.model.fingerprint;
  domain.numerics_id = options_.model.numerics_id;
  domain.geometry = options_.model.geometry;
  domain.tenant = ticket.ticket.tenant;
  auto job = std::make_shared<PrefillJob>(engine_.NextJobId(), std::move(ticket), KeyChain(domain),
                                          tokens);
  if (options_.digests != nullptr &&
      job->ticket.ticket.request_class == RequestClass::kOffloaded) {
    job->digest_chain.emplace(options_.digests->Domain(domain));
  }
  job->sampling = sampling;
  job->stop_tokens = stop_tokens;
  return job;
}

absl::Status PrefillService::Submit(const SubmitRequest& request, const PrefillSink& sink) {
  KVT_ASSIGN_OR_RETURN(const auto job, MakeJob(request.ticket, request.tokens, request.sampling,
                                               request.stop_tokens));
  const Ticket& ticket = job->ticket.ticket;
  if (request.tokens.size() != ticket.prompt_tokens) {
    return absl::InvalidArgumentError(absl::StrCat("tokens: ", request.tokens.size(),
                                                   ", the ticket is for ", ticket.prompt_tokens));
  }
  job->prompt_tokens = ticket.prompt_tokens;
  KVT_RETURN_IF_ERROR(engine_.Submit(job));
  std::optional<absl::Status> end;
  while (true) {
    const std::optional<PrefillEvent> event = job->stream->Read(kStreamPoll, &end);
    if (end.has_value()) return *end;
    if (event.has_value() && !sink(*event)) {
      return absl::CancelledError("the front end went away; the request goes on, detached");
    }
  }
}

absl::Status PrefillService::Resume(const ResumeRequest& request) {
  KVT_ASSIGN_OR_RETURN(const auto job, MakeJob(request.ticket, request.tokens, request.sampling,
                                               request.stop_tokens));
  const Ticket& ticket = job->ticket.ticket;
  if (request.prompt_tokens != ticket.prompt_tokens ||
      request.tokens.size() < ticket.prompt_tokens ||
      request.tokens.size() >= ticket.prompt_tokens + uint64_t{ticket.output_tokens_max}) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tokens: ", request.tokens.size(), " with a prompt of ", request.prompt_tokens,
        "; the ticket is for ", ticket.prompt_tokens, " and ", ticket.output_tokens_max));
  }
  if (ticket.decode_worker.empty()) {
    return absl::InvalidArgumentError("the ticket names no decode worker to return to");
  }
  job->prompt_tokens = ticket.prompt_tokens;
  job->resume = true;
  job->NameApproximate(request.approximate_tokens, request.provenance);
  return engine_.Submit(job);
}

absl::Status PrefillService::Cancel(TicketId id, const std::string& capability) {
  return engine_.Cancel(id, capability);
}

}  // namespace kvt
