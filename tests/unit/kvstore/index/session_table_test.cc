#include "kvstore/index/session_table.h"

#include <gtest/gtest.h>

#include "kernels/base/limits.h"

namespace kvt {
namespace {

absl::Time At(double seconds) { return absl::UnixEpoch() + absl::Seconds(seconds); }

Session Make(uint64_t id, const std::string& worker, uint64_t boot) {
  Session session;
  session.id = SessionId(id);
  session.worker = worker;
  session.worker_epoch = BootEpoch(boot);
  return session;
}

TEST(SessionTable, EarlierBootOfAWorker_IsFencedByTheLater) {
  SessionTable table(absl::Seconds(10), absl::Seconds(1));
  ASSERT_TRUE(table.Open(At(0), Make(1, "w", 5)).ok());
  const auto earlier = table.Open(At(0), Make(2, "w", 4));
  EXPECT_EQ(earlier.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(earlier.status().message().find("boot 5"), absl::string_view::npos);
  const auto later = table.Open(At(0), Make(3, "w", 6));
  ASSERT_TRUE(later.ok());
  EXPECT_EQ(*later, SessionId(1));  // the caller ends it
  table.Close(SessionId(1));
  EXPECT_NE(table.Find(SessionId(3)), nullptr);
  EXPECT_EQ(table.Open(At(0), Make(4, "w", 5)).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(SessionTable, TooManySessions_AreRefused) {
  SessionTable table(absl::Seconds(10), absl::Seconds(1));
  for (int i = 1; i <= kStoreSessionsMax; ++i) {
    ASSERT_TRUE(table.Open(At(0), Make(i, std::to_string(i), 1)).ok());
  }
  EXPECT_EQ(table.Open(At(0), Make(9999, "more", 1)).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST(SessionTable, LeaseNotRenewed_EndsOnTime) {
  SessionTable table(absl::Seconds(10), absl::Seconds(1));
  EXPECT_TRUE(table.NoteTime(At(0)).empty());
  ASSERT_TRUE(table.Open(At(0), Make(1, "a", 1)).ok());
  ASSERT_TRUE(table.Open(At(0), Make(2, "b", 1)).ok());
  for (double t = 0.5; t < 10; t += 0.5) {
    EXPECT_TRUE(table.NoteTime(At(t)).empty()) << t;
    if (t == 6) table.Renew(At(t), *table.Find(SessionId(2)));
  }
  EXPECT_EQ(table.NoteTime(At(10)), std::vector<SessionId>{SessionId(1)});
  table.Close(SessionId(1));
  for (double t = 10.5; t < 16; t += 0.5) EXPECT_TRUE(table.NoteTime(At(t)).empty()) << t;
  EXPECT_EQ(table.NoteTime(At(16)), std::vector<SessionId>{SessionId(2)});
}

TEST(SessionTable, StoreThatStalled_ExtendsLeasesByTheStall) {
  SessionTable table(absl::Seconds(10), absl::Seconds(1));
  EXPECT_TRUE(table.NoteTime(At(0)).empty());
  ASSERT_TRUE(table.Open(At(0), Make(1, "a", 1)).ok());
  EXPECT_TRUE(table.NoteTime(At(60)).empty());  // stopped for a minute
  EXPECT_EQ(table.stalled(), absl::Seconds(60));
  for (double t = 60.5; t < 70; t += 0.5) EXPECT_TRUE(table.NoteTime(At(t)).empty()) << t;
  EXPECT_EQ(table.NoteTime(At(70)).size(), 1u);
}

}  // namespace
}  // namespace kvt
