#include "kvstore/index/aged_turn.h"

#include "gtest/gtest.h"
#include "tests/unit/kvstore/index/index_testing.h"

namespace kvt {
namespace {

TEST(AgedTurn, OneAtATime_TheOthersByAge) {
  AgedTurn turn;
  const TicketId first(1);
  const TicketId young(2);
  const TicketId old(3);
  ASSERT_TRUE(turn.TryTake(T(10), first, T(9)));
  EXPECT_FALSE(turn.TryTake(T(10.1), young, T(8)));
  EXPECT_FALSE(turn.TryTake(T(10.2), old, T(5)));
  EXPECT_TRUE(turn.Bars(old, T(10.3)));
  EXPECT_FALSE(turn.Bars(first, T(10.3)));
  EXPECT_TRUE(turn.Served(first));
  EXPECT_FALSE(turn.TryTake(T(10.4), young, T(8)));  // the older one asked lately
  EXPECT_TRUE(turn.Bars(young, T(10.4)));
  EXPECT_FALSE(turn.Bars(old, T(10.4)));
  EXPECT_TRUE(turn.TryTake(T(10.5), old, T(5)));
}

TEST(AgedTurn, AskersThatStoppedAsking_HoldNobodyUp) {
  AgedTurn turn;
  ASSERT_TRUE(turn.TryTake(T(10), TicketId(1), T(5)));
  EXPECT_FALSE(turn.TryTake(T(10), TicketId(2), T(6)));
  EXPECT_EQ(turn.TakeLapsed(T(11)), std::nullopt);
  EXPECT_EQ(turn.TakeLapsed(T(13)), TicketId(1));
  EXPECT_EQ(turn.TakeLapsed(T(13)), std::nullopt);
  EXPECT_FALSE(turn.Bars(TicketId(3), T(13)));
  EXPECT_TRUE(turn.TryTake(T(13), TicketId(3), T(12)));
}

class IndexTurnTest : public IndexTest {
 protected:
  // OK and pending, or the refusal.
  absl::StatusOr<bool> Ask(uint64_t ticket, const std::vector<BlockName>& names,
                           absl::Duration waited, uint32_t output = 0) {
    std::vector<ReservedBlock> reserved;
    AgedAsk aged{.waited = waited};
    const absl::Status status = index_->Reserve(now_, SessionId(1), Claim(ticket), names, output,
                                                &reserved, &aged);
    index_->CheckInvariants();
    if (!status.ok()) return status;
    EXPECT_EQ(reserved.size(), aged.pending ? 0 : names.size());
    return aged.pending;
  }
};

TEST_F(IndexTurnTest, AgedTicket_KeepsWhatThereIsUntilAllIsThere) {
  MakeIndex(2);  // eight blocks
  Open(1);
  ASSERT_TRUE(Reserve(1, Claim(1), Names(5, 1)).ok());
  // Not aged: nothing is kept.
  EXPECT_TRUE(absl::IsResourceExhausted(Ask(2, Names(5, 2), absl::ZeroDuration(), 1).status()));
  EXPECT_EQ(index_->Stats().output_reserved_blocks, 0u);
  // Aged: the three that are free.
  EXPECT_EQ(*Ask(2, Names(5, 2), absl::Seconds(1), 1), true);
  EXPECT_EQ(index_->Stats().output_reserved_blocks, 3u);
  // Whoever was admitted goes on; a newcomer waits, though a block were free.
  Release(1, 1);
  EXPECT_TRUE(absl::IsResourceExhausted(Ask(3, Names(1, 3), absl::ZeroDuration()).status()));
  EXPECT_EQ(*Ask(2, Names(5, 2), absl::Seconds(2), 1), false);
  EXPECT_EQ(index_->Stats().output_reserved_blocks, 1u);
  EXPECT_TRUE(Ask(3, Names(1, 3), absl::ZeroDuration()).ok());
  Release(1, 2);
  Release(1, 3);
  ExpectIdle();
}

TEST_F(IndexTurnTest, AgedTicketThatCanNeverFit_KeepsNothingAndBarsNobody) {
  MakeIndex(1);  // four blocks
  Open(1);
  EXPECT_TRUE(absl::IsResourceExhausted(Ask(1, Names(5, 1), absl::Seconds(9)).status()));
  EXPECT_TRUE(Ask(2, Names(4, 2), absl::ZeroDuration()).ok());
  Release(1, 2);
  ExpectIdle();
}

TEST_F(IndexTurnTest, TurnThatLapses_GivesItsPartBack) {
  MakeIndex(1);
  Open(1);
  ASSERT_TRUE(Reserve(1, Claim(1), Names(2, 1)).ok());
  EXPECT_EQ(*Ask(2, Names(3, 2), absl::Seconds(1)), true);
  EXPECT_EQ(index_->Stats().output_reserved_blocks, 2u);
  now_ += kAgedTurnLapse;
  EXPECT_TRUE(Ask(3, Names(2, 3), absl::ZeroDuration()).ok());
  Release(1, 1);
  Release(1, 2);
  Release(1, 3);
  ExpectIdle();
}

TEST_F(IndexTurnTest, NeedThatShrank_GivesTheSurplusBack) {
  MakeIndex(1);
  Open(1);
  ASSERT_TRUE(Reserve(1, Claim(1), Names(2, 1)).ok());
  EXPECT_EQ(*Ask(2, Names(3, 2), absl::Seconds(1)), true);
  EXPECT_EQ(*Ask(2, Names(1, 2), absl::Seconds(1)), false);
  EXPECT_EQ(index_->Stats().output_reserved_blocks, 0u);
  Release(1, 1);
  Release(1, 2);
  ExpectIdle();
}

}  // namespace
}  // namespace kvt
