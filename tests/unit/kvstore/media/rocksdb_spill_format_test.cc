#include "kvstore/media/rocksdb_spill_format.h"

#include <gtest/gtest.h>

#include <cstring>

#include "kvstore/media/rocksdb_spill_segments.h"

namespace kvt {
namespace {

SpillKey KeyOf(uint8_t first, SpillPart part = SpillPart::kBase) {
  SpillKey key;
  for (size_t i = 0; i < key.block.size(); ++i) key.block[i] = static_cast<uint8_t>(first + i);
  key.part = part;
  return key;
}

SpillEntry EntryOf(absl::string_view meta) {
  SpillEntry entry;
  entry.sequence = 0x0102030405060708;
  entry.bytes = 184'320;
  entry.checksum = 0x1122334455667788;
  entry.meta = meta;
  return entry;
}

TEST(SpillFormatTest, Entry_RoundTrip_AndItsBytesAreAsDocumented) {
  const std::string bytes = EncodeSpillEntry(KeyOf(1), EntryOf("what the node says"));
  ASSERT_EQ(bytes.size(), 40u + 18);
  EXPECT_EQ(bytes.substr(0, 16),
            std::string("\x01\0\0\0\x12\0\0\0\x08\x07\x06\x05\x04\x03\x02\x01", 16));
  EXPECT_EQ(bytes.substr(40), "what the node says");
  const auto entry = DecodeSpillEntry(KeyOf(1), bytes);
  ASSERT_TRUE(entry.ok()) << entry.status();
  EXPECT_EQ(entry->sequence, 0x0102030405060708u);
  EXPECT_EQ(entry->bytes, 184'320u);
  EXPECT_EQ(entry->checksum, 0x1122334455667788u);
  EXPECT_EQ(entry->meta, "what the node says");
}

TEST(SpillFormatTest, Entry_AnyBitFlippedOrByteMissing_IsDataLoss) {
  const std::string bytes = EncodeSpillEntry(KeyOf(1), EntryOf("meta"));
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    std::string damaged = bytes;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << (bit % 8)));
    // Bytes 1 to 3 are summed too.
    EXPECT_TRUE(absl::IsDataLoss(DecodeSpillEntry(KeyOf(1), damaged).status())) << "bit " << bit;
  }
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_TRUE(absl::IsDataLoss(DecodeSpillEntry(KeyOf(1), bytes.substr(0, size)).status()))
        << size;
  }
}

TEST(SpillFormatTest, Entry_OfAnotherKeyOrPart_IsDataLoss) {
  const std::string bytes = EncodeSpillEntry(KeyOf(1), EntryOf(""));
  EXPECT_TRUE(DecodeSpillEntry(KeyOf(1), bytes).ok());
  EXPECT_FALSE(DecodeSpillEntry(KeyOf(2), bytes).ok());
  EXPECT_FALSE(DecodeSpillEntry(KeyOf(1, SpillPart::kResidual), bytes).ok());
}

TEST(SpillFormatTest, RecordChecksum_DependsOnKey_AndEqualsTheCopys) {
  for (const size_t size : {size_t{0}, size_t{5}, size_t{64}, size_t{4'096}, size_t{184'320}}) {
    std::string from(size, 'a');
    std::string to(size, 'b');
    const uint64_t sum = SpillRecordChecksum(KeyOf(1), from.data(), size);
    EXPECT_EQ(CopySpillRecord(KeyOf(1), to.data(), from.data(), size), sum) << size;
    EXPECT_EQ(to, from);
    EXPECT_NE(SpillRecordChecksum(KeyOf(2), from.data(), size), sum);
    EXPECT_NE(SpillRecordChecksum(KeyOf(1, SpillPart::kResidual), from.data(), size), sum);
  }
}

TEST(SpillFormatTest, SequencesAndKeys_SortAndRoundTrip) {
  EXPECT_LT(EncodeSpillSequence(255), EncodeSpillSequence(256));
  EXPECT_LT(EncodeSpillSequence(0xffffffff), EncodeSpillSequence(0x100000000));
  uint64_t sequence = 0;
  ASSERT_TRUE(DecodeSpillSequence(EncodeSpillSequence(77), &sequence));
  EXPECT_EQ(sequence, 77u);
  EXPECT_FALSE(DecodeSpillSequence("short", &sequence));
  SpillKey key;
  ASSERT_TRUE(DecodeSpillKey(EncodeSpillKey(KeyOf(9, SpillPart::kDigest)), &key));
  EXPECT_EQ(key, KeyOf(9, SpillPart::kDigest));
  std::string unknown = EncodeSpillKey(KeyOf(9));
  unknown[16] = 3;
  EXPECT_FALSE(DecodeSpillKey(unknown, &key));
  EXPECT_FALSE(DecodeSpillKey("", &key));
}

