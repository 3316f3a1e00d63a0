#include "kvstore/node/host_probe.h"

#include <dlfcn.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>

#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "kernels/base/units.h"
#include "kvstore/client/listen_check.h"
#include "kvstore/media/shared_mapping.h"
#include "kvstore/node/disk_probe.h"
#include "kvstore/transport/ucx_devices.h"
#include "kvstore/transport/ucx_send_guard.h"

namespace kvt {
namespace {

// One UCX worker with its shared-memory transports on takes 4.2 MiB of /dev/shm and does not start
// without (measured, 1.13); below the second, those of several daemons do not fit.
constexpr uint64_t kDevShmLeast = 8 * kMiB;
constexpr uint64_t kDevShmMin = 64 * kMiB;
// Sockets of many workers, and RocksDB's files.
constexpr uint64_t kOpenFilesMin = 4096;

std::string FirstLine(const std::string& path) {
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  return line;
}

// The word in brackets of "always [madvise] never".
std::string Chosen(const std::string& line) {
  const size_t open = line.find('[');
  const size_t close = line.find(']');
  if (open == std::string::npos || close == std::string::npos) return line;
  return line.substr(open + 1, close - open - 1);
}

std::string LimitText(uint64_t limit) {
  return limit == RLIM_INFINITY ? "unlimited" : FormatBytes(limit);
}

uint64_t SoftLimit(int resource) {
  rlimit limit{};
  if (getrlimit(static_cast<__rlimit_resource_t>(resource), &limit) != 0) return RLIM_INFINITY;
  return limit.rlim_cur;
}

class Probe {
 public:
  explicit Probe(const HostProbeOptions& options) : options_(options) {}

  std::vector<ProbeLine> Run() {
    Ucx();
    LockedMemory();
    Memory();
    FileSize();
    DevShm();
    OpenFiles();
    HugePages();
    Gpu();
    Disk();
    Ports();
    return std::move(lines_);
  }

 private:
  void Say(std::string check, ProbeState state, std::string found, std::string remedy = "") {
    lines_.push_back({std::move(check), state, std::move(found), std::move(remedy)});
  }

  void Ucx() {
    if (!options_.ucx) return Say("ucx devices", ProbeState::kOk, "ucx is off");
    const auto devices = ListUcxDevices();
    if (!devices.ok()) {
      return Say("ucx devices", ProbeState::kFail, std::string(devices.status().message()),
                 "install UCX with its modules, or set ucx = false");
    }
    devices_ = *devices;
    std::set<std::string> network, transports;
    for (const UcxDevice& device : devices_) {
      transports.insert(device.transport);
      if (device.network) network.insert(absl::StrCat(device.transport, "/", device.device));
    }
    const char* const environment = std::getenv("UCX_NET_DEVICES");
    const std::string asked = !options_.net_devices.empty() ? options_.net_devices
                              : environment != nullptr      ? environment
                                                            : "";
    const absl::Status known = CheckNetDevices(devices_, asked);
    if (!known.ok()) {
      Say("ucx devices", ProbeState::kFail, std::string(known.message()),
          "name one that exists in ucx_net_devices; `ucx_info -d` lists them");
    } else if (network.empty()) {
      Say("ucx devices", ProbeState::kFail, "UCX finds no network device",
          "bring an interface up (`ip link`), or set ucx = false for workers of this host alone");
    } else {
      Say("ucx devices", ProbeState::kOk, absl::StrJoin(network, ", "));
    }
    Transports(transports);
    if (UcxSendGuardActive()) {
      Say("ucx zero-copy", ProbeState::kOk, "on, guarded");
    } else {
      Say("ucx zero-copy", ProbeState::kWarn, "off: this program does not export the send guard",
          "link it with exported symbols (docs/decisions/0004); sends cost a copy until then");
    }
  }

  void Transports(const std::set<std::string>& transports) {
    std::vector<std::string> missing;
    for (absl::string_view name : absl::StrSplit(options_.tls, ',', absl::SkipEmpty())) {
      // Groups ("ib", "sm") and exclusions are UCX's business; a network transport must be there.
      if (name != "tcp" && !(NeedsLockedMemory(name) && name != "ib")) continue;
      const bool found = std::any_of(transports.begin(), transports.end(),
                                     [name](const std::string& t) { return absl::StartsWith(t, name); });
      if (!found) missing.emplace_back(name);
    }
    const std::string all = absl::StrJoin(transports, ", ");
    if (missing.empty()) return Say("ucx transports", ProbeState::kOk, all);
    Say("ucx transports", ProbeState::kFail,
        absl::StrCat("ucx_tls names ", absl::StrJoin(missing, ", "), ", which is not here; there are: ",
                     all),
        "correct ucx_tls, or load the device's driver");
  }

  void LockedMemory() {
    const uint64_t limit = SoftLimit(RLIMIT_MEMLOCK);
    std::string need;
    for (const UcxDevice& device : devices_) {
      if (NeedsLockedMemory(device.transport)) need = absl::StrCat(device.transport, "/", device.device);
    }
    for (absl::string_view name : absl::StrSplit(options_.tls, ',', absl::SkipEmpty())) {
      if (NeedsLockedMemory(name)) need = std::string(name);
    }
    if (!options_.ucx) need.clear();
    if (need.empty()) {
      return Say("locked memory", ProbeState::kOk,
                 absl::StrCat(LimitText(limit), "; no RDMA device here needs it"));
    }
    if (limit >= options_.arena_bytes) {
      return Say("locked memory", ProbeState::kOk, LimitText(limit));
    }
    if (HasIpcLock()) {
      return Say("locked memory", ProbeState::kOk,
                 absl::StrCat(LimitText(limit), ", which CAP_IPC_LOCK lifts"));
    }
    Say("locked memory", ProbeState::kFail,
        absl::StrCat("limit ", LimitText(limit), ", ", need, " must register the arena of ",
                     FormatBytes(options_.arena_bytes)),
        "raise it: `ulimit -l unlimited`, LimitMEMLOCK=infinity (systemd), --ulimit memlock=-1 "
        "(containers)");
  }
  // The limit does not bind who has it.
  static bool HasIpcLock() {
    std::ifstream in("/proc/self/status");
    for (std::string line; std::getline(in, line);) {
      if (!absl::StartsWith(line, "CapEff:")) continue;
      const uint64_t mask = std::strtoull(line.c_str() + 7, nullptr, 16);
      return (mask >> 14 & 1) != 0;  // CAP_IPC_LOCK
    }
    return false;
  }

  void Memory() {
    const absl::Status available = CheckMemoryAvailable("arena", options_.arena_bytes);
    if (!available.ok()) {
      return Say("memory", ProbeState::kFail, std::string(available.message()),
                 "set a smaller arena_bytes, or free memory");
    }
    const uint64_t limit = ContainerLimit();
    if (limit < options_.arena_bytes) {
      return Say("memory", ProbeState::kFail,
                 absl::StrCat("the container's limit is ", FormatBytes(limit), ", the arena ",
                              FormatBytes(options_.arena_bytes)),
                 "raise the memory limit of the container or unit, or set a smaller arena_bytes");
    }
    Say("memory", ProbeState::kOk,
        absl::StrCat("the arena of ", FormatBytes(options_.arena_bytes), " fits"));
  }
  // Of this process's control group; UINT64_MAX: none.
  static uint64_t ContainerLimit() {
    uint64_t least = UINT64_MAX;
    std::ifstream in("/proc/self/cgroup");
    for (std::string line; std::getline(in, line);) {
      const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
      if (parts.size() != 3) continue;
      std::string file;
      if (parts[1].empty()) {
        file = absl::StrCat("/sys/fs/cgroup", parts[2], "/memory.max");
      } else if (parts[1] == "memory") {
        file = absl::StrCat("/sys/fs/cgroup/memory", parts[2], "/memory.limit_in_bytes");
      }
      uint64_t limit = 0;
      if (!file.empty() && absl::SimpleAtoi(FirstLine(file), &limit)) least = std::min(least, limit);
    }
    return least;
  }

