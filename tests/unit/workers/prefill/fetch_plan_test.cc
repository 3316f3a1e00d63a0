#include "prefill_worker/fetch_plan.h"

#include "gtest/gtest.h"
#include "kernels/base/random.h"

namespace kvt {
namespace {

constexpr uint64_t kTokenBytes = 1000;

FetchSource Source(FetchMedium medium, uint64_t tokens, double bytes_per_s,
                   const std::string& store = "store-0") {
  return {medium, store, tokens, tokens * kTokenBytes, bytes_per_s};
}

// What the first token waits for.
double Seconds(const std::vector<FetchSource>& sources, const std::vector<bool>& fetch,
               double tokens_per_s) {
  double slowest = 0;
  double compute = 0;
  for (size_t i = 0; i < sources.size(); ++i) {
    if (!fetch[i]) {
      compute += static_cast<double>(sources[i].tokens) / tokens_per_s;
    } else if (sources[i].bytes_per_s > 0) {
      slowest = std::max(slowest, static_cast<double>(sources[i].bytes) / sources[i].bytes_per_s);
    }
  }
  return slowest + compute;
}

TEST(FetchPlan, F21_SlowDisk_IsComputedAndMemoryFetched) {
  // 1,000 tokens/s; memory brings 100,000 tokens/s, disk 500.
  const std::vector<FetchSource> sources = {Source(FetchMedium::kMemory, 640, 1e8),
                                            Source(FetchMedium::kDisk, 320, 5e5)};
  const FetchDecision decision = DecideFetch(sources, 1000);
  EXPECT_TRUE(decision.fetch[0]);
  EXPECT_FALSE(decision.fetch[1]);
  EXPECT_EQ(decision.declined_tokens, 320u);
  EXPECT_EQ(decision.declined, "disk of store-0: 640.0 ms to fetch, 320.0 ms to compute");
}

TEST(FetchPlan, FastDisk_IsFetched) {
  const std::vector<FetchSource> sources = {Source(FetchMedium::kDisk, 320, 5e6)};
  const FetchDecision decision = DecideFetch(sources, 1000);
  EXPECT_TRUE(decision.fetch[0]);
  EXPECT_EQ(decision.declined_tokens, 0u);
  EXPECT_TRUE(decision.declined.empty());
}

TEST(FetchPlan, F21_SlowLink_IsNamed) {
  const std::vector<FetchSource> sources = {Source(FetchMedium::kMemory, 640, 1e8, "near"),
                                            Source(FetchMedium::kMemory, 256, 1e4, "far")};
  const FetchDecision decision = DecideFetch(sources, 1000);
  EXPECT_EQ(decision.fetch, (std::vector<bool>{true, false}));
  EXPECT_EQ(decision.declined.find("memory of far"), 0u) << decision.declined;
}

TEST(FetchPlan, UnknownRates_AreFetched) {
  const std::vector<FetchSource> sources = {Source(FetchMedium::kDisk, 320, 0),
                                            Source(FetchMedium::kMemory, 320, 1)};
  EXPECT_EQ(DecideFetch(sources, 0).fetch, (std::vector<bool>{true, true}));
  EXPECT_EQ(DecideFetch(sources, 1000).fetch, (std::vector<bool>{true, false}));
  EXPECT_TRUE(DecideFetch({}, 1000).fetch.empty());
}

TEST(FetchPlan, SlowSourceBehindASlowerOneThatPays_CostsNothing) {
  // The large source takes 0.5 s and saves 5 s. The small one takes 0.4 s beside it; computing it
  // takes 0.3 s more.
  const std::vector<FetchSource> sources = {Source(FetchMedium::kMemory, 5000, 1e7),
                                            Source(FetchMedium::kDisk, 300, 7.5e5)};
  EXPECT_EQ(DecideFetch(sources, 1000).fetch, (std::vector<bool>{true, true}));
}

TEST(FetchPlan, AnySources_NoOtherSetIsClearlyBetter) {
  const uint64_t seed = Random::FromEntropy().Next();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  Random random(seed);
  for (int round = 0; round < 500; ++round) {
    std::vector<FetchSource> sources;
    const auto count = static_cast<size_t>(1 + random.Below(6));
    for (size_t i = 0; i < count; ++i) {
      sources.push_back(Source(random.Below(2) == 0 ? FetchMedium::kMemory : FetchMedium::kDisk,
                               16 * (1 + random.Below(100)),
                               1e4 * static_cast<double>(1 + random.Below(1000))));
    }
    const double taken = Seconds(sources, DecideFetch(sources, 1000).fetch, 1000);
    for (uint32_t set = 0; set < 1u << count; ++set) {
      std::vector<bool> fetch(count);
      for (size_t i = 0; i < count; ++i) fetch[i] = (set >> i & 1) != 0;
      EXPECT_LE(taken, Seconds(sources, fetch, 1000) * 1.1 + 1e-9) << round;
    }
  }
}

}  // namespace
}  // namespace kvt
