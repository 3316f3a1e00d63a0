#include "kernels/model/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/check.h"
#include "kernels/model/json_file.h"

namespace kvt {
namespace {

using nlohmann::json;

// The format's own limit.
constexpr uint64_t kHeaderBytesMax = 100'000'000;
constexpr uint64_t kHeaderLengthBytes = 8;
constexpr size_t kDimensionsMax = 8;
constexpr size_t kShardsMax = 4096;

struct TypeInfo {
  absl::string_view name;
  uint64_t bytes;
  TensorType type;
};
constexpr TypeInfo kTypes[] = {
    {"F32", 4, TensorType::kF32},       {"F16", 2, TensorType::kF16},
    {"BF16", 2, TensorType::kBf16},     {"BOOL", 1, TensorType::kOther},
    {"U8", 1, TensorType::kOther},      {"I8", 1, TensorType::kOther},
    {"U16", 2, TensorType::kOther},     {"I16", 2, TensorType::kOther},
    {"U32", 4, TensorType::kOther},     {"I32", 4, TensorType::kOther},
    {"U64", 8, TensorType::kOther},     {"I64", 8, TensorType::kOther},
    {"F64", 8, TensorType::kOther},     {"F8_E4M3", 1, TensorType::kOther},
    {"F8_E5M2", 1, TensorType::kOther},
};

std::string ShapeText(absl::Span<const int64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

absl::Status Malformed(absl::string_view path, absl::string_view name, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": tensor ", name, ": ", what));
}

// A non-negative integer of the header.
bool ReadUnsigned(const json& value, uint64_t& out) {
  if (!value.is_number_unsigned()) return false;
  out = value.get<uint64_t>();
  return out <= uint64_t{1} << 62;
}

struct Extent {
  uint64_t begin = 0, end = 0;  // after the header
};

// Checks one header entry against the `data_bytes` that follow the header.
absl::StatusOr<std::pair<TensorView, Extent>> ParseEntry(const std::string& path,
                                                         const std::string& name, const json& entry,
                                                         uint64_t data_bytes) {
  const auto bad = [&](absl::string_view what) { return Malformed(path, name, what); };
  if (!entry.is_object()) return bad("its header entry is not an object");
  const auto dtype = entry.find("dtype"), shape = entry.find("shape"),
             offsets = entry.find("data_offsets");
  if (dtype == entry.end() || !dtype->is_string()) return bad("dtype is missing or no string");
  if (shape == entry.end() || !shape->is_array()) return bad("shape is missing or no list");
  if (offsets == entry.end() || !offsets->is_array() || offsets->size() != 2) {
    return bad("data_offsets is missing or not two numbers");
  }
  TensorView view;
  view.type_name = dtype->get<std::string>();
  const auto* info = std::find_if(std::begin(kTypes), std::end(kTypes), [&](const TypeInfo& known) {
    return view.type_name == std::string(known.name);
  });
  if (info == std::end(kTypes)) return bad(absl::StrCat("dtype ", dtype->dump(), " is not known"));
  view.type = info->type;

  if (shape->size() > kDimensionsMax) return bad("shape has too many dimensions");
  uint64_t bytes = info->bytes;
  for (const json& dimension : *shape) {
    uint64_t size = 0;
    if (!ReadUnsigned(dimension, size)) {
      return bad(absl::StrCat("shape ", shape->dump(), " is not of non-negative integers"));
    }
    if (__builtin_mul_overflow(bytes, size, &bytes)) {
      return bad(absl::StrCat("shape ", shape->dump(), " overflows"));
    }
    view.shape.push_back(static_cast<int64_t>(size));
  }
  Extent extent;
  if (!ReadUnsigned(offsets->at(0), extent.begin) || !ReadUnsigned(offsets->at(1), extent.end) ||
      extent.begin > extent.end || extent.end > data_bytes) {
    return bad(absl::StrCat("data_offsets ", offsets->dump(), " are not within the file's ",
                            data_bytes, " data bytes"));
  }
  if (extent.end - extent.begin != bytes) {
    return bad(absl::StrCat("data_offsets ", offsets->dump(), " hold ", extent.end - extent.begin,
                            " bytes, but dtype ", view.type_name, " and shape ", shape->dump(),
                            " need ", bytes));
  }
  return std::make_pair(std::move(view), extent);
}

}  // namespace

Safetensors::~Safetensors() {
  for (const Mapping& mapping : mappings_) {
    munmap(const_cast<std::byte*>(mapping.data), mapping.size);
  }
}

absl::StatusOr<std::unique_ptr<Safetensors>> Safetensors::Open(absl::string_view folder) {
  std::unique_ptr<Safetensors> files(new Safetensors());
  const std::string single = absl::StrCat(folder, "/model.safetensors");
  const std::string index = absl::StrCat(folder, "/model.safetensors.index.json");
  if (access(single.c_str(), F_OK) == 0) {
    KVT_RETURN_IF_ERROR(files->OpenFile(single));
  } else if (access(index.c_str(), F_OK) == 0) {
    KVT_RETURN_IF_ERROR(files->OpenShards(std::string(folder), index));
  } else {
    return absl::NotFoundError(absl::StrCat(
        folder, ": neither model.safetensors nor model.safetensors.index.json is there"));
  }
  return files;
}

