// Room: eviction, refusal, room for output.
#include "tests/unit/kvstore/index/index_testing.h"

namespace kvt {
namespace {

using absl::StatusCode;

TEST_F(IndexTest, ReservationLargerThanTheStore_EvictsNothing) {  // F5
  MakeIndex(4);                                                   // 16 blocks
  Open(1);
  for (uint64_t ticket = 1; ticket <= 16; ++ticket) {
    Store(1, Claim(ticket), Names(1, ticket));
    Release(1, ticket);
  }
  // Everything is touched again, by others.
  for (uint64_t ticket = 1; ticket <= 16; ++ticket) {
    EXPECT_EQ(Hits(1, Claim(100 + ticket), Names(1, ticket)), 1);
    Release(1, 100 + ticket);
  }
  const auto oversized = Reserve(1, Claim(200), Names(17, 200));
  EXPECT_EQ(oversized.status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(Reserve(1, Claim(200), {}, 17).status().code(), StatusCode::kResourceExhausted);
  IndexStats stats = index_->Stats();
  EXPECT_EQ(stats.evicted_blocks, 0u);
  EXPECT_EQ(stats.blocks, 16u);
  EXPECT_EQ(stats.refused, 2u);
  ExpectIdle();
  // What fits finds its victims, although all were touched.
  ASSERT_TRUE(Reserve(1, Claim(201), Names(16, 201)).ok());
  EXPECT_EQ(index_->Stats().evicted_blocks, 16u);
}

TEST_F(IndexTest, PinnedBlocks_AreNeverVictimsAndRefusedWorkMayBeRetried) {
  MakeIndex(4);
  Open(1);
  Store(1, Claim(1), Names(10, 1));  // stays pinned
  Store(1, Claim(2), Names(6, 2));
  Release(1, 2);
  auto seven = Names(7, 3);
  EXPECT_EQ(Reserve(1, Claim(3), seven).status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(index_->Stats().evicted_blocks, 0u);
  Release(1, 1);
  EXPECT_TRUE(Reserve(1, Claim(3), seven).ok());
  EXPECT_EQ(index_->Stats().evicted_blocks, 7u);
}

TEST_F(IndexTest, ExistingBlocksOfAReservation_AreNotEvictedForItsNewOnes) {
  MakeIndex(4);
  Open(1);
  Store(1, Claim(1), Names(16, 1));
  Release(1, 1);
  // Two exist, fourteen are new: the two must stay.
  auto names = Names(14, 2);
  const auto existing = Names(2, 1);
  names.insert(names.end(), existing.begin(), existing.end());
  const auto reserved = Reserve(1, Claim(2), names);
  ASSERT_TRUE(reserved.ok()) << reserved.status();
  EXPECT_TRUE((*reserved)[14].already_sealed && (*reserved)[15].already_sealed);
  EXPECT_EQ(index_->Stats().evicted_blocks, 14u);
  Release(1, 2);
  // One too many: refused, and the two are unpinned again.
  auto more = Names(15, 3);
  more.insert(more.end(), existing.begin(), existing.end());
  EXPECT_EQ(Reserve(1, Claim(3), more).status().code(), StatusCode::kResourceExhausted);
  ExpectIdle();
  EXPECT_EQ(index_->Stats().blocks, 2u);
}

TEST_F(IndexTest, OneSequence_IsEvictedFromItsEnd) {
  MakeIndex(4);
  Open(1);
  Store(1, Claim(1), Names(16, 1));
  Release(1, 1);
  ASSERT_TRUE(Reserve(1, Claim(2), Names(6, 2)).ok());
  const auto found = Lookup(1, Claim(3), Names(16, 1));
  for (int i = 0; i < 16; ++i) {
    EXPECT_EQ((*found)[i].presence, i < 10 ? BlockPresence::kExact : BlockPresence::kAbsent) << i;
  }
}

TEST_F(IndexTest, BlocksHitByASecondTicket_OutliveAScan) {
  MakeIndex(4);
  Open(1);
  Store(1, Claim(1), Names(4, 1));
  Release(1, 1);
  EXPECT_EQ(Hits(1, Claim(1), Names(4, 1)), 4);  // its own ticket again: no second touch
  Release(1, 1);
  Store(1, Claim(2), Names(4, 2));
  Release(1, 2);
  EXPECT_EQ(Hits(1, Claim(3), Names(4, 1)), 4);  // another ticket: kept over the rest
  Release(1, 3);
  for (uint64_t ticket = 10; ticket < 40; ++ticket) {
    Store(1, Claim(ticket), Names(4, ticket));
    Release(1, ticket);
  }
  EXPECT_EQ(Hits(1, Claim(99), Names(4, 1)), 4);
  EXPECT_EQ(Hits(1, Claim(99), Names(4, 2)), 0);
}

TEST_F(IndexTest, LeastRecentlyUsed_GoesFirst) {
  MakeIndex(4);
  Open(1);
  for (uint64_t ticket = 1; ticket <= 4; ++ticket) {
    Store(1, Claim(ticket), Names(4, ticket));
    Release(1, ticket);
  }
  EXPECT_EQ(Hits(1, Claim(1), Names(4, 1)), 4);  // touched: now the most recent
  Release(1, 1);
  ASSERT_TRUE(Reserve(1, Claim(9), Names(8, 9)).ok());
  EXPECT_EQ(Hits(1, Claim(50), Names(4, 1)), 4);
  EXPECT_EQ(Hits(1, Claim(50), Names(4, 2)), 0);
  EXPECT_EQ(Hits(1, Claim(50), Names(4, 3)), 0);
  EXPECT_EQ(Hits(1, Claim(50), Names(4, 4)), 4);
}

TEST_F(IndexTest, RoomForOutput_IsHeldUsedUpAndGivenBack) {
  MakeIndex(4);
  Open(1);
  Open(2);
  ASSERT_TRUE(Reserve(1, Claim(1), Names(4, 1), 8).ok());
  EXPECT_EQ(index_->Stats().output_reserved_blocks, 8u);
  EXPECT_EQ(Reserve(2, Claim(2), Names(5, 2)).status().code(), StatusCode::kResourceExhausted);
  ASSERT_TRUE(Reserve(2, Claim(2), Names(4, 2)).ok());  // the store is full now
  // The decode worker of ticket 1 takes over; the prefill worker lets go; room stays.
  ASSERT_TRUE(Lookup(2, Claim(1), Names(4, 1)).ok());
  Release(1, 1);
  EXPECT_EQ(index_->Stats().output_reserved_blocks, 8u);
  for (int i = 0; i < 8; ++i) Store(2, Claim(1), Names(1, 1, 4 + i));
  EXPECT_EQ(index_->Stats().output_reserved_blocks, 0u);
  Store(2, Claim(1), Names(4, 1, 12));  // what the prefill worker gave back
  EXPECT_EQ(Reserve(2, Claim(1), Names(1, 1, 16)).status().code(), StatusCode::kResourceExhausted);
  Release(2, 1);
  Release(2, 2);
  ExpectIdle();
}

TEST_F(IndexTest, SlabsOfAnotherModel_AreTakenWhenTheyCanBeEmptied) {
  MakeIndex(4);
  Open(1);
  SessionSpec wide = Spec(2, "wide");
  wide.geometry.layers = 4;  // records twice as large: two blocks a slab
  ASSERT_TRUE(index_->OpenSession(now_, wide).ok());
  for (uint64_t ticket = 1; ticket <= 4; ++ticket) Store(1, Claim(ticket), Names(4, ticket));
  Release(1, 1);  // slab 0 can be emptied
  Release(1, 3);  // slab 2, too; it is warmer
  EXPECT_EQ(Reserve(2, Claim(10), Names(5, 10)).status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(index_->Stats().evicted_blocks, 0u);
  ASSERT_TRUE(Reserve(2, Claim(10), Names(2, 10)).ok());
  EXPECT_EQ(index_->Stats().evicted_blocks, 4u);
  EXPECT_EQ(Hits(1, Claim(20), Names(4, 1)), 0);
  EXPECT_EQ(Hits(1, Claim(20), Names(4, 3)), 4);
  index_->CheckInvariants();
}

TEST_F(IndexTest, ModelThatComesLateToAFullArena_GetsItsFloorAndNoMoreOfTheOthers) {
  MakeIndex(64);  // a floor of four slabs
  Open(1);
  SessionSpec wide = Spec(2, "wide");
  wide.geometry.layers = 4;  // records twice as large: two blocks a slab
  ASSERT_TRUE(index_->OpenSession(now_, wide).ok());
  for (uint64_t ticket = 1; ticket <= 64; ++ticket) {
    Store(1, Claim(ticket), Names(4, ticket));
    Release(1, ticket);
  }
  // One sequence after the other, each cold when the next one comes.
  const auto come_and_go = [&](uint64_t ticket) {
    std::vector<ReservedBlock> reserved;
    ASSERT_TRUE(index_->Reserve(now_, SessionId(2), Claim(ticket), Names(2, 500 + ticket), 0,
                                &reserved)
                    .ok());
    for (const ReservedBlock& block : reserved) {
      for (const Plane plane : {Plane::kBase, Plane::kResidual}) {
        RecordRange range;
        range.ticket = TicketId(ticket);
        range.epoch = TicketEpoch(1);
        range.record_handle = PlaneRecordHandle(block.handle, plane);
        range.length = wide.geometry.RecordBytes();
        uint64_t offset = 0;
        ASSERT_EQ(index_->BeginWrite(SessionId(2), range, &offset), Access::kOk);
        ASSERT_TRUE(index_->EndWrite(range, true));
      }
    }
    Release(2, ticket);
  };
  for (uint64_t ticket = 101; ticket <= 120; ++ticket) come_and_go(ticket);
  const auto found = [&](uint64_t session, uint64_t ticket, int count, int seed) {
    return Hits(session, Claim(ticket), Names(count, seed));
  };
  int late = 0;
  for (uint64_t ticket = 101; ticket <= 120; ++ticket) {
    late += found(2, 900, 2, static_cast<int>(500 + ticket));
  }
  EXPECT_EQ(late, 4 * 2) << "the last of each of its four slabs";
  int first = 0;
  for (int seed = 1; seed <= 64; ++seed) first += found(1, 901, 4, seed);
  EXPECT_EQ(first, 60 * 4) << "four slabs of the other went, the coldest";
  index_->CheckInvariants();
}

TEST_F(IndexTest, HundredThousandCancelledRequests_LeaveNothing) {  // F4
  MakeIndex(64);
  Open(1);
  Store(1, Claim(1), Names(32, 1));
  Release(1, 1);
  const auto shared = Names(32, 1);
  std::vector<FoundBlock> found;
  std::vector<ReservedBlock> reserved;
  const auto fresh = Names(4, 2);
  for (uint64_t i = 0; i < 100000; ++i) {
    const TicketClaim claim = Claim(10 + i);
    const absl::Span<const BlockName> blocks = absl::MakeConstSpan(shared).subspan(0, 1 + i % 8);
    ASSERT_TRUE(index_->Lookup(now_, SessionId(1), claim, blocks, &found).ok());
    switch (i % 4) {
      case 0:  // cancelled after lookup
        Release(1, claim.id.value());
        break;
      case 1:  // cancelled while writing
        ASSERT_TRUE(index_->Reserve(now_, SessionId(1), claim, fresh, 2, &reserved).ok());
        Release(1, claim.id.value());
        break;
      case 2:  // rejected for want of room
        ASSERT_FALSE(index_->Reserve(now_, SessionId(1), claim, {}, 4000, &reserved).ok());
        Release(1, claim.id.value());
        break;
      case 3:  // crashed: never released, not listed by the next renewal
        if (i % 1000 == 3) {
          now_ += absl::Seconds(3);
          ASSERT_TRUE(index_->Renew(now_, SessionId(1), {}).ok());
        }
        break;
    }
  }
  now_ += absl::Seconds(10);
  index_->NoteTime(now_);
  ExpectIdle();
  EXPECT_EQ(index_->Stats().sessions, 0u);
  EXPECT_EQ(index_->Stats().blocks, 32u);
}

}  // namespace
}  // namespace kvt
