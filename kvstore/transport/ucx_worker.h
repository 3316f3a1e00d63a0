// One UCP context, worker and thread: the vendor shell around UCX. The thread drives its client and
// sleeps (armed worker, epoll) when neither UCX nor the client has work.
#pragma once

#include <ucp/api/ucp.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/base/clock.h"
#include "kvstore/media/shared_mapping.h"
#include "kvstore/transport/attach_message.h"
#include "kvstore/transport/ucx_messages.h"
#include "kvstore/transport/ucx_transport.h"

namespace kvt {

absl::Status UcxError(absl::string_view what, ucs_status_t status);
// Of memory that could not be registered: how much, why, and what to do about it.
absl::Status UcxRegistrationError(uint64_t bytes, ucs_status_t status);
TransportSettings UcxSettings();

// A received message; valid during the callback.
struct UcxReceived {
  UcxHeader header;
  absl::Span<const std::byte> payload;
  ucp_ep_h reply_ep = nullptr;  // null when the sender wants no answer
};

// What the thread drives. All calls come from the thread.
class UcxClient {
 public:
  virtual ~UcxClient() = default;
  // Does what is due; true when it did something. `woken`: somebody called Wake().
  virtual bool Poll(absl::Time now, bool woken) = 0;
  // When Poll must run again at the latest.
  [[nodiscard]] virtual absl::Time NextTimer() const = 0;
  // A well-formed header came.
  virtual void OnMessage(const UcxReceived& message) = 0;
  // A message without one, or one that wants rendezvous.
  virtual void OnMalformed(ucp_ep_h reply_ep) = 0;
  // True when the thread may end (only asked after RequestStop).
  [[nodiscard]] virtual bool Drained() const = 0;
};

class UcxWorker {
 public:
  // Errors as MakeUcxTransport.
  static absl::StatusOr<std::unique_ptr<UcxWorker>> Create(const UcxOptions& options);
  ~UcxWorker();

  // `client` outlives the thread.
  void Start(UcxClient& client);
  // The thread only: no sleep within the next milliseconds.
  void StayAwake() { awake_until_ = RealClock::Get().Now() + absl::Milliseconds(5); }
  // Thread-safe: Poll runs soon, with woken set.
  void Wake();
  // Ends the thread when the client is drained, joins it and lets go of UCX: context() and worker()
  // are null from then on. `unmap`, if any, is unregistered first. Idempotent.
  void Stop(ucp_mem_h unmap = nullptr);
  [[nodiscard]] bool stopping() const { return stopping_.load(std::memory_order_acquire); }

  [[nodiscard]] const UcxOptions& options() const { return options_; }
  [[nodiscard]] ucp_worker_h worker() const { return worker_; }
  [[nodiscard]] ucp_context_h context() const { return context_; }

 private:
  explicit UcxWorker(const UcxOptions& options) : options_(options) {}
  absl::Status Init();
  void Run();
  void Sleep(absl::Time until);
  static ucs_status_t OnActiveMessage(void* self, const void* header, size_t header_size,
                                      void* data, size_t size, const ucp_am_recv_param_t* param);

  const UcxOptions options_;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  UniqueFd epoll_;
  UniqueFd wake_;
  UcxClient* client_ = nullptr;
  absl::Time awake_until_ = absl::InfinitePast();
  std::atomic<bool> work_{false};
  std::atomic<bool> sleeping_{false};
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

// What a send leaves behind until it completes; slots of the data plane derive from it.
struct UcxSlot {
  // Runs once per send, perhaps before UcxSendMessage returns.
  void (*sent)(UcxSlot* self, ucs_status_t status) = nullptr;
  UcxHeader header;
};

// Sends slot.header and a payload without waiting. The caller keeps slot, payload and vector until
// slot.sent has run.
struct UcxPayload {
  const void* data = nullptr;  // contiguous; or
  size_t size = 0;
  const ucp_dt_iov_t* io_vector = nullptr;  // scattered payload of io_count entries
  size_t io_count = 0;
};
enum class UcxReply { kNone, kWanted };
void UcxSendMessage(ucp_ep_h ep, UcxSlot& slot, const UcxPayload& payload, UcxReply reply);

// Closes by force: nothing is flushed, requests in progress end with an error. `closed` runs once
// (perhaps before the call returns), after which the endpoint is gone.
// Lanes are taken down in later rounds of progress: the worker does not sleep for a while.
void UcxForceClose(UcxWorker& worker, ucp_ep_h ep, void (*closed)(void* context), void* context);

// "host:port" or "[v6]:port" as a socket address. InvalidArgument.
struct UcxSocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;
};
absl::StatusOr<UcxSocketAddress> ParseSocketAddress(absl::string_view text);
std::string FormatSocketAddress(const sockaddr_storage& storage);

}  // namespace kvt
