// What the process that is killed tells the one that checks: a line per intention and per
// acknowledgement, in a file that outlives it. Content is a function of key, version and size
// (spill_fixture.h).
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "kernels/base/random.h"
#include "kvstore/media/spill_store.h"

namespace kvt {

inline constexpr uint64_t kCrashKeys = 96;
inline constexpr uint64_t kCrashQuotaBytes = 48u << 20;

// 10 KB to 266 KB, fixed: a reader of another size would be told that the record is damaged.
inline uint64_t CrashBytesOf(uint64_t key) { return 10'000 + 64 * (Mix64(key) % 4'000); }

// A key's content; version 0: not there.
struct CrashState {
  uint64_t version = 0;
  uint64_t bytes = 0;
  friend bool operator==(const CrashState&, const CrashState&) = default;
};

class CrashLogWriter {
 public:
  explicit CrashLogWriter(const std::string& path);
  ~CrashLogWriter();
  CrashLogWriter(const CrashLogWriter&) = delete;
  CrashLogWriter& operator=(const CrashLogWriter&) = delete;
  // Before the call, and after it has returned OK. One write each, whole.
  void Intend(const std::map<uint64_t, CrashState>& states) { Write('w', states); }
  void Acknowledge(const std::map<uint64_t, CrashState>& states) { Write('W', states); }

 private:
  void Write(char what, const std::map<uint64_t, CrashState>& states);
  int fd_ = -1;
};

// What may be there after a kill: the last acknowledged state of each key, or one intended since.
class CrashModel {
 public:
  // Adds what the log tells; then the log is emptied.
  void Read(const std::string& log);
  // Compares with the store, whose content becomes the only state each key can have. One line per
  // violation.
  std::vector<std::string> Check(SpillStore& store);

  [[nodiscard]] uint64_t acknowledged() const { return acknowledged_; }
  [[nodiscard]] uint64_t checked() const { return checked_; }
  [[nodiscard]] uint64_t unacknowledged_found() const { return unacknowledged_found_; }
  [[nodiscard]] uint64_t version_max() const { return version_max_; }

 private:
  std::map<uint64_t, std::vector<CrashState>> possible_;  // the first one is acknowledged
  uint64_t acknowledged_ = 0;
  uint64_t checked_ = 0;
  uint64_t unacknowledged_found_ = 0;
  uint64_t version_max_ = 0;
};

}  // namespace kvt
