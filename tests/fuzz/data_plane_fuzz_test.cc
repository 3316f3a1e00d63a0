// The data plane's decoders under malformed, truncated and oversized messages: hello, attach reply,
// push message, push ring. None crashes, none allocates by a number of the sender's, and what is
// refused has written nothing. Over real connections: tests/contract/transport_malformed_test.cc (to
// the store) and transport_fault_test.cc (to the worker).
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "kernels/base/check.h"
#include "kernels/base/random.h"
#include "kvstore/transport/attach_message.h"
#include "kvstore/transport/push_message.h"
#include "kvstore/transport/push_ring.h"
#include "tests/support/arena_resolver.h"

namespace {

// The largest request to the heap while it is watched.
std::atomic<bool> watched{false};
std::atomic<size_t> largest{0};

void Note(size_t size) {
  if (!watched.load(std::memory_order_relaxed)) return;
  size_t seen = largest.load(std::memory_order_relaxed);
  while (size > seen && !largest.compare_exchange_weak(seen, size)) {
  }
}

}  // namespace

// Not inlined: the compiler would see free() meet its own idea of new.
__attribute__((noinline)) void* operator new(size_t size) {
  Note(size);
  void* memory = std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) std::abort();
  return memory;
}
__attribute__((noinline)) void operator delete(void* memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace kvt {
namespace {

constexpr int kRounds = 20'000;
// What a refusal's text may take.
constexpr size_t kAllocationMax = 4096;

Geometry FuzzGeometry() {
  Geometry geometry;
  geometry.layers = 4;
  geometry.kv_heads = 2;
  geometry.head_dim = 64;
  return geometry;
}

SessionToken FuzzToken() {
  SessionToken token;
  token.session = SessionId(7);
  token.geometry = FuzzGeometry();
  return token;
}

template <typename T>
std::vector<std::byte> BytesOf(const T& value) {
  std::vector<std::byte> bytes(sizeof(value));
  std::memcpy(bytes.data(), &value, sizeof(value));
  return bytes;
}

class DataPlaneFuzz : public testing::Test {
 protected:
  void SetUp() override {
    seed_ = Random::FromEntropy().Next();
    RecordProperty("seed", std::to_string(seed_));
    random_ = Random(seed_);
    largest = 0;
    watched = true;
  }
  void TearDown() override {
    watched = false;
    EXPECT_LE(largest.load(), kAllocationMax) << "seed " << seed_;
  }
  // A few bytes become others, or the end is cut off, or more is behind it.
  void Mutate(std::vector<std::byte>& bytes) {
    const uint64_t edits = random_.Below(5);
    for (uint64_t i = 0; i < edits && !bytes.empty(); ++i) {
      bytes[random_.Below(bytes.size())] = static_cast<std::byte>(random_.Next());
    }
    if (random_.Below(6) == 0) bytes.resize(random_.Below(2 * bytes.size() + 1));
  }
  uint32_t Number() {
    switch (random_.Below(4)) {
      case 0:
        return static_cast<uint32_t>(random_.Below(20));
      case 1:
        return static_cast<uint32_t>(random_.Below(64)) * 2048;
      case 2:
        return 0xffffffffu - static_cast<uint32_t>(random_.Below(70));
      default:
        return static_cast<uint32_t>(random_.Next());
    }
  }
  uint64_t seed_ = 0;
  Random random_{1};
};

TEST_F(DataPlaneFuzz, Hello_AnyBytes_IsATokenOfAValidGeometryOrRefused) {
  const std::vector<std::byte> good =
      BytesOf(MakeAttachHello(FuzzToken(), TransportSettings{1, 2}, 3));
  int taken = 0;
  for (int i = 0; i < kRounds; ++i) {
    std::vector<std::byte> bytes = good;
    Mutate(bytes);
    const absl::StatusOr<CheckedHello> checked = CheckAttachHello(bytes, TransportSettings{1, 2});
    if (checked.ok()) {
      ++taken;
      ASSERT_TRUE(checked->token.geometry.Validate().ok());
      ASSERT_GE(checked->version, kTransportWireVersionMin);
      ASSERT_LE(checked->version, kTransportWireVersion);
    } else {
      ASSERT_TRUE(absl::IsInvalidArgument(checked.status()) ||
                  absl::IsFailedPrecondition(checked.status()))
          << checked.status();
    }
  }
  EXPECT_GT(taken, 0);
  EXPECT_LT(taken, kRounds);
}

TEST_F(DataPlaneFuzz, AttachReply_AnyBytes_IsAReplyOrTyped) {
  const std::vector<std::byte> good = BytesOf(MakeAttachReply(absl::OkStatus(), 2, 9, 1 << 20));
  const std::vector<std::byte> refusal =
      BytesOf(MakeAttachReply(absl::FailedPreconditionError(std::string(500, 'x')), 0, 0, 0));
  for (int i = 0; i < kRounds; ++i) {
    std::vector<std::byte> bytes = i % 2 == 0 ? good : refusal;
    Mutate(bytes);
    const absl::StatusOr<AttachReply> reply = CheckAttachReply(bytes);
    if (!reply.ok()) {
      ASSERT_LT(reply.status().message().size(), 300u);
    } else {
      ASSERT_EQ(reply->code, 0);
    }
  }
}

TEST_F(DataPlaneFuzz, Push_AnyMessage_WritesOnlyWhatItsPiecesNameOrNothing) {
  watched = false;
  ArenaResolverOptions options;
  options.geometry = FuzzGeometry();
  options.records = 4;
  options.huge_pages = false;
  options.token = FuzzToken();
  auto resolver = std::move(*ArenaResolver::Create(options));
  const uint32_t slice = FuzzGeometry().SliceBytes();
  std::vector<uint64_t> handles;
  for (uint32_t i = 0; i < 4; ++i) handles.push_back(resolver->Reserve(i));
  resolver->Evict(3);
  PushApplier applier(*resolver, SessionId(7), slice, kTransportWireVersion);
  std::vector<std::byte> payload(kMessageBytesMax + kPushMetaBytesMax + 4096);
  watched = true;
  int applied = 0;
  for (int round = 0; round < kRounds; ++round) {
    const auto count = static_cast<int>(random_.Below(5) == 0 ? Number() : 1 + random_.Below(3));
    const bool sums = random_.Below(2) == 0;
    uint32_t at = 0;
    for (int i = 0; i < 3; ++i) {
      Piece piece;
      piece.ticket = random_.Below(20) == 0 ? ArenaResolver::kForbiddenTicket : 1;
      piece.handle = random_.Below(8) == 0 ? random_.Next() : handles[random_.Below(4)];
      piece.offset = random_.Below(6) == 0 ? Number() : static_cast<uint32_t>(random_.Below(4)) * slice;
      piece.length = random_.Below(6) == 0 ? Number() : slice;
      piece.reserved = random_.Below(40) == 0 ? Number() : 0;
      std::memcpy(payload.data() + at, &piece, sizeof(piece));
      at += sizeof(piece);
    }
    const size_t data_bytes =
        random_.Below(4) == 0 ? Number() : static_cast<size_t>(std::max(count, 1) % 16) * slice;
    size_t bytes = random_.Below(4) == 0 ? random_.Below(payload.size()) : 0;
    if (bytes == 0 && count > 0 && count < 16 && data_bytes < kMessageBytesMax) {
      bytes = static_cast<size_t>(count) * sizeof(Piece) + data_bytes +
              (sums ? data_bytes / slice * sizeof(uint64_t) : 0);
    }
    const absl::StatusOr<size_t> meta = applier.MetaBytes(count, sums, data_bytes, bytes);
    if (!meta.ok()) continue;
    ASSERT_LE(*meta + data_bytes, payload.size());
    MessageStatuses statuses{};
    const absl::Status status = applier.Apply(
        count, sums, absl::MakeConstSpan(payload.data(), *meta),
        absl::MakeConstSpan(payload.data() + *meta, data_bytes), statuses);
    ASSERT_EQ(resolver->in_flight(), 0);
    if (!status.ok()) continue;
    ++applied;
    for (const PieceStatus s : statuses) {
      ASSERT_LT(static_cast<int>(s), PieceStatusesIn(kTransportWireVersion));
    }
  }
  EXPECT_GT(applied, 100);
  watched = false;
}

TEST_F(DataPlaneFuzz, Ring_AnyBytes_IsAMessageWithinTheRingOrRefused) {
  watched = false;
  SharedMappingOptions options;
  options.receiver_writes = true;
  options.populate = false;
  for (int round = 0; round < 300; ++round) {
    auto mapping = SharedMapping::Create("fuzz-ring", kRingMappingBytes, options);
    ASSERT_TRUE(mapping.ok()) << mapping.status();
    std::byte* const memory = mapping->mutable_data();
    auto& control = *reinterpret_cast<RingControl*>(memory);
    PushRingReader reader(*std::move(mapping));
    uint64_t head = 0;
    watched = true;
    for (int m = 0; m < 40; ++m) {
      RingMessage message;
      message.magic = random_.Below(10) == 0 ? Number() : kRingMagic;
      message.kind = static_cast<RingKind>(random_.Below(10) == 0 ? Number() : 1 + random_.Below(2));
      message.total = random_.Below(3) == 0 ? Number() : 64 * (1 + Number() % 2000);
      message.count = Number();
      message.data_bytes = Number();
      const uint64_t at = head % kPushRingBytes;
      std::memcpy(memory + kRingDataOffset + at, &message,
                  std::min<uint64_t>(sizeof(message), kPushRingBytes - at));
      const uint64_t step = random_.Below(8) == 0 ? random_.Next() : message.total;
      control.head.store(head + step);
      const auto peeked = reader.Peek();
      if (!peeked.ok()) {
        ASSERT_TRUE(absl::IsInvalidArgument(peeked.status())) << peeked.status();
        break;  // the connection is closed
      }
      if (!peeked->has_value()) break;
      const PushRingReader::Message& got = **peeked;
      ASSERT_GE(got.body.data(), memory + kRingDataOffset);
      ASSERT_LE(got.body.data() + got.body.size(), memory + kRingMappingBytes);
      bool wake = false;
      MessageStatuses statuses{};
      if (!reader.Answer(got, statuses, &wake).ok()) break;
      head = control.tail.load();
    }
    watched = false;
  }
}

}  // namespace
}  // namespace kvt
