// Pulls and pushes of a TierClient: splits a request by store, turns blocks into pieces (one per
// block and plane, covering the layer range), and gathers the verdicts of the bursts.
//
//   request --plan--> parts (one burst of one store each) --StoreLink::Submit--> completions
//           --last one--> outcome of each block, figures, `done`
//
// Pieces that a store has on disk alone come back kOnDisk. Their part asks the store, on the call
// pool, to bring them into memory (Promote), in slices of time; what is there is pulled by a new part
// (a disk part), what cannot be is lost: transfer_promote.cc. At most half of the pool's threads wait
// for disks.
//
// A Transfer is reused with its arrays, so that the steady state allocates nothing. It ends when its
// count of open ends falls to zero: one for planning, for each part one for handing it over and one
// for its completion, and one while it is promoted.
//
// Thread-safe. Owned by TierClient; the links outlive it; every transfer has ended when it goes.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "kernels/base/mutex.h"
#include "kernels/layout/geometry.h"
#include "kvstore/client/call_pool.h"
#include "kvstore/client/link_table.h"
#include "kvstore/client/tier_types.h"
#include "kvstore/transport/transport.h"

namespace kvt {

// Transfers of one client in progress.
inline constexpr int kTransfersMax = 64 * 1024;
// Times that a piece is brought back from disk; it may be spilled again before it is pulled.
inline constexpr int kPromotionsMax = 3;

class TransferTable {
 public:
  TransferTable(const TierClientConfig& config, LinkTable& links, CallPool& calls);
  ~TransferTable();

  TransferId Pull(TierPull pull);
  TransferId Push(TierPush push);
  void Cancel(TransferId id);

 private:
  struct Transfer;
  // One burst. Its arrays are borrowed by the channel until its completion.
  struct Part {
    Transfer* transfer = nullptr;
    StoreLink* link = nullptr;
    uint64_t incarnation = 0;
    std::vector<PullItem> pulls;
    std::vector<PushItem> pushes;
    std::vector<PieceStatus> statuses;
    std::vector<uint32_t> block_of;  // index of the item's block in the request
    uint64_t bytes = 0;
    bool accepted = false;  // by a channel
    int promotions = 0;     // of its pieces, so far; a disk part's is greater than zero
    absl::Time began;       // handed to the link
    absl::Time promote_began;
    std::atomic<uint64_t> burst{0};
    std::atomic<uint64_t> channel_serial{0};
  };
  struct Transfer {
    TransferTable* table = nullptr;
    uint32_t slot = 0;
    uint32_t generation = 0;  // guarded by the table's mu_; odd while in progress
    bool is_pull = true;
    absl::Time deadline;
    absl::Span<TransferOutcome> outcomes;
    TransferDone done;
    std::vector<std::unique_ptr<Part>> parts;  // the first part_count are in use
    size_t part_count = 0;
    // Pulls of what was promoted; guarded by the table's mu_ until all ends are closed.
    std::vector<std::unique_ptr<Part>> disk_parts;
    size_t disk_part_count = 0;
    std::vector<uint64_t> checksums;  // of pushed slices
    std::atomic<int> open_ends{0};
    std::atomic<bool> cancelled{false};
  };
  struct Range {
    int begin;
    int end;
  };

  Transfer& Take(bool is_pull, absl::Time deadline, absl::Span<TransferOutcome> outcomes,
                 TransferDone done);
  // The part for one more block at this place, two pieces at most; null when the place is void.
  Part* PartFor(Transfer& transfer, const PlacedBlock* block);
  // A part, empty, of one of the transfer's lists.
  Part& TakePart(Transfer& transfer, std::vector<std::unique_ptr<Part>>& parts, size_t& count);
  Piece PieceOf(TicketRef ticket, const PlacedBlock& block, Plane plane, Range layers) const;
  void AddPull(Part& part, uint32_t index, const PullBlock& block, Plane plane, Range layers);
  void AddPush(Part& part, uint32_t index, const PushBlock& block, Plane plane, Range layers,
               uint64_t* checksums);
  TransferId Start(Transfer& transfer);
  static void SendPart(Part& part);
  static absl::Status SubmitPart(Part& part, Channel& channel, uint64_t serial);
  static void EndPart(Part& part, const BurstResult& result);
  static void FailPart(Part& part, PieceStatus why);
  void CloseEnds(Transfer& transfer, int ends);
  static void ReportCorrupt(const Part& part);
  static void AddVerdicts(const Part& part, absl::Span<TransferOutcome> outcomes,
                          TransferResult* result);
  static int BlocksFromDisk(const Transfer& transfer);
  void Finish(Transfer& transfer);

  [[nodiscard]] bool WantsPromotion(const Part& part) const;
  void StartPromotion(Part& part);
  // Starts waiting promotions while threads are left for them. Any thread.
  void RunPromotions();
  // On the call pool.
  void PromoteAndGoOn(Part& part);
  // One call; true when some are still being read.
  bool PromoteSlice(Part& part);
  void PullPromoted(const Part& from, absl::Span<const size_t> pieces);
  void EndPromotion(Part& part);

  const TierClientConfig& config_;
  const Geometry geometry_;
  LinkTable& links_;
  CallPool& calls_;
  const int promoting_max_;
  Mutex mu_;
  std::deque<Part*> promote_queue_ ABSL_GUARDED_BY(mu_);  // bounded by the parts in progress
  int promoting_ ABSL_GUARDED_BY(mu_) = 0;
  std::deque<Transfer> slots_ ABSL_GUARDED_BY(mu_);
  std::vector<Transfer*> free_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvt
