#include "kvstore/client/transfer_table.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/base/units.h"
#include "kvstore/index/block_handle.h"

namespace kvt {
namespace {

constexpr int kSlotBits = 20;
// The slowest rate at which a large transfer still counts as making progress: its deadline is
// transfer_timeout and the time that its bytes take at this rate.
constexpr double kRateMin = 64.0 * static_cast<double>(kMiB);  // bytes/s
// Smaller bursts say more of the round trip than of the rate.
constexpr uint64_t kRateBytesMin = 256 * kKiB;
static_assert(kTransfersMax <= 1 << kSlotBits);

TransferId MakeId(uint32_t slot, uint32_t generation) {
  return TransferId(static_cast<uint64_t>(generation) << kSlotBits | slot);
}

void CheckRange(int begin, int end, const Geometry& geometry, size_t blocks, size_t outcomes) {
  KVT_CHECK(begin >= 0 && begin < end && end <= geometry.layers, "layers [", begin, ", ", end,
            ") of ", geometry.layers);
  KVT_CHECK(outcomes == blocks, outcomes, " outcomes for ", blocks, " blocks");
}

}  // namespace

TransferTable::TransferTable(const TierClientConfig& config, LinkTable& links, CallPool& calls)
    : config_(config),
      geometry_(config.model.geometry),
      links_(links),
      calls_(calls),
      promoting_max_(std::max(1, config.options.control_threads / 2)) {}

TransferTable::~TransferTable() {
  MutexLock lock(mu_);
  KVT_CHECK(free_.size() == slots_.size(), slots_.size() - free_.size(), " transfers still run");
}

TransferId TransferTable::Pull(TierPull pull) {
  CheckRange(pull.layer_begin, pull.layer_end, geometry_, pull.blocks.size(),
             pull.outcomes.size());
  Transfer& transfer = Take(true, pull.deadline, pull.outcomes, std::move(pull.done));
  const Range layers{pull.layer_begin, pull.layer_end};
  for (uint32_t i = 0; i < pull.blocks.size(); ++i) {
    const PullBlock& block = pull.blocks[i];
    const bool wanted = block.base != nullptr || block.residual != nullptr;
    transfer.outcomes[i] = wanted ? TransferOutcome::kLost : TransferOutcome::kSkipped;
    const bool there = block.block != nullptr && (block.base == nullptr || block.block->has_base()) &&
                       (block.residual == nullptr || block.block->has_residual());
    Part* part = wanted && there ? PartFor(transfer, block.block) : nullptr;
    if (part == nullptr) continue;
    transfer.outcomes[i] = TransferOutcome::kOk;
    if (block.base != nullptr) AddPull(*part, i, block, Plane::kBase, layers);
    if (block.residual != nullptr) AddPull(*part, i, block, Plane::kResidual, layers);
  }
  return Start(transfer);
}

TransferId TransferTable::Push(TierPush push) {
  CheckRange(push.layer_begin, push.layer_end, geometry_, push.blocks.size(),
             push.outcomes.size());
  Transfer& transfer = Take(false, push.deadline, push.outcomes, std::move(push.done));
  const Range layers{push.layer_begin, push.layer_end};
  const size_t slices = static_cast<size_t>(layers.end - layers.begin) * geometry_.kv_heads;
  transfer.checksums.resize(std::max(transfer.checksums.size(), push.blocks.size() * 2 * slices));
  uint64_t* checksums = transfer.checksums.data();
  for (uint32_t i = 0; i < push.blocks.size(); ++i) {
    const PushBlock& block = push.blocks[i];
    const bool wanted = block.base != nullptr || block.residual != nullptr;
    transfer.outcomes[i] = wanted ? TransferOutcome::kLost : TransferOutcome::kSkipped;
    Part* part = wanted && block.block != nullptr ? PartFor(transfer, block.block) : nullptr;
    if (part == nullptr) continue;
    transfer.outcomes[i] = TransferOutcome::kOk;
    if (block.base != nullptr) AddPush(*part, i, block, Plane::kBase, layers, checksums);
    checksums += slices;
    if (block.residual != nullptr) AddPush(*part, i, block, Plane::kResidual, layers, checksums);
    checksums += slices;
  }
  return Start(transfer);
}

void TransferTable::Cancel(TransferId id) {
  struct Burst {
    StoreLink* link;
    uint64_t serial;
    BurstId burst;
  };
  std::vector<Burst> bursts;
  {
    MutexLock lock(mu_);
    const uint64_t slot = id.value() & ((uint64_t{1} << kSlotBits) - 1);
    if (slot >= slots_.size()) return;
    Transfer& transfer = slots_[slot];
    if (MakeId(transfer.slot, transfer.generation) != id || transfer.generation % 2 == 0) return;
    transfer.cancelled.store(true);
    const auto add = [&](const std::vector<std::unique_ptr<Part>>& parts, size_t count) {
      for (size_t i = 0; i < count; ++i) {
        const Part& part = *parts[i];
        const uint64_t burst = part.burst.load(std::memory_order_acquire);
        if (burst != 0) bursts.push_back({part.link, part.channel_serial.load(), BurstId(burst)});
      }
    };
    add(transfer.parts, transfer.part_count);
    add(transfer.disk_parts, transfer.disk_part_count);
  }
  for (const Burst& burst : bursts) burst.link->CancelBurst(burst.serial, burst.burst);
}

TransferTable::Transfer& TransferTable::Take(bool is_pull, absl::Time deadline,
                                             absl::Span<TransferOutcome> outcomes,
                                             TransferDone done) {
  Transfer* transfer = nullptr;
  {
    MutexLock lock(mu_);
    if (free_.empty()) {
      KVT_CHECK(slots_.size() < kTransfersMax, "more than ", kTransfersMax, " transfers");
      slots_.emplace_back();
      slots_.back().slot = static_cast<uint32_t>(slots_.size() - 1);
      slots_.back().table = this;
      transfer = &slots_.back();
    } else {
      transfer = free_.back();
      free_.pop_back();
    }
    ++transfer->generation;
    transfer->part_count = 0;
    transfer->disk_part_count = 0;
  }
  transfer->is_pull = is_pull;
  transfer->deadline = deadline;
  transfer->outcomes = outcomes;
  transfer->done = std::move(done);
  transfer->cancelled.store(false);
  transfer->open_ends.store(1);
  return *transfer;
}

TransferTable::Part* TransferTable::PartFor(Transfer& transfer, const PlacedBlock* block) {
  StoreLink* link = links_.Get(block->store);
  if (link == nullptr) return nullptr;
  // Few stores: the newest parts are looked at first.
  for (size_t i = transfer.part_count; i > 0; --i) {
    Part& part = *transfer.parts[i - 1];
    if (part.link != link || part.incarnation != block->incarnation) continue;
    if (part.block_of.size() + kPlanes <= kBurstPiecesMax) return &part;
    break;
  }
  Part& part = TakePart(transfer, transfer.parts, transfer.part_count);
  part.link = link;
  part.incarnation = block->incarnation;
  return &part;
}

TransferTable::Part& TransferTable::TakePart(Transfer& transfer,
                                             std::vector<std::unique_ptr<Part>>& parts,
                                             size_t& count) {
  MutexLock lock(mu_);  // Cancel reads the parts
  if (count == parts.size()) parts.push_back(std::make_unique<Part>());
  Part& part = *parts[count++];
  part.transfer = &transfer;
  part.link = nullptr;
  part.pulls.clear();
  part.pushes.clear();
  part.block_of.clear();
  part.bytes = 0;
  part.accepted = false;
  part.promotions = 0;
  part.burst.store(0);
  return part;
}

Piece TransferTable::PieceOf(TicketRef ticket, const PlacedBlock& block, Plane plane,
                             Range layers) const {
  Piece piece;
  piece.ticket = ticket.id.value();
  piece.ticket_epoch = ticket.epoch.value();
  piece.handle = PlaneRecordHandle(block.place.handle, plane);
  piece.offset = geometry_.SlotOffset(layers.begin);
  piece.length = static_cast<uint32_t>(layers.end - layers.begin) * geometry_.SlotBytes();
  return piece;
}

void TransferTable::AddPull(Part& part, uint32_t index, const PullBlock& block, Plane plane,
                            Range layers) {
  const bool base = plane == Plane::kBase;
  const std::vector<uint64_t>& checksums =
      base ? block.block->place.base_checksums : block.block->place.residual_checksums;
  PullItem item;
  item.piece = PieceOf(block.ticket, *block.block, plane, layers);
  item.parts = base ? block.base : block.residual;
  item.part_bytes = geometry_.SlotBytes();
  item.key_hash = block.block->key_hash;
  item.plane = plane;
  if (config_.options.verify_checksums && !checksums.empty()) {
    KVT_CHECK(checksums.size() == geometry_.SlicesPerRecord(), checksums.size(), " checksums");
    item.checksums = checksums.data() + static_cast<size_t>(layers.begin) * geometry_.kv_heads;
  }
  part.pulls.push_back(item);
  part.block_of.push_back(index);
}

void TransferTable::AddPush(Part& part, uint32_t index, const PushBlock& block, Plane plane,
                            Range layers, uint64_t* checksums) {
  PushItem item;
  item.piece = PieceOf(block.ticket, *block.block, plane, layers);
  item.parts = plane == Plane::kBase ? block.base : block.residual;
  item.part_bytes = geometry_.SlotBytes();
  item.checksums = checksums;
  item.key_hash = block.block->key_hash;
  item.plane = plane;
  part.pushes.push_back(item);
  part.block_of.push_back(index);
}

TransferId TransferTable::Start(Transfer& transfer) {
  const TransferId id = MakeId(transfer.slot, transfer.generation);
  const size_t parts = transfer.part_count;
  uint64_t bytes = 0;
  for (size_t i = 0; i < parts; ++i) {
    for (const PullItem& item : transfer.parts[i]->pulls) bytes += item.piece.length;
    for (const PushItem& item : transfer.parts[i]->pushes) bytes += item.piece.length;
  }
  transfer.deadline =
      std::min(transfer.deadline, RealClock::Get().Now() + config_.options.transfer_timeout +
                                      absl::Seconds(static_cast<double>(bytes) / kRateMin));
  transfer.open_ends.fetch_add(static_cast<int>(2 * parts));
  for (size_t i = 0; i < parts; ++i) {
    SendPart(*transfer.parts[i]);
  }
  CloseEnds(transfer, 1);
  return id;
}

void TransferTable::SendPart(Part& part) {
  part.statuses.assign(part.block_of.size(), PieceStatus::kNotAttempted);
  part.began = RealClock::Get().Now();
  LinkBurst burst;
  burst.incarnation = part.incarnation;
  burst.deadline = part.transfer->deadline;
  burst.submit = [&part](Channel& channel, uint64_t serial) {
    return SubmitPart(part, channel, serial);
  };
  burst.fail = [&part](PieceStatus why) { FailPart(part, why); };
  part.link->Submit(std::move(burst));
}

absl::Status TransferTable::SubmitPart(Part& part, Channel& channel, uint64_t serial) {
  Transfer& transfer = *part.transfer;
  if (transfer.cancelled.load()) return absl::CancelledError("the transfer was cancelled");
  const auto done = [&part](const BurstResult& result) { EndPart(part, result); };
  absl::StatusOr<BurstId> burst;
  if (transfer.is_pull) {
    burst = channel.Pull(
        PullRequest{part.pulls, absl::MakeSpan(part.statuses), transfer.deadline, done});
  } else {
    burst = channel.Push(PushRequest{part.pushes, absl::MakeSpan(part.statuses),
                                     PushChecksums::kCompute, transfer.deadline, done});
  }
  if (!burst.ok()) return burst.status();
  part.channel_serial.store(serial);
  part.burst.store(burst->value(), std::memory_order_release);
  // A Cancel that came before the id was noted.
  if (transfer.cancelled.load()) channel.Cancel(*burst);
  transfer.table->CloseEnds(transfer, 1);
  return absl::OkStatus();
}

void TransferTable::EndPart(Part& part, const BurstResult& result) {
  part.accepted = true;
  part.bytes = result.bytes;
  StoreLink::Counters& counters = part.link->counters();
  (part.transfer->is_pull ? counters.pulled_bytes : counters.pushed_bytes) += result.bytes;
  (part.transfer->is_pull ? counters.pull_bursts : counters.push_bursts) += 1;
  StoreLink* link = part.link;
  TransferTable* table = part.transfer->table;
  if (part.transfer->is_pull) {
    const bool disk = part.promotions > 0;
    if (disk) counters.disk_bytes += result.bytes;
    const absl::Time now = RealClock::Get().Now();
    if (result.bytes >= kRateBytesMin) {
      link->NotePull(disk, result.bytes, now - (disk ? part.promote_began : part.began), now);
    }
    if (table->WantsPromotion(part)) table->StartPromotion(part);
  }
  table->CloseEnds(*part.transfer, 1);
  link->BurstEnded();
}

void TransferTable::FailPart(Part& part, PieceStatus why) {
  std::fill(part.statuses.begin(), part.statuses.end(), why);
  part.transfer->table->CloseEnds(*part.transfer, 2);
}

void TransferTable::CloseEnds(Transfer& transfer, int ends) {
  if (transfer.open_ends.fetch_sub(ends, std::memory_order_acq_rel) == ends) Finish(transfer);
}

void TransferTable::ReportCorrupt(const Part& part) {
  // By ticket: (id, epoch) -> records, each once.
  std::map<std::pair<uint64_t, uint32_t>, std::set<uint64_t>> records;
  for (size_t i = 0; i < part.statuses.size(); ++i) {
    if (part.statuses[i] != PieceStatus::kCorrupt || i >= part.pulls.size()) continue;
    const Piece& piece = part.pulls[i].piece;
    records[{piece.ticket, piece.ticket_epoch}].insert(piece.handle);
  }
  for (const auto& [ticket, handles] : records) {
    part.link->ReportCorrupt({TicketId(ticket.first), TicketEpoch(ticket.second)},
                             {handles.begin(), handles.end()});
  }
}

void TransferTable::AddVerdicts(const Part& part, absl::Span<TransferOutcome> outcomes,
                                TransferResult* result) {
  uint64_t lost = 0;
  uint64_t corrupt = 0;
  uint64_t expired = 0;
  for (size_t i = 0; i < part.statuses.size(); ++i) {
    if (part.statuses[i] == PieceStatus::kOk) continue;
    outcomes[part.block_of[i]] = TransferOutcome::kLost;
    ++lost;
    corrupt += part.statuses[i] == PieceStatus::kCorrupt;
    expired += part.statuses[i] == PieceStatus::kExpired;
  }
  if (lost > 0) part.link->counters().lost_pieces += lost;
  if (expired > 0) part.link->counters().expired_pieces += expired;
  result->pieces_expired += expired;
  if (corrupt > 0) {
    part.link->counters().corrupt_pieces += corrupt;
    ReportCorrupt(part);
  }
  result->bytes += part.bytes;
  result->bursts += part.accepted;
  if (part.promotions > 0) result->bytes_from_disk += part.bytes;
}

int TransferTable::BlocksFromDisk(const Transfer& transfer) {
  if (transfer.disk_part_count == 0) return 0;
  std::vector<bool> from_disk(transfer.outcomes.size());
  for (size_t p = 0; p < transfer.disk_part_count; ++p) {
    for (const uint32_t block : transfer.disk_parts[p]->block_of) {
      from_disk[block] = transfer.outcomes[block] == TransferOutcome::kOk;
    }
  }
  return static_cast<int>(std::count(from_disk.begin(), from_disk.end(), true));
}

void TransferTable::Finish(Transfer& transfer) {
  TransferResult result;
  for (size_t p = 0; p < transfer.part_count; ++p) {
    AddVerdicts(*transfer.parts[p], transfer.outcomes, &result);
  }
  for (size_t p = 0; p < transfer.disk_part_count; ++p) {
    AddVerdicts(*transfer.disk_parts[p], transfer.outcomes, &result);
  }
  for (const TransferOutcome outcome : transfer.outcomes) {
    result.blocks_ok += outcome == TransferOutcome::kOk;
    result.blocks_lost += outcome == TransferOutcome::kLost;
  }
  result.blocks_from_disk = BlocksFromDisk(transfer);
  TransferDone done = std::move(transfer.done);
  transfer.done = nullptr;
  {
    MutexLock lock(mu_);
    ++transfer.generation;
    free_.push_back(&transfer);
  }
  if (done) done(result);
}

}  // namespace kvt
