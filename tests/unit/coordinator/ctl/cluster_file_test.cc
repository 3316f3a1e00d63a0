#include "coordinator/ctl/cluster_file.h"

#include <gtest/gtest.h>

#include <cstring>

namespace kvt::ctl {
namespace {

absl::StatusOr<ClusterPlan> Read(const std::string& text) {
  auto file = OptionsFile::Parse(text, "cluster.toml");
  if (!file.ok()) return file.status();
  return ReadClusterPlan(*file);
}

constexpr char kUsual[] = R"([cluster]
name = "test"
model_folder = "models/smol/"
[coordinator]
death_after = "1s"
[node]
log_level = "debug"
[tier]
transport = "auto"
[model]
threads = 2
[[store]]
count = 2
arena_bytes = "1GiB"
[[prefill]]
chunk_tokens = 128
[[decode]]
name = "first"
[[decode]]
batch_max = 4
tier = { transport = "shm" }
node = { log_level = "info" }
)";

const DaemonPlan& Find(const ClusterPlan& plan, const std::string& name) {
  for (const DaemonPlan& daemon : plan.daemons) {
    if (daemon.name == name) return daemon;
  }
  ADD_FAILURE() << "no daemon " << name;
  return plan.coordinator;
}

std::string Value(const DaemonPlan& daemon, const std::string& table, const std::string& key) {
  const auto found = daemon.tables.find(table);
  if (found == daemon.tables.end() || !found->second.contains(key)) return "(none)";
  std::string value = found->second.at(key);
  for (char& c : value) c = c == '"' ? '\'' : c;  // both kinds of quotes are TOML
  return value;
}

TEST(ClusterFile, CalibrationAndTenants_AreRead_ThePassedOnOnesUnread) {
  const auto plan = Read(
      "[cluster]\nmodel_folder = \"m\"\ncalibration = \"m.cal\"\n[coordinator]\n"
      "[[coordinator.tenants]]\nname = \"a\"\nfidelity = \"sparse\"\n"
      "[[store]]\n[[prefill]]\n[[decode]]\n");
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->calibration, "m.cal");
  const std::string tenants = Value(plan->coordinator, "coordinator", "tenants");
  EXPECT_NE(tenants.find("sparse"), std::string::npos) << tenants;
}

TEST(ClusterFile, UsualFile_MakesEachDaemonsTables) {
  const auto plan = Read(kUsual);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->name, "test");
  EXPECT_EQ(plan->model_folder, "models/smol");
  EXPECT_EQ(plan->model_name, "smol");
  ASSERT_EQ(plan->daemons.size(), 5u);
  EXPECT_EQ(Value(plan->coordinator, "coordinator", "death_after"), "'1s'");
  EXPECT_EQ(Value(plan->coordinator, "node", "log_level"), "'debug'");
  EXPECT_EQ(Value(plan->coordinator, "tier", "transport"), "(none)");
  for (const char* name : {"store-0", "store-1"}) {
    const DaemonPlan& store = Find(*plan, name);
    EXPECT_EQ(store.kind, "store");
    EXPECT_EQ(Value(store, "store", "arena_bytes"), "'1GiB'");
    EXPECT_EQ(Value(store, "store", "count"), "(none)");
    EXPECT_EQ(Value(store, "tier", "transport"), "(none)");
  }
  const DaemonPlan& prefill = Find(*plan, "prefill-0");
  EXPECT_EQ(Value(prefill, "prefill", "chunk_tokens"), "128");
  EXPECT_EQ(Value(prefill, "tier", "transport"), "'auto'");
  EXPECT_EQ(Value(prefill, "model", "threads"), "2");
  EXPECT_EQ(Value(Find(*plan, "first"), "tier", "transport"), "'auto'");
  EXPECT_EQ(Value(Find(*plan, "first"), "decode", "name"), "(none)");
  const DaemonPlan& second = Find(*plan, "decode-1");
  EXPECT_EQ(Value(second, "tier", "transport"), "'shm'");
  EXPECT_EQ(Value(second, "node", "log_level"), "'info'");
  EXPECT_EQ(Value(second, "decode", "batch_max"), "4");
  EXPECT_EQ(Value(second, "decode", "tier"), "(none)");
}

