// For tests: the RocksDB spill store over another file system (one that loses unsynced writes, is
// full or fails). Includes RocksDB's types by name only.
#pragma once

#include <memory>

#include "kvstore/media/rocksdb_spill_store.h"

namespace rocksdb {
class FileSystem;
}

namespace kvt {

// As OpenRocksDbSpillStore; every file of the folder's db and staging goes through `file_system`.
absl::StatusOr<std::unique_ptr<SpillStore>> OpenRocksDbSpillStoreOn(
    const RocksDbSpillOptions& options, std::shared_ptr<rocksdb::FileSystem> file_system);

}  // namespace kvt
