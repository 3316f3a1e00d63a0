// A file system under the RocksDB spill store that remembers what was synced, so that a test can
// take away after a kill what a power loss would have, and that fails by order.
//
// The journal is a file that outlives the process; each line is written after the fact it tells, so
// what it says is never too much. Model of a power loss: a file keeps the bytes synced before it; a
// file whose folder was not synced since it was made is gone; a rename is atomic and durable.
// Thread-safe.
#pragma once

#include <rocksdb/file_system.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

namespace kvt {

class RocksDbFaultyFs final : public rocksdb::FileSystemWrapper {
 public:
  // `journal`: empty, or the file that gets what was synced.
  explicit RocksDbFaultyFs(const std::string& journal);
  ~RocksDbFaultyFs() override;
  const char* Name() const override { return "RocksDbFaultyFs"; }

  // While set, what is written fails: the disk is full, or broken (writes and syncs), or cannot be
  // read.
  void SetFull(bool full) { full_ = full; }
  void SetWriteErrors(bool failing) { write_errors_ = failing; }
  void SetReadErrors(bool failing) { read_errors_ = failing; }
  // The n-th write from now (0: the next) and all later ones fail as by SetFull or SetWriteErrors.
  void FailAfter(int64_t writes, bool full);
  // Says that it synced, and does not: to see that a test notices.
  void SetLying(bool lying) { lying_ = lying; }

  rocksdb::IOStatus NewWritableFile(const std::string& path, const rocksdb::FileOptions& options,
                                    std::unique_ptr<rocksdb::FSWritableFile>* file,
                                    rocksdb::IODebugContext* debug) override;
  rocksdb::IOStatus ReopenWritableFile(const std::string& path, const rocksdb::FileOptions& options,
                                       std::unique_ptr<rocksdb::FSWritableFile>* file,
                                       rocksdb::IODebugContext* debug) override;
  rocksdb::IOStatus NewRandomAccessFile(const std::string& path,
                                        const rocksdb::FileOptions& options,
                                        std::unique_ptr<rocksdb::FSRandomAccessFile>* file,
                                        rocksdb::IODebugContext* debug) override;
  rocksdb::IOStatus NewDirectory(const std::string& path, const rocksdb::IOOptions& options,
                                 std::unique_ptr<rocksdb::FSDirectory>* folder,
                                 rocksdb::IODebugContext* debug) override;
  rocksdb::IOStatus LinkFile(const std::string& from, const std::string& to,
                             const rocksdb::IOOptions& options,
                             rocksdb::IODebugContext* debug) override;
  rocksdb::IOStatus RenameFile(const std::string& from, const std::string& to,
                               const rocksdb::IOOptions& options,
                               rocksdb::IODebugContext* debug) override;

  // For the files it makes.
  rocksdb::IOStatus BeforeWrite();
  [[nodiscard]] bool ReadFails() const { return read_errors_; }
  [[nodiscard]] bool lying() const { return lying_; }
  void Note(const std::string& line);

 private:
  std::atomic<bool> full_{false};
  std::atomic<bool> write_errors_{false};
  std::atomic<bool> read_errors_{false};
  std::atomic<bool> lying_{false};
  std::atomic<int64_t> writes_left_{-1};
  std::atomic<bool> then_full_{false};
  const std::string journal_path_;
  int journal_ = -1;
};

struct PowerLoss {
  uint64_t files_gone = 0;
  uint64_t files_cut = 0;
  uint64_t renames_undone = 0;
  uint64_t bytes_gone = 0;
};
// What a power loss does to the files that the journal tells of; then the journal is emptied.
PowerLoss LosePower(const std::string& journal);

}  // namespace kvt
