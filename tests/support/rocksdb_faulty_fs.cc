#include "tests/support/rocksdb_faulty_fs.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"

namespace kvt {
namespace {

using rocksdb::FileOptions;
using rocksdb::IODebugContext;
using rocksdb::IOOptions;
using rocksdb::IOStatus;
using rocksdb::Slice;

class FaultyFile final : public rocksdb::FSWritableFileOwnerWrapper {
 public:
  FaultyFile(RocksDbFaultyFs& fs, std::string path, uint64_t size,
             std::unique_ptr<rocksdb::FSWritableFile> file)
      : FSWritableFileOwnerWrapper(std::move(file)), fs_(fs), path_(std::move(path)), size_(size) {}

  IOStatus Append(const Slice& data, const IOOptions& options, IODebugContext* debug) override {
    return Grow(size_ + data.size(), [&] { return target()->Append(data, options, debug); });
  }
  IOStatus Append(const Slice& data, const IOOptions& options,
                  const rocksdb::DataVerificationInfo& info, IODebugContext* debug) override {
    return Grow(size_ + data.size(), [&] { return target()->Append(data, options, info, debug); });
  }
  IOStatus PositionedAppend(const Slice& data, uint64_t offset, const IOOptions& options,
                            IODebugContext* debug) override {
    return Grow(offset + data.size(),
                [&] { return target()->PositionedAppend(data, offset, options, debug); });
  }
  IOStatus PositionedAppend(const Slice& data, uint64_t offset, const IOOptions& options,
                            const rocksdb::DataVerificationInfo& info,
                            IODebugContext* debug) override {
    return Grow(offset + data.size(),
                [&] { return target()->PositionedAppend(data, offset, options, info, debug); });
  }
  IOStatus Truncate(uint64_t size, const IOOptions& options, IODebugContext* debug) override {
    size_ = size;
    return target()->Truncate(size, options, debug);
  }
  IOStatus Sync(const IOOptions& options, IODebugContext* debug) override {
    return Synced([&] { return target()->Sync(options, debug); });
  }
  IOStatus Fsync(const IOOptions& options, IODebugContext* debug) override {
    return Synced([&] { return target()->Fsync(options, debug); });
  }

 private:
  template <typename Call>
  IOStatus Grow(uint64_t size, Call call) {
    IOStatus status = fs_.BeforeWrite();
    if (status.ok()) status = call();
    if (status.ok()) size_ = std::max(size_.load(), size);
    return status;
  }
  template <typename Call>
  IOStatus Synced(Call call) {
    const uint64_t size = size_;  // what is appended meanwhile may be synced or not
    if (fs_.lying()) return IOStatus::OK();
    IOStatus status = fs_.BeforeWrite();
    if (status.ok()) status = call();
    if (status.ok()) fs_.Note(absl::StrCat("S ", path_, " ", size));
    return status;
  }

  RocksDbFaultyFs& fs_;
  const std::string path_;
  std::atomic<uint64_t> size_;
};

class FaultyReads final : public rocksdb::FSRandomAccessFileOwnerWrapper {
 public:
  FaultyReads(RocksDbFaultyFs& fs, std::unique_ptr<rocksdb::FSRandomAccessFile> file)
      : FSRandomAccessFileOwnerWrapper(std::move(file)), fs_(fs) {}
  IOStatus Read(uint64_t offset, size_t n, const IOOptions& options, Slice* result, char* scratch,
                IODebugContext* debug) const override {
    if (fs_.ReadFails()) return IOStatus::IOError("injected: cannot read");
    return FSRandomAccessFileOwnerWrapper::Read(offset, n, options, result, scratch, debug);
  }
  IOStatus MultiRead(rocksdb::FSReadRequest* requests, size_t count, const IOOptions& options,
                     IODebugContext* debug) override {
    if (fs_.ReadFails()) return IOStatus::IOError("injected: cannot read");
    return FSRandomAccessFileOwnerWrapper::MultiRead(requests, count, options, debug);
  }

