// PrefillApi and DecodeApi through gRPC: fields, streams, and what happens when one end goes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/limits.h"
#include "kernels/base/mutex.h"
#include "kvstore/wire/wire_rpc.h"
#include "tests/contract/rpc/freezing_relay.h"
#include "tests/contract/rpc/recording_apis.h"

namespace kvt {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(10);

SignedTicket FullTicket(char c) {
  return SignedTicket{.payload = std::string("\0\xff", 2) + c, .signature = std::string(64, c)};
}

PrefillFigures FullPrefillFigures() {
  return PrefillFigures{.prompt_tokens = 1, .reused_tokens = 2, .computed_tokens = 3,
                        .pulled_bytes = 4, .pull_bursts = 5, .disk_blocks = 12, .disk_bytes = 13,
                        .declined_tokens = 14, .declined = "disk of store-0", .pushed_bytes = 6, .push_bursts = 7,
                        .saturated_values = 8, .queued = absl::Nanoseconds(9),
                        .compute = absl::Nanoseconds(10), .hand_over = absl::Nanoseconds(11)};
}

void ExpectSame(const PrefillFigures& a, const PrefillFigures& b) {
  EXPECT_EQ(a.prompt_tokens, b.prompt_tokens);
  EXPECT_EQ(a.reused_tokens, b.reused_tokens);
  EXPECT_EQ(a.computed_tokens, b.computed_tokens);
  EXPECT_EQ(a.pulled_bytes, b.pulled_bytes);
  EXPECT_EQ(a.pull_bursts, b.pull_bursts);
  EXPECT_EQ(a.pushed_bytes, b.pushed_bytes);
  EXPECT_EQ(a.push_bursts, b.push_bursts);
  EXPECT_EQ(a.saturated_values, b.saturated_values);
  EXPECT_EQ(a.queued, b.queued);
  EXPECT_EQ(a.compute, b.compute);
  EXPECT_EQ(a.hand_over, b.hand_over);
  EXPECT_EQ(a.disk_blocks, b.disk_blocks);
  EXPECT_EQ(a.disk_bytes, b.disk_bytes);
  EXPECT_EQ(a.declined_tokens, b.declined_tokens);
  EXPECT_EQ(a.declined, b.declined);
}

void ExpectSame(const SignedTicket& a, const SignedTicket& b) {
  EXPECT_EQ(a.payload, b.payload);
  EXPECT_EQ(a.signature, b.signature);
}

const SamplingParams kSampling{.temperature = 0.7, .top_k = 40, .top_p = 0.95, .seed = UINT64_MAX};

class WorkerRpc : public ::testing::Test {
 protected:
  void SetUp() override {
    auto prefill = ServePrefill(prefill_api_, "127.0.0.1:0");
    auto decode = ServeDecode(decode_api_, "127.0.0.1:0");
    ASSERT_TRUE(prefill.ok() && decode.ok());
    prefill_server_ = *std::move(prefill);
    decode_server_ = *std::move(decode);
    decode_address_ = absl::StrCat("127.0.0.1:", decode_server_->port());
    prefill_ = ConnectPrefill(absl::StrCat("127.0.0.1:", prefill_server_->port()), kTimeout);
    decode_ = ConnectDecode(decode_address_, kTimeout);
  }
  RecordingPrefill prefill_api_;
  RecordingDecode decode_api_;
  std::unique_ptr<RpcServer> prefill_server_;
  std::unique_ptr<RpcServer> decode_server_;
  std::string decode_address_;
  std::unique_ptr<PrefillApi> prefill_;
  std::unique_ptr<DecodeApi> decode_;
};

TEST_F(WorkerRpc, Submit_CarriesEveryFieldAndEveryEventInOrder) {
  prefill_api_.events = {
      PrefillEvent{.kind = PrefillEvent::Kind::kProgress, .tokens_done = 512, .token = 0,
                   .decode_address = "", .decode_worker = "", .ticket = {}, .figures = {}},
      PrefillEvent{.kind = PrefillEvent::Kind::kFirstToken, .tokens_done = 0, .token = -7,
                   .decode_address = "", .decode_worker = "", .ticket = {}, .figures = {}},
      PrefillEvent{.kind = PrefillEvent::Kind::kHandedOver, .tokens_done = 0, .token = 0,
                   .decode_address = "d:1", .decode_worker = "decode-0",
                   .ticket = FullTicket('t'), .figures = FullPrefillFigures()}};
  const SubmitRequest request{.ticket = FullTicket('s'), .tokens = {1, -2, INT32_MAX, 0},
                              .sampling = kSampling, .stop_tokens = {2, 3}};
  std::vector<PrefillEvent> got;
  const absl::Status status = prefill_->Submit(request, [&](const PrefillEvent& event) {
    got.push_back(event);
    return true;
  });
  EXPECT_TRUE(status.ok()) << status;
  ExpectSame(prefill_api_.submit_request.ticket, request.ticket);
  EXPECT_EQ(prefill_api_.submit_request.tokens, request.tokens);
  EXPECT_EQ(prefill_api_.submit_request.sampling, request.sampling);
  EXPECT_EQ(prefill_api_.submit_request.stop_tokens, request.stop_tokens);
  ASSERT_EQ(got.size(), 3u);
  EXPECT_EQ(got[0].kind, PrefillEvent::Kind::kProgress);
  EXPECT_EQ(got[0].tokens_done, 512u);
  EXPECT_EQ(got[1].kind, PrefillEvent::Kind::kFirstToken);
  EXPECT_EQ(got[1].token, -7);
  EXPECT_EQ(got[2].kind, PrefillEvent::Kind::kHandedOver);
  EXPECT_EQ(got[2].decode_address, "d:1");
  EXPECT_EQ(got[2].decode_worker, "decode-0");
  ExpectSame(got[2].ticket, FullTicket('t'));
  ExpectSame(got[2].figures, FullPrefillFigures());
}

TEST_F(WorkerRpc, ResumeAndHandOver_CarryEveryField) {
  const ResumeRequest resume{.ticket = FullTicket('r'), .tokens = {4, 5, 6}, .prompt_tokens = 2,
                             .sampling = kSampling, .stop_tokens = {9},
                             .approximate_tokens = 3, .provenance = Provenance::kBase};
  EXPECT_TRUE(prefill_->Resume(resume).ok());
  EXPECT_EQ(prefill_api_.resume_request.approximate_tokens, 3u);
  EXPECT_EQ(prefill_api_.resume_request.provenance, Provenance::kBase);
  ExpectSame(prefill_api_.resume_request.ticket, resume.ticket);
  EXPECT_EQ(prefill_api_.resume_request.tokens, resume.tokens);
  EXPECT_EQ(prefill_api_.resume_request.prompt_tokens, 2u);
  EXPECT_EQ(prefill_api_.resume_request.sampling, kSampling);
  EXPECT_EQ(prefill_api_.resume_request.stop_tokens, resume.stop_tokens);

  const HandOverRequest hand_over{.ticket = FullTicket('h'), .tokens = {1, 2}, .prompt_tokens = 2,
                                  .next_token = -3, .sampling = kSampling, .stop_tokens = {7, 8},
                                  .figures = FullPrefillFigures(),
                                  .approximate_tokens = 2,
                                  .provenance = Provenance::kSparse,
                                  .selections = {{1, 5, 8191}, {}, {0}},
                                  .calibration_id = "0123456789abcdef"};
  EXPECT_TRUE(decode_->HandOver(hand_over).ok());
  const HandOverRequest& got = decode_api_.hand_over_request;
  ExpectSame(got.ticket, hand_over.ticket);
  EXPECT_EQ(got.tokens, hand_over.tokens);
  EXPECT_EQ(got.prompt_tokens, 2u);
  EXPECT_EQ(got.next_token, -3);
  EXPECT_EQ(got.sampling, kSampling);
  EXPECT_EQ(got.stop_tokens, hand_over.stop_tokens);
  ExpectSame(got.figures, hand_over.figures);
  EXPECT_EQ(got.selections, hand_over.selections);
  EXPECT_EQ(got.calibration_id, hand_over.calibration_id);
  EXPECT_EQ(got.approximate_tokens, 2u);
  EXPECT_EQ(got.provenance, Provenance::kSparse);
}

TEST_F(WorkerRpc, HandOver_WithASelectionOutOfBounds_IsRefusedNamingTheField) {
  const auto refusal = [&](const HandOverRequest& request) {
    decode_api_.hand_over_request.prompt_tokens = 77;
    const absl::Status status = decode_->HandOver(request);
    EXPECT_EQ(decode_api_.hand_over_request.prompt_tokens, 77u) << "it reached the worker";
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  };
  HandOverRequest request;
  request.selections = {{3}, {1, 1}};
  EXPECT_THAT(refusal(request), ::testing::HasSubstr("hand_over.selections[1]: block 1"));
  request.selections = {{4, 2}};
  EXPECT_THAT(refusal(request), ::testing::HasSubstr("hand_over.selections[0]: block 2"));
  request.selections = {{-1}};
  EXPECT_THAT(refusal(request), ::testing::HasSubstr("block -1"));
  request.selections = {{kSequenceBlocksMax}};
  EXPECT_THAT(refusal(request), ::testing::HasSubstr("block 8192"));
  request.selections.assign(257, {});
  EXPECT_THAT(refusal(request), ::testing::HasSubstr("257 layers"));
  request.selections.clear();
  request.calibration_id = std::string(65, 'a');
  EXPECT_THAT(refusal(request), ::testing::HasSubstr("hand_over.calibration_id: 65 bytes"));
  request.calibration_id.clear();
  request.approximate_tokens = 1;
  EXPECT_THAT(refusal(request), ::testing::HasSubstr("hand_over.approximate_tokens: 1 of 0 tokens"));
  request.approximate_tokens = 0;
  request.provenance = static_cast<Provenance>(3);
  EXPECT_THAT(refusal(request), ::testing::HasSubstr("hand_over.provenance: unknown value 3"));
}

TEST_F(WorkerRpc, Attach_CarriesEveryFieldAndTheLastEventsFigures) {
  TokenEvent last;
  last.tokens = {3};
  last.finish = FinishReason::kStop;
  last.figures = DecodeFigures{.output_tokens = 1, .pulled_bytes = 2, .pull_bursts = 3,
                               .blocks_pulled = 4, .disk_blocks = 13, .disk_bytes = 14,
                               .block_bytes = 5, .write_back_bytes = 6,
                               .prompt_tokens_computed = 7, .recomputed_suffixes = 8,
                               .computed = {.exact = 9, .base = 10, .sparse = 11},
                               .admission = absl::Nanoseconds(12), .offloaded = true,
                               .sequence_bytes = 15, .admission_bytes = 16, .digest_bytes = 17,
                               .selected_blocks = 18, .hot_misses = 19, .sparse_steps = 20};
  last.prefill = FullPrefillFigures();
  TokenEvent first;
  first.tokens = {1, 2};
  decode_api_.events = {first, TokenEvent{}, last};
  std::vector<TokenEvent> got;
  const AttachRequest request{
      .id = TicketId(UINT64_MAX), .capability = std::string("\0\xff", 2), .from_token = 17};
  const absl::Status status = decode_->Attach(request, [&](const TokenEvent& event) {
    got.push_back(event);
    return true;
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(decode_api_.attach_request.id, request.id);
  EXPECT_EQ(decode_api_.attach_request.capability, request.capability);
  EXPECT_EQ(decode_api_.attach_request.from_token, 17u);
  ASSERT_EQ(got.size(), 3u);
  EXPECT_EQ(got[0].tokens, first.tokens);
  EXPECT_TRUE(got[1].tokens.empty());
  EXPECT_EQ(got[2].finish, FinishReason::kStop);
  const DecodeFigures& figures = got[2].figures;
  EXPECT_EQ(std::vector<uint64_t>({figures.output_tokens, figures.pulled_bytes, figures.pull_bursts,
                                   figures.blocks_pulled, figures.block_bytes,
                                   figures.write_back_bytes, figures.prompt_tokens_computed,
                                   figures.recomputed_suffixes, figures.computed.exact,
                                   figures.computed.base, figures.computed.sparse,
                                   figures.disk_blocks, figures.disk_bytes,
                                   figures.sequence_bytes, figures.admission_bytes,
                                   figures.digest_bytes, figures.selected_blocks,
                                   figures.hot_misses, figures.sparse_steps}),
            std::vector<uint64_t>({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 14, 15, 16, 17, 18, 19,
                                   20}));
  EXPECT_TRUE(figures.offloaded);
  EXPECT_EQ(figures.admission, absl::Nanoseconds(12));
  ExpectSame(got[2].prefill, FullPrefillFigures());
}

TEST_F(WorkerRpc, StreamThatFails_KeepsCodeMessageAndEarlierEvents) {
  decode_api_.events = {TokenEvent{.tokens = {1}, .finish = {}, .figures = {}, .prefill = {}}};
  decode_api_.failure = absl::NotFoundError("ticket 7 is unknown here");
  int events = 0;
  const absl::Status status = decode_->Attach({}, [&](const TokenEvent&) { return ++events > 0; });
  EXPECT_EQ(status, decode_api_.failure);
  EXPECT_EQ(events, 1);
  prefill_api_.failure = absl::FailedPreconditionError("wrong geometry");
  EXPECT_EQ(prefill_->Submit({}, [](const PrefillEvent&) { return true; }), prefill_api_.failure);
  EXPECT_EQ(prefill_->Cancel(TicketId(1), "c"), prefill_api_.failure);
  EXPECT_EQ(decode_->Cancel(TicketId(2), "d"), decode_api_.failure);
  EXPECT_EQ(prefill_api_.cancel_id, TicketId(1));
  EXPECT_EQ(decode_api_.cancel_capability, "d");
}

// Streams empty events until the receiver is gone, as the contract asks of an idle stream.
absl::Status StreamUntilGone(const TokenSink& sink, std::atomic<bool>* ended) {
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  while (absl::Now() < deadline) {
    if (!sink(TokenEvent{})) {
      *ended = true;
      return absl::OkStatus();
    }
    std::this_thread::yield();
  }
  return absl::DeadlineExceededError("the receiver was never seen to go");
}

TEST_F(WorkerRpc, SinkThatReturnsFalse_EndsBothSides) {
  std::atomic<bool> ended{false};
  decode_api_.on_stream = [&](const TokenSink& sink) { return StreamUntilGone(sink, &ended); };
  int events = 0;
  const absl::Status status = decode_->Attach({}, [&](const TokenEvent&) { return ++events < 3; });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(events, 3);
  decode_server_.reset();  // joins the handler
  EXPECT_TRUE(ended);
}

TEST_F(WorkerRpc, ServerThatStopsDuringAStream_IsUnavailableNamingIt) {
  std::atomic<bool> ended{false};
  std::atomic<bool> streaming{false};
  decode_api_.on_stream = [&](const TokenSink& sink) {
    streaming = true;
    return StreamUntilGone(sink, &ended);
  };
  std::thread stopper([&] {
    const absl::Time deadline = absl::Now() + absl::Seconds(10);
    while (!streaming && absl::Now() < deadline) std::this_thread::yield();
    decode_server_->Shutdown(absl::Milliseconds(50));
  });
  const absl::Time began = absl::Now();
  const absl::Status status = decode_->Attach({}, [](const TokenEvent&) { return true; });
  stopper.join();
  EXPECT_TRUE(ended);
  EXPECT_TRUE(absl::IsUnavailable(status) || absl::IsCancelled(status)) << status;
  EXPECT_LT(absl::Now() - began, absl::Seconds(10));
}

TEST_F(WorkerRpc, StreamToAPeerThatStops_EndsOnBothSidesWithinTenSeconds) {
  std::atomic<bool> ended{false};
  Mutex pause;
  CondVar never;
  decode_api_.on_stream = [&](const TokenSink& sink) {
    const absl::Time deadline = absl::Now() + absl::Seconds(20);
    bool going = sink(TokenEvent{});
    while (going && absl::Now() < deadline) {
      MutexLock lock(pause);
      never.WaitFor(pause, absl::Milliseconds(10));  // an idle stream: events now and then
      going = sink(TokenEvent{});
    }
    ended = !going;
    return absl::OkStatus();
  };
  FreezingRelay relay(decode_server_->port());
  const auto decode = ConnectDecode(absl::StrCat("127.0.0.1:", relay.port()), kTimeout);
  int events = 0;
  const absl::Time began = absl::Now();
  const absl::Status status = decode->Attach({}, [&](const TokenEvent&) {
    if (++events == 3) relay.Freeze();
    return true;
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_LT(absl::Now() - began, absl::Seconds(12));
  const absl::Time deadline = absl::Now() + absl::Seconds(10);
  while (!ended && absl::Now() < deadline) std::this_thread::yield();
  EXPECT_TRUE(ended);
}

TEST_F(WorkerRpc, LongestPrompt_FitsIntoAMessage) {
  SubmitRequest request;
  request.tokens.assign(kSequenceTokensMax, INT32_MIN);  // 10 bytes each on the wire
  EXPECT_TRUE(prefill_->Submit(request, [](const PrefillEvent&) { return true; }).ok());
  EXPECT_EQ(prefill_api_.submit_request.tokens.size(), size_t{kSequenceTokensMax});
}

TEST_F(WorkerRpc, OversizedMessage_IsRefusedAndTheServerGoesOn) {
  SubmitRequest request;
  request.tokens.assign(size_t{kControlMessageBytesMax} / 10 + 1000, INT32_MIN);
  const absl::Status status = prefill_->Submit(request, [](const PrefillEvent&) { return true; });
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_TRUE(prefill_->Resume({}).ok());
}

TEST_F(WorkerRpc, ManyStreamsAtOnce_AllRun) {
  std::atomic<int> running{0};
  decode_api_.on_stream = [&](const TokenSink& sink) {
    ++running;
    const absl::Time deadline = absl::Now() + absl::Seconds(30);
    while (running < 32 && absl::Now() < deadline) {
      if (!sink(TokenEvent{})) return absl::CancelledError("receiver gone");
      std::this_thread::yield();
    }
    return running >= 32 ? absl::OkStatus() : absl::InternalError("streams waited for each other");
  };
  std::vector<std::thread> threads;
  std::atomic<int> good{0};
  for (int i = 0; i < 32; ++i) {
    threads.emplace_back([&] {
      good += decode_->Attach({}, [](const TokenEvent&) { return true; }).ok() ? 1 : 0;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(good, 32);
}

}  // namespace
}  // namespace kvt
