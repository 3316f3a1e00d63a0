// The `kvtide` program itself: its words, exit codes and JSON, without a cluster and with one of a
// small random model.
#include <signal.h>

#include <fstream>
#include <iterator>
#include <sstream>

#include <nlohmann/json.hpp>

#include "tests/cluster/cluster_testing.h"
#include "tests/support/run_program.h"

namespace kvt {
namespace {

using nlohmann::json;

std::string Kvtide() { return std::string(KVT_BINARY_DIR) + "/bin/kvtide"; }

bool Has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// The small model with a tokenizer of its 512 ids and ChatML.
class ChatModelFolder {
 public:
  ChatModelFolder() {
    std::ifstream in(std::string(KVT_SOURCE_DIR) +
                     "/tests/support/goldens/small_gpt2/tokenizer.json");
    json tokenizer = json::parse(in);
    const auto vocab_max = static_cast<size_t>(SmallModel().vocab);
    json vocab = json::object();
    for (const auto& [token, id] : tokenizer["model"]["vocab"].items()) {
      if (id.get<size_t>() < vocab_max) vocab[token] = id;
    }
    json merges = json::array();
    for (const json& merge : tokenizer["model"]["merges"]) {
      std::string left;
      std::string right;
      if (merge.is_string()) {
        std::istringstream(merge.get<std::string>()) >> left >> right;
      } else {
        left = merge[0].get<std::string>();
        right = merge[1].get<std::string>();
      }
      if (vocab.contains(left) && vocab.contains(right) && vocab.contains(left + right)) {
        merges.push_back(merge);
      }
    }
    json added = json::array();
    for (const json& token : tokenizer["added_tokens"]) {
      if (token["id"].get<size_t>() < vocab_max) added.push_back(token);
    }
    tokenizer["model"]["vocab"] = vocab;
    tokenizer["model"]["merges"] = merges;
    tokenizer["added_tokens"] = added;
    std::ofstream(folder_.path() + "/tokenizer.json") << tokenizer.dump();
    const json config = {
        {"chat_template",
         "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + "
         "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
         "{{ '<|im_start|>assistant\n' }}{% endif %}"}};
    std::ofstream(folder_.path() + "/tokenizer_config.json") << config.dump();
  }
  [[nodiscard]] const std::string& path() const { return folder_.path(); }

