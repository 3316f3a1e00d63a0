#include "coordinator/ctl/generate_session.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <set>
#include <thread>

#include "absl/strings/str_cat.h"
#include "coordinator/coordinator_service.h"
#include "tests/contract/rpc/recording_apis.h"
#include "tests/unit/coordinator/core/cluster_fixture.h"

namespace kvt::ctl {
namespace {

// Lends an implementation to a session that wants to own one.
class BorrowedPrefill final : public PrefillApi {
 public:
  explicit BorrowedPrefill(PrefillApi& api) : api_(api) {}
  absl::Status Submit(const SubmitRequest& request, const PrefillSink& sink) override {
    return api_.Submit(request, sink);
  }
  absl::Status Resume(const ResumeRequest& request) override { return api_.Resume(request); }
  absl::Status Cancel(TicketId id, const std::string& capability) override {
    return api_.Cancel(id, capability);
  }

 private:
  PrefillApi& api_;
};
class BorrowedDecode final : public DecodeApi {
 public:
  explicit BorrowedDecode(DecodeApi& api) : api_(api) {}
  absl::Status HandOver(const HandOverRequest& request) override { return api_.HandOver(request); }
  absl::Status Attach(const AttachRequest& request, const TokenSink& sink) override {
    return api_.Attach(request, sink);
  }
  absl::Status Cancel(TicketId id, const std::string& capability) override {
    return api_.Cancel(id, capability);
  }

