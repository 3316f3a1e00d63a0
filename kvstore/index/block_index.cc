// Sessions, tickets and what they ask for. What happens to blocks: block_index_blocks.cc.
#include "kvstore/index/block_index.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kvstore/index/digest_geometry.h"
#include "kvstore/index/limits.h"

namespace kvt {
namespace {

absl::Status CheckText(absl::string_view text, absl::string_view field) {
  if (text.size() <= kStoreNameBytesMax) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, ": ", text.size(), " bytes, at most ", kStoreNameBytesMax));
}

// Sessions that differ in geometry alone may hold a ticket together (docs/decisions/0007).
bool IsSameModel(const SpaceInfo& a, const SpaceInfo& b) {
  return a.model_fingerprint == b.model_fingerprint && a.numerics_id == b.numerics_id;
}

}  // namespace

BlockIndex::BlockIndex(const IndexOptions& options, RecordEvents& events)
    : options_(options),
      allocator_(options.arena_bytes, options.slab_bytes),
      table_(allocator_, events, options.blocks_max),
      order_(table_),
      sessions_(options.lease, options.stall_after),
      spaces_("models", kStoreSpacesMax),
      domains_("sharing domains", kStoreDomainsMax) {
  disk_.writable = options.has_disk;
}

absl::StatusOr<uint32_t> BlockIndex::SpaceOf(absl::string_view model_fingerprint,
                                             absl::string_view numerics_id,
                                             const Geometry& geometry) {
  KVT_RETURN_IF_ERROR(geometry.Validate());
  KVT_RETURN_IF_ERROR(CheckText(model_fingerprint, "model_fingerprint"));
  KVT_RETURN_IF_ERROR(CheckText(numerics_id, "numerics_id"));
  KVT_RETURN_IF_ERROR(ClassOf(geometry).status());
  KVT_ASSIGN_OR_RETURN(
      const uint32_t space,
      spaces_.Intern(absl::StrCat(model_fingerprint.size(), ":", model_fingerprint,
                                  numerics_id.size(), ":", numerics_id, geometry.Fingerprint())));
  if (space == spaces_info_.size()) {
    spaces_info_.push_back(
        SpaceInfo{geometry, std::string(model_fingerprint), std::string(numerics_id)});
  }
  return space;
}

absl::StatusOr<RecordAllocator::ClassId> BlockIndex::ClassOf(const Geometry& geometry) {
  return allocator_.ClassOf(geometry.RecordBytes(), IsDigestGeometry(geometry));
}

absl::Status BlockIndex::OpenSession(absl::Time now, SessionSpec spec) {
  NoteTime(now);
  if (spec.worker.empty()) return absl::InvalidArgumentError("worker: empty");
  KVT_RETURN_IF_ERROR(CheckText(spec.worker, "worker"));
  KVT_ASSIGN_OR_RETURN(const uint32_t space,
                       SpaceOf(spec.model_fingerprint, spec.numerics_id, spec.geometry));
  Session session;
  session.id = spec.id;
  session.secret = std::move(spec.secret);
  session.worker = std::move(spec.worker);
  session.worker_epoch = spec.worker_epoch;
  session.model_fingerprint = std::move(spec.model_fingerprint);
  session.numerics_id = std::move(spec.numerics_id);
  session.space = space;
  session.geometry = spec.geometry;
  KVT_ASSIGN_OR_RETURN(const SessionId replaced, sessions_.Open(now, std::move(session)));
  if (replaced.value() != 0) EndSession(replaced);
  return absl::OkStatus();
}

absl::StatusOr<Session*> BlockIndex::NeedSession(absl::Time now, SessionId id) {
  NoteTime(now);
  Session* session = sessions_.Find(id);
  if (session != nullptr) return session;
  return absl::NotFoundError(absl::StrCat(
      "no session ", id.value(), " at this store: its lease ended, or the store restarted"));
}

absl::Status BlockIndex::Renew(absl::Time now, SessionId id, absl::Span<const LiveTicket> live) {
  KVT_ASSIGN_OR_RETURN(Session* const session, NeedSession(now, id));
  sessions_.Renew(now, *session);
  absl::flat_hash_map<TicketId, TicketEpoch> listed;
  listed.reserve(live.size());
  for (const LiveTicket& ticket : live) listed.emplace(ticket.id, ticket.epoch);
  std::vector<TicketId> gone;
  for (const TicketId ticket : session->tickets) {
    const auto it = listed.find(ticket);
    if (it == listed.end() || it->second < tickets_.Find(ticket)->epoch) gone.push_back(ticket);
  }
  std::sort(gone.begin(), gone.end());  // the same in every run
  for (const TicketId ticket : gone) LetGo(id, ticket);
  return absl::OkStatus();
}