 private:
  SmallModelFolder folder_;
};

TEST(CliAlone, Help_ListsCommandsAndExitCodes) {
  const ProgramResult result = RunProgram({Kvtide(), "--help"});
  EXPECT_EQ(result.code, 0);
  for (const char* part : {"up", "down", "status", "nodes", "tier", "requests", "generate", "run",
                           "calibrate", "Exit codes", "130", "KVTIDE_RUN_DIR"}) {
    EXPECT_TRUE(Has(result.out, part)) << part;
  }
  for (const char* command : {"up", "down", "status", "nodes", "tier", "requests", "generate"}) {
    EXPECT_EQ(RunProgram({Kvtide(), command, "--help"}).code, 0) << command;
  }
}

TEST(CliAlone, Calibrate_SameBytesTwice_AndJsonOfEveryLayer) {
  const ChatModelFolder model;
  const TempFolder folder;
  std::string text;
  for (int i = 0; text.size() < 8000; ++i) text += "The value of " + std::to_string(i * i) + " is known.\n";
  folder.Write("text", text);
  folder.Write("short", "too short");
  const auto calibrate = [&](const std::string& name, const std::string& out,
                             std::vector<std::string> more = {}) {
    std::vector<std::string> all = {Kvtide(), "calibrate", model.path(), "--text",
                                    folder.path() + "/" + name, "--lengths", "1024", "--queries", "16",
                                    "--digest-share", "1", "--out", folder.path() + "/" + out, "-o",
                                    "json"};
    all.insert(all.end(), more.begin(), more.end());
    return RunProgram(all);
  };
  const ProgramResult first = calibrate("text", "a");
  ASSERT_EQ(first.code, 0) << first.err;
  ASSERT_EQ(calibrate("text", "b").code, 0);
  const auto read = [&](const std::string& name) {
    std::ifstream in(folder.path() + "/" + name);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  EXPECT_EQ(read("a"), read("b"));
  const json report = json::parse(first.out);
  EXPECT_TRUE(Has(read("a"), "\nid " + report["id"].get<std::string>() + "\n"));
  ASSERT_EQ(report["layers"].size(), static_cast<size_t>(kRandomModelLayers));
  for (const json& layer : report["layers"]) {
    for (const char* field : {"head", "runner_up", "margin", "set", "captured"}) {
      EXPECT_TRUE(layer.contains(field)) << field;
    }
  }
  EXPECT_EQ(calibrate("short", "c").code, 3);
  EXPECT_EQ(calibrate("missing", "c").code, 3);
  EXPECT_EQ(calibrate("text", "c", {"--bits", "7"}).code, 2);
  EXPECT_TRUE(read("c").empty());
}

TEST(CliAlone, BadCommandLines_ExitWithTwo) {
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{}, {"bogus"}, {"status", "--bogus"}, {"status", "-o", "yaml"},
        {"up"}, {"generate", "hi", "--max-tokens", "0"}, {"generate", "hi", "--top-p", "2"}}) {
    std::vector<std::string> all = {Kvtide()};
    all.insert(all.end(), arguments.begin(), arguments.end());
    const ProgramResult result = RunProgram(all);
    EXPECT_EQ(result.code, 2) << testing::PrintToString(arguments);
    EXPECT_FALSE(result.err.empty());
  }
}

TEST(CliAlone, NoCluster_ExitsWithThreeAndSaysWhatToDo) {
  const TempFolder folder;
  for (const char* command : {"status", "nodes", "tier", "requests", "down"}) {
    const ProgramResult result = RunProgram({Kvtide(), command, "--run-dir", folder.path()});
    EXPECT_EQ(result.code, 3) << command;
    EXPECT_TRUE(Has(result.err, folder.path())) << result.err;
  }
  const ProgramResult result =
      RunProgram({Kvtide(), "generate", "hi", "--run-dir", folder.path(), "-o", "json"});
  EXPECT_EQ(result.code, 3);
  const json error = json::parse(result.out, nullptr, false);
  ASSERT_TRUE(error.is_object()) << result.out;
  EXPECT_EQ(error["error"]["code"], "UNAVAILABLE");
  EXPECT_TRUE(Has(error["error"]["message"], "kvtide up"));
}

TEST(CliAlone, CoordinatorThatIsNotThere_ExitsWithThreeNamingIt) {
  const ProgramResult result = RunProgram({Kvtide(), "status", "--coordinator", "127.0.0.1:1"});
  EXPECT_EQ(result.code, 3);
  EXPECT_TRUE(Has(result.err, "coordinator at 127.0.0.1:1")) << result.err;
}

TEST(CliAlone, UpWithABadFile_ExitsWithTwoNamingFileAndLine) {
  const TempFolder folder;
  folder.Write("bad.toml", "[cluster]\nmodel_folder = \"m\"\nbogus = 1\n");
  const std::string file = folder.path() + "/bad.toml";
  const ProgramResult result =
      RunProgram({Kvtide(), "up", "--config", file, "--run-dir", folder.path() + "/run"});
  EXPECT_EQ(result.code, 2);
  EXPECT_TRUE(Has(result.err, file + ":3: cluster.bogus: unknown key")) << result.err;
  EXPECT_TRUE(Has(result.err, "[[store]]")) << result.err;
  EXPECT_EQ(RunProgram({Kvtide(), "up", "--config", folder.path() + "/none.toml"}).code, 2);
}

TEST(CliAlone, DaemonThatDoesNotStart_IsNamedWithItsLogAndAllIsRolledBack) {
  const ChatModelFolder model;
  const TempFolder folder;
  folder.Write("c.toml", "[cluster]\nmodel_folder = \"" + model.path() +
                             "\"\n[[store]]\narena_bytes = \"64MiB\"\nbogus_key = 3\n"
                             "[[prefill]]\n[[decode]]\n");
  const std::string run_dir = folder.path() + "/run";
  const ProgramResult result = RunProgram(
      {Kvtide(), "up", "--config", folder.path() + "/c.toml", "--run-dir", run_dir});
  EXPECT_EQ(result.code, 1);
  EXPECT_TRUE(Has(result.err, "store-0 ended while starting (exit code 1)")) << result.err;
  EXPECT_TRUE(Has(result.err, "store-0.toml:")) << result.err;
  EXPECT_TRUE(Has(result.err, "store.bogus_key: unknown key")) << result.err;
  EXPECT_TRUE(Has(result.err, "stopped everything")) << result.err;
  EXPECT_EQ(RunProgram({Kvtide(), "down", "--run-dir", run_dir}).code, 3);
}

TEST(CliAlone, F20_UpWithALargeStore_ShowsItsProgress) {
  const ChatModelFolder model;
  const TempFolder folder;
  folder.Write("c.toml", "[cluster]\nmodel_folder = \"" + model.path() +
                             "\"\n[[store]]\narena_bytes = \"2GiB\"\npopulate_threads = 1\n"
                             "[[prefill]]\nslots_bytes = \"64MiB\"\n"
                             "[[decode]]\nslots_bytes = \"64MiB\"\n");
  const std::string run_dir = folder.path() + "/run";
  const ProgramResult result = RunProgram(
      {Kvtide(), "up", "--config", folder.path() + "/c.toml", "--run-dir", run_dir});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_TRUE(Has(result.err, "store-0 is starting: ")) << result.err;
  EXPECT_TRUE(Has(result.err, "store-0 is ready at ")) << result.err;
  const ProgramResult status = RunProgram({Kvtide(), "status", "--run-dir", run_dir});
  EXPECT_TRUE(Has(status.out, " joined at ") && Has(status.out, ", starting")) << status.out;
  EXPECT_EQ(RunProgram({Kvtide(), "down", "--run-dir", run_dir}).code, 0);
}

// One cluster for all of these; each leaves it idle.
class CliWithCluster : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    model_ = new ChatModelFolder;
    ClusterSpec spec;
    spec.model_folder = model_->path();
    auto cluster = TestCluster::Start(spec);
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = cluster->release();
  }
  static void TearDownTestSuite() {
    delete cluster_;
    delete model_;
    cluster_ = nullptr;
    model_ = nullptr;
  }
  void SetUp() override { ASSERT_NE(cluster_, nullptr); }

  static std::vector<std::string> Command(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), Kvtide());
    arguments.insert(arguments.end(), {"--run-dir", cluster_->run_dir()});
    return arguments;
  }
  static ProgramResult Run(std::vector<std::string> arguments, const std::string& input = "") {
    return RunProgram(Command(std::move(arguments)), input);
  }
  static json RunJson(std::vector<std::string> arguments, int code = 0) {
    arguments.insert(arguments.end(), {"-o", "json"});
    const ProgramResult result = Run(std::move(arguments));
    EXPECT_EQ(result.code, code) << result.out << result.err;
    json all = json::parse(result.out, nullptr, false);
    EXPECT_TRUE(all.is_object()) << result.out << result.err;
    return all;
  }

  static ChatModelFolder* model_;
  static TestCluster* cluster_;
};
ChatModelFolder* CliWithCluster::model_ = nullptr;
TestCluster* CliWithCluster::cluster_ = nullptr;

