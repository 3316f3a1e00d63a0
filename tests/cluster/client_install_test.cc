// The client library as a stranger meets it: installed into an empty prefix, the example built out of
// the tree against it, and run against a cluster that `kvtide up` started.
#include <filesystem>
#include <fstream>
#include <regex>

#include "kvstore/client/cluster_client.h"
#include "tests/cluster/cluster_fixture.h"
#include "tests/support/run_program.h"

namespace kvt {
namespace {

namespace fs = std::filesystem;

ProgramResult RunOrFail(const std::vector<std::string>& arguments, absl::Duration timeout) {
  ProgramResult result = RunProgram(arguments, "", timeout);
  EXPECT_EQ(result.code, 0) << testing::PrintToString(arguments) << "\n"
                            << result.out << result.err;
  return result;
}

// One install and one build for all tests.
class InstalledClient : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new TempFolder;
    const std::string prefix = folder_->path() + "/prefix";
    const std::string build = folder_->path() + "/build";
    RunOrFail({KVT_CMAKE, "--install", KVT_BINARY_DIR, "--prefix", prefix, "--component", "client"},
              absl::Seconds(60));
    // Away from the tree, so that nothing is found there.
    fs::copy(std::string(KVT_SOURCE_DIR) + "/docs/examples/tier_client", folder_->path() + "/src");
    RunOrFail({KVT_CMAKE, "-S", folder_->path() + "/src", "-B", build, "-DCMAKE_PREFIX_PATH=" + prefix,
               "-DCMAKE_BUILD_TYPE=Release"},
              absl::Seconds(60));
    RunOrFail({KVT_CMAKE, "--build", build, "--verbose"}, absl::Seconds(180));
    program_ = build + "/tier_client_example";
  }
  static void TearDownTestSuite() { delete folder_; }

  static std::vector<std::string> Example(const TestCluster& cluster, const std::string& coordinator,
                                          const std::string& transport) {
    return {program_, "--coordinator", coordinator, "--secret-file",
            cluster.run_dir() + "/cluster_secret", "--blocks", "48", "--transport", transport};
  }

  static TempFolder* folder_;
  static std::string program_;
};
TempFolder* InstalledClient::folder_ = nullptr;
std::string InstalledClient::program_;

std::string CoordinatorOf(const TestCluster& cluster) {
  std::ifstream in(cluster.run_dir() + "/coordinator.address");
  std::string address;
  std::getline(in, address);
  return address;
}

TEST_F(InstalledClient, Headers_NameNoLibraryBehindAFence) {
  const fs::path include = folder_->path() + "/prefix/include/kvtide";
  int headers = 0;
  for (const auto& entry : fs::recursive_directory_iterator(include)) {
    if (!entry.is_regular_file()) continue;
    ++headers;
    std::ifstream in(entry.path());
    for (std::string line; std::getline(in, line);) {
      static const std::regex bad(
          R"(#\s*include\s*[<"](grpc|google/|ucp|uct|ucs|rocksdb|spdlog|prometheus|toml|.*\.pb\.h))");
      EXPECT_FALSE(std::regex_search(line, bad)) << entry.path() << ": " << line;
    }
  }
  EXPECT_GT(headers, 15);
  EXPECT_LT(headers, 60);
  EXPECT_TRUE(fs::exists(include / "kvstore/client/tier_client.h"));
  EXPECT_FALSE(fs::exists(include / "kvstore/client/worker_daemon.h"));
}

TEST_F(InstalledClient, Example_WritesFindsAndPullsAgainstARealCluster) {
  const SmallModelFolder model;
  ClusterSpec spec;
  spec.model_folder = model.path();
  spec.decodes = 1;
  const auto cluster = StartOrFail(spec);
  ASSERT_NE(cluster, nullptr);
  const std::string coordinator = CoordinatorOf(*cluster);

  ProgramResult first = RunOrFail(Example(*cluster, coordinator, "ucx"), absl::Seconds(60));
  EXPECT_NE(first.out.find("lookup: 0 of 48 blocks are in the tier"), std::string::npos)
      << first.out;
  EXPECT_NE(first.out.find("write: 48 blocks, 0 lost"), std::string::npos) << first.out;
  EXPECT_NE(first.out.find("read: 48 blocks, 0 lost"), std::string::npos) << first.out;
  EXPECT_NE(first.out.find("store store-1: up over ucx"), std::string::npos) << first.out;
  EXPECT_NE(first.out.find("bytes are identical, 0 blocks were there before"), std::string::npos)
      << first.out;
  ProgramResult second = RunOrFail(Example(*cluster, coordinator, "shm"), absl::Seconds(60));
  EXPECT_NE(second.out.find("lookup: 48 of 48 blocks are in the tier"), std::string::npos)
      << second.out;
  EXPECT_NE(second.out.find("over shm"), std::string::npos) << second.out;
  EXPECT_NE(second.out.find("48 blocks were there before"), std::string::npos) << second.out;
  EXPECT_EQ(second.out.find("write:"), std::string::npos) << second.out;

  // All four tickets ended well, nothing is held, and the clients have left.
  const auto requests = cluster->coordinator().Requests();
  ASSERT_TRUE(requests.ok()) << requests.status();
  EXPECT_EQ(requests->size(), 4u);
  for (const RequestStatus& request : *requests) {
    EXPECT_EQ(request.phase, RequestPhase::kDone) << request.error;
    EXPECT_EQ(request.model, "tier-client-example");
  }
  EXPECT_TRUE(cluster->AwaitNothingHeld(absl::Seconds(15)).ok());
  EXPECT_GT(cluster->TotalStats().blocks, 47u);
  const auto status = cluster->coordinator().Status();
  ASSERT_TRUE(status.ok());
  for (const NodeStatus& node : status->nodes) EXPECT_NE(node.kind, NodeKind::kClient);
}

