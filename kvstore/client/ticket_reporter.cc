#include "kvstore/client/ticket_reporter.h"

#include <utility>
#include <vector>

namespace kvt {

void TicketReporter::Report(TicketUpdate update) {
  {
    MutexLock lock(mu_);
    if (waiting_.size() >= static_cast<size_t>(kTicketReportsMax)) waiting_.pop_front();
    waiting_.push_back(std::move(update));
    if (sending_) return;
    sending_ = true;
  }
  if (!calls_.TryRun([this] { Send(); })) {
    MutexLock lock(mu_);
    sending_ = false;  // the next report tries again
  }
}

void TicketReporter::Send() {
  while (true) {
    std::vector<TicketUpdate> batch;
    {
      MutexLock lock(mu_);
      if (waiting_.empty()) {
        sending_ = false;
        return;
      }
      batch.assign(std::make_move_iterator(waiting_.begin()),
                   std::make_move_iterator(waiting_.end()));
      waiting_.clear();
    }
    for (int attempt = 0; attempt < kTicketReportAttempts; ++attempt) {
      if (coordinator_.Update(batch).ok()) break;
    }
  }
}

}  // namespace kvt
