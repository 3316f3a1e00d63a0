#include "kvstore/index/ticket_table.h"

#include "kernels/base/check.h"
#include "kvstore/index/limits.h"

namespace kvt {

void TicketTable::Erase(TicketId id) {
  const auto it = tickets_.find(id);
  KVT_CHECK(it != tickets_.end(), "ticket ", id.value());
  const TicketEntry& entry = *it->second;
  KVT_CHECK(entry.holders.empty() && entry.room.empty() && entry.privates.empty(), "ticket ",
            id.value(), " holds something");
  if (entry.has_fenced) {
    if (fenced_.insert_or_assign(id, entry.epoch).second) fenced_order_.push_back(id);
    if (fenced_order_.size() > kFencedTicketsMax) {
      fenced_.erase(fenced_order_.front());
      fenced_order_.pop_front();
    }
  }
  tickets_.erase(it);
}

}  // namespace kvt
