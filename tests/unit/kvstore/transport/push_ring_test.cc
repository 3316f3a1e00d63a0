#include "kvstore/transport/push_ring.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <deque>
#include <vector>

#include "kernels/base/random.h"

namespace kvt {
namespace {

class PushRingTest : public testing::Test {
 protected:
  void SetUp() override {
    SharedMappingOptions options;
    options.receiver_writes = true;
    options.populate = false;
    auto store = SharedMapping::Create("ring", kRingMappingBytes, options);
    ASSERT_TRUE(store.ok()) << store.status();
    auto client = SharedMapping::MapWritable(UniqueFd(dup(store->fd())), options);
    ASSERT_TRUE(client.ok()) << client.status();
    reader_ = std::make_unique<PushRingReader>(std::move(*store));
    writer_ = std::make_unique<PushRingWriter>(std::move(*client));
  }
  bool Write(uint64_t id, size_t meta, uint32_t data) {
    const auto place = writer_->Reserve(meta, data);
    if (!place.has_value()) return false;
    std::memset(place->meta, static_cast<int>(id), meta);
    std::memset(place->data, static_cast<int>(id), data);
    (void)writer_->Commit(id, 1, false);
    return true;
  }
  std::unique_ptr<PushRingReader> reader_;
  std::unique_ptr<PushRingWriter> writer_;
};

TEST_F(PushRingTest, ManyLaps_MessagesArriveWholeInOrderAndAnswersComeBack) {
  constexpr uint64_t kSeed = 5;
  SCOPED_TRACE(kSeed);
  Random random(kSeed);
  std::deque<uint32_t> sizes;
  uint64_t written = 0;
  uint64_t read = 0;
  uint64_t answered = 0;
  while (read < 3000) {
    const auto size = static_cast<uint32_t>(1 + random.Below(kMessageBytesMax / 64)) * 64;
    if (written - answered < kRingMessagesMax && random.Below(2) == 0 &&
        Write(written, 8 * random.Below(900), size)) {
      sizes.push_back(size);
      ++written;
      continue;
    }
    auto message = reader_->Peek();
    ASSERT_TRUE(message.ok()) << message.status();
    if (!message->has_value()) continue;
    ASSERT_EQ((*message)->header.id, read);
    ASSERT_EQ((*message)->header.data_bytes, sizes.front());
    const auto data = (*message)->body.last(sizes.front());
    ASSERT_EQ(data.front(), static_cast<std::byte>(read));
    ASSERT_EQ(data.back(), static_cast<std::byte>(read));
    sizes.pop_front();
    bool wake = false;
    MessageStatuses statuses{};
    statuses[0] = PieceStatus::kLost;
    ASSERT_TRUE(reader_->Answer(**message, statuses, &wake).ok());
    EXPECT_FALSE(wake);
    ++read;
    while (const auto answer = writer_->TakeAnswer()) {
      ASSERT_EQ(answer->id, answered++);
      ASSERT_EQ(answer->statuses[0], PieceStatus::kLost);
    }
  }
}

TEST_F(PushRingTest, FullRing_RefusesUntilTheStoreReads) {
  uint64_t written = 0;
  while (Write(written, 64, kMessageBytesMax)) ++written;
  EXPECT_EQ(written, kPushRingBytes / (kMessageBytesMax + 128));
  auto message = reader_->Peek();
  ASSERT_TRUE(message.ok() && message->has_value());
  bool wake = false;
  ASSERT_TRUE(reader_->Answer(**message, MessageStatuses{}, &wake).ok());
  message = reader_->Peek();
  ASSERT_TRUE(message.ok() && message->has_value());
  ASSERT_TRUE(reader_->Answer(**message, MessageStatuses{}, &wake).ok());
  EXPECT_TRUE(Write(written, 64, kMessageBytesMax));
}

TEST_F(PushRingTest, Sleepers_AreToldToBeWoken) {
  EXPECT_TRUE(reader_->PrepareSleep());
  const auto place = writer_->Reserve(64, 64);
  ASSERT_TRUE(place.has_value());
  EXPECT_TRUE(writer_->Commit(0, 1, false));
  EXPECT_FALSE(reader_->PrepareSleep());  // a message came: do not sleep
  reader_->EndSleep();
  EXPECT_TRUE(writer_->PrepareSleep());
  auto message = reader_->Peek();
  ASSERT_TRUE(message.ok() && message->has_value());
  bool wake = false;
  ASSERT_TRUE(reader_->Answer(**message, MessageStatuses{}, &wake).ok());
  EXPECT_TRUE(wake);
  EXPECT_FALSE(writer_->PrepareSleep());
}

}  // namespace
}  // namespace kvt