  void FileSize() {
    const uint64_t limit = SoftLimit(RLIMIT_FSIZE);
    if (limit == RLIM_INFINITY || limit >= options_.arena_bytes) {
      return Say("file size limit", ProbeState::kOk, LimitText(limit));
    }
    Say("file size limit", ProbeState::kFail,
        absl::StrCat("limit ", LimitText(limit), ", the arena is a memory file of ",
                     FormatBytes(options_.arena_bytes)),
        "raise it: `ulimit -f unlimited`, LimitFSIZE=infinity (systemd)");
  }

  void DevShm() {
    struct statvfs fs {};
    if (statvfs("/dev/shm", &fs) != 0) {
      return Say("/dev/shm", ProbeState::kWarn, "not there",
                 "mount a tmpfs on /dev/shm: UCX's own shared-memory transports need it");
    }
    const uint64_t size = uint64_t{fs.f_blocks} * fs.f_frsize;
    const uint64_t free = uint64_t{fs.f_bavail} * fs.f_frsize;
    const std::string found = absl::StrCat(FormatBytes(free), " free of ", FormatBytes(size));
    if (free >= kDevShmMin || !UsesDevShm()) return Say("/dev/shm", ProbeState::kOk, found);
    Say("/dev/shm", free < kDevShmLeast ? ProbeState::kFail : ProbeState::kWarn,
        absl::StrCat(found, "; UCX's shared-memory transports need more"),
        absl::StrCat("make it ", FormatBytes(kDevShmMin), " or more (--shm-size of containers, size= of "
                     "the mount), or set ucx_tls = \"tcp\" so that UCX does not use it; the arena does not"));
  }
  // Shared-memory transports are among those that UCX may take.
  bool UsesDevShm() const {
    if (!options_.ucx) return false;
    const char* const environment = std::getenv("UCX_TLS");
    const std::string tls = !options_.tls.empty() ? options_.tls
                            : environment != nullptr ? environment
                                                     : "all";
    for (const absl::string_view name : absl::StrSplit(tls, ',')) {
      for (const absl::string_view shared : {"all", "sm", "shm", "mm", "posix"}) {
        if (name == shared) return true;
      }
    }
    return absl::StartsWith(tls, "^");
  }

  void OpenFiles() {
    const uint64_t limit = SoftLimit(RLIMIT_NOFILE);
    if (limit >= kOpenFilesMin) return Say("open files", ProbeState::kOk, absl::StrCat(limit));
    Say("open files", ProbeState::kWarn, absl::StrCat("limit ", limit),
        absl::StrCat("raise it to ", kOpenFilesMin, " or more: `ulimit -n`, LimitNOFILE= (systemd)"));
  }

  void HugePages() {
    const std::string folder = "/sys/kernel/mm/transparent_hugepage/";
    const std::string shared = Chosen(FirstLine(folder + "shmem_enabled"));
    if (shared.empty()) {
      return Say("huge pages", ProbeState::kWarn, "the kernel has no transparent huge pages",
                 "a kernel with them moves small pieces about 10 % faster");
    }
    if (shared == "never" || shared == "deny") {
      return Say("huge pages", ProbeState::kWarn, absl::StrCat("shared memory: ", shared),
                 absl::StrCat("echo advise > ", folder, "shmem_enabled: small pieces move about 10 % "
                              "faster"));
    }
    Say("huge pages", ProbeState::kOk, absl::StrCat("shared memory: ", shared));
  }

  void Gpu() {
    const bool driver = access("/proc/driver/nvidia/version", R_OK) == 0;
    const bool cuda_in_ucx =
        std::any_of(devices_.begin(), devices_.end(), [](const UcxDevice& device) {
          return absl::StartsWith(device.transport, "cuda");
        });
    if (!driver) {
      return Say("gpu", ProbeState::kOk, "no NVIDIA driver: workers here compute on processors");
    }
    void* const library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (library == nullptr) {
      return Say("gpu", ProbeState::kWarn, "an NVIDIA driver, but no libcuda.so.1",
                 "install the driver's user-space library (containers: --gpus, NVIDIA container "
                 "toolkit)");
    }
    dlclose(library);
    if (options_.ucx && !cuda_in_ucx) {
      return Say("gpu", ProbeState::kWarn, "a CUDA driver, but UCX is without GPU support",
                 "transfers go through pinned host memory; a UCX built --with-cuda lifts that");
    }
    Say("gpu", ProbeState::kOk, "CUDA driver, UCX with GPU support");
  }

