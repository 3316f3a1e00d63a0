#include "kernels/base/options.h"

#include <errno.h>

#include <cstring>
#include <fstream>
#include <set>
#include <sstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/check.h"
#include "kernels/base/units.h"

#define TOML_HEADER_ONLY 1
#define TOML_EXCEPTIONS 0
#include <toml++/toml.h>

namespace kvt {

struct OptionsFile::State {
  std::string name;
  toml::table root;
  std::vector<std::string> problems;
  std::set<std::string> seen;  // full paths asked for, and tables to leave alone

  void Add(const toml::node* node, absl::string_view path, absl::string_view message) {
    const std::string at =
        node == nullptr ? name : absl::StrCat(name, ":", node->source().begin.line);
    problems.push_back(absl::StrCat(at, ": ", path, ": ", message));
  }

  void FindUnknown(const toml::table& table, const std::string& prefix) {
    for (auto&& [key, node] : table) {
      const std::string path = absl::StrCat(prefix, std::string(key.str()));
      if (!seen.contains(path)) {
        Add(&node, path, "unknown key");
        continue;
      }
      if (const toml::table* inner = node.as_table()) FindUnknown(*inner, path + ".");
      if (const toml::array* array = node.as_array()) {
        for (size_t i = 0; i < array->size(); ++i) {
          if (const toml::table* inner = array->get(i)->as_table()) {
            FindUnknown(*inner, absl::StrCat(path, "[", i, "]."));
          }
        }
      }
    }
  }
};

struct OptionsTable::Impl {
  OptionsFile::State* state;
  const toml::table* table;  // null: absent
  std::string prefix;        // "" or "store." or "node[0]."

