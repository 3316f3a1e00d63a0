#include "coordinator/ctl/table.h"

#include <algorithm>

#include "kernels/base/check.h"

namespace kvt::ctl {

std::string Printable(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  return text;
}

TextTable::TextTable(std::vector<std::string> columns) {
  for (std::string& name : columns) {
    right_.push_back(!name.empty() && name.front() == '>');
    if (right_.back()) name.erase(0, 1);
  }
  rows_.push_back(std::move(columns));
}

void TextTable::Row(std::vector<std::string> cells) {
  KVT_CHECK(cells.size() == right_.size());
  for (std::string& cell : cells) cell = Printable(std::move(cell));
  rows_.push_back(std::move(cells));
}

std::string TextTable::Render() const {
  std::vector<size_t> widths(right_.size(), 0);
  for (const auto& row : rows_) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string out;
  for (const auto& row : rows_) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string pad(widths[i] - row[i].size(), ' ');
      line += right_[i] ? pad + row[i] : row[i] + pad;
      if (i + 1 < row.size()) line += "  ";
    }
    while (!line.empty() && line.back() == ' ') line.pop_back();
    out += line + "\n";
  }
  return out;
}

}  // namespace kvt::ctl
