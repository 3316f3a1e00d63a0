// The model in this process, without a tier: what the cluster's tokens are compared with.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/base/check.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/model/model_config.h"
#include "kernels/model/reference_run.h"
#include "kernels/model/transformer.h"

namespace kvt {

class ReferenceModel {
 public:
  static absl::StatusOr<std::unique_ptr<ReferenceModel>> Load(const std::string& folder) {
    std::unique_ptr<ReferenceModel> model(new ReferenceModel());
    KVT_ASSIGN_OR_RETURN(model->device_, MakeCpuDevice({}));
    KVT_ASSIGN_OR_RETURN(model->transformer_, Transformer::Load(folder, *model->device_, {}));
    KVT_ASSIGN_OR_RETURN(model->run_, ReferenceRun::Create(*model->transformer_, {}));
    return model;
  }

  // Greedy unless `sampling` says otherwise.
  absl::StatusOr<std::vector<int32_t>> Generate(const std::vector<int32_t>& prompt, int max_tokens,
                                                SampleParams sampling = {},
                                                std::vector<int32_t> stop_ids = {}) {
    ReferenceRequest request;
    request.prompt = prompt;
    request.max_tokens = max_tokens;
    request.sampling = sampling;
    request.stop_ids = std::move(stop_ids);
    KVT_ASSIGN_OR_RETURN(ReferenceResult result, run_->Generate(request));
    return std::move(result.tokens);
  }

  [[nodiscard]] const Transformer& transformer() const { return *transformer_; }

 private:
  ReferenceModel() = default;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Transformer> transformer_;
  std::unique_ptr<ReferenceRun> run_;
};

}  // namespace kvt
