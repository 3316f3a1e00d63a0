#include "tests/contract/rocksdb_medium.h"

#include <sys/stat.h>

#include <fstream>
#include <functional>
#include <iterator>

namespace kvt {
namespace {

// False of `visit` stops.
void VisitFiles(
    const std::string& folder,
    const std::function<bool(const std::string& path, const std::string& content)>& visit) {
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    std::ifstream in(entry.path(), std::ios::binary);
    const std::string content((std::istreambuf_iterator<char>(in)),
                              std::istreambuf_iterator<char>());
    if (!visit(entry.path().string(), content)) return;
  }
}

}  // namespace

uint64_t FolderBytes(const std::string& folder) {
  uint64_t bytes = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    struct stat info {};
    if (entry.is_regular_file() && stat(entry.path().c_str(), &info) == 0) {
      bytes += static_cast<uint64_t>(info.st_blocks) * 512;
    }
  }
  return bytes;
}

bool FolderContains(const std::string& folder, const std::string& pattern) {
  bool found = false;
  VisitFiles(folder, [&](const std::string&, const std::string& content) {
    found = content.find(pattern) != std::string::npos;
    return !found;
  });
  return found;
}

absl::StatusOr<std::unique_ptr<SpillStore>> RocksDbMedium::Open(uint64_t quota_bytes) {
  options_.quota_bytes = quota_bytes;
  return OpenRocksDbSpillStore(options_);
}

void RocksDbMedium::Damage(const SpillKey&, const std::string& bytes) {
  ASSERT_GE(bytes.size(), 64u);
  bool done = false;
  VisitFiles(folder(), [&](const std::string& path, const std::string& content) {
    const size_t at = content.find(bytes.substr(0, 64));
    if (at == std::string::npos) return true;
    std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(static_cast<std::streamoff>(at + bytes.size() / 2));
    const char flipped = static_cast<char>(content[at + bytes.size() / 2] ^ 0x10);
    file.write(&flipped, 1);
    done = file.good();
    return false;
  });
  ASSERT_TRUE(done) << "no file holds the record";
}

}  // namespace kvt
