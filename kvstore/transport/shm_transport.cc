#include "kvstore/transport/shm_transport.h"

#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/base/mutex.h"
#include "kernels/layout/checksum.h"
#include "kvstore/media/unix_socket.h"
#include "kvstore/transport/attach_message.h"
#include "kvstore/transport/burst_pool.h"
#include "kvstore/transport/piece_copy.h"
#include "kvstore/transport/push_ring.h"

namespace kvt {
namespace {

constexpr absl::string_view kPrefix = "shm:";
constexpr int kGatherThreadsMax = 8;
// Items of one gather step: between two steps pushes, answers and cancellations have their turn.
constexpr uint32_t kStepItemsMax = 256;
constexpr uint64_t kStepBytesMax = 4 * kMiB;
// Items a gather thread takes at once.
constexpr uint32_t kTakeItems = 8;
// How far ahead of the copy a record's table entry is fetched.
constexpr uint32_t kLookAhead = 4;

void BindTo(std::thread& thread, int cpu) {
  if (cpu < 0) return;
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  CPU_SET(cpu, &cpus);
  (void)pthread_setaffinity_np(thread.native_handle(), sizeof(cpus), &cpus);
}

// What a client gets at attach.
struct Attached {
  UniqueFd socket;
  UniqueFd doorbell;
  UniqueFd answered;
  uint16_t version = 0;
};

// A share of one pull burst, carried out by the channel's gather threads together.
struct GatherStep {
  const PullItem* items = nullptr;
  uint32_t count = 0;
  std::array<PieceStatus, kStepItemsMax> statuses;
};

// Gathers from the mapping. Stateless apart from references; used by several threads at once.
class Gatherer {
 public:
  Gatherer(SharedMapping arena, RecordTable table, const Geometry& geometry)
      : arena_(std::move(arena)),
        table_(std::move(table)),
        record_bytes_(geometry.RecordBytes()),
        slice_bytes_(geometry.SliceBytes()) {}

  void Gather(GatherStep& step, uint32_t begin, uint32_t end) const {
    for (uint32_t i = begin; i < std::min(end, begin + kLookAhead); ++i) {
      table_.Prefetch(step.items[i].piece.handle);
    }
    Source next = begin < end ? Locate(step.items[begin]) : Source();
    if (next.data != nullptr) PrefetchPiece(next.data, step.items[begin].piece.length);
    for (uint32_t i = begin; i < end; ++i) {
      if (i + kLookAhead < end) table_.Prefetch(step.items[i + kLookAhead].piece.handle);
      const Source src = std::exchange(next, Source());
      if (i + 1 < end) next = Locate(step.items[i + 1]);
      step.statuses[i] = Copy(step.items[i], src, next.data);
    }
    StreamingFence();
  }

 private:
  struct Source {
    const std::byte* data = nullptr;  // null: `missing` says why
    RecordTable::Spot spot;
    PieceStatus missing = PieceStatus::kLost;
  };
  // Where the item's bytes lie.
  Source Locate(const PullItem& item) const {
    Source source;
    const std::optional<RecordTable::Spot> spot = table_.Look(item.piece.handle);
    if (!spot.has_value()) return source;
    source.spot = *spot;
    if (spot->on_disk) {
      source.missing = PieceStatus::kOnDisk;
    } else if (spot->offset <= arena_.size() && arena_.size() - spot->offset >= record_bytes_) {
      source.data = arena_.data() + spot->offset + item.piece.offset;
    }
    return source;
  }
  PieceStatus Copy(const PullItem& item, const Source& src, const std::byte* next) const {
    if (src.data == nullptr) return src.missing;
    const bool good = ScatterRange(item, slice_bytes_, 0, src.data, item.piece.length, next);
    if (table_.IsCurrent(item.piece.handle, src.spot)) {
      return good ? PieceStatus::kOk : PieceStatus::kCorrupt;
    }
    // What was read may be another's. Gone, or moved meanwhile.
    return table_.Look(item.piece.handle).has_value() ? PieceStatus::kOnDisk : PieceStatus::kLost;
  }

