#include "kvstore/index/block_index.h"

#include "tests/unit/kvstore/index/index_testing.h"

namespace kvt {
namespace {

using absl::StatusCode;

TEST_F(IndexTest, CallWithoutASession_IsNotFound) {
  MakeIndex(4);
  EXPECT_EQ(Lookup(1, Claim(1), Names(1, 1)).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(Reserve(1, Claim(1), Names(1, 1)).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(index_->Renew(now_, SessionId(1), {}).code(), StatusCode::kNotFound);
  EXPECT_EQ(index_->CloseSession(now_, SessionId(1)).code(), StatusCode::kNotFound);
  Release(1, 1);  // idempotent
}

TEST_F(IndexTest, BadGeometryOrRecordTooLarge_IsRefusedAtOpen) {
  MakeIndex(4);
  EXPECT_EQ(index_->OpenSession(now_, Spec(1, "w", 1, Geometry{.layers = 0})).code(),
            StatusCode::kInvalidArgument);
  const Geometry large{.layers = 64, .kv_heads = 8, .head_dim = 128};
  EXPECT_EQ(index_->OpenSession(now_, Spec(1, "w", 1, large)).code(),
            StatusCode::kFailedPrecondition);
  EXPECT_EQ(index_->OpenSession(now_, Spec(1, std::string(2000, 'w'))).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(index_->Stats().sessions, 0u);
}

TEST_F(IndexTest, MalformedNames_AreRefusedAndPinNothing) {
  MakeIndex(4);
  Open(1);
  Store(1, Claim(1), Names(1, 1));
  const auto broken = [](auto change) {
    std::vector<BlockName> names = Names(2, 1);
    change(names[1]);
    return names;
  };
  const std::vector<std::vector<BlockName>> cases = {
      broken([](BlockName& name) { name.tokens.clear(); }),
      broken([](BlockName& name) { name.tokens.resize(17); }),
      broken([](BlockName& name) { name.tokens.resize(15); }),
      broken([](BlockName& name) { name.provenance = Provenance::kBase; }),  // the ticket: exact only
      std::vector<BlockName>(kSequenceBlocksMax + 1, Names(1, 1)[0])};
  for (size_t i = 0; i < cases.size(); ++i) {
    EXPECT_EQ(Lookup(1, Claim(2), cases[i]).status().code(), StatusCode::kInvalidArgument) << i;
    EXPECT_EQ(Reserve(1, Claim(2), cases[i]).status().code(), StatusCode::kInvalidArgument) << i;
  }
  EXPECT_EQ(Reserve(1, Claim(2), {}, kSequenceBlocksMax + 1).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(Lookup(1, Claim(0), Names(1, 1)).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(index_->Stats().tickets, 1u);
  Release(1, 1);
  ExpectIdle();
}

TEST_F(IndexTest, HalfWrittenBlock_IsInvisibleUntilTheLastSliceOfBothPlanes) {
  MakeIndex(4);
  Open(1);
  const auto names = Names(1, 1);
  const auto reserved = Reserve(1, Claim(1), names);
  ASSERT_TRUE(reserved.ok());
  const uint64_t handle = (*reserved)[0].handle;
  const uint32_t slice = SmallGeometry().SliceBytes();
  // Two layers of two heads: whole layer 1, then head ranges of layer 0, in any order and twice.
  const std::vector<std::tuple<Plane, uint32_t, uint32_t>> pieces = {
      {Plane::kResidual, 2 * slice, 2 * slice},
      {Plane::kBase, slice, slice},
      {Plane::kBase, slice, slice},  // duplicate
      {Plane::kResidual, 0, 2 * slice},
      {Plane::kBase, 2 * slice, 2 * slice},
      {Plane::kBase, 0, slice}};
  for (const auto& [plane, offset, length] : pieces) {
    EXPECT_EQ(Hits(1, Claim(2), names), 0);
    EXPECT_EQ(SealOne(1, Claim(1), handle).outcome, IndexSealOutcome::kIncomplete);
    EXPECT_EQ(Read(1, Claim(1), handle), Access::kLost);
    const RecordRange range = Range(Claim(1), handle, plane, offset, length);
    uint64_t at = 0;
    ASSERT_EQ(index_->BeginWrite(SessionId(1), range, &at), Access::kOk);
    EXPECT_TRUE(index_->EndWrite(range, true));
  }
  EXPECT_EQ(SealOne(1, Claim(1), handle).outcome, IndexSealOutcome::kSealed);
  EXPECT_EQ(Hits(1, Claim(2), names), 1);
  EXPECT_EQ(Read(1, Claim(2), handle, Plane::kResidual), Access::kOk);
  EXPECT_EQ(index_->Stats().pins, 2u);
  Release(1, 1);
  Release(1, 2);
  ExpectIdle();
}

TEST_F(IndexTest, FailedSlice_KeepsTheBlockInvisibleUntilPushedAgain) {  // F6
  MakeIndex(4);
  Open(1);
  const uint64_t handle = (*Reserve(1, Claim(1), Names(1, 1)))[0].handle;
  const RecordRange base = Range(Claim(1), handle, Plane::kBase, 0, record_bytes());
  const RecordRange residual = Range(Claim(1), handle, Plane::kResidual, 0, record_bytes());
  uint64_t at = 0;
  ASSERT_EQ(index_->BeginWrite(SessionId(1), base, &at), Access::kOk);
  index_->EndWrite(base, true);
  // A second push of the same plane overlaps the last one and fails: its bytes are undefined.
  ASSERT_EQ(index_->BeginWrite(SessionId(1), base, &at), Access::kOk);
  ASSERT_EQ(index_->BeginWrite(SessionId(1), residual, &at), Access::kOk);
  index_->EndWrite(residual, true);
  EXPECT_EQ(Hits(1, Claim(2), Names(1, 1)), 0) << "sealed under a running push";
  index_->EndWrite(base, false);
  EXPECT_EQ(SealOne(1, Claim(1), handle).outcome, IndexSealOutcome::kIncomplete);
  EXPECT_EQ(Hits(1, Claim(2), Names(1, 1)), 0);
  ASSERT_EQ(index_->BeginWrite(SessionId(1), base, &at), Access::kOk);
  index_->EndWrite(base, true);
  EXPECT_EQ(Hits(1, Claim(2), Names(1, 1)), 1);
}

TEST_F(IndexTest, PushToASealedBlock_IsLostAndChangesNothing) {
  MakeIndex(4);
  Open(1);
  const uint64_t handle = (*Reserve(1, Claim(1), Names(1, 1)))[0].handle;
  Write(1, Claim(1), handle);
  uint64_t at = 0;
  EXPECT_EQ(index_->BeginWrite(SessionId(1),
                               Range(Claim(1), handle, Plane::kBase, 0, record_bytes()), &at),
            Access::kLost);
}

TEST_F(IndexTest, RangesAndOwners_AreChecked) {
  MakeIndex(4);
  Open(1);
  Open(2);
  const uint64_t handle = (*Reserve(1, Claim(1), Names(1, 1)))[0].handle;
  const uint32_t slice = SmallGeometry().SliceBytes();
  uint64_t at = 0;
  const auto write = [&](uint64_t session, const TicketClaim& claim, uint64_t target,
                         uint32_t offset, uint32_t length) {
    return index_->BeginWrite(SessionId(session),
                              Range(claim, target, Plane::kBase, offset, length), &at);
  };
  EXPECT_EQ(write(2, Claim(1), handle, 0, slice), Access::kRefused);
  EXPECT_EQ(write(1, Claim(9), handle, 0, slice), Access::kRefused);
  EXPECT_EQ(write(1, Claim(1, 0), handle, 0, slice), Access::kRefused);
  EXPECT_EQ(write(1, Claim(1), handle + (uint64_t{1} << 32), 0, slice), Access::kLost);
  EXPECT_EQ(write(1, Claim(1), handle + 1000, 0, slice), Access::kLost);
  EXPECT_EQ(write(1, Claim(1), handle, 0, 0), Access::kInvalid);
  EXPECT_EQ(write(1, Claim(1), handle, 64, slice), Access::kInvalid);
  EXPECT_EQ(write(1, Claim(1), handle, 0, slice + 64), Access::kInvalid);
  EXPECT_EQ(write(1, Claim(1), handle, record_bytes(), slice), Access::kInvalid);
  EXPECT_EQ(write(1, Claim(1), handle, slice, record_bytes()), Access::kInvalid);
  EXPECT_EQ(write(1, Claim(1), handle, 0xFFFFFC00u, 0xFFFFFC00u), Access::kInvalid);
  // Another ticket of the same session has no business in it, either.
  ASSERT_TRUE(Reserve(1, Claim(2), Names(1, 2)).ok());
  EXPECT_EQ(write(1, Claim(2), handle, 0, slice), Access::kRefused);
  Write(1, Claim(1), handle);
  EXPECT_EQ(Read(1, Claim(2), handle), Access::kRefused) << "no pin of that ticket";
  EXPECT_EQ(Read(2, Claim(1), handle), Access::kRefused);
  EXPECT_EQ(index_->BeginRead(SessionId(1),
                              Range(Claim(1), handle, Plane::kBase, 64, record_bytes()), &at),
            Access::kInvalid);
  EXPECT_EQ(index_->Stats().in_flight, 0u);
}

TEST_F(IndexTest, TwoWritersOfOneKey_FirstSealWinsAndTheOtherPointsToIt) {
  MakeIndex(4);
  Open(1);
  Open(2);
  const auto names = Names(2, 1);
  const auto a = Reserve(1, Claim(1), names);
  const auto b = Reserve(2, Claim(2), names);
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_NE((*a)[0].handle, (*b)[0].handle);
  EXPECT_FALSE((*b)[0].already_sealed);
  Write(2, Claim(2), (*b)[0].handle);
  Write(2, Claim(2), (*b)[1].handle);
  // The first writer completes block 0, and only asks about block 1.
  Write(1, Claim(1), (*a)[0].handle);
  for (int i = 0; i < 2; ++i) {
    const SealedBlock outcome = SealOne(1, Claim(1), (*a)[i].handle);
    EXPECT_EQ(outcome.outcome, IndexSealOutcome::kWinnerElsewhere);
    EXPECT_EQ(outcome.handle, (*b)[i].handle);
    EXPECT_EQ(SealOne(1, Claim(1), (*a)[i].handle).handle, (*b)[i].handle) << "asked again";
    EXPECT_EQ(SealOne(2, Claim(2), (*b)[i].handle).outcome, IndexSealOutcome::kSealed);
    EXPECT_EQ(Read(1, Claim(1), (*b)[i].handle), Access::kOk);
  }
  EXPECT_EQ(index_->Stats().used_bytes, 4 * record_bytes());
  EXPECT_EQ(index_->Stats().pins, 4u);
  const auto third = Reserve(2, Claim(3), names);
  ASSERT_TRUE(third.ok());
  EXPECT_TRUE((*third)[0].already_sealed && (*third)[1].already_sealed);
  for (const uint64_t ticket : {1, 2, 3}) Release(ticket == 1 ? 1 : 2, ticket);
  ExpectIdle();
}

TEST_F(IndexTest, ReserveRepeated_GivesTheSameHandles) {  // F15
  MakeIndex(4);
  Open(1);
  auto names = Names(2, 1);
  names.push_back(names[0]);  // and twice in one call
  const auto first = Reserve(1, Claim(1), names, 1);
  const auto second = Reserve(1, Claim(1), names, 1);
  ASSERT_TRUE(first.ok() && second.ok());
  for (int i = 0; i < 3; ++i) EXPECT_EQ((*first)[i].handle, (*second)[i].handle);
  EXPECT_EQ((*first)[0].handle, (*first)[2].handle);
  EXPECT_EQ(index_->Stats().reserved_bytes, 3 * 2 * record_bytes());
  Release(1, 1);
  Release(1, 1);
  ExpectIdle();
}

TEST_F(IndexTest, ContentThatDiffersFromTheTicket_IsAMissAndCounted) {
  MakeIndex(8);
  Open(1);
  Store(1, Claim(1, 1, "tenant-a"), Names(1, 1));
  EXPECT_EQ(Hits(1, Claim(2, 1, "tenant-b"), Names(1, 1)), 0);
  EXPECT_EQ(Hits(1, Claim(3), Names(1, 1)), 0);
  const auto changed = [](auto change) {
    std::vector<BlockName> names = Names(1, 1);
    change(names[0]);
    return names;
  };
  const TicketClaim same = Claim(4, 1, "tenant-a");
  EXPECT_EQ(Hits(1, same, changed([](BlockName& name) { ++name.tokens[15]; })), 0);
  EXPECT_EQ(Hits(1, same, changed([](BlockName& name) { name.parent.bytes[0] ^= 1; })), 0);
  EXPECT_EQ(Hits(1, same, changed([](BlockName& name) { name.ticket_private = true; })), 0);
  SessionSpec other = Spec(2, "other");
  other.numerics_id = "other";
  ASSERT_TRUE(index_->OpenSession(now_, other).ok());
  EXPECT_EQ(Hits(2, Claim(5, 1, "tenant-a"), Names(1, 1)), 0);
  EXPECT_EQ(index_->Stats().mismatched_blocks, 6u);
  EXPECT_EQ(Hits(1, Claim(6, 1, "tenant-a"), Names(1, 1)), 1);
  const IndexStats stats = index_->Stats();
  EXPECT_EQ(stats.lookup_blocks, 7u);
  EXPECT_EQ(stats.hit_blocks, 1u);
  // The right content under that key replaces the wrong one once sealed; who pins it keeps it.
  Store(1, Claim(7, 1, "tenant-b"), Names(1, 1));
  EXPECT_EQ(Hits(1, Claim(8, 1, "tenant-b"), Names(1, 1)), 1);
  index_->CheckInvariants();
  ASSERT_TRUE(index_->CloseSession(now_, SessionId(1)).ok());
  ASSERT_TRUE(index_->CloseSession(now_, SessionId(2)).ok());
  ExpectIdle();
  EXPECT_EQ(index_->Stats().blocks, 1u);
}

TEST_F(IndexTest, PrivateBlock_IsTheTicketsAloneAndGoesWithItsLastHolder) {
  MakeIndex(4);
  Open(1);
  Open(2);
  const auto names = Names(1, 1, 0, TicketId(1));
  Store(1, Claim(1), names);
  EXPECT_EQ(Hits(1, Claim(2), names), 0);
  EXPECT_EQ(Hits(2, Claim(1), names), 1);  // the decode worker of the same ticket
  Release(1, 1);
  EXPECT_EQ(index_->Stats().blocks, 1u);
  Release(2, 1);
  EXPECT_EQ(index_->Stats().blocks, 0u);
  Release(1, 2);
  ExpectIdle();
}

std::vector<BlockName> SparseNames(int count, int seed) {
  return Names(count, seed, 0, {}, Provenance::kSparse);
}

TicketClaim SparseClaim(uint64_t id) {
  return TicketClaim{TicketId(id), TicketEpoch(1), "", Provenance::kSparse};
}

TEST_F(IndexTest, ApproximateBlock_IsItsTicketsUntilItEnds_ThenOfThoseThatPermitIt) {
  MakeIndex(8);
  Open(1);
  Open(2);
  const auto names = SparseNames(2, 1);
  Store(1, SparseClaim(1), names);
  EXPECT_EQ(Hits(2, SparseClaim(1), names), 2) << "another worker of the same request";
  EXPECT_EQ(Hits(2, SparseClaim(2), names), 0) << "its writer lives";
  // The other computes the same tokens: blocks of its own, which it alone finds.
  Store(2, SparseClaim(2), names);
  EXPECT_EQ(Hits(2, SparseClaim(2), names), 2);
  EXPECT_EQ(Hits(1, SparseClaim(1), names), 2);
  EXPECT_EQ(Hits(1, SparseClaim(6), names), 0);
  EXPECT_EQ(index_->Stats().blocks, 4u);
  const auto firsts = Lookup(1, SparseClaim(1), names);
  const auto seconds = Lookup(2, SparseClaim(2), names);
  ASSERT_TRUE(firsts.ok() && seconds.ok());
  for (size_t i = 0; i < names.size(); ++i) EXPECT_NE((*firsts)[i].handle, (*seconds)[i].handle);
  // A corrupt one is found no more, by its ticket either.
  index_->Condemn((*seconds)[1].handle);
  EXPECT_EQ(Hits(2, SparseClaim(2), names), 1);
  EXPECT_EQ(index_->Stats().mismatched_blocks, 0u);
  index_->CheckInvariants();
  Release(1, 1);
  EXPECT_EQ(Hits(1, SparseClaim(3), names), 0) << "held through the other session";
  Release(2, 1);
  index_->CheckInvariants();
  EXPECT_EQ(Hits(1, SparseClaim(3), names), 2);
  EXPECT_EQ(Hits(2, SparseClaim(2), names), 2);
  // Who permits less does not even ask; the exact blocks of these tokens are others.
  EXPECT_EQ(Lookup(1, Claim(4), names).status().code(), StatusCode::kInvalidArgument);
  TicketClaim elastic = Claim(5);
  elastic.provenance_max = Provenance::kBase;
  EXPECT_EQ(Lookup(1, elastic, names).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(Hits(1, Claim(4), Names(2, 1)), 0);
  Release(2, 2);
  Release(1, 3);
  Release(1, 4);
  Release(1, 6);
  ExpectIdle();
  EXPECT_EQ(index_->Stats().blocks, 2u) << "the second writer's went with it";
}

TEST_F(IndexTest, ApproximateBlock_OfALapsedLease_IsPublishedToo) {
  MakeIndex(8);
  Open(1);
  const auto names = SparseNames(3, 1);
  Store(1, SparseClaim(1), names);
  now_ += absl::Seconds(11);
  index_->NoteTime(now_);
  index_->CheckInvariants();
  Open(2);
  EXPECT_EQ(Hits(2, SparseClaim(2), names), 3);
  Release(2, 2);
  ExpectIdle();
  EXPECT_EQ(index_->Stats().blocks, 3u);
}

// What a worker with two geometries of one model does: planes in one session, digests in the other.
TEST_F(IndexTest, TicketInSessionsOfTwoGeometries_HoldsBlocksOfBothAndRoomOfOne) {
  MakeIndex(8);
  Open(1);
  const Geometry small{.layers = 1, .kv_heads = 1, .head_dim = 32};
  ASSERT_TRUE(index_->OpenSession(now_, Spec(2, "w1/digest", 1, small)).ok());
  ASSERT_TRUE(Reserve(1, Claim(1), Names(2, 1), 3).ok());
  // Room of the other geometry is neither used nor given.
  const auto reserved = Reserve(2, Claim(1), Names(4, 2));
  ASSERT_TRUE(reserved.ok()) << reserved.status();
  EXPECT_EQ(index_->Stats().output_reserved_blocks, 3u);
  EXPECT_TRUE(absl::IsInvalidArgument(Reserve(2, Claim(1), {}, 1).status()));
  index_->CheckInvariants();
  for (const ReservedBlock& block : *reserved) {
    for (const Plane plane : {Plane::kBase, Plane::kResidual}) {
      const RecordRange range = Range(Claim(1), block.handle, plane, 0, small.RecordBytes());
      uint64_t offset = 0;
      ASSERT_EQ(index_->BeginWrite(SessionId(2), range, &offset), Access::kOk);
      EXPECT_TRUE(index_->EndWrite(range, true));
    }
  }
  EXPECT_EQ(index_->Stats().resident_bytes[0], 4 * small.RecordBytes());
  // Each geometry finds its own only.
  EXPECT_EQ(Hits(1, Claim(2), Names(4, 2)), 0);
  EXPECT_EQ(Hits(2, Claim(2), Names(4, 2)), 4);
  const auto again = Reserve(1, Claim(1), Names(4, 1));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(index_->Stats().output_reserved_blocks, 1u);
  Release(1, 1);
  index_->CheckInvariants();
  EXPECT_EQ(Hits(2, Claim(1), Names(4, 2)), 4) << "the other session still holds the ticket";
  Release(2, 1);
  Release(1, 2);
  Release(2, 2);
  index_->CheckInvariants();
  EXPECT_EQ(index_->Stats().tickets, 0u);
  EXPECT_EQ(index_->Stats().blocks, 4u);
  // Another model stays another model.
  SessionSpec other = Spec(3, "other");
  other.numerics_id = "other";
  ASSERT_TRUE(index_->OpenSession(now_, other).ok());
  ASSERT_TRUE(Lookup(1, Claim(3), Names(1, 1)).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(Lookup(3, Claim(3), Names(1, 1)).status()));
}

TEST_F(IndexTest, HigherEpoch_FencesTheLowerAndKeepsRoomAndPrivateBlocks) {
  MakeIndex(8);
  Open(1);
  Open(2);
  Store(1, Claim(1, 1), Names(2, 1));
  Store(1, Claim(1, 1), Names(1, 7, 0, TicketId(1)));
  const uint64_t unsealed = (*Reserve(1, Claim(1, 1), Names(1, 2), 3))[0].handle;
  const auto found = Lookup(2, Claim(1, 2), Names(1, 1));  // re-granted
  ASSERT_TRUE(found.ok());
  EXPECT_EQ((*found)[0].presence, BlockPresence::kExact);
  EXPECT_EQ(Read(1, Claim(1, 1), (*found)[0].handle), Access::kRefused);
  EXPECT_EQ(Read(2, Claim(1, 2), (*found)[0].handle), Access::kOk);
  EXPECT_EQ(SealOne(1, Claim(1, 1), unsealed).outcome, IndexSealOutcome::kLost);
  EXPECT_EQ(Lookup(1, Claim(1, 1), Names(1, 1)).status().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(Reserve(1, Claim(1, 1), Names(1, 1)).status().code(), StatusCode::kFailedPrecondition);
  Release(1, 1, 1);  // late; lets nothing of epoch 2 go
  IndexStats stats = index_->Stats();
  EXPECT_EQ(stats.pins, 1u);
  EXPECT_EQ(stats.output_reserved_blocks, 3u);
  EXPECT_EQ(stats.blocks, 3u);
  Release(2, 1, 2);
  ExpectIdle();
  EXPECT_EQ(Lookup(1, Claim(1, 1), Names(1, 1)).status().code(), StatusCode::kFailedPrecondition)
      << "fenced after the ticket is gone, too";
}

TEST_F(IndexTest, RenewalThatDoesNotListATicket_LetsItGo) {
  MakeIndex(8);
  Open(1);
  for (const uint64_t ticket : {1, 2, 3}) Store(1, Claim(ticket), Names(1, ticket));
  ASSERT_TRUE(Reserve(1, Claim(2), Names(1, 9), 2).ok());
  const std::vector<LiveTicket> live = {Live(1), Live(3, 2), Live(77)};
  ASSERT_TRUE(index_->Renew(now_, SessionId(1), live).ok());
  const IndexStats stats = index_->Stats();
  EXPECT_EQ(stats.tickets, 2u);
  EXPECT_EQ(stats.pins, 2u);
  EXPECT_EQ(stats.reserved_bytes, 0u);
  ASSERT_TRUE(index_->Renew(now_, SessionId(1), {}).ok());
  ExpectIdle();
}

TEST_F(IndexTest, LeaseEnds_PinsAndReservationsGo) {  // F1, F4
  MakeIndex(8);
  Open(1);
  Store(1, Claim(1), Names(2, 1));
  const uint64_t handle = (*Lookup(1, Claim(1), Names(1, 1)))[0].handle;
  ASSERT_TRUE(Reserve(1, Claim(1), Names(1, 2), 2).ok());
  now_ += absl::Seconds(9.9);
  index_->NoteTime(now_);
  EXPECT_EQ(Read(1, Claim(1), handle), Access::kOk);
  now_ += absl::Seconds(0.1);
  index_->NoteTime(now_);
  EXPECT_EQ(Read(1, Claim(1), handle), Access::kExpired);
  EXPECT_EQ(Lookup(1, Claim(1), Names(1, 1)).status().code(), StatusCode::kNotFound);
  ExpectIdle();
  EXPECT_EQ(index_->Stats().blocks, 2u);
}

TEST_F(IndexTest, RestartOfAWorker_EndsItsEarlierSession) {
  MakeIndex(8);
  ASSERT_TRUE(index_->OpenSession(now_, Spec(1, "w", 5)).ok());
  Store(1, Claim(1), Names(2, 1));
  EXPECT_EQ(index_->Stats().pins, 2u);
  ASSERT_TRUE(index_->OpenSession(now_, Spec(2, "w", 6)).ok());
  EXPECT_EQ(index_->Stats().pins, 0u);
  EXPECT_EQ(index_->Stats().sessions, 1u);
  EXPECT_EQ(index_->OpenSession(now_, Spec(3, "w", 5)).code(), StatusCode::kFailedPrecondition);
  ExpectIdle();
}

TEST_F(IndexTest, RecordInFlight_IsNotReusedAfterItsLeaseEnded) {  // F1
  MakeIndex(1);                                                    // room for four blocks
  Open(1);
  Store(1, Claim(1), Names(4, 1));
  const uint64_t handle = (*Lookup(1, Claim(1), Names(1, 1)))[0].handle;
  const RecordRange range = Range(Claim(1), handle, Plane::kBase, 0, record_bytes());
  uint64_t at = 0;
  ASSERT_EQ(index_->BeginRead(SessionId(1), range, &at), Access::kOk);
  ASSERT_TRUE(index_->CloseSession(now_, SessionId(1)).ok());
  Open(2);
  EXPECT_EQ(Reserve(2, Claim(2), Names(4, 2)).status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(index_->Stats().blocks, 4u) << "a refusal evicts nothing";
  ASSERT_TRUE(Reserve(2, Claim(2), Names(3, 2)).ok());
  EXPECT_EQ(events_.records.count(at), 1u) << "still readable";
  index_->EndRead(range.record_handle);
  ASSERT_TRUE(Reserve(2, Claim(2), Names(4, 2)).ok());
  EXPECT_EQ(events_.records.count(at), 0u);
  Release(2, 2);
  ExpectIdle();
}

TEST_F(IndexTest, WriteInFlight_KeepsTheRecordsOfAReservationThatWent) {
  MakeIndex(1);
  Open(1);
  const auto reserved = Reserve(1, Claim(1), Names(4, 1));
  const RecordRange range = Range(Claim(1), (*reserved)[0].handle, Plane::kBase, 0, record_bytes());
  uint64_t at = 0;
  ASSERT_EQ(index_->BeginWrite(SessionId(1), range, &at), Access::kOk);
  Release(1, 1);
  EXPECT_EQ(index_->Stats().evicting_bytes, 2 * record_bytes());
  EXPECT_EQ(Reserve(1, Claim(2), Names(4, 2)).status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(index_->BeginWrite(SessionId(1), range, &at), Access::kRefused);
  EXPECT_FALSE(index_->EndWrite(range, true));
  ASSERT_TRUE(Reserve(1, Claim(2), Names(4, 2)).ok());
  Release(1, 2);
  ExpectIdle();
}

TEST_F(IndexTest, LostResidual_IsBaseOnlyAndReplacedByANewHandle) {
  MakeIndex(4);
  Open(1);
  Store(1, Claim(1), Names(1, 1));
  const uint64_t old = (*Lookup(1, Claim(1), Names(1, 1)))[0].handle;
  EXPECT_FALSE(index_->TryDropResidual(old)) << "pinned";
  Release(1, 1);
  EXPECT_TRUE(index_->TryDropResidual(old));
  EXPECT_FALSE(index_->TryDropResidual(old));
  EXPECT_EQ(index_->Stats().used_bytes, record_bytes());
  EXPECT_EQ(index_->Stats().resident_bytes[1], 0u);
  const auto found = Lookup(1, Claim(2), Names(1, 1));
  EXPECT_EQ((*found)[0].presence, BlockPresence::kBaseOnly);
  EXPECT_EQ((*found)[0].offset[1], kNoOffset);
  EXPECT_EQ(Read(1, Claim(2), old, Plane::kResidual), Access::kLost);
  EXPECT_EQ(Read(1, Claim(2), old, Plane::kBase), Access::kOk);
  // Refilled: both planes, another handle; whoever pins the old one keeps it.
  const auto refill = Reserve(1, Claim(3), Names(1, 1));
  ASSERT_TRUE(refill.ok());
  EXPECT_FALSE((*refill)[0].already_sealed);
  Write(1, Claim(3), (*refill)[0].handle);
  EXPECT_EQ(SealOne(1, Claim(3), (*refill)[0].handle).outcome, IndexSealOutcome::kSealed);
  EXPECT_EQ((*Lookup(1, Claim(4), Names(1, 1)))[0].handle, (*refill)[0].handle);
  EXPECT_EQ(Read(1, Claim(2), old, Plane::kBase), Access::kOk);
  for (const uint64_t ticket : {2, 3, 4}) Release(1, ticket);
  ExpectIdle();
  EXPECT_EQ(index_->Stats().blocks, 1u);
  EXPECT_EQ(index_->Stats().base_only_blocks, 1u);
}

TEST_F(IndexTest, Stats_EqualTheAllocatorAndSumByState) {  // F17
  MakeIndex(4);
  Open(1);
  const auto reserved = Reserve(1, Claim(1), Names(3, 1), 2);
  ASSERT_TRUE(reserved.ok());
  Write(1, Claim(1), (*reserved)[0].handle);
  const RecordRange range = Range(Claim(1), (*reserved)[1].handle, Plane::kBase, 0, record_bytes());
  uint64_t at = 0;
  ASSERT_EQ(index_->BeginWrite(SessionId(1), range, &at), Access::kOk);
  const IndexStats stats = index_->Stats();
  EXPECT_EQ(stats.resident_bytes[0], record_bytes());
  EXPECT_EQ(stats.resident_bytes[1], record_bytes());
  EXPECT_EQ(stats.writing_bytes, 2 * record_bytes());
  EXPECT_EQ(stats.reserved_bytes, (1 + 2) * 2 * record_bytes());
  EXPECT_EQ(stats.output_reserved_blocks, 2u);
  EXPECT_EQ(stats.in_flight, 1u);
  EXPECT_EQ(stats.used_bytes, 10 * record_bytes());
  EXPECT_EQ(stats.capacity_bytes, 32 * record_bytes());
  index_->CheckInvariants();
  index_->EndWrite(range, false);
}

}  // namespace
}  // namespace kvt
