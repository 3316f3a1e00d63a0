// The KV of layer l is pushed while layer l + 1 computes: read from the prefill worker's trace, with
// the real model, whose layers take long enough to tell.
#include <algorithm>
#include <fstream>
#include <map>
#include <sstream>

#include <nlohmann/json.hpp>

#include "tests/cluster/cluster_testing.h"

namespace kvt {
namespace {

struct Span {
  double begin = 0;
  double end = 0;
  uint64_t bytes = 0;
};
// track -> (step, layer) -> span
using Trace = std::map<std::string, std::map<std::pair<uint64_t, int>, Span>>;

Trace ReadTrace(const std::string& path) {
  std::ifstream in(path);
  std::stringstream text;
  text << in.rdbuf();
  const nlohmann::json events = nlohmann::json::parse(text.str() + "]");
  Trace trace;
  for (const auto& event : events) {
    const double begin = event["ts"];
    trace[event["cat"]][{event["args"]["step"], event["args"]["layer"]}] = {
        begin, begin + event["dur"].get<double>(), event["args"]["bytes"]};
  }
  return trace;
}

struct StreamFigures {
  uint64_t bytes = 0;
  int overlapped = 0;
  int candidates = 0;
  double median_us = 0;  // of a layer
  double tail_us = 0;    // from the last layer's end to the last push's

  [[nodiscard]] bool Good() const {
    return overlapped >= candidates * 9 / 10 && tail_us <= 2 * median_us;
  }
};

StreamFigures FiguresOf(const Trace& trace) {
  const auto& compute = trace.at("compute");
  const auto& write = trace.at("write");
  const auto& push = trace.at("push");
  EXPECT_EQ(compute.size(), push.size());
  StreamFigures figures;
  for (const auto& [key, span] : push) {
    figures.bytes += span.bytes;
    const auto [step, layer] = key;
    EXPECT_GE(span.begin, write.at(key).end) << "pushed before it was written";
    const auto next = compute.find({step, layer + 1});
    if (next == compute.end()) continue;
    ++figures.candidates;
    // Starts before layer l + 1 has ended.
    figures.overlapped += span.begin < next->second.end ? 1 : 0;
  }
  std::vector<double> layer_us;
  double computed_us = 0;
  double pushed_us = 0;
  for (const auto& [key, span] : compute) {
    layer_us.push_back(span.end - span.begin);
    computed_us = std::max(computed_us, span.end);
  }
  for (const auto& [key, span] : push) pushed_us = std::max(pushed_us, span.end);
  std::sort(layer_us.begin(), layer_us.end());
  figures.median_us = layer_us.empty() ? 0 : layer_us[layer_us.size() / 2];
  figures.tail_us = pushed_us - computed_us;
  return figures;
}

TEST(StreamingTest, LongPrompt_EachLayerIsPushedWhileTheNextComputes) {
  const std::string model = RealModelFolder();
  KVT_SKIP_WITHOUT_MODEL(model);
  const int tokens = 2048;
  // Other work on the machine may hold up a push: the least disturbed of three prompts counts. What is
  // pushed only after its chunk shows in each.
  StreamFigures figures;
  for (uint64_t prompt = 1; prompt <= 3; ++prompt) {
    TempFolder folder;
    ClusterSpec spec;
    spec.model_folder = model;
    spec.decodes = 1;
    spec.prefill_keys += "trace_file = \"" + folder.path() + "/trace.json\"\n";
    const auto cluster = StartOrFail(spec);
    ASSERT_NE(cluster, nullptr);
    const GenerateOutcome outcome =
        cluster->Generate(Request(RandomPrompt(prompt, tokens, 49152), 2));
    ASSERT_TRUE(outcome.status.ok()) << outcome.status << cluster->Logs();
    figures = FiguresOf(ReadTrace(folder.path() + "/trace.json"));
    EXPECT_EQ(figures.bytes, (tokens / kBlockTokens) * outcome.result.decode.block_bytes);
    if (figures.Good()) break;
  }
  EXPECT_GE(figures.overlapped, figures.candidates * 9 / 10) << "of " << figures.candidates;
  EXPECT_LE(figures.tail_us, 2 * figures.median_us) << "layer time " << figures.median_us << " us";
  RecordProperty("layer_us", static_cast<int>(figures.median_us));
  RecordProperty("last_push_after_last_chunk_us", static_cast<int>(figures.tail_us));
}

}  // namespace
}  // namespace kvt
