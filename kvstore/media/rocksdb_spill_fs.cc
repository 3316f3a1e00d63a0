#include "kvstore/media/rocksdb_spill_fs.h"

#include <algorithm>
#include <vector>

namespace kvt {

uint64_t RocksDbSpillFs::BeginIngestion() {
  MutexLock lock(mu_);
  return ++number_;
}

void RocksDbSpillFs::EndIngestion(uint64_t number, absl::Span<const std::string> paths, bool ok) {
  std::vector<std::string> unneeded;
  {
    MutexLock lock(mu_);
    for (auto it = kept_.begin(); it != kept_.end();) {
      Kept& kept = it->second;
      const bool ours = std::find(paths.begin(), paths.end(), kept.staged) != paths.end();
      if (ours && !ok) {
        kept.failed = true;
        kept.failed_at = ++number_;
      }
      if (ok && kept.failed && kept.failed_at < number) unneeded.push_back(it->first);
      const bool gone = ok && (ours || (kept.failed && kept.failed_at < number));
      it = gone ? kept_.erase(it) : std::next(it);
    }
  }
  for (const std::string& path : unneeded) {
    (void)target()->DeleteFile(path, rocksdb::IOOptions(), nullptr);
  }
}

void RocksDbSpillFs::Forget() {
  MutexLock lock(mu_);
  kept_.clear();
}

rocksdb::IOStatus RocksDbSpillFs::LinkFile(const std::string& from, const std::string& to,
                                           const rocksdb::IOOptions& options,
                                           rocksdb::IODebugContext* debug) {
  {
    MutexLock lock(mu_);
    kept_[to] = {from, false, 0};
  }
  return target()->LinkFile(from, to, options, debug);
}

rocksdb::IOStatus RocksDbSpillFs::DeleteFile(const std::string& path,
                                             const rocksdb::IOOptions& options,
                                             rocksdb::IODebugContext* debug) {
  {
    MutexLock lock(mu_);
    if (kept_.contains(path)) return rocksdb::IOStatus::OK();
  }
  return target()->DeleteFile(path, options, debug);
}

}  // namespace kvt
