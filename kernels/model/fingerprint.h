// Which model a block of KV belongs to.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "kernels/model/model_config.h"
#include "kernels/model/safetensors.h"

namespace kvt {

// 128 bits as 32 lower-case hex digits, the start of SHA-256 over: the config fields that the
// arithmetic depends on; for every tensor, by name, its name, type, shape and a sample of its
// bytes. The sample is the whole tensor up to kFingerprintSampleBytes, beyond that 16 windows of
// 256 bytes spread evenly, first and last bytes included, so the cost does not grow with the model.
// Training, quantising or merging moves nearly every weight, which the sample shows; an edit of a
// few single weights in a large tensor it may not. Independent of how tensors are spread over
// shards, and of the tokenizer (KV is keyed by token ids).
inline constexpr int kFingerprintSampleBytes = 4096;
std::string ModelFingerprint(const ModelConfig& config, const Safetensors& weights);

}  // namespace kvt