  void Disk() {
    if (options_.spill_folder.empty()) {
      return Say("spill folder", ProbeState::kOk, "none configured: nothing is spilled");
    }
    const DiskProbe disk = ProbeDisk(options_.spill_folder, options_.measure_disk);
    if (!disk.status.ok()) {
      return Say("spill folder", ProbeState::kFail, std::string(disk.status.message()),
                 "make the folder, owned and writable by this user");
    }
    std::string found = absl::StrCat(options_.spill_folder, ": ", FormatBytes(disk.free_bytes), " free");
    if (disk.write_bytes_per_s > 0) {
      absl::StrAppendFormat(&found, ", writes %.0f MB/s, reads %.0f MB/s: %s",
                            disk.write_bytes_per_s / 1e6, disk.read_bytes_per_s / 1e6,
                            DiskClass(disk));
    }
    // What was spilled before takes room of its own, and the store stops in time: no failure.
    if (disk.free_bytes < options_.spill_bytes) {
      return Say("spill folder", ProbeState::kWarn,
                 absl::StrCat(found, ", less than the quota of ", FormatBytes(options_.spill_bytes)),
                 "free room, unless what is spilled already takes it, or set a smaller spill_bytes");
    }
    if (!disk.direct) {
      return Say("spill folder", ProbeState::kWarn, absl::StrCat(found, "; no O_DIRECT"),
                 "use a local file system (ext4, xfs): without O_DIRECT spilling fills the page cache");
    }
    Say("spill folder", ProbeState::kOk, found);
  }

  void Ports() {
    for (const HostProbeOptions::Listen& listen : options_.listens) {
      if (listen.address.empty()) continue;
      const absl::Status status = CheckCanListen(listen.address);
      if (status.ok()) {
        Say(listen.what, ProbeState::kOk, absl::StrCat(listen.address, " is free"));
      } else {
        Say(listen.what, ProbeState::kFail, std::string(status.message()),
            absl::StrCat("change ", listen.what, " or stop what is there"));
      }
    }
  }

  const HostProbeOptions& options_;
  std::vector<UcxDevice> devices_;
  std::vector<ProbeLine> lines_;
};

}  // namespace

const char* ProbeStateName(ProbeState state) {
  switch (state) {
    case ProbeState::kOk:
      return "ok";
    case ProbeState::kWarn:
      return "warn";
    case ProbeState::kFail:
      return "fail";
  }
  return "?";
}

std::vector<ProbeLine> ProbeHost(const HostProbeOptions& options) { return Probe(options).Run(); }

absl::Status ProbeStatus(const std::vector<ProbeLine>& lines) {
  std::vector<std::string> failed;
  for (const ProbeLine& line : lines) {
    if (line.state != ProbeState::kFail) continue;
    failed.push_back(absl::StrCat(line.check, ": ", line.found, "; ", line.remedy));
  }
  if (failed.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrJoin(failed, "\n"));
}

std::string ProbeText(const std::vector<ProbeLine>& lines) {
  std::string text;
  for (const ProbeLine& line : lines) {
    absl::StrAppendFormat(&text, "%-4s  %-16s  %s\n", ProbeStateName(line.state), line.check,
                          line.found);
    if (!line.remedy.empty()) absl::StrAppendFormat(&text, "%24s-> %s\n", "", line.remedy);
  }
  return text;
}

std::string ProbeJson(const std::vector<ProbeLine>& lines) {
  nlohmann::json checks = nlohmann::json::array();
  for (const ProbeLine& line : lines) {
    checks.push_back({{"check", line.check},
                      {"state", ProbeStateName(line.state)},
                      {"found", line.found},
                      {"remedy", line.remedy}});
  }
  return nlohmann::json{{"checks", checks}}.dump(
             2, ' ', false, nlohmann::json::error_handler_t::replace) +
         "\n";
}

}  // namespace kvt
