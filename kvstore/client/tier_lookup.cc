#include "kvstore/client/tier_lookup.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/base/mutex.h"
#include "kvstore/client/placement.h"

namespace kvt {
namespace {

// Rounds of one lookup: three views, all others, and one more each for a store that fails on the way.
constexpr int kLookupRoundsMax = 7;

// A lookup's reply carries every checksum of every block: so many blocks to a call that it stays far
// below the bound of a control message, whatever the geometry.
size_t BlocksPerCall(const Geometry& geometry) {
  constexpr size_t kPlaceBytes = 128;  // all but the checksums
  const size_t block = kPlanes * geometry.SlicesPerRecord() * sizeof(uint64_t) + kPlaceBytes;
  return std::max<size_t>(1, kControlMessageBytesMax / 2 / block);
}

// Blocks next to one another that share their group.
struct Group {
  size_t begin = 0;
  size_t end = 0;
  std::array<std::vector<uint32_t>, 3> orders;  // store numbers by view, owner first
  std::vector<uint32_t> asked;
};

// What one store is asked, and its answer.
struct Ask {
  StoreLink* link = nullptr;
  uint32_t store = kNoStore;
  std::vector<size_t> indices;  // of blocks
  LookupRequest request;
  uint64_t incarnation = 0;
  std::optional<absl::Time> begun;  // RealClock: its call is under way since
  std::optional<absl::StatusOr<LookupReply>> reply;
};

// Shared by the caller and the calls, which may end after the caller has given up.
struct Round {
  Mutex mu;
  CondVar answered;
  size_t open ABSL_GUARDED_BY(mu) = 0;
  std::vector<std::unique_ptr<Ask>> asks;  // each call writes its own, under mu
};

void RunAsk(Round& round, Ask& ask, TicketRef ticket, absl::Time deadline) {
  absl::StatusOr<LookupReply> reply;
  uint64_t incarnation = 0;
  absl::StatusOr<LinkSession> session = ask.link->BeginCall(ticket, deadline);
  if (session.ok()) {
    ask.request.session = session->session;
    incarnation = session->incarnation;
    {
      MutexLock lock(round.mu);
      ask.begun = RealClock::Get().Now();
      ask.incarnation = incarnation;
    }
    reply = session->api->Lookup(ask.request);
    ask.link->EndCall(*session, reply.status());
  } else {
    reply = session.status();
  }
  MutexLock lock(round.mu);
  ask.incarnation = incarnation;
  ask.reply = std::move(reply);
  --round.open;
  round.answered.NotifyAll();
}

class LookupRun {
 public:
  LookupRun(LinkTable& links, CallPool& calls, const Geometry& geometry, const HeldTicket& ticket,
            absl::Span<const TierBlock> blocks, LookupReach reach, absl::Time deadline)
      : links_(links), calls_(calls), geometry_(geometry), ticket_(ticket), blocks_(blocks),
        reach_(reach), started_(RealClock::Get().Now()), deadline_(deadline) {
    result_.blocks.resize(blocks.size());
  }

  LookupResult Run(const LookupPlacements& placements) {
    MakeGroups(placements);
    for (int i = 0; i < kLookupRoundsMax && RealClock::Get().Now() < deadline_; ++i) {
      std::shared_ptr<Round> round = PlanRound();
      if (round->asks.empty()) break;
      SendAndWait(round);
      Join(*round);
    }
    CountLengths();
    return std::move(result_);
  }

