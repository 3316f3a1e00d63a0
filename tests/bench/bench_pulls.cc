#include "tests/bench/bench_pulls.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "absl/container/flat_hash_set.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/base/mutex.h"
#include "kernels/base/random.h"
#include "kernels/layout/checksum.h"

namespace kvt {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(120);

// Which record and layer each piece is.
struct Choice {
  uint32_t record = 0;
  int layer = 0;
};

void Shuffle(std::vector<Choice>& choices, Random& random) {
  for (size_t i = choices.size() - 1; i > 0; --i) {
    std::swap(choices[i], choices[random.Below(i + 1)]);
  }
}

std::vector<Choice> Choose(const SizeCase& size, const BenchStore& store,
                           const PullSetOptions& options, Random& random) {
  const bool one_plane = options.choice != PieceChoice::kScattered;
  std::vector<Choice> all;
  for (uint32_t r = 0; r < store.records.size(); r += one_plane ? 2 : 1) {
    for (int layer = 0; layer < (size.whole ? 1 : size.layers); ++layer) all.push_back({r, layer});
  }
  Shuffle(all, random);
  const size_t wanted = size_t{options.burst_pieces} * options.bursts /
                        (options.choice == PieceChoice::kTarget ? 2 : 1);
  std::vector<Choice> choices;
  while (choices.size() < wanted) choices.push_back(all[choices.size() % all.size()]);
  if (options.choice != PieceChoice::kTarget) return choices;
  std::vector<Choice> both;
  for (const Choice& choice : choices) {
    both.push_back(choice);
    both.push_back({choice.record + 1, choice.layer});
  }
  return both;
}

}  // namespace

PullSet::PullSet(const SizeCase& size, const BenchStore& store, absl::Span<std::byte> pool,
                 const PullSetOptions& options)
    : options_(options),
      piece_bytes_(size.PieceBytes()) {
  const Geometry geometry = size.geometry();
  Random random(42);
  const std::vector<Choice> choices = Choose(size, store, options, random);
  const auto total = static_cast<uint32_t>(choices.size());
  const uint32_t slices = piece_bytes_ / geometry.SliceBytes();
  // Places of the pool, shuffled.
  std::vector<Choice> places(pool.size() / piece_bytes_);
  KVT_CHECK(places.size() >= options.burst_pieces, "pool of ", pool.size());
  for (uint32_t i = 0; i < places.size(); ++i) places[i].record = i;
  Shuffle(places, random);
  const size_t used = places.size() / options.burst_pieces * options.burst_pieces;
  records_.resize(total);
  items_.resize(total);
  destinations_.resize(total);
  offsets_.resize(total);
  statuses_.resize(total);
  checksums_.resize(uint64_t{total} * slices);
  std::vector<std::byte> bytes(piece_bytes_);
  for (uint32_t i = 0; i < total; ++i) {
    records_[i] = store.records[choices[i].record];
    destinations_[i] = pool.data() + uint64_t{places[i % used].record} * piece_bytes_;
    PullItem& item = items_[i];
    item.piece.ticket = kBenchTicket;
    item.piece.ticket_epoch = 1;
    item.piece.handle = records_[i].handle;
    item.piece.offset = geometry.SlotOffset(choices[i].layer);
    item.piece.length = piece_bytes_;
    item.parts = &destinations_[i];
    item.part_bytes = piece_bytes_;
    item.key_hash = records_[i].key_hash;
    item.plane = static_cast<Plane>(records_[i].plane);
    offsets_[i] = records_[i].offset + item.piece.offset;
    FillRecordBytes(records_[i], item.piece.offset, piece_bytes_, bytes.data());
    for (uint32_t s = 0; s < slices; ++s) {
      checksums_[uint64_t{i} * slices + s] =
          SliceChecksum(bytes.data() + uint64_t{s} * geometry.SliceBytes(), geometry.SliceBytes(),
                        ChecksumSeed(item.key_hash, item.plane,
                                     item.piece.offset / geometry.SliceBytes() + s));
    }
  }
  checked_ = items_;
  for (uint32_t i = 0; i < total; ++i) checked_[i].checksums = &checksums_[uint64_t{i} * slices];
}

