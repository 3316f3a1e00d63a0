#include "kvstore/transport/loopback.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/base/mutex.h"
#include "kernels/layout/checksum.h"
#include "kvstore/transport/attach_message.h"
#include "kvstore/transport/burst_pool.h"
#include "kvstore/transport/piece_copy.h"
#include "kvstore/transport/push_message.h"

namespace kvt {
namespace {

constexpr absl::string_view kPrefix = "loopback:";

// What a server and its channels share. `mu` serialises all of the server's work, so that a run is
// deterministic for one client; the resolver is called under it.
struct Hub {
  explicit Hub(TransportVersions spoken) : versions(spoken) {}
  const TransportVersions versions;
  Mutex mu;
  CondVar changed;
  PieceResolver* resolver ABSL_GUARDED_BY(mu) = nullptr;  // null: stopped or killed
  bool stalled ABSL_GUARDED_BY(mu) = false;
  int corrupt_pieces ABSL_GUARDED_BY(mu) = 0;
  int drop_bursts ABSL_GUARDED_BY(mu) = 0;
  uint64_t version ABSL_GUARDED_BY(mu) = 0;  // counts every change a channel must look at
  TransportServerStats stats ABSL_GUARDED_BY(mu);
};

struct Registry {
  Mutex mu;
  absl::flat_hash_map<std::string, std::shared_ptr<Hub>> hubs ABSL_GUARDED_BY(mu);
};

Registry& TheRegistry() {
  static auto* registry = new Registry;
  return *registry;
}

class LoopbackChannel final : public Channel {
 public:
  LoopbackChannel(std::shared_ptr<Hub> hub, const CheckedHello& hello)
      : hub_(std::move(hub)),
        session_(hello.token.session),
        version_(hello.version),
        pool_(hello.token.geometry),
        scratch_(kMessageBytesMax),
        meta_(kPushMetaBytesMax),
        thread_([this] { Run(); }) {}
  ~LoopbackChannel() override { Close(); }

  absl::StatusOr<BurstId> Pull(PullRequest request) override {
    auto id = pool_.Submit(std::move(request));
    Wake();
    return id;
  }
  absl::StatusOr<BurstId> Push(PushRequest request) override {
    auto id = pool_.Submit(std::move(request));
    Wake();
    return id;
  }
  void Cancel(BurstId burst) override {
    pool_.Cancel(burst);
    Wake();
  }
  void Close() override {
    pool_.Close(absl::UnavailableError("channel closed"));
    Wake();
    if (thread_.joinable()) thread_.join();
  }
  bool IsOpen() const override { return pool_.IsOpen(); }
  ChannelStats Stats() const override { return pool_.Stats(); }

 private:
  void Wake() {
    MutexLock lock(hub_->mu);
    ++hub_->version;
    hub_->changed.NotifyAll();
  }

  void Run() {
    uint64_t seen = 0;
    while (pool_.IsOpen()) {
      {
        MutexLock lock(hub_->mu);
        seen = hub_->version;
        if (hub_->resolver == nullptr) {
          pool_.Close(absl::UnavailableError("loopback: the store is gone"));
          break;
        }
      }
      while (Burst* burst = pool_.TakeSubmitted()) {
        if (RealClock::Get().Now() < burst->deadline) continue;
        pool_.Finish(*burst, absl::DeadlineExceededError("burst not begun by its deadline"));
      }
      while (Burst* burst = pool_.TakeCancelled()) {
        pool_.Finish(*burst, absl::CancelledError("burst cancelled"));
      }
      if (RealClock::Get().Now() >= pool_.NextDeadline()) break;
      if (Step()) continue;
      MutexLock lock(hub_->mu);
      const absl::Duration left =
          std::min(pool_.NextDeadline() - RealClock::Get().Now(), absl::Seconds(60));
      if (seen == hub_->version) hub_->changed.WaitFor(hub_->mu, left);
    }
    End();
  }

  // Ends everything: late bursts by their deadline, the others as the close does.
  void End() {
    const bool late = pool_.IsOpen();
    pool_.Close(absl::UnavailableError("loopback: a missed deadline closed the channel"));
    while (pool_.TakeSubmitted() != nullptr) {
    }
    const absl::Time now = RealClock::Get().Now();
    while (!pool_.Active().empty()) {
      Burst& burst = *pool_.Active().front();
      pool_.Finish(burst, late && now >= burst.deadline
                              ? absl::DeadlineExceededError("loopback: burst not done in time")
                              : absl::UnavailableError("channel closed"));
    }
    MutexLock lock(hub_->mu);
    if (late) ++hub_->stats.forced_closes;
    --hub_->stats.connections;
    if (hub_->resolver != nullptr) hub_->resolver->Detach(session_);
  }

