#include "kvstore/transport/ucx_transport.h"

#include <sched.h>

#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/base/mutex.h"
#include "kvstore/transport/ucx_channel.h"
#include "kvstore/transport/ucx_worker.h"

namespace kvt {
namespace {

constexpr absl::string_view kPrefix = "ucx:";

class UcxTransport final : public Transport, public UcxClient {
 public:
  explicit UcxTransport(std::unique_ptr<UcxWorker> worker) : worker_(std::move(worker)) {
    worker_->Start(*this);
  }
  ~UcxTransport() override {
    worker_->Stop();
    MutexLock lock(mu_);
    KVT_CHECK(channels_ == 0, "the transport ends before ", channels_, " channels");
  }

  absl::string_view Scheme() const override { return "ucx"; }
  absl::StatusOr<std::unique_ptr<Channel>> Connect(absl::string_view address,
                                                   const SessionToken& token,
                                                   absl::Time deadline) override;

  bool Poll(absl::Time now, bool woken) override {
    bool did = false;
    if (woken) did = TakeIncoming();
    for (size_t i = 0; i < live_.size(); ++i) {
      did |= live_[i]->Poll(now);
      if (!live_[i]->closed()) continue;
      by_id_.erase(live_[i]->id());
      live_.erase(live_.begin() + static_cast<ptrdiff_t>(i--));
    }
    return did;
  }
  absl::Time NextTimer() const override {
    absl::Time next = absl::InfiniteFuture();
    for (const auto& channel : live_) next = std::min(next, channel->NextTimer());
    return next;
  }
  void OnMessage(const UcxReceived& message) override {
    const auto it = by_id_.find(message.header.channel);
    if (it != by_id_.end()) it->second->OnMessage(message);
  }
  // Not attributable to a channel: its bursts end by their deadlines.
  void OnMalformed(ucp_ep_h) override {}
  bool Drained() const override { return live_.empty(); }

  void ChannelGone() {
    MutexLock lock(mu_);
    --channels_;
  }

 private:
  struct Incoming {
    std::shared_ptr<UcxChannel> channel;
    UcxSocketAddress address;
  };

  bool TakeIncoming() {
    std::vector<Incoming> incoming;
    {
      MutexLock lock(mu_);
      incoming.swap(incoming_);
    }
    for (Incoming& one : incoming) {
      by_id_[one.channel->id()] = one.channel.get();
      live_.push_back(one.channel);
      one.channel->Connect(one.address);
    }
    return !incoming.empty();
  }

  std::unique_ptr<UcxWorker> worker_;
  // Thread only.
  std::vector<std::shared_ptr<UcxChannel>> live_;
  absl::flat_hash_map<uint64_t, UcxChannel*> by_id_;

  Mutex mu_;
  std::vector<Incoming> incoming_ ABSL_GUARDED_BY(mu_);
  uint64_t next_id_ ABSL_GUARDED_BY(mu_) = 1;
  int channels_ ABSL_GUARDED_BY(mu_) = 0;
};

// What the caller holds.
class UcxChannelHandle final : public Channel {
 public:
  UcxChannelHandle(UcxTransport& transport, UcxWorker& worker, std::shared_ptr<UcxChannel> channel)
      : transport_(transport), worker_(worker), channel_(std::move(channel)) {}
  ~UcxChannelHandle() override {
    Close();
    transport_.ChannelGone();
  }
  absl::StatusOr<BurstId> Pull(PullRequest request) override {
    return Submitted(channel_->pool().Submit(std::move(request)));
  }
  absl::StatusOr<BurstId> Push(PushRequest request) override {
    return Submitted(channel_->pool().Submit(std::move(request)));
  }
  void Cancel(BurstId burst) override {
    channel_->pool().Cancel(burst);
    worker_.Wake();
  }
  void Close() override {
    channel_->RequestClose();
    channel_->WaitClosed();
  }
  bool IsOpen() const override { return channel_->pool().IsOpen(); }
  ChannelStats Stats() const override { return channel_->pool().Stats(); }

 private:
  absl::StatusOr<BurstId> Submitted(absl::StatusOr<BurstId> id) {
    if (id.ok()) worker_.Wake();
    return id;
  }
  UcxTransport& transport_;
  UcxWorker& worker_;
  const std::shared_ptr<UcxChannel> channel_;
};

absl::StatusOr<std::unique_ptr<Channel>> UcxTransport::Connect(absl::string_view address,
                                                               const SessionToken& token,
                                                               absl::Time deadline) {
  KVT_RETURN_IF_ERROR(token.geometry.Validate());
  KVT_ASSIGN_OR_RETURN(const UcxSocketAddress parsed,
                       ParseSocketAddress(absl::StripPrefix(address, kPrefix)));
  std::shared_ptr<UcxChannel> channel;
  {
    MutexLock lock(mu_);
    if (channels_ == kTransportChannelsMax) {
      return absl::ResourceExhaustedError(
          absl::StrCat("ucx: ", kTransportChannelsMax, " channels are open"));
    }
    ++channels_;
    channel = std::make_shared<UcxChannel>(*worker_, next_id_++, token, std::string(address));
    incoming_.push_back(Incoming{channel, parsed});
  }
  worker_->Wake();
  auto handle = std::make_unique<UcxChannelHandle>(*this, *worker_, channel);
  KVT_RETURN_IF_ERROR(channel->WaitAttached(deadline));
  return handle;
}

}  // namespace

absl::Status UcxOptions::Validate() const {
  if (cpu < -1 || cpu >= CPU_SETSIZE) {
    return absl::InvalidArgumentError(absl::StrCat("ucx: cpu = ", cpu));
  }
  if (poll_before_sleep < absl::ZeroDuration() || poll_before_sleep > absl::Seconds(1)) {
    return absl::InvalidArgumentError("ucx: poll_before_sleep is outside [0, 1s]");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Transport>> MakeUcxTransport(const UcxOptions& options) {
  KVT_ASSIGN_OR_RETURN(std::unique_ptr<UcxWorker> worker, UcxWorker::Create(options));
  return std::make_unique<UcxTransport>(std::move(worker));
}

}  // namespace kvt