 private:
  RocksDbFaultyFs& fs_;
};

class FaultyFolder final : public rocksdb::FSDirectoryWrapper {
 public:
  FaultyFolder(RocksDbFaultyFs& fs, std::string path, std::unique_ptr<rocksdb::FSDirectory> folder)
      : FSDirectoryWrapper(std::move(folder)), fs_(fs), path_(std::move(path)) {}
  IOStatus Fsync(const IOOptions& options, IODebugContext* debug) override {
    return Synced([&] { return FSDirectoryWrapper::Fsync(options, debug); });
  }
  IOStatus FsyncWithDirOptions(const IOOptions& options, IODebugContext* debug,
                               const rocksdb::DirFsyncOptions& folder_options) override {
    return Synced(
        [&] { return FSDirectoryWrapper::FsyncWithDirOptions(options, debug, folder_options); });
  }

 private:
  // The mark before tells which files were made by then.
  template <typename Call>
  IOStatus Synced(Call call) {
    if (fs_.lying()) return IOStatus::OK();
    static std::atomic<uint64_t> mark{0};
    const std::string name = absl::StrCat(getpid(), ".", mark++);
    fs_.Note(absl::StrCat("M ", name));
    IOStatus status = fs_.BeforeWrite();
    if (status.ok()) status = call();
    if (status.ok()) fs_.Note(absl::StrCat("Y ", path_, " ", name));
    return status;
  }

