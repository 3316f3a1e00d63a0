// Gather and scatter of slots on the CUDA device equal the CPU's. The argument checks run
// everywhere.
#include <cstring>
#include <random>
#include <vector>

#include "kernels/cpu/gather_scatter.h"
#include "kernels/cuda/gather_scatter.h"
#include "tests/kernels/attention_fixture.h"
#include "tests/kernels/cuda_fixture.h"

namespace kvt {
namespace {

constexpr uint64_t kSeed = 42;

TEST(CudaLaunchers, BadArguments_AreRefusedBeforeAnyLaunch) {
  GatherSlotsArgs gather;
  gather.count = 1;
  gather.slot_bytes = 64;
  EXPECT_EQ(CudaGatherSlots(gather, nullptr).code(), absl::StatusCode::kInvalidArgument);
  ScatterSlotsArgs scatter;
  scatter.count = -1;
  EXPECT_EQ(CudaScatterSlots(scatter, nullptr).code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(CudaTest, GatherAndScatter_OddCounts_EqualTheCpu) {
  std::printf("seed %llu\n", static_cast<unsigned long long>(kSeed));
  std::mt19937_64 random(kSeed);
  for (const Geometry& geometry : {Geometry{.layers = 1, .kv_heads = 3, .head_dim = 64},
                                   Geometry{.layers = 1, .kv_heads = 8, .head_dim = 128},
                                   Geometry{.layers = 1, .kv_heads = 1, .head_dim = 32}}) {
    for (const int count : {1, 7, 512}) {
      const auto slot_count = static_cast<uint32_t>(2 * count);
      const uint32_t slot_bytes = geometry.SlotBytes();
      const size_t pool_bytes = size_t{slot_count} * slot_bytes;
      const size_t burst_bytes = static_cast<size_t>(count) * slot_bytes;
      std::vector<uint8_t> burst(burst_bytes);
      for (uint8_t& byte : burst) byte = static_cast<uint8_t>(random());
      std::vector<uint32_t> ids(slot_count);
      std::iota(ids.begin(), ids.end(), 0u);
      std::shuffle(ids.begin(), ids.end(), random);
      ids.resize(static_cast<size_t>(count));

      const AlignedBytes host_slots = AllocateAligned(pool_bytes);
      std::memset(host_slots.get(), 0, pool_bytes);
      const AlignedBytes host_burst = AllocateAligned(burst_bytes);
      std::memcpy(host_burst.get(), burst.data(), burst_bytes);
      std::vector<SlotPair> host_table(static_cast<size_t>(count));
      auto slots = device_->Allocate(pool_bytes);
      ASSERT_TRUE(slots.ok());
      const DeviceBuffer device_burst = Upload(burst.data(), burst_bytes);
      const DeviceBuffer table = Upload(host_table.data(), host_table.size() * sizeof(SlotPair));

      std::vector<ScatterEntry> entries;
      for (int i = 0; i < count; ++i) {
        entries.push_back(
            {.slot = ids[static_cast<size_t>(i)],
             .plane = i % 2 == 0 ? Plane::kBase : Plane::kResidual,
             .table_entry = i % 3 == 2 ? nullptr : &host_table[static_cast<size_t>(i / 2)]});
      }
      CpuScatterSlots({.slots = host_slots.get(),
                       .slot_bytes = slot_bytes,
                       .slot_count = slot_count,
                       .entries = entries.data(),
                       .burst = host_burst.get(),
                       .count = count},
                      0, 1);
      for (ScatterEntry& entry : entries) {
        if (entry.table_entry == nullptr) continue;
        entry.table_entry = table.as<SlotPair>() + (entry.table_entry - host_table.data());
      }
      const DeviceBuffer device_entries =
          Upload(entries.data(), entries.size() * sizeof(ScatterEntry));
      ASSERT_TRUE(CudaScatterSlots({.slots = slots->as<uint8_t>(),
                                    .slot_bytes = slot_bytes,
                                    .slot_count = slot_count,
                                    .entries = device_entries.as<ScatterEntry>(),
                                    .burst = device_burst.as<uint8_t>(),
                                    .count = count},
                                   Handle())
                      .ok());
      std::vector<uint8_t> back(pool_bytes);
      std::vector<SlotPair> table_back(host_table.size());
      stream_->CopyToHost(back.data(), slots->data(), pool_bytes);
      stream_->CopyToHost(table_back.data(), table.data(), table_back.size() * sizeof(SlotPair));
      Drain();
      EXPECT_EQ(std::memcmp(back.data(), host_slots.get(), pool_bytes), 0);
      EXPECT_EQ(table_back, host_table);

      const DeviceBuffer device_ids = Upload(ids.data(), ids.size() * sizeof(uint32_t));
      auto gathered = device_->Allocate(burst_bytes);
      ASSERT_TRUE(gathered.ok());
      ASSERT_TRUE(CudaGatherSlots({.slots = slots->as<uint8_t>(),
                                   .slot_bytes = slot_bytes,
                                   .slot_count = slot_count,
                                   .slot_ids = device_ids.as<uint32_t>(),
                                   .burst = gathered->as<uint8_t>(),
                                   .count = count},
                                  Handle())
                      .ok());
      std::vector<uint8_t> burst_back(burst_bytes);
      stream_->CopyToHost(burst_back.data(), gathered->data(), burst_bytes);
      Drain();
      EXPECT_EQ(burst_back, burst);
    }
  }
}

}  // namespace
}  // namespace kvt
