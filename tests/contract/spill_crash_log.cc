#include "tests/contract/spill_crash_log.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "tests/contract/spill_fixture.h"

namespace kvt {

CrashLogWriter::CrashLogWriter(const std::string& path)
    : fd_(open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600)) {
  KVT_CHECK(fd_ >= 0, path);
}

CrashLogWriter::~CrashLogWriter() { close(fd_); }

void CrashLogWriter::Write(char what, const std::map<uint64_t, CrashState>& states) {
  std::string line(1, what);
  for (const auto& [key, state] : states) {
    absl::StrAppend(&line, " ", key, " ", state.version, " ", state.bytes);
  }
  line += "\n";
  KVT_CHECK(write(fd_, line.data(), line.size()) == static_cast<ssize_t>(line.size()));
}

void CrashModel::Read(const std::string& log) {
  std::ifstream in(log);
  std::string line;
  while (std::getline(in, line)) {
    std::istringstream fields(line);
    std::string what;
    fields >> what;
    uint64_t key = 0;
    CrashState state;
    while (fields >> key >> state.version >> state.bytes) {
      version_max_ = std::max(version_max_, state.version);
      std::vector<CrashState>& states = possible_[key];
      if (states.empty()) states.push_back({});
      if (what == "W") {
        states.assign(1, state);
        ++acknowledged_;
      } else {
        states.push_back(state);
      }
    }
  }
  KVT_CHECK(truncate(log.c_str(), 0) == 0 || errno == ENOENT, log);
}

std::vector<std::string> CrashModel::Check(SpillStore& store) {
  std::vector<std::string> wrong;
  std::map<uint64_t, CrashState> found;
  for (const SpillScanned& record : ScanAll(store)) {
    uint64_t key = 0;
    while (key < kCrashKeys && !(SampleKey(key) == record.key)) ++key;
    std::string bytes;
    const absl::Status read = ReadOne(store, record.key, record.bytes, &bytes);
    if (!read.ok()) {
      wrong.push_back(absl::StrCat("key ", key, " is scanned and not readable: ", read.ToString()));
      continue;
    }
    bool known = false;
    for (const CrashState& state : possible_[key]) {
      if (state.version == 0 || state.bytes != record.bytes) continue;
      const SpillSample sample = Sample(key, state.version, state.bytes);
      if (sample.meta != record.meta) continue;
      known = true;
      found[key] = state;
      if (sample.bytes != bytes) wrong.push_back(absl::StrCat("key ", key, " holds foreign bytes"));
    }
    if (!known)
      wrong.push_back(absl::StrCat("key ", key, " is what nobody wrote last: ", record.meta));
  }
  for (auto& [key, states] : possible_) {
    const CrashState now = found.contains(key) ? found[key] : CrashState{};
    if (std::find(states.begin(), states.end(), now) == states.end()) {
      wrong.push_back(
          absl::StrCat("key ", key, " is gone; version ", states[0].version, " was acknowledged"));
    }
    if (!states.empty() && !(now == states[0])) ++unacknowledged_found_;
    if (now.version == 0) {
      std::string bytes;
      const absl::Status read = ReadOne(store, SampleKey(key), 1, &bytes);
      if (!absl::IsNotFound(read))
        wrong.push_back(absl::StrCat("key ", key, " is not scanned: ", read.ToString()));
    }
    states.assign(1, now);
    ++checked_;
  }
  if (store.Usage().records != found.size()) wrong.push_back("usage counts other records");
  return wrong;
}

}  // namespace kvt