  const SharedMapping arena_;
  const RecordTable table_;
  const uint32_t record_bytes_;
  const uint32_t slice_bytes_;
};

// Threads that help the channel's own with a step; asleep between steps.
class GatherCrew {
 public:
  GatherCrew(const Gatherer& gatherer, int helpers, int first_cpu) : gatherer_(gatherer) {
    for (int i = 0; i < helpers; ++i) {
      threads_.emplace_back([this] { Help(); });
      BindTo(threads_.back(), first_cpu < 0 ? -1 : first_cpu + i);
    }
  }
  ~GatherCrew() {
    {
      MutexLock lock(mu_);
      stopping_ = true;
      changed_.NotifyAll();
    }
    for (std::thread& thread : threads_) thread.join();
  }

  // Returns when every item of the step has its status.
  void Run(GatherStep& step) {
    if (threads_.empty()) return gatherer_.Gather(step, 0, step.count);
    {
      MutexLock lock(mu_);
      step_ = &step;
      next_.store(0, std::memory_order_relaxed);
      ++turn_;
      changed_.NotifyAll();
    }
    Share(step);
    MutexLock lock(mu_);
    step_ = nullptr;  // late helpers find nothing
    while (helping_ > 0) changed_.WaitFor(mu_, absl::Seconds(1));
  }

 private:
  void Share(GatherStep& step) {
    while (true) {
      const uint32_t begin = next_.fetch_add(kTakeItems, std::memory_order_relaxed);
      if (begin >= step.count) return;
      gatherer_.Gather(step, begin, std::min(begin + kTakeItems, step.count));
    }
  }
  void Help() {
    uint64_t seen = 0;
    while (true) {
      GatherStep* step = nullptr;
      {
        MutexLock lock(mu_);
        while (!stopping_ && (step_ == nullptr || turn_ == seen)) {
          changed_.WaitFor(mu_, absl::Seconds(60));
        }
        if (stopping_) return;
        seen = turn_;
        step = step_;
        ++helping_;
      }
      Share(*step);
      MutexLock lock(mu_);
      if (--helping_ == 0) changed_.NotifyAll();
    }
  }

  const Gatherer& gatherer_;
  std::atomic<uint32_t> next_{0};
  Mutex mu_;
  CondVar changed_;
  GatherStep* step_ ABSL_GUARDED_BY(mu_) = nullptr;
  uint64_t turn_ ABSL_GUARDED_BY(mu_) = 0;
  int helping_ ABSL_GUARDED_BY(mu_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;
};

class ShmChannel final : public Channel {
 public:
  ShmChannel(const ShmOptions& options, std::string address, const SessionToken& token,
             Attached attached, SharedMapping arena, RecordTable table, SharedMapping ring)
      : address_(std::move(address)),
        attached_(std::move(attached)),
        pool_(token.geometry),
        gatherer_(std::move(arena), std::move(table), token.geometry),
        crew_(gatherer_, options.gather_threads - 1, options.cpu < 0 ? -1 : options.cpu + 1),
        ring_(std::move(ring)),
        messages_(kRingMessagesMax) {}
  ~ShmChannel() override { Close(); }

  absl::Status Start(int cpu) {
    epoll_ = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
    wake_ = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!epoll_.valid() || !wake_.valid()) {
      return absl::ResourceExhaustedError(
          absl::StrCat("shm: no descriptor for the channel: ", std::strerror(errno)));
    }
    for (const int fd : {wake_.get(), attached_.answered.get(), attached_.socket.get()}) {
      epoll_event event{};
      event.events = EPOLLIN;
      event.data.fd = fd;
      KVT_CHECK(epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0, std::strerror(errno));
    }
    thread_ = std::thread([this] { Run(); });
    BindTo(thread_, cpu);
    return absl::OkStatus();
  }

