#include "coordinator/core/event_log.h"

#include <algorithm>
#include <string>

#include "coordinator/core/core_options.h"

namespace kvt {

void EventLog::Add(absl::Time unix_now, absl::string_view text) {
  events_.push_back(
      ClusterEvent{.unix_ms = absl::ToUnixMillis(unix_now), .text = std::string(text)});
  if (events_.size() > kEventsMax) events_.pop_front();
  new_ = std::min(new_ + 1, events_.size());
}

void EventLog::AddUnlessRecent(absl::Time unix_now, absl::string_view text) {
  const int64_t since = absl::ToUnixMillis(unix_now - kEventRepeat);
  for (auto it = events_.rbegin(); it != events_.rend() && it->unix_ms > since; ++it) {
    if (it->text == text) return;
  }
  Add(unix_now, text);
}

std::vector<ClusterEvent> EventLog::All() const { return {events_.begin(), events_.end()}; }

std::vector<ClusterEvent> EventLog::TakeNew() {
  std::vector<ClusterEvent> out(events_.end() - static_cast<std::ptrdiff_t>(new_), events_.end());
  new_ = 0;
  return out;
}

}  // namespace kvt