absl::Status Safetensors::OpenFile(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return absl::NotFoundError(absl::StrCat(path, ": ", strerror(errno)));
  struct stat info;
  const bool is_file = fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
  const size_t size = is_file ? static_cast<size_t>(info.st_size) : 0;
  if (size < kHeaderLengthBytes) {
    close(fd);
    return absl::InvalidArgumentError(
        absl::StrCat(path, is_file ? ": is too short for a header" : ": is not a file"));
  }
  void* data = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
  const int error = errno;
  close(fd);
  if (data == MAP_FAILED) {
    return absl::UnavailableError(absl::StrCat(path, ": cannot be mapped: ", strerror(error)));
  }
  mappings_.push_back({path, static_cast<const std::byte*>(data), size});
  return ParseHeader(mappings_.back(), mappings_.size() - 1);
}

absl::Status Safetensors::ParseHeader(const Mapping& mapping, size_t mapping_index) {
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, mapping.data, kHeaderLengthBytes);
  if (header_bytes > kHeaderBytesMax || header_bytes > mapping.size - kHeaderLengthBytes) {
    return absl::InvalidArgumentError(absl::StrCat(mapping.path, ": header length ", header_bytes,
                                                   " does not fit a file of ", mapping.size,
                                                   " bytes (at most ", kHeaderBytesMax, ")"));
  }
  const auto* text = reinterpret_cast<const char*>(mapping.data + kHeaderLengthBytes);
  KVT_ASSIGN_OR_RETURN(const json header,
                       ParseJson(absl::string_view(text, header_bytes), mapping.path));
  if (!header.is_object()) {
    return absl::InvalidArgumentError(absl::StrCat(mapping.path, ": header is not an object"));
  }
  const std::byte* data = mapping.data + kHeaderLengthBytes + header_bytes;
  const uint64_t data_bytes = mapping.size - kHeaderLengthBytes - header_bytes;
  std::vector<std::pair<Extent, std::string>> extents;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    KVT_ASSIGN_OR_RETURN(auto parsed, ParseEntry(mapping.path, name, entry, data_bytes));
    auto& [view, extent] = parsed;
    view.bytes = absl::MakeConstSpan(data + extent.begin, extent.end - extent.begin);
    extents.emplace_back(extent, name);
    const auto [other, is_new] = tensors_.try_emplace(name, Entry{std::move(view), mapping_index});
    if (!is_new) {
      return Malformed(mapping.path, name,
                       absl::StrCat("stands in ", mappings_[other->second.mapping].path, " too"));
    }
  }
  std::sort(extents.begin(), extents.end(), [](const auto& a, const auto& b) {
    return std::pair(a.first.begin, a.first.end) < std::pair(b.first.begin, b.first.end);
  });
  uint64_t expected = 0;
  for (const auto& [extent, name] : extents) {
    if (extent.begin != expected) {
      return Malformed(mapping.path, name,
                       absl::StrCat("begins at ", extent.begin, ", where ", expected,
                                    " is expected: tensors overlap or leave a hole"));
    }
    expected = extent.end;
  }
  if (expected != data_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(mapping.path, ": ", data_bytes - expected, " bytes after the last tensor"));
  }
  return absl::OkStatus();
}

absl::Status Safetensors::OpenShards(const std::string& folder, const std::string& index_path) {
  KVT_ASSIGN_OR_RETURN(const json index, ReadJsonObject(index_path));
  const auto map = index.find("weight_map");
  if (map == index.end() || !map->is_object() || map->empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(index_path, ": field weight_map is missing, empty or no object"));
  }
  std::set<std::string> shards;
  for (const auto& [name, file] : map->items()) {
    const std::string shard = file.is_string() ? file.get<std::string>() : "";
    if (shard.empty() || shard.find('/') != std::string::npos || shard[0] == '.' ||
        shard.find('\0') != std::string::npos) {
      return Malformed(index_path, name,
                       absl::StrCat(file.dump(-1, ' ', true, json::error_handler_t::replace),
                                    " is not a file name of this folder"));
    }
    shards.insert(shard);
  }
  if (shards.size() > kShardsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(index_path, ": names ", shards.size(), " shards; ", kShardsMax, " at most"));
  }
  for (const std::string& shard : shards) {
    KVT_RETURN_IF_ERROR(OpenFile(absl::StrCat(folder, "/", shard)));
  }
  for (const auto& [name, file] : map->items()) {
    const auto it = tensors_.find(name);
    const std::string path = absl::StrCat(folder, "/", file.get<std::string>());
    if (it == tensors_.end() || mappings_[it->second.mapping].path != path) {
      return Malformed(index_path, name, absl::StrCat("is not in ", path));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<TensorView> Safetensors::Find(absl::string_view name,
                                             absl::Span<const int64_t> shape) const {
  const auto it = tensors_.find(name);
  if (it == tensors_.end()) {
    return absl::NotFoundError(absl::StrCat(mappings_.front().path,
                                            mappings_.size() > 1 ? " and its other shards" : "",
                                            ": no tensor ", name));
  }
  const Entry& entry = it->second;
  const std::string& path = mappings_[entry.mapping].path;
  if (absl::MakeConstSpan(entry.view.shape) != shape) {
    return Malformed(path, name,
                     absl::StrCat("shape ", ShapeText(entry.view.shape),
                                  ", where config.json asks for ", ShapeText(shape)));
  }
  if (entry.view.type == TensorType::kOther) {
    return Malformed(
        path, name,
        absl::StrCat("dtype ", entry.view.type_name, "; F32, F16 and BF16 are supported"));
  }
  return entry.view;
}

std::vector<std::string> Safetensors::Names() const {
  std::vector<std::string> names;
  names.reserve(tensors_.size());
  for (const auto& [name, entry] : tensors_) names.push_back(name);
  std::sort(names.begin(), names.end());
  return names;
}

const TensorView* Safetensors::FindAny(absl::string_view name) const {
  const auto it = tensors_.find(name);
  return it == tensors_.end() ? nullptr : &it->second.view;
}

}  // namespace kvt
