// What a cluster answers to what it cannot do: a clear error each, and it goes on.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

#include "absl/strings/match.h"
#include "kvstore/wire/wire_rpc.h"
#include "tests/cluster/cluster_fixture.h"

namespace kvt {
namespace {

std::string ReadAll(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

class BadInputTest : public ClusterTest {
 protected:
  void ExpectServes() {
    const GenerateOutcome outcome = cluster_->Generate(Request(RandomPrompt(77, 50), 4));
    EXPECT_TRUE(outcome.status.ok()) << outcome.status;
    EXPECT_EQ(outcome.result.tokens.size(), 4u);
  }
  // Runs a daemon for at most two seconds; its exit code (124: it was still running) and output.
  std::pair<int, std::string> RunDaemon(const std::string& program, const std::string& config) {
    const std::string out = cluster_->run_dir() + "/daemon.out";
    const int status = std::system(absl::StrCat("timeout 4 ", KVT_BINARY_DIR, "/bin/", program,
                                                " --config ", config, " >", out, " 2>&1")
                                       .c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, ReadAll(out)};
  }
};

TEST_F(BadInputTest, RequestsThatCannotBeServed_AreRefusedClearlyAndTheClusterGoesOn) {
  ClusterSpec spec;
  spec.stores = 1;
  spec.decodes = 1;
  ASSERT_NO_FATAL_FAILURE(StartCluster(spec));
  GenerateOutcome outcome = cluster_->Generate(Request({}, 4));
  EXPECT_TRUE(absl::IsInvalidArgument(outcome.status)) << outcome.status;
  EXPECT_TRUE(absl::StrContains(outcome.status.message(), "empty")) << outcome.status;

  outcome = cluster_->Generate(Request(RandomPrompt(1, 2048), 4));
  EXPECT_TRUE(absl::IsInvalidArgument(outcome.status)) << outcome.status;
  EXPECT_TRUE(absl::StrContains(outcome.status.message(), "context")) << outcome.status;

  ctl::GenerateRequest request = Request(RandomPrompt(1, 20), 4);
  request.model = "another";
  outcome = cluster_->Generate(request);
  EXPECT_TRUE(absl::IsNotFound(outcome.status)) << outcome.status;
  EXPECT_TRUE(absl::StrContains(outcome.status.message(), "test")) << outcome.status;

  std::vector<int32_t> tokens = RandomPrompt(1, 20);
  tokens[7] = 512;
  outcome = cluster_->Generate(Request(tokens, 4));
  EXPECT_TRUE(absl::IsInvalidArgument(outcome.status)) << outcome.status;
  EXPECT_TRUE(absl::StrContains(outcome.status.message(), "tokens[7]")) << outcome.status;

  request = Request(RandomPrompt(1, 20), 4);
  request.sampling.top_p = 0;
  outcome = cluster_->Generate(request);
  EXPECT_TRUE(absl::IsInvalidArgument(outcome.status)) << outcome.status;
  ExpectServes();
}

TEST_F(BadInputTest, ForgedOrMisdirectedTickets_AreRefused) {
  ClusterSpec spec;
  spec.stores = 1;
  spec.decodes = 1;
  ASSERT_NO_FATAL_FAILURE(StartCluster(spec));
  const auto admitted = cluster_->coordinator().Admit(
      {.model = cluster_->model(), .tenant = "", .prompt_tokens = 20, .output_tokens_max = 4,
       .fidelity = {}});
  ASSERT_TRUE(admitted.ok()) << admitted.status();
  const auto prefill = ConnectPrefill(admitted->prefill_address, absl::Seconds(5));
  const PrefillSink ignore = [](const PrefillEvent&) { return true; };
  SubmitRequest submit;
  submit.ticket = admitted->ticket;
  submit.tokens = RandomPrompt(1, 20);

  SubmitRequest forged = submit;
  forged.ticket.payload[forged.ticket.payload.size() / 2] ^= 1;
  EXPECT_TRUE(absl::IsUnauthenticated(prefill->Submit(forged, ignore)));

  SubmitRequest short_prompt = submit;
  short_prompt.tokens.pop_back();
  EXPECT_TRUE(absl::IsInvalidArgument(prefill->Submit(short_prompt, ignore)));

  // A ticket for the prefill worker is none for the decode worker.
  const auto decode_node = cluster_->Node("decode-0");
  ASSERT_TRUE(decode_node.ok());
  HandOverRequest hand_over;
  hand_over.ticket = admitted->ticket;
  hand_over.tokens = submit.tokens;
  hand_over.prompt_tokens = 20;
  EXPECT_TRUE(absl::IsFailedPrecondition(
      ConnectDecode(decode_node->control_address, absl::Seconds(5))->HandOver(hand_over)));

  EXPECT_TRUE(prefill->Submit(submit, ignore).ok());
  // The same ticket twice.
  EXPECT_TRUE(absl::IsAlreadyExists(prefill->Submit(submit, ignore)));
  ExpectServes();
}

TEST_F(BadInputTest, StoreFull_IsRefusedAfterABoundedWaitAndTheClusterGoesOn) {
  ClusterSpec spec;
  spec.stores = 1;
  spec.decodes = 1;
  // A store has room for a block per 32 KiB at most: 64 blocks. The prompt takes 94.
  spec.store_keys = "arena_bytes = \"2MiB\"\n";
  spec.prefill_keys += "store_wait = \"500ms\"\n";
  ASSERT_NO_FATAL_FAILURE(StartCluster(spec));
  const GenerateOutcome outcome = cluster_->Generate(Request(RandomPrompt(6, 1500), 4));
  EXPECT_TRUE(absl::IsResourceExhausted(outcome.status)) << outcome.status;
  EXPECT_TRUE(absl::StrContains(outcome.status.message(), "store")) << outcome.status;
  ExpectServes();
}

TEST_F(BadInputTest, NoDecodeWorker_IsToldAtAdmission) {
  ClusterSpec spec;
  spec.stores = 1;
  spec.decodes = 1;
  ASSERT_NO_FATAL_FAILURE(StartCluster(spec));
  cluster_->Signal("decode-0", SIGKILL);
  const absl::Status dead = cluster_->AwaitState("decode-0", "dead", absl::Seconds(5));
  ASSERT_TRUE(dead.ok()) << dead;
  const GenerateOutcome outcome = cluster_->Generate(Request(RandomPrompt(1, 20), 4));
  EXPECT_TRUE(absl::IsFailedPrecondition(outcome.status)) << outcome.status;
  EXPECT_TRUE(absl::StrContains(outcome.status.message(), "decode")) << outcome.status;
  // One that joins later serves.
  const std::string binary = absl::StrCat(KVT_BINARY_DIR, "/bin/kvtide-decode");
  const std::string config = cluster_->run_dir() + "/decode-0.toml";
  const pid_t again = fork();
  if (again == 0) {
    execl(binary.c_str(), "kvtide-decode", "--config", config.c_str(), nullptr);
    _exit(127);
  }
  const absl::Status ready = cluster_->AwaitState("decode-0", "ready", absl::Seconds(20));
  EXPECT_TRUE(ready.ok()) << ready;
  ExpectServes();
  kill(again, SIGTERM);
  int status = 0;
  EXPECT_EQ(waitpid(again, &status, 0), again);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST_F(BadInputTest, BadConfigurations_StopTheStartNamingFileAndLine) {
  ClusterSpec spec;
  spec.stores = 1;
  spec.decodes = 1;
  ASSERT_NO_FATAL_FAILURE(StartCluster(spec));
  for (const char* kind : {"prefill", "decode"}) {
    const std::string config = cluster_->run_dir() + "/bad.toml";
    std::ofstream(config) << ReadAll(absl::StrCat(cluster_->run_dir(), "/", kind, "-0.toml"))
                          << "\n[surplus]\nkey = 1\n";
    const auto [code, text] = RunDaemon(absl::StrCat("kvtide-", kind), config);
    EXPECT_EQ(code, 1) << text;
    EXPECT_TRUE(absl::StrContains(text, "bad.toml")) << text;
    EXPECT_TRUE(absl::StrContains(text, "surplus")) << text;
  }
  ExpectServes();
}

TEST_F(BadInputTest, WorkerOfAnotherGeometry_IsRefusedNamingBothSides) {
  ClusterSpec spec;
  spec.stores = 1;
  spec.decodes = 1;
  ASSERT_NO_FATAL_FAILURE(StartCluster(spec));
  TempFolder other;
  WriteRandomModel(RandomModelSpecs()[0], other.path());
  std::string config = ReadAll(cluster_->run_dir() + "/prefill-0.toml");
  const auto swap = [&config](const std::string& from, const std::string& to) {
    const size_t at = config.find(from);
    ASSERT_NE(at, std::string::npos) << config;
    config.replace(at, from.size(), to);
  };
  swap(model_.path(), other.path());
  swap("\"prefill-0\"", "\"prefill-9\"");
  std::ofstream(cluster_->run_dir() + "/other.toml") << config;
  const auto [code, text] = RunDaemon("kvtide-prefill", cluster_->run_dir() + "/other.toml");
  EXPECT_TRUE(absl::StrContains(text, "H4 D64") && absl::StrContains(text, "H2 D64"))
      << code << " " << text;
  const auto node = cluster_->Node("prefill-9");
  EXPECT_FALSE(node.ok() && node->state == "ready");
  ExpectServes();
}

}  // namespace
}  // namespace kvt
