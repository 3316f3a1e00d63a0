#include "kvstore/index/session_table.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/limits.h"

namespace kvt {

absl::StatusOr<SessionId> SessionTable::Open(absl::Time now, Session session) {
  KVT_CHECK(session.id.value() != 0 && !sessions_.contains(session.id));
  SessionId replaced;
  if (const auto it = by_worker_.find(session.worker); it != by_worker_.end()) {
    const Session& current = sessions_.at(it->second);
    if (session.worker_epoch < current.worker_epoch) {
      return absl::FailedPreconditionError(
          absl::StrCat("worker ", session.worker, " of boot ", session.worker_epoch.value(),
                       " is fenced: boot ", current.worker_epoch.value(), " holds a session"));
    }
    replaced = it->second;
  } else if (sessions_.size() >= static_cast<size_t>(kStoreSessionsMax)) {
    return absl::ResourceExhaustedError(
        absl::StrCat(sessions_.size(), " sessions are open, as many as this store holds"));
  }
  session.lease_end = now + lease_;
  next_end_ = std::min(next_end_, session.lease_end);
  by_worker_[session.worker] = session.id;
  const SessionId id = session.id;
  sessions_.emplace(id, std::move(session));
  return replaced;
}

void SessionTable::Close(SessionId id) {
  const auto it = sessions_.find(id);
  KVT_CHECK(it != sessions_.end(), "session ", id.value());
  const auto worker = by_worker_.find(it->second.worker);
  if (worker != by_worker_.end() && worker->second == id) by_worker_.erase(worker);
  sessions_.erase(it);
}

void SessionTable::Renew(absl::Time now, Session& session) {
  session.lease_end = std::max(session.lease_end, now + lease_);
}

Session* SessionTable::Find(SessionId id) {
  const auto it = sessions_.find(id);
  return it == sessions_.end() ? nullptr : &it->second;
}

std::vector<SessionId> SessionTable::NoteTime(absl::Time now) {
  std::vector<SessionId> ended;
  if (last_ != absl::InfinitePast() && now - last_ > stall_after_) {
    const absl::Duration gap = now - last_;
    for (auto& [id, session] : sessions_) session.lease_end += gap;
    next_end_ += gap;
    stalled_ += gap;
  }
  last_ = std::max(last_, now);
  if (now < next_end_) return ended;
  next_end_ = absl::InfiniteFuture();
  for (const auto& [id, session] : sessions_) {
    if (session.lease_end <= now) {
      ended.push_back(id);
    } else {
      next_end_ = std::min(next_end_, session.lease_end);
    }
  }
  std::sort(ended.begin(), ended.end());  // the same in every run
  return ended;
}

}  // namespace kvt
