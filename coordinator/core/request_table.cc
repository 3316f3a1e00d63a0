#include "coordinator/core/request_table.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/base/check.h"

namespace kvt {
namespace {

constexpr int kCounterBits = 40;

// The worker without which a request in this phase cannot go on.
const NodeName& Holder(const RequestRecord& record) {
  return record.phase >= RequestPhase::kDecode ? record.ticket.decode_worker
                                               : record.ticket.prefill_worker;
}

bool MayReport(const RequestRecord& record, const NodeName& node) {
  if (node.empty()) return false;
  if (record.phase == RequestPhase::kDecode) return node == record.ticket.decode_worker;
  return node == record.ticket.prefill_worker || node == record.ticket.decode_worker;
}

bool Touches(const Ticket& ticket, const NodeName& node) {
  if (ticket.prefill_worker == node || ticket.decode_worker == node) return true;
  return std::any_of(ticket.stores.begin(), ticket.stores.end(),
                     [&](const StoreRef& store) { return store.name == node; });
}

}  // namespace

bool IsFinal(RequestPhase phase) { return phase >= RequestPhase::kDone; }

absl::string_view RequestPhaseName(RequestPhase phase) {
  switch (phase) {
    case RequestPhase::kAdmitted: return "admitted";
    case RequestPhase::kPrefill: return "prefill";
    case RequestPhase::kHandOver: return "hand-over";
    case RequestPhase::kDecode: return "decode";
    case RequestPhase::kDone: return "done";
    case RequestPhase::kFailed: return "failed";
    case RequestPhase::kCancelled: return "cancelled";
  }
  return "unknown";
}

std::string FormatTicketId(TicketId id) { return absl::StrFormat("%016x", id.value()); }

TicketId RequestTable::NextId() {
  const uint64_t boot = options_.ticket_boot & 0xffffffu;
  return TicketId(boot << kCounterBits | next_++);
}

RequestRecord& RequestTable::Insert(absl::Time now, const Ticket& ticket, RequestPhase phase) {
  const auto [it, fresh] = records_.try_emplace(ticket.id);
  KVT_CHECK(fresh);
  RequestRecord& record = it->second;
  record.ticket = ticket;
  record.phase = phase;
  record.admitted = record.seen = now;
  record.presented_by = now + options_.present_within;
  running_.insert(ticket.id);
  ++counts_.admitted;
  ++counts_.running;
  AddDebit(record, 1);
  return record;
}

RequestRecord* RequestTable::Find(TicketId id) {
  const auto found = records_.find(id);
  return found == records_.end() ? nullptr : &found->second;
}

bool RequestTable::IsForgotten(TicketId id) const {
  return id.value() >> kCounterBits == (options_.ticket_boot & 0xffffffu) &&
         !records_.contains(id);
}

void RequestTable::AddDebit(const RequestRecord& record, int sign) {
  // A prefill worker is charged until the hand-over is acknowledged, a decode worker from the grant.
  const auto charge = [&](const NodeName& worker) {
    Debit& debit = debits_[worker];
    debit.tickets += sign;
    debit.prompt_tokens += static_cast<uint64_t>(sign) * record.ticket.prompt_tokens;
    KVT_CHECK(debit.tickets >= 0);
    if (debit.tickets == 0) debits_.erase(worker);
  };
  if (record.phase < RequestPhase::kDecode) charge(record.ticket.prefill_worker);
  if (!record.ticket.decode_worker.empty()) charge(record.ticket.decode_worker);
}

void RequestTable::Grant(absl::Time now, RequestRecord& record, const Ticket& ticket,
                         RequestPhase phase) {
  KVT_CHECK(!IsFinal(record.phase) && !IsFinal(phase));
  AddDebit(record, -1);
  record.ticket = ticket;
  record.phase = phase;
  record.seen = now;
  record.hand_over_by = absl::InfiniteFuture();
  AddDebit(record, 1);
}

bool RequestTable::Update(absl::Time now, const TicketUpdate& update) {
  RequestRecord* record = Find(update.id);
  if (record == nullptr || IsFinal(record->phase) || update.epoch != record->ticket.epoch ||
      !MayReport(*record, update.node)) {
    return false;
  }
  record->seen = now;
  record->output_tokens = std::max(record->output_tokens, update.output_tokens);
  const TokenCounts& computed = update.computed;
  if (computed.exact + computed.base + computed.sparse > 0) record->computed = computed;
  if (IsFinal(update.phase)) {
    End(now, *record, update.phase, update.error);
    return true;
  }
  if (update.phase <= record->phase) return true;
  AddDebit(*record, -1);
  record->phase = update.phase;
  AddDebit(*record, 1);
  return true;
}

void RequestTable::End(absl::Time now, RequestRecord& record, RequestPhase phase,
                       absl::string_view error) {
  KVT_CHECK(IsFinal(phase) && !IsFinal(record.phase));
  AddDebit(record, -1);
  record.phase = phase;
  record.ended = now;
  record.error = std::string(error.substr(0, kErrorBytesMax));
  switch (phase) {
    case RequestPhase::kDone: ++counts_.done; break;
    case RequestPhase::kCancelled: ++counts_.cancelled; break;
    default: ++counts_.failed; break;
  }
  --counts_.running;
  running_.erase(record.ticket.id);
  finished_.push_back(record.ticket.id);
  if (finished_.size() > kRequestHistoryMax) {
    records_.erase(finished_.front());  // never this record: it is the last
    finished_.pop_front();
  }
}

void RequestTable::Seen(absl::Time now, const NodeName& node,
                        const std::vector<TicketRef>& tickets) {
  for (const TicketRef& listed : tickets) {
    RequestRecord* record = Find(listed.id);
    if (record == nullptr || IsFinal(record->phase) || !MayReport(*record, node)) continue;
    record->seen = now;
    // Its report of the new phase is under way or was lost.
    if (record->phase == RequestPhase::kAdmitted && node == record->ticket.prefill_worker) {
      record->phase = RequestPhase::kPrefill;
    }
  }
}

std::vector<TicketId> RequestTable::Tick(absl::Time now) {
  std::vector<TicketId> failed;
  for (const TicketId id : std::vector<TicketId>(running_.begin(), running_.end())) {
    RequestRecord& record = records_.at(id);
    if (record.phase == RequestPhase::kAdmitted) {
      if (now < record.presented_by) continue;
      End(now, record, RequestPhase::kFailed,
          absl::StrCat("not presented to ", record.ticket.prefill_worker, " within ",
                       absl::FormatDuration(options_.present_within)));
    } else if (record.phase == RequestPhase::kHandOver && now >= record.hand_over_by) {
      End(now, record, RequestPhase::kFailed, record.hand_over_error);
    } else {
      if (now < record.seen + options_.lost_after) continue;
      End(now, record, RequestPhase::kFailed,
          absl::StrCat(Holder(record), " did not report the request for ",
                       absl::FormatDuration(options_.lost_after)));
    }
    failed.push_back(id);
  }
  return failed;
}

void RequestTable::Extend(absl::Duration stall) {
  for (const TicketId id : running_) {
    RequestRecord& record = records_.at(id);
    record.seen += stall;
    record.presented_by += stall;
    record.hand_over_by += stall;
  }
}

int RequestTable::WorkerGone(absl::Time now, const NodeName& worker, absl::string_view error) {
  int failed = 0;
  for (const TicketId id : std::vector<TicketId>(running_.begin(), running_.end())) {
    RequestRecord& record = records_.at(id);
    const bool prefills = record.phase < RequestPhase::kDecode &&
                          record.ticket.prefill_worker == worker;
    const bool decodes = record.ticket.decode_worker == worker;
    if (!prefills && !decodes) continue;
    if (record.phase == RequestPhase::kHandOver) {
      record.hand_over_by = now + options_.present_within;
      record.hand_over_error = std::string(error);
      continue;
    }
    End(now, record, RequestPhase::kFailed, error);
    ++failed;
  }
  return failed;
}

Debit RequestTable::DebitOf(const NodeName& worker) const {
  const auto found = debits_.find(worker);
  return found == debits_.end() ? Debit{} : found->second;
}

std::vector<TicketId> RequestTable::EndedFor(absl::Time now, const NodeName& node,
                                             const std::vector<TicketRef>& listed) const {
  std::vector<TicketId> out;
  const auto ended_badly = [](const RequestRecord& record) {
    return record.phase == RequestPhase::kFailed || record.phase == RequestPhase::kCancelled;
  };
  for (auto it = finished_.rbegin(); it != finished_.rend(); ++it) {
    const RequestRecord& record = records_.at(*it);
    if (record.ended + kEndNoticeFor < now) break;
    if (ended_badly(record) && Touches(record.ticket, node)) out.push_back(*it);
  }
  for (const TicketRef& ticket : listed) {
    const auto found = records_.find(ticket.id);
    if (found != records_.end() && ended_badly(found->second) &&
        found->second.ended + kEndNoticeFor < now) {
      out.push_back(ticket.id);
    }
  }
  return out;
}

std::vector<RequestStatus> RequestTable::List(absl::Time now) const {
  std::vector<TicketId> order(running_.begin(), running_.end());
  std::sort(order.begin(), order.end());
  order.insert(order.end(), finished_.rbegin(), finished_.rend());
  std::vector<RequestStatus> out;
  out.reserve(order.size());
  for (const TicketId id : order) {
    const RequestRecord& record = records_.at(id);
    RequestStatus status;
    status.id = id;
    status.epoch = record.ticket.epoch;
    status.tenant = record.ticket.tenant;
    status.model = record.ticket.model;
    status.phase = record.phase;
    status.prefill_worker = record.ticket.prefill_worker;
    status.decode_worker = record.ticket.decode_worker;
    status.prompt_tokens = record.ticket.prompt_tokens;
    status.output_tokens = record.output_tokens;
    status.fidelity = record.ticket.fidelity;
    status.request_class = record.ticket.request_class;
    status.computed = record.computed;
    status.age = now - record.admitted;
    status.error = record.error;
    out.push_back(std::move(status));
  }
  return out;
}

}  // namespace kvt
