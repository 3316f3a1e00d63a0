#include "kvstore/client/tier_reserve.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kvstore/client/placement.h"
#include "kvstore/client/tier_lookup.h"

namespace kvt {
namespace {

// What one store is asked for.
struct Share {
  std::vector<size_t> indices;  // of blocks
  uint32_t output_blocks = 0;
  [[nodiscard]] bool empty() const { return indices.empty() && output_blocks == 0; }
};

class ReserveRun {
 public:
  ReserveRun(LinkTable& links, const HeldTicket& ticket, absl::Span<const TierBlock> blocks,
             const ReserveTerms& terms, absl::Duration control_timeout)
      : links_(links), ticket_(ticket), stores_(ticket.ticket.stores), blocks_(blocks),
        terms_(terms), control_timeout_(control_timeout),
        numbers_(NumberStores(links, stores_)), shares_(stores_.size()), dead_(stores_.size()) {
    result_.blocks.resize(blocks.size());
    result_.already_sealed.resize(blocks.size());
    for (size_t s = 0; s < stores_.size(); ++s) {
      StoreLink* link = links_.Get(numbers_[s]);
      dead_[s] = link == nullptr || !link->IsUp();
      by_name_.push_back(s);
    }
    std::sort(by_name_.begin(), by_name_.end(),
              [&](size_t a, size_t b) { return stores_[a].name < stores_[b].name; });
  }

  absl::StatusOr<ReserveResult> Run(uint32_t output_blocks) {
    std::vector<size_t> all(blocks_.size());
    for (size_t i = 0; i < all.size(); ++i) all[i] = i;
    KVT_RETURN_IF_ERROR(Place(Share{std::move(all), output_blocks}));
    // Each turn asks one store; a dead one's share is assigned again, at most once per store.
    while (true) {
      const auto next = std::find_if(by_name_.begin(), by_name_.end(), [&](size_t s) {
        return !shares_[s].empty();
      });
      if (next == by_name_.end()) break;
      const absl::Status status = AskStore(*next);
      if (!status.ok()) {
        if (terms_.mode == ReserveMode::kAllOrNothing) LetGoUnlessKept();
        return status;
      }
    }
    return std::move(result_);
  }

 private:
  // Divides a share among the stores that are alive. Without any, kKeepGranted gives its blocks up.
  absl::Status Place(const Share& share) {
    absl::Status status = Assign(share.indices);
    if (status.ok()) status = AssignOutput(share.output_blocks);
    if (status.ok() || terms_.mode == ReserveMode::kAllOrNothing) return status;
    result_.refused += static_cast<int>(share.indices.size());
    return absl::OkStatus();
  }

  absl::Status Assign(const std::vector<size_t>& indices) {
    std::vector<int> order;
    const BlockKey* group = nullptr;
    for (const size_t i : indices) {
      if (group == nullptr || *group != blocks_[i].group_key) {
        group = &blocks_[i].group_key;
        order = RankStores(*group, stores_);
      }
      const auto owner = std::find_if(order.begin(), order.end(), [&](int s) { return !dead_[s]; });
      if (owner == order.end()) return NoStore();
      shares_[*owner].indices.push_back(i);
    }
    return absl::OkStatus();
  }

  // What fits the last group goes to its owner; later groups' owners depend on keys that do not
  // exist yet: divided evenly.
  absl::Status AssignOutput(uint32_t output_blocks) {
    if (output_blocks == 0) return absl::OkStatus();
    std::vector<size_t> alive;
    for (const size_t s : by_name_) {
      if (!dead_[s] && stores_[s].weight > 0) alive.push_back(s);
    }
    if (alive.empty()) return NoStore();
    if (!blocks_.empty()) {
      const uint32_t in_group = std::min<uint32_t>(output_blocks, kGroupBlocks);
      for (const int s : RankStores(blocks_.back().group_key, stores_)) {
        if (dead_[s]) continue;
        shares_[s].output_blocks += in_group;
        output_blocks -= in_group;
        break;
      }
    }
    const auto each = static_cast<uint32_t>((output_blocks + alive.size() - 1) / alive.size());
    for (const size_t s : alive) shares_[s].output_blocks += each;
    return absl::OkStatus();
  }

  [[nodiscard]] absl::Status NoStore() const {
    absl::Status why = failure_;
    for (const uint32_t number : numbers_) {
      const StoreLink* link = links_.Get(number);
      if (why.ok() && link != nullptr && !link->IsUp()) why = link->UpStatus();
    }
    return absl::UnavailableError(
        absl::StrCat("no store of the ticket's placement can be reached: ",
                     why.ok() ? "it names none" : why.message()));
  }

  // An aged ticket may wait here while it holds something: only when no store behind this one, in
  // the order in which all ask, was granted already (a share of a dead store may lead back).
  [[nodiscard]] bool MayKeep(size_t s) const {
    return terms_.mode == ReserveMode::kAllOrNothing && terms_.waited > absl::ZeroDuration() &&
           std::all_of(granted_.begin(), granted_.end(), [&](size_t granted) {
             return stores_[granted].name <= stores_[s].name;
           });
  }

  void LetGoUnlessKept() {
    std::vector<uint32_t> kept;
    for (const size_t s : kept_) kept.push_back(numbers_[s]);
    LetGo(links_, ticket_.ref(), kept);
  }

