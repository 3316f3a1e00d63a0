// A client's connection to one store over UCX. Created by UcxTransport, driven by its thread.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "kernels/base/mutex.h"
#include "kvstore/transport/burst_pool.h"
#include "kvstore/transport/push_message.h"
#include "kvstore/transport/ucx_worker.h"

namespace kvt {

// Push messages of one channel that are not acknowledged. Each holds its sources until it is sent.
inline constexpr int kUcxPushesInFlightMax = 8;

// States: kConnecting -> kAttaching -> kOpen -> kClosing -> kClosed; any may go to kClosing.
// Threads: the public part of Channel by anyone, the rest by the transport's thread.
class UcxChannel {
 public:
  UcxChannel(UcxWorker& worker, uint64_t id, const SessionToken& token, std::string address);

  // Anyone.
  BurstPool& pool() { return pool_; }
  void RequestClose();
  // Until attached: Ok; until refused or failed: why. DeadlineExceeded.
  absl::Status WaitAttached(absl::Time deadline);
  // Until kClosed and all callbacks have run.
  void WaitClosed();

  // The thread.
  void Connect(const UcxSocketAddress& address);
  // Submissions, cancellations, deadlines, sends. True when it did something.
  bool Poll(absl::Time now);
  void OnMessage(const UcxReceived& message);
  void Fail(absl::Status why);
  [[nodiscard]] absl::Time NextTimer() const { return pool_.NextDeadline(); }
  [[nodiscard]] bool closed() const { return state_ == State::kClosed; }
  [[nodiscard]] uint64_t id() const { return id_; }

 private:
  enum class State { kConnecting, kAttaching, kOpen, kClosing, kClosed };

  struct PullSlot : UcxSlot {
    UcxChannel* channel = nullptr;
    bool busy = false;     // answer outstanding
    bool sending = false;  // the request itself is on its way out
    uint32_t generation = 0;
    Burst* burst = nullptr;  // null: cancelled, the answer is dropped
    uint32_t first_item = 0;
    uint32_t count = 0;
    uint32_t next = 0;  // piece and byte that the next data message must begin with
    uint32_t next_byte = 0;
    std::unique_ptr<Piece[]> pieces;
  };
  struct PushSlot : UcxSlot {
    UcxChannel* channel = nullptr;
    bool busy = false;
    bool sending = false;
    bool acked = false;
    uint32_t generation = 0;
    Burst* burst = nullptr;
    PushMessage message;
    std::array<ucp_dt_iov_t, kMessagePiecesMax> io;
    std::unique_ptr<std::byte[]> meta;
  };
  struct SmallSlot : UcxSlot {
    UcxChannel* channel = nullptr;
    bool sending = false;
  };

  void SendAttach();
  void OnAttachReply(const UcxReceived& message);
  void OnPullData(const UcxReceived& message);
  // False: malformed.
  bool TakePieces(PullSlot& slot, const UcxReceived& message);
  void OnPushAck(const UcxReceived& message);
  // Ends a late burst of which nothing is in flight: no reason to close the channel.
  bool EndIdleLateBurst(absl::Time now);
  bool PumpPulls(Burst& burst);
  bool PumpPushes(Burst& burst);
  void SendPull(PullSlot& slot, Burst& burst);
  void SendPush(PushSlot& slot, Burst& burst);
  void SettlePush(PushSlot& slot);
  void CancelBurst(Burst& burst);
  void FinishIfDone(Burst& burst);
  void BeginClose(absl::Status why);
  void EndIfClosed();
  static void OnSmallSent(UcxSlot* self, ucs_status_t status);
  static void OnPullSent(UcxSlot* self, ucs_status_t status);
  static void OnPushSent(UcxSlot* self, ucs_status_t status);

  UcxWorker& worker_;
  const uint64_t id_;
  const SessionToken token_;
  const std::string address_;
  BurstPool pool_;

  // Thread only.
  State state_ = State::kConnecting;
  ucp_ep_h ep_ = nullptr;
  uint64_t connection_ = 0;
  int statuses_known_ = 0;  // by the version that was agreed
  bool ep_closed_ = true;
  uint32_t sends_ = 0;  // not completed
  absl::Status failure_;
  absl::Time late_ = absl::InfinitePast();  // bursts due by then missed their deadline
  AttachHello hello_;
  SmallSlot attach_slot_;
  std::array<SmallSlot, 4> cancel_slots_;
  std::array<PullSlot, kRequestsInFlightMax> pulls_;
  std::array<PushSlot, kUcxPushesInFlightMax> pushes_;

  std::atomic<bool> close_requested_{false};
  Mutex mu_;
  CondVar changed_;
  absl::StatusOr<bool> attached_ ABSL_GUARDED_BY(mu_) = false;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace kvt
