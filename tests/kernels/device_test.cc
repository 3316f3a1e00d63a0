// The CPU device: order, events, mailbox, callbacks, memory, and that it costs nothing when idle.
#include "kernels/device.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "kernels/base/units.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/cpu_stream.h"
#include "kernels/cpu/thread_team.h"

namespace kvt {
namespace {

constexpr absl::Duration kDeadline = absl::Seconds(20);

std::unique_ptr<Device> NewDevice(int threads = 2) {
  CpuDeviceOptions options;
  options.threads = threads;
  auto device = MakeCpuDevice(options);
  EXPECT_TRUE(device.ok()) << device.status();
  return std::move(device).value();
}

// Blocks the executor until opened, so that a test can line operations up behind it.
class Gate {
 public:
  void CloseOn(Stream& stream) {
    stream.Callback([this] {
      while (!open_.load()) std::this_thread::yield();
    });
  }
  void Open() { open_.store(true); }

 private:
  std::atomic<bool> open_{false};
};

TEST(CpuDevice, Options_OutOfRangeRefused) {
  CpuDeviceOptions options;
  options.threads = -1;
  EXPECT_EQ(MakeCpuDevice(options).status().code(), absl::StatusCode::kInvalidArgument);
  options.threads = kTeamThreadsMax + 1;
  EXPECT_EQ(MakeCpuDevice(options).status().code(), absl::StatusCode::kInvalidArgument);
  options.threads = 1;
  options.spin = absl::Seconds(1);
  EXPECT_EQ(MakeCpuDevice(options).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(CpuDevice, Allocate_IsZeroedAndAligned) {
  const auto device = NewDevice();
  for (const size_t bytes : {size_t{1}, size_t{4097}, size_t{3 * kMiB + 5}}) {
    const auto buffer = device->Allocate(bytes);
    ASSERT_TRUE(buffer.ok()) << buffer.status();
    const uintptr_t at = reinterpret_cast<uintptr_t>(buffer->data());
    EXPECT_EQ(at % (bytes >= 2 * kMiB ? 2 * kMiB : 64), 0u);
    const uint8_t* data = buffer->as<uint8_t>();
    for (size_t i = 0; i < bytes; ++i) ASSERT_EQ(data[i], 0) << i;
  }
}

TEST(CpuDevice, AllocateBeyondAddressSpace_IsResourceExhausted) {
  const auto device = NewDevice();
  EXPECT_EQ(device->Allocate(size_t{1} << 50).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST(CpuStream, Operations_RunInOrder) {
  const auto device = NewDevice();
  std::vector<int> order;  // touched on the executor only, read after the stream is drained
  {
    const auto stream = device->NewStream(StreamPriority::kNormal);
    for (int i = 0; i < 10000; ++i) stream->Callback([&order, i] { order.push_back(i); });
  }
  ASSERT_EQ(order.size(), 10000u);
  for (int i = 0; i < 10000; ++i) ASSERT_EQ(order[static_cast<size_t>(i)], i);
}

TEST(CpuStream, HigherPriority_OvertakesAtTheNextOperation) {
  const auto device = NewDevice();
  std::vector<std::string> order;
  {
    const auto low = device->NewStream(StreamPriority::kLow);
    const auto high = device->NewStream(StreamPriority::kHigh);
    Gate gate;
    gate.CloseOn(*low);
    for (int i = 0; i < 3; ++i) low->Callback([&order] { order.push_back("low"); });
    for (int i = 0; i < 3; ++i) high->Callback([&order] { order.push_back("high"); });
    gate.Open();
  }
  EXPECT_EQ(order, (std::vector<std::string>{"high", "high", "high", "low", "low", "low"}));
}

TEST(CpuStream, EqualPriority_TakesTurns) {
  const auto device = NewDevice();
  std::string order;
  {
    const auto a = device->NewStream(StreamPriority::kNormal);
    const auto b = device->NewStream(StreamPriority::kNormal);
    Gate gate;
    gate.CloseOn(*a);
    for (int i = 0; i < 3; ++i) a->Callback([&order] { order += 'a'; });
    for (int i = 0; i < 3; ++i) b->Callback([&order] { order += 'b'; });
    gate.Open();
  }
  EXPECT_EQ(order, "bababa");
}

TEST(CpuStream, Wait_HoldsUntilTheEventOfAnotherStream) {
  const auto device = NewDevice();
  const auto event = device->NewEvent();
  std::string order;
  {
    const auto first = device->NewStream(StreamPriority::kLow);
    const auto second = device->NewStream(StreamPriority::kHigh);
    Gate gate;
    gate.CloseOn(*first);
    first->Callback([&order] { order += '1'; });
    first->Record(*event);
    second->Wait(*event);
    second->Callback([&order] { order += '2'; });
    EXPECT_FALSE(event->Query());
    EXPECT_FALSE(event->HostWait(absl::Milliseconds(1)));
    gate.Open();
    EXPECT_TRUE(event->HostWait(kDeadline));
    EXPECT_TRUE(event->Query());
  }
  EXPECT_EQ(order, "12");
}

TEST(CpuEvent, NeverRecorded_IsDoneAndHoldsNothing) {
  const auto device = NewDevice();
  const auto event = device->NewEvent();
  EXPECT_TRUE(event->Query());
  EXPECT_TRUE(event->HostWait(absl::ZeroDuration()));
  const auto stream = device->NewStream(StreamPriority::kNormal);
  stream->Wait(*event);
  const auto later = device->NewEvent();
  stream->Record(*later);
  EXPECT_TRUE(later->HostWait(kDeadline));
}

TEST(CpuEvent, DestroyedRightAfterItsWait_IsSafe) {
  const auto device = NewDevice();
  const auto stream = device->NewStream(StreamPriority::kNormal);
  for (int i = 0; i < 2000; ++i) {
    const auto event = device->NewEvent();
    stream->Record(*event);
    ASSERT_TRUE(event->HostWait(kDeadline));
  }
}

TEST(CpuStream, Copies_MoveBytesAndInlineWritesAreTakenAtOnce) {
  const auto device = NewDevice();
  constexpr size_t kBytes = 1 << 20;
  const auto buffer = device->Allocate(2 * kBytes);
  ASSERT_TRUE(buffer.ok());
  uint8_t* data = buffer->as<uint8_t>();
  std::vector<uint8_t> host(kBytes), back(kBytes);
  for (size_t i = 0; i < kBytes; ++i) host[i] = static_cast<uint8_t>(i * 31 >> 3);
  {
    const auto stream = device->NewStream(StreamPriority::kNormal);
    stream->CopyToDevice(data, host.data(), kBytes);
    stream->CopyOnDevice(data + kBytes, data, kBytes);
    stream->CopyToHost(back.data(), data + kBytes, kBytes);
  }
  EXPECT_EQ(back, host);
  {
    // More than the stream's ring holds, in pieces of odd sizes.
    const auto stream = device->NewStream(StreamPriority::kNormal);
    std::vector<uint8_t> piece(Stream::kInlineWriteBytesMax);
    for (int i = 0; i < 100; ++i) {
      const size_t bytes = piece.size() - static_cast<size_t>(i);
      std::memset(piece.data(), i, bytes);
      stream->WriteToDevice(data + static_cast<size_t>(i % 16) * piece.size(), piece.data(), bytes);
    }
  }
  for (int i = 84; i < 100; ++i) {
    const uint8_t* at = data + static_cast<size_t>(i % 16) * Stream::kInlineWriteBytesMax;
    EXPECT_EQ(at[0], i);
    EXPECT_EQ(at[Stream::kInlineWriteBytesMax - 101], i);
  }
}

TEST(CpuMailbox, Post_PublishesPayloadTagAndDescriptor) {
  const auto device = NewDevice();
  auto mailbox = device->NewMailbox(3, 100);
  ASSERT_TRUE(mailbox.ok());
  EXPECT_EQ((*mailbox)->Tag(1), 0u);
  pollfd poll_fd{(*mailbox)->notify_fd(), POLLIN, 0};
  EXPECT_EQ(poll(&poll_fd, 1, 0), 0);
  const auto stream = device->NewStream(StreamPriority::kNormal);
  for (uint64_t tag = 1; tag < 500; ++tag) {
    const int entry = static_cast<int>(tag % 3);
    stream->WriteToDevice((*mailbox)->DevicePayload(entry), &tag, sizeof(tag));
    stream->Post(**mailbox, entry, tag);
    ASSERT_TRUE((*mailbox)->WaitTag(entry, tag, kDeadline));
    uint64_t payload;
    std::memcpy(&payload, (*mailbox)->HostPayload(entry), sizeof(payload));
    ASSERT_EQ(payload, tag);
  }
  EXPECT_EQ(poll(&poll_fd, 1, 1000), 1);
  EXPECT_FALSE((*mailbox)->WaitTag(0, 12345, absl::Milliseconds(1)));
}

TEST(CpuStream, ManyStreamsFromManyThreads_AllOperationsRun) {
  const auto device = NewDevice();
  std::atomic<int> ran{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int round = 0; round < 20; ++round) {
        const auto stream = device->NewStream(static_cast<StreamPriority>(round % 3));
        for (int i = 0; i < 50; ++i) stream->Callback([&ran] { ++ran; });
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(ran.load(), 4 * 20 * 50);
}

TEST(CpuStream, FullRing_EnqueuerWaitsForTheDevice) {
  const auto device = NewDevice();
  std::atomic<int> ran{0};
  Gate gate;
  std::thread opener;
  {
    const auto stream = device->NewStream(StreamPriority::kNormal);
    gate.CloseOn(*stream);
    std::atomic<int> enqueued{0};
    opener = std::thread([&] {
      while (enqueued.load() < static_cast<int>(kStreamOpsMax) - 1) std::this_thread::yield();
      EXPECT_EQ(ran.load(), 0);
      gate.Open();
    });
    for (int i = 0; i < 3 * static_cast<int>(kStreamOpsMax); ++i) {
      stream->Callback([&ran] { ++ran; });
      ++enqueued;
    }
    opener.join();
  }
  EXPECT_EQ(ran.load(), 3 * static_cast<int>(kStreamOpsMax));
}

TEST(ThreadTeam, Run_RunsEveryPartOnce) {
  for (const int threads : {1, 2, 3, 5}) {
    ThreadTeam team(threads, false, absl::Microseconds(5), nullptr);
    struct Context {
      std::atomic<int> runs[5];
      std::atomic<int> wrong_count{0};
    } context{};
    constexpr int kRounds = 2000;
    for (int round = 0; round < kRounds; ++round) {
      team.Run(
          [](const void* p, TeamMember& member) {
            Context& c = *const_cast<Context*>(static_cast<const Context*>(p));
            ++c.runs[member.index()];
            if (member.count() < 1) ++c.wrong_count;
          },
          &context);
      for (int part = 0; part < threads; ++part) {
        ASSERT_EQ(context.runs[part].load(), round + 1) << threads << " threads, part " << part;
      }
    }
    EXPECT_EQ(context.wrong_count.load(), 0);
  }
}

// A member that is kept from running (here: by its start function) holds nothing up.
std::atomic<bool> g_member_may_start{false};
TEST(ThreadTeam, MemberThatDoesNotRun_IsDoneWithout) {
  g_member_may_start = false;
  ThreadTeam team(2, false, absl::Microseconds(5), [](int) {
    while (!g_member_may_start.load()) std::this_thread::yield();
  });
  std::atomic<int> ran{0};
  team.Run([](const void* p, TeamMember&) {
    ++*const_cast<std::atomic<int>*>(static_cast<const std::atomic<int>*>(p));
  }, &ran);
  EXPECT_EQ(ran.load(), 2);
  g_member_may_start = true;
}

TEST(ThreadTeam, Share_CoversEveryItemOnce) {
  for (const int items : {0, 1, 5, 17}) {
    for (const int count : {1, 2, 7}) {
      int next = 0;
      for (int index = 0; index < count; ++index) {
        const TeamMember::Range range = TeamMember(index, count).Share(items);
        EXPECT_EQ(range.begin, next);
        next = range.end;
      }
      EXPECT_EQ(next, items);
    }
  }
}

// Processor time of this process over a span in which nothing happens: the wait itself is the
// subject, so it is one poll without descriptors.
TEST(CpuDevice, Idle_UsesNoProcessor) {
  const auto device = NewDevice(4);
  const auto stream = device->NewStream(StreamPriority::kNormal);
  const auto event = device->NewEvent();
  // The whole team has worked and gone idle.
  const auto buffer = device->Allocate(4 * kMiB);
  ASSERT_TRUE(buffer.ok());
  stream->CopyOnDevice(buffer->as<uint8_t>(), buffer->as<uint8_t>() + 2 * kMiB, 2 * kMiB);
  stream->Record(*event);
  ASSERT_TRUE(event->HostWait(kDeadline));
  poll(nullptr, 0, 100);
  // Other work on the machine makes a waking dearer: the least disturbed of three spans counts. A thread
  // that spins shows in each.
  double used = 1;
  for (int span = 0; span < 3 && used >= 0.005; ++span) {
    timespec before, after;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
    poll(nullptr, 0, 500);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
    used = std::min(used, static_cast<double>(after.tv_sec - before.tv_sec) +
                              1e-9 * static_cast<double>(after.tv_nsec - before.tv_nsec));
  }
  EXPECT_LT(used, 0.005) << "seconds of processor time in half a second of idleness";
}

}  // namespace
}  // namespace kvt