  // OK also when the store turned out dead (its share went elsewhere) or refused in kKeepGranted.
  absl::Status AskStore(size_t s) {
    const absl::Time now = RealClock::Get().Now();
    if (now >= terms_.deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat("store ", stores_[s].name, " was not asked before the deadline"));
    }
    const Share share = std::exchange(shares_[s], Share{});
    StoreLink& link = *links_.Get(numbers_[s]);
    absl::StatusOr<LinkSession> session =
        link.BeginCall(ticket_.ref(), std::min(terms_.deadline, now + control_timeout_));
    if (!session.ok()) return Reassign(s, share, session.status());
    const bool may_keep = MayKeep(s);
    ReserveRequest request;
    if (may_keep) request.waited = terms_.waited;
    request.session = session->session;
    request.ticket = ticket_.signed_ticket;
    request.output_blocks = share.output_blocks;
    for (const size_t i : share.indices) request.blocks.push_back(blocks_[i].name);
    absl::StatusOr<ReserveReply> reply = session->api->Reserve(request);
    link.EndCall(*session, reply.status());
    if (reply.ok() && reply->pending) {
      link.counters().refused += 1;
      if (!may_keep) return absl::InternalError(absl::StrCat("store ", link.name(), ": pending"));
      kept_ = granted_;
      kept_.push_back(s);
      return absl::ResourceExhaustedError(
          absl::StrCat("store ", link.name(), " has not enough room yet; it is this request's turn"));
    }
    if (reply.ok() && reply->blocks.size() == share.indices.size()) {
      granted_.push_back(s);
      Note(link, numbers_[s], session->incarnation, share, *reply);
      return absl::OkStatus();
    }
    if (reply.ok()) return Reassign(s, share, absl::InternalError("a reply of another length"));
    if (absl::IsResourceExhausted(reply.status())) {
      link.counters().refused += 1;
      if (may_keep) kept_ = granted_;
      if (terms_.mode == ReserveMode::kAllOrNothing) {
        return absl::ResourceExhaustedError(
            absl::StrCat("store ", link.name(), ": ", reply.status().message()));
      }
      result_.refused += static_cast<int>(share.indices.size());
      return absl::OkStatus();
    }
    if (absl::IsUnauthenticated(reply.status()) || absl::IsFailedPrecondition(reply.status()) ||
        absl::IsPermissionDenied(reply.status()) || absl::IsInvalidArgument(reply.status())) {
      return reply.status();
    }
    return Reassign(s, share, reply.status());
  }

  absl::Status Reassign(size_t s, const Share& share, const absl::Status& failure) {
    dead_[s] = true;
    failure_ = absl::UnavailableError(absl::StrCat("store ", stores_[s].name, ": ",
                                                   failure.message()));
    return Place(share);
  }

  void Note(StoreLink& link, uint32_t number, uint64_t incarnation, const Share& share,
            ReserveReply& reply) {
    for (size_t k = 0; k < share.indices.size(); ++k) {
      const size_t i = share.indices[k];
      PlacedBlock& block = result_.blocks[i];
      block.place = std::move(reply.blocks[k].place);
      block.presence = block.place.residual_offset == kNoOffset && reply.blocks[k].already_sealed
                           ? BlockPresence::kBaseOnly
                           : BlockPresence::kExact;
      block.store = number;
      block.incarnation = incarnation;
      block.key_hash = blocks_[i].name.key.Hash64();
      result_.already_sealed[i] = reply.blocks[k].already_sealed;
    }
    link.counters().reserved_blocks += share.indices.size();
  }

  LinkTable& links_;
  const HeldTicket& ticket_;
  const std::vector<StoreRef>& stores_;
  const absl::Span<const TierBlock> blocks_;
  const ReserveTerms terms_;
  const absl::Duration control_timeout_;
  const std::vector<uint32_t> numbers_;  // of stores_, in the table
  std::vector<Share> shares_;            // by index into stores_
  std::vector<bool> dead_;               // for this call
  absl::Status failure_;                 // the last store's that failed on the way
  std::vector<size_t> by_name_;
  std::vector<size_t> granted_;  // in the order asked
  std::vector<size_t> kept_;     // of an aged ticket that was refused
  ReserveResult result_;
};

}  // namespace

absl::StatusOr<ReserveResult> ReserveInTier(LinkTable& links, const HeldTicket& ticket,
                                            absl::Span<const TierBlock> blocks,
                                            uint32_t output_blocks, const ReserveTerms& terms,
                                            absl::Duration control_timeout) {
  return ReserveRun(links, ticket, blocks, terms, control_timeout).Run(output_blocks);
}

void LetGo(LinkTable& links, TicketRef ticket, absl::Span<const uint32_t> except) {
  for (uint32_t i = 0; i < links.size(); ++i) {
    if (std::find(except.begin(), except.end(), i) != except.end()) continue;
    StoreLink& link = *links.Get(i);
    if (!link.Forget(ticket)) continue;
    const absl::StatusOr<LinkSession> session = link.CurrentSession();
    if (!session.ok()) continue;
    link.EndCall(*session, session->api->Release(ReleaseRequest{session->session, ticket}));
  }
}

}  // namespace kvt
