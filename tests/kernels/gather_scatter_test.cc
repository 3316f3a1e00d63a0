#include "kernels/cpu/gather_scatter.h"

#include <cstring>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/attention_fixture.h"

namespace kvt {
namespace {

constexpr Geometry kGeometry = {.layers = 2, .kv_heads = 3, .head_dim = 64};

TEST(GatherScatter, ScatterThenGather_RestoresTheBurstAndFillsTheTable) {
  for (const int count : {0, 1, 7, 64}) {
    for (const int threads : {1, 2, 3}) {
      SlotPool pool(kGeometry, 100, 11);
      const uint32_t slot_bytes = kGeometry.SlotBytes();
      const size_t bytes = size_t{slot_bytes} * static_cast<size_t>(count);
      const AlignedBytes burst = AllocateAligned(bytes + 64);
      const AlignedBytes back = AllocateAligned(bytes + 64);
      for (size_t i = 0; i < bytes; ++i) burst[i] = static_cast<uint8_t>(i * 31 + i / 251);
      std::vector<SlotPair> table(static_cast<size_t>(count) + 1);
      std::vector<ScatterEntry> entries;
      std::vector<uint32_t> ids;
      for (int i = 0; i < count; ++i) {
        const Plane plane = i % 2 == 0 ? Plane::kBase : Plane::kResidual;
        ids.push_back(pool.Take());
        entries.push_back({.slot = ids.back(), .plane = plane,
                           .table_entry = i % 5 == 4 ? nullptr : &table[static_cast<size_t>(i / 2)]});
      }
      const ScatterSlotsArgs scatter = {.slots = pool.data(), .slot_bytes = slot_bytes,
                                        .slot_count = 100, .entries = entries.data(),
                                        .burst = burst.get(), .count = count};
      const GatherSlotsArgs gather = {.slots = pool.data(), .slot_bytes = slot_bytes,
                                      .slot_count = 100, .slot_ids = ids.data(),
                                      .burst = back.get(), .count = count};
      ASSERT_TRUE(ValidateScatterSlots(scatter).ok());
      ASSERT_TRUE(ValidateGatherSlots(gather).ok());
      for (int t = 0; t < threads; ++t) CpuScatterSlots(scatter, t, threads);
      for (int t = 0; t < threads; ++t) CpuGatherSlots(gather, t, threads);
      EXPECT_EQ(std::memcmp(burst.get(), back.get(), bytes), 0);
      for (int i = 0; i < count; ++i) {
        const SlotPair& pair = table[static_cast<size_t>(i / 2)];
        EXPECT_EQ(i % 2 == 0 ? pair.base : pair.residual,
                  i % 5 == 4 ? kSlotNone : ids[static_cast<size_t>(i)]);
      }
      EXPECT_EQ(table.back(), SlotPair{});
      // A slot that was not named keeps its bytes.
      EXPECT_EQ(pool.Slice(pool.Take(), 0)[0], 0xff);
    }
  }
}

TEST(GatherScatter, BadArguments_AreRefusedNamingTheField) {
  const AlignedBytes memory = AllocateAligned(4096);
  const uint32_t id = 0;
  const GatherSlotsArgs good = {.slots = memory.get(), .slot_bytes = 64, .slot_count = 1,
                                .slot_ids = &id, .burst = memory.get() + 2048, .count = 1};
  ASSERT_TRUE(ValidateGatherSlots(good).ok());
  const auto refused = [](const GatherSlotsArgs& args, const char* field) {
    const absl::Status status = ValidateGatherSlots(args);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(field), absl::string_view::npos) << status;
  };
  GatherSlotsArgs args = good;
  args.slots += 16;
  refused(args, "slots");
  args = good;
  args.slot_bytes = 96;
  refused(args, "slot_bytes");
  args = good;
  args.burst += 8;
  refused(args, "burst");
  args = good;
  args.count = -1;
  refused(args, "count");
  args = good;
  args.slot_ids = nullptr;
  refused(args, "list");
}

TEST(GatherScatterDeathTest, SlotBeyondTheAllocation_IsABug) {
  const AlignedBytes memory = AllocateAligned(4096);
  const uint32_t id = 5;
  const GatherSlotsArgs args = {.slots = memory.get(), .slot_bytes = 64, .slot_count = 5,
                                .slot_ids = &id, .burst = memory.get() + 2048, .count = 1};
  EXPECT_DEATH(CpuGatherSlots(args, 0, 1), "slot 5 of 5");
}

}  // namespace
}  // namespace kvt
