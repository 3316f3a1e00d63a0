// A resolver that hands everything to another one: base of those that watch or change one step.
#pragma once

#include "kvstore/transport/transport_server.h"

namespace kvt {

class ForwardingResolver : public PieceResolver {
 public:
  // `to` outlives it.
  explicit ForwardingResolver(PieceResolver& to) : to_(to) {}

  absl::Status Attach(const SessionToken& token) override { return to_.Attach(token); }
  void Detach(SessionId session) override { to_.Detach(session); }
  void ResolvePull(SessionId session, absl::Span<const Piece> pieces,
                   absl::Span<ResolvedPull> out) override {
    to_.ResolvePull(session, pieces, out);
  }
  void ReleasePull(SessionId session, absl::Span<const Piece> pieces) override {
    to_.ReleasePull(session, pieces);
  }
  void ResolvePush(SessionId session, absl::Span<const Piece> pieces,
                   absl::Span<ResolvedPush> out) override {
    to_.ResolvePush(session, pieces, out);
  }
  void CommitPush(SessionId session, absl::Span<const PushedPiece> pieces,
                  absl::Span<PieceStatus> verdicts) override {
    to_.CommitPush(session, pieces, verdicts);
  }

 private:
  PieceResolver& to_;
};

}  // namespace kvt
