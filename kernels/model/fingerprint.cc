#include "kernels/model/fingerprint.h"

#include <openssl/evp.h>

#include <algorithm>
#include <array>
#include <memory>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "kernels/base/check.h"

namespace kvt {
namespace {

constexpr size_t kWindows = 16;
constexpr size_t kWindowBytes = kFingerprintSampleBytes / kWindows;
constexpr size_t kFingerprintBytes = 16;

class Sha256 {
 public:
  Sha256() : context_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
    KVT_CHECK(context_ != nullptr && EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1);
  }
  void Add(const void* data, size_t size) {
    KVT_CHECK(EVP_DigestUpdate(context_.get(), data, size) == 1);
  }
  // With its length before it, so that neighbouring texts cannot be confused.
  void AddText(absl::string_view text) {
    const uint64_t size = text.size();
    Add(&size, sizeof(size));
    Add(text.data(), text.size());
  }
  std::array<unsigned char, 32> Finish() {
    std::array<unsigned char, 32> digest{};
    KVT_CHECK(EVP_DigestFinal_ex(context_.get(), digest.data(), nullptr) == 1);
    return digest;
  }

 private:
  std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context_;
};

void AddSample(absl::Span<const std::byte> bytes, Sha256& hash) {
  if (bytes.size() <= kFingerprintSampleBytes) {
    hash.Add(bytes.data(), bytes.size());
    return;
  }
  const size_t last = bytes.size() - kWindowBytes;
  for (size_t i = 0; i < kWindows; ++i) {
    // The quotient first: the product of a large tensor's size stays small.
    const size_t start = last / (kWindows - 1) * i + last % (kWindows - 1) * i / (kWindows - 1);
    hash.Add(bytes.data() + start, kWindowBytes);
  }
}

}  // namespace

std::string ModelFingerprint(const ModelConfig& config, const Safetensors& weights) {
  Sha256 hash;
  hash.AddText("kvtide model fingerprint 1");
  // Llama and Mistral without window are the same arithmetic: the architecture's name is left out.
  // What Qwen does besides is in the names of its tensors.
  hash.AddText(absl::StrFormat("%d %d %d %d %d %d %d %.17g %.17g %d", config.layers, config.hidden,
                               config.intermediate, config.heads, config.kv_heads, config.head_dim,
                               config.vocab, config.rope_theta, config.rms_norm_eps,
                               config.tied_embeddings ? 1 : 0));
  for (const std::string& name : weights.Names()) {
    const TensorView& tensor = *weights.FindAny(name);
    hash.AddText(name);
    hash.AddText(absl::StrCat(tensor.type_name, "[", absl::StrJoin(tensor.shape, ","), "]"));
    AddSample(tensor.bytes, hash);
  }
  const auto digest = hash.Finish();
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(digest.data()), kFingerprintBytes));
}

}  // namespace kvt
