#include "kvstore/node/store_options.h"

#include <gtest/gtest.h>

#include "kvstore/node/store_metrics.h"

namespace kvt {
namespace {

absl::Status Problems(const std::string& text) {
  auto file = OptionsFile::Parse(text, "store.toml");
  if (!file.ok()) return file.status();
  ReadStoreOptions(file->Table("store"));
  return file->Finish();
}

TEST(StoreOptions, BadValues_AreNamedWithFileAndLine) {
  for (const char* text :
       {"[store]\narena_bytes = \"1MiB\"", "[store]\nlease = \"10ms\"", "[store]\nnonsense = 1",
        "[store]\npopulate_threads = 0", "[store]\narena_bytes = true"}) {
    const absl::Status status = Problems(text);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_NE(status.message().find("store.toml:2"), absl::string_view::npos) << status;
  }
  EXPECT_EQ(Problems("[store]\nucx = false\nshm = false").code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(StoreOptions, Values_AreRead) {
  auto file =
      OptionsFile::Parse("[store]\narena_bytes = \"512MiB\"\nshm = false\nlease = \"3s\"", "f");
  const StoreOptions options = ReadStoreOptions(file->Table("store"));
  ASSERT_TRUE(file->Finish().ok());
  EXPECT_EQ(options.arena_bytes, 512 * kMiB);
  EXPECT_FALSE(options.shm);
  EXPECT_TRUE(options.ucx);
  EXPECT_EQ(options.lease, absl::Seconds(3));
}

TEST(StoreMetrics, Bytes_SumToTheCapacityAndLookupsToTheRequests) {  // F17
  MetricsRegistry registry;
  StoreMetrics metrics(registry);
  StoreStats stats;
  stats.capacity_bytes = 100;
  stats.resident_bytes = {10, 9};
  stats.reserved_bytes = 8;
  stats.writing_bytes = 7;
  stats.evicting_bytes = 6;
  stats.used_bytes = 40;
  stats.lookup_blocks = 9;
  stats.hit_blocks = 4;
  stats.base_only_blocks = 2;
  metrics.Observe(stats);
  stats.lookup_blocks = 12;
  metrics.Observe(stats);
  const std::string text = registry.Render();
  for (const char* line :
       {"kvtide_store_bytes{state=\"free\"} 60", "kvtide_store_bytes{state=\"base\"} 10",
        "kvtide_store_lookup_blocks_total{outcome=\"hit\"} 4",
        "kvtide_store_lookup_blocks_total{outcome=\"miss\"} 6"}) {
    EXPECT_NE(text.find(line), std::string::npos) << line << " in\n" << text;
  }
}

}  // namespace
}  // namespace kvt