  // Carries out the next message of the oldest burst. False: nothing can be done now.
  bool Step() {
    Burst* burst = nullptr;
    {
      MutexLock lock(hub_->mu);
      if (hub_->stalled || hub_->resolver == nullptr) return false;
      for (Burst* candidate : pool_.Active()) {
        if (std::find(dropped_.begin(), dropped_.end(), candidate->id) != dropped_.end()) continue;
        if (hub_->drop_bursts > 0 && candidate->next_item == 0 && candidate->size() > 0) {
          --hub_->drop_bursts;
          dropped_.push_back(candidate->id);
          continue;
        }
        burst = candidate;
        break;
      }
      if (burst == nullptr) return false;
      if (burst->is_push) {
        StepPush(*burst, *hub_);
      } else {
        StepPull(*burst, *hub_);
      }
    }
    if (burst->items_left == 0) pool_.Finish(*burst, absl::OkStatus());
    return true;
  }

  void StepPull(Burst& burst, Hub& hub) ABSL_EXCLUSIVE_LOCKS_REQUIRED(hub.mu) {
    Piece pieces[kMessagePiecesMax];
    ResolvedPull resolved[kMessagePiecesMax];
    size_t count = 0;
    const uint32_t first = burst.next_item;
    for (; count < kMessagePiecesMax && burst.next_item < burst.size(); ++burst.next_item) {
      pieces[count++] = burst.pulls[burst.next_item].piece;
    }
    hub.resolver->ResolvePull(session_, absl::MakeConstSpan(pieces, count),
                              absl::MakeSpan(resolved, count));
    for (size_t i = 0; i < count; ++i) {
      const PullItem& item = burst.pulls[first + i];
      PieceStatus status = VerdictIn(version_, resolved[i].status);
      if (status == PieceStatus::kOk) {
        const std::byte* src = resolved[i].data;
        if (hub.corrupt_pieces > 0) {
          --hub.corrupt_pieces;
          corrupt_.assign(src, src + item.piece.length);
          corrupt_[0] ^= std::byte{1};
          src = corrupt_.data();
        }
        if (!ScatterRange(item, pool_.slice_bytes(), 0, src, item.piece.length)) {
          status = PieceStatus::kCorrupt;
        }
        hub.stats.bytes_sent += item.piece.length;
        hub.resolver->ReleasePull(session_, absl::MakeConstSpan(&pieces[i], 1));
      }
      pool_.SetVerdict(burst, first + static_cast<uint32_t>(i), status);
    }
    StreamingFence();
  }

  void StepPush(Burst& burst, Hub& hub) ABSL_EXCLUSIVE_LOCKS_REQUIRED(hub.mu) {
    const uint32_t slice = pool_.slice_bytes();
    if (!message_.Fill(burst, slice, PushLimits{})) return;
    std::byte* out = scratch_.data();
    for (size_t i = 0; i < static_cast<size_t>(message_.count); ++i) {
      GatherRange(burst.pushes[message_.items[i]], slice, message_.from[i],
                  message_.pieces[i].length, out, burst.checksums == PushChecksums::kCompute);
      if (hub.corrupt_pieces > 0) {
        --hub.corrupt_pieces;
        out[0] ^= std::byte{1};
      }
      out += message_.pieces[i].length;
    }
    message_.WriteMeta(burst, slice, meta_.data());
    MessageStatuses statuses;
    PushApplier applier(*hub.resolver, session_, slice, version_);
    const absl::Status applied =
        applier.Apply(message_.count, message_.has_checksums,
                      absl::MakeConstSpan(meta_.data(), message_.MetaBytes(slice)),
                      absl::MakeConstSpan(scratch_.data(), message_.bytes), statuses);
    KVT_CHECK(applied.ok(), applied.ToString());
    hub.stats.bytes_received += message_.bytes;
    message_.Settle(pool_, burst, statuses);
  }

