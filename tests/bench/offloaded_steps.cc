#include "tests/bench/offloaded_steps.h"

#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/ops.h"
#include "kernels/select/attention_stats.h"

namespace kvt {
namespace {

constexpr absl::Duration kDeadline = absl::Seconds(60);
// Those of one layer's fetches and of the step; each is bounded by what is in flight.
constexpr size_t kTasksMax = 64;

}  // namespace

absl::StatusOr<std::unique_ptr<OffloadedSteps>> OffloadedSteps::Create(
    TextRun& source, const Calibration& calibration, int first, int steps, int budget_tokens) {
  KVT_CHECK(first % kBlockTokens == 0, "first=", first);
  auto out = std::unique_ptr<OffloadedSteps>(new OffloadedSteps(source, calibration, first));
  // Whatever is selected is fetched: the choice is the digests'.
  out->budget_ = {.tokens = budget_tokens, .hot_factor = 2, .fetch_share = 1};
  KVT_RETURN_IF_ERROR(out->Open((first + steps) / kBlockTokens + 1));
  return out;
}

OffloadedSteps::~OffloadedSteps() {
  if (slots_.has_value()) slots_->Release(0);
}

absl::Status OffloadedSteps::Open(int blocks_max) {
  const Transformer& model = source_.transformer();
  Device& device = model.device();
  const int layers = model.geometry().layers;
  const OffloadedShape shape = ShapeFor(calibration_, budget_, blocks_max);
  const auto slots = static_cast<uint32_t>(shape.Slots());
  pool_ = std::make_unique<SlotPool>(layers, slots);
  std::optional<OffloadedSlots> taken = OffloadedSlots::TryCreate(*pool_, shape);
  KVT_CHECK(taken.has_value());
  slots_.emplace(*std::move(taken));
  KVT_ASSIGN_OR_RETURN(cache_, KvCache::Create(device, model.geometry(),
                                               {.slot_count = slots, .table_rows = 1,
                                                .blocks_per_row = blocks_max}));
  KVT_ASSIGN_OR_RETURN(heads_, DigestHeads::Create(device, calibration_));
  KVT_ASSIGN_OR_RETURN(digests_, DigestBuffer::Create(device, calibration_.DigestBytesByLayer(),
                                                      blocks_max));
  stream_ = device.NewStream(StreamPriority::kNormal);
  queue_ = std::make_unique<TaskQueue>(kTasksMax);
  KVT_ASSIGN_OR_RETURN(
      step_, OffloadedStep::Create(
                 model, *cache_, *heads_, budget_, *stream_, *queue_, 1,
                 {.fetch = [this](int layer, absl::Span<const OffloadedFetch> fetches,
                                  std::function<void(const std::vector<bool>&)> done) {
                    queue_->Post([this, layer, fetches, done] { Fetch(layer, fetches, done); });
                  },
                  .step_done = [this](const OffloadedStepResult& result) { result_ = result; }}));
  const MiddleBlocks middle = MiddleOf(first_);
  for (int b = 0; b < first_ / kBlockTokens; ++b) {
    if (b >= middle.first && b < middle.end) {
      slots_->AppendStored();
    } else if (!slots_->AppendWhole()) {
      return absl::InternalError("no slots for a whole block");
    }
    step_->SetBlock(0, *slots_, b);
    for (int l = 0; l < layers; ++l) {
      const SlotPair pair = slots_->Pair(l, b);
      if (pair.base != kSlotNone) FromSource(l, b, pair);
    }
  }
  for (int l = 0; l < layers; ++l) {
    if (heads_->dense(l)) continue;
    MakeDigestArgs args;
    args.geometry = model.geometry();
    args.spec = heads_->Spec(l);
    args.slots = source_.cache().slots();
    args.blocks = source_.Table(l);
    args.count = first_ / kBlockTokens;
    args.digests = digests_.Layer(l);
    device.ops().MakeDigest(*stream_, args);
  }
  return Await([] { return true; });
}

void OffloadedSteps::FromSource(int layer, int block, SlotPair pair) {
  const KvCache& source = source_.cache();
  const SlotPair from = source_.Table(layer)[block];
  std::memcpy(cache_->SlotAddress(pair.base), source.SlotAddress(from.base), source.slot_bytes());
  std::memcpy(cache_->SlotAddress(pair.residual), source.SlotAddress(from.residual),
              source.slot_bytes());
}

void OffloadedSteps::Fetch(int layer, absl::Span<const OffloadedFetch> fetches,
                           const std::function<void(const std::vector<bool>&)>& done) {
  for (const OffloadedFetch& f : fetches) {
    // Blocks that the steps wrote stay whole: there are fewer than the recent ones.
    KVT_CHECK(f.fetch.block < first_ / kBlockTokens, "block=", f.fetch.block);
    FromSource(layer, f.fetch.block, f.fetch.pair);
  }
  done(std::vector<bool>(fetches.size(), true));
}

absl::Status OffloadedSteps::Await(const std::function<bool()>& done) {
  bool ran = false;
  step_->Then([&ran] { ran = true; });
  const absl::Time deadline = RealClock::Get().Now() + kDeadline;
  while (!ran || !done()) {
    if (RealClock::Get().Now() > deadline) {
      return absl::DeadlineExceededError(absl::StrCat("the step at position ", position_,
                                                      " is not done after ",
                                                      absl::FormatDuration(kDeadline)));
    }
    queue_->RunAll(absl::Milliseconds(100));
  }
  return absl::OkStatus();
}

absl::StatusOr<OffloadedRowResult> OffloadedSteps::Step(int32_t token) {
  const int block = position_ / kBlockTokens;
  if (block == slots_->blocks()) {
    if (!slots_->AppendWhole()) return absl::InternalError("no slots for a new block");
    step_->SetBlock(0, *slots_, block);
  }
  const OffloadedRow row = {.slots = &*slots_, .digests = &digests_, .table_row = 0,
                            .position = position_, .token = token, .sample = {}};
  result_.reset();
  step_->Enqueue(++steps_, {&row, 1});
  KVT_RETURN_IF_ERROR(Await([this] { return result_.has_value(); }));
  pool_->Retire(steps_);
  slots_->EndStep();
  ++position_;
  if (position_ % kBlockTokens == 0) {
    const auto index = static_cast<uint32_t>(block);
    for (int l = 0; l < heads_->layers(); ++l) {
      const SlotPair pair = slots_->Pair(l, block);
      if (!heads_->dense(l)) step_->MakeDigests(digests_, l, {&pair, 1}, {&index, 1});
    }
    KVT_RETURN_IF_ERROR(Await([] { return true; }));
  }
  const MiddleBlocks middle = MiddleOf(position_);
  for (int b = middle.first; b < middle.end; ++b) {
    if (slots_->whole(b)) slots_->LetGo(b, steps_);
  }
  return result_->rows[0];
}

}  // namespace kvt
