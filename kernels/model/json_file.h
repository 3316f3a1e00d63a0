// Reading the JSON files of a model folder. Only for kernels/model's own sources: the JSON type
// stays inside this folder.
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace kvt {

// Largest JSON file of a model folder (tokenizer.json of 256 K tokens is about 35 MB).
inline constexpr size_t kJsonFileBytesMax = size_t{256} << 20;

// The whole file. NotFound, or InvalidArgument when it is larger than kJsonFileBytesMax.
absl::StatusOr<std::string> ReadModelFile(const std::string& path);

// InvalidArgument naming `file` and the byte where parsing failed; also for a key that stands twice
// in one object, where readers differ in which one they take.
absl::StatusOr<nlohmann::json> ParseJson(absl::string_view text, absl::string_view file);

// Both of the above; the top must be an object.
absl::StatusOr<nlohmann::json> ReadJsonObject(const std::string& path);

}  // namespace kvt
