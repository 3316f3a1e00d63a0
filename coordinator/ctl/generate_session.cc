#include "coordinator/ctl/generate_session.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kvstore/wire/ticket_codec.h"

namespace kvt::ctl {
namespace {

// A stream that broke is attached to again so often: a worker that died refuses at once.
constexpr int kReattachMax = 2;

absl::Status Lost(absl::string_view what, const NodeName& name, const absl::Status& status,
                  size_t tokens) {
  if (!absl::IsUnavailable(status) && !absl::IsDeadlineExceeded(status)) return status;
  return absl::UnavailableError(absl::StrCat(what, " ", name, " was lost after ", tokens,
                                             " output tokens: ", status.message()));
}

}  // namespace

absl::Duration GenerateResult::PerToken() const {
  if (tokens.size() < 2) return absl::ZeroDuration();
  return (last_token - first_token) / static_cast<int64_t>(tokens.size() - 1);
}

void GenerateSession::Take(int32_t token, const TokenConsumer& consumer, GenerateResult* result) {
  const absl::Duration now = clock_.Now() - began_;
  result->tokens.push_back(token);
  if (result->tokens.size() == 1) result->first_token = now;
  if (result->tokens.size() == 2) result->second_token = now;
  result->last_token = now;
  consumer(token);
}

GenerateSession::Route GenerateSession::Current() const {
  MutexLock lock(mu_);
  return route_;
}

bool GenerateSession::IsCancelled() const {
  MutexLock lock(mu_);
  return cancelled_;
}

bool GenerateSession::IsAdmitted() const {
  MutexLock lock(mu_);
  return admitted_;
}

std::string GenerateSession::Cancel() {
  Route route;
  {
    MutexLock lock(mu_);
    cancelled_ = true;
    if (!admitted_) return "";
    route = route_;
  }
  // Whoever holds device memory first. The coordinator tells anyone we did not reach.
  std::string done;
  const auto note = [&](const absl::Status& status, absl::string_view name) {
    if (status.ok()) absl::StrAppend(&done, done.empty() ? "" : ", ", name);
  };
  if (route.decode != nullptr) {
    note(route.decode->Cancel(route.id, route.capability), route.decode_worker);
  }
  if (route.prefill != nullptr) {
    note(route.prefill->Cancel(route.id, route.capability), route.prefill_worker);
  }
  note(coordinator_.Cancel(route.id, route.capability), "coordinator");
  return done;
}

absl::Status GenerateSession::Admit(const GenerateRequest& request, SignedTicket* ticket,
                                    GenerateResult* result) {
  KVT_ASSIGN_OR_RETURN(AdmitReply reply,
                       coordinator_.Admit(AdmitRequest{
                           .model = request.model,
                           .tenant = request.tenant,
                           .prompt_tokens = static_cast<uint32_t>(request.tokens.size()),
                           .output_tokens_max = request.output_tokens_max,
                           .fidelity = request.fidelity}));
  KVT_ASSIGN_OR_RETURN(Ticket decoded, DecodeTicket(reply.ticket.payload));
  result->id = reply.id;
  result->prefill_worker = decoded.prefill_worker;
  *ticket = std::move(reply.ticket);
  std::shared_ptr<PrefillApi> prefill = connect_.prefill(reply.prefill_address);
  MutexLock lock(mu_);
  route_.id = reply.id;
  route_.capability = std::move(decoded.capability);
  route_.prefill_worker = std::move(decoded.prefill_worker);
  route_.prefill = std::move(prefill);
  admitted_ = true;
  return absl::OkStatus();
}

absl::Status GenerateSession::Prefill(const GenerateRequest& request, const SignedTicket& ticket,
                                      const TokenConsumer& consumer, GenerateResult* result) {
  const Route route = Current();
  const SubmitRequest submit{.ticket = ticket,
                             .tokens = request.tokens,
                             .sampling = request.sampling,
                             .stop_tokens = request.stop_tokens};
  bool handed_over = false;
  const absl::Status status = route.prefill->Submit(submit, [&](const PrefillEvent& event) {
    switch (event.kind) {
      case PrefillEvent::Kind::kProgress: break;
      case PrefillEvent::Kind::kFirstToken:
        if (result->tokens.empty()) Take(event.token, consumer, result);
        break;
      case PrefillEvent::Kind::kHandedOver: {
        handed_over = true;
        result->prefill = event.figures;
        result->decode_worker = event.decode_worker;
        std::shared_ptr<DecodeApi> decode = connect_.decode(event.decode_address);
        MutexLock lock(mu_);
        route_.decode_worker = event.decode_worker;
        route_.decode_address = event.decode_address;
        route_.decode = std::move(decode);
        break;
      }
    }
    return true;
  });
  if (handed_over) return absl::OkStatus();
  if (IsCancelled()) return absl::CancelledError("cancelled during prefill");
  if (!status.ok()) {
    return Lost("prefill worker", route.prefill_worker, status, result->tokens.size());
  }
  return absl::InternalError(
      absl::StrCat("prefill worker ", route.prefill_worker, " ended without handing over"));
}

absl::Status GenerateSession::Decode(const TokenConsumer& consumer, GenerateResult* result) {
  const Route route = Current();
  absl::Status status;
  for (int attempt = 0; attempt <= kReattachMax; ++attempt) {
    // The first token came from prefill; asking from 0 compares it, and it tells the TTFT apart
    // from what decode adds.
    uint64_t at = attempt == 0 ? 0 : result->tokens.size();
    const size_t before = result->tokens.size();
    bool differs = false;
    const AttachRequest attach{.id = route.id, .capability = route.capability, .from_token = at};
    status = route.decode->Attach(attach, [&](const TokenEvent& event) {
      for (const int32_t token : event.tokens) {
        if (at < result->tokens.size()) {
          differs = result->tokens[at] != token;
          if (differs) return false;
        } else {
          Take(token, consumer, result);
        }
        ++at;
      }
      if (event.finish != FinishReason::kRunning) {
        result->finish = event.finish;
        result->decode = event.figures;
        // What prefill itself told after the hand-over is complete; this is what it knew before.
        if (result->prefill.prompt_tokens == 0) result->prefill = event.prefill;
      }
      return true;
    });
    if (differs) {
      return absl::InternalError(absl::StrCat("decode worker ", route.decode_worker,
                                              " streamed another token than was received before"));
    }
    if (result->finish != FinishReason::kRunning) return absl::OkStatus();
    if (IsCancelled()) return absl::CancelledError("cancelled during decode");
    if (status.ok()) {
      return absl::InternalError(
          absl::StrCat("decode worker ", route.decode_worker, " ended the stream without a reason"));
    }
    if (!absl::IsUnavailable(status)) return status;
    if (result->tokens.size() > before) attempt = 0;  // it lives: the connection broke
  }
  return Lost("decode worker", route.decode_worker, status, result->tokens.size());
}

absl::Status GenerateSession::Run(const GenerateRequest& request, const TokenConsumer& consumer,
                                  GenerateResult* result) {
  began_ = clock_.Now();
  SignedTicket ticket;
  absl::Status status = Admit(request, &ticket, result);
  // A Cancel that came before the admission had nothing to cancel.
  if (status.ok() && IsCancelled()) {
    Cancel();
    status = absl::CancelledError("cancelled before prefill");
  }
  if (status.ok()) status = Prefill(request, ticket, consumer, result);
  // One that came during the hand-over did not know the decode worker.
  if (status.ok() && IsCancelled()) Cancel();
  if (status.ok()) status = Decode(consumer, result);
  result->total = clock_.Now() - began_;
  return status;
}

}  // namespace kvt::ctl