 private:
  DecodeApi& api_;
};

TokenEvent Tokens(std::vector<int32_t> tokens, FinishReason finish = FinishReason::kRunning) {
  TokenEvent event;
  event.tokens = std::move(tokens);
  event.finish = finish;
  return event;
}

class GenerateSession_ : public ::testing::Test {
 protected:
  GenerateSession_()
      : coordinator_(CoordinatorCoreOptions{}, clock_, absl::FromUnixSeconds(1'900'000'000),
                     TicketSigner::Generate()) {}
  void SetUp() override {
    for (const NodeKind kind : {NodeKind::kStore, NodeKind::kPrefill, NodeKind::kDecode}) {
      const std::string name = absl::StrCat("node-", static_cast<int>(kind));
      ASSERT_TRUE(coordinator_.Register(TestNode(kind, name)).ok());
    }
    PrefillEvent first;
    first.kind = PrefillEvent::Kind::kFirstToken;
    first.token = 11;
    PrefillEvent handed;
    handed.kind = PrefillEvent::Kind::kHandedOver;
    handed.decode_address = "node-2:1";
    handed.decode_worker = "node-2";
    handed.figures.prompt_tokens = 4;
    handed.figures.reused_tokens = 3;
    prefill_.events = {first, handed};
  }
  WorkerConnector Connector() {
    return {.prefill =
                [&](absl::string_view at) {
                  connected_.insert(std::string(at));
                  return std::make_unique<BorrowedPrefill>(prefill_);
                },
            .decode =
                [&](absl::string_view at) {
                  connected_.insert(std::string(at));
                  return std::make_unique<BorrowedDecode>(decode_);
                }};
  }
  absl::Status Run(GenerateSession& session) {
    const GenerateRequest request{.model = "smol", .tenant = "", .tokens = {1, 2, 3, 4},
                                  .output_tokens_max = 8, .fidelity = Fidelity::kExact,
                                  .sampling = {}, .stop_tokens = {2}};
    return session.Run(request, [&](int32_t token) { shown_.push_back(token); }, &result_);
  }
  uint64_t Cancelled() { return coordinator_.Status()->cancelled; }

  ManualClock clock_;
  CoordinatorService coordinator_;
  RecordingPrefill prefill_;
  RecordingDecode decode_;
  std::set<std::string> connected_;
  std::vector<int32_t> shown_;
  GenerateResult result_;
};

TEST_F(GenerateSession_, WholeLife_ShowsEachTokenOnceAndKeepsTheFigures) {
  TokenEvent last = Tokens({14}, FinishReason::kLength);
  last.figures.pulled_bytes = 77;
  decode_.events = {Tokens({11, 12}), Tokens({}), Tokens({13}), last};
  GenerateSession session(coordinator_, Connector(), clock_);
  ASSERT_TRUE(Run(session).ok());
  EXPECT_EQ(shown_, (std::vector<int32_t>{11, 12, 13, 14}));
  EXPECT_EQ(result_.tokens, shown_);
  EXPECT_EQ(result_.finish, FinishReason::kLength);
  EXPECT_EQ(result_.prefill.reused_tokens, 3u);
  EXPECT_EQ(result_.decode.pulled_bytes, 77u);
  EXPECT_EQ(result_.prefill_worker, "node-1");
  EXPECT_EQ(result_.decode_worker, "node-2");
  EXPECT_EQ(connected_, (std::set<std::string>{"node-1:1", "node-2:1"}));
  EXPECT_EQ(prefill_.submit_request.tokens, (std::vector<int32_t>{1, 2, 3, 4}));
  EXPECT_EQ(decode_.attach_request.from_token, 0u);
  EXPECT_EQ(decode_.attach_request.id, result_.id);
  EXPECT_EQ(decode_.attach_request.capability.size(), 16u);
}

TEST_F(GenerateSession_, Times_AreOfTheClock) {
  prefill_.on_stream = nullptr;
  decode_.on_stream = [&](const TokenSink& sink) {
    sink(Tokens({11}));
    clock_.Advance(absl::Milliseconds(30));
    sink(Tokens({12}));
    clock_.Advance(absl::Milliseconds(10));
    sink(Tokens({13}));
    clock_.Advance(absl::Milliseconds(10));
    sink(Tokens({14}, FinishReason::kStop));
    return absl::OkStatus();
  };
  GenerateSession session(coordinator_, Connector(), clock_);
  ASSERT_TRUE(Run(session).ok());
  EXPECT_EQ(result_.first_token, absl::ZeroDuration());
  EXPECT_EQ(result_.second_token, absl::Milliseconds(30));
  EXPECT_EQ(result_.last_token, absl::Milliseconds(50));
  EXPECT_EQ(result_.PerToken(), absl::Milliseconds(50) / 3);
}

TEST_F(GenerateSession_, RefusedAdmission_IsItsStatusAndConnectsNobody) {
  GenerateSession session(coordinator_, Connector(), clock_);
  const GenerateRequest request{.model = "gpt", .tenant = "", .tokens = {1}, .output_tokens_max = 1,
                                .fidelity = {}, .sampling = {}, .stop_tokens = {}};
  const absl::Status status = session.Run(request, [](int32_t) {}, &result_);
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_FALSE(session.IsAdmitted());
  EXPECT_TRUE(connected_.empty());
}

TEST_F(GenerateSession_, PrefillThatFails_KeepsItsStatus) {
  prefill_.events.clear();
  prefill_.failure = absl::ResourceExhaustedError("store-0 is full");
  GenerateSession session(coordinator_, Connector(), clock_);
  EXPECT_EQ(Run(session), prefill_.failure);
}

TEST_F(GenerateSession_, PrefillThatDies_IsUnavailableNamingItAndTheTokens) {
  prefill_.events.clear();
  prefill_.failure = absl::UnavailableError("connection reset");
  GenerateSession session(coordinator_, Connector(), clock_);
  const absl::Status status = Run(session);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(Contains(status, "prefill worker node-1 was lost after 0 output tokens")) << status;
}

TEST_F(GenerateSession_, BrokenStream_IsAttachedAgainFromWhereItWas) {
  int attaches = 0;
  std::vector<uint64_t> from;
  decode_.on_stream = [&](const TokenSink& sink) {
    from.push_back(decode_.attach_request.from_token);
    if (++attaches == 1) {
      sink(Tokens({11, 12}));
      return absl::UnavailableError("connection reset");
    }
    sink(Tokens({13}, FinishReason::kStop));
    return absl::OkStatus();
  };
  GenerateSession session(coordinator_, Connector(), clock_);
  ASSERT_TRUE(Run(session).ok());
  EXPECT_EQ(shown_, (std::vector<int32_t>{11, 12, 13}));
  EXPECT_EQ(from, (std::vector<uint64_t>{0, 2}));
}

TEST_F(GenerateSession_, DecodeThatDies_IsUnavailableAfterBoundedAttempts) {
  int attaches = 0;
  decode_.on_stream = [&](const TokenSink& sink) {
    if (++attaches == 1) sink(Tokens({11, 12}));
    return absl::UnavailableError("connection refused");
  };
  GenerateSession session(coordinator_, Connector(), clock_);
  const absl::Status status = Run(session);
  EXPECT_TRUE(Contains(status, "decode worker node-2 was lost after 2 output tokens")) << status;
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_LE(attaches, 5);
  EXPECT_EQ(result_.tokens, (std::vector<int32_t>{11, 12}));
}

TEST_F(GenerateSession_, DecodeThatTellsAnotherFirstToken_IsInternal) {
  decode_.events = {Tokens({99, 12})};
  GenerateSession session(coordinator_, Connector(), clock_);
  EXPECT_EQ(Run(session).code(), absl::StatusCode::kInternal);
  EXPECT_EQ(shown_, std::vector<int32_t>{11});
}

TEST_F(GenerateSession_, StreamThatEndsWithoutAReason_IsInternal) {
  decode_.events = {Tokens({11})};
  GenerateSession session(coordinator_, Connector(), clock_);
  EXPECT_EQ(Run(session).code(), absl::StatusCode::kInternal);
  prefill_.events.clear();
  GenerateSession again(coordinator_, Connector(), clock_);
  result_ = {};
  EXPECT_EQ(Run(again).code(), absl::StatusCode::kInternal);
}

TEST_F(GenerateSession_, CancelDuringDecode_ReachesAllThreeAndEndsAsCancelled) {
  std::atomic<bool> streaming{false};
  std::atomic<bool> stop{false};
  decode_.on_stream = [&](const TokenSink& sink) {
    sink(Tokens({11}));
    streaming = true;
    while (!stop) std::this_thread::yield();
    sink(Tokens({}, FinishReason::kCancelled));
    return absl::OkStatus();
  };
  GenerateSession session(coordinator_, Connector(), clock_);
  std::string cancelled;
  std::thread canceller([&] {
    while (!streaming) std::this_thread::yield();
    cancelled = session.Cancel();
    stop = true;
  });
  const absl::Status status = Run(session);
  canceller.join();
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(result_.finish, FinishReason::kCancelled);
  EXPECT_EQ(cancelled, "node-2, node-1, coordinator");
  EXPECT_EQ(decode_.cancel_id, result_.id);
  EXPECT_EQ(prefill_.cancel_id, result_.id);
  EXPECT_EQ(decode_.cancel_capability, decode_.attach_request.capability);
  EXPECT_EQ(Cancelled(), 1u);
}

TEST_F(GenerateSession_, CancelDuringPrefill_ReachesPrefillAndCoordinator) {
  prefill_.events.clear();
  std::atomic<bool> submitted{false};
  std::atomic<bool> stop{false};
  prefill_.on_stream = [&](const PrefillSink&) {
    submitted = true;
    while (!stop) std::this_thread::yield();
    return absl::CancelledError("cancelled");
  };
  GenerateSession session(coordinator_, Connector(), clock_);
  std::string cancelled;
  std::thread canceller([&] {
    while (!submitted) std::this_thread::yield();
    cancelled = session.Cancel();
    stop = true;
  });
  EXPECT_EQ(Run(session).code(), absl::StatusCode::kCancelled);
  canceller.join();
  EXPECT_EQ(cancelled, "node-1, coordinator");
  EXPECT_EQ(Cancelled(), 1u);
}

TEST_F(GenerateSession_, CancelBeforeAdmission_IsCarriedOutOnceAdmitted) {
  GenerateSession session(coordinator_, Connector(), clock_);
  EXPECT_EQ(session.Cancel(), "");
  EXPECT_EQ(Run(session).code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(Cancelled(), 1u);
  EXPECT_TRUE(prefill_.submit_request.tokens.empty());
}

TEST_F(GenerateSession_, CancelDuringTheHandOver_ReachesTheDecodeWorkerToo) {
  GenerateSession session(coordinator_, Connector(), clock_);
  const std::vector<PrefillEvent> events = prefill_.events;
  prefill_.events.clear();
  prefill_.on_stream = [&](const PrefillSink& sink) {
    session.Cancel();  // before the front end was told the decode worker
    for (const PrefillEvent& event : events) sink(event);
    return absl::OkStatus();
  };
  decode_.events = {Tokens({}, FinishReason::kCancelled)};
  EXPECT_TRUE(Run(session).ok());
  EXPECT_EQ(decode_.cancel_id, result_.id);
  EXPECT_EQ(result_.finish, FinishReason::kCancelled);
}

}  // namespace
}  // namespace kvt::ctl
