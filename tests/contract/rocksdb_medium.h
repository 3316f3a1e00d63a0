// The RocksDB spill store's folder, for the SpillStore suite. Used by one thread.
#pragma once

#include <memory>
#include <string>

#include "kvstore/media/rocksdb_spill_store.h"
#include "tests/contract/spill_fixture.h"
#include "tests/support/scratch_folder.h"

namespace kvt {

// Every file below `folder` (path and content).
uint64_t FolderBytes(const std::string& folder);
bool FolderContains(const std::string& folder, const std::string& pattern);

class RocksDbMedium final : public SpillMedium {
 public:
  explicit RocksDbMedium(bool direct_io = true) {
    options_.direct_io = direct_io;
    options_.folder = folder_.path();
  }

  absl::StatusOr<std::unique_ptr<SpillStore>> Open(uint64_t quota_bytes) override;
  void Damage(const SpillKey& key, const std::string& bytes) override;
  bool Contains(const std::string& pattern) override {
    return FolderContains(folder_.path(), pattern);
  }

  RocksDbSpillOptions& options() { return options_; }
  [[nodiscard]] const std::string& folder() const { return folder_.path(); }

 private:
  const ScratchFolder folder_;
  RocksDbSpillOptions options_;
};

}  // namespace kvt
