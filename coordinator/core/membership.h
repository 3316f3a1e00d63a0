// Who belongs to the cluster: nodes by name, their boot epochs, heartbeats and deaths (DESIGN 7).
// Pure: time is an argument (monotonic). Not thread-safe; owned by Cluster.
//
// Invariants:
//   M1  A name has one boot epoch at a time; an epoch that was superseded never comes back.
//   M2  A node is alive iff it registered and was heard of within death_after.
//   M3  The view holds exactly the ready stores (alive, started, not draining); its version rises with each change.
//   M4  All alive workers and clients of one model have equal fingerprint, geometry and numerics id.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "coordinator/core/core_options.h"
#include "kvstore/wire/coordinator_api.h"

namespace kvt {

// kStarting: alive and heard of, not ready to serve; its heartbeats say when it is. A boot that was
// ready never goes back to it.
enum class MemberState : uint8_t { kReady = 0, kDraining = 1, kDead = 2, kStarting = 3 };

struct Member {
  RegisterRequest info;
  MemberState state = MemberState::kReady;
  absl::Time last_heard;
  absl::Time died;  // kDead
  LoadReport load;
  BootEpoch superseded;  // the boot before this one; zero: none
  [[nodiscard]] bool alive() const { return state != MemberState::kDead; }
};

// "decode-1 (pid 123)".
std::string Describe(const Member& member);
absl::string_view NodeKindName(NodeKind kind);  // "store", "prefill worker", ...

// A boot that ended: what Cluster must act upon.
struct Departure {
  NodeName name;
  NodeKind kind = NodeKind::kStore;
  std::string description;  // "decode-1 (pid 123)"
  std::string cause;        // "no heartbeat for 2.1 s"
};

class Membership {
 public:
  explicit Membership(const CoordinatorCoreOptions& options)
      : options_(options), view_version_(options.view_version_base) {}

  // Idempotent for a known boot. A new boot of a known name supersedes the old one, which is
  // appended to `departures` when it was alive. InvalidArgument: malformed. FailedPrecondition:
  // versions or model do not fit (both sides shown), or the boot was superseded. AlreadyExists: the
  // name is an alive node's of another kind. ResourceExhausted: too many nodes.
  absl::Status Register(absl::Time now, const RegisterRequest& request,
                        std::vector<Departure>* departures);
  // Null when unknown, dead or of another boot: it must register again. Makes a starting node ready
  // when it says so.
  const Member* Heartbeat(absl::Time now, const HeartbeatRequest& request);
  // NotFound when this boot is not a member.
  absl::Status Leave(const NodeName& name, BootEpoch epoch, std::vector<Departure>* departures);
  // NotFound when not alive.
  absl::Status SetDraining(const NodeName& name, bool draining);
  // Declares the silent ones dead.
  void Tick(absl::Time now, std::vector<Departure>* departures);
  // Moves all deadlines: the coordinator itself did not run for so long.
  void Extend(absl::Duration stall);

  [[nodiscard]] const Member* Find(const NodeName& name) const;  // null: never seen or forgotten
  [[nodiscard]] const std::map<NodeName, Member>& members() const { return members_; }
  [[nodiscard]] ClusterView View() const;
  [[nodiscard]] uint64_t view_version() const { return view_version_; }

 private:
  absl::Status CheckModel(const RegisterRequest& request) const;
  void ForgetOldestDead();

  const CoordinatorCoreOptions options_;
  std::map<NodeName, Member> members_;  // ordered: what is shown is stable
  uint64_t view_version_;
};

}  // namespace kvt
