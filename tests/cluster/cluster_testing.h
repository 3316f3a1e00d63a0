// What the cluster tests share: a small random model, prompts, and starting a cluster or failing.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "kernels/base/random.h"
#include "tests/support/model_folder.h"
#include "tests/support/random_model.h"
#include "tests/support/reference_model.h"
#include "tests/support/test_cluster.h"

namespace kvt {

// Two layers, 2 KV heads of 64, vocabulary of 512, context of 2,048.
inline const RandomModelSpec& SmallModel() { return RandomModelSpecs()[1]; }

// The small model in a folder, and beside it for reference.
class SmallModelFolder {
 public:
  SmallModelFolder() { WriteRandomModel(SmallModel(), folder_.path()); }
  [[nodiscard]] const std::string& path() const { return folder_.path(); }

 private:
  TempFolder folder_;
};

inline std::vector<int32_t> RandomPrompt(uint64_t seed, int tokens, int vocabulary = 512) {
  Random random(seed);
  std::vector<int32_t> prompt;
  for (int i = 0; i < tokens; ++i) {
    prompt.push_back(static_cast<int32_t>(3 + random.Below(static_cast<uint64_t>(vocabulary - 3))));
  }
  return prompt;
}

inline std::unique_ptr<TestCluster> StartOrFail(const ClusterSpec& spec) {
  auto cluster = TestCluster::Start(spec);
  EXPECT_TRUE(cluster.ok()) << cluster.status();
  return cluster.ok() ? std::move(*cluster) : nullptr;
}

inline std::unique_ptr<ReferenceModel> ReferenceOrFail(const std::string& folder) {
  auto model = ReferenceModel::Load(folder);
  EXPECT_TRUE(model.ok()) << model.status();
  return model.ok() ? std::move(*model) : nullptr;
}

// The reference's answers, greedy.
inline std::vector<std::vector<int32_t>> Expected(ReferenceModel& reference,
                                                  const std::vector<std::vector<int32_t>>& prompts,
                                                  int output_tokens) {
  std::vector<std::vector<int32_t>> answers;
  for (const auto& prompt : prompts) {
    auto answer = reference.Generate(prompt, output_tokens);
    EXPECT_TRUE(answer.ok()) << answer.status();
    answers.push_back(answer.ok() ? *answer : std::vector<int32_t>());
  }
  return answers;
}

}  // namespace kvt
