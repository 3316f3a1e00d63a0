#include "decode_worker/engine/sequence.h"

#include "kernels/base/check.h"

namespace kvt {

absl::string_view SequencePhaseName(SequencePhase phase) {
  switch (phase) {
    case SequencePhase::kOpening: return "opening";
    case SequencePhase::kPulling: return "pulling";
    case SequencePhase::kRunning: return "running";
    case SequencePhase::kResuming: return "resuming";
    case SequencePhase::kComputing: return "computing";
    case SequencePhase::kDraining: return "draining";
  }
  return "?";
}

bool MayFollow(SequencePhase from, SequencePhase to) {
  if (from == SequencePhase::kDraining) return false;
  if (to == SequencePhase::kDraining) return true;
  switch (from) {
    case SequencePhase::kOpening:
      return to == SequencePhase::kPulling || to == SequencePhase::kResuming ||
             to == SequencePhase::kComputing;
    case SequencePhase::kPulling:
      return to == SequencePhase::kRunning || to == SequencePhase::kResuming ||
             to == SequencePhase::kComputing;
    case SequencePhase::kRunning: return false;  // resident: it keeps what it has
    case SequencePhase::kResuming:
      return to == SequencePhase::kOpening || to == SequencePhase::kComputing;
    case SequencePhase::kComputing: return to == SequencePhase::kRunning;
    case SequencePhase::kDraining: return false;
  }
  return false;
}

void Sequence::Enter(SequencePhase next) {
  KVT_CHECK(MayFollow(phase, next), "sequence=", id, " from ", SequencePhaseName(phase), " to ",
            SequencePhaseName(next));
  phase = next;
}

}  // namespace kvt
