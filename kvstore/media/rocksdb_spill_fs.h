// The file system under the spill store's database. RocksDB 7.8 deletes the files of an ingestion
// whose MANIFEST record could not be synced, though the record may be on the disk: then the
// database names files that are gone, and never opens again. Here such files stay until a later
// ingestion has succeeded (its MANIFEST is a new one that does not name them) or the database has
// been opened anew.
//
// Owned by the database's environment. Thread-safe.
#pragma once

#include <rocksdb/file_system.h>

#include <map>
#include <string>

#include "absl/types/span.h"
#include "kernels/base/mutex.h"

namespace kvt {

class RocksDbSpillFs final : public rocksdb::FileSystemWrapper {
 public:
  explicit RocksDbSpillFs(const std::shared_ptr<rocksdb::FileSystem>& target)
      : FileSystemWrapper(target) {}
  const char* Name() const override { return "RocksDbSpillFs"; }

  // Around each ingestion of `paths`; the number goes from Begin to End.
  uint64_t BeginIngestion();
  void EndIngestion(uint64_t number, absl::Span<const std::string> paths, bool ok);
  // The database is closed: it will see by itself what is needed.
  void Forget();

  rocksdb::IOStatus LinkFile(const std::string& from, const std::string& to,
                             const rocksdb::IOOptions& options,
                             rocksdb::IODebugContext* debug) override;
  rocksdb::IOStatus DeleteFile(const std::string& path, const rocksdb::IOOptions& options,
                               rocksdb::IODebugContext* debug) override;

 private:
  struct Kept {
    std::string staged;
    bool failed = false;     // its ingestion has
    uint64_t failed_at = 0;  // only ingestions begun after this show that it is not needed
  };

  Mutex mu_;
  uint64_t number_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<std::string, Kept> kept_ ABSL_GUARDED_BY(mu_);  // by the name it has in the database
};

}  // namespace kvt