TEST(ClusterFile, RenderedConfig_ReadsBackAsTheSameValues) {
  const auto plan = Read(kUsual);
  ASSERT_TRUE(plan.ok());
  DaemonPlan daemon = Find(*plan, "decode-1");
  daemon.tables["node"]["name"] = Quoted("a\"b\\c\n");
  auto file = OptionsFile::Parse(RenderConfig(daemon.tables), "decode-1.toml");
  ASSERT_TRUE(file.ok()) << file.status() << RenderConfig(daemon.tables);
  std::string name;
  std::string transport;
  int batch_max = 0;
  file->Table("node").Get("name", &name);
  file->Table("tier").Get("transport", &transport);
  file->Table("decode").Get("batch_max", &batch_max, 0, 100);
  EXPECT_EQ(name, "a\"b\\c\n");
  EXPECT_EQ(transport, "shm");
  EXPECT_EQ(batch_max, 4);
}

TEST(ClusterFile, UnknownTableOrClusterKey_IsRefusedWithFileAndLine) {
  auto status = Read(std::string(kUsual) + "[stores]\n").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(status.message()).find("cluster.toml:23: stores: unknown key"),
            std::string::npos)
      << status;
  status = Read("[cluster]\nmodel_folder = \"m\"\nmodle_name = \"x\"\n[[store]]\n[[prefill]]\n[[decode]]\n")
               .status();
  EXPECT_NE(std::string(status.message()).find("cluster.toml:3: cluster.modle_name"),
            std::string::npos)
      << status;
}

TEST(ClusterFile, MissingParts_AreAllNamed) {
  const auto status = Read("[cluster]\n").status();
  for (const char* part : {"model_folder", "[[store]]", "[[prefill]]", "[[decode]]"}) {
    EXPECT_NE(std::string(status.message()).find(part), std::string::npos) << part << status;
  }
}

TEST(ClusterFile, NameTwiceOrWithCount_IsRefused) {
  const std::string head = "[cluster]\nmodel_folder = \"m\"\n[[prefill]]\n[[decode]]\n";
  auto status = Read(head + "[[store]]\nname = \"a\"\n[[store]]\nname = \"a\"\n").status();
  EXPECT_NE(std::string(status.message()).find("\"a\" is taken"), std::string::npos) << status;
  status = Read(head + "[[store]]\nname = \"a\"\ncount = 2\n").status();
  EXPECT_NE(std::string(status.message()).find("does not go with count"), std::string::npos);
  status = Read(head + "[[store]]\ncount = 1000\n").status();
  EXPECT_NE(std::string(status.message()).find("count"), std::string::npos) << status;
}

TEST(ClusterFile, Quickstart_IsReadAndHasTheShapeTheReadmeTells) {
  auto file = OptionsFile::Load(std::string(KVT_SOURCE_DIR) + "/deploy/quickstart.toml");
  ASSERT_TRUE(file.ok()) << file.status();
  const auto plan = ReadClusterPlan(*file);
  ASSERT_TRUE(plan.ok()) << plan.status();
  int stores = 0;
  int prefill = 0;
  int decode = 0;
  for (const DaemonPlan& daemon : plan->daemons) {
    stores += daemon.kind == "store" ? 1 : 0;
    prefill += daemon.kind == "prefill" ? 1 : 0;
    decode += daemon.kind == "decode" ? 1 : 0;
  }
  EXPECT_EQ(stores, 2);
  EXPECT_EQ(prefill, 1);
  EXPECT_EQ(decode, 2);
}

}  // namespace
}  // namespace kvt::ctl
