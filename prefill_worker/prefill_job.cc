#include "prefill_worker/prefill_job.h"

#include "kernels/base/check.h"

namespace kvt {

absl::string_view PrefillPhaseName(PrefillPhase phase) {
  switch (phase) {
    case PrefillPhase::kQueued: return "queued";
    case PrefillPhase::kOpening: return "opening";
    case PrefillPhase::kPulling: return "pulling";
    case PrefillPhase::kComputing: return "computing";
    case PrefillPhase::kFlushing: return "flushing";
    case PrefillPhase::kSealing: return "sealing";
    case PrefillPhase::kHandingOver: return "handing over";
    case PrefillPhase::kEnding: return "ending";
  }
  return "?";
}

bool MayFollow(PrefillPhase from, PrefillPhase to) {
  if (from == PrefillPhase::kEnding) return false;
  if (to == PrefillPhase::kEnding) return true;
  switch (from) {
    case PrefillPhase::kQueued: return to == PrefillPhase::kOpening;
    case PrefillPhase::kOpening:
      return to == PrefillPhase::kPulling || to == PrefillPhase::kComputing ||
             to == PrefillPhase::kQueued;
    case PrefillPhase::kPulling: return to == PrefillPhase::kComputing;
    case PrefillPhase::kComputing: return to == PrefillPhase::kFlushing;
    case PrefillPhase::kFlushing: return to == PrefillPhase::kSealing;
    case PrefillPhase::kSealing:
      return to == PrefillPhase::kFlushing || to == PrefillPhase::kHandingOver;
    case PrefillPhase::kHandingOver: return false;
    case PrefillPhase::kEnding: return false;
  }
  return false;
}

void PrefillJob::Enter(PrefillPhase next) {
  KVT_CHECK(MayFollow(phase, next), "job=", id, " from ", PrefillPhaseName(phase), " to ",
            PrefillPhaseName(next));
  phase = next;
}

}  // namespace kvt