TEST_F(InstalledClient, Example_WithoutACluster_SaysWhatIsMissing) {
  folder_->Write("secret", "0123456789abcdef0123456789abcdef");
  fs::permissions(folder_->path() + "/secret", fs::perms::owner_read);
  const ProgramResult result =
      RunProgram({program_, "--coordinator", "127.0.0.1:1", "--secret-file",
                  folder_->path() + "/secret"},
                 "", absl::Seconds(60));
  EXPECT_EQ(result.code, 1);
  EXPECT_NE(result.err.find("coordinator at 127.0.0.1:1"), std::string::npos) << result.err;
}

// The library itself against a real cluster, for what the example does not do.
class ClusterClientTest : public ClusterTest {
 protected:
  void SetUp() override {
    ClusterSpec spec;
    spec.decodes = 1;
    StartCluster(spec);
  }
  ClusterClientOptions Options(const std::string& model) {
    ClusterClientOptions options;
    options.coordinator = CoordinatorOf(*cluster_);
    options.model.name = model;
    options.tier.cluster_secret_file = cluster_->run_dir() + "/cluster_secret";
    options.tier.transport = TierTransport::kUcx;
    return options;
  }
};

TEST_F(ClusterClientTest, ServedModel_FindsWhatTheWorkersWrote) {
  const std::vector<int32_t> prompt = RandomPrompt(7, 200);
  ASSERT_TRUE(cluster_->Generate(Request(prompt, 4)).status.ok());
  const auto client = ClusterClient::Connect(Options(cluster_->model()));
  ASSERT_TRUE(client.ok()) << client.status();
  EXPECT_EQ((*client)->model().geometry.layers, 2);
  const auto ticket = (*client)->Admit({.prompt_tokens = 200});
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  SequenceBlocks sequence((*client)->Keys(""), ticket->ticket.id);
  sequence.Append(prompt);
  // In every store: the cluster has just started, and prefill may have written where its links were up.
  EXPECT_EQ((*client)
                ->tier()
                .Lookup(*ticket, sequence.blocks(), LookupReach::kEveryStore)
                .exact_blocks,
            200 / kBlockTokens);
  // Another tenant's names are others.
  SequenceBlocks foreign((*client)->Keys("other"), ticket->ticket.id);
  foreign.Append(prompt);
  EXPECT_EQ((*client)
                ->tier()
                .Lookup(*ticket, foreign.blocks(), LookupReach::kEveryStore)
                .base_blocks,
            0);
  (*client)->Finish(*ticket);
  (*client)->Finish(*ticket);  // idempotent
  ExpectNothingHeld(absl::Seconds(15));
}

TEST_F(ClusterClientTest, WrongOptions_AreRefusedNamingWhatIsWrong) {
  auto unknown = ClusterClient::Connect(Options("nobody"));
  EXPECT_EQ(unknown.status().code(), absl::StatusCode::kNotFound) << unknown.status();
  EXPECT_NE(unknown.status().message().find("served: test"), absl::string_view::npos);

  ClusterClientOptions no_secret = Options(cluster_->model());
  no_secret.tier.cluster_secret_file = cluster_->run_dir() + "/nothing";
  EXPECT_EQ(ClusterClient::Connect(no_secret).status().code(), absl::StatusCode::kNotFound);

  // The served model's name over another geometry: both sides are shown.
  ClusterClientOptions other = Options(cluster_->model());
  other.model = cluster_->coordinator().Models()->at(0);
  other.model.geometry.layers += 1;
  other.connect_timeout = absl::Seconds(2);
  const absl::Status refused = ClusterClient::Connect(other).status();
  EXPECT_FALSE(refused.ok());
  EXPECT_NE(refused.message().find("does not match"), absl::string_view::npos) << refused;
}

TEST_F(ClusterClientTest, CancelledTicket_IsToldAndEnds) {
  const auto client = ClusterClient::Connect(Options(cluster_->model()));
  ASSERT_TRUE(client.ok()) << client.status();
  const auto ticket = (*client)->Admit({.prompt_tokens = 64});
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  const std::string& name = (*client)->name();
  ASSERT_TRUE(cluster_->Node(name).ok());
  EXPECT_EQ(cluster_->Node(name)->kind, NodeKind::kClient);
  EXPECT_FALSE((*client)->IsCancelled(ticket->ticket.id));
  ASSERT_TRUE(
      cluster_->coordinator().Cancel(ticket->ticket.id, ticket->ticket.capability).ok());
  EXPECT_TRUE(Await(absl::Seconds(5), [&] {
                return (*client)->IsCancelled(ticket->ticket.id)
                           ? absl::OkStatus()
                           : absl::UnavailableError("not told yet");
              }).ok());
  (*client)->Finish(*ticket);
  // A client that goes without Finish: its tickets fail, its pins go.
  const auto left = (*client)->Admit({.prompt_tokens = 64});
  ASSERT_TRUE(left.ok());
  (*client)->Close();
  const auto requests = cluster_->coordinator().Requests();
  ASSERT_TRUE(requests.ok());
  for (const RequestStatus& request : *requests) {
    EXPECT_EQ(request.phase, request.id == left->ticket.id ? RequestPhase::kFailed
                                                           : RequestPhase::kCancelled);
  }
  ExpectNothingHeld(absl::Seconds(15));
}

}  // namespace
}  // namespace kvt
