#include "kvstore/client/tier_client.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/check.h"
#include "kernels/base/mutex.h"
#include "kvstore/client/link_table.h"
#include "kvstore/client/tier_lookup.h"
#include "kvstore/client/tier_reserve.h"
#include "kvstore/client/transfer_table.h"
#include "kvstore/wire/wire_rpc.h"

namespace kvt {
namespace {

constexpr absl::Duration kTickMax = absl::Seconds(1);
// For the first attempt at a store that has just become known: a session and a channel take milliseconds.
constexpr absl::Duration kFirstConnectWait = absl::Milliseconds(500);

TierClientConfig WithDefaults(TierClientConfig config) {
  KVT_CHECK(config.model.geometry.Validate().ok(), config.model.geometry.ToString());
  if (!config.connect_store) {
    config.connect_store = [timeout = config.options.control_timeout](const std::string& address) {
      return std::shared_ptr<StoreApi>(ConnectStore(address, timeout));
    };
  }
  return config;
}

// Placement depends on names and weights alone.
bool SamePlacement(absl::Span<const StoreRef> a, absl::Span<const StoreRef> b) {
  return std::is_permutation(a.begin(), a.end(), b.begin(), b.end(),
                             [](const StoreRef& x, const StoreRef& y) {
                               return x.name == y.name && x.weight == y.weight;
                             });
}

SealOutcome FromReply(SealReply::Outcome outcome) {
  switch (outcome) {
    case SealReply::Outcome::kSealed:
    case SealReply::Outcome::kWinnerElsewhere:
      return SealOutcome::kSealed;
    case SealReply::Outcome::kIncomplete:
      return SealOutcome::kIncomplete;
    case SealReply::Outcome::kLost:
      return SealOutcome::kLost;
  }
  return SealOutcome::kLost;
}

}  // namespace

class TierClient::Impl {
 public:
  Impl(TierClientConfig config, CallPool& calls, const Clock& clock)
      : config_(WithDefaults(std::move(config))),
        calls_(calls),
        clock_(clock),
        links_(config_, calls, clock),
        transfers_(config_, links_, calls) {}

  void SetView(const ClusterView& view) {
    {
      MutexLock lock(mu_);
      // A coordinator that has just restarted knows no store yet.
      if (view.stores.empty()) return;
      if (!SamePlacement(view.stores, current_)) previous_ = std::move(current_);
      current_ = view.stores;
    }
    for (const StoreRef& store : view.stores) {
      const uint32_t number = links_.FindOrAdd(store);
      if (number != kNoStore) links_.Get(number)->SetStore(store);
    }
    for (uint32_t i = 0; i < links_.size(); ++i) {
      StoreLink& link = *links_.Get(i);
      link.SetWanted(std::any_of(view.stores.begin(), view.stores.end(), [&](const StoreRef& s) {
        return s.name == link.name();
      }));
    }
    Tick(clock_.Now());
  }

  absl::Status WaitConnected(absl::Duration timeout) {
    const absl::Time deadline = RealClock::Get().Now() + timeout;
    Mutex mu;
    CondVar never;
    while (true) {
      Tick(clock_.Now());
      std::vector<std::string> missing;
      // Of the view, and those that a ticket named before the view did.
      for (uint32_t i = 0; i < links_.size(); ++i) {
        const StoreLink* link = links_.Get(i);
        if (!link->IsWanted()) continue;
        const absl::Status status = link->UpStatus();
        if (!status.ok()) missing.push_back(std::string(status.message()));
      }
      if (missing.empty()) return absl::OkStatus();
      const absl::Duration left = deadline - RealClock::Get().Now();
      if (left <= absl::ZeroDuration()) {
        return absl::UnavailableError(absl::StrJoin(missing, "; "));
      }
      MutexLock lock(mu);
      never.WaitFor(mu, std::min(left, absl::Milliseconds(5)));
    }
  }

  bool IsReachable() const {
    for (uint32_t i = 0; i < links_.size(); ++i) {
      if (links_.Get(i)->IsUp()) return true;
    }
    return false;
  }

  LookupResult Lookup(const HeldTicket& ticket, absl::Span<const TierBlock> blocks,
                      LookupReach reach) {
    LookupPlacements placements;
    placements.ticket = ticket.ticket.stores;
    {
      MutexLock lock(mu_);
      placements.current = current_;
      placements.previous = previous_;
    }
    const absl::Time connected =
        RealClock::Get().Now() + std::min(kFirstConnectWait, config_.options.lookup_timeout);
    for (const uint32_t store : NumberStores(links_, placements.ticket)) {
      if (store != kNoStore) links_.Get(store)->AwaitFirstAttempt(connected);
    }
    const absl::Time deadline = RealClock::Get().Now() + config_.options.lookup_timeout;
    return LookupInTier(links_, calls_, config_.model.geometry, placements, ticket, blocks,
                        reach, deadline);
  }

  absl::StatusOr<ReserveResult> Reserve(const HeldTicket& ticket,
                                        absl::Span<const TierBlock> blocks, uint32_t output_blocks,
                                        const ReserveTerms& terms) {
    return ReserveInTier(links_, ticket, blocks, output_blocks, terms,
                         config_.options.control_timeout);
  }

