#include "tests/support/memory_spill_store.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/check.h"
#include "kernels/base/random.h"

namespace kvt {
namespace {

uint64_t SumBytes(absl::string_view bytes, uint64_t sum) {
  for (const char c : bytes) sum = (sum ^ static_cast<uint8_t>(c)) * 0x100000001b3ull;
  return Mix64(sum ^ bytes.size());
}

}  // namespace

uint64_t MemorySpillMedium::Sum(const Record& record) {
  return SumBytes(record.bytes, SumBytes(record.meta, 0xcbf29ce484222325ull));
}

uint64_t MemorySpillMedium::Size(const Record& record) {
  return sizeof(SpillKey) + record.meta.size() + record.bytes.size();
}

// ---- orders ----

void MemorySpillMedium::FailWrite(uint64_t n, absl::Status status) {
  MutexLock lock(mu_);
  fail_write_ = record_writes_ + n;
  fail_write_status_ = std::move(status);
}

void MemorySpillMedium::SetWriteFailure(absl::Status status) {
  MutexLock lock(mu_);
  write_failure_ = std::move(status);
}

void MemorySpillMedium::FailReads(uint64_t n, absl::Status status) {
  MutexLock lock(mu_);
  fail_reads_ = n;
  fail_reads_status_ = std::move(status);
}

void MemorySpillMedium::SetReadFailure(absl::Status status) {
  MutexLock lock(mu_);
  read_failure_ = std::move(status);
}

void MemorySpillMedium::SetScanFailure(absl::Status status) {
  MutexLock lock(mu_);
  scan_failure_ = std::move(status);
}

void MemorySpillMedium::TearWrite(uint64_t n) {
  MutexLock lock(mu_);
  tear_write_ = record_writes_ + n;
}

bool MemorySpillMedium::Damage(const SpillKey& key) {
  MutexLock lock(mu_);
  const auto it = durable_.find(NameOf(key));
  if (it == durable_.end() || it->second.bytes.empty()) return false;
  it->second.bytes[it->second.bytes.size() / 2] ^= 0x10;
  return true;
}

void MemorySpillMedium::CrashAtStep(uint64_t n, Unsynced unsynced) {
  MutexLock lock(mu_);
  crash_step_ = steps_ + n;
  crash_unsynced_ = unsynced;
}

void MemorySpillMedium::SetFreeBytes(uint64_t bytes) {
  MutexLock lock(mu_);
  free_bytes_ = bytes;
}

void MemorySpillMedium::SetQuota(uint64_t bytes) {
  MutexLock lock(mu_);
  quota_bytes_ = bytes;
}

void MemorySpillMedium::SetDelay(absl::Duration delay) {
  MutexLock lock(mu_);
  delay_ = delay;
  changed_.NotifyAll();
}

void MemorySpillMedium::ClearFaults() {
  MutexLock lock(mu_);
  fail_write_ = tear_write_ = crash_step_ = kNever;
  write_failure_ = read_failure_ = scan_failure_ = absl::OkStatus();
  fail_reads_ = 0;
  delay_ = absl::ZeroDuration();
  changed_.NotifyAll();
}

// ---- what is there ----

bool MemorySpillMedium::crashed() const {
  MutexLock lock(mu_);
  return crashed_;
}
uint64_t MemorySpillMedium::steps() const {
  MutexLock lock(mu_);
  return steps_;
}
uint64_t MemorySpillMedium::writes() const {
  MutexLock lock(mu_);
  return writes_;
}
uint64_t MemorySpillMedium::reads() const {
  MutexLock lock(mu_);
  return reads_;
}
uint64_t MemorySpillMedium::reclaims() const {
  MutexLock lock(mu_);
  return reclaims_;
}
int MemorySpillMedium::waiting() const {
  MutexLock lock(mu_);
  return waiting_;
}

bool MemorySpillMedium::Holds(const SpillKey& key) const {
  MutexLock lock(mu_);
  return durable_.contains(NameOf(key));
}

bool MemorySpillMedium::ContainsBytes(absl::string_view pattern) const {
  MutexLock lock(mu_);
  const std::string text(pattern);
  if (dead_.find(text) != std::string::npos) return true;
  return std::any_of(durable_.begin(), durable_.end(), [&](const auto& entry) {
    return entry.second.bytes.find(text) != std::string::npos ||
           entry.second.meta.find(text) != std::string::npos;
  });
}

// ---- steps ----

absl::Status MemorySpillMedium::Enter(uint64_t boot) {
  if (delay_ > absl::ZeroDuration()) {
    ++waiting_;
    const absl::Time until = absl::Now() + std::min(delay_, absl::Hours(1));
    while (delay_ > absl::ZeroDuration() && absl::Now() < until) {
      (void)changed_.WaitFor(mu_, until - absl::Now());
    }
    --waiting_;
  }
  if (boot != boot_) return absl::UnavailableError("memory spill: opened anew by somebody else");
  if (crashed_) return absl::UnavailableError("memory spill: the process has crashed");
  return absl::OkStatus();
}

absl::Status MemorySpillMedium::Step() {
  if (steps_++ != crash_step_) return absl::OkStatus();
  crashed_ = true;
  crash_step_ = kNever;
  if (crash_unsynced_ != Unsynced::kLost) {
    const bool tear = crash_unsynced_ == Unsynced::kTorn;
    for (size_t i = 0; i < unsynced_.size(); ++i) {
      auto& [name, record] = unsynced_[i];
      if (tear && i + 1 == unsynced_.size()) record.bytes.resize(record.bytes.size() / 2);
      Put(name, std::move(record));
    }
  }
  unsynced_.clear();
  return absl::UnavailableError("memory spill: the process has crashed");
}

void MemorySpillMedium::Drop(const Name& name) {
  const auto it = durable_.find(name);
  if (it == durable_.end()) return;
  const uint64_t size = Size(it->second);
  live_bytes_ -= size;
  dead_bytes_ += size;
  dead_ += it->second.meta;
  dead_ += it->second.bytes;
  durable_.erase(it);
}

void MemorySpillMedium::Put(const Name& name, Record record) {
  Drop(name);
  live_bytes_ += Size(record);
  durable_.emplace(name, std::move(record));
}

absl::Status MemorySpillMedium::Admit(uint64_t bytes) {
  const auto full = [&](absl::string_view what, uint64_t limit) {
    if (limit != 0 && DiskBytes() + bytes > limit) {
      dead_.clear();
      dead_bytes_ = 0;
    }
    if (limit == 0 || DiskBytes() + bytes <= limit) return absl::OkStatus();
    return absl::ResourceExhaustedError(
        absl::StrCat("memory spill: ", what, " of ", limit, " bytes is full"));
  };
  KVT_RETURN_IF_ERROR(full("quota", quota_bytes_));
  return full("disk", free_bytes_);
}

absl::Status MemorySpillMedium::WriteLocked(absl::Span<const SpillWrite> batch) {
  KVT_RETURN_IF_ERROR(write_failure_);
  uint64_t bytes = 0;
  for (const SpillWrite& write : batch) {
    bytes += sizeof(SpillKey) + write.meta.size() + write.bytes.size();
  }
  KVT_RETURN_IF_ERROR(Admit(bytes));
  for (const SpillWrite& write : batch) {
    KVT_RETURN_IF_ERROR(Step());
    const uint64_t number = record_writes_++;
    if (number == fail_write_) {
      for (auto& [name, record] : unsynced_) Put(name, std::move(record));
      unsynced_.clear();
      fail_write_ = kNever;
      return fail_write_status_;
    }
    Record record;
    record.meta = std::string(write.meta);
    record.bytes.assign(reinterpret_cast<const char*>(write.bytes.data()), write.bytes.size());
    record.checksum = Sum(record);
    if (number == tear_write_) record.bytes.resize(record.bytes.size() / 2);
    unsynced_.emplace_back(NameOf(write.key), std::move(record));
  }
  KVT_RETURN_IF_ERROR(Step());  // the sync
  for (auto& [name, record] : unsynced_) Put(name, std::move(record));
  unsynced_.clear();
  KVT_RETURN_IF_ERROR(Step());
  writes_ += batch.size();
  return absl::OkStatus();
}

absl::Status MemorySpillMedium::ReadLocked(const SpillRead& read) {
  KVT_RETURN_IF_ERROR(read_failure_);
  if (fail_reads_ > 0) {
    --fail_reads_;
    return fail_reads_status_;
  }
  KVT_RETURN_IF_ERROR(Step());
  const auto it = durable_.find(NameOf(read.key));
  if (it == durable_.end()) return absl::NotFoundError("memory spill: no such record");
  const Record& record = it->second;
  if (!Whole(record) || record.bytes.size() != read.bytes.size()) {
    Drop(it->first);
    return absl::DataLossError("memory spill: the record is damaged");
  }
  if (!record.bytes.empty()) {
    std::memcpy(read.bytes.data(), record.bytes.data(), record.bytes.size());
  }
  ++reads_;
  return absl::OkStatus();
}

// ---- the store ----

MemorySpillStore::MemorySpillStore(std::shared_ptr<MemorySpillMedium> medium)
    : medium_(std::move(medium)) {
  MutexLock lock(medium_->mu_);
  boot_ = ++medium_->boot_;
  medium_->crashed_ = false;
  medium_->last_failure_ = absl::OkStatus();
}

absl::Status MemorySpillStore::Write(absl::Span<const SpillWrite> batch) {
  MutexLock lock(medium_->mu_);
  absl::Status status = medium_->Enter(boot_);
  if (status.ok()) status = medium_->WriteLocked(batch);
  medium_->last_failure_ = status;
  return status;
}

void MemorySpillStore::Read(absl::Span<const SpillRead> reads, absl::Span<absl::Status> statuses) {
  KVT_CHECK(reads.size() == statuses.size(), reads.size(), " reads, ", statuses.size(),
            " statuses");
  MutexLock lock(medium_->mu_);
  const absl::Status entered = medium_->Enter(boot_);
  for (size_t i = 0; i < reads.size(); ++i) {
    statuses[i] = !entered.ok() ? entered
                  : medium_->crashed_
                      ? absl::UnavailableError("memory spill: the process has crashed")
                      : medium_->ReadLocked(reads[i]);
  }
}

absl::Status MemorySpillStore::Erase(absl::Span<const SpillKey> keys) {
  MutexLock lock(medium_->mu_);
  KVT_RETURN_IF_ERROR(medium_->Enter(boot_));
  for (const SpillKey& key : keys) {
    KVT_RETURN_IF_ERROR(medium_->Step());
    medium_->Drop(MemorySpillMedium::NameOf(key));
  }
  return absl::OkStatus();
}

absl::Status MemorySpillStore::Reclaim() {
  MutexLock lock(medium_->mu_);
  KVT_RETURN_IF_ERROR(medium_->Enter(boot_));
  KVT_RETURN_IF_ERROR(medium_->Step());
  medium_->dead_.clear();
  medium_->dead_bytes_ = 0;
  ++medium_->reclaims_;
  return absl::OkStatus();
}

absl::Status MemorySpillStore::Scan(const SpillVisitor& visit) {
  // The visitor runs without the lock: it may call back.
  struct Entry {
    SpillKey key;
    std::string meta;
    uint64_t bytes;
  };
  std::vector<Entry> entries;
  {
    MutexLock lock(medium_->mu_);
    KVT_RETURN_IF_ERROR(medium_->Enter(boot_));
    KVT_RETURN_IF_ERROR(medium_->scan_failure_);
    std::vector<MemorySpillMedium::Name> torn;
    for (const auto& [name, record] : medium_->durable_) {
      KVT_RETURN_IF_ERROR(medium_->Step());
      if (MemorySpillMedium::Whole(record)) {
        entries.push_back({{name.first, name.second}, record.meta, record.bytes.size()});
      } else {
        torn.push_back(name);
      }
    }
    for (const auto& name : torn) medium_->Drop(name);
  }
  for (const Entry& entry : entries) {
    if (!visit(entry.key, entry.meta, entry.bytes)) break;
  }
  return absl::OkStatus();
}

SpillUsage MemorySpillStore::Usage() const {
  MutexLock lock(medium_->mu_);
  SpillUsage usage;
  usage.records = medium_->durable_.size();
  usage.live_bytes = medium_->live_bytes_;
  usage.disk_bytes = medium_->DiskBytes();
  usage.quota_bytes = medium_->quota_bytes_;
  usage.free_bytes = medium_->free_bytes_ - std::min(medium_->free_bytes_, usage.disk_bytes);
  usage.failing = !medium_->last_failure_.ok();
  usage.failure = medium_->last_failure_;
  return usage;
}

}  // namespace kvt
