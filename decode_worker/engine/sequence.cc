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
    case SequencePhase::kRunning:  // offloaded, and a miss is lost; resident: it keeps what it has
      return to == SequencePhase::kResuming || to == SequencePhase::kComputing;
    case SequencePhase::kResuming:
      return to == SequencePhase::kOpening || to == SequencePhase::kComputing;
    case SequencePhase::kComputing: return to == SequencePhase::kRunning;
    case SequencePhase::kDraining: return false;
  }
  return false;
}

SampleParams Sequence::NextSample() const {
  SampleParams params;
  params.temperature = static_cast<float>(sampling.temperature);
  params.top_k = sampling.top_k;
  params.top_p = static_cast<float>(sampling.top_p);
  params.seed = sampling.seed;
  params.position = tokens.size();
  return params;
}

void Sequence::Enter(SequencePhase next) {
  KVT_CHECK(MayFollow(phase, next), "sequence=", id, " from ", SequencePhaseName(phase), " to ",
            SequencePhaseName(next));
  phase = next;
}

}  // namespace kvt