  std::vector<SealOutcome> Seal(TicketRef ticket, absl::Span<PlacedBlock* const> blocks) {
    std::vector<SealOutcome> outcomes(blocks.size(), SealOutcome::kLost);
    for (uint32_t store = 0; store < links_.size(); ++store) {
      StoreLink& link = *links_.Get(store);
      const absl::StatusOr<LinkSession> session = link.CurrentSession();
      if (!session.ok()) continue;
      SealRequest request;
      request.session = session->session;
      request.ticket = ticket;
      std::vector<size_t> indices;
      for (size_t i = 0; i < blocks.size(); ++i) {
        if (blocks[i]->store != store || blocks[i]->incarnation != session->incarnation) continue;
        request.handles.push_back(blocks[i]->place.handle);
        indices.push_back(i);
      }
      if (indices.empty()) continue;
      const absl::StatusOr<SealReply> reply = session->api->Seal(request);
      link.EndCall(*session, reply.status());
      if (!reply.ok() || reply->blocks.size() != indices.size()) continue;
      for (size_t k = 0; k < indices.size(); ++k) {
        outcomes[indices[k]] = FromReply(reply->blocks[k].outcome);
        if (reply->blocks[k].outcome != SealReply::Outcome::kWinnerElsewhere) continue;
        blocks[indices[k]]->place = BlockPlace{};
        blocks[indices[k]]->place.handle = reply->blocks[k].handle;
      }
    }
    return outcomes;
  }

  void Release(TicketRef ticket) {
    for (uint32_t i = 0; i < links_.size(); ++i) {
      StoreLink& link = *links_.Get(i);
      if (!link.Forget(ticket)) continue;
      const absl::StatusOr<LinkSession> session = link.CurrentSession();
      if (!session.ok()) continue;
      // If it cannot be sent, the next renewal no longer lists the ticket and the store lets go.
      (void)calls_.TryRun([session = *session, ticket] {
        session.api->Release(ReleaseRequest{session.session, ticket}).IgnoreError();
      });
    }
  }

  absl::Time Tick(absl::Time now) {
    absl::Time next = NextOnGrid(now, kTickMax);
    for (uint32_t i = 0; i < links_.size(); ++i) {
      next = std::min(next, links_.Get(i)->Tick(now));
    }
    return next;
  }

  std::vector<StoreLinkFigures> Figures() const {
    std::vector<StoreLinkFigures> figures;
    for (uint32_t i = 0; i < links_.size(); ++i) figures.push_back(links_.Get(i)->Figures());
    return figures;
  }

  void Close() { links_.Close(); }

  TransferTable& transfers() { return transfers_; }
  const LinkTable& links() const { return links_; }

 private:
  const TierClientConfig config_;
  CallPool& calls_;
  const Clock& clock_;
  LinkTable links_;
  TransferTable transfers_;
  Mutex mu_;
  std::vector<StoreRef> current_ ABSL_GUARDED_BY(mu_);
  std::vector<StoreRef> previous_ ABSL_GUARDED_BY(mu_);
};

TierClient::TierClient(TierClientConfig config, CallPool& calls, const Clock& clock)
    : impl_(std::make_unique<Impl>(std::move(config), calls, clock)) {}

TierClient::~TierClient() { Close(); }

void TierClient::SetView(const ClusterView& view) { impl_->SetView(view); }

absl::Status TierClient::WaitConnected(absl::Duration timeout) {
  return impl_->WaitConnected(timeout);
}

bool TierClient::IsReachable() const { return impl_->IsReachable(); }

LookupResult TierClient::Lookup(const HeldTicket& ticket, absl::Span<const TierBlock> blocks,
                                LookupReach reach) {
  return impl_->Lookup(ticket, blocks, reach);
}

absl::StatusOr<ReserveResult> TierClient::Reserve(const HeldTicket& ticket,
                                                  absl::Span<const TierBlock> blocks,
                                                  uint32_t output_blocks, ReserveTerms terms) {
  return impl_->Reserve(ticket, blocks, output_blocks, terms);
}

TransferId TierClient::Pull(TierPull pull) { return impl_->transfers().Pull(std::move(pull)); }
TransferId TierClient::Push(TierPush push) { return impl_->transfers().Push(std::move(push)); }
void TierClient::Cancel(TransferId id) { impl_->transfers().Cancel(id); }

std::vector<SealOutcome> TierClient::Seal(TicketRef ticket, absl::Span<PlacedBlock* const> blocks) {
  return impl_->Seal(ticket, blocks);
}

void TierClient::Release(TicketRef ticket) { impl_->Release(ticket); }
absl::Time TierClient::Tick(absl::Time now) { return impl_->Tick(now); }

PullRates TierClient::Rates(uint32_t store) const {
  const StoreLink* link = impl_->links().Get(store);
  return link == nullptr ? PullRates() : link->Rates();
}

NodeName TierClient::StoreName(uint32_t store) const {
  const StoreLink* link = impl_->links().Get(store);
  return link == nullptr ? NodeName() : link->name();
}

std::vector<StoreLinkFigures> TierClient::Figures() const { return impl_->Figures(); }
void TierClient::Close() { impl_->Close(); }

}  // namespace kvt
