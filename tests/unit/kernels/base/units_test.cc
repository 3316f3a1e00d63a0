#include "kernels/base/units.h"

#include <gtest/gtest.h>

namespace kvt {
namespace {

TEST(Units, FormatBytes_PicksTheUnit) {
  EXPECT_EQ(FormatBytes(512), "512 B");
  EXPECT_EQ(FormatBytes(3 * kKiB / 2), "1.5 KiB");
  EXPECT_EQ(FormatBytes(12 * kMiB), "12.0 MiB");
  EXPECT_EQ(FormatBytes(3 * kGiB / 2), "1.50 GiB");
}

TEST(Units, RoundUpAndCeilDiv) {
  EXPECT_EQ(RoundUp(0, 16), 0u);
  EXPECT_EQ(RoundUp(17, 16), 32u);
  EXPECT_EQ(CeilDiv(17, 16), 2u);
  EXPECT_EQ(CeilDiv(16, 16), 1u);
}

}  // namespace
}  // namespace kvt
