#include "kvstore/transport/piece.h"

namespace kvt {

PieceStatus VerdictIn(uint16_t wire_version, PieceStatus status) {
  if (static_cast<int>(status) < PieceStatusesIn(wire_version)) return status;
  return status == PieceStatus::kOnDisk ? PieceStatus::kLost : PieceStatus::kRefused;
}

absl::string_view PieceStatusName(PieceStatus status) {
  switch (status) {
    case PieceStatus::kOk:
      return "ok";
    case PieceStatus::kLost:
      return "lost";
    case PieceStatus::kCorrupt:
      return "corrupt";
    case PieceStatus::kRefused:
      return "refused";
    case PieceStatus::kInvalid:
      return "invalid";
    case PieceStatus::kNotAttempted:
      return "not attempted";
    case PieceStatus::kOnDisk:
      return "on disk";
    case PieceStatus::kExpired:
      return "lease expired";
  }
  return "?";
}

}  // namespace kvt