TEST_F(CliWithCluster, Generate_ArgumentFileAndStdin_GiveTheSameAnswer) {
  const TempFolder folder;
  const std::string prompt = "tell me a long story about the sea and the people who live by it";
  folder.Write("prompt.txt", prompt);
  const std::vector<std::string> tail = {"--max-tokens", "12", "--ignore-eos"};
  const auto with = [&](std::vector<std::string> head) {
    head.insert(head.end(), tail.begin(), tail.end());
    return head;
  };
  const json first = RunJson(with({"generate", prompt}));
  EXPECT_EQ(first["tokens"].size(), 12u);
  EXPECT_EQ(first["finish_reason"], "length");
  EXPECT_GT(first["prompt_tokens"].get<int>(), 10);
  EXPECT_FALSE(first.contains("error"));
  for (const char* key : {"ttft_ms", "second_token_ms", "tpot_ms", "total_ms"}) {
    EXPECT_GT(first[key].get<double>(), 0) << key;
  }
  EXPECT_EQ(first["prefill"]["prompt_tokens"], first["prompt_tokens"]);
  EXPECT_GT(first["decode"]["pulled_bytes"].get<uint64_t>(), 0u);
  EXPECT_EQ(first["decode"]["computed"]["base"], 0);
  const json second = RunJson(with({"generate", "--file", folder.path() + "/prompt.txt"}));
  EXPECT_EQ(second["tokens"], first["tokens"]);
  EXPECT_GT(second["prefill"]["reused_tokens"].get<int>(), 0);
  const ProgramResult third = Run(with({"generate"}), prompt);
  EXPECT_EQ(third.code, 0) << third.err;
  EXPECT_EQ(third.out, first["text"].get<std::string>() +
                           (first["text"].get<std::string>().back() == '\n' ? "" : "\n"));
  EXPECT_TRUE(Has(third.err, "time to first token")) << third.err;
}

