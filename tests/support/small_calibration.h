// A calibration for a small model folder of a test: one selecting head in each layer.
#pragma once

#include <string>
#include <vector>

#include "kernels/model/fingerprint.h"
#include "kernels/model/model_config.h"
#include "kernels/model/safetensors.h"
#include "kernels/select/calibration.h"
#include "tests/support/model_folder.h"

namespace kvt {

// Path of the file, written into `folder`.
inline std::string WriteSmallCalibration(const std::string& model_folder, const TempFolder& folder) {
  const ModelConfig config = LoadModelConfig(model_folder).value();
  Calibration calibration;
  calibration.model = ModelFingerprint(config, *Safetensors::Open(model_folder).value());
  calibration.geometry = config.KvGeometry();
  const auto dim = static_cast<size_t>(config.head_dim);
  for (int layer = 0; layer < config.layers; ++layer) {
    calibration.layers.emplace_back().heads.push_back(
        {layer % config.kv_heads, std::vector<float>(dim, 0.0f), std::vector<float>(dim, 0.3f)});
  }
  folder.Write("small.cal", calibration.ToText());
  return folder.path() + "/small.cal";
}

}  // namespace kvt
