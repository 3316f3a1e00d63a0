// Whose turn it is to keep part of what it asks for (DESIGN 3, Room). A ticket that has waited long
// and is refused may keep what there is; one ticket at a time, the others of that age in order of
// age. While one has the turn, or an older one is due, nobody else is admitted: what becomes free
// goes to it, so that smaller requests cannot starve it. Pure; not thread-safe (the index owns it).
//
// A turn that is not asked for again within kAgedTurnLapse is over: the asker is gone, or stuck.
#pragma once

#include <optional>
#include <utility>

#include "absl/time/time.h"
#include "kernels/base/ids.h"

namespace kvt {

// Several pauses between two attempts of a ticket.
inline constexpr absl::Duration kAgedTurnLapse = absl::Seconds(2);

// What a Reserve is told beside its names, and hears.
struct AgedAsk {
  absl::Duration waited;  // zero: the ticket is not aged
  bool pending = false;   // out: not granted, but the ticket has its turn and keeps what there is
  // Rather than losing a record that deserves the disk and is not there yet, refuse.
  bool spare_unspilled = false;
  bool spill_helps = false;  // out: refused for that alone; nothing is held or counted
};

class AgedTurn {
 public:
  // Takes or keeps the turn for a ticket that has waited since `since`. False: another has it, or
  // an older one asked lately; the ticket is remembered if it is the oldest of those that wait.
  bool TryTake(absl::Time now, TicketId ticket, absl::Time since) {
    if (holder_.has_value()) {
      if (holder_->ticket == ticket) {
        holder_->asked = now;
        return true;
      }
      Remember(now, ticket, since);
      return false;
    }
    Remember(now, ticket, since);
    if (next_->ticket != ticket) return false;
    holder_ = std::exchange(next_, std::nullopt);
    return true;
  }
  // Whether a ticket that was granted nothing yet has to wait for another.
  [[nodiscard]] bool Bars(TicketId ticket, absl::Time now) const {
    if (holder_.has_value()) return holder_->ticket != ticket;
    return IsFresh(next_, now) && next_->ticket != ticket;
  }
  // The ticket was granted all. True when it had the turn.
  bool Served(TicketId ticket) {
    if (next_.has_value() && next_->ticket == ticket) next_.reset();
    return Leave(ticket);
  }
  // The ticket holds nothing here any more. True when it had the turn. One that waits for the turn
  // holds nothing and stays remembered.
  bool Leave(TicketId ticket) {
    if (!holder_.has_value() || holder_->ticket != ticket) return false;
    holder_.reset();
    return true;
  }
  // The ticket whose turn is over because it did not ask again; once.
  std::optional<TicketId> TakeLapsed(absl::Time now) {
    if (!holder_.has_value() || IsFresh(holder_, now)) return std::nullopt;
    const TicketId ticket = holder_->ticket;
    holder_.reset();
    return ticket;
  }

 private:
  struct Asker {
    TicketId ticket;
    absl::Time since;
    absl::Time asked;
  };
  static bool IsFresh(const std::optional<Asker>& asker, absl::Time now) {
    return asker.has_value() && now - asker->asked < kAgedTurnLapse;
  }
  void Remember(absl::Time now, TicketId ticket, absl::Time since) {
    const bool is_next = IsFresh(next_, now) && next_->ticket != ticket && next_->since <= since;
    if (!is_next) next_ = Asker{ticket, since, now};
  }

  std::optional<Asker> holder_;
  std::optional<Asker> next_;  // the oldest of those that wait for the turn
};

}  // namespace kvt
