// Of PrefillEngine: the digests of an offloaded request, written while its planes are.
#include <utility>

#include "kernels/base/check.h"
#include "prefill_worker/prefill_engine.h"

namespace kvt {
namespace {

// How long a hand-over waits for digests when the planes are in the tier. Without them the decode
// worker has to pull every block's planes.
constexpr absl::Duration kDigestWait = absl::Seconds(5);

}  // namespace

void PrefillEngine::WriteDigests(const Job& job) {
  job->selection->Finish();
  deps_.metrics->Selected();
  job->digests_pending = true;
  Control<std::shared_ptr<DigestWrite>>(
      job,
      [this, job] {
        return OpenDigestWrite(*deps_.digest_tier, job->ticket,
                               job->names.Under(*job->digest_chain), *deps_.digests,
                               *job->selection);
      },
      [this, job](std::shared_ptr<DigestWrite> write) { PushDigests(job, std::move(write)); });
}

void PrefillEngine::PushDigests(const Job& job, std::shared_ptr<DigestWrite> write) {
  job->selection->digests.clear();
  deps_.metrics->DigestsRefused(write->refused);
  if (write->list.empty()) return EndDigests(job);
  ++job->pending;
  deps_.digest_tier->Push(
      {.blocks = write->list,
       .layer_begin = 0,
       .layer_end = 1,
       .outcomes = absl::MakeSpan(write->outcomes),
       .done = [this, job, write](const TransferResult& result) {
         queue_.Post([this, job, write, result] {
           --job->pending;
           deps_.metrics->DigestsPushed(result.bytes);
           if (job->phase == PrefillPhase::kEnding) return MaybeForget(job);
           SealDigests(job, write);
         });
       }});
}

void PrefillEngine::SealDigests(const Job& job, std::shared_ptr<DigestWrite> write) {
  Control<int>(
      job,
      [this, job, write] {
        return SealDigestWrite(*deps_.digest_tier, job->ticket.ref(), *write);
      },
      [this, job, write](int sealed) {
        deps_.metrics->DigestsRefused(static_cast<int>(write->places.size()) - sealed);
        EndDigests(job);
      });
}

void PrefillEngine::EndDigests(const Job& job) {
  job->digests_pending = false;
  if (!std::exchange(job->awaits_digests, false)) return;
  HandOver(job);
}

void PrefillEngine::HandOverWithDigests(const Job& job) {
  if (!job->digests_pending) return HandOver(job);
  job->awaits_digests = true;
  At(deps_.clock->Now() + kDigestWait, [this, job] {
    if (job->phase != PrefillPhase::kHandingOver) return;
    if (std::exchange(job->awaits_digests, false)) HandOver(job);
  });
}

}  // namespace kvt
