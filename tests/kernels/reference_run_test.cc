// ReferenceRun: what it refuses, that it ends, and that its tokens do not depend on chunks.
#include "kernels/model/reference_run.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "kernels/base/random.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/model/model_config.h"
#include "tests/support/model_folder.h"
#include "tests/support/random_model.h"

namespace kvt {
namespace {

class ReferenceRunTest : public ::testing::Test {
 protected:
  ReferenceRunTest() {
    WriteRandomModel(RandomModelSpecs()[0], folder_.path());
    CpuDeviceOptions options;
    options.threads = 2;
    device_ = MakeCpuDevice(options).value();
    model_ = Transformer::Load(folder_.path(), *device_,
                               {.compute = TransformerOptions::Compute::kF32}).value();
  }
  std::vector<int32_t> Prompt(int tokens) const {
    Random random(3);
    std::vector<int32_t> prompt(static_cast<size_t>(tokens));
    for (int32_t& token : prompt) {
      token = static_cast<int32_t>(random.Below(static_cast<uint64_t>(model_->config().vocab)));
    }
    return prompt;
  }
  absl::StatusOr<ReferenceResult> Generate(const ReferenceRequest& request, int chunk = 512) {
    return ReferenceRun::Create(*model_, {.chunk_tokens = chunk}).value()->Generate(request);
  }

  TempFolder folder_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Transformer> model_;
};

TEST_F(ReferenceRunTest, EmptyPrompt_Refused) {
  const absl::Status status = Generate({}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "the prompt is empty");
}

TEST_F(ReferenceRunTest, PromptOfTheWholeContext_Refused) {
  const std::vector<int32_t> prompt = Prompt(model_->config().context_tokens);
  ReferenceRequest request;
  request.prompt = prompt;
  EXPECT_EQ(Generate(request).status().code(), absl::StatusCode::kOutOfRange);
}

TEST_F(ReferenceRunTest, TokenOutsideTheVocabulary_Refused) {
  for (const int32_t token : {-1, model_->config().vocab}) {
    const std::vector<int32_t> prompt = {1, token};
    ReferenceRequest request;
    request.prompt = prompt;
    EXPECT_EQ(Generate(request).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST_F(ReferenceRunTest, BadOptions_Refused) {
  EXPECT_FALSE(ReferenceRun::Create(*model_, {.chunk_tokens = 0}).ok());
  EXPECT_FALSE(ReferenceRun::Create(*model_, {.chunk_tokens = kPrefillChunkTokensMax + 1}).ok());
  const std::vector<int32_t> prompt = Prompt(5);
  ReferenceRequest request;
  request.prompt = prompt;
  request.sampling.temperature = -1;
  EXPECT_EQ(Generate(request).status().code(), absl::StatusCode::kInvalidArgument);
  request.sampling.temperature = 0;
  request.max_tokens = 0;
  EXPECT_EQ(Generate(request).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(ReferenceRunTest, ContextFull_EndsThere) {
  const std::vector<int32_t> prompt = Prompt(model_->config().context_tokens - 3);
  ReferenceRequest request;
  request.prompt = prompt;
  const auto result = Generate(request);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->tokens.size(), 3u);
  EXPECT_FALSE(result->stopped);
}

TEST_F(ReferenceRunTest, ChunksAndRestart_DoNotChangeTokens) {
  const std::vector<int32_t> prompt = Prompt(77);
  ReferenceRequest request;
  request.prompt = prompt;
  request.max_tokens = 20;
  for (const float temperature : {0.0f, 0.9f}) {
    request.sampling.temperature = temperature;
    request.sampling.seed = 5;
    const auto want = Generate(request, 512);
    ASSERT_TRUE(want.ok());
    EXPECT_EQ(want->tokens.size(), 20u);
    EXPECT_EQ(Generate(request, 16)->tokens, want->tokens);
    EXPECT_EQ(Generate(request, 1)->tokens, want->tokens);
  }
}

TEST_F(ReferenceRunTest, StopId_EndsTheAnswerWithIt) {
  const std::vector<int32_t> prompt = Prompt(30);
  ReferenceRequest request;
  request.prompt = prompt;
  request.max_tokens = 8;
  request.sampling.temperature = 1;
  const auto free_run = Generate(request);
  ASSERT_TRUE(free_run.ok());
  request.stop_ids = {free_run->tokens[2]};
  const auto stopped = Generate(request);
  ASSERT_TRUE(stopped.ok());
  EXPECT_TRUE(stopped->stopped);
  EXPECT_LE(stopped->tokens.size(), 3u);
  EXPECT_EQ(stopped->tokens.back(), free_run->tokens[2]);
}

}  // namespace
}  // namespace kvt
