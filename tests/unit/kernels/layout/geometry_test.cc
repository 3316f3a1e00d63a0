#include "kernels/layout/geometry.h"

#include <gtest/gtest.h>

namespace kvt {
namespace {

TEST(Geometry, Sizes_FollowTheLayout) {
  const Geometry g{.layers = 30, .kv_heads = 3, .head_dim = 64};
  ASSERT_TRUE(g.Validate().ok());
  EXPECT_EQ(g.SliceBytes(), 2048u);
  EXPECT_EQ(g.SlotBytes(), 6144u);
  EXPECT_EQ(g.RecordBytes(), 184320u);
  EXPECT_EQ(g.SliceOffset(29, 2) + g.SliceBytes(), g.RecordBytes());
}

TEST(Geometry, Validate_NamesTheField) {
  EXPECT_NE((Geometry{.layers = 0, .kv_heads = 1, .head_dim = 64}).Validate().message().find("layers"),
            absl::string_view::npos);
  EXPECT_NE((Geometry{.layers = 1, .kv_heads = 1, .head_dim = 48}).Validate().message().find("head_dim"),
            absl::string_view::npos);
}

TEST(Geometry, Fingerprint_DiffersInEveryField) {
  const Geometry a{.layers = 30, .kv_heads = 3, .head_dim = 64};
  Geometry b = a;
  EXPECT_EQ(a.Fingerprint(), b.Fingerprint());
  b.layers = 31;
  EXPECT_NE(a.Fingerprint(), b.Fingerprint());
  b = a;
  b.kv_heads = 64;
  b.head_dim = 96;
  EXPECT_NE(a.Fingerprint(), b.Fingerprint());
}

}  // namespace
}  // namespace kvt
