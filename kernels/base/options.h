// TOML configuration, read strictly: each module's options struct names its keys; a key nobody
// asked for, a wrong type or a value out of range stops the start with file and line.
//
//   KVT_ASSIGN_OR_RETURN(OptionsFile file, OptionsFile::Load(path));
//   OptionsTable store = file.Table("store");
//   store.Get("arena_bytes", &options.arena_bytes, 64 * kMiB, 1024 * kGiB);
//   KVT_RETURN_IF_ERROR(file.Finish());   // every problem found, and unknown keys
//
// Not thread-safe; used in main only. toml++ stays in options.cc.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace kvt {

class OptionsFile;

// One table of the file; missing tables read as empty (every key keeps its default). Borrowed from
// its OptionsFile.
class OptionsTable {
 public:
  // Each leaves *out alone when the key is absent. Problems are collected for Finish().
  void Get(absl::string_view key, std::string* out);
  void Get(absl::string_view key, bool* out);
  void Get(absl::string_view key, int64_t* out, int64_t min, int64_t max);
  void Get(absl::string_view key, uint64_t* out, uint64_t min, uint64_t max);
  void Get(absl::string_view key, int* out, int min, int max);
  void Get(absl::string_view key, double* out, double min, double max);
  // "250ms", "10s", "1h" (absl::ParseDuration).
  void Get(absl::string_view key, absl::Duration* out, absl::Duration min, absl::Duration max);
  // A byte count: an integer or "2GiB", "512MiB", "64KiB".
  void GetBytes(absl::string_view key, uint64_t* out, uint64_t min, uint64_t max);
  void Get(absl::string_view key, std::vector<std::string>* out);
  // A required key that is absent is a problem.
  void Require(absl::string_view key, std::string* out);
  [[nodiscard]] bool Has(absl::string_view key) const;
  [[nodiscard]] OptionsTable Table(absl::string_view key);
  // [[key]]: each element. A single table is a problem.
  [[nodiscard]] std::vector<OptionsTable> Tables(absl::string_view key);
  // Its keys, in the file's order of names. For a program that passes a table on unread.
  [[nodiscard]] std::vector<std::string> Keys() const;
  // The value of `key` as TOML text on one line ("\"2GiB\"", "{a = 1}"), with all below it asked
  // for; empty when absent.
  [[nodiscard]] std::string Render(absl::string_view key);
  // Records a problem of this table at `key`'s line, for checks across keys.
  void Problem(absl::string_view key, absl::string_view message);

 private:
  friend class OptionsFile;
  struct Impl;
  explicit OptionsTable(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<Impl> impl_;
};

class OptionsFile {
 public:
  // NotFound, PermissionDenied; InvalidArgument with file, line and column of a syntax error.
  static absl::StatusOr<OptionsFile> Load(absl::string_view path);
  // As Load, from memory; `name` stands for the file in messages.
  static absl::StatusOr<OptionsFile> Parse(absl::string_view text, absl::string_view name);
  OptionsFile(OptionsFile&&) noexcept;
  OptionsFile& operator=(OptionsFile&&) noexcept;
  ~OptionsFile();

  [[nodiscard]] OptionsTable Root();
  [[nodiscard]] OptionsTable Table(absl::string_view key) { return Root().Table(key); }
  // A table that another module reads: not an unknown key here.
  void Ignore(absl::string_view key);
  // InvalidArgument listing every problem and every key that nobody asked for, with file and line.
  [[nodiscard]] absl::Status Finish();

 private:
  friend class OptionsTable;
  struct State;
  explicit OptionsFile(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace kvt
