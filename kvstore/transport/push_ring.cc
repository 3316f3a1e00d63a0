#include "kvstore/transport/push_ring.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"

namespace kvt {
namespace {

RingAnswer* AnswersOf(const SharedMapping& mapping) {
  return reinterpret_cast<RingAnswer*>(mapping.mutable_data() + 4096);
}
std::byte* DataOf(const SharedMapping& mapping) { return mapping.mutable_data() + kRingDataOffset; }
RingControl& ControlOf(const SharedMapping& mapping) {
  return *reinterpret_cast<RingControl*>(mapping.mutable_data());
}

}  // namespace

PushRingWriter::PushRingWriter(SharedMapping mapping) : mapping_(std::move(mapping)) {
  KVT_CHECK(mapping_.writable() && mapping_.size() >= kRingMappingBytes);
}

RingControl& PushRingWriter::control() const { return ControlOf(mapping_); }

std::optional<PushRingWriter::Place> PushRingWriter::Reserve(size_t meta_bytes,
                                                             uint32_t data_bytes) {
  const uint64_t data_at = RoundUp(sizeof(RingMessage) + meta_bytes, 64);
  const uint64_t total = data_at + data_bytes;
  const uint64_t tail = control().tail.load(std::memory_order_acquire);
  uint64_t at = head_ % kPushRingBytes;
  const uint64_t to_end = kPushRingBytes - at;
  const uint64_t pad = to_end < total ? to_end : 0;
  if (head_ - tail + pad + total > kPushRingBytes) return std::nullopt;
  if (pad > 0) {
    RingMessage message;
    message.magic = kRingMagic;
    message.kind = RingKind::kPad;
    message.total = static_cast<uint32_t>(pad);
    std::memcpy(DataOf(mapping_) + at, &message, sizeof(message));
    head_ += pad;
    at = 0;
  }
  meta_bytes_ = static_cast<uint32_t>(meta_bytes);
  data_bytes_ = data_bytes;
  std::byte* start = DataOf(mapping_) + at;
  return Place{start + sizeof(RingMessage), start + data_at};
}

bool PushRingWriter::Commit(uint64_t id, int count, bool has_checksums) {
  RingMessage message;
  message.magic = kRingMagic;
  message.kind = RingKind::kPush;
  message.total =
      static_cast<uint32_t>(RoundUp(sizeof(RingMessage) + meta_bytes_, 64) + data_bytes_);
  message.count = static_cast<uint32_t>(count);
  message.data_bytes = data_bytes_;
  message.has_checksums = has_checksums ? 1 : 0;
  message.id = id;
  std::memcpy(DataOf(mapping_) + head_ % kPushRingBytes, &message, sizeof(message));
  head_ += message.total;
  control().head.store(head_, std::memory_order_seq_cst);
  return control().store_sleeps.load(std::memory_order_seq_cst) != 0;
}

std::optional<RingAnswer> PushRingWriter::TakeAnswer() {
  if (control().answers_head.load(std::memory_order_acquire) == answers_) return std::nullopt;
  const RingAnswer answer = AnswersOf(mapping_)[answers_ % kRingAnswers];
  control().answers_tail.store(++answers_, std::memory_order_release);
  return answer;
}

bool PushRingWriter::PrepareSleep() {
  control().client_sleeps.store(1, std::memory_order_seq_cst);
  return control().answers_head.load(std::memory_order_seq_cst) == answers_;
}

void PushRingWriter::EndSleep() { control().client_sleeps.store(0, std::memory_order_relaxed); }

PushRingReader::PushRingReader(SharedMapping mapping) : mapping_(std::move(mapping)) {
  KVT_CHECK(mapping_.writable() && mapping_.size() >= kRingMappingBytes);
}

RingControl& PushRingReader::control() const { return ControlOf(mapping_); }

absl::StatusOr<std::optional<PushRingReader::Message>> PushRingReader::Peek() {
  // Two rounds: a pad and what follows it.
  for (int round = 0; round < 2; ++round) {
    const uint64_t used = control().head.load(std::memory_order_acquire) - tail_;
    if (used == 0) return std::optional<Message>();
    const uint64_t at = tail_ % kPushRingBytes;
    Message message;
    std::memcpy(&message.header, DataOf(mapping_) + at, sizeof(RingMessage));
    const RingMessage& header = message.header;
    if (used > kPushRingBytes || header.magic != kRingMagic || header.total % 64 != 0 ||
        header.total < sizeof(RingMessage) || header.total > used ||
        at + header.total > kPushRingBytes) {
      return absl::InvalidArgumentError("push ring: broken message");
    }
    if (header.kind == RingKind::kPush) {
      message.body = absl::MakeConstSpan(DataOf(mapping_) + at + sizeof(RingMessage),
                                         header.total - sizeof(RingMessage));
      return std::optional<Message>(message);
    }
    if (header.kind != RingKind::kPad || at + header.total != kPushRingBytes) {
      return absl::InvalidArgumentError("push ring: message of an unknown kind");
    }
    tail_ += header.total;
    control().tail.store(tail_, std::memory_order_release);
  }
  return absl::InvalidArgumentError("push ring: two pads in a row");
}

absl::Status PushRingReader::Answer(const Message& message, const MessageStatuses& statuses,
                                    bool* wake) {
  if (answers_ - control().answers_tail.load(std::memory_order_acquire) >= kRingAnswers) {
    return absl::InvalidArgumentError("push ring: the client takes no answers");
  }
  RingAnswer answer;
  answer.id = message.header.id;
  answer.count = message.header.count;
  answer.statuses = statuses;
  AnswersOf(mapping_)[answers_ % kRingAnswers] = answer;
  tail_ += message.header.total;
  control().tail.store(tail_, std::memory_order_release);
  control().answers_head.store(++answers_, std::memory_order_seq_cst);
  *wake = control().client_sleeps.load(std::memory_order_seq_cst) != 0;
  return absl::OkStatus();
}

bool PushRingReader::PrepareSleep() {
  control().store_sleeps.store(1, std::memory_order_seq_cst);
  return control().head.load(std::memory_order_seq_cst) == tail_;
}

void PushRingReader::EndSleep() { control().store_sleeps.store(0, std::memory_order_relaxed); }

}  // namespace kvt
