#include "kernels/select/calibration.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "kernels/base/check.h"
#include "kernels/base/random.h"
#include "kernels/layout/digest.h"

namespace kvt {
namespace {

constexpr absl::string_view kMagic = "kvtide-calibration 1";

// FNV-1a, mixed: against mistakes, not against an adversary.
std::string TextId(absl::string_view text) {
  uint64_t hash = 0xcbf29ce484222325ull;
  for (const char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3ull;
  return absl::StrFormat("%016x", Mix64(hash));
}

std::string Body(const Calibration& c) {
  std::string text = absl::StrCat(kMagic, "\nmodel ", c.model, "\ngeometry ", c.geometry.layers, " ",
                                  c.geometry.kv_heads, " ", c.geometry.head_dim, "\nbits ", c.bits,
                                  "\n");
  for (size_t l = 0; l < c.layers.size(); ++l) {
    const CalibrationLayer& layer = c.layers[l];
    absl::StrAppend(&text, "layer ", l, layer.heads.empty() ? " dense" : " heads");
    for (const CalibrationHead& head : layer.heads) absl::StrAppend(&text, " ", head.kv_head);
    absl::StrAppendFormat(&text, "\nranking %d %d %d %.6g %d %d\n", l, layer.best, layer.runner_up,
                          layer.margin, layer.mam_head, layer.least_head);
    if (!layer.misses.empty()) {
      absl::StrAppend(&text, "misses ", l, " ", layer.miss_least, " ", layer.miss_step);
      for (const double misses : layer.misses) absl::StrAppendFormat(&text, " %.6g", misses);
      absl::StrAppend(&text, "\n");
    }
    if (!layer.losses.empty()) {
      absl::StrAppend(&text, "losses ", l);
      for (const double loss : layer.losses) absl::StrAppendFormat(&text, " %.6g", loss);
      absl::StrAppend(&text, "\n");
    }
    for (const CalibrationHead& head : layer.heads) {
      absl::StrAppend(&text, "channels ", l, " ", head.kv_head);
      for (size_t d = 0; d < head.offset.size(); ++d) {
        absl::StrAppendFormat(&text, " %.9g %.9g", head.offset[d], head.scale[d]);
      }
      absl::StrAppend(&text, "\n");
    }
  }
  return text;
}

// Lines of words, with the place for messages.
class Reader {
 public:
  Reader(absl::string_view text, absl::string_view file)
      : lines_(absl::StrSplit(text, '\n')), file_(file) {}

  // The words of the next line after `keyword`.
  absl::Status Next(absl::string_view keyword) {
    if (at_ >= lines_.size()) return Error(absl::StrCat("ends where \"", keyword, "\" is expected"));
    words_ = absl::StrSplit(lines_[at_++], ' ');
    if (words_.front() != keyword) return Error(absl::StrCat("expected \"", keyword, "\""));
    words_.erase(words_.begin());
    return absl::OkStatus();
  }
  bool NextIs(absl::string_view keyword) const {
    return at_ < lines_.size() && absl::StartsWith(lines_[at_], absl::StrCat(keyword, " "));
  }
  absl::Status Int(size_t word, int least, int most, int* out) const {
    if (word >= words_.size() || !absl::SimpleAtoi(words_[word], out) || *out < least || *out > most) {
      return Error(absl::StrCat("word ", word + 2, " is not an integer in [", least, ", ", most, "]"));
    }
    return absl::OkStatus();
  }
  absl::Status Number(size_t word, double* out) const {
    if (word >= words_.size() || !absl::SimpleAtod(words_[word], out) || !std::isfinite(*out)) {
      return Error(absl::StrCat("word ", word + 2, " is not a number"));
    }
    return absl::OkStatus();
  }
  absl::Status Error(absl::string_view what) const {
    return absl::InvalidArgumentError(absl::StrCat(file_, ":", at_, ": ", what));
  }
  const std::vector<absl::string_view>& words() const { return words_; }

 private:
  const std::vector<absl::string_view> lines_;
  const absl::string_view file_;
  std::vector<absl::string_view> words_;
  size_t at_ = 0;
};

absl::Status ReadHeader(Reader& reader, Calibration* c) {
  KVT_RETURN_IF_ERROR(reader.Next("kvtide-calibration"));
  int version = 0;
  KVT_RETURN_IF_ERROR(reader.Int(0, 1, 1, &version));
  KVT_RETURN_IF_ERROR(reader.Next("model"));
  if (reader.words().size() != 1) return reader.Error("expected one fingerprint");
  c->model = std::string(reader.words()[0]);
  KVT_RETURN_IF_ERROR(reader.Next("geometry"));
  KVT_RETURN_IF_ERROR(reader.Int(0, 1, 256, &c->geometry.layers));
  KVT_RETURN_IF_ERROR(reader.Int(1, 1, 128, &c->geometry.kv_heads));
  KVT_RETURN_IF_ERROR(reader.Int(2, 32, 256, &c->geometry.head_dim));
  if (const absl::Status status = c->geometry.Validate(); !status.ok()) {
    return reader.Error(status.message());
  }
  KVT_RETURN_IF_ERROR(reader.Next("bits"));
  return reader.Int(0, kDigestBitsMin, kDigestBitsMax, &c->bits);
}

absl::Status ReadChannels(Reader& reader, int layer, int head_dim, CalibrationHead* head) {
  KVT_RETURN_IF_ERROR(reader.Next("channels"));
  int ignored = 0;
  KVT_RETURN_IF_ERROR(reader.Int(0, layer, layer, &ignored));
  KVT_RETURN_IF_ERROR(reader.Int(1, head->kv_head, head->kv_head, &ignored));
  if (reader.words().size() != static_cast<size_t>(2 + 2 * head_dim)) {
    return reader.Error(absl::StrCat("expected ", 2 * head_dim, " numbers"));
  }
  for (int d = 0; d < head_dim; ++d) {
    double offset = 0, scale = 0;
    KVT_RETURN_IF_ERROR(reader.Number(static_cast<size_t>(2 + 2 * d), &offset));
    KVT_RETURN_IF_ERROR(reader.Number(static_cast<size_t>(3 + 2 * d), &scale));
    if (!(scale > 0)) return reader.Error("a scale is not positive");
    head->offset.push_back(static_cast<float>(offset));
    head->scale.push_back(static_cast<float>(scale));
  }
  return absl::OkStatus();
}

absl::Status ReadMisses(Reader& reader, int layer, CalibrationLayer* out) {
  KVT_RETURN_IF_ERROR(reader.Next("misses"));
  int ignored = 0;
  KVT_RETURN_IF_ERROR(reader.Int(0, layer, layer, &ignored));
  KVT_RETURN_IF_ERROR(reader.Int(1, 0, kSequenceBlocksMax, &out->miss_least));
  KVT_RETURN_IF_ERROR(reader.Int(2, 1, kSequenceBlocksMax, &out->miss_step));
  for (size_t word = 3; word < reader.words().size(); ++word) {
    KVT_RETURN_IF_ERROR(reader.Number(word, &out->misses.emplace_back()));
  }
  if (out->misses.empty()) return reader.Error("expected misses");
  return absl::OkStatus();
}

absl::Status ReadLosses(Reader& reader, int layer, CalibrationLayer* out) {
  KVT_RETURN_IF_ERROR(reader.Next("losses"));
  int ignored = 0;
  KVT_RETURN_IF_ERROR(reader.Int(0, layer, layer, &ignored));
  if (reader.words().size() != 1 + std::size(kLossBlocks)) {
    return reader.Error(absl::StrCat("expected ", std::size(kLossBlocks), " losses"));
  }
  for (size_t i = 0; i < std::size(kLossBlocks); ++i) {
    double loss = 0;
    KVT_RETURN_IF_ERROR(reader.Number(1 + i, &loss));
    if (loss < 0 || (i > 0 && loss > out->losses.back())) return reader.Error("losses are not falling");
    out->losses.push_back(loss);
  }
  return absl::OkStatus();
}

absl::Status ReadLayer(Reader& reader, const Calibration& c, int layer, CalibrationLayer* out) {
  KVT_RETURN_IF_ERROR(reader.Next("layer"));
  int ignored = 0;
  KVT_RETURN_IF_ERROR(reader.Int(0, layer, layer, &ignored));
  const bool dense = reader.words().size() == 2 && reader.words()[1] == "dense";
  if (!dense) {
    if (reader.words().size() < 3 || reader.words()[1] != "heads") {
      return reader.Error("expected \"dense\", or \"heads\" and numbers");
    }
    if (reader.words().size() > 2 + kDigestHeadsMax) return reader.Error("too many heads");
    for (size_t word = 2; word < reader.words().size(); ++word) {
      KVT_RETURN_IF_ERROR(reader.Int(word, 0, c.geometry.kv_heads - 1,
                                     &out->heads.emplace_back().kv_head));
    }
  }
  const int heads = c.geometry.kv_heads;
  KVT_RETURN_IF_ERROR(reader.Next("ranking"));
  KVT_RETURN_IF_ERROR(reader.Int(0, layer, layer, &ignored));
  KVT_RETURN_IF_ERROR(reader.Int(1, 0, heads - 1, &out->best));
  KVT_RETURN_IF_ERROR(reader.Int(2, -1, heads - 1, &out->runner_up));
  KVT_RETURN_IF_ERROR(reader.Number(3, &out->margin));
  KVT_RETURN_IF_ERROR(reader.Int(4, 0, heads - 1, &out->mam_head));
  KVT_RETURN_IF_ERROR(reader.Int(5, 0, heads - 1, &out->least_head));
  if (reader.NextIs("misses")) KVT_RETURN_IF_ERROR(ReadMisses(reader, layer, out));
  if (reader.NextIs("losses")) KVT_RETURN_IF_ERROR(ReadLosses(reader, layer, out));
  for (CalibrationHead& head : out->heads) {
    KVT_RETURN_IF_ERROR(ReadChannels(reader, layer, c.geometry.head_dim, &head));
  }
  return absl::OkStatus();
}

}  // namespace

std::string Calibration::Id() const { return TextId(Body(*this)); }

std::string Calibration::ToText() const {
  const std::string body = Body(*this);
  return absl::StrCat(body, "id ", TextId(body), "\n");
}

std::vector<uint32_t> Calibration::DigestBytesByLayer() const {
  std::vector<uint32_t> bytes;
  for (const CalibrationLayer& layer : layers) {
    bytes.push_back(static_cast<uint32_t>(layer.heads.size()) *
                    DigestHeadBytes(geometry.head_dim, bits));
  }
  return bytes;
}

double Calibration::DigestBytesShare() const {
  double bytes = 0;
  for (const uint32_t layer : DigestBytesByLayer()) bytes += layer;
  return bytes / (2.0 * geometry.RecordBytes());
}

absl::StatusOr<Calibration> Calibration::Parse(absl::string_view text, absl::string_view file) {
  Reader reader(text, file);
  Calibration c;
  KVT_RETURN_IF_ERROR(ReadHeader(reader, &c));
  for (int layer = 0; layer < c.geometry.layers; ++layer) {
    KVT_RETURN_IF_ERROR(ReadLayer(reader, c, layer, &c.layers.emplace_back()));
  }
  KVT_RETURN_IF_ERROR(reader.Next("id"));
  // Over the bytes as they stand, so that any edit shows.
  const size_t end = text.rfind("id ");
  if (reader.words().size() != 1 || reader.words()[0] != TextId(text.substr(0, end))) {
    return reader.Error("the id does not match the content: the file was edited or cut");
  }
  return c;
}

}  // namespace kvt