absl::Status BlockIndex::CloseSession(absl::Time now, SessionId id) {
  KVT_ASSIGN_OR_RETURN(Session* const session, NeedSession(now, id));
  EndSession(session->id);
  return absl::OkStatus();
}

void BlockIndex::NoteTime(absl::Time now) {
  if (const auto late = turn_.TakeLapsed(now); late.has_value()) {
    TicketEntry* const ticket = tickets_.Find(*late);
    if (ticket != nullptr && !ticket->granted) TrimRoom(*ticket, 0);
  }
  for (const SessionId id : sessions_.NoteTime(now)) {
    ++counters_.lapsed_leases;
    if (lapsed_.size() < kLapsedNamesMax) lapsed_.push_back(sessions_.Find(id)->worker);
    EndSession(id);
  }
}

std::vector<NodeName> BlockIndex::TakeLapsed() { return std::exchange(lapsed_, {}); }

absl::StatusOr<Holder*> BlockIndex::Hold(Session& session, const TicketClaim& claim) {
  if (claim.id.value() == 0) return absl::InvalidArgumentError("ticket: id zero");
  TicketEntry* ticket = tickets_.Find(claim.id);
  const TicketEpoch fence = ticket != nullptr ? ticket->epoch : tickets_.FencedBelow(claim.id);
  if (claim.epoch < fence) {
    return absl::FailedPreconditionError(absl::StrCat("ticket ", claim.id.value(), " epoch ",
                                                      claim.epoch.value(), " is fenced: epoch ",
                                                      fence.value(), " was seen"));
  }
  KVT_RETURN_IF_ERROR(CheckText(claim.tenant, "tenant"));
  KVT_ASSIGN_OR_RETURN(const uint32_t domain, domains_.Intern(claim.tenant));
  if (ticket == nullptr) {
    if (tickets_.size() >= static_cast<size_t>(kStoreTicketsMax)) {
      return absl::ResourceExhaustedError(
          absl::StrCat(tickets_.size(), " tickets are held, as many as this store keeps"));
    }
    ticket = &tickets_.Add(claim.id);
    ticket->epoch = claim.epoch;
    ticket->space = session.space;
    ticket->domain = domain;
  } else if (!IsSameModel(spaces_info_[ticket->space], spaces_info_[session.space]) ||
             ticket->domain != domain) {
    return absl::FailedPreconditionError(
        absl::StrCat("ticket ", claim.id.value(), " is held for another model or tenant"));
  } else if (claim.epoch > ticket->epoch) {
    while (!ticket->holders.empty()) DropHolder(*ticket, *ticket->holders.back());
    ticket->epoch = claim.epoch;
    ticket->has_fenced = true;
  }
  if (Holder* const holder = ticket->HolderIn(session.id); holder != nullptr) return holder;
  auto holder = std::make_unique<Holder>();
  holder->session = session.id;
  holder->space = session.space;
  holder->cls = *ClassOf(session.geometry);
  holder->ticket = claim.id;
  holder->epoch = claim.epoch;
  ticket->holders.push_back(std::move(holder));
  session.tickets.insert(claim.id);
  return ticket->holders.back().get();
}

absl::Status BlockIndex::CheckNames(absl::Span<const BlockName> blocks, const TicketClaim& claim,
                                    uint32_t output_blocks) const {
  if (output_blocks > static_cast<uint32_t>(kSequenceBlocksMax)) {
    return absl::InvalidArgumentError(
        absl::StrCat("output_blocks: ", output_blocks, ", at most ", kSequenceBlocksMax));
  }
  if (blocks.size() > static_cast<size_t>(kSequenceBlocksMax)) {
    return absl::InvalidArgumentError(
        absl::StrCat("blocks: ", blocks.size(), ", at most ", kSequenceBlocksMax));
  }
  for (size_t i = 0; i < blocks.size(); ++i) {
    const BlockName& name = blocks[i];
    absl::string_view problem;
    if (name.tokens.empty() || name.tokens.size() > kBlockTokens) {
      problem = "has not 1 to 16 tokens";
    } else if (name.tokens.size() < kBlockTokens && !name.ticket_private) {
      problem = "is a partial block and not private";
    } else if (name.provenance > claim.provenance_max) {
      problem = "has a provenance that the ticket's fidelity does not permit";
    }
    if (!problem.empty()) {
      return absl::InvalidArgumentError(absl::StrCat("blocks[", i, "] ", problem));
    }
  }
  return absl::OkStatus();
}