TEST_F(CliWithCluster, Generate_ChatAndSampling_DependOnTheirOptions) {
  const std::vector<std::string> sampled = {"generate", "--chat", "hello there", "--max-tokens", "8",
                                            "--ignore-eos", "--temperature", "1", "--seed", "7"};
  const json first = RunJson(sampled);
  EXPECT_EQ(RunJson(sampled)["tokens"], first["tokens"]);
  std::vector<std::string> other = sampled;
  other.back() = "8";
  EXPECT_NE(RunJson(other)["tokens"], first["tokens"]);
  std::vector<std::string> system = sampled;
  system.insert(system.end(), {"--system", "be brief"});
  EXPECT_GT(RunJson(system)["prompt_tokens"].get<int>(), first["prompt_tokens"].get<int>());
}

TEST_F(CliWithCluster, Generate_MoreTokensThanTheContext_AreCutToItsRoom) {
  std::string prompt;
  for (int i = 0; i < 4000; ++i) prompt += " z";
  const json probe = RunJson({"generate", prompt, "--max-tokens", "1"}, 2);
  EXPECT_EQ(probe["error"]["code"], "INVALID_ARGUMENT");
  EXPECT_TRUE(Has(probe["error"]["message"], "beyond the context")) << probe;
  EXPECT_EQ(RunJson({"generate", "short", "--max-tokens", "5000", "--ignore-eos", "--chat"})
                ["finish_reason"],
            "length");
}

TEST_F(CliWithCluster, Generate_BadInput_IsRefusedClearlyAndTheClusterGoesOn) {
  const auto refused = [&](std::vector<std::string> arguments, const std::string& input,
                           const std::string& part) {
    const ProgramResult result = Run(std::move(arguments), input);
    EXPECT_EQ(result.code, 2) << result.err;
    EXPECT_TRUE(Has(result.err, part)) << result.err;
    EXPECT_TRUE(result.out.empty());
  };
  refused({"generate", ""}, "", "the prompt is empty");
  refused({"generate"}, "", "stdin is empty");
  refused({"generate"}, "abc\xff", "stdin is not UTF-8: byte 3");
  refused({"generate", "--file", "/no/such/file"}, "", "/no/such/file");
  refused({"generate", "hi", "--model", "gpt"}, "", "known: " + cluster_->model());
  refused({"generate", "hi", "--fidelity", "best"}, "", "best");
  refused({"generate", "hi", "--model-folder", "/no/such"}, "", "/no/such");
  EXPECT_EQ(RunJson({"generate", "hi", "--model", "gpt"}, 2)["error"]["code"], "NOT_FOUND");
  EXPECT_EQ(RunJson({"generate", "hi", "--max-tokens", "2", "--ignore-eos"})["tokens"].size(), 2u);
}

TEST_F(CliWithCluster, Show_TellsNodesTierAndRequestsInTablesAndJson) {
  RunJson({"generate", "something to look at, long enough for a block or two of the tier",
           "--max-tokens", "4", "--ignore-eos"});
  const json status = RunJson({"status"});
  EXPECT_EQ(status["nodes"].size(), 5u);
  EXPECT_GE(status["requests"]["done"].get<int>(), 1);
  EXPECT_EQ(status["requests"]["running"], 0);
  EXPECT_FALSE(status["events"].empty());
  for (const json& node : RunJson({"nodes"})["nodes"]) {
    EXPECT_EQ(node["state"], "ready") << node;
    EXPECT_GT(node["pid"].get<int>(), 0);
  }
  const json tier = RunJson({"tier"});
  ASSERT_EQ(tier["stores"].size(), 2u);
  uint64_t base = 0;
  uint64_t capacity = 0;
  for (const json& store : tier["stores"]) {
    base += store["resident_bytes"]["base"].get<uint64_t>();
    capacity += store["capacity_bytes"].get<uint64_t>();
  }
  EXPECT_EQ(tier["sum"]["resident_bytes"]["base"].get<uint64_t>(), base);
  EXPECT_EQ(tier["sum"]["capacity_bytes"].get<uint64_t>(), capacity);
  EXPECT_GT(base, 0u);
  EXPECT_GT(tier["sum"]["lookup_blocks"].get<uint64_t>(), 0u);
  for (const char* plane : {"base", "residual"}) {
    uint64_t on_disk = 0;
    for (const json& store : tier["stores"]) {
      on_disk += store["disk"]["bytes"][plane].get<uint64_t>();
    }
    EXPECT_EQ(tier["sum"]["disk"]["bytes"][plane].get<uint64_t>(), on_disk) << plane;
  }
  const json requests = RunJson({"requests"});
  ASSERT_FALSE(requests["requests"].empty());
  EXPECT_EQ(requests["requests"][0]["phase"], "done");
  EXPECT_EQ(requests["requests"][0]["output_tokens"], 4);
  EXPECT_EQ(RunJson({"requests", "--limit", "1"})["requests"].size(), 1u);
  EXPECT_TRUE(Has(Run({"tier"}).out, "RESIDUAL"));
  EXPECT_TRUE(Has(Run({"nodes"}).out, "decode-1"));
  EXPECT_TRUE(Has(Run({"status"}).out, "latest events"));
  EXPECT_TRUE(Has(Run({"requests"}).out, "PHASE"));
}

