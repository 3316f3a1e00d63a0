#include "kvstore/transport/ucx_channel.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/layout/checksum.h"
#include "kvstore/transport/piece_copy.h"

namespace kvt {

UcxChannel::UcxChannel(UcxWorker& worker, uint64_t id, const SessionToken& token,
                       std::string address)
    : worker_(worker), id_(id), token_(token), address_(std::move(address)), pool_(token.geometry) {
  attach_slot_.channel = this;
  attach_slot_.sent = &OnSmallSent;
  for (SmallSlot& slot : cancel_slots_) {
    slot.channel = this;
    slot.sent = &OnSmallSent;
  }
  for (PullSlot& slot : pulls_) {
    slot.channel = this;
    slot.sent = &OnPullSent;
    slot.pieces = std::make_unique<Piece[]>(kRequestPiecesMax);
  }
  for (PushSlot& slot : pushes_) {
    slot.channel = this;
    slot.sent = &OnPushSent;
    slot.meta = std::make_unique<std::byte[]>(kPushMetaBytesMax);
  }
}

void UcxChannel::RequestClose() {
  pool_.Close(absl::UnavailableError("channel closed"));
  close_requested_.store(true, std::memory_order_release);
  worker_.Wake();
}

absl::Status UcxChannel::WaitAttached(absl::Time deadline) {
  MutexLock lock(mu_);
  while (attached_.ok() && !*attached_) {
    const absl::Duration left = deadline - RealClock::Get().Now();
    if (left <= absl::ZeroDuration()) {
      return absl::DeadlineExceededError(
          absl::StrCat("attach: ", address_, " did not answer by the deadline"));
    }
    changed_.WaitFor(mu_, left);
  }
  return attached_.status();
}

void UcxChannel::WaitClosed() {
  MutexLock lock(mu_);
  // Bounded: a forced close does not wait for the peer.
  while (!finished_) changed_.WaitFor(mu_, absl::Seconds(1));
}

void UcxChannel::Connect(const UcxSocketAddress& address) {
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR |
                      UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
  params.sockaddr.addr = reinterpret_cast<const sockaddr*>(&address.storage);
  params.sockaddr.addrlen = address.size;
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.arg = this;
  params.err_handler.cb = [](void* self, ucp_ep_h, ucs_status_t status) {
    auto* channel = static_cast<UcxChannel*>(self);
    channel->Fail(absl::UnavailableError(
        absl::StrCat("ucx: ", channel->address_, ": ", ucs_status_string(status))));
  };
  const ucs_status_t status = ucp_ep_create(worker_.worker(), &params, &ep_);
  if (status != UCS_OK) {
    ep_ = nullptr;
    Fail(absl::UnavailableError(
        absl::StrCat("ucx: connecting to ", address_, ": ", ucs_status_string(status))));
    return;
  }
  ep_closed_ = false;
  if (state_ == State::kConnecting) SendAttach();
}

void UcxChannel::SendAttach() {
  state_ = State::kAttaching;
  hello_ = MakeAttachHello(token_, UcxSettings(), id_, worker_.options().versions);
  attach_slot_.header = UcxHeader{};
  attach_slot_.header.type = UcxMessageType::kAttach;
  attach_slot_.sending = true;
  ++sends_;
  UcxPayload payload;
  payload.data = &hello_;
  payload.size = sizeof(hello_);
  UcxSendMessage(ep_, attach_slot_, payload, UcxReply::kWanted);
}

void UcxChannel::OnMessage(const UcxReceived& message) {
  if (state_ != State::kAttaching && state_ != State::kOpen) return;
  switch (message.header.type) {
    case UcxMessageType::kAttachReply:
      return OnAttachReply(message);
    case UcxMessageType::kPullData:
      return OnPullData(message);
    case UcxMessageType::kPushAck:
      return OnPushAck(message);
    case UcxMessageType::kAttach:
    case UcxMessageType::kPull:
    case UcxMessageType::kCancel:
    case UcxMessageType::kPush:
      break;
  }
  Fail(absl::UnavailableError(absl::StrCat("ucx: ", address_, " sent a message of type ",
                                           static_cast<int>(message.header.type))));
}

void UcxChannel::OnAttachReply(const UcxReceived& message) {
  if (state_ != State::kAttaching) return;
  const absl::StatusOr<AttachReply> reply =
      CheckAttachReply(message.payload, worker_.options().versions);
  if (!reply.ok()) return Fail(reply.status());
  statuses_known_ = PieceStatusesIn(reply->version);
  connection_ = reply->connection;
  state_ = State::kOpen;
  MutexLock lock(mu_);
  attached_ = true;
  changed_.NotifyAll();
}

bool UcxChannel::Poll(absl::Time now) {
  if (state_ == State::kClosed) return false;
  if (state_ == State::kClosing) {
    EndIfClosed();
    return state_ == State::kClosed;
  }
  bool did = false;
  while (pool_.TakeSubmitted() != nullptr) did = true;
  while (Burst* burst = pool_.TakeCancelled()) {
    CancelBurst(*burst);
    did = true;
  }
  if (close_requested_.load(std::memory_order_acquire)) {
    Fail(absl::UnavailableError("channel closed"));
    return true;
  }
  if (now >= pool_.NextDeadline()) {
    if (EndIdleLateBurst(now)) return true;
    late_ = now;
    Fail(absl::UnavailableError(
        absl::StrCat("ucx: a missed deadline closed the channel to ", address_)));
    return true;
  }
  if (state_ != State::kOpen) return did;
  for (size_t i = 0; i < pool_.Active().size(); ++i) {
    Burst& burst = *pool_.Active()[i];
    if (!burst.ending.ok()) continue;
    if (burst.size() == 0) {
      pool_.Finish(burst, absl::OkStatus());
      return true;
    }
    if (burst.all_sent()) continue;
    did |= burst.is_push ? PumpPushes(burst) : PumpPulls(burst);
    if (state_ != State::kOpen) return true;
  }
  return did;
}

bool UcxChannel::EndIdleLateBurst(absl::Time now) {
  for (Burst* burst : pool_.Active()) {
    if (burst->deadline > now || burst->in_flight > 0) continue;
    pool_.Finish(*burst, absl::DeadlineExceededError("burst not begun by its deadline"));
    return true;
  }
  return false;
}

bool UcxChannel::PumpPulls(Burst& burst) {
  bool did = false;
  for (PullSlot& slot : pulls_) {
    if (burst.all_sent() || state_ != State::kOpen) break;
    if (slot.busy || slot.sending) continue;
    SendPull(slot, burst);
    did = true;
  }
  return did;
}

void UcxChannel::SendPull(PullSlot& slot, Burst& burst) {
  slot.busy = true;
  slot.sending = true;
  ++slot.generation;
  slot.burst = &burst;
  slot.first_item = burst.next_item;
  slot.count = std::min<uint32_t>(burst.size() - burst.next_item, kRequestPiecesMax);
  slot.next = 0;
  slot.next_byte = 0;
  for (uint32_t i = 0; i < slot.count; ++i) {
    slot.pieces[i] = burst.pulls[slot.first_item + i].piece;
  }
  burst.next_item += slot.count;
  ++burst.in_flight;
  ++sends_;
  slot.header = UcxHeader{};
  slot.header.type = UcxMessageType::kPull;
  slot.header.channel = connection_;
  slot.header.request =
      (uint64_t{slot.generation} << 32) | static_cast<uint64_t>(&slot - pulls_.data());
  slot.header.count = slot.count;
  UcxPayload payload;
  payload.data = slot.pieces.get();
  payload.size = slot.count * sizeof(Piece);
  UcxSendMessage(ep_, slot, payload, UcxReply::kWanted);
}

bool UcxChannel::PumpPushes(Burst& burst) {
  bool did = false;
  for (PushSlot& slot : pushes_) {
    if (burst.all_sent() || state_ != State::kOpen) break;
    if (slot.busy) continue;
    SendPush(slot, burst);
    did = true;
  }
  return did;
}

void UcxChannel::SendPush(PushSlot& slot, Burst& burst) {
  const uint32_t slice = pool_.slice_bytes();
  // One entry of the vector is the meta's.
  PushLimits limits;
  limits.pieces_max = kMessagePiecesMax - 1;
  limits.runs_max = kMessagePiecesMax - 1;
  if (!slot.message.Fill(burst, slice, limits)) return;
  slot.busy = true;
  slot.sending = true;
  slot.acked = false;
  ++slot.generation;
  slot.burst = &burst;
  const PushMessage& message = slot.message;
  size_t entries = 1;
  for (size_t i = 0; i < static_cast<size_t>(message.count); ++i) {
    const PushItem& item = burst.pushes[message.items[i]];
    const uint32_t end = message.from[i] + message.pieces[i].length;
    if (burst.checksums == PushChecksums::kCompute) {
      ChecksumRange(item, slice, message.from[i], message.pieces[i].length);
    }
    for (uint32_t at = message.from[i]; at < end;) {
      const uint32_t in_part = at % item.part_bytes;
      const uint32_t run = std::min(item.part_bytes - in_part, end - at);
      slot.io[entries].buffer = const_cast<std::byte*>(item.parts[at / item.part_bytes] + in_part);
      slot.io[entries++].length = run;
      at += run;
    }
  }
  message.WriteMeta(burst, slice, slot.meta.get());
  slot.io[0].buffer = slot.meta.get();
  slot.io[0].length = message.MetaBytes(slice);
  ++burst.in_flight;
  ++sends_;
  slot.header = UcxHeader{};
  slot.header.type = UcxMessageType::kPush;
  slot.header.channel = connection_;
  slot.header.request =
      (uint64_t{slot.generation} << 32) | static_cast<uint64_t>(&slot - pushes_.data());
  slot.header.has_checksums = message.has_checksums ? 1 : 0;
  slot.header.count = static_cast<uint32_t>(message.count);
  slot.header.bytes = message.bytes;
  UcxPayload payload;
  payload.io_vector = slot.io.data();
  payload.io_count = entries;
  UcxSendMessage(ep_, slot, payload, UcxReply::kWanted);
}

void UcxChannel::OnPullData(const UcxReceived& message) {
  const auto index = static_cast<uint32_t>(message.header.request);
  if (index >= pulls_.size()) return Fail(absl::UnavailableError("ucx: data of no request"));
  PullSlot& slot = pulls_[index];
  // A late answer to an older request of this place.
  if (!slot.busy || slot.generation != message.header.request >> 32) return;
  if (!TakePieces(slot, message)) {
    Fail(absl::UnavailableError(absl::StrCat("ucx: malformed data from ", address_)));
    return;
  }
  if (slot.next < slot.count) return;
  slot.busy = false;
  if (Burst* burst = std::exchange(slot.burst, nullptr)) {
    --burst->in_flight;
    FinishIfDone(*burst);
  }
}

bool UcxChannel::TakePieces(PullSlot& slot, const UcxReceived& message) {
  const UcxHeader& header = message.header;
  if (header.count < 1 || header.count > kMessagePiecesMax || header.first != slot.next ||
      header.skip != slot.next_byte || header.first + header.count > slot.count ||
      header.bytes != message.payload.size()) {
    return false;
  }
  const std::byte* src = message.payload.data();
  uint32_t left = header.bytes;
  for (uint32_t i = 0; i < header.count; ++i) {
    const uint32_t at = header.first + i;
    const Piece& piece = slot.pieces[at];
    const uint32_t from = slot.next_byte;
    PieceStatus status = header.statuses[i];
    if (static_cast<int>(status) >= statuses_known_) return false;
    uint32_t take = 0;
    if (status == PieceStatus::kOk) {
      take = std::min(piece.length - from, left);
      const uint32_t unit = from + take == piece.length ? 1 : kPieceAlignment;
      if (take == 0 || take % unit != 0) return false;
      if (from + take < piece.length && i + 1 != header.count) return false;
    }
    if (slot.burst != nullptr) {
      Burst& burst = *slot.burst;
      const uint32_t item = slot.first_item + at;
      if (status == PieceStatus::kOk && burst.statuses[item] == PieceStatus::kNotAttempted) {
        const PullItem& pull = burst.pulls[item];
        const uint32_t slice = pool_.slice_bytes();
        if (pull.checksums != nullptr && (from % slice != 0 || take % slice != 0)) return false;
        if (!ScatterRange(pull, slice, from, src, take)) {
          burst.statuses[item] = PieceStatus::kCorrupt;
        }
      }
      if (status != PieceStatus::kOk) burst.statuses[item] = status;
      if (status != PieceStatus::kOk || from + take == piece.length) {
        const PieceStatus kept = burst.statuses[item];
        pool_.SetVerdict(burst, item, kept == PieceStatus::kNotAttempted ? PieceStatus::kOk : kept);
      }
    }
    src += take;
    left -= take;
    const bool whole = status != PieceStatus::kOk || from + take == piece.length;
    slot.next = whole ? at + 1 : at;
    slot.next_byte = whole ? 0 : from + take;
  }
  StreamingFence();
  return left == 0;
}

void UcxChannel::OnPushAck(const UcxReceived& message) {
  const auto index = static_cast<uint32_t>(message.header.request);
  if (index >= pushes_.size()) return Fail(absl::UnavailableError("ucx: answer to no request"));
  PushSlot& slot = pushes_[index];
  if (!slot.busy || slot.acked || slot.generation != message.header.request >> 32) return;
  const bool good = std::all_of(message.header.statuses.begin(), message.header.statuses.end(),
                                [&](PieceStatus s) { return static_cast<int>(s) < statuses_known_; });
  if (!good || message.header.count != static_cast<uint32_t>(slot.message.count)) {
    return Fail(absl::UnavailableError(absl::StrCat("ucx: malformed answer from ", address_)));
  }
  slot.acked = true;
  if (slot.burst->ending.ok()) slot.message.Settle(pool_, *slot.burst, message.header.statuses);
  SettlePush(slot);
}

void UcxChannel::SettlePush(PushSlot& slot) {
  if (slot.sending || !slot.acked || !slot.busy) return;
  slot.busy = false;
  Burst* burst = std::exchange(slot.burst, nullptr);
  --burst->in_flight;
  FinishIfDone(*burst);
}

void UcxChannel::FinishIfDone(Burst& burst) {
  if (burst.in_flight > 0) return;
  if (!burst.ending.ok()) {
    pool_.Finish(burst, std::exchange(burst.ending, absl::OkStatus()));
  } else if (burst.items_left == 0) {
    pool_.Finish(burst, absl::OkStatus());
  }
}

void UcxChannel::CancelBurst(Burst& burst) {
  burst.ending = absl::CancelledError("burst cancelled");
  if (!burst.is_push) {
    for (PullSlot& slot : pulls_) {
      if (slot.burst != &burst) continue;
      slot.burst = nullptr;  // the answer is counted and dropped
      --burst.in_flight;
      for (SmallSlot& cancel : cancel_slots_) {
        if (cancel.sending || state_ != State::kOpen) continue;
        cancel.sending = true;
        ++sends_;
        cancel.header = UcxHeader{};
        cancel.header.type = UcxMessageType::kCancel;
        cancel.header.channel = connection_;
        cancel.header.request = slot.header.request;
        UcxSendMessage(ep_, cancel, UcxPayload{}, UcxReply::kWanted);
        break;
      }
    }
  }
  FinishIfDone(burst);
}

void UcxChannel::Fail(absl::Status why) {
  if (state_ == State::kClosing || state_ == State::kClosed) return;
  BeginClose(std::move(why));
}

void UcxChannel::BeginClose(absl::Status why) {
  state_ = State::kClosing;
  failure_ = std::move(why);
  pool_.Close(failure_);
  {
    MutexLock lock(mu_);
    if (attached_.ok() && !*attached_) attached_ = failure_;
    changed_.NotifyAll();
  }
  worker_.Wake();  // Poll closes the endpoint: not within one of its callbacks
}

void UcxChannel::EndIfClosed() {
  if (!ep_closed_ && ep_ != nullptr) {
    UcxForceClose(
        worker_, std::exchange(ep_, nullptr),
        [](void* self) {
          auto* channel = static_cast<UcxChannel*>(self);
          channel->ep_closed_ = true;
          channel->worker_.Wake();
        },
        this);
  }
  // Until here the transfer may read sources and write destinations.
  if (!ep_closed_ || sends_ > 0) return;
  while (pool_.TakeSubmitted() != nullptr) {
  }
  for (PullSlot& slot : pulls_) slot.burst = nullptr;
  for (PushSlot& slot : pushes_) slot.burst = nullptr;
  while (!pool_.Active().empty()) {
    Burst& burst = *pool_.Active().front();
    burst.in_flight = 0;
    absl::Status status = failure_;
    if (!burst.ending.ok()) status = burst.ending;
    if (burst.deadline <= late_) {
      status = absl::DeadlineExceededError(
          absl::StrCat("ucx: ", address_, " did not finish the burst by its deadline"));
    }
    pool_.Finish(burst, std::move(status));
  }
  state_ = State::kClosed;
  MutexLock lock(mu_);
  finished_ = true;
  changed_.NotifyAll();
}

void UcxChannel::OnSmallSent(UcxSlot* self, ucs_status_t status) {
  auto& slot = *static_cast<SmallSlot*>(self);
  slot.sending = false;
  --slot.channel->sends_;
  if (status != UCS_OK) slot.channel->Fail(UcxError("ucx: send", status));
}

void UcxChannel::OnPullSent(UcxSlot* self, ucs_status_t status) {
  auto& slot = *static_cast<PullSlot*>(self);
  slot.sending = false;
  --slot.channel->sends_;
  if (status != UCS_OK) return slot.channel->Fail(UcxError("ucx: send", status));
  slot.channel->worker_.Wake();
}

void UcxChannel::OnPushSent(UcxSlot* self, ucs_status_t status) {
  auto& slot = *static_cast<PushSlot*>(self);
  slot.sending = false;
  --slot.channel->sends_;
  if (status != UCS_OK) return slot.channel->Fail(UcxError("ucx: send", status));
  slot.channel->SettlePush(slot);
}

}  // namespace kvt