bool BlockIndex::Matches(const Block& block, const BlockName& name, const Holder& holder,
                         const TicketEntry& ticket) const {
  return block.space == holder.space && block.domain == ticket.domain &&
         block.provenance == name.provenance && block.ticket_private == name.ticket_private &&
         !block.IsHiddenFrom(holder.ticket) && block.parent == name.parent &&
         block.token_count == name.tokens.size() &&
         std::equal(name.tokens.begin(), name.tokens.end(), block.tokens.begin());
}

uint32_t BlockIndex::FindSealed(const BlockName& name, const Holder& holder,
                                const TicketEntry& ticket) {
  if (const auto own = ticket.aside.find(name.key); own != ticket.aside.end()) {
    const uint32_t number = BlockNumberOf(own->second);
    const Block* const block = table_.Find(number, GenerationOfHandle(own->second));
    if (block != nullptr && Matches(*block, name, holder, ticket)) return number;
  }
  const auto it = sealed_.find(name.key);
  if (it == sealed_.end()) return kNoBlock;
  const Block& block = table_.At(it->second);
  if (Matches(block, name, holder, ticket)) return it->second;
  if (!block.unpublished || !block.IsHiddenFrom(holder.ticket)) ++counters_.mismatched_blocks;
  return kNoBlock;
}

absl::Status BlockIndex::Lookup(absl::Time now, SessionId id, const TicketClaim& claim,
                                absl::Span<const BlockName> blocks, std::vector<FoundBlock>* out) {
  KVT_ASSIGN_OR_RETURN(Session* const session, NeedSession(now, id));
  KVT_RETURN_IF_ERROR(CheckNames(blocks, claim));
  KVT_ASSIGN_OR_RETURN(Holder* const holder, Hold(*session, claim));
  const TicketEntry& ticket = *tickets_.Find(claim.id);
  ++counters_.lookups;
  counters_.lookup_blocks += blocks.size();
  out->assign(blocks.size(), FoundBlock());
  holder->pins.reserve(holder->pins.size() + blocks.size());
  for (size_t i = 0; i < blocks.size(); ++i) {
    const uint32_t number = FindSealed(blocks[i], *holder, ticket);
    if (number == kNoBlock) continue;
    Pin(*holder, number);
    Block& block = table_.At(number);
    if (block.last_ticket != claim.id) block.hit_again = block.reused = true;
    block.last_ticket = claim.id;
    const bool exact = block.HasPlane(Plane::kResidual);
    ++(exact ? counters_.hit_blocks : counters_.base_only_blocks);
    (*out)[i] = FoundBlock{exact ? BlockPresence::kExact : BlockPresence::kBaseOnly,
                           table_.HandleOf(number), block.offset, block.OnDiskAlone()};
  }
  return absl::OkStatus();
}

absl::Status BlockIndex::NoRoom(uint64_t blocks, bool barred) const {
  return absl::ResourceExhaustedError(
      absl::StrCat("no room for ", blocks, " blocks: ", allocator_.used_bytes(), " of ",
                   allocator_.capacity_bytes(), " bytes are used and ",
                   barred ? "one that waits longer comes first" : "too few can be evicted"));
}

absl::Status BlockIndex::NoTenantRoom(uint32_t domain, uint64_t blocks) const {
  return absl::ResourceExhaustedError(
      absl::StrCat("no room for ", blocks, " blocks: tenant \"", domains_.names()[domain],
                   "\" holds ", table_.OfDomain(domain).memory, " bytes of its quota of ",
                   options_.tenant_bytes_max, " and too few can be evicted"));
}

