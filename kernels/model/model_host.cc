#include "kernels/model/model_host.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/model/calibration_file.h"
#include "kernels/model/fingerprint.h"
#include "kernels/model/safetensors.h"

namespace kvt {

ModelOptions ReadModelOptions(OptionsTable table) {
  ModelOptions options;
  table.Require("folder", &options.folder);
  table.Get("name", &options.name);
  std::string compute = "auto";
  table.Get("compute", &compute);
  if (compute == "bf16") {
    options.compute = TransformerOptions::Compute::kBf16;
  } else if (compute == "f32") {
    options.compute = TransformerOptions::Compute::kF32;
  } else if (compute != "auto") {
    table.Problem("compute", "expected \"auto\", \"bf16\" or \"f32\"");
  }
  table.Get("threads", &options.threads, 0, kTeamThreadsMax);
  table.Get("calibration", &options.calibration);
  return options;
}

absl::StatusOr<ModelHost> LoadModelHost(const ModelOptions& options) {
  ModelHost host;
  host.name = options.name;
  if (host.name.empty()) {
    // "models/x/" and "models/x" are both "x".
    host.name = (std::filesystem::path(options.folder) / "").lexically_normal().parent_path()
                    .filename().string();
  }
  KVT_ASSIGN_OR_RETURN(const ModelConfig config, LoadModelConfig(options.folder));
  {
    KVT_ASSIGN_OR_RETURN(const auto weights, Safetensors::Open(options.folder));
    host.fingerprint = ModelFingerprint(config, *weights);
  }
  KVT_ASSIGN_OR_RETURN(host.device, MakeCpuDevice({.threads = options.threads}));
  KVT_ASSIGN_OR_RETURN(host.transformer, Transformer::Load(options.folder, *host.device,
                                                           {.compute = options.compute}));
  if (!options.calibration.empty()) {
    KVT_ASSIGN_OR_RETURN(Calibration calibration,
                         LoadCalibration(options.calibration, host.fingerprint,
                                         host.transformer->geometry()));
    host.calibration = std::make_unique<const Calibration>(std::move(calibration));
  }
  return host;
}

absl::StatusOr<std::unique_ptr<KvCache>> NewKvCache(const ModelHost& host, uint64_t bytes,
                                                    int rows) {
  const Geometry& geometry = host.transformer->geometry();
  const uint64_t block_slots = 2u * static_cast<uint64_t>(geometry.layers);
  const uint64_t slots =
      std::min<uint64_t>(bytes / geometry.SlotBytes(), kSlotNone) / block_slots * block_slots;
  if (slots == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("slots_bytes: ", bytes, " bytes hold no block of ", host.name, ", which takes ",
                     block_slots * geometry.SlotBytes()));
  }
  const int context = host.transformer->config().context_tokens;
  KvCacheOptions options;
  options.slot_count = static_cast<uint32_t>(slots);
  options.table_rows = rows;
  options.blocks_per_row =
      std::min((context + kBlockTokens - 1) / kBlockTokens, kSequenceBlocksMax);
  return KvCache::Create(*host.device, geometry, options);
}

}  // namespace kvt
