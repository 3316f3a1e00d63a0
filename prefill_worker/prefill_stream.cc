#include "prefill_worker/prefill_stream.h"

#include <utility>

#include "kernels/base/clock.h"

namespace kvt {

void PrefillStream::Write(PrefillEvent event) {
  {
    MutexLock lock(mu_);
    if (end_.has_value()) return;
    if (!events_.empty() && event.kind == PrefillEvent::Kind::kProgress &&
        events_.back().kind == PrefillEvent::Kind::kProgress) {
      events_.back() = std::move(event);
    } else {
      events_.push_back(std::move(event));
    }
  }
  changed_.NotifyAll();
}

void PrefillStream::Finish(absl::Status status) {
  {
    MutexLock lock(mu_);
    if (end_.has_value()) return;
    end_ = std::move(status);
  }
  changed_.NotifyAll();
}

std::optional<PrefillEvent> PrefillStream::Read(absl::Duration timeout,
                                                std::optional<absl::Status>* end) {
  const absl::Time deadline = RealClock::Get().Now() + timeout;
  MutexLock lock(mu_);
  while (events_.empty() && !end_.has_value()) {
    const absl::Duration left = deadline - RealClock::Get().Now();
    if (left <= absl::ZeroDuration()) return std::nullopt;
    changed_.WaitFor(mu_, left);
  }
  if (events_.empty()) {
    *end = end_;
    return std::nullopt;
  }
  PrefillEvent event = std::move(events_.front());
  events_.pop_front();
  return event;
}

}  // namespace kvt
