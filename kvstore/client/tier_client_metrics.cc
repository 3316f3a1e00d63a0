#include "kvstore/client/tier_client_metrics.h"

#include <array>

namespace kvt {
namespace {

constexpr int kCounted = 14;

std::array<uint64_t, kCounted> Counted(const StoreLinkFigures& f) {
  return {f.pulled_bytes,   f.pushed_bytes, f.pull_bursts,     f.push_bursts,
          f.lost_pieces,    f.corrupt_pieces, f.lookup_blocks, f.hit_blocks,
          f.refused,        f.failures,     f.breaker_opened,  f.sessions_opened,
          f.disk_bytes,     f.promote_calls};
}

}  // namespace

void TierClientMetrics::Update(absl::Span<const StoreLinkFigures> figures) {
  for (const StoreLinkFigures& f : figures) {
    Store& store = StoreOf(f.name);
    store.up->Set(f.state == "up" ? 1 : 0);
    store.live_tickets->Set(static_cast<double>(f.live_tickets));
    const std::array<uint64_t, kCounted> now = Counted(f);
    for (int i = 0; i < kCounted; ++i) {
      const auto value = static_cast<double>(now[i]);
      if (value > store.seen[i]) store.counters[i]->Add(value - store.seen[i]);
      store.seen[i] = value;
    }
  }
}

TierClientMetrics::Store& TierClientMetrics::StoreOf(const NodeName& name) {
  const auto found = stores_.find(name);
  if (found != stores_.end()) return found->second;
  MetricsRegistry& r = registry_;
  const MetricLabels labels = {{"store", name}};
  Store store;
  store.up = &r.NewGauge("kvtide_client_store_up", "1 while the store can be used.", labels);
  store.live_tickets = &r.NewGauge("kvtide_client_live_tickets",
                                   "Tickets with pins or reservations at the store.", labels);
  store.counters = {
      &r.NewCounter("kvtide_client_pulled_bytes_total", "Bytes pulled.", labels),
      &r.NewCounter("kvtide_client_pushed_bytes_total", "Bytes pushed.", labels),
      &r.NewCounter("kvtide_client_pull_bursts_total", "Bursts pulled.", labels),
      &r.NewCounter("kvtide_client_push_bursts_total", "Bursts pushed.", labels),
      &r.NewCounter("kvtide_client_lost_pieces_total", "Pieces lost.", labels),
      &r.NewCounter("kvtide_client_corrupt_pieces_total", "Pieces with a wrong checksum.", labels),
      &r.NewCounter("kvtide_client_lookup_blocks_total", "Blocks asked for.", labels),
      &r.NewCounter("kvtide_client_hit_blocks_total", "Blocks found.", labels),
      &r.NewCounter("kvtide_client_refusals_total", "Reservations refused.", labels),
      &r.NewCounter("kvtide_client_failures_total", "Control calls and connects failed.", labels),
      &r.NewCounter("kvtide_client_breaker_opens_total", "Times the store was given up.", labels),
      &r.NewCounter("kvtide_client_sessions_total", "Sessions opened.", labels),
      &r.NewCounter("kvtide_client_disk_bytes_total", "Bytes pulled that were on disk.", labels),
      &r.NewCounter("kvtide_client_promote_calls_total", "Calls that had disk read.", labels),
  };
  store.seen.assign(kCounted, 0);
  return stores_.emplace(name, std::move(store)).first->second;
}

}  // namespace kvt
