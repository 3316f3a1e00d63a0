#include "kernels/model/json_file.h"

#include <fstream>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"

namespace kvt {

using nlohmann::json;

absl::StatusOr<std::string> ReadModelFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  if (!in) return absl::NotFoundError(absl::StrCat(path, ": cannot be opened"));
  const std::streamoff size = in.tellg();
  if (size < 0) return absl::NotFoundError(absl::StrCat(path, ": not a file"));
  if (static_cast<size_t>(size) > kJsonFileBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": ", size, " bytes; ", kJsonFileBytesMax, " at most"));
  }
  std::string text(static_cast<size_t>(size), '\0');
  in.seekg(0);
  if (!in.read(text.data(), size)) {
    return absl::NotFoundError(absl::StrCat(path, ": cannot be read"));
  }
  return text;
}

absl::StatusOr<json> ParseJson(absl::string_view text, absl::string_view file) {
  std::vector<std::set<std::string>> open_objects;
  std::string twice;
  const auto note_keys = [&](int, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::object_start) open_objects.emplace_back();
    if (event == json::parse_event_t::object_end) open_objects.pop_back();
    if (event == json::parse_event_t::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!open_objects.back().insert(key).second) twice = key;
    }
    return true;
  };
  json parsed;
  try {
    parsed = json::parse(text.begin(), text.end(), note_keys);
  } catch (const json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat(file, ": not JSON: ", error.what()));
  }
  if (!twice.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(file, ": field ", twice, " stands twice"));
  }
  return parsed;
}

absl::StatusOr<json> ReadJsonObject(const std::string& path) {
  KVT_ASSIGN_OR_RETURN(const std::string text, ReadModelFile(path));
  KVT_ASSIGN_OR_RETURN(json parsed, ParseJson(text, path));
  if (!parsed.is_object()) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": not a JSON object"));
  }
  return parsed;
}

}  // namespace kvt