  const toml::node* Ask(absl::string_view key) const {
    const std::string name(key);
    state->seen.insert(prefix + name);
    return table == nullptr ? nullptr : table->get(name);
  }
  void Problem(absl::string_view key, const toml::node* node, absl::string_view message) const {
    state->Add(node, prefix + std::string(key), message);
  }
};

namespace {

absl::string_view TypeName(const toml::node& node) {
  if (node.is_string()) return "a string";
  if (node.is_integer()) return "an integer";
  if (node.is_floating_point()) return "a number";
  if (node.is_boolean()) return "a boolean";
  if (node.is_array()) return "an array";
  if (node.is_table()) return "a table";
  return "something else";
}

std::string Wanted(absl::string_view wanted, const toml::node& node) {
  return absl::StrCat("expected ", wanted, ", found ", TypeName(node));
}

// A node and everything below it counts as asked for.
void MarkSeen(std::set<std::string>& seen, const std::string& path, const toml::node& node) {
  seen.insert(path);
  if (const toml::table* table = node.as_table()) {
    for (auto&& [key, child] : *table) {
      MarkSeen(seen, absl::StrCat(path, ".", std::string(key.str())), child);
    }
  }
  if (const toml::array* array = node.as_array()) {
    for (size_t i = 0; i < array->size(); ++i) {
      MarkSeen(seen, absl::StrCat(path, "[", i, "]"), *array->get(i));
    }
  }
}

// Tables and arrays inline, so that the text stands behind "key = ".
void RenderNode(const toml::node& node, std::ostream& out) {
  if (const toml::table* table = node.as_table()) {
    out << "{";
    const char* separator = "";
    for (auto&& [key, child] : *table) {
      toml::table one;
      one.insert(key, 0);
      std::ostringstream name;  // quoted where it must be
      name << toml::toml_formatter{one};
      out << separator << name.str().substr(0, name.str().rfind('=')) << "= ";
      RenderNode(child, out);
      separator = ", ";
    }
    out << "}";
  } else if (const toml::array* array = node.as_array()) {
    out << "[";
    for (size_t i = 0; i < array->size(); ++i) {
      if (i > 0) out << ", ";
      RenderNode(*array->get(i), out);
    }
    out << "]";
  } else {
    node.visit([&](const auto& leaf) {
      if constexpr (toml::is_value<decltype(leaf)>) out << leaf;
    });
  }
}

// "2GiB" and the like; false when malformed.
bool ParseBytes(absl::string_view text, uint64_t* out) {
  uint64_t unit = 1;
  const std::pair<absl::string_view, uint64_t> units[] = {
      {"GiB", kGiB}, {"MiB", kMiB}, {"KiB", kKiB}, {"B", 1}};
  for (const auto& [suffix, bytes] : units) {
    if (text.size() > suffix.size() && text.substr(text.size() - suffix.size()) == suffix) {
      text.remove_suffix(suffix.size());
      unit = bytes;
      break;
    }
  }
  uint64_t count = 0;
  if (!absl::SimpleAtoi(text, &count) || count > UINT64_MAX / unit) return false;
  *out = count * unit;
  return true;
}

}  // namespace

void OptionsTable::Get(absl::string_view key, std::string* out) {
  const toml::node* node = impl_->Ask(key);
  if (node == nullptr) return;
  if (auto value = node->value_exact<std::string>()) {
    *out = *value;
  } else {
    impl_->Problem(key, node, Wanted("a string", *node));
  }
}

void OptionsTable::Get(absl::string_view key, bool* out) {
  const toml::node* node = impl_->Ask(key);
  if (node == nullptr) return;
  if (auto value = node->value_exact<bool>()) {
    *out = *value;
  } else {
    impl_->Problem(key, node, Wanted("a boolean", *node));
  }
}

void OptionsTable::Get(absl::string_view key, int64_t* out, int64_t min, int64_t max) {
  const toml::node* node = impl_->Ask(key);
  if (node == nullptr) return;
  const auto value = node->value_exact<int64_t>();
  if (!value) {
    impl_->Problem(key, node, Wanted("an integer", *node));
  } else if (*value < min || *value > max) {
    impl_->Problem(key, node, absl::StrCat(*value, " is outside [", min, ", ", max, "]"));
  } else {
    *out = *value;
  }
}

void OptionsTable::Get(absl::string_view key, uint64_t* out, uint64_t min, uint64_t max) {
  const uint64_t top = static_cast<uint64_t>(INT64_MAX);
  int64_t value = static_cast<int64_t>(*out > top ? top : *out);
  Get(key, &value, static_cast<int64_t>(min > top ? top : min),
      static_cast<int64_t>(max > top ? top : max));
  *out = static_cast<uint64_t>(value);
}

void OptionsTable::Get(absl::string_view key, int* out, int min, int max) {
  int64_t value = *out;
  Get(key, &value, static_cast<int64_t>(min), static_cast<int64_t>(max));
  *out = static_cast<int>(value);
}

void OptionsTable::Get(absl::string_view key, double* out, double min, double max) {
  const toml::node* node = impl_->Ask(key);
  if (node == nullptr) return;
  const auto value = node->value<double>();
  if (!node->is_number() || !value) {
    impl_->Problem(key, node, Wanted("a number", *node));
  } else if (!(*value >= min && *value <= max)) {
    impl_->Problem(key, node, absl::StrCat(*value, " is outside [", min, ", ", max, "]"));
  } else {
    *out = *value;
  }
}

void OptionsTable::Get(absl::string_view key, absl::Duration* out, absl::Duration min,
                       absl::Duration max) {
  const toml::node* node = impl_->Ask(key);
  if (node == nullptr) return;
  const auto text = node->value_exact<std::string>();
  absl::Duration value;
  if (!text || !absl::ParseDuration(*text, &value)) {
    impl_->Problem(key, node, "expected a duration such as \"250ms\" or \"10s\"");
  } else if (value < min || value > max) {
    impl_->Problem(key, node, absl::StrCat(*text, " is outside [", absl::FormatDuration(min), ", ",
                                           absl::FormatDuration(max), "]"));
  } else {
    *out = value;
  }
}

void OptionsTable::GetBytes(absl::string_view key, uint64_t* out, uint64_t min, uint64_t max) {
  const toml::node* node = impl_->Ask(key);
  if (node == nullptr) return;
  uint64_t value = 0;
  bool parsed = false;
  if (const auto text = node->value_exact<std::string>()) {
    parsed = ParseBytes(*text, &value);
  } else if (const auto number = node->value_exact<int64_t>(); number && *number >= 0) {
    value = static_cast<uint64_t>(*number);
    parsed = true;
  }
  if (!parsed) {
    impl_->Problem(key, node, "expected a byte count such as 1048576 or \"2GiB\"");
  } else if (value < min || value > max) {
    impl_->Problem(key, node, absl::StrCat(FormatBytes(value), " is outside [", FormatBytes(min),
                                           ", ", FormatBytes(max), "]"));
  } else {
    *out = value;
  }
}

void OptionsTable::Get(absl::string_view key, std::vector<std::string>* out) {
  const toml::node* node = impl_->Ask(key);
  if (node == nullptr) return;
  const toml::array* array = node->as_array();
  std::vector<std::string> values;
  for (size_t i = 0; array != nullptr && i < array->size(); ++i) {
    const auto text = array->get(i)->value_exact<std::string>();
    if (!text) {
      array = nullptr;
      break;
    }
    values.push_back(*text);
  }
  if (array == nullptr) {
    impl_->Problem(key, node, "expected an array of strings");
  } else {
    *out = std::move(values);
  }
}

void OptionsTable::Require(absl::string_view key, std::string* out) {
  if (!Has(key)) {
    impl_->Ask(key);
    impl_->Problem(key, impl_->table, "required key is missing");
    return;
  }
  Get(key, out);
}

bool OptionsTable::Has(absl::string_view key) const {
  return impl_->table != nullptr && impl_->table->contains(std::string(key));
}

OptionsTable OptionsTable::Table(absl::string_view key) {
  const toml::node* node = impl_->Ask(key);
  const toml::table* table = node == nullptr ? nullptr : node->as_table();
  if (node != nullptr && table == nullptr) impl_->Problem(key, node, Wanted("a table", *node));
  return OptionsTable(std::make_shared<Impl>(
      Impl{impl_->state, table, impl_->prefix + std::string(key) + "."}));
}

std::vector<OptionsTable> OptionsTable::Tables(absl::string_view key) {
  std::vector<OptionsTable> out;
  const toml::node* node = impl_->Ask(key);
  if (node == nullptr) return out;
  const toml::array* array = node->as_array();
  if (array == nullptr) {
    impl_->Problem(key, node, "expected an array of tables ([[...]])");
    return out;
  }
  for (size_t i = 0; i < array->size(); ++i) {
    const toml::table* table = array->get(i)->as_table();
    if (table == nullptr) {
      impl_->Problem(key, array->get(i), "expected a table");
      continue;
    }
    out.push_back(OptionsTable(std::make_shared<Impl>(
        Impl{impl_->state, table, absl::StrCat(impl_->prefix, key, "[", i, "].")})));
  }
  return out;
}

std::vector<std::string> OptionsTable::Keys() const {
  std::vector<std::string> keys;
  if (impl_->table == nullptr) return keys;
  for (auto&& [key, node] : *impl_->table) keys.emplace_back(key.str());
  return keys;
}

std::string OptionsTable::Render(absl::string_view key) {
  const toml::node* node = impl_->Ask(key);
  if (node == nullptr) return "";
  MarkSeen(impl_->state->seen, impl_->prefix + std::string(key), *node);
  std::ostringstream out;
  RenderNode(*node, out);
  return out.str();
}

void OptionsTable::Problem(absl::string_view key, absl::string_view message) {
  const toml::node* node =
      impl_->table == nullptr ? nullptr : impl_->table->get(std::string(key));
  impl_->Problem(key, node == nullptr ? impl_->table : node, message);
}

OptionsFile::OptionsFile(std::unique_ptr<State> state) : state_(std::move(state)) {}
OptionsFile::OptionsFile(OptionsFile&&) noexcept = default;
OptionsFile& OptionsFile::operator=(OptionsFile&&) noexcept = default;
OptionsFile::~OptionsFile() = default;

absl::StatusOr<OptionsFile> OptionsFile::Load(absl::string_view path) {
  std::ifstream in{std::string(path)};
  if (!in) {
    const int error = errno;
    const std::string message = absl::StrCat(path, ": ", std::strerror(error));
    return error == EACCES ? absl::PermissionDeniedError(message) : absl::NotFoundError(message);
  }
  std::stringstream text;
  text << in.rdbuf();
  return Parse(text.str(), path);
}

absl::StatusOr<OptionsFile> OptionsFile::Parse(absl::string_view text, absl::string_view name) {
  toml::parse_result result =
      toml::parse(std::string_view(text.data(), text.size()), std::string(name));
  if (!result) {
    const toml::parse_error& error = result.error();
    return absl::InvalidArgumentError(absl::StrCat(name, ":", error.source().begin.line, ":",
                                                   error.source().begin.column, ": ",
                                                   std::string(error.description())));
  }
  auto state = std::make_unique<State>();
  state->name = std::string(name);
  state->root = std::move(result).table();
  return OptionsFile(std::move(state));
}

OptionsTable OptionsFile::Root() {
  return OptionsTable(
      std::make_shared<OptionsTable::Impl>(OptionsTable::Impl{state_.get(), &state_->root, ""}));
}

void OptionsFile::Ignore(absl::string_view key) {
  const toml::node* node = state_->root.get(std::string(key));
  if (node != nullptr) MarkSeen(state_->seen, std::string(key), *node);
}

absl::Status OptionsFile::Finish() {
  state_->FindUnknown(state_->root, "");
  if (state_->problems.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrJoin(state_->problems, "\n"));
}

}  // namespace kvt