 private:
  void MakeGroups(const LookupPlacements& placements) {
    const std::array<const std::vector<StoreRef>*, 3> views = {
        &placements.ticket, &placements.current, &placements.previous};
    std::array<std::vector<uint32_t>, 3> numbers;
    for (size_t v = 0; v < views.size(); ++v) numbers[v] = NumberStores(links_, *views[v]);
    for (size_t i = 0; i < blocks_.size(); ++i) {
      if (!groups_.empty() && blocks_[i].group_key == blocks_[i - 1].group_key) {
        groups_.back().end = i + 1;
        continue;
      }
      Group group;
      group.begin = i;
      group.end = i + 1;
      for (size_t v = 0; v < views.size(); ++v) {
        for (const int rank : RankStores(blocks_[i].group_key, *views[v])) {
          if (numbers[v][rank] != kNoStore) group.orders[v].push_back(numbers[v][rank]);
        }
      }
      groups_.push_back(std::move(group));
    }
  }

  // The next store to ask for the group: the first usable one of each view, unless it was asked.
  uint32_t NextStore(const Group& group) {
    for (const std::vector<uint32_t>& order : group.orders) {
      for (const uint32_t store : order) {
        if (!Usable(store)) continue;
        if (!Contains(group.asked, store)) return store;
        break;
      }
    }
    return kNoStore;
  }

  // Those still to ask for the group: the next owner, or all others when there is none.
  std::vector<uint32_t> NextStores(const Group& group) {
    const uint32_t owner = NextStore(group);
    if (owner != kNoStore) return {owner};
    std::vector<uint32_t> others;
    if (reach_ == LookupReach::kOwners) return others;
    for (const std::vector<uint32_t>& order : group.orders) {
      for (const uint32_t store : order) {
        if (!Contains(group.asked, store) && !Contains(others, store) && Usable(store)) {
          others.push_back(store);
        }
      }
    }
    return others;
  }

  bool Usable(uint32_t store) {
    if (Contains(failed_, store)) return false;
    if (links_.Get(store)->IsUp()) return true;
    Fail(store);
    return false;
  }

  void Fail(uint32_t store) {
    if (Contains(failed_, store)) return;  // several calls of one round
    failed_.push_back(store);
    result_.unreachable.push_back(links_.Get(store)->name());
  }

  static bool Contains(const std::vector<uint32_t>& list, uint32_t store) {
    return std::find(list.begin(), list.end(), store) != list.end();
  }

  std::shared_ptr<Round> PlanRound() {
    auto round = std::make_shared<Round>();
    for (Group& group : groups_) {
      std::vector<size_t> absent;
      for (size_t i = group.begin; i < group.end; ++i) {
        if (!result_.blocks[i].has_base()) absent.push_back(i);
      }
      if (absent.empty()) continue;
      for (const uint32_t store : NextStores(group)) {
        group.asked.push_back(store);
        for (const size_t i : absent) AskOf(*round, store).indices.push_back(i);
      }
    }
    return round;
  }

  Ask& AskOf(Round& round, uint32_t store) {
    for (auto ask = round.asks.rbegin(); ask != round.asks.rend(); ++ask) {
      if ((*ask)->store == store && (*ask)->indices.size() < blocks_per_call_) return **ask;
    }
    auto ask = std::make_unique<Ask>();
    ask->store = store;
    ask->link = links_.Get(store);
    ask->request.ticket = ticket_.signed_ticket;
    round.asks.push_back(std::move(ask));
    return *round.asks.back();
  }

  void SendAndWait(const std::shared_ptr<Round>& round) {
    const TicketRef ticket = ticket_.ref();
    const absl::Time deadline = deadline_;
    {
      MutexLock lock(round->mu);
      round->open = round->asks.size();
    }
    for (auto& ask : round->asks) {
      for (const size_t i : ask->indices) ask->request.blocks.push_back(blocks_[i].name);
      Ask* one = ask.get();
      LinkTable* links = &links_;
      links->CallStarted();
      const bool queued = calls_.TryRun([links, round, one, ticket, deadline] {
        RunAsk(*round, *one, ticket, deadline);
        links->CallEnded();
      });
      if (queued) continue;
      links->CallEnded();
      MutexLock lock(round->mu);
      one->reply = absl::StatusOr<LookupReply>(absl::ResourceExhaustedError("call pool is full"));
      --round->open;
    }
    MutexLock lock(round->mu);
    while (round->open > 0) {
      const absl::Duration left = deadline_ - RealClock::Get().Now();
      if (left <= absl::ZeroDuration()) break;
      round->answered.WaitFor(round->mu, left);
    }
    TellUnanswered(*round);
  }