  const std::shared_ptr<Hub> hub_;
  const SessionId session_;
  const uint16_t version_;
  BurstPool pool_;
  std::vector<BurstId> dropped_;
  std::vector<std::byte> scratch_, meta_, corrupt_;
  PushMessage message_;
  std::thread thread_;  // last: it uses the others
};

class LoopbackTransport final : public Transport {
 public:
  explicit LoopbackTransport(TransportVersions versions) : versions_(versions) {}
  absl::string_view Scheme() const override { return "loopback"; }
  absl::StatusOr<std::unique_ptr<Channel>> Connect(absl::string_view address,
                                                   const SessionToken& token,
                                                   absl::Time deadline) override {
    std::shared_ptr<Hub> hub;
    {
      MutexLock lock(TheRegistry().mu);
      const auto it = TheRegistry().hubs.find(absl::StripPrefix(address, kPrefix));
      if (it != TheRegistry().hubs.end()) hub = it->second;
    }
    if (hub == nullptr) {
      return absl::UnavailableError(absl::StrCat("loopback: no server at ", address));
    }
    const AttachHello hello = MakeAttachHello(token, TransportSettings{}, 0, versions_);
    KVT_ASSIGN_OR_RETURN(
        const CheckedHello checked,
        CheckAttachHello(
            absl::MakeConstSpan(reinterpret_cast<const std::byte*>(&hello), sizeof(hello)),
            TransportSettings{}, hub->versions));
    {
      MutexLock lock(hub->mu);
      while (hub->stalled && hub->resolver != nullptr) {
        const absl::Duration left = deadline - RealClock::Get().Now();
        if (left <= absl::ZeroDuration()) {
          return absl::DeadlineExceededError(
              absl::StrCat("attach: ", address, " did not answer by the deadline"));
        }
        hub->changed.WaitFor(hub->mu, left);
      }
      if (hub->resolver == nullptr) {
        return absl::UnavailableError(absl::StrCat("loopback: no server at ", address));
      }
      const absl::Status attached = hub->resolver->Attach(checked.token);
      if (!attached.ok()) {
        ++hub->stats.attaches_refused;
        return attached;
      }
      ++hub->stats.connections;
    }
    return std::make_unique<LoopbackChannel>(std::move(hub), checked);
  }

 private:
  const TransportVersions versions_;
};

class LoopbackServerImpl final : public LoopbackServer, public LoopbackFaults {
 public:
  LoopbackServerImpl(std::string name, std::shared_ptr<Hub> hub)
      : name_(std::move(name)), hub_(std::move(hub)) {}
  ~LoopbackServerImpl() override { Kill(); }
  std::string Address() const override { return absl::StrCat(kPrefix, name_); }
  void Stop() override { Kill(); }
  TransportServerStats Stats() const override {
    MutexLock lock(hub_->mu);
    return hub_->stats;
  }
  LoopbackFaults& Faults() override { return *this; }

  void CorruptNext(int pieces) override {
    MutexLock lock(hub_->mu);
    hub_->corrupt_pieces = pieces;
  }
  void DropNext(int bursts) override {
    MutexLock lock(hub_->mu);
    hub_->drop_bursts = bursts;
  }
  void SetStalled(bool stalled) override {
    MutexLock lock(hub_->mu);
    hub_->stalled = stalled;
    ++hub_->version;
    hub_->changed.NotifyAll();
  }
  void Kill() override {
    {
      MutexLock lock(TheRegistry().mu);
      const auto it = TheRegistry().hubs.find(name_);
      if (it != TheRegistry().hubs.end() && it->second == hub_) TheRegistry().hubs.erase(it);
    }
    MutexLock lock(hub_->mu);
    hub_->resolver = nullptr;
    ++hub_->version;
    hub_->changed.NotifyAll();
  }

 private:
  const std::string name_;
  const std::shared_ptr<Hub> hub_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<LoopbackServer>> StartLoopbackServer(const std::string& name,
                                                                    PieceResolver& resolver,
                                                                    TransportVersions versions) {
  auto hub = std::make_shared<Hub>(versions);
  {
    MutexLock lock(hub->mu);
    hub->resolver = &resolver;
  }
  MutexLock lock(TheRegistry().mu);
  if (!TheRegistry().hubs.emplace(name, hub).second) {
    return absl::AlreadyExistsError(absl::StrCat("loopback: a server named ", name, " runs"));
  }
  return std::make_unique<LoopbackServerImpl>(name, std::move(hub));
}

std::unique_ptr<Transport> MakeLoopbackTransport(TransportVersions versions) {
  return std::make_unique<LoopbackTransport>(versions);
}

}  // namespace kvt
