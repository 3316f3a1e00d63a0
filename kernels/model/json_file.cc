#include "kernels/model/json_file.h"

#include <fstream>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_set.h"
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

namespace {

// The parser's own handler, which builds the value, with a look at the keys of every open object.
// (A parser callback would do, at twice the time.)
class KeyCheck : public nlohmann::detail::json_sax_dom_parser<json> {
 public:
  explicit KeyCheck(json& result) : json_sax_dom_parser(result, /*allow_exceptions_=*/true) {}

  bool start_object(size_t size) {
    open_.emplace_back();
    return json_sax_dom_parser::start_object(size);
  }
  bool key(std::string& name) {
    if (!open_.back().insert(name).second) twice_ = name;
    return json_sax_dom_parser::key(name);
  }
  bool end_object() {
    open_.pop_back();
    return json_sax_dom_parser::end_object();
  }
  // A key that stands twice in one object.
  const std::optional<std::string>& twice() const { return twice_; }

 private:
  std::vector<absl::flat_hash_set<std::string>> open_;
  std::optional<std::string> twice_;
};

}  // namespace

absl::StatusOr<json> ParseJson(absl::string_view text, absl::string_view file) {
  json parsed;
  KeyCheck handler(parsed);
  try {
    json::sax_parse(text.begin(), text.end(), &handler);
  } catch (const json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat(file, ": not JSON: ", error.what()));
  }
  if (handler.twice().has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat(file, ": field ", *handler.twice(), " stands twice"));
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
