#include "kvstore/node/host_probe.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "absl/strings/match.h"
#include "kernels/base/units.h"
#include "kvstore/node/disk_probe.h"
#include "kvstore/transport/ucx_devices.h"
#include "tests/support/scratch_folder.h"

namespace kvt {
namespace {

HostProbeOptions Small() {
  HostProbeOptions options;
  options.arena_bytes = 4 * kMiB;
  options.tls = "tcp";
  return options;
}

ProbeLine LineOf(const HostProbeOptions& options, const std::string& check) {
  for (const ProbeLine& line : ProbeHost(options)) {
    if (line.check == check) return line;
  }
  ADD_FAILURE() << "no line " << check;
  return {};
}

TEST(HostProbe, F10_SpillFolderThatCannotBeMade_FailsNamingItAndTheStartIsRefused) {
  HostProbeOptions options = Small();
  options.spill_folder = "/proc/nonexistent/spill";
  const ProbeLine line = LineOf(options, "spill folder");
  EXPECT_EQ(line.state, ProbeState::kFail);
  EXPECT_TRUE(absl::StrContains(line.found, "/proc/nonexistent/spill: no file can be made in /proc")) << line.found;
  EXPECT_FALSE(line.remedy.empty());
  const absl::Status status = ProbeStatus(ProbeHost(options));
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(absl::StrContains(status.message(), "/proc/nonexistent/spill")) << status;
}

TEST(HostProbe, SpillQuotaBeyondTheDisk_IsAWarning) {
  ScratchFolder folder;
  HostProbeOptions options = Small();
  options.spill_folder = folder.path();
  options.spill_bytes = uint64_t{1} << 60;
  const ProbeLine line = LineOf(options, "spill folder");
  EXPECT_EQ(line.state, ProbeState::kWarn);
  EXPECT_TRUE(absl::StrContains(line.found, "less than the quota")) << line.found;
  EXPECT_TRUE(ProbeStatus(ProbeHost(options)).ok());
}

TEST(HostProbe, SpillFolderThatWorks_IsMeasuredAndLeftEmpty) {
  ScratchFolder folder;
  HostProbeOptions options = Small();
  options.spill_folder = folder.path();
  options.spill_bytes = kMiB;
  options.measure_disk = true;
  const ProbeLine line = LineOf(options, "spill folder");
  EXPECT_NE(line.state, ProbeState::kFail) << line.found;
  const DiskProbe disk = ProbeDisk(folder.path(), true);
  ASSERT_TRUE(disk.status.ok()) << disk.status;
  EXPECT_GT(disk.free_bytes, 0u);
  if (disk.direct && disk.free_bytes > 128 * kMiB) {
    EXPECT_GT(disk.write_bytes_per_s, 0);
    EXPECT_GT(disk.read_bytes_per_s, 0);
    EXPECT_TRUE(absl::StrContains(line.found, "class") || absl::StrContains(line.found, "spinning"))
        << line.found;
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  // One that the store would make.
  EXPECT_TRUE(ProbeDisk(folder.path() + "/a/b", false).status.ok());
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(HostProbe, Json_HasEveryLine) {
  const std::vector<ProbeLine> lines = {{"a", ProbeState::kOk, "x", ""},
                                        {"b", ProbeState::kWarn, "\"q\"\xff", "do"}};
  const std::string json = ProbeJson(lines);
  EXPECT_TRUE(absl::StrContains(json, "\"check\": \"a\"")) << json;
  EXPECT_TRUE(absl::StrContains(json, "\"state\": \"warn\"")) << json;
  EXPECT_TRUE(absl::StrContains(json, "\\\"q\\\"")) << json;
  EXPECT_TRUE(absl::StrContains(ProbeText(lines), "-> do"));
  EXPECT_TRUE(ProbeStatus(lines).ok());  // a warning is not a failure
}

TEST(UcxDevices, F10_NetDevices_AreCheckedAgainstThoseThatExist) {
  const std::vector<UcxDevice> devices = {{"tcp", "lo", true},
                                          {"rc_mlx5", "mlx5_0:1", true},
                                          {"posix", "memory", false}};
  for (const char* const good : {"", "all", "lo", "mlx5_0:1", "mlx5_0", "lo,mlx5_0:1", "^lo", "mlx5*"}) {
    EXPECT_TRUE(CheckNetDevices(devices, good).ok()) << good;
  }
  for (const char* const bad : {"eth7", "lo,eth7", "memory", "mlx5", "^eth7"}) {
    const absl::Status status = CheckNetDevices(devices, bad);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad;
    EXPECT_TRUE(absl::StrContains(status.message(), "there are: lo, mlx5_0:1")) << status;
  }
  const auto here = ListUcxDevices();
  ASSERT_TRUE(here.ok()) << here.status();
  EXPECT_FALSE(here->empty());
}

}  // namespace
}  // namespace kvt