TEST_F(CliWithCluster, TierPurge_RemovesOneTenantAndNobodyElse) {
  const std::string prompt = "what two tenants ask alike, long enough for several blocks of the tier";
  const auto ask = [&](const std::string& tenant) {
    return RunJson({"generate", prompt, "--tenant", tenant, "--max-tokens", "4", "--ignore-eos"});
  };
  for (const char* tenant : {"acme", "globex"}) {
    EXPECT_EQ(ask(tenant)["prefill"]["reused_tokens"], 0) << tenant;
    EXPECT_GT(ask(tenant)["prefill"]["reused_tokens"].get<int>(), 0) << tenant;
  }
  json purged;
  // The pins of a request that has just ended go a moment later.
  const absl::Status done = Await(absl::Seconds(20), [&] {
    const ProgramResult result = Run({"tier", "purge", "--tenant", "acme", "-o", "json"});
    const json reply = json::parse(result.out, nullptr, false);
    if (purged.is_null()) purged = reply;
    EXPECT_TRUE(result.code != 0 || reply["complete"].get<bool>());
    return result.code == 0 ? absl::OkStatus() : absl::UnavailableError(result.out + result.err);
  });
  EXPECT_TRUE(done.ok()) << done;
  EXPECT_EQ(purged["tenant"], "acme");
  EXPECT_EQ(purged["stores"].size(), 2u);
  EXPECT_GT(purged["blocks"].get<int>(), 0);
  EXPECT_GT(ask("globex")["prefill"]["reused_tokens"].get<int>(), 0);
  EXPECT_EQ(ask("acme")["prefill"]["reused_tokens"], 0);
  EXPECT_TRUE(Has(Run({"tier", "purge", "--tenant", "nobody"}).out, "STORE"));
  EXPECT_EQ(Run({"tier", "purge"}).code, 2);
}

TEST_F(CliWithCluster, CtrlC_CancelsEverywhereWithinASecond) {
  Program generate(Command({"generate", "a story without an end", "--max-tokens", "1900",
                            "--ignore-eos"}));
  ASSERT_TRUE(generate.AwaitOutput(1, absl::Seconds(30)));
  const absl::Time interrupted = absl::Now();
  generate.Signal(SIGINT);
  const ProgramResult result = generate.Finish(absl::Seconds(20));
  EXPECT_EQ(result.code, 130) << result.err;
  EXPECT_TRUE(Has(result.err, "cancelled request")) << result.err;
  EXPECT_TRUE(Has(result.err, "coordinator")) << result.err;
  // One second for the cancellation; a heartbeat more until the coordinator shows a worker's slots.
  const absl::Status released =
      cluster_->AwaitNothingHeld(interrupted + absl::Milliseconds(1600) - absl::Now());
  EXPECT_TRUE(released.ok()) << released;
  EXPECT_EQ(RunJson({"requests", "--limit", "1"})["requests"][0]["phase"], "cancelled");
}

TEST_F(CliWithCluster, UpWhereAClusterRuns_IsRefused) {
  const TempFolder folder;
  folder.Write("c.toml", "[cluster]\nmodel_folder = \"" + model_->path() +
                             "\"\n[[store]]\n[[prefill]]\n[[decode]]\n");
  const ProgramResult result = Run({"up", "--config", folder.path() + "/c.toml"});
  EXPECT_EQ(result.code, 4);
  EXPECT_TRUE(Has(result.err, "runs from")) << result.err;
  EXPECT_EQ(RunJson({"status"})["nodes"].size(), 5u);
}

}  // namespace
}  // namespace kvt
