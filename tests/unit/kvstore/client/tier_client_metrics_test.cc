#include "kvstore/client/tier_client_metrics.h"

#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "gtest/gtest.h"

namespace kvt {
namespace {

TEST(TierClientMetrics, Update_WithGrownFigures_AddsTheDifferenceByStore) {
  MetricsRegistry registry;
  TierClientMetrics metrics(registry);
  std::vector<StoreLinkFigures> figures(2);
  figures[0].name = "store-0";
  figures[0].state = "up";
  figures[0].pulled_bytes = 100;
  figures[1].name = "store-1";
  figures[1].state = "down";
  figures[1].failures = 3;
  metrics.Update(figures);
  figures[0].pulled_bytes = 250;
  figures[0].state = "connecting";
  figures[1].state = "up";
  metrics.Update(figures);
  const std::string text = registry.Render();
  for (const char* line :
       {"kvtide_client_pulled_bytes_total{store=\"store-0\"} 250",
        "kvtide_client_pulled_bytes_total{store=\"store-1\"} 0",
        "kvtide_client_failures_total{store=\"store-1\"} 3",
        "kvtide_client_store_up{store=\"store-0\"} 0", "kvtide_client_store_up{store=\"store-1\"} 1"}) {
    EXPECT_TRUE(absl::StrContains(text, line)) << line << " in\n" << text;
  }
}

}  // namespace
}  // namespace kvt