  absl::StatusOr<BurstId> Pull(PullRequest request) override {
    return Submitted(pool_.Submit(std::move(request)));
  }
  absl::StatusOr<BurstId> Push(PushRequest request) override {
    return Submitted(pool_.Submit(std::move(request)));
  }
  void Cancel(BurstId burst) override {
    pool_.Cancel(burst);
    Wake();
  }
  void Close() override {
    pool_.Close(absl::UnavailableError("channel closed"));
    Wake();
    MutexLock lock(join_mu_);
    if (thread_.joinable()) thread_.join();
  }
  bool IsOpen() const override { return pool_.IsOpen(); }
  ChannelStats Stats() const override { return pool_.Stats(); }

 private:
  // A message in the ring that the store has not answered.
  struct Pending {
    Burst* burst = nullptr;  // null: cancelled
    PushMessage message;
  };

  absl::StatusOr<BurstId> Submitted(absl::StatusOr<BurstId> id) {
    if (id.ok()) Wake();
    return id;
  }
  void Wake() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!sleeping_.load(std::memory_order_seq_cst)) return;
    const uint64_t one = 1;
    (void)!write(wake_.get(), &one, sizeof(one));
  }

  void Run() {
    while (pool_.IsOpen()) {
      bool did = false;
      while (Burst* burst = pool_.TakeSubmitted()) {
        did = true;
        if (burst->size() == 0) pool_.Finish(*burst, absl::OkStatus());
      }
      while (Burst* burst = pool_.TakeCancelled()) {
        did = true;
        Drop(*burst, absl::CancelledError("burst cancelled"));
      }
      did |= TakeAnswers();
      did |= EndLate();
      did |= StepPush();
      did |= StepPull();
      if (!did) Sleep();
    }
    End();
  }

  void End() {
    if (attached_.socket.valid()) attached_.socket.Reset();  // the store lets go
    while (pool_.TakeSubmitted() != nullptr) {
    }
    while (!pool_.Active().empty()) Drop(*pool_.Active().front(), failure_);
  }

  // Ends a burst whose messages may still be in the ring: the ring holds copies.
  void Drop(Burst& burst, const absl::Status& why) {
    for (Pending& pending : messages_) {
      if (pending.burst == &burst) pending.burst = nullptr;
    }
    burst.in_flight = 0;
    pool_.Finish(burst, why);
  }

  // A late pull ends alone: only this side was slow. A push that the store does not answer in time
  // closes the channel.
  bool EndLate() {
    const absl::Time now = RealClock::Get().Now();
    if (now < pool_.NextDeadline()) return false;
    for (Burst* burst : pool_.Active()) {
      if (now < burst->deadline) continue;
      // First closed, then told: whoever is told finds the channel closed.
      if (burst->in_flight > 0) {
        Fail(absl::UnavailableError(
            absl::StrCat("a missed deadline closed the channel to ", address_)));
      }
      Drop(*burst, absl::DeadlineExceededError(
                       absl::StrCat(address_, " did not finish the burst by its deadline")));
      return true;
    }
    return false;
  }

  void Fail(absl::Status why) {
    failure_ = why;
    pool_.Close(why);
  }

  bool TakeAnswers() {
    bool did = false;
    while (const std::optional<RingAnswer> answer = ring_.TakeAnswer()) {
      did = true;
      Pending& pending = messages_[answered_ % kRingMessagesMax];
      if (answered_ == sent_ || answer->id != answered_ ||
          (answer->count != static_cast<uint32_t>(pending.message.count)) ||
          !std::all_of(answer->statuses.begin(), answer->statuses.end(),
                       [&](PieceStatus s) {
                         return static_cast<int>(s) < PieceStatusesIn(attached_.version);
                       })) {
        Fail(absl::UnavailableError(absl::StrCat("malformed answer from ", address_)));
        return true;
      }
      ++answered_;
      Burst* burst = std::exchange(pending.burst, nullptr);
      if (burst == nullptr) continue;
      pending.message.Settle(pool_, *burst, answer->statuses);
      --burst->in_flight;
      if (burst->items_left == 0) pool_.Finish(*burst, absl::OkStatus());
    }
    return did;
  }