  // A store that had most of the time and did not answer is told to its breaker now: the call itself
  // ends later, and the next requests would wait as long.
  void TellUnanswered(Round& round) ABSL_EXCLUSIVE_LOCKS_REQUIRED(round.mu) {
    const absl::Time now = RealClock::Get().Now();
    for (auto& ask : round.asks) {
      if (ask->reply.has_value() || !ask->begun.has_value()) continue;
      if (now - *ask->begun >= (deadline_ - started_) / 2) {
        ask->link->NoteUnanswered(ask->incarnation);
      }
    }
  }

  void Join(Round& round) {
    MutexLock lock(round.mu);
    for (auto& ask : round.asks) {
      const bool answered = ask->reply.has_value() && ask->reply->ok() &&
                            (**ask->reply).blocks.size() == ask->indices.size();
      if (!answered) {
        Fail(ask->store);
        continue;
      }
      uint64_t hits = 0;
      std::vector<LookupReply::Block>& found = (**ask->reply).blocks;
      for (size_t k = 0; k < found.size(); ++k) {
        const size_t i = ask->indices[k];
        if (found[k].presence == BlockPresence::kAbsent || !WellFormed(found[k].place)) continue;
        PlacedBlock& block = result_.blocks[i];
        if (block.has_residual() || block.presence == found[k].presence) continue;  // from another
        block.presence = found[k].presence;
        block.store = ask->store;
        block.incarnation = ask->incarnation;
        block.key_hash = blocks_[i].name.key.Hash64();
        block.place = std::move(found[k].place);
        ++hits;
      }
      StoreLink::Counters& counters = ask->link->counters();
      counters.lookups += 1;
      counters.lookup_blocks += ask->indices.size();
      counters.hit_blocks += hits;
    }
  }

  [[nodiscard]] bool WellFormed(const BlockPlace& place) const {
    const size_t slices = geometry_.SlicesPerRecord();
    return (place.base_checksums.empty() || place.base_checksums.size() == slices) &&
           (place.residual_checksums.empty() || place.residual_checksums.size() == slices);
  }

  void CountLengths() {
    for (const PlacedBlock& block : result_.blocks) {
      if (!block.has_base()) break;
      if (block.has_residual() && result_.exact_blocks == result_.base_blocks) {
        ++result_.exact_blocks;
      }
      ++result_.base_blocks;
    }
  }

  LinkTable& links_;
  CallPool& calls_;
  const Geometry& geometry_;
  const HeldTicket& ticket_;
  const absl::Span<const TierBlock> blocks_;
  const LookupReach reach_;
  const size_t blocks_per_call_ = BlocksPerCall(geometry_);
  const absl::Time started_;
  const absl::Time deadline_;
  std::vector<Group> groups_;
  std::vector<uint32_t> failed_;
  LookupResult result_;
};

}  // namespace

std::vector<uint32_t> NumberStores(LinkTable& links, absl::Span<const StoreRef> stores) {
  std::vector<uint32_t> numbers;
  numbers.reserve(stores.size());
  for (const StoreRef& store : stores) numbers.push_back(links.FindOrAdd(store));
  return numbers;
}

LookupResult LookupInTier(LinkTable& links, CallPool& calls, const Geometry& geometry,
                          const LookupPlacements& placements, const HeldTicket& ticket,
                          absl::Span<const TierBlock> blocks, LookupReach reach,
                          absl::Time deadline) {
  return LookupRun(links, calls, geometry, ticket, blocks, reach, deadline).Run(placements);
}

}  // namespace kvt
