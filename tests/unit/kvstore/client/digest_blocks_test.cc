#include "kvstore/client/digest_blocks.h"

#include <numeric>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/layout/digest.h"

namespace kvt {
namespace {

KeyDomain Planes() {
  KeyDomain domain;
  domain.cluster_secret = "0123456789abcdef";
  domain.model_fingerprint = "f";
  domain.numerics_id = "n";
  domain.geometry = Geometry{.layers = 4, .kv_heads = 3, .head_dim = 64};
  domain.tenant = "t";
  domain.salt = "adapter";
  return domain;
}

DigestLayout Layout(const std::string& id, std::vector<uint32_t> bytes) {
  auto layout = DigestLayout::Create(id, std::move(bytes));
  EXPECT_TRUE(layout.ok()) << layout.status();
  return *std::move(layout);
}

TEST(DigestLayout, LayersWithAndWithoutDigests_LieInOrderInTwoWholeRecords) {
  const DigestLayout layout = Layout("c", {512, 0, 1024, 1024});
  EXPECT_EQ(layout.DigestBytes(), 2560u);
  EXPECT_EQ(layout.LayerOffset(0), 0u);
  EXPECT_EQ(layout.LayerOffset(1), 512u);
  EXPECT_EQ(layout.LayerBytes(1), 0u);
  EXPECT_EQ(layout.LayerOffset(2), 512u);
  EXPECT_EQ(layout.LayerOffset(3), 1536u);
  EXPECT_TRUE(layout.geometry().Validate().ok());
  EXPECT_EQ(layout.geometry().RecordBytes(), 2048u);
  EXPECT_EQ(layout.BlockBytes(), 4096u);
  EXPECT_EQ(Layout("c", {2048}).BlockBytes(), 2048u) << "no more than needed";
}

TEST(DigestLayout, BytesBeyondARecord_OrNone_AreRefused) {
  EXPECT_TRUE(absl::IsInvalidArgument(DigestLayout::Create("c", {0, 0}).status()));
  EXPECT_TRUE(DigestLayout::Create("c", {128 * 2048}).ok());
  const absl::Status status = DigestLayout::Create("c", {128 * 2048, 16}).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("262160 bytes"));
  EXPECT_TRUE(absl::IsInvalidArgument(
      DigestLayout::Create("c", {UINT32_MAX, UINT32_MAX, UINT32_MAX}).status()));
}

TEST(DigestLayout, KeysOfDigests_DifferByCalibrationAndFromThoseOfPlanes) {
  std::vector<int32_t> tokens(64);
  std::iota(tokens.begin(), tokens.end(), 5);
  const auto keys = [&](const KeyDomain& domain) { return KeyChain(domain).Prefix(tokens); };
  const std::vector<BlockKey> planes = keys(Planes());
  const std::vector<BlockKey> one = keys(Layout("one", {512}).Domain(Planes()));
  const std::vector<BlockKey> two = keys(Layout("two", {512}).Domain(Planes()));
  KeyDomain adapter = Planes();
  adapter.salt = "";
  const std::vector<BlockKey> other = keys(Layout("one", {512}).Domain(adapter));
  KeyDomain tenant = Planes();
  tenant.tenant = "u";
  const std::vector<BlockKey> others = keys(Layout("one", {512}).Domain(tenant));
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(keys(Layout("one", {512}).Domain(Planes()))[i], one[i]);
    EXPECT_NE(one[i], planes[i]);
    EXPECT_NE(one[i], two[i]);
    EXPECT_NE(one[i], other[i]);
    EXPECT_NE(one[i], others[i]);
  }
}

// Bytes in the order of version 1 (its salt had no number) are never read as those of this one.
TEST(DigestLayout, KeysOfDigests_DifferByTheVersionOfTheirLayout) {
  const KeyDomain now = Layout("one", {512}).Domain(Planes());
  EXPECT_EQ(now.salt, absl::StrCat("digest", kDigestLayoutVersion, ":one:adapter"));
  KeyDomain before = now;
  before.salt = "digest:one:adapter";
  const std::vector<int32_t> tokens(16, 5);
  EXPECT_NE(KeyChain(now).Prefix(tokens)[0], KeyChain(before).Prefix(tokens)[0]);
}

}  // namespace
}  // namespace kvt