  // Writes the next message of the oldest push into the ring.
  bool StepPush() {
    if (!pool_.IsOpen()) return false;
    const uint32_t slice = pool_.slice_bytes();
    for (Burst* burst : pool_.Active()) {
      if (!burst->is_push) continue;
      if (!filled_) {
        if (burst->all_sent() || sent_ - answered_ == kRingMessagesMax) continue;
        filled_ = next_.Fill(*burst, slice, PushLimits{});
        ++burst->in_flight;  // held back by a full ring counts too
      } else if (next_.burst != burst->id.value()) {
        continue;
      }
      const auto place = ring_.Reserve(next_.MetaBytes(slice), next_.bytes);
      if (!place.has_value()) return false;
      std::byte* out = place->data;
      for (size_t i = 0; i < static_cast<size_t>(next_.count); ++i) {
        GatherRange(burst->pushes[next_.items[i]], slice, next_.from[i], next_.pieces[i].length,
                    out, burst->checksums == PushChecksums::kCompute);
        out += next_.pieces[i].length;
      }
      next_.WriteMeta(*burst, slice, place->meta);
      Pending& pending = messages_[sent_ % kRingMessagesMax];
      pending.burst = burst;
      pending.message = next_;
      filled_ = false;
      const bool wake = ring_.Commit(sent_++, next_.count, next_.has_checksums);
      const uint64_t one = 1;
      if (wake) (void)!write(attached_.doorbell.get(), &one, sizeof(one));
      return true;
    }
    // Its burst was cancelled while the ring was full.
    if (filled_) return std::exchange(filled_, false);
    return false;
  }

  bool StepPull() {
    if (!pool_.IsOpen()) return false;
    for (Burst* burst : pool_.Active()) {
      if (burst->is_push) continue;
      step_.items = burst->pulls.data() + burst->next_item;
      step_.count = 0;
      uint64_t bytes = 0;
      while (burst->next_item + step_.count < burst->size() && step_.count < kStepItemsMax &&
             bytes < kStepBytesMax) {
        bytes += step_.items[step_.count++].piece.length;
      }
      crew_.Run(step_);
      for (uint32_t i = 0; i < step_.count; ++i) {
        pool_.SetVerdict(*burst, burst->next_item++, step_.statuses[i]);
      }
      if (burst->items_left == 0) pool_.Finish(*burst, absl::OkStatus());
      return true;
    }
    return false;
  }

