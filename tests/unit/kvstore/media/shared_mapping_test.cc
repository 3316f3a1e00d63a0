#include "kvstore/media/shared_mapping.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "kernels/base/units.h"
#include "kvstore/media/record_table.h"

namespace kvt {
namespace {

UniqueFd Duplicate(int fd) { return UniqueFd(dup(fd)); }

TEST(SharedMapping, Created_IsSharedReadOnly) {
  auto owner = SharedMapping::Create("test", 3 * kMiB + 1, SharedMappingOptions{});
  ASSERT_TRUE(owner.ok()) << owner.status();
  EXPECT_GE(owner->size(), 3 * kMiB + 1);
  auto reader = SharedMapping::MapReadOnly(Duplicate(owner->fd()), SharedMappingOptions{});
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ(reader->mutable_data(), nullptr);
  std::memset(owner->mutable_data(), 0x5a, owner->size());
  EXPECT_EQ(reader->data()[3 * kMiB], std::byte{0x5a});
}

TEST(SharedMapping, Receiver_CannotWriteShrinkOrGrow) {
  auto owner = SharedMapping::Create("test", kMiB, SharedMappingOptions{});
  ASSERT_TRUE(owner.ok()) << owner.status();
  EXPECT_FALSE(SharedMapping::MapWritable(Duplicate(owner->fd()), SharedMappingOptions{}).ok());
  EXPECT_EQ(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, owner->fd(), 0), MAP_FAILED);
  EXPECT_NE(ftruncate(owner->fd(), 0), 0);
  EXPECT_NE(ftruncate(owner->fd(), 1 << 30), 0);
  EXPECT_LT(pwrite(owner->fd(), "x", 1, 0), 0);
}

TEST(SharedMapping, Ring_IsWritableByBothAndOfFixedSize) {
  SharedMappingOptions options;
  options.receiver_writes = true;
  auto owner = SharedMapping::Create("ring", kMiB, options);
  ASSERT_TRUE(owner.ok()) << owner.status();
  auto other = SharedMapping::MapWritable(Duplicate(owner->fd()), SharedMappingOptions{});
  ASSERT_TRUE(other.ok()) << other.status();
  other->mutable_data()[5] = std::byte{9};
  EXPECT_EQ(owner->data()[5], std::byte{9});
  EXPECT_NE(ftruncate(owner->fd(), 0), 0);
}

TEST(SharedMapping, UnsealedOrForeignDescriptor_IsRefused) {
  UniqueFd unsealed(memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(unsealed.get(), 4096), 0);
  EXPECT_TRUE(absl::IsPermissionDenied(
      SharedMapping::MapReadOnly(std::move(unsealed), SharedMappingOptions{}).status()));
  UniqueFd file(open("/dev/zero", O_RDONLY | O_CLOEXEC));
  EXPECT_TRUE(absl::IsPermissionDenied(
      SharedMapping::MapReadOnly(std::move(file), SharedMappingOptions{}).status()));
}

TEST(SharedMapping, MoreThanThereIs_FailsAtOnceWithFiguresAndRemedy) {
  const absl::Status status =
      SharedMapping::Create("arena", uint64_t{1} << 46, SharedMappingOptions{}).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_NE(status.message().find("available"), absl::string_view::npos);
  EXPECT_NE(status.message().find("smaller"), absl::string_view::npos);
  EXPECT_TRUE(
      absl::IsInvalidArgument(SharedMapping::Create("arena", 0, SharedMappingOptions{}).status()));
  EXPECT_TRUE(absl::IsResourceExhausted(
      PrivateMapping::Create(uint64_t{1} << 46, SharedMappingOptions{}).status()));
}

TEST(PrivateMapping, Created_IsAlignedToHugePagesAndMoves) {
  auto mapping = PrivateMapping::Create(5 * kMiB, SharedMappingOptions{});
  ASSERT_TRUE(mapping.ok()) << mapping.status();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(mapping->data()) % (2 * kMiB), 0u);
  EXPECT_EQ(mapping->size(), 6 * kMiB);
  PrivateMapping moved = std::move(*mapping);
  std::memset(moved.data(), 1, moved.size());
  EXPECT_EQ(mapping->data(), nullptr);
}

TEST(RecordTable, Published_IsFoundByItsHandleAlone) {
  auto table = RecordTable::Create(100);
  ASSERT_TRUE(table.ok()) << table.status();
  auto reader = RecordTable::MapReadOnly(Duplicate(table->mapping().fd()));
  ASSERT_TRUE(reader.ok()) << reader.status();
  const uint64_t handle = (uint64_t{7} << 32) | 42;
  EXPECT_FALSE(reader->Find(handle).has_value());
  table->Publish(handle, 4096);
  EXPECT_EQ(reader->Find(handle), std::optional<uint64_t>(4096));
  const std::optional<RecordTable::Spot> spot = reader->Look(handle);
  ASSERT_TRUE(spot.has_value());
  EXPECT_TRUE(reader->IsCurrent(handle, *spot));
  EXPECT_FALSE(reader->Find((uint64_t{6} << 32) | 42).has_value());
  EXPECT_FALSE(reader->Find((uint64_t{7} << 32) | 41).has_value());
  table->Withdraw(42);
  EXPECT_FALSE(reader->Find(handle).has_value());
  EXPECT_FALSE(reader->IsCurrent(handle, *spot));
}

TEST(RecordTable, TripToDisk_IsSeenAlsoByAReaderThatSleptOverIt) {
  auto table = RecordTable::Create(100);
  ASSERT_TRUE(table.ok()) << table.status();
  const uint64_t handle = (uint64_t{7} << 32) | 42;
  table->Publish(handle, 4096);
  const std::optional<RecordTable::Spot> before = table->Look(handle);
  ASSERT_TRUE(before.has_value());
  table->MoveToDisk(handle);
  EXPECT_FALSE(table->IsCurrent(handle, *before));
  EXPECT_FALSE(table->Find(handle).has_value());
  ASSERT_TRUE(table->Look(handle).has_value());
  EXPECT_TRUE(table->Look(handle)->on_disk);
  table->Publish(handle, 4096);  // the same place, which was another's meanwhile
  EXPECT_FALSE(table->IsCurrent(handle, *before));
  const std::optional<RecordTable::Spot> after = table->Look(handle);
  EXPECT_EQ(after->offset, 4096u);
  EXPECT_TRUE(table->IsCurrent(handle, *after));
  table->Withdraw(42);
  EXPECT_FALSE(table->Look(handle).has_value());
}

TEST(RecordTable, IndexOutsideAndZeroHandle_AreNotThere) {
  auto table = RecordTable::Create(100);
  ASSERT_TRUE(table.ok()) << table.status();
  EXPECT_FALSE(table->Find(0).has_value());
  EXPECT_FALSE(table->Find((uint64_t{1} << 32) | 0xffffffffu).has_value());
  EXPECT_FALSE(table->IsCurrent((uint64_t{1} << 32) | 0xffffffffu, RecordTable::Spot()));
}

}  // namespace
}  // namespace kvt
