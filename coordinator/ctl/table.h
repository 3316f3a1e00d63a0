// A table for people: columns as wide as their widest cell. Not thread-safe.
#pragma once

#include <string>
#include <vector>

namespace kvt::ctl {

class TextTable {
 public:
  // A name that starts with '>' makes its column right-aligned.
  explicit TextTable(std::vector<std::string> columns);
  // As many cells as columns; control characters become '?', so that nothing read from the cluster
  // can steer a terminal.
  void Row(std::vector<std::string> cells);
  [[nodiscard]] std::string Render() const;

 private:
  std::vector<bool> right_;
  std::vector<std::vector<std::string>> rows_;  // the first holds the names
};

// The text with control characters replaced.
std::string Printable(std::string text);

}  // namespace kvt::ctl
