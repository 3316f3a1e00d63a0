// The tensors of a Hugging Face folder: model.safetensors, or the shards that
// model.safetensors.index.json lists, mapped read-only.
//
// A file is: 8 bytes header length n (little-endian) | n bytes of JSON, name -> {dtype, shape,
// data_offsets [begin, end) after the header} | the tensors' bytes. Everything is checked when the
// file is opened: lengths, types, shapes, that the tensors' bytes cover the rest of the file
// exactly, without hole or overlap. After Open no lookup can read outside the mapping, as long as
// nobody truncates the file (then the process gets SIGBUS, as with every mapping).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace kvt {

enum class TensorType : uint8_t { kF32, kF16, kBf16, kOther };

// Row-major, little-endian. `bytes` points into the mapping of the Safetensors it came from; the
// start has no alignment beyond that of the file's writer (usually 8).
struct TensorView {
  TensorType type = TensorType::kOther;
  std::string type_name;  // as in the file: "BF16"
  std::vector<int64_t> shape;
  absl::Span<const std::byte> bytes;
};

// Owner of the mappings. Immutable after Open, so thread-safe. Views live as long as it does.
class Safetensors {
 public:
  // NotFound when the folder has neither file; InvalidArgument, naming file and tensor, for
  // anything malformed; Unavailable for what the operating system refuses.
  static absl::StatusOr<std::unique_ptr<Safetensors>> Open(absl::string_view folder);

  ~Safetensors();
  Safetensors(const Safetensors&) = delete;
  Safetensors& operator=(const Safetensors&) = delete;

  // The tensor of that name if it has that shape and is f32, f16 or bf16. NotFound, or
  // InvalidArgument naming file and tensor, otherwise.
  [[nodiscard]] absl::StatusOr<TensorView> Find(absl::string_view name,
                                                absl::Span<const int64_t> shape) const;

  [[nodiscard]] bool Has(absl::string_view name) const { return tensors_.contains(name); }
  // Sorted.
  [[nodiscard]] std::vector<std::string> Names() const;
  // Any type and shape; null when absent.
  [[nodiscard]] const TensorView* FindAny(absl::string_view name) const;

 private:
  struct Mapping {
    std::string path;
    const std::byte* data = nullptr;
    size_t size = 0;
  };
  struct Entry {
    TensorView view;
    size_t mapping = 0;  // index into mappings_
  };

  Safetensors() = default;
  absl::Status OpenFile(const std::string& path);
  absl::Status OpenShards(const std::string& folder, const std::string& index_path);
  absl::Status ParseHeader(const Mapping& mapping, size_t mapping_index);

  std::vector<Mapping> mappings_;
  absl::flat_hash_map<std::string, Entry> tensors_;
};

}  // namespace kvt
