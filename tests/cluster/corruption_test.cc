// One flipped byte in a store's memory: with checksums off it reaches the model and changes its
// output; with them on it is a miss, the block is computed and stored again, the tokens are the same.
#include <fcntl.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

#include "absl/strings/strip.h"
#include "kvstore/client/sequence_blocks.h"
#include "kvstore/wire/wire_rpc.h"
#include "tests/cluster/cluster_fixture.h"

namespace kvt {
namespace {

constexpr int kPromptTokens = 500;
constexpr int kOutput = 32;

// Start of the store's arena in its process: the shared mapping of that name.
uint64_t ArenaAddress(pid_t pid) {
  std::ifstream maps(absl::StrCat("/proc/", pid, "/maps"));
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:kvtide-arena") == std::string::npos) continue;
    return std::stoull(line.substr(0, line.find('-')), nullptr, 16);
  }
  return 0;
}

class CorruptionTest : public ClusterTest {
 protected:
  void StartVerifying(bool verify) {
    ClusterSpec spec;
    spec.stores = 1;
    spec.decodes = 1;
    spec.tier_keys = absl::StrCat("verify_checksums = ", verify ? "true" : "false", "\n");
    StartClusterAndReference(spec);
  }

  // Flips one bit of the exponent of a V value in the last layer of a stored block of the prompt.
  void FlipByte(const std::vector<int32_t>& prompt, int block) {
    const auto admitted = cluster_->coordinator().Admit({.model = cluster_->model(),
                                                         .tenant = "",
                                                         .prompt_tokens = kPromptTokens,
                                                         .output_tokens_max = 1,
                                                         .fidelity = {}});
    ASSERT_TRUE(admitted.ok()) << admitted.status();
    const auto models = cluster_->coordinator().Models();
    ASSERT_TRUE(models.ok() && models->size() == 1);
    const ModelInfo& info = models->front();
    std::stringstream secret;
    secret << std::ifstream(cluster_->run_dir() + "/cluster_secret").rdbuf();
    KeyDomain domain;
    domain.cluster_secret = std::string(absl::StripTrailingAsciiWhitespace(secret.str()));
    domain.model_fingerprint = info.fingerprint;
    domain.numerics_id = info.numerics_id;
    domain.geometry = info.geometry;
    SequenceBlocks names(KeyChain(domain), admitted->id);
    names.Append(prompt);

    const auto node = cluster_->Node("store-0");
    ASSERT_TRUE(node.ok());
    const auto store = ConnectStore(node->control_address, absl::Seconds(5));
    const auto session = store->OpenSession({.worker = "tamperer",
                                             .worker_epoch = BootEpoch(1),
                                             .versions = {},
                                             .geometry = info.geometry,
                                             .model_fingerprint = info.fingerprint,
                                             .numerics_id = info.numerics_id});
    ASSERT_TRUE(session.ok()) << session.status();
    LookupRequest lookup;
    lookup.session = session->session;
    lookup.ticket = admitted->ticket;
    lookup.blocks = {names.blocks()[static_cast<size_t>(block)].name};
    const auto found = store->Lookup(lookup);
    ASSERT_TRUE(found.ok()) << found.status();
    ASSERT_EQ(found->blocks[0].presence, BlockPresence::kExact);
    const uint64_t arena = ArenaAddress(cluster_->Pid("store-0"));
    ASSERT_NE(arena, 0u);
    const Geometry& geometry = info.geometry;
    const uint64_t at = arena + found->blocks[0].place.base_offset +
                        geometry.SliceOffset(geometry.layers - 1, 0) + geometry.SliceBytes() / 2;
    const int memory =
        open(absl::StrCat("/proc/", cluster_->Pid("store-0"), "/mem").c_str(), O_RDWR);
    ASSERT_GE(memory, 0);
    uint8_t byte = 0;
    ASSERT_EQ(pread(memory, &byte, 1, static_cast<off_t>(at)), 1);
    byte ^= 0x40;
    ASSERT_EQ(pwrite(memory, &byte, 1, static_cast<off_t>(at)), 1);
    close(memory);
    ASSERT_TRUE(store->CloseSession(session->session).ok());
    (void)cluster_->coordinator().Cancel(admitted->id, "");
  }
};

TEST_F(CorruptionTest, ChecksumsOff_FlippedByteChangesTheOutput) {
  ASSERT_NO_FATAL_FAILURE(StartVerifying(false));
  const std::vector<int32_t> prompt = RandomPrompt(31, kPromptTokens);
  const auto expected = reference_->Generate(prompt, kOutput);
  ASSERT_TRUE(expected.ok());
  GenerateOutcome outcome = cluster_->Generate(Request(prompt, kOutput));
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  ASSERT_EQ(outcome.result.tokens, *expected);
  ASSERT_NO_FATAL_FAILURE(FlipByte(prompt, 10));
  outcome = cluster_->Generate(Request(prompt, kOutput));
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  EXPECT_EQ(outcome.result.prefill.reused_tokens, 496u);
  EXPECT_NE(outcome.result.tokens, *expected);
}

TEST_F(CorruptionTest, ChecksumsOn_FlippedByteIsAMissAndTheTokensAreTheSame) {
  ASSERT_NO_FATAL_FAILURE(StartVerifying(true));
  const std::vector<int32_t> prompt = RandomPrompt(31, kPromptTokens);
  const auto expected = reference_->Generate(prompt, kOutput);
  ASSERT_TRUE(expected.ok());
  GenerateOutcome outcome = cluster_->Generate(Request(prompt, kOutput));
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  ASSERT_NO_FATAL_FAILURE(FlipByte(prompt, 10));
  outcome = cluster_->Generate(Request(prompt, kOutput));
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  EXPECT_EQ(outcome.result.tokens, *expected);
  // Block 10 and the last one, which is always computed.
  EXPECT_EQ(outcome.result.prefill.computed_tokens, 16u + 4u);
  EXPECT_EQ(cluster_->TotalStats().checksum_failures, 1u);
  // It was stored again: the third time everything is there.
  outcome = cluster_->Generate(Request(prompt, kOutput));
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  EXPECT_EQ(outcome.result.tokens, *expected);
  EXPECT_EQ(outcome.result.prefill.computed_tokens, 4u);
  EXPECT_EQ(cluster_->TotalStats().checksum_failures, 1u);
}

}  // namespace
}  // namespace kvt
