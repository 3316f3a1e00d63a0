#include "kvstore/client/ticket_gate.h"

#include "gtest/gtest.h"

namespace kvt {
namespace {

const absl::Time kNow = absl::FromUnixSeconds(1'800'000'000);

ModelInfo Model() {
  ModelInfo model;
  model.name = "small";
  model.fingerprint = "f00d";
  model.numerics_id = "1 cpu";
  return model;
}

Ticket GoodTicket() {
  Ticket ticket;
  ticket.id = TicketId(5);
  ticket.epoch = TicketEpoch(1);
  ticket.model = "small";
  ticket.model_fingerprint = "f00d";
  ticket.numerics_id = "1 cpu";
  ticket.prompt_tokens = 10;
  ticket.output_tokens_max = 4;
  ticket.prefill_worker = "prefill-0";
  ticket.decode_worker = "decode-0";
  ticket.capability = std::string(16, 'c');
  ticket.present_by_unix_ms = absl::ToUnixMillis(kNow + absl::Seconds(5));
  return ticket;
}

class TicketGateTest : public testing::Test {
 protected:
  absl::Status Check(const TicketGate& gate, const Ticket& ticket, absl::Time now = kNow) {
    return gate.Check(signer_->Sign(ticket), now).status();
  }
  std::unique_ptr<TicketSigner> signer_ = TicketSigner::Generate();
};

TEST_F(TicketGateTest, Check_NotRegisteredYet_Unavailable) {
  const TicketGate gate(NodeKind::kPrefill, "prefill-0", Model());
  EXPECT_TRUE(absl::IsUnavailable(Check(gate, GoodTicket())));
}

TEST_F(TicketGateTest, Check_GoodTicket_IsHeldByItsHolderOnly) {
  TicketGate prefill(NodeKind::kPrefill, "prefill-0", Model());
  ASSERT_TRUE(prefill.SetKey(signer_->PublicKey()).ok());
  const auto held = prefill.Check(signer_->Sign(GoodTicket()), kNow);
  ASSERT_TRUE(held.ok()) << held.status();
  EXPECT_EQ(held->ticket.id, TicketId(5));
  EXPECT_EQ(held->ref().epoch, TicketEpoch(1));
  TicketGate decode(NodeKind::kDecode, "decode-0", Model());
  ASSERT_TRUE(decode.SetKey(signer_->PublicKey()).ok());
  EXPECT_TRUE(Check(decode, GoodTicket()).ok());
  TicketGate other(NodeKind::kDecode, "decode-1", Model());
  ASSERT_TRUE(other.SetKey(signer_->PublicKey()).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(Check(other, GoodTicket())));
}

TEST_F(TicketGateTest, Check_WrongInOneThing_IsRefused) {
  TicketGate gate(NodeKind::kPrefill, "prefill-0", Model());
  ASSERT_TRUE(gate.SetKey(signer_->PublicKey()).ok());
  Ticket ticket = GoodTicket();
  ticket.model = "large";
  EXPECT_TRUE(absl::IsFailedPrecondition(Check(gate, ticket)));
  ticket = GoodTicket();
  ticket.model_fingerprint = "beef";
  EXPECT_TRUE(absl::IsFailedPrecondition(Check(gate, ticket)));
  ticket = GoodTicket();
  ticket.numerics_id = "1 gpu";
  EXPECT_TRUE(absl::IsFailedPrecondition(Check(gate, ticket)));
  EXPECT_TRUE(absl::IsDeadlineExceeded(Check(gate, GoodTicket(), kNow + absl::Seconds(6))));
  SignedTicket forged = signer_->Sign(GoodTicket());
  forged.signature[3] ^= 1;
  EXPECT_TRUE(absl::IsUnauthenticated(gate.Check(forged, kNow).status()));
  const auto stranger = TicketSigner::Generate();
  EXPECT_TRUE(absl::IsUnauthenticated(gate.Check(stranger->Sign(GoodTicket()), kNow).status()));
}

TEST_F(TicketGateTest, SetKey_NotAKey_KeepsTheOldOne) {
  TicketGate gate(NodeKind::kPrefill, "prefill-0", Model());
  ASSERT_TRUE(gate.SetKey(signer_->PublicKey()).ok());
  EXPECT_FALSE(gate.SetKey("short").ok());
  EXPECT_TRUE(Check(gate, GoodTicket()).ok());
}

}  // namespace
}  // namespace kvt
