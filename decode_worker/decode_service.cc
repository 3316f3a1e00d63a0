#include "decode_worker/decode_service.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/check.h"

namespace kvt {
namespace {

// Stop tokens of one request.
constexpr size_t kStopTokensMax = 64;

}  // namespace

DecodeService::DecodeService(DecodeServiceOptions options, const TicketGate& gate,
                             DecodeEngine& engine, std::function<bool()> is_fenced)
    : options_(std::move(options)),
      gate_(gate),
      engine_(engine),
      is_fenced_(std::move(is_fenced)) {}

absl::Status DecodeService::CheckRequest(const Ticket& ticket,
                                         const HandOverRequest& request) const {
  if (ticket.prompt_tokens == 0 || ticket.output_tokens_max == 0) {
    return absl::InvalidArgumentError("ticket: without a prompt or output");
  }
  const uint64_t all = uint64_t{ticket.prompt_tokens} + ticket.output_tokens_max;
  if (all > options_.model.context_tokens_max) {
    return absl::InvalidArgumentError(absl::StrCat("ticket: ", all, " tokens are beyond the context of ",
                                                   options_.model.context_tokens_max));
  }
  if (request.prompt_tokens != ticket.prompt_tokens ||
      request.tokens.size() < ticket.prompt_tokens || request.tokens.size() >= all) {
    return absl::InvalidArgumentError(
        absl::StrCat("tokens: ", request.tokens.size(), " with a prompt of ", request.prompt_tokens,
                     "; the ticket is for ", ticket.prompt_tokens, " and ",
                     ticket.output_tokens_max));
  }
  for (size_t i = 0; i < request.tokens.size(); ++i) {
    if (request.tokens[i] < 0 || request.tokens[i] >= options_.vocabulary) {
      return absl::InvalidArgumentError(absl::StrCat("tokens[", i, "]: ", request.tokens[i],
                                                     " is not in the vocabulary of ",
                                                     options_.vocabulary));
    }
  }
  if (request.next_token < 0 || request.next_token >= options_.vocabulary) {
    return absl::InvalidArgumentError(
        absl::StrCat("next_token: ", request.next_token, " is not in the vocabulary"));
  }
  if (request.stop_tokens.size() > kStopTokensMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("stop_tokens: ", request.stop_tokens.size(), ", at most ", kStopTokensMax));
  }
  SampleParams params;
  params.temperature = static_cast<float>(request.sampling.temperature);
  params.top_k = request.sampling.top_k;
  params.top_p = static_cast<float>(request.sampling.top_p);
  return params.Validate();
}

absl::Status DecodeService::HandOver(const HandOverRequest& request) {
  if (is_fenced_()) {
    return absl::UnavailableError("this decode worker lost its lease at the coordinator");
  }
  KVT_ASSIGN_OR_RETURN(HeldTicket ticket, gate_.Check(request.ticket, absl::Now()));
  KVT_RETURN_IF_ERROR(CheckRequest(ticket.ticket, request));
  KeyDomain domain;
  domain.cluster_secret = options_.cluster_secret;
  domain.model_fingerprint = options_.model.fingerprint;
  domain.numerics_id = options_.model.numerics_id;
  domain.geometry = options_.model.geometry;
  domain.tenant = ticket.ticket.tenant;
  return engine_.HandOver(std::move(ticket), domain, request);
}

absl::Status DecodeService::Attach(const AttachRequest& request, const TokenSink& sink) {
  const std::shared_ptr<TokenStream> stream = engine_.Stream(request.id);
  if (stream == nullptr) return absl::NotFoundError("no such request in this worker");
  return stream->Read(request.capability, request.from_token, sink);
}

absl::Status DecodeService::Cancel(TicketId id, const std::string& capability) {
  return engine_.Cancel(id, capability);
}

}  // namespace kvt
