// PrefillApi over an engine: checks what comes from outside, hands it to the engine, and streams
// what the engine says. Thread-safe; calls block their RPC thread only.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "kvstore/client/ticket_gate.h"
#include "kvstore/wire/worker_api.h"
#include "prefill_worker/prefill_engine.h"

namespace kvt {

struct PrefillServiceOptions {
  ModelInfo model;
  int vocabulary = 0;
  std::string cluster_secret;
  const DigestLayout* digests = nullptr;  // borrowed; null: no calibration
};

class PrefillService final : public PrefillApi {
 public:
  // Both outlive the service. `is_fenced`: this worker takes no new work.
  PrefillService(PrefillServiceOptions options, const TicketGate& gate, PrefillEngine& engine,
                 std::function<bool()> is_fenced);

  absl::Status Submit(const SubmitRequest& request, const PrefillSink& sink) override;
  absl::Status Resume(const ResumeRequest& request) override;
  absl::Status Cancel(TicketId id, const std::string& capability) override;

 private:
  // Checks and makes a job; the engine does not have it yet.
  absl::StatusOr<std::shared_ptr<PrefillJob>> MakeJob(const SignedTicket& ticket,
                                                      const std::vector<int32_t>& tokens,
                                                      const SamplingParams& sampling,
                                                      const std::vector<int32_t>& stop_tokens);

  const PrefillServiceOptions options_;
  const TicketGate& gate_;
  PrefillEngine& engine_;
  const std::function<bool()> is_fenced_;
};

}  // namespace kvt