  void Sleep() {
    sleeping_.store(true, std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (ring_.PrepareSleep() && !pool_.HasSubmitted() && !pool_.HasCancelled() && pool_.IsOpen()) {
      const absl::Duration left = pool_.NextDeadline() - RealClock::Get().Now();
      const auto timeout_ms = static_cast<int>(std::clamp<int64_t>(
          absl::ToInt64Milliseconds(std::min(left, absl::Seconds(60))) + 1, 0, 60'000));
      epoll_event events[3];
      const int ready = epoll_wait(epoll_.get(), events, 3, timeout_ms);
      for (int i = 0; i < ready; ++i) {
        uint64_t count = 0;
        const int fd = events[i].data.fd;
        if (fd == attached_.socket.get()) {
          // The store says nothing after attach: it closed or died.
          Fail(absl::UnavailableError(absl::StrCat("the store at ", address_, " is gone")));
        } else {
          (void)!read(fd, &count, sizeof(count));
        }
      }
    }
    ring_.EndSleep();
    sleeping_.store(false, std::memory_order_seq_cst);
  }

  const std::string address_;
  Attached attached_;
  BurstPool pool_;
  const Gatherer gatherer_;
  GatherCrew crew_;
  UniqueFd epoll_;
  UniqueFd wake_;
  std::atomic<bool> sleeping_{false};

  // Thread only.
  PushRingWriter ring_;
  std::vector<Pending> messages_;  // by number of message, a ring
  uint64_t sent_ = 0;
  uint64_t answered_ = 0;
  PushMessage next_;     // taken from its burst, not in the ring yet
  bool filled_ = false;  // next_ is one
  GatherStep step_;
  absl::Status failure_ = absl::UnavailableError("channel closed");

  Mutex join_mu_;
  std::thread thread_;
};

class ShmTransport final : public Transport {
 public:
  explicit ShmTransport(const ShmOptions& options) : options_(options) {}
  absl::string_view Scheme() const override { return "shm"; }

  absl::StatusOr<std::unique_ptr<Channel>> Connect(absl::string_view address,
                                                   const SessionToken& token,
                                                   absl::Time deadline) override {
    KVT_RETURN_IF_ERROR(options_.Validate());
    KVT_RETURN_IF_ERROR(token.geometry.Validate());
    Attached attached;
    KVT_ASSIGN_OR_RETURN(attached.socket,
                         ConnectUnix(absl::StripPrefix(address, kPrefix), deadline));
    const AttachHello hello = MakeAttachHello(token, TransportSettings{}, 0, options_.versions);
    KVT_RETURN_IF_ERROR(SendFdMessage(
        attached.socket.get(),
        absl::MakeConstSpan(reinterpret_cast<const std::byte*>(&hello), sizeof(hello)), {},
        deadline));
    KVT_ASSIGN_OR_RETURN(FdMessage answer, ReceiveFdMessage(attached.socket.get(), deadline));
    KVT_ASSIGN_OR_RETURN(const AttachReply reply, CheckAttachReply(answer.bytes, options_.versions));
    attached.version = reply.version;
    if (answer.fds.size() != 5) {
      return absl::InternalError(
          absl::StrCat("attach: ", address, " sent ", answer.fds.size(), " descriptors"));
    }
    KVT_ASSIGN_OR_RETURN(SharedMapping arena, SharedMapping::MapReadOnly(std::move(answer.fds[0]),
                                                                         SharedMappingOptions{}));
    KVT_ASSIGN_OR_RETURN(RecordTable table, RecordTable::MapReadOnly(std::move(answer.fds[1])));
    KVT_ASSIGN_OR_RETURN(SharedMapping ring, SharedMapping::MapWritable(std::move(answer.fds[2]),
                                                                        SharedMappingOptions{}));
    if (arena.size() != reply.arena_bytes || ring.size() < kRingMappingBytes) {
      return absl::InternalError(absl::StrCat("attach: ", address, " sent memory of a wrong size"));
    }
    attached.doorbell = std::move(answer.fds[3]);
    attached.answered = std::move(answer.fds[4]);
    auto channel =
        std::make_unique<ShmChannel>(options_, std::string(address), token, std::move(attached),
                                     std::move(arena), std::move(table), std::move(ring));
    KVT_RETURN_IF_ERROR(channel->Start(options_.cpu));
    return channel;
  }

 private:
  const ShmOptions options_;
};

}  // namespace

absl::Status ShmOptions::Validate() const {
  if (gather_threads < 1 || gather_threads > kGatherThreadsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("shm: gather_threads = ", gather_threads, " is outside [1, 8]"));
  }
  if (cpu < -1 || cpu >= CPU_SETSIZE) {
    return absl::InvalidArgumentError(absl::StrCat("shm: cpu = ", cpu));
  }
  return absl::OkStatus();
}

std::unique_ptr<Transport> MakeShmTransport(const ShmOptions& options) {
  return std::make_unique<ShmTransport>(options);
}

}  // namespace kvt
