#include "decode_worker/engine/token_stream.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/clock.h"

namespace kvt {
namespace {

// A reader looks again this often, whatever happens.
constexpr absl::Duration kReadPoll = absl::Seconds(5);

}  // namespace

void TokenStream::Append(absl::Span<const int32_t> tokens) {
  {
    MutexLock lock(mu_);
    if (end_.has_value()) return;
    tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
  }
  changed_.NotifyAll();
}

void TokenStream::Finish(FinishReason reason, const DecodeFigures& figures,
                         const PrefillFigures& prefill) {
  {
    MutexLock lock(mu_);
    if (end_.has_value()) return;
    end_ = absl::OkStatus();
    reason_ = reason;
    figures_ = figures;
    prefill_ = prefill;
  }
  changed_.NotifyAll();
}

void TokenStream::Fail(absl::Status status) {
  {
    MutexLock lock(mu_);
    if (end_.has_value()) return;
    end_ = std::move(status);
  }
  changed_.NotifyAll();
}

absl::Status TokenStream::Read(const std::string& capability, uint64_t from_token,
                               const TokenSink& sink) {
  if (!MayUse(capability)) return absl::PermissionDeniedError("another capability");
  {
    MutexLock lock(mu_);
    ++readers_;
  }
  const absl::Status status = ReadAttached(from_token, sink);
  MutexLock lock(mu_);
  if (--readers_ == 0) detached_since_ = RealClock::Get().Now();
  return status;
}

absl::Status TokenStream::ReadAttached(uint64_t from_token, const TokenSink& sink) {
  uint64_t next = from_token;
  while (true) {
    TokenEvent event;
    {
      MutexLock lock(mu_);
      while (tokens_.size() <= next && !end_.has_value()) changed_.WaitFor(mu_, kReadPoll);
      if (end_.has_value() && next > tokens_.size()) {
        return absl::OutOfRangeError(
            absl::StrCat("from_token: ", from_token, ", the request has ", tokens_.size()));
      }
      event.tokens.assign(tokens_.begin() + static_cast<int64_t>(next), tokens_.end());
      next = tokens_.size();
      if (end_.has_value() && !end_->ok() && event.tokens.empty()) return *end_;
      if (end_.has_value() && end_->ok()) {
        event.finish = reason_;
        event.figures = figures_;
        event.prefill = prefill_;
      }
    }
    if (!sink(event)) return absl::CancelledError("the reader went away");
    if (event.finish != FinishReason::kRunning) return absl::OkStatus();
  }
}

absl::Duration TokenStream::DetachedFor(absl::Time now) const {
  MutexLock lock(mu_);
  return readers_ > 0 ? absl::ZeroDuration() : now - detached_since_;
}

bool TokenStream::ended() const {
  MutexLock lock(mu_);
  return end_.has_value();
}

}  // namespace kvt
