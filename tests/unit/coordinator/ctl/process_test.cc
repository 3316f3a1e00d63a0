#include "coordinator/ctl/process.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>

#include "absl/time/clock.h"
#include "coordinator/ctl/run_state.h"
#include "coordinator/ctl/table.h"

namespace kvt::ctl {
namespace {

class Process_ : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "kvt_process_XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    log_ = folder_ + "/log";
  }
  void TearDown() override {
    for (const char* name : {"/log", "/cluster.json"}) unlink((folder_ + name).c_str());
    rmdir(folder_.c_str());
  }
  ProcessId Start(const std::string& script) {
    const auto id = Spawn({"/bin/sh", "-c", script}, log_);
    EXPECT_TRUE(id.ok()) << id.status();
    return *id;
  }
  std::string folder_;
  std::string log_;
};

TEST_F(Process_, ChildThatEnds_IsSeenWithItsExitCodeAndItsLastLines) {
  const ProcessId child = Start("seq 1 100; exit 7");
  EXPECT_EQ(WaitAnyGone({child}, absl::Seconds(20)), 0);
  EXPECT_FALSE(IsAlive(child));
  EXPECT_EQ(HowItEnded(child.pid), "exit code 7");
  EXPECT_EQ(LastLines(log_, 3), "98\n99\n100");
}

TEST_F(Process_, StopAll_EndsTheWillingByTermAndTheOthersByKill) {
  const ProcessId willing = Start("exec sleep 1000");
  const ProcessId stubborn = Start("trap '' TERM; echo ready; while :; do read -r x < /dev/zero; done");
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  while (LastLines(log_, 1) != "ready" && absl::Now() < deadline) WaitAnyGone({willing}, absl::Milliseconds(5));
  const StopReport report = StopAll({willing, stubborn}, absl::Milliseconds(300));
  EXPECT_EQ(report.terminated, 1);
  EXPECT_EQ(report.killed, 1);
  EXPECT_FALSE(IsAlive(willing));
  EXPECT_FALSE(IsAlive(stubborn));
  EXPECT_EQ(StopAll({willing, stubborn}, absl::Seconds(1)).gone, 2);
}

TEST_F(Process_, PidOfAnotherProcess_IsNotOurs) {
  const ProcessId self{getpid(), StartTicks(getpid())};
  EXPECT_TRUE(IsAlive(self));
  EXPECT_FALSE(IsAlive(ProcessId{getpid(), self.start_ticks + 1}));
  EXPECT_EQ(StopAll({ProcessId{getpid(), self.start_ticks + 1}}, absl::Seconds(1)).gone, 1);
}

TEST_F(Process_, MissingProgram_IsAnErrorNamingIt) {
  const auto id = Spawn({"/no/such/program"}, log_);
  EXPECT_FALSE(id.ok());
  EXPECT_NE(std::string(id.status().message()).find("/no/such/program"), std::string::npos);
}

TEST_F(Process_, RunState_SurvivesTheRoundTrip) {
  EXPECT_EQ(ReadRunState(folder_).status().code(), absl::StatusCode::kNotFound);
  RunState state{.name = "n", .coordinator = "127.0.0.1:1", .model_name = "m", .model_folder = "f",
                 .processes = {{"store-0", "store", 42, UINT64_MAX, "c", "l"}}};
  ASSERT_TRUE(WriteRunState(folder_, state).ok());
  const auto got = ReadRunState(folder_);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->name, "n");
  EXPECT_EQ(got->coordinator, "127.0.0.1:1");
  EXPECT_EQ(got->model_name, "m");
  EXPECT_EQ(got->model_folder, "f");
  ASSERT_EQ(got->processes.size(), 1u);
  EXPECT_EQ(got->processes[0].name, "store-0");
  EXPECT_EQ(got->processes[0].kind, "store");
  EXPECT_EQ(got->processes[0].pid, 42);
  EXPECT_EQ(got->processes[0].start_ticks, UINT64_MAX);
}

TEST_F(Process_, RunStateThatIsNotOurs_IsInvalidArgumentNamingTheFile) {
  for (const char* text : {"", "[]", "{\"processes\": 3}", "{\"processes\": [{\"pid\": 0, \"start_ticks\": 1}]}",
                           "{\"processes\": [{\"pid\": \"x\"}]}"}) {
    std::ofstream(StateFile(folder_)) << text;
    const auto state = ReadRunState(folder_);
    EXPECT_EQ(state.status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_NE(std::string(state.status().message()).find("cluster.json"), std::string::npos);
  }
}

TEST(TextTable_, Columns_AreAlignedAndControlCharactersHarmless) {
  TextTable table({"NAME", ">COUNT"});
  table.Row({"a\x1b[2Jlong", "7"});
  table.Row({"b", "1234567"});
  EXPECT_EQ(table.Render(), "NAME         COUNT\na?[2Jlong        7\nb          1234567\n");
}

}  // namespace
}  // namespace kvt::ctl
