// A folder for one test, gone with it. Beside the build by default: a temporary folder is often in
// memory, where there is no O_DIRECT.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <string>

#include "absl/strings/str_cat.h"

namespace kvt {

class ScratchFolder {
 public:
  explicit ScratchFolder(const std::string& below = KVT_BINARY_DIR) {
    static std::atomic<int> number{0};
    path_ = absl::StrCat(below, "/scratch-", getpid(), "-", number++);
    std::error_code error;
    std::filesystem::create_directories(path_, error);
    EXPECT_FALSE(error) << path_ << ": " << error.message();
  }
  ~ScratchFolder() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace kvt