absl::Status BlockIndex::Reserve(absl::Time now, SessionId id, const TicketClaim& claim,
                                 absl::Span<const BlockName> blocks, uint32_t output_blocks,
                                 std::vector<ReservedBlock>* out, AgedAsk* aged) {
  KVT_ASSIGN_OR_RETURN(Session* const session, NeedSession(now, id));
  KVT_RETURN_IF_ERROR(CheckNames(blocks, claim, output_blocks));
  const bool known = tickets_.FindHolder(id, claim.id, claim.epoch) != nullptr;
  KVT_ASSIGN_OR_RETURN(Holder* const holder, Hold(*session, claim));
  TicketEntry& ticket = *tickets_.Find(claim.id);

  // Of one geometry: that of the session which asked for it first.
  const bool own_room = ticket.ClaimRoom(*holder);
  if (!own_room && output_blocks > 0) {
    if (!known) LetGo(id, claim.id);
    return absl::InvalidArgumentError("output_blocks: the ticket's room is of another geometry");
  }

  // First what exists, pinned so that making room does not evict it; then all that is new at once.
  std::vector<uint32_t> numbers(blocks.size(), kNoBlock);
  std::vector<uint32_t> pinned;  // here and now
  std::vector<size_t> fresh;     // first occurrences of new keys
  for (size_t i = 0; i < blocks.size(); ++i) {
    const uint32_t number = FindSealed(blocks[i], *holder, ticket);
    if (number != kNoBlock && table_.At(number).HasPlane(Plane::kResidual)) {
      numbers[i] = number;
      if (Pin(*holder, number)) pinned.push_back(number);
    } else if (holder->reservations.emplace(blocks[i].key, kNoBlock).second) {
      fresh.push_back(i);
    }
  }
  const uint64_t from_room = own_room ? std::min<uint64_t>(ticket.room.size(), fresh.size()) : 0;
  const uint64_t room_left = own_room ? ticket.room.size() - from_room : 0;
  const uint64_t room_new = output_blocks > room_left ? output_blocks - room_left : 0;
  const uint64_t allocate = fresh.size() - from_room + room_new;
  const bool barred = allocate > 0 && !ticket.granted && turn_.Bars(claim.id, now);
  const uint64_t bytes = allocate * kPlanes * allocator_.RecordBytes(holder->cls);
  std::vector<uint64_t> own;  // what the tenant gives up to stay within its quota
  const bool within = PlanTenantRoom(ticket.domain, holder->cls, bytes, &own);
  if (!within || barred ||
      !TryMakeRoom(now, RoomNeed{holder->cls, allocate * kPlanes, allocate}, aged)) {
    const bool later = aged != nullptr && aged->spill_helps;
    if (!later) ++(within ? counters_.refused : counters_.tenant_refused);
    for (const size_t i : fresh) holder->reservations.erase(blocks[i].key);
    out->clear();
    if (within && !later && own_room && TryKeepPart(now, claim.id, ticket, allocate, aged)) {
      return absl::OkStatus();
    }
    for (auto it = pinned.rbegin(); it != pinned.rend(); ++it) Unpin(*holder, *it);
    const uint32_t domain = ticket.domain;  // the ticket may go now
    if (!known) LetGo(id, claim.id);
    return within ? NoRoom(allocate, barred) : NoTenantRoom(domain, allocate);
  }
  for (const uint64_t record : own) GiveUp(record);
  ticket.granted = true;
  for (const size_t i : fresh) {
    const uint32_t number = TakeBlock(ticket, *holder);
    NameBlock(number, blocks[i], *holder);
    holder->reservations[blocks[i].key] = number;
  }
  if (own_room && ticket.room.size() < output_blocks) AddRoom(ticket, output_blocks - ticket.room.size());
  // What it kept of a need that has shrunk meanwhile.
  if (own_room && turn_.Served(claim.id)) TrimRoom(ticket, output_blocks);
  out->resize(blocks.size());
  for (size_t i = 0; i < blocks.size(); ++i) {
    const bool exists = numbers[i] != kNoBlock;
    const uint32_t number = exists ? numbers[i] : holder->reservations.at(blocks[i].key);
    const Block& block = table_.At(number);
    (*out)[i] = ReservedBlock{exists, table_.HandleOf(number), block.offset, block.OnDiskAlone()};
  }
  return absl::OkStatus();
}

absl::Status BlockIndex::Seal(absl::Time now, SessionId id, LiveTicket ref,
                              absl::Span<const uint64_t> handles, std::vector<SealedBlock>* out) {
  KVT_RETURN_IF_ERROR(NeedSession(now, id).status());
  out->assign(handles.size(), SealedBlock());
  Holder* const holder = tickets_.FindHolder(id, ref.id, ref.epoch);
  if (holder == nullptr) return absl::OkStatus();  // all lost
  const TicketEntry& ticket = *tickets_.Find(ref.id);
  for (size_t i = 0; i < handles.size(); ++i) {
    const uint64_t handle = handles[i];
    const uint32_t number = BlockNumberOf(handle);
    if (const auto winner = holder->winners.find(handle); winner != holder->winners.end()) {
      (*out)[i] = SealedBlock{IndexSealOutcome::kWinnerElsewhere, winner->second};
      continue;
    }
    const Block* const block = table_.Find(number, GenerationOfHandle(handle));
    if (block == nullptr) continue;
    if (holder->pins.contains(number)) {
      (*out)[i] = SealedBlock{IndexSealOutcome::kSealed, handle};
      continue;
    }
    const auto reservation = holder->reservations.find(block->key);
    if (reservation == holder->reservations.end() || reservation->second != number) continue;
    const uint32_t winner = FindWinner(*block, ticket);
    if (winner == kNoBlock) {
      (*out)[i] = SealedBlock{IndexSealOutcome::kIncomplete, handle};
      continue;
    }
    (*out)[i] = SealedBlock{IndexSealOutcome::kWinnerElsewhere, table_.HandleOf(winner)};
    YieldTo(*holder, number, winner);
  }
  return absl::OkStatus();
}

