// Where tests find the real model, and folders for tests to write in.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

namespace kvt {

// KVT_MODEL_DIR, or var/models/SmolLM2-135M-Instruct of this tree; empty when neither is there.
// deploy/fetch_model.sh makes it, tests/run.sh calls that first.
inline std::string RealModelFolder() {
  const char* named = std::getenv("KVT_MODEL_DIR");
  const std::string folder =
      named != nullptr ? named : KVT_SOURCE_DIR "/var/models/SmolLM2-135M-Instruct";
  return std::filesystem::exists(folder + "/config.json") ? folder : "";
}

// In a test: const std::string folder = ...; for use as KVT_SKIP_WITHOUT_MODEL(folder).
#define KVT_SKIP_WITHOUT_MODEL(folder) \
  if ((folder).empty())                \
  GTEST_SKIP() << "no model folder: run deploy/fetch_model.sh, or set KVT_MODEL_DIR"

// A folder that is removed with everything in it. Path only; not thread-safe.
class TempFolder {
 public:
  TempFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "kvt_test_XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  [[nodiscard]] const std::string& path() const { return path_; }
  // A new file each time: truncating an old one makes ext4 flush it.
  void Write(const std::string& name, const std::string& content) const {
    std::filesystem::remove(path_ + "/" + name);
    std::ofstream(path_ + "/" + name, std::ios::binary) << content;
  }

 private:
  std::string path_;
};

}  // namespace kvt
