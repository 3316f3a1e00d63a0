// One request as a front end runs it (DESIGN 7): Admit at the coordinator, Submit to the prefill
// worker, Attach to the decode worker. Knows no terminal and no text.
//
// Run blocks its caller; Cancel and Describe may come from another thread. One Run per object.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/base/clock.h"
#include "kernels/base/mutex.h"
#include "kvstore/wire/coordinator_api.h"
#include "kvstore/wire/ticket.h"
#include "kvstore/wire/worker_api.h"

namespace kvt::ctl {

struct GenerateRequest {
  std::string model;
  std::string tenant;
  std::vector<int32_t> tokens;
  uint32_t output_tokens_max = 0;
  std::optional<Fidelity> fidelity;  // none: the tenant's default
  SamplingParams sampling;
  std::vector<int32_t> stop_tokens;
};

struct GenerateResult {
  TicketId id;
  std::vector<int32_t> tokens;  // the output, what had arrived when Run failed included
  FinishReason finish = FinishReason::kRunning;
  NodeName prefill_worker;
  NodeName decode_worker;
  PrefillFigures prefill;
  DecodeFigures decode;
  // From the call of Run; zero: did not happen.
  absl::Duration first_token;
  absl::Duration second_token;
  absl::Duration last_token;
  absl::Duration total;

  // Mean time from one output token to the next; zero with fewer than two.
  [[nodiscard]] absl::Duration PerToken() const;
};

// How to reach workers; a seam for tests.
struct WorkerConnector {
  std::function<std::unique_ptr<PrefillApi>(absl::string_view address)> prefill;
  std::function<std::unique_ptr<DecodeApi>(absl::string_view address)> decode;
};

// Gets each output token once, in order, on the caller's thread.
using TokenConsumer = std::function<void(int32_t token)>;

class GenerateSession {
 public:
  // Borrowed: they outlive the session.
  GenerateSession(CoordinatorApi& coordinator, WorkerConnector connect, const Clock& clock)
      : coordinator_(coordinator), connect_(std::move(connect)), clock_(clock) {}

  // Fills `result` as far as it came, on failure too. A lost worker is Unavailable naming it and how
  // many tokens had arrived. A request that was cancelled ends OK with kCancelled, or Cancelled when
  // the stream broke before its end was told.
  absl::Status Run(const GenerateRequest& request, const TokenConsumer& consumer,
                   GenerateResult* result);

  // Cancels at the decode worker, the prefill worker and the coordinator, as far as known. Each
  // call is bounded by the stub's timeout. Idempotent. Says what was cancelled ("decode-0, ...").
  std::string Cancel();
  [[nodiscard]] bool IsCancelled() const;
  // True once the coordinator has admitted the request.
  [[nodiscard]] bool IsAdmitted() const;

 private:
  struct Route {
    TicketId id;
    std::string capability;
    NodeName prefill_worker;
    NodeName decode_worker;
    std::string decode_address;
    std::shared_ptr<PrefillApi> prefill;
    std::shared_ptr<DecodeApi> decode;
  };

  absl::Status Admit(const GenerateRequest& request, SignedTicket* ticket, GenerateResult* result);
  absl::Status Prefill(const GenerateRequest& request, const SignedTicket& ticket,
                       const TokenConsumer& consumer, GenerateResult* result);
  absl::Status Decode(const TokenConsumer& consumer, GenerateResult* result);
  void Take(int32_t token, const TokenConsumer& consumer, GenerateResult* result);
  [[nodiscard]] Route Current() const;

  CoordinatorApi& coordinator_;
  const WorkerConnector connect_;
  const Clock& clock_;
  absl::Time began_;

  mutable Mutex mu_;
  Route route_ ABSL_GUARDED_BY(mu_);
  bool admitted_ ABSL_GUARDED_BY(mu_) = false;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace kvt::ctl
