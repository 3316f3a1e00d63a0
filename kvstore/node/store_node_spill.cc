// The second medium's side of a store node: recovery, the writer's and the readers' rounds, Promote
// and purge. What moves, the index decides (block_index_spill.cc).
#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/log.h"
#include "kernels/base/units.h"
#include "kernels/layout/checksum.h"
#include "kvstore/node/store_node.h"

namespace kvt {
namespace {

SpillKey KeyOf(const BlockKey& key, Plane plane) {
  SpillKey to;
  to.block = key.bytes;
  to.part = plane == Plane::kBase ? SpillPart::kBase : SpillPart::kResidual;
  return to;
}

uint64_t BlockHandleOf(uint64_t record_handle) {
  return MakeBlockHandle(BlockOfRecord(record_handle), GenerationOfHandle(record_handle));
}

// A record that is being read back.
struct Loading {
  PromoteJob job;
  Geometry geometry;
  uint64_t key_hash = 0;
  std::vector<uint64_t> checksums;
};

bool IsIntact(const Loading& loading, const std::byte* bytes) {
  const Plane plane = PlaneOfRecord(loading.job.record_handle);
  const uint32_t slice_bytes = loading.geometry.SliceBytes();
  for (uint32_t slice = 0; slice < loading.checksums.size(); ++slice) {
    if (SliceChecksum(bytes + uint64_t{slice} * slice_bytes, slice_bytes,
                      ChecksumSeed(loading.key_hash, plane, slice)) != loading.checksums[slice]) {
      return false;
    }
  }
  return true;
}

// Reads what has not been read well yet, unless that is of no use: NotFound, and DataLoss, which is
// the medium's own verdict. Returns how many it read.
size_t ReadBatch(SpillStore& disk, std::byte* arena, const std::vector<Loading>& batch,
                 std::vector<absl::Status>* statuses) {
  std::vector<SpillRead> reads;
  std::vector<size_t> index;
  for (size_t i = 0; i < batch.size(); ++i) {
    const absl::Status& status = (*statuses)[i];
    if (status.ok() || absl::IsNotFound(status) || absl::IsDataLoss(status)) continue;
    const PromoteJob& job = batch[i].job;
    reads.push_back({.key = KeyOf(job.key, PlaneOfRecord(job.record_handle)),
                     .bytes = absl::MakeSpan(arena + job.offset, job.bytes)});
    index.push_back(i);
  }
  if (reads.empty()) return 0;
  std::vector<absl::Status> results(reads.size());
  disk.Read(reads, absl::MakeSpan(results));
  for (size_t k = 0; k < reads.size(); ++k) {
    const size_t i = index[k];
    (*statuses)[i] = results[k].ok() && !IsIntact(batch[i], arena + batch[i].job.offset)
                         ? absl::InternalError("a slice's checksum differs")
                         : results[k];
  }
  return reads.size();
}

}  // namespace

absl::Status StoreNode::AttachDisk(SpillStore& disk) {
  KVT_CHECK(config_.has_disk && disk_ == nullptr);
  std::vector<SpillKey> unwanted;
  std::vector<std::pair<BlockKey, SpillMeta>> residuals;  // after their BASEs
  const absl::Status scanned =
      disk.Scan([&](const SpillKey& key, absl::string_view bytes, uint64_t size) {
        absl::StatusOr<SpillMeta> meta = DecodeSpillMeta(bytes);
        BlockKey block;
        block.bytes = key.block;
        if (!meta.ok() || key.part == SpillPart::kDigest || KeyOf(block, meta->plane) != key) {
          unwanted.push_back(key);
        } else if (meta->plane == Plane::kBase) {
          meta->block.name.key = block;
          RestoreBase(*meta, size, &unwanted);
        } else {
          residuals.emplace_back(block, *std::move(meta));
        }
        return true;
      });
  KVT_RETURN_IF_ERROR(scanned);
  for (const auto& [key, meta] : residuals) RestoreResidual(key, meta, &unwanted);
  const SpillUsage usage = disk.Usage();
  MutexLock lock(mu_);
  disk_usage_ = usage;
  const IndexStats stats = index_.Stats();
  KVT_LOG(kInfo, "taken back from disk: ", stats.disk_records[0], " BASE and ",
          stats.disk_records[1], " RESIDUAL records; ", unwanted.size(), " given up");
  erase_again_ = std::move(unwanted);
  disk_ = &disk;
  return absl::OkStatus();
}

void StoreNode::RestoreBase(const SpillMeta& meta, uint64_t bytes,
                            std::vector<SpillKey>* unwanted) {
  const uint32_t slices = meta.block.geometry.SlicesPerRecord();
  const bool fits = bytes == meta.block.geometry.RecordBytes() &&
                    (meta.checksums.empty() || meta.checksums.size() == slices);
  MutexLock lock(mu_);
  const absl::StatusOr<uint64_t> handle =
      fits ? index_.RestoreBlock(meta.block)
           : absl::StatusOr<uint64_t>(absl::DataLossError("sizes differ"));
  if (!handle.ok()) {
    unwanted->push_back(KeyOf(meta.block.name.key, Plane::kBase));
    return;
  }
  const uint32_t number = BlockNumberOf(*handle);
  const uint32_t generation = GenerationOfHandle(*handle);
  if (meta.checksums.empty()) {
    checksums_.SetNone(number, generation, slices, Plane::kBase);
  } else {
    checksums_.Set(number, generation, slices, Plane::kBase, 0, meta.checksums);
  }
}

void StoreNode::RestoreResidual(const BlockKey& key, const SpillMeta& meta,
                                std::vector<SpillKey>* unwanted) {
  MutexLock lock(mu_);
  const absl::StatusOr<uint64_t> handle = index_.RestoreResidual(key, meta.incarnation);
  if (!handle.ok()) {
    unwanted->push_back(KeyOf(key, Plane::kResidual));
    return;
  }
  const uint32_t slices = index_.GeometryOf(*index_.FindBlock(*handle)).SlicesPerRecord();
  const uint32_t number = BlockNumberOf(*handle);
  const uint32_t generation = GenerationOfHandle(*handle);
  if (meta.checksums.size() == slices) {
    checksums_.Set(number, generation, slices, Plane::kResidual, 0, meta.checksums);
  } else {
    checksums_.SetNone(number, generation, slices, Plane::kResidual);
  }
}

std::string StoreNode::MetaOf(uint64_t record_handle) {
  const Block* const block = index_.FindBlock(BlockHandleOf(record_handle));
  KVT_CHECK(block != nullptr, "record ", record_handle);
  SpillMeta meta;
  meta.plane = PlaneOfRecord(record_handle);
  meta.incarnation = block->incarnation;
  const absl::Span<const uint64_t> sums =
      checksums_.Get(BlockOfRecord(record_handle), block->generation, meta.plane);
  meta.checksums.assign(sums.begin(), sums.end());
  if (meta.plane == Plane::kBase) {
    RestoredBlock& to = meta.block;
    to.name.parent = block->parent;
    to.name.tokens.assign(block->tokens.begin(), block->tokens.begin() + block->token_count);
    to.name.provenance = block->provenance;
    to.name.ticket_private = block->ticket_private;
    const SpaceInfo& space = index_.SpaceInfoOf(*block);
    to.geometry = space.geometry;
    to.model_fingerprint = space.model_fingerprint;
    to.numerics_id = space.numerics_id;
    to.tenant = index_.TenantOf(*block);
  }
  return EncodeSpillMeta(meta);
}

struct StoreNode::SpillWork {
  std::vector<SpillKey> erase;
  bool erased_all = false;  // of what is to be erased now
  uint64_t purges = 0;      // wanted when the round began
  bool reclaim = false;
  bool review_limit = false;
  std::vector<SpillJob> jobs;
  std::vector<std::string> metas;
};

void StoreNode::TakeSpillWork(SpillWork* work) {
  const absl::Time now = clock_.Now();
  work->purges = purges_wanted_;
  work->review_limit = disk_limit_ != 0 && now >= disk_limit_check_;
  work->erase = std::exchange(erase_again_, {});
  std::vector<DiskErasure> erasures;
  index_.TakeErasures(kErasuresPerRound, &erasures);
  for (const DiskErasure& erasure : erasures) {
    work->erase.push_back(KeyOf(erasure.key, erasure.plane));
  }
  work->erased_all = erasures.size() < kErasuresPerRound;
  work->reclaim = work->erased_all && purges_done_ < purges_wanted_;
  index_.SetDiskWritable(now >= disk_retry_at_);
  index_.TakeSpills(now, std::min(kSpillBatchBytes, arena_.size() / 8), &work->jobs);
  // What gave way to them goes before they are written: the room may be needed.
  index_.TakeErasures(kErasuresPerRound, &erasures);
  for (const DiskErasure& erasure : erasures) {
    work->erase.push_back(KeyOf(erasure.key, erasure.plane));
  }
  for (const SpillJob& job : work->jobs) work->metas.push_back(MetaOf(job.record_handle));
}

bool StoreNode::SpillRound() {
  if (disk_ == nullptr) return false;
  SpillWork work;
  {
    MutexLock lock(mu_);
    TakeSpillWork(&work);
  }
  absl::Status status;
  if (!work.erase.empty()) status = disk_->Erase(work.erase);
  const bool erased = status.ok();
  if (status.ok() && work.reclaim) status = disk_->Reclaim();
  const bool reclaimed = status.ok() && work.reclaim;
  if (status.ok() && !work.jobs.empty()) {
    std::vector<SpillWrite> writes(work.jobs.size());
    for (size_t i = 0; i < writes.size(); ++i) {
      const SpillJob& job = work.jobs[i];
      writes[i].key = KeyOf(job.key, PlaneOfRecord(job.record_handle));
      writes[i].meta = work.metas[i];
      writes[i].bytes = absl::MakeConstSpan(arena_.data() + job.offset, job.bytes);
    }
    status = disk_->Write(writes);
  }
  const bool acted =
      !work.erase.empty() || work.reclaim || !work.jobs.empty() || work.review_limit;
  const SpillUsage usage = acted ? disk_->Usage() : SpillUsage();
  MutexLock lock(mu_);
  if (acted) disk_usage_ = usage;
  const absl::Time now = clock_.Now();
  for (const SpillJob& job : work.jobs) index_.EndSpill(now, job.record_handle, status.ok());
  if (!work.jobs.empty()) spill_done_.NotifyAll();
  if (!erased) {
    erase_again_ = std::move(work.erase);
  } else if (!status.ok()) {
    // Some of a failed batch may be there.
    for (const SpillJob& job : work.jobs) {
      erase_again_.push_back(KeyOf(job.key, PlaneOfRecord(job.record_handle)));
    }
  }
  if (reclaimed) {
    purges_done_ = std::max(purges_done_, work.purges);
    purge_done_.NotifyAll();
  }
  // Erasing alone does not tell that the disk takes records.
  if (!status.ok() || !work.jobs.empty()) NoteDisk(status);
  if (work.review_limit) ReviewDiskLimit(usage);
  return status.ok() && (!work.jobs.empty() || !work.erased_all);
}

void StoreNode::NoteDisk(const absl::Status& status) {
  if (status.ok()) {
    if (!disk_failing_.empty()) KVT_LOG(kInfo, "the disk takes records again");
    disk_failing_.clear();
    disk_retry_ = kSpillRetryMin;
    return;
  }
  ++spill_failures_;
  if (absl::IsResourceExhausted(status)) LimitDisk();
  disk_retry_at_ = clock_.Now() + disk_retry_;
  disk_retry_ = std::min(disk_retry_ * 2, kSpillRetryMax);
  index_.SetDiskWritable(false);
  if (disk_failing_.empty()) {
    KVT_LOG(kWarning,
            "the disk takes no records; serving from memory, trying again: ", status.message());
  }
  disk_failing_ = std::string(status.message());
}

void StoreNode::LimitDisk() {
  const IndexStats index = index_.Stats();
  const uint64_t used = index.disk_bytes[0] + index.disk_bytes[1];
  const uint64_t from = disk_limit_ == 0 ? used : std::min(used, disk_limit_);
  // Ever less while it is refused; never nothing, which would mean no limit.
  const uint64_t less = std::max(std::min(kSpillBatchBytes, arena_.size() / 8), from / 16);
  disk_limit_ = from > less ? from - less : 1;
  disk_free_at_limit_ = disk_usage_.free_bytes;
  disk_limit_check_ = clock_.Now() + kDiskLimitCheck;
  index_.SetDiskLimit(disk_limit_);
  KVT_LOG(kWarning, "the disk is full: at most ", FormatBytes(disk_limit_),
          " of blocks stay there until it has room again");
}

void StoreNode::ReviewDiskLimit(const SpillUsage& usage) {
  disk_limit_check_ = clock_.Now() + kDiskLimitCheck;
  // Half of what others gave back, so that it does not run full at once again.
  const uint64_t more = usage.free_bytes > disk_free_at_limit_
                            ? (usage.free_bytes - disk_free_at_limit_) / 2
                            : 0;
  if (more < 2 * std::min(kSpillBatchBytes, arena_.size() / 8)) return;
  const IndexStats index = index_.Stats();
  disk_limit_ = std::max(disk_limit_, index.disk_bytes[0] + index.disk_bytes[1] + more);
  if (config_.disk_bytes_max != 0 ? disk_limit_ >= config_.disk_bytes_max
                                  : more >= arena_.size()) {
    disk_limit_ = 0;
    KVT_LOG(kInfo, "the disk has room for all blocks again");
  }
  index_.SetDiskLimit(disk_limit_);
  disk_retry_at_ = std::min(disk_retry_at_, clock_.Now());
}

std::string StoreNode::Condition() {
  MutexLock lock(mu_);
  if (!disk_failing_.empty()) {
    return absl::StrCat("its disk takes no blocks, it serves from memory: ", disk_failing_);
  }
  if (disk_limit_ == 0) return "";
  return absl::StrCat("its disk is full; it keeps ", FormatBytes(disk_limit_), " there");
}

bool StoreNode::PromoteRound() {
  if (disk_ == nullptr) return false;
  std::vector<Loading> batch;
  {
    MutexLock lock(mu_);
    while (!promotes_.empty() && batch.size() < kPromoteBatchRecords) {
      Loading loading;
      loading.job = promotes_.front();
      promotes_.pop_front();
      const uint64_t record = loading.job.record_handle;
      const Block* const block = index_.FindBlock(BlockHandleOf(record));
      KVT_CHECK(block != nullptr, "record ", record, " has a landing");
      loading.geometry = index_.GeometryOf(*block);
      loading.key_hash = block->key.Hash64();
      const absl::Span<const uint64_t> sums =
          checksums_.Get(BlockOfRecord(record), block->generation, PlaneOfRecord(record));
      loading.checksums.assign(sums.begin(), sums.end());
      batch.push_back(std::move(loading));
    }
    if (!promotes_.empty()) promote_work_.NotifyOne();  // for another reader
  }
  if (batch.empty()) return false;
  std::vector<absl::Status> statuses(batch.size(), absl::UnknownError("not read"));
  uint64_t retries = 0;
  for (int round = 0; round < kPromoteReadsMax; ++round) {
    const size_t read = ReadBatch(*disk_, arena_.data(), batch, &statuses);
    if (read == 0) break;
    if (round > 0) retries += read;
  }
  for (const absl::Status& status : statuses) {
    if (status.ok()) continue;
    KVT_LOG(kWarning, "a record cannot be read back and is given up: ", status.message());
  }
  MutexLock lock(mu_);
  promote_retries_ += retries;
  const absl::Time now = clock_.Now();
  for (size_t i = 0; i < batch.size(); ++i) {
    index_.EndPromote(now, batch[i].job.record_handle, statuses[i].ok());
  }
  promote_done_.NotifyAll();
  return true;
}

void StoreNode::WaitForSpill(absl::Duration timeout) {
  MutexLock lock(mu_);
  const bool due = index_.WantsSpill() && clock_.Now() >= disk_retry_at_;
  if (due) timeout = std::min(timeout, absl::Milliseconds(20));  // nothing could be taken just now
  spill_work_.WaitFor(mu_, timeout);
}

void StoreNode::WaitForPromote(absl::Duration timeout) {
  MutexLock lock(mu_);
  if (promotes_.empty()) promote_work_.WaitFor(mu_, timeout);
}

absl::StatusOr<PromoteReply> StoreNode::Promote(const PromoteRequest& request) {
  using Outcome = PromoteReply::Outcome;
  PromoteReply reply;
  reply.outcomes.assign(request.records.size(), Outcome::kLate);
  const absl::Time deadline =
      clock_.Now() + std::clamp(request.wait, absl::ZeroDuration(), kPromoteWaitMax);
  const LiveTicket ticket{request.ticket.id, request.ticket.epoch};
  std::vector<size_t> open(request.records.size());
  for (size_t i = 0; i < open.size(); ++i) open[i] = i;
  absl::flat_hash_set<uint64_t> own;  // read for this call
  MutexLock lock(mu_);
  if (index_.FindSession(request.session) == nullptr) {
    return absl::NotFoundError(absl::StrCat("no session ", request.session.value(), " at store ",
                                            config_.name, ": its lease ended, or it restarted"));
  }
  for (bool queued = true;; queued = false) {
    std::erase_if(open, [&](size_t i) {
      const uint64_t record = request.records[i];
      if (promotes_.size() >= kPromoteQueueMax) return false;
      PromoteJob job;
      const PromoteBegin begin =
          index_.BeginPromote(clock_.Now(), request.session, ticket, record, &job);
      switch (begin) {
        case PromoteBegin::kStarted:
          promotes_.push_back(job);
          own.insert(record);
          queued = true;
          return false;
        case PromoteBegin::kRunning:
          return false;
        case PromoteBegin::kNoRoom:
          reply.outcomes[i] = Outcome::kNoRoom;
          spill_work_.NotifyOne();
          return true;
        case PromoteBegin::kLost:
          reply.outcomes[i] = Outcome::kLost;
          return true;
        case PromoteBegin::kResident:
          reply.outcomes[i] = Outcome::kResident;
          if (own.contains(record)) {
            reply.bytes_from_disk +=
                index_.GeometryOf(*index_.FindBlock(BlockHandleOf(record))).RecordBytes();
          }
          return true;
      }
      KVT_CHECK(false, "begin ", static_cast<int>(begin));
    });
    if (queued) promote_work_.NotifyOne();
    const absl::Duration left = deadline - clock_.Now();
    if (open.empty() || left <= absl::ZeroDuration()) return reply;
    promote_done_.WaitFor(mu_, std::min<absl::Duration>(left, absl::Milliseconds(50)));
  }
}

absl::StatusOr<PurgeTenantReply> StoreNode::PurgeTenant(const PurgeTenantRequest& request) {
  PurgeTenantReply reply;
  const absl::Time deadline =
      clock_.Now() + std::clamp(request.wait, absl::ZeroDuration(), kPurgeWaitMax);
  MutexLock lock(mu_);
  reply.blocks = index_.PurgeTenant(request.tenant);
  if (disk_ != nullptr) {
    const uint64_t own = ++purges_wanted_;
    spill_work_.NotifyOne();
    while (purges_done_ < own && clock_.Now() < deadline) {
      purge_done_.WaitFor(
          mu_, std::min<absl::Duration>(deadline - clock_.Now(), absl::Milliseconds(50)));
    }
    reply.disk_reclaimed = purges_done_ >= own;
  }
  reply.memory_bytes = index_.BytesOfTenant(request.tenant).memory;
  KVT_LOG(kInfo, "purged a tenant: ", reply.blocks, " blocks");
  return reply;
}

void StoreNode::FillDiskStats(const IndexStats& index, StoreStats* stats) {
  stats->disk_bytes = index.disk_bytes;
  stats->disk_records = index.disk_records;
  stats->disk_used_bytes = disk_usage_.disk_bytes;
  stats->disk_quota_bytes = disk_usage_.quota_bytes;
  stats->spill_queue_bytes = index.spilling_bytes;
  stats->promote_queue_bytes = index.promoting_bytes;
  stats->spilled = index.spilled;
  stats->promoted = index.promoted;
  stats->dropped = index.dropped;
  stats->spill_failures = spill_failures_;
  stats->promote_failures = index.lost_on_disk;
  stats->disk_failing = disk_failing_;
  stats->disk_limit_bytes = disk_limit_;
  stats->index_bytes = index.index_bytes + checksums_.MemoryBytes();
  stats->tenant_refused = index.tenant_refused;
  stats->spill_waits = spill_waits_;
  stats->promote_retries = promote_retries_;
}

}  // namespace kvt