  RocksDbFaultyFs& fs_;
  const std::string path_;
};

std::string Normal(const std::string& path) {
  const std::string normal = std::filesystem::path(path).lexically_normal().string();
  return normal.size() > 1 && normal.back() == '/' ? normal.substr(0, normal.size() - 1) : normal;
}

}  // namespace

RocksDbFaultyFs::RocksDbFaultyFs(const std::string& journal)
    : FileSystemWrapper(rocksdb::FileSystem::Default()), journal_path_(journal) {
  if (journal.empty()) return;
  journal_ = open(journal.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  KVT_CHECK(journal_ >= 0, journal);
}

RocksDbFaultyFs::~RocksDbFaultyFs() {
  if (journal_ >= 0) close(journal_);
}

void RocksDbFaultyFs::Note(const std::string& line) {
  if (journal_ < 0) return;
  const std::string text = line + "\n";
  KVT_CHECK(write(journal_, text.data(), text.size()) == static_cast<ssize_t>(text.size()));
}

void RocksDbFaultyFs::FailAfter(int64_t writes, bool full) {
  then_full_ = full;
  writes_left_ = writes;
}

IOStatus RocksDbFaultyFs::BeforeWrite() {
  if (writes_left_ >= 0 && writes_left_-- == 0) {
    (then_full_ ? full_ : write_errors_) = true;
  }
  if (full_) {
    IOStatus status = IOStatus::NoSpace("injected: disk full");
    status.SetRetryable(true);  // as the real one
    return status;
  }
  return write_errors_ ? IOStatus::IOError("injected: cannot write") : IOStatus::OK();
}

IOStatus RocksDbFaultyFs::NewWritableFile(const std::string& path, const FileOptions& options,
                                          std::unique_ptr<rocksdb::FSWritableFile>* file,
                                          IODebugContext* debug) {
  IOStatus status = BeforeWrite();
  if (status.ok()) status = target()->NewWritableFile(path, options, file, debug);
  if (!status.ok()) return status;
  Note(absl::StrCat("C ", Normal(path)));
  *file = std::make_unique<FaultyFile>(*this, Normal(path), 0, std::move(*file));
  return status;
}

IOStatus RocksDbFaultyFs::ReopenWritableFile(const std::string& path, const FileOptions& options,
                                             std::unique_ptr<rocksdb::FSWritableFile>* file,
                                             IODebugContext* debug) {
  IOStatus status = BeforeWrite();
  if (status.ok()) status = target()->ReopenWritableFile(path, options, file, debug);
  if (!status.ok()) return status;
  uint64_t size = 0;
  (void)target()->GetFileSize(path, IOOptions(), &size, nullptr);
  *file = std::make_unique<FaultyFile>(*this, Normal(path), size, std::move(*file));
  return status;
}

IOStatus RocksDbFaultyFs::NewRandomAccessFile(const std::string& path, const FileOptions& options,
                                              std::unique_ptr<rocksdb::FSRandomAccessFile>* file,
                                              IODebugContext* debug) {
  const IOStatus status = target()->NewRandomAccessFile(path, options, file, debug);
  if (status.ok()) *file = std::make_unique<FaultyReads>(*this, std::move(*file));
  return status;
}

IOStatus RocksDbFaultyFs::NewDirectory(const std::string& path, const IOOptions& options,
                                       std::unique_ptr<rocksdb::FSDirectory>* folder,
                                       IODebugContext* debug) {
  const IOStatus status = target()->NewDirectory(path, options, folder, debug);
  if (status.ok())
    *folder = std::make_unique<FaultyFolder>(*this, Normal(path), std::move(*folder));
  return status;
}

IOStatus RocksDbFaultyFs::LinkFile(const std::string& from, const std::string& to,
                                   const IOOptions& options, IODebugContext* debug) {
  const IOStatus status = target()->LinkFile(from, to, options, debug);
  if (status.ok()) Note(absl::StrCat("L ", Normal(from), " ", Normal(to)));
  return status;
}

IOStatus RocksDbFaultyFs::RenameFile(const std::string& from, const std::string& to,
                                     const IOOptions& options, IODebugContext* debug) {
  // What it replaces stays under another name, outside of what RocksDB knows.
  static std::atomic<uint64_t> number{0};
  std::string before = "-";
  if (journal_ >= 0 && access(to.c_str(), F_OK) == 0) {
    before = absl::StrCat(journal_path_, ".before-", getpid(), "-", number++);
    KVT_CHECK(link(to.c_str(), before.c_str()) == 0, before);
  }
  // Before the fact: a file that is not there any more is no trouble.
  Note(absl::StrCat("R ", Normal(from), " ", Normal(to), " ", before));
  return target()->RenameFile(from, to, options, debug);
}

PowerLoss LosePower(const std::string& journal) {
  struct File {
    uint64_t synced = 0;
    bool in_folder = false;
    uint64_t made = 0;   // line
    std::string before;  // what a rename replaced
  };
  std::map<std::string, File> files;
  std::map<std::string, uint64_t> marks;
  const auto folder_synced = [&](const std::string& folder, uint64_t until) {
    for (auto& [path, file] : files) {
      if (std::filesystem::path(path).parent_path() == folder && file.made < until)
        file.in_folder = true;
    }
  };
  std::ifstream in(journal);
  std::string line;
  for (uint64_t number = 1; std::getline(in, line); ++number) {
    std::istringstream fields(line);
    std::string what, a, b, before;
    fields >> what >> a >> b >> before;
    if (what == "C") files[a] = {0, false, number, ""};
    if (what == "S" && !b.empty()) {
      // One that is not known was there before.
      File& file = files.try_emplace(a, File{0, true, 0, ""}).first->second;
      file.synced = std::max<uint64_t>(file.synced, std::stoull(b));
    }
    if (what == "L" && files.contains(a)) files[b] = {files[a].synced, false, number, ""};
    if (what == "R" && files.contains(a)) {
      files[b] = {files[a].synced, false, number, before};
      // A file system that keeps the order of its changes: the rename lasts, and what came before
      // it. Or not: then it is taken back. Both happen.
      if (number % 2 == 0) folder_synced(std::filesystem::path(b).parent_path(), number + 1);
    }
    if (what == "M") marks[a] = number;
    if (what == "Y" && marks.contains(b)) folder_synced(a, marks[b]);
  }
  PowerLoss loss;
  for (const auto& [path, file] : files) {
    struct stat info {};
    if (stat(path.c_str(), &info) != 0) continue;
    const auto size = static_cast<uint64_t>(info.st_size);
    if (!file.in_folder && file.before.size() > 1) {
      ++loss.renames_undone;
      KVT_CHECK(rename(file.before.c_str(), path.c_str()) == 0, path);
    } else if (!file.in_folder) {
      ++loss.files_gone;
      loss.bytes_gone += size;
      unlink(path.c_str());
    } else if (size > file.synced) {
      ++loss.files_cut;
      loss.bytes_gone += size - file.synced;
      KVT_CHECK(truncate(path.c_str(), static_cast<off_t>(file.synced)) == 0, path);
    }
  }
  // The rest of what renames replaced.
  const std::filesystem::path journal_path(journal);
  for (const auto& entry : std::filesystem::directory_iterator(journal_path.parent_path())) {
    if (entry.path().string().starts_with(journal + ".before-")) unlink(entry.path().c_str());
  }
  KVT_CHECK(truncate(journal.c_str(), 0) == 0, journal);
  return loss;
}

}  // namespace kvt
