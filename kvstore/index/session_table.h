// Leases of workers. One session per worker; a later boot of the worker ends the earlier one's.
// Time comes as an argument. Pure; not thread-safe (owned by BlockIndex).
//
// A store that stalled (stopped, swapped out, suspended) could not hear its workers: when the time
// between two calls of NoteTime, which the owner makes every tick, exceeds `stall_after`, every
// lease is extended by the gap.
#pragma once

#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/base/ids.h"
#include "kernels/layout/geometry.h"

namespace kvt {

struct Session {
  SessionId id;
  std::string secret;  // opaque here
  NodeName worker;
  BootEpoch worker_epoch;
  std::string model_fingerprint;
  std::string numerics_id;
  uint32_t space = 0;  // interned model, numerics and geometry
  Geometry geometry;
  absl::Time lease_end;
  absl::flat_hash_set<TicketId> tickets;  // held in it
};

class SessionTable {
 public:
  SessionTable(absl::Duration lease, absl::Duration stall_after)
      : lease_(lease), stall_after_(stall_after) {}

  // Adds `session` with a full lease. Returns the session of the same worker that it replaces (to
  // be ended by the caller), or id zero. FailedPrecondition when a later boot of the worker holds
  // one; ResourceExhausted beyond kStoreSessionsMax.
  absl::StatusOr<SessionId> Open(absl::Time now, Session session);
  // Precondition: it exists.
  void Close(SessionId id);
  void Renew(absl::Time now, Session& session);

  [[nodiscard]] Session* Find(SessionId id);
  [[nodiscard]] size_t size() const { return sessions_.size(); }
  [[nodiscard]] absl::Duration lease() const { return lease_; }

  // Extends leases after a stall, then returns the sessions whose lease is over.
  std::vector<SessionId> NoteTime(absl::Time now);
  // Total time by which leases were extended.
  [[nodiscard]] absl::Duration stalled() const { return stalled_; }

 private:
  const absl::Duration lease_;
  const absl::Duration stall_after_;
  absl::flat_hash_map<SessionId, Session> sessions_;
  absl::flat_hash_map<NodeName, SessionId> by_worker_;
  absl::Time last_ = absl::InfinitePast();
  absl::Time next_end_ = absl::InfiniteFuture();  // no lease ends before it
  absl::Duration stalled_;
};

}  // namespace kvt
