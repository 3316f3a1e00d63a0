#include "kvstore/index/block_key.h"

#include <gtest/gtest.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <cstring>
#include <numeric>
#include <set>

#include "kvstore/index/block_handle.h"

namespace kvt {
namespace {

KeyDomain Domain() {
  KeyDomain domain;
  domain.cluster_secret = "secret";
  domain.model_fingerprint = "abc";
  domain.numerics_id = "cpu/bf16";
  domain.geometry = Geometry{.layers = 2, .kv_heads = 3, .head_dim = 64};
  return domain;
}

std::vector<int32_t> Tokens(int n) {
  std::vector<int32_t> tokens(n);
  std::iota(tokens.begin(), tokens.end(), 100);
  return tokens;
}

TEST(BlockKey, Next_EqualsHmacSha256OfTheDocumentedMessage) {
  const KeyChain chain(Domain());
  const std::vector<int32_t> tokens = Tokens(16);
  std::string message = "B";
  const BlockKey root = chain.Root();
  message.append(reinterpret_cast<const char*>(root.bytes.data()), 16);
  message.push_back('\0');
  const uint32_t count = 16;
  message.append(reinterpret_cast<const char*>(&count), 4);
  message.append(reinterpret_cast<const char*>(tokens.data()), 64);
  unsigned char digest[32];
  unsigned int size = 0;
  ASSERT_NE(HMAC(EVP_sha256(), "secret", 6, reinterpret_cast<const unsigned char*>(message.data()),
                 message.size(), digest, &size),
            nullptr);
  const BlockKey key = chain.Next(root, tokens, Provenance::kExact);
  EXPECT_EQ(std::memcmp(key.bytes.data(), digest, 16), 0);
}

TEST(BlockKey, AnyInputChanged_GivesAnotherKey) {
  std::set<std::string> seen;
  const std::vector<int32_t> tokens = Tokens(16);
  const auto add = [&](const KeyDomain& domain) {
    const KeyChain chain(domain);
    EXPECT_TRUE(seen.insert(chain.Root().ToHex()).second);
    const BlockKey exact = chain.Next(chain.Root(), tokens, Provenance::kExact);
    EXPECT_TRUE(seen.insert(exact.ToHex()).second);
    EXPECT_TRUE(seen.insert(chain.Next(chain.Root(), tokens, Provenance::kBase).ToHex()).second);
    EXPECT_TRUE(seen.insert(chain.Next(exact, tokens, Provenance::kExact).ToHex()).second);
    for (const uint64_t ticket : {1, 2}) {
      EXPECT_TRUE(
          seen.insert(chain.NextPrivate(chain.Root(), tokens, Provenance::kExact, TicketId(ticket))
                          .ToHex())
              .second);
    }
  };
  KeyDomain domain = Domain();
  add(domain);
  domain.cluster_secret = "other";
  add(domain);
  domain = Domain();
  domain.tenant = "t";
  add(domain);
  domain = Domain();
  domain.salt = "t";  // the same text in another field
  add(domain);
  domain = Domain();
  domain.geometry.layers = 3;
  add(domain);
  domain = Domain();
  domain.model_fingerprint = "abccpu";  // fields are length-prefixed: no shift between them
  domain.numerics_id = "/bf16";
  add(domain);
  domain = Domain();
  domain.cluster_secret = "";
  add(domain);
}

TEST(BlockKey, Prefix_CoversFullBlocksOnly) {
  const KeyChain chain(Domain());
  const std::vector<int32_t> tokens = Tokens(47);
  const std::vector<BlockKey> keys = chain.Prefix(tokens);
  ASSERT_EQ(keys.size(), 2u);
  EXPECT_EQ(keys[0], chain.Next(chain.Root(), absl::MakeConstSpan(tokens).subspan(0, 16),
                                Provenance::kExact));
  EXPECT_EQ(keys[1],
            chain.Next(keys[0], absl::MakeConstSpan(tokens).subspan(16, 16), Provenance::kExact));
  EXPECT_TRUE(chain.Prefix({}).empty());
}

TEST(BlockHandle, PlanesOfABlock_ShareGenerationAndDiffer) {
  const uint64_t handle = MakeBlockHandle(7, 9);
  EXPECT_EQ(BlockNumberOf(handle), 7u);
  EXPECT_EQ(GenerationOfHandle(handle), 9u);
  for (const Plane plane : {Plane::kBase, Plane::kResidual}) {
    const uint64_t record = PlaneRecordHandle(handle, plane);
    EXPECT_EQ(BlockOfRecord(record), 7u);
    EXPECT_EQ(PlaneOfRecord(record), plane);
    EXPECT_EQ(GenerationOfHandle(record), 9u);
    EXPECT_EQ(static_cast<uint32_t>(record), 14 + static_cast<uint32_t>(plane));
  }
}

}  // namespace
}  // namespace kvt