absl::Status BlockIndex::Release(absl::Time now, SessionId id, LiveTicket ticket) {
  NoteTime(now);
  if (tickets_.FindHolder(id, ticket.id, ticket.epoch) != nullptr) LetGo(id, ticket.id);
  return absl::OkStatus();
}

void BlockIndex::DropHolder(TicketEntry& ticket, Holder& holder) {
  std::vector<uint32_t> unsealed;
  unsealed.reserve(holder.reservations.size());
  for (const auto& [key, number] : holder.reservations) unsealed.push_back(number);
  std::sort(unsealed.begin(), unsealed.end());  // the same in every run
  for (const uint32_t number : unsealed) Discard(number);
  holder.reservations.clear();
  // Latest pinned first: of one sequence the deepest blocks, so that a prefix is evicted from its
  // end.
  std::vector<std::pair<uint32_t, uint32_t>> pins;  // order, block
  pins.reserve(holder.pins.size());
  for (const auto& [number, order] : holder.pins) pins.emplace_back(order, number);
  std::sort(pins.rbegin(), pins.rend());
  for (const auto& [order, number] : pins) Unpin(holder, number);
  if (Session* const session = sessions_.Find(holder.session); session != nullptr) {
    session->tickets.erase(holder.ticket);
  }
  std::erase_if(ticket.holders, [&](const auto& held) { return held.get() == &holder; });
}

void BlockIndex::DropTicketIfUnheld(TicketId id) {
  TicketEntry& ticket = *tickets_.Find(id);
  if (!ticket.holders.empty()) return;
  turn_.Leave(id);
  TrimRoom(ticket, 0);
  for (const uint64_t handle : ticket.privates) {
    const uint32_t number = BlockNumberOf(handle);
    Block* const block = table_.Find(number, GenerationOfHandle(handle));
    if (block == nullptr) continue;
    if (std::exchange(block->unpublished, false)) continue;  // from now on anybody's
    Unindex(number);
    Discard(number);
  }
  ticket.privates.clear();
  tickets_.Erase(id);
}

void BlockIndex::LetGo(SessionId session, TicketId id) {
  TicketEntry* const ticket = tickets_.Find(id);
  KVT_CHECK(ticket != nullptr, "ticket ", id.value());
  Holder* const holder = ticket->HolderIn(session);
  KVT_CHECK(holder != nullptr, "ticket ", id.value(), " session ", session.value());
  DropHolder(*ticket, *holder);
  DropTicketIfUnheld(id);
}

void BlockIndex::EndSession(SessionId id) {
  Session* const session = sessions_.Find(id);
  std::vector<TicketId> held(session->tickets.begin(), session->tickets.end());
  std::sort(held.begin(), held.end());  // the same in every run
  for (const TicketId ticket : held) LetGo(id, ticket);
  sessions_.Close(id);
}

IndexStats BlockIndex::Stats() const {
  IndexStats stats = counters_;
  stats.capacity_bytes = allocator_.capacity_bytes();
  stats.used_bytes = allocator_.used_bytes();
  stats.resident_bytes = {table_.SealedBytesOf(Plane::kBase),
                          table_.SealedBytesOf(Plane::kResidual)};
  stats.reserved_bytes = table_.BytesOf(BlockState::kReserved);
  stats.writing_bytes = table_.BytesOf(BlockState::kWriting);
  stats.evicting_bytes = table_.BytesOf(BlockState::kEvicting);
  stats.promoting_bytes = table_.landing_bytes();
  stats.spilling_bytes = disk_.spilling_bytes;
  for (const Plane plane : {Plane::kBase, Plane::kResidual}) {
    stats.disk_bytes[static_cast<size_t>(plane)] = table_.DiskBytesOf(plane);
    stats.disk_records[static_cast<size_t>(plane)] = table_.DiskRecordsOf(plane);
  }
  stats.index_bytes = table_.MemoryBytes() + sealed_.capacity() * (sizeof(*sealed_.begin()) + 1);
  stats.blocks = table_.CountOf(BlockState::kSealed);
  stats.sessions = sessions_.size();
  stats.tickets = tickets_.size();
  return stats;
}

}  // namespace kvt
