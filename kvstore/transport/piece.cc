#include "kvstore/transport/piece.h"

namespace kvt {

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
  }
  return "?";
}

}  // namespace kvt
