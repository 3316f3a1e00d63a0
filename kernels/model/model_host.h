// A model ready to compute: device, weights and identity, from the [model] table of a configuration.
// Owned by a composition root.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/base/options.h"
#include "kernels/device.h"
#include "kernels/model/kv_cache.h"
#include "kernels/model/model_config.h"
#include "kernels/model/transformer.h"
#include "kernels/select/calibration.h"

namespace kvt {

struct ModelOptions {
  std::string folder;  // required: a Hugging Face folder
  std::string name;    // under which it is served; default: the folder's name
  TransformerOptions::Compute compute = TransformerOptions::Compute::kAuto;
  int threads = 0;     // of the CPU device; 0: all processors this process may use
  std::string calibration;  // file of kvtide calibrate; empty: nothing is served offloaded
};

// Reads the table; problems are collected in its file.
ModelOptions ReadModelOptions(OptionsTable table);

// Destroyed in reverse order: the device outlives what was made from it.
struct ModelHost {
  std::string name;
  std::string fingerprint;
  std::unique_ptr<Device> device;
  std::unique_ptr<Transformer> transformer;
  std::unique_ptr<const Calibration> calibration;  // null: none is configured
};

// Loads on the CPU device. Errors as Transformer::Load and LoadCalibration.
absl::StatusOr<ModelHost> LoadModelHost(const ModelOptions& options);

// A cache of as many slots as `bytes` hold, for `rows` sequences up to the model's context.
// InvalidArgument when not even one sequence of one block fits.
absl::StatusOr<std::unique_ptr<KvCache>> NewKvCache(const ModelHost& host, uint64_t bytes, int rows);

}  // namespace kvt
