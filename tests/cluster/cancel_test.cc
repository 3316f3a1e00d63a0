// Cancellation and lost listeners: device slots, pins and reservations come back within a second.
#include <atomic>
#include <thread>

#include "kernels/base/clock.h"
#include "kvstore/wire/ticket_codec.h"
#include "kvstore/wire/wire_rpc.h"
#include "tests/cluster/cluster_fixture.h"

namespace kvt {
namespace {

// One second for the cancellation; a heartbeat more until the coordinator shows a worker's slots.
constexpr absl::Duration kBound = absl::Milliseconds(1600);

class CancelTest : public ClusterTest {
 protected:
  // Stores are asked directly: no heartbeat in between.
  void ExpectStoresHoldNothingWithin(absl::Duration bound) {
    const absl::Status held = Await(bound, [&]() -> absl::Status {
      const StoreStats sum = cluster_->TotalStats();
      if (sum.pins + sum.reserved_bytes + sum.output_reserved_blocks + sum.tickets == 0) {
        return absl::OkStatus();
      }
      return absl::DeadlineExceededError(absl::StrCat(
          sum.pins, " pins, ", sum.reserved_bytes, " reserved bytes, ",
          sum.output_reserved_blocks, " output blocks, ", sum.tickets, " tickets"));
    });
    EXPECT_TRUE(held.ok()) << held;
  }
};

TEST_F(CancelTest, DuringDecode_EverythingComesBackWithinASecond) {
  ASSERT_NO_FATAL_FAILURE(StartCluster({}));
  const auto session = cluster_->NewSession();
  ctl::GenerateRequest request = Request(RandomPrompt(1, 300), 1700);
  request.model = cluster_->model();
  std::atomic<int> tokens{0};
  absl::Status status;
  ctl::GenerateResult result;
  std::thread front_end([&] { status = session->Run(request, [&](int32_t) { ++tokens; }, &result); });
  ASSERT_TRUE(Await(absl::Seconds(60), [&] {
                return tokens >= 10 ? absl::OkStatus() : absl::UnknownError("");
              }).ok());
  EXPECT_FALSE(session->Cancel().empty());
  const absl::Time cancelled = RealClock::Get().Now();
  front_end.join();
  EXPECT_TRUE(status.ok() || absl::IsCancelled(status)) << status;
  EXPECT_LT(result.tokens.size(), 1700u);
  ExpectStoresHoldNothingWithin(absl::Seconds(1));
  const absl::Status held =
      cluster_->AwaitNothingHeld(kBound - (RealClock::Get().Now() - cancelled));
  EXPECT_TRUE(held.ok()) << held;
}

TEST_F(CancelTest, DuringPrefill_EverythingComesBackWithinASecond) {
  ClusterSpec spec;
  spec.prefill_keys += "chunk_tokens = 16\n";
  ASSERT_NO_FATAL_FAILURE(StartCluster(spec));
  // A prompt of this size takes a fraction of a second: where this thread is kept waiting so long that
  // the request was over, the next one is cancelled.
  absl::Status status;
  for (uint64_t attempt = 0; attempt < 8 && !absl::IsCancelled(status); ++attempt) {
    const auto session = cluster_->NewSession();
    ctl::GenerateRequest request = Request(RandomPrompt(20 + attempt, 1900), 100);
    request.model = cluster_->model();
    ctl::GenerateResult result;
    const uint64_t pushed = cluster_->TotalStats().pushed_bytes;
    std::thread front_end([&] { status = session->Run(request, [](int32_t) {}, &result); });
    // Once it writes into the stores.
    EXPECT_TRUE(Await(absl::Seconds(60), [&] {
                  return cluster_->TotalStats().pushed_bytes > pushed ? absl::OkStatus()
                                                                      : absl::UnknownError("");
                }).ok());
    (void)session->Cancel();
    ExpectStoresHoldNothingWithin(absl::Seconds(1));
    front_end.join();
    EXPECT_TRUE(status.ok() || absl::IsCancelled(status)) << status;
  }
  EXPECT_TRUE(absl::IsCancelled(status)) << status;
  ExpectNothingHeld(kBound);
}

TEST_F(CancelTest, ByTheCoordinatorAlone_ReachesTheDecodeWorkerWithItsNextHeartbeat) {
  ASSERT_NO_FATAL_FAILURE(StartCluster({}));
  const auto admitted = cluster_->coordinator().Admit(
      {.model = cluster_->model(), .tenant = "", .prompt_tokens = 100, .output_tokens_max = 1900,
       .fidelity = {}});
  ASSERT_TRUE(admitted.ok()) << admitted.status();
  const auto ticket = DecodeTicket(admitted->ticket.payload);
  ASSERT_TRUE(ticket.ok());
  SubmitRequest submit;
  submit.ticket = admitted->ticket;
  submit.tokens = RandomPrompt(3, 100);
  const absl::Status handed = ConnectPrefill(admitted->prefill_address, absl::Seconds(5))
                                  ->Submit(submit, [](const PrefillEvent&) { return true; });
  ASSERT_TRUE(handed.ok()) << handed;
  ASSERT_TRUE(cluster_->coordinator().Cancel(admitted->id, ticket->capability).ok());
  ExpectNothingHeld(absl::Seconds(3));
}

TEST_F(CancelTest, NobodyListens_RequestIsCancelledAfterTheDetachTimeout) {
  ClusterSpec spec;
  spec.decode_keys += "detach_timeout = \"100ms\"\n";
  ASSERT_NO_FATAL_FAILURE(StartCluster(spec));
  const auto admitted = cluster_->coordinator().Admit(
      {.model = cluster_->model(), .tenant = "", .prompt_tokens = 100, .output_tokens_max = 1900,
       .fidelity = {}});
  ASSERT_TRUE(admitted.ok()) << admitted.status();
  SubmitRequest submit;
  submit.ticket = admitted->ticket;
  submit.tokens = RandomPrompt(4, 100);
  ASSERT_TRUE(ConnectPrefill(admitted->prefill_address, absl::Seconds(5))
                  ->Submit(submit, [](const PrefillEvent&) { return true; })
                  .ok());
  // Nobody attaches.
  ExpectNothingHeld(absl::Seconds(10));
  const auto requests = cluster_->coordinator().Requests();
  ASSERT_TRUE(requests.ok());
  ASSERT_EQ(requests->size(), 1u);
  const absl::Status told = Await(absl::Seconds(3), [&]() -> absl::Status {
    return cluster_->coordinator().Requests()->front().phase == RequestPhase::kCancelled
               ? absl::OkStatus()
               : absl::UnknownError("not cancelled yet");
  });
  EXPECT_TRUE(told.ok()) << told;
}

}  // namespace
}  // namespace kvt
