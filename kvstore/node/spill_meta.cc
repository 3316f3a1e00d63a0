#include "kvstore/node/spill_meta.h"

#include <bit>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kvstore/index/limits.h"

namespace kvt {
namespace {

static_assert(std::endian::native == std::endian::little);

template <typename T>
void Put(T value, std::string* to) {
  to->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void PutText(absl::string_view text, std::string* to) {
  Put(static_cast<uint32_t>(text.size()), to);
  to->append(text.data(), text.size());
}

// Takes fields from the front; `good` turns false at the first that is not there.
struct Reader {
  absl::string_view left;
  bool good = true;

  template <typename T>
  T Get() {
    T value{};
    if (left.size() < sizeof(T)) {
      good = false;
      return value;
    }
    std::memcpy(&value, left.data(), sizeof(T));
    left.remove_prefix(sizeof(T));
    return value;
  }
  std::string Text() {
    const auto size = Get<uint32_t>();
    if (!good || size > kStoreNameBytesMax || size > left.size()) {
      good = false;
      return "";
    }
    std::string text(left.substr(0, size));
    left.remove_prefix(size);
    return text;
  }
};

void GetBlock(Reader& from, RestoredBlock* block) {
  block->name.parent.bytes = from.Get<std::array<uint8_t, 16>>();
  const auto provenance = from.Get<uint8_t>();
  const auto tokens = from.Get<uint8_t>();
  from.good &= provenance <= static_cast<uint8_t>(Provenance::kSparse) && tokens <= kBlockTokens;
  if (!from.good) return;
  block->name.provenance = static_cast<Provenance>(provenance);
  block->name.ticket_private = from.Get<uint8_t>() != 0;
  for (int i = 0; i < tokens; ++i) block->name.tokens.push_back(from.Get<int32_t>());
  block->geometry.layers = from.Get<int32_t>();
  block->geometry.kv_heads = from.Get<int32_t>();
  block->geometry.head_dim = from.Get<int32_t>();
  block->geometry.layout = static_cast<NamedLayout>(from.Get<uint8_t>());
  block->model_fingerprint = from.Text();
  block->numerics_id = from.Text();
  block->tenant = from.Text();
  from.good &= block->geometry.Validate().ok();
}

}  // namespace

std::string EncodeSpillMeta(const SpillMeta& meta) {
  std::string to;
  Put(kSpillMetaVersion, &to);
  Put(static_cast<uint8_t>(meta.plane), &to);
  Put(meta.incarnation, &to);
  Put(static_cast<uint32_t>(meta.checksums.size()), &to);
  to.append(reinterpret_cast<const char*>(meta.checksums.data()),
            meta.checksums.size() * sizeof(uint64_t));
  if (meta.plane != Plane::kBase) return to;
  const RestoredBlock& block = meta.block;
  Put(block.name.parent.bytes, &to);
  Put(static_cast<uint8_t>(block.name.provenance), &to);
  Put(static_cast<uint8_t>(block.name.tokens.size()), &to);
  Put(static_cast<uint8_t>(block.name.ticket_private ? 1 : 0), &to);
  for (const int32_t token : block.name.tokens) Put(token, &to);
  Put(static_cast<int32_t>(block.geometry.layers), &to);
  Put(static_cast<int32_t>(block.geometry.kv_heads), &to);
  Put(static_cast<int32_t>(block.geometry.head_dim), &to);
  Put(static_cast<uint8_t>(block.geometry.layout), &to);
  PutText(block.model_fingerprint, &to);
  PutText(block.numerics_id, &to);
  PutText(block.tenant, &to);
  return to;
}

absl::StatusOr<SpillMeta> DecodeSpillMeta(absl::string_view bytes) {
  Reader from{bytes};
  const auto version = from.Get<uint16_t>();
  if (!from.good || version != kSpillMetaVersion) {
    return absl::DataLossError(absl::StrCat("a record's description of version ", version));
  }
  SpillMeta meta;
  const auto plane = from.Get<uint8_t>();
  meta.plane = static_cast<Plane>(plane);
  meta.incarnation = from.Get<uint64_t>();
  const auto sums = from.Get<uint32_t>();
  if (!from.good || plane >= kPlanes || sums > from.left.size() / sizeof(uint64_t)) {
    return absl::DataLossError("a record's description is malformed");
  }
  meta.checksums.resize(sums);
  if (sums > 0) {
    std::memcpy(meta.checksums.data(), from.left.data(), sums * sizeof(uint64_t));
    from.left.remove_prefix(sums * sizeof(uint64_t));
  }
  if (meta.plane == Plane::kBase) GetBlock(from, &meta.block);
  meta.block.incarnation = meta.incarnation;
  if (!from.good || !from.left.empty()) {
    return absl::DataLossError("a record's description is malformed");
  }
  return meta;
}

}  // namespace kvt
