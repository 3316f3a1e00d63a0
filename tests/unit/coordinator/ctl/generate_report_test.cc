#include "coordinator/ctl/generate_report.h"

#include <gtest/gtest.h>

#include <string>

#include <nlohmann/json.hpp>

namespace kvt::ctl {
namespace {

GenerateResult Offloaded() {
  GenerateResult result;
  result.id = TicketId(7);
  result.tokens = {1, 2, 3};
  result.finish = FinishReason::kLength;
  result.decode.output_tokens = 3;
  result.decode.computed = {.exact = 0, .base = 0, .sparse = 2};
  result.decode.offloaded = true;
  result.decode.sequence_bytes = 1000;
  result.decode.admission_bytes = 150;
  result.decode.digest_bytes = 40;
  result.decode.selected_blocks = 200;
  result.decode.hot_misses = 30;
  result.decode.sparse_steps = 2;
  return result;
}

TEST(GenerateReport, OffloadedRequest_ShowsWhatItWasAdmittedWithAndItsMisses) {
  const GenerateResult result = Offloaded();
  const std::string text = FiguresForPeople(result);
  EXPECT_NE(text.find("sparse 2"), std::string::npos) << text;
  EXPECT_NE(text.find("(15.0 %)"), std::string::npos) << text;
  EXPECT_NE(text.find("2 sparse steps chose 200 blocks, 30 of them (15.0 %) fetched"),
            std::string::npos) << text;
  const auto all = nlohmann::json::parse(GenerateJson({.result = &result, .model = "m", .text = "t",
                                                       .prompt_tokens = 9, .status = {},
                                                       .cancelled_at = ""}));
  const auto& decode = all.at("decode");
  EXPECT_EQ(decode.at("offloaded"), true);
  EXPECT_EQ(decode.at("sequence_bytes"), 1000);
  EXPECT_EQ(decode.at("admission_bytes"), 150);
  EXPECT_DOUBLE_EQ(decode.at("admission_bytes_pct").get<double>(), 15.0);
  EXPECT_EQ(decode.at("digest_bytes"), 40);
  EXPECT_EQ(decode.at("selected_blocks"), 200);
  EXPECT_EQ(decode.at("hot_misses"), 30);
  EXPECT_EQ(decode.at("sparse_steps"), 2);
}

TEST(GenerateReport, ResidentRequest_SaysNothingOfIt) {
  const GenerateResult result;
  EXPECT_EQ(FiguresForPeople(result).find("offloaded"), std::string::npos);
  const auto all = nlohmann::json::parse(GenerateJson({.result = &result, .model = "m", .text = "t",
                                                       .prompt_tokens = 9, .status = {},
                                                       .cancelled_at = ""}));
  EXPECT_EQ(all.at("decode").at("offloaded"), false);
  EXPECT_DOUBLE_EQ(all.at("decode").at("admission_bytes_pct").get<double>(), 0.0);
}

}  // namespace
}  // namespace kvt::ctl