void PullSet::Wipe() {
  for (std::byte* destination : destinations_) std::memset(destination, 0, piece_bytes_);
}

void PullSet::Verify() const {
  std::vector<std::byte> bytes(piece_bytes_);
  // Later pieces overwrite earlier ones of the same place.
  absl::flat_hash_set<const std::byte*> seen;
  for (size_t i = items_.size(); i-- > 0;) {
    if (!seen.insert(destinations_[i]).second) continue;
    FillRecordBytes(records_[i], items_[i].piece.offset, piece_bytes_, bytes.data());
    KVT_CHECK(std::memcmp(bytes.data(), destinations_[i], piece_bytes_) == 0, "piece ", i);
  }
}

namespace {

class PullRun {
 public:
  PullRun(Channel& channel, PullSet& set, const PullRunOptions& options)
      : channel_(channel),
        set_(set),
        checked_(options.checked),
        pieces_(options.pieces > 0 ? options.pieces : set.burst_pieces()),
        total_(options.total > 0 ? options.total : set.pieces()) {}

  absl::Duration Go(uint32_t outstanding) {
    for (uint32_t i = 0; i < outstanding; ++i) Next();
    MutexLock lock(mu_);
    while (finished_ < total_) KVT_CHECK(changed_.WaitFor(mu_, kPatience));
    return absl::Nanoseconds(posting_ns_.load());
  }

 private:
  void Next() {
    const uint32_t at = started_.fetch_add(pieces_);
    if (at >= total_) return;
    PullRequest request;
    request.items = set_.Items(at, pieces_, checked_);
    request.statuses = set_.Statuses(at, pieces_);
    const absl::Time start = RealClock::Get().Now();
    request.deadline = start + kPatience;
    request.done = [this](const BurstResult& result) {
      KVT_CHECK(result.status.ok() && result.pieces_ok == pieces_, result.status.ToString(),
                " missed ", result.pieces_missed);
      Next();
      MutexLock lock(mu_);
      finished_ += pieces_;
      if (finished_ >= total_) changed_.NotifyAll();
    };
    KVT_CHECK(channel_.Pull(std::move(request)).ok());
    posting_ns_.fetch_add(absl::ToInt64Nanoseconds(RealClock::Get().Now() - start));
  }
  Channel& channel_;
  PullSet& set_;
  const bool checked_;
  const uint32_t pieces_;
  const uint32_t total_;
  std::atomic<uint32_t> started_{0};
  std::atomic<int64_t> posting_ns_{0};
  Mutex mu_;
  CondVar changed_;
  uint32_t finished_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace

absl::Duration RunPulls(Channel& channel, PullSet& set, const PullRunOptions& options) {
  return PullRun(channel, set, options).Go(options.outstanding);
}

std::vector<double> SinglePullMicroseconds(Channel& channel, PullSet& set, uint32_t count,
                                           absl::Duration pause) {
  struct Wait {
    Mutex mu;
    CondVar changed;
    absl::Time end ABSL_GUARDED_BY(mu);
    bool done ABSL_GUARDED_BY(mu) = false;
  } wait;
  std::vector<double> times;
  times.reserve(count);
  for (uint32_t i = 0; i < count; ++i) {
    if (pause > absl::ZeroDuration()) std::this_thread::sleep_for(absl::ToChronoNanoseconds(pause));
    const uint32_t at = i % set.pieces();
    PullRequest request;
    request.items = set.Items(at, 1, true);
    request.statuses = set.Statuses(at, 1);
    request.done = [&wait](const BurstResult& result) {
      const absl::Time now = RealClock::Get().Now();
      KVT_CHECK(result.pieces_ok == 1, result.status.ToString());
      MutexLock lock(wait.mu);
      wait.end = now;
      wait.done = true;
      wait.changed.NotifyAll();
    };
    const absl::Time start = RealClock::Get().Now();
    request.deadline = start + kPatience;
    KVT_CHECK(channel.Pull(std::move(request)).ok());
    MutexLock lock(wait.mu);
    while (!wait.done) KVT_CHECK(wait.changed.WaitFor(wait.mu, kPatience));
    wait.done = false;
    times.push_back(absl::ToDoubleMicroseconds(wait.end - start));
  }
  return times;
}

}  // namespace kvt
