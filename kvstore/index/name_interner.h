// Small numbers for strings that repeat in every block (tenants, models): compared and stored
// cheaply. Names stay until the end. Pure; not thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace kvt {

class NameInterner {
 public:
  // `what` names the names in messages: "sharing domains".
  NameInterner(std::string what, size_t names_max)
      : what_(std::move(what)), names_max_(names_max) {}

  // ResourceExhausted when the name is new and there are `names_max` already.
  absl::StatusOr<uint32_t> Intern(absl::string_view name) {
    const auto it = ids_.find(name);
    if (it != ids_.end()) return it->second;
    if (ids_.size() >= names_max_) {
      return absl::ResourceExhaustedError(
          absl::StrCat("this store has seen ", names_max_, " ", what_, ", as many as it keeps"));
    }
    const auto id = static_cast<uint32_t>(ids_.size());
    ids_.emplace(name, id);
    names_.emplace_back(name);
    return id;
  }
  [[nodiscard]] std::optional<uint32_t> Find(absl::string_view name) const {
    const auto it = ids_.find(name);
    return it == ids_.end() ? std::nullopt : std::optional<uint32_t>(it->second);
  }
  // In order of their numbers.
  [[nodiscard]] const std::vector<std::string>& names() const { return names_; }

 private:
  const std::string what_;
  const size_t names_max_;
  absl::flat_hash_map<std::string, uint32_t> ids_;
  std::vector<std::string> names_;
};

}  // namespace kvt
