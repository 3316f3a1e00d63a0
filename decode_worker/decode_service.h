// DecodeApi over an engine: checks what comes from outside, hands it to the engine, and streams
// tokens to whoever attaches. Thread-safe; calls block their RPC thread only.
#pragma once

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "decode_worker/engine/decode_engine.h"
#include "kvstore/client/ticket_gate.h"
#include "kvstore/wire/worker_api.h"

namespace kvt {

struct DecodeServiceOptions {
  ModelInfo model;
  int vocabulary = 0;
  std::string cluster_secret;
};

class DecodeService final : public DecodeApi {
 public:
  // Both outlive the service. `is_fenced`: this worker takes no new work.
  DecodeService(DecodeServiceOptions options, const TicketGate& gate, DecodeEngine& engine,
                std::function<bool()> is_fenced);

  absl::Status HandOver(const HandOverRequest& request) override;
  absl::Status Attach(const AttachRequest& request, const TokenSink& sink) override;
  absl::Status Cancel(TicketId id, const std::string& capability) override;

 private:
  absl::Status CheckRequest(const Ticket& ticket, const HandOverRequest& request) const;

  const DecodeServiceOptions options_;
  const TicketGate& gate_;
  DecodeEngine& engine_;
  const std::function<bool()> is_fenced_;
};

}  // namespace kvt
