// The latest things worth telling an operator, in a bounded ring. Pure; owned by Cluster.
#pragma once

#include <deque>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kvstore/wire/coordinator_api.h"

namespace kvt {

inline constexpr absl::Duration kEventRepeat = absl::Minutes(1);

class EventLog {
 public:
  // Drops the oldest beyond kEventsMax. `unix_now`: the calendar.
  void Add(absl::Time unix_now, absl::string_view text);
  // The same, unless the text has been added lately (kEventRepeat): what goes on and is tried again and
  // again would push everything else out.
  void AddUnlessRecent(absl::Time unix_now, absl::string_view text);
  // Oldest first.
  [[nodiscard]] std::vector<ClusterEvent> All() const;
  // Events added since the last call, for the shell's log.
  [[nodiscard]] std::vector<ClusterEvent> TakeNew();

 private:
  std::deque<ClusterEvent> events_;
  size_t new_ = 0;  // of the last ones
};

}  // namespace kvt
