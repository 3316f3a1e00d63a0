// Stores that attach a client well and then answer as they are told to: late, twice, wrongly, or
// never. For what a client must make of such a peer (F3).
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kernels/base/mutex.h"
#include "kvstore/media/record_table.h"
#include "kvstore/media/shared_mapping.h"
#include "kvstore/transport/push_ring.h"
#include "kvstore/transport/ucx_worker.h"

namespace kvt {

// Over UCX. `script` runs on the store's thread for each pull, push and cancel; it may Send.
class LyingUcxStore final : public UcxClient {
 public:
  using Script = std::function<void(LyingUcxStore&, const UcxReceived&)>;
  explicit LyingUcxStore(Script script);
  ~LyingUcxStore() override;

  [[nodiscard]] std::string Address() const { return address_; }
  // Any thread: `header` (its channel is filled in) and payload go to the client, in order.
  void Send(const UcxHeader& header, std::vector<std::byte> payload);
  // Until everything queued was handed to UCX or the client has closed; false after `timeout`.
  bool AwaitSent(absl::Duration timeout);

  bool Poll(absl::Time now, bool woken) override;
  absl::Time NextTimer() const override { return absl::InfiniteFuture(); }
  void OnMessage(const UcxReceived& message) override;
  void OnMalformed(ucp_ep_h) override {}
  bool Drained() const override { return ep_ == nullptr && drained_; }

 private:
  struct Slot : UcxSlot {
    LyingUcxStore* store = nullptr;
    std::vector<std::byte> payload;
  };
  const Script script_;
  std::unique_ptr<UcxWorker> worker_;
  ucp_listener_h listener_ = nullptr;
  ucp_ep_h ep_ = nullptr;
  bool lost_ = false;
  bool drained_ = false;
  std::string address_;
  uint64_t client_channel_ = 0;
  std::vector<std::unique_ptr<Slot>> sent_;
  Mutex mu_;
  CondVar changed_;
  std::vector<std::pair<UcxHeader, std::vector<std::byte>>> queue_ ABSL_GUARDED_BY(mu_);
  int unsent_ ABSL_GUARDED_BY(mu_) = 0;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

// Over shared memory: lets one client in; the test reads the ring and writes the answers.
class LyingShmStore {
 public:
  LyingShmStore();
  ~LyingShmStore();
  [[nodiscard]] std::string Address() const;
  // Until the client has written `messages` into its ring (each smaller than the rest of it): their
  // headers. Empty after `timeout`.
  std::vector<RingMessage> AwaitMessages(size_t messages, absl::Duration timeout);
  // The next answer, whatever the truth.
  void Answer(const RingAnswer& answer);

 private:
  RingControl& control() { return *reinterpret_cast<RingControl*>(ring_->mutable_data()); }
  void Serve();

  const std::string path_;
  UniqueFd listener_, socket_, doorbell_, answered_;
  std::unique_ptr<SharedMapping> arena_, ring_;
  std::unique_ptr<RecordTable> table_;
  uint64_t answers_ = 0;
  std::thread thread_;  // accepts
  Mutex mu_;
  CondVar changed_;
  bool attached_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace kvt
