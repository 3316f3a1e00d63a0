// The output of one request: every token so far, kept until the request is forgotten, so that a
// front end may attach late, or again from any token. The engine writes, RPC threads read.
//
// Bounded by the ticket's output_tokens_max. Thread-safe. Shared by the sequence and its readers.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/base/mutex.h"
#include "kvstore/wire/worker_api.h"

namespace kvt {

class TokenStream {
 public:
  // `now` starts the time without a listener.
  TokenStream(std::string capability, absl::Time now)
      : capability_(std::move(capability)), detached_since_(now) {}

  void Append(absl::Span<const int32_t> tokens);
  // Ends the stream; the first end counts.
  void Finish(FinishReason reason, const DecodeFigures& figures, const PrefillFigures& prefill);
  void Fail(absl::Status status);

  // Sends tokens from `from_token` on to `sink`, on the calling thread, until the stream ends (OK,
  // or its failure) or `sink` returns false (Cancelled: detached). OutOfRange: beyond what there is
  // and will be. PermissionDenied: another capability.
  absl::Status Read(const std::string& capability, uint64_t from_token, const TokenSink& sink);

  [[nodiscard]] bool MayUse(const std::string& capability) const {
    return capability == capability_;
  }
  // How long nobody has listened; zero while somebody does.
  [[nodiscard]] absl::Duration DetachedFor(absl::Time now) const;
  [[nodiscard]] bool ended() const;

 private:
  absl::Status ReadAttached(uint64_t from_token, const TokenSink& sink);

  const std::string capability_;
  mutable Mutex mu_;
  CondVar changed_;
  std::vector<int32_t> tokens_ ABSL_GUARDED_BY(mu_);
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mu_);
  FinishReason reason_ ABSL_GUARDED_BY(mu_) = FinishReason::kRunning;
  DecodeFigures figures_ ABSL_GUARDED_BY(mu_);
  PrefillFigures prefill_ ABSL_GUARDED_BY(mu_);
  int readers_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Time detached_since_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvt
