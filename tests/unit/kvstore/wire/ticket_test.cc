#include "kvstore/wire/ticket.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/base/random.h"
#include "kvstore/wire/ticket_codec.h"

namespace kvt {
namespace {

Ticket FullTicket() {
  Ticket ticket;
  ticket.id = TicketId(0x0102030405060708);
  ticket.epoch = TicketEpoch(7);
  ticket.tenant = "tenant";
  ticket.model = "model";
  ticket.model_fingerprint = "abcdef";
  ticket.numerics_id = "cpu/avx512/bf16";
  ticket.prompt_tokens = 7639;
  ticket.output_tokens_max = 96;
  ticket.fidelity = Fidelity::kSparse;
  ticket.request_class = RequestClass::kOffloaded;
  ticket.prefill_worker = "prefill-0";
  ticket.decode_worker = "decode-1";
  ticket.decode_address = "127.0.0.1:4242";
  ticket.stores = {{"store-0", BootEpoch(11), "127.0.0.1:1", 1},
                   {"store-1", BootEpoch(UINT64_MAX), "[::1]:2", 3}};
  ticket.capability = std::string("\0\xff\x7f capability", 14);
  ticket.present_by_unix_ms = -5;
  return ticket;
}

void ExpectEqual(const Ticket& a, const Ticket& b) {
  EXPECT_EQ(a.id, b.id);
  EXPECT_EQ(a.epoch, b.epoch);
  EXPECT_EQ(a.tenant, b.tenant);
  EXPECT_EQ(a.model, b.model);
  EXPECT_EQ(a.model_fingerprint, b.model_fingerprint);
  EXPECT_EQ(a.numerics_id, b.numerics_id);
  EXPECT_EQ(a.prompt_tokens, b.prompt_tokens);
  EXPECT_EQ(a.output_tokens_max, b.output_tokens_max);
  EXPECT_EQ(a.fidelity, b.fidelity);
  EXPECT_EQ(a.request_class, b.request_class);
  EXPECT_EQ(a.prefill_worker, b.prefill_worker);
  EXPECT_EQ(a.decode_worker, b.decode_worker);
  EXPECT_EQ(a.decode_address, b.decode_address);
  EXPECT_EQ(a.stores, b.stores);
  EXPECT_EQ(a.capability, b.capability);
  EXPECT_EQ(a.present_by_unix_ms, b.present_by_unix_ms);
}

std::unique_ptr<TicketVerifier> VerifierOf(const TicketSigner& signer) {
  auto verifier = TicketVerifier::FromPublicKey(signer.PublicKey());
  EXPECT_TRUE(verifier.ok());
  return *std::move(verifier);
}

class TicketKeyFile : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "kvt_ticket_XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    path_ = folder_ + "/key.pem";
  }
  void TearDown() override {
    unlink(path_.c_str());
    rmdir(folder_.c_str());
  }
  std::string folder_;
  std::string path_;
};

TEST(TicketCodec, EveryField_SurvivesTheRoundTrip) {
  const auto decoded = DecodeTicket(EncodeTicket(FullTicket()));
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  ExpectEqual(*decoded, FullTicket());
}

TEST(TicketCodec, EveryTruncation_IsInvalidArgument) {
  const std::string payload = EncodeTicket(FullTicket());
  for (size_t size = 0; size < payload.size(); ++size) {
    const auto decoded = DecodeTicket(absl::string_view(payload).substr(0, size));
    EXPECT_EQ(decoded.status().code(), absl::StatusCode::kInvalidArgument) << size;
  }
}

TEST(TicketCodec, TrailingByte_IsInvalidArgument) {
  const auto decoded = DecodeTicket(EncodeTicket(FullTicket()) + "x");
  EXPECT_EQ(decoded.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(decoded.status().message().find("trailing"), absl::string_view::npos);
}

TEST(TicketCodec, UnknownVersionOrEnum_IsInvalidArgumentNamingTheField) {
  std::string payload = EncodeTicket(FullTicket());
  payload[4] = 2;
  EXPECT_NE(DecodeTicket(payload).status().message().find("version"), absl::string_view::npos);
  payload = EncodeTicket(FullTicket());
  payload[4 + 1 + 8 + 4 + 4 + 4] = 3;
  EXPECT_NE(DecodeTicket(payload).status().message().find("fidelity"), absl::string_view::npos);
}

TEST(TicketCodec, StringLongerThanItsBound_IsInvalidArgument) {
  Ticket ticket = FullTicket();
  ticket.tenant = std::string(kTicketStringBytesMax, 'a');
  std::string payload = EncodeTicket(ticket);
  ASSERT_TRUE(DecodeTicket(payload).ok());
  const size_t length_at = 4 + 1 + 8 + 4 + 4 + 4 + 1 + 1 + 8;
  ++payload[length_at];  // one more than the bound, and the byte for it
  payload.insert(length_at + 2, "a");
  EXPECT_NE(DecodeTicket(payload).status().message().find("bound"), absl::string_view::npos);
}

TEST(TicketCodec, RandomBytes_NeverCrashAndNeverPassAsTheOriginal) {
  const uint64_t seed = 20261129;
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  Random random(seed);
  const std::string original = EncodeTicket(FullTicket());
  int accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string payload = original;
    const uint64_t edits = 1 + random.Below(8);
    for (uint64_t e = 0; e < edits; ++e) {
      payload[random.Below(payload.size())] = static_cast<char>(random.Next());
    }
    if (random.Below(4) == 0) payload.resize(random.Below(payload.size() + 1));
    const auto decoded = DecodeTicket(payload);
    if (decoded.ok()) {
      ++accepted;  // another valid ticket: it must encode to exactly these bytes
      EXPECT_EQ(EncodeTicket(*decoded), payload);
    }
  }
  EXPECT_GT(accepted, 0);  // flipped numbers are tickets too: the signature is what protects
}

TEST(TicketSignature, OwnTicket_IsVerified) {
  const auto signer = TicketSigner::Generate();
  const auto ticket = VerifierOf(*signer)->Verify(signer->Sign(FullTicket()));
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  ExpectEqual(*ticket, FullTicket());
}

TEST(TicketSignature, EveryFlippedBit_IsUnauthenticated) {
  const auto signer = TicketSigner::Generate();
  const auto verifier = VerifierOf(*signer);
  const SignedTicket good = signer->Sign(FullTicket());
  for (size_t byte = 0; byte < good.payload.size(); ++byte) {
    SignedTicket bad = good;
    bad.payload[byte] = static_cast<char>(bad.payload[byte] ^ (1 << (byte % 8)));
    EXPECT_EQ(verifier->Verify(bad).status().code(), absl::StatusCode::kUnauthenticated) << byte;
  }
  for (size_t byte = 0; byte < good.signature.size(); ++byte) {
    SignedTicket bad = good;
    bad.signature[byte] = static_cast<char>(bad.signature[byte] ^ (1 << (byte % 8)));
    EXPECT_EQ(verifier->Verify(bad).status().code(), absl::StatusCode::kUnauthenticated) << byte;
  }
}

TEST(TicketSignature, OtherCoordinatorsTicketOrShortSignature_IsUnauthenticated) {
  const auto signer = TicketSigner::Generate();
  const auto other = TicketSigner::Generate();
  const auto verifier = VerifierOf(*signer);
  EXPECT_EQ(verifier->Verify(other->Sign(FullTicket())).status().code(),
            absl::StatusCode::kUnauthenticated);
  SignedTicket cut = signer->Sign(FullTicket());
  cut.signature.pop_back();
  EXPECT_EQ(verifier->Verify(cut).status().code(), absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(verifier->Verify(SignedTicket{}).status().code(), absl::StatusCode::kUnauthenticated);
}

TEST(TicketSignature, PublicKeyOfWrongLength_IsInvalidArgument) {
  EXPECT_EQ(TicketVerifier::FromPublicKey("short").status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(TicketKeyFile, MissingFile_IsMadeOwnerOnlyAndKept) {
  const auto first = TicketSigner::LoadOrCreate(path_);
  ASSERT_TRUE(first.ok()) << first.status();
  struct stat info {};
  ASSERT_EQ(stat(path_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  const auto second = TicketSigner::LoadOrCreate(path_);
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ((*first)->PublicKey(), (*second)->PublicKey());
  EXPECT_TRUE(VerifierOf(**first)->Verify((*second)->Sign(FullTicket())).ok());
}

TEST_F(TicketKeyFile, ReadableByOthers_IsPermissionDeniedWithTheRemedy) {
  ASSERT_TRUE(TicketSigner::LoadOrCreate(path_).ok());
  chmod(path_.c_str(), 0640);
  const auto signer = TicketSigner::LoadOrCreate(path_);
  EXPECT_EQ(signer.status().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_NE(signer.status().message().find("chmod 600"), absl::string_view::npos);
}

TEST_F(TicketKeyFile, NotAKey_IsInvalidArgumentNamingTheFile) {
  std::ofstream(path_) << "not a key";
  chmod(path_.c_str(), 0600);
  const auto signer = TicketSigner::LoadOrCreate(path_);
  EXPECT_EQ(signer.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(signer.status().message().find(path_), absl::string_view::npos);
}

TEST_F(TicketKeyFile, MissingFolder_IsAnErrorNamingTheFile) {
  const auto signer = TicketSigner::LoadOrCreate(folder_ + "/none/key.pem");
  EXPECT_FALSE(signer.ok());
  EXPECT_NE(signer.status().message().find("none/key.pem"), absl::string_view::npos);
}

}  // namespace
}  // namespace kvt
