#include "kvstore/index/block_key.h"

#include <openssl/evp.h>
#include <openssl/params.h>

#include <cstring>

#include "absl/strings/escaping.h"
#include "kernels/base/check.h"

// Messages that are authenticated (integers little-endian):
//   root     "kvtide/root/1" fields, each as length u32 and bytes: model fingerprint, numerics id,
//            geometry fingerprint (u64), tenant, salt
//   block    'B' parent[16] provenance[1] tokens n[4] ids[4 n]
//   private  'P' parent[16] provenance[1] tokens n[4] ids[4 n] ticket[8]
namespace kvt {
namespace {

class MessageBuilder {
 public:
  void U32(uint32_t value) { Raw(&value, sizeof(value)); }
  void U64(uint64_t value) { Raw(&value, sizeof(value)); }
  void Field(absl::string_view text) {
    U32(static_cast<uint32_t>(text.size()));
    bytes_.append(text.data(), text.size());
  }
  void Raw(const void* data, size_t size) { bytes_.append(static_cast<const char*>(data), size); }
  [[nodiscard]] absl::string_view bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

}  // namespace

// A keyed HMAC-SHA-256 context, duplicated for every message: fetching and keying once costs far
// less than per message. Immutable after construction.
class KeyMac {
 public:
  explicit KeyMac(absl::string_view secret) {
    EVP_MAC* mac = EVP_MAC_fetch(nullptr, "HMAC", nullptr);
    KVT_CHECK(mac != nullptr, "OpenSSL has no HMAC");
    context_ = EVP_MAC_CTX_new(mac);
    EVP_MAC_free(mac);
    char digest[] = "SHA256";
    const OSSL_PARAM params[] = {OSSL_PARAM_construct_utf8_string("digest", digest, 0),
                                 OSSL_PARAM_construct_end()};
    // An empty key is legal for HMAC; OpenSSL takes a null pointer for "keep the key".
    static constexpr unsigned char kEmpty = 0;
    const auto* key =
        secret.empty() ? &kEmpty : reinterpret_cast<const unsigned char*>(secret.data());
    KVT_CHECK(context_ != nullptr && EVP_MAC_init(context_, key, secret.size(), params) == 1,
              "HMAC-SHA-256 cannot be keyed");
  }
  ~KeyMac() { EVP_MAC_CTX_free(context_); }
  KeyMac(const KeyMac&) = delete;
  KeyMac& operator=(const KeyMac&) = delete;

  [[nodiscard]] BlockKey Compute(absl::string_view message) const {
    EVP_MAC_CTX* context = EVP_MAC_CTX_dup(context_);
    KVT_CHECK(context != nullptr, "out of memory");
    unsigned char digest[32];
    size_t size = 0;
    const bool ok = EVP_MAC_update(context, reinterpret_cast<const unsigned char*>(message.data()),
                                   message.size()) == 1 &&
                    EVP_MAC_final(context, digest, &size, sizeof(digest)) == 1;
    EVP_MAC_CTX_free(context);
    KVT_CHECK(ok && size == sizeof(digest), "HMAC-SHA-256 failed");
    BlockKey key;
    std::memcpy(key.bytes.data(), digest, key.bytes.size());
    return key;
  }

 private:
  EVP_MAC_CTX* context_ = nullptr;
};

namespace {

BlockKey KeyOf(const KeyMac& mac, uint8_t kind, const BlockKey& parent,
               absl::Span<const int32_t> tokens, Provenance provenance, TicketId ticket) {
  KVT_CHECK(!tokens.empty() && tokens.size() <= kBlockTokens, "tokens ", tokens.size());
  uint8_t message[1 + 16 + 1 + 4 + 4 * kBlockTokens + 8];
  size_t size = 0;
  const auto add = [&](const void* data, size_t bytes) {
    std::memcpy(message + size, data, bytes);
    size += bytes;
  };
  add(&kind, 1);
  add(parent.bytes.data(), parent.bytes.size());
  add(&provenance, 1);
  const auto count = static_cast<uint32_t>(tokens.size());
  add(&count, sizeof(count));
  add(tokens.data(), tokens.size() * sizeof(int32_t));
  if (kind == 'P') {
    const uint64_t id = ticket.value();
    add(&id, sizeof(id));
  }
  return mac.Compute(absl::string_view(reinterpret_cast<const char*>(message), size));
}

}  // namespace

uint64_t BlockKey::Hash64() const {
  uint64_t value;
  std::memcpy(&value, bytes.data(), sizeof(value));
  return value;
}

std::string BlockKey::ToHex() const {
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
}

KeyChain::KeyChain(const KeyDomain& domain)
    : mac_(std::make_shared<const KeyMac>(domain.cluster_secret)) {
  MessageBuilder message;
  message.Raw("kvtide/root/1", 13);
  message.Field(domain.model_fingerprint);
  message.Field(domain.numerics_id);
  message.U64(domain.geometry.Fingerprint());
  message.Field(domain.tenant);
  message.Field(domain.salt);
  root_ = mac_->Compute(message.bytes());
}

BlockKey KeyChain::Next(const BlockKey& parent, absl::Span<const int32_t> tokens,
                        Provenance provenance) const {
  KVT_CHECK(tokens.size() == kBlockTokens, "tokens ", tokens.size());
  return KeyOf(*mac_, 'B', parent, tokens, provenance, TicketId());
}

BlockKey KeyChain::NextPrivate(const BlockKey& parent, absl::Span<const int32_t> tokens,
                               Provenance provenance, TicketId ticket) const {
  return KeyOf(*mac_, 'P', parent, tokens, provenance, ticket);
}

std::vector<BlockKey> KeyChain::Prefix(absl::Span<const int32_t> tokens) const {
  std::vector<BlockKey> keys;
  keys.reserve(tokens.size() / kBlockTokens);
  BlockKey parent = root_;
  for (size_t at = 0; at + kBlockTokens <= tokens.size(); at += kBlockTokens) {
    parent = Next(parent, tokens.subspan(at, kBlockTokens), Provenance::kExact);
    keys.push_back(parent);
  }
  return keys;
}

}  // namespace kvt