TEST(SpillFormatTest, Contents_RoundTripDamageAndOtherSegment) {
  const SpillKey keys[] = {KeyOf(1), KeyOf(2, SpillPart::kResidual)};
  const std::string bytes = EncodeSpillContents(100, keys);
  const auto decoded = DecodeSpillContents(100, bytes);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  ASSERT_EQ(decoded->size(), 2u);
  EXPECT_EQ((*decoded)[1], keys[1]);
  EXPECT_FALSE(DecodeSpillContents(101, bytes).ok());
  EXPECT_FALSE(DecodeSpillContents(100, bytes.substr(0, 30)).ok());
  std::string damaged = bytes;
  damaged[3] ^= 1;
  EXPECT_FALSE(DecodeSpillContents(100, damaged).ok());
}

TEST(SpillFormatTest, FolderFormat_OthersAreRefusedByName) {
  EXPECT_EQ(*CheckSpillFormat(EncodeSpillFormat(kSpillFormat)), kSpillFormat);
  EXPECT_EQ(*CheckSpillFormat(EncodeSpillFormat(kSpillFormatOldest)), kSpillFormatOldest);
  const auto newer = CheckSpillFormat(EncodeSpillFormat(kSpillFormat + 1));
  EXPECT_EQ(newer.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_FALSE(CheckSpillFormat(EncodeSpillFormat(kSpillFormatOldest - 1)).ok());
  for (const char* text : {"", "kvtide spill ", "kvtide spill x\n", "other 1\n"}) {
    EXPECT_FALSE(CheckSpillFormat(text).ok()) << text;
  }
}

TEST(SpillSegmentsTest, LiveAndGarbage_AddUp) {
  SpillSegments segments;
  segments.Add(10, 14, 4'400);  // four records of 1,000
  segments.Add(20, 22, 2'100);
  for (uint64_t s = 10; s < 14; ++s) segments.AddLive(s, 1'000);
  EXPECT_TRUE(segments.WithGarbage().empty()) << "it is being written";
  EXPECT_EQ(segments.BeingWritten().size(), 2u);
  segments.Commit(10);
  EXPECT_EQ(segments.garbage_bytes(), 0u) << "what is not records is no garbage";
  segments.SubLive(11, 1'000);
  EXPECT_EQ(segments.garbage_bytes(), 1'400u);
  EXPECT_EQ(segments.live_bytes(), 3'000u);
  EXPECT_EQ(segments.disk_bytes(), 6'500u);
  segments.Commit(20);
  ASSERT_EQ(segments.Dead().size(), 1u);
  EXPECT_EQ(segments.Dead()[0].first, 20u);
  EXPECT_EQ(segments.Worst(10'000)->first, 20u);
  segments.Remove(20);
  EXPECT_EQ(segments.Worst(10'000)->first, 10u);
  EXPECT_EQ(segments.Worst(2'999), nullptr) << "too much lives in it";
  EXPECT_TRUE(segments.Contains(13));
  EXPECT_FALSE(segments.Contains(14)) << "the contents are no record";
  EXPECT_FALSE(segments.Contains(9));
  EXPECT_FALSE(segments.Contains(21));
  segments.Remove(10);
  EXPECT_EQ(segments.disk_bytes() + segments.live_bytes() + segments.garbage_bytes(), 0u);
}

TEST(SpillSegmentsTest, Smallest_WithinCountAndBytes) {
  SpillSegments segments;
  for (uint64_t i = 0; i < 5; ++i) {
    segments.Add(i * 10, i * 10 + 2, 1'000 * (5 - i));
    segments.Commit(i * 10);
  }
  const auto two = segments.Smallest(2, 100'000);
  ASSERT_EQ(two.size(), 2u);
  EXPECT_EQ(two[0].first, 40u);
  EXPECT_EQ(two[1].first, 30u);
  EXPECT_EQ(segments.Smallest(5, 6'500).size(), 3u);
  EXPECT_TRUE(segments.Smallest(5, 500).empty());
}

}  // namespace
}  // namespace kvt
