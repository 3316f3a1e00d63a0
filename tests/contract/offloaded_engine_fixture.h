// The decode engine over real stores in this process, for tests of the offloaded class. The prompt's KV
// is computed here and pushed as a prefill worker does; answers are compared with one sequence decoded
// alone over the same selected sets.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <future>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "decode_worker/engine/decode_engine.h"
#include "kernels/base/random.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/model/digest_selector.h"
#include "kernels/model/model_config.h"
#include "kernels/model/text_run.h"
#include "kernels/ops.h"
#include "kernels/select/attention_stats.h"
#include "kvstore/client/call_pool.h"
#include "tests/contract/rpc/recording_apis.h"
#include "tests/support/model_folder.h"
#include "tests/support/random_model.h"
#include "tests/support/test_store.h"
#include "tests/support/tier_worker.h"

namespace kvt {

inline constexpr uint64_t kSeed = 20261201;
inline constexpr char kSecret[] = "0123456789abcdef0123456789abcdef";
inline constexpr char kCapability[] = "fedcba9876543210";
inline constexpr int kPrompt = 800;
inline constexpr int kOutput = 40;
inline constexpr int kBudget = kSinkTokens + kRecentTokens + 8 * kBlockTokens;

inline int32_t ArgMax(absl::Span<const float> logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

class OffloadedEngineTest : public testing::Test {
 protected:
  // What a prefill worker would do with a resumed request.
  class ResumingPrefill final : public PrefillApi {
   public:
    explicit ResumingPrefill(OffloadedEngineTest& test) : test_(test) {}
    absl::Status Submit(const SubmitRequest&, const PrefillSink&) override {
      return absl::UnimplementedError("");
    }
    absl::Status Resume(const ResumeRequest& request) override {
      if (test_.was_resumed_.exchange(true)) return absl::InternalError("resumed twice");
      test_.resumed_.set_value(request);
      return absl::OkStatus();
    }
    absl::Status Cancel(TicketId, const std::string&) override { return absl::OkStatus(); }

   private:
    OffloadedEngineTest& test_;
  };

  OffloadedEngineTest() {
    WriteRandomModel(RandomModelSpecs()[1], folder_.path());
    device_ = MakeCpuDevice({.threads = 2}).value();
    transformer_ = Transformer::Load(folder_.path(), *device_, {}).value();
    layers_ = transformer_->geometry().layers;
    model_.name = "random";
    model_.fingerprint = "f00d";
    model_.numerics_id = "n1";
    model_.geometry = transformer_->geometry();
    domain_ = {.cluster_secret = kSecret,
               .model_fingerprint = model_.fingerprint,
               .numerics_id = model_.numerics_id,
               .geometry = model_.geometry,
               .tenant = {},
               .salt = {}};
    MakeCalibration();
    source_ = TextRun::Create(*transformer_, kPrompt + kOutput + kBlockTokens).value();
    Random random(kSeed);
    for (int i = 0; i < kPrompt; ++i) prompt_.push_back(Token(random));
  }
  ~OffloadedEngineTest() override {
    if (engine_ != nullptr) {
      engine_->Stop();
      engine_thread_.join();
      EXPECT_EQ(engine_->Load().slots_free, engine_->Load().slots_total);
      EXPECT_TRUE(Eventually([this] { return Held() == 0; })) << Held();
    }
    engine_.reset();
    if (control_ != nullptr) control_->Stop();
    if (reports_ != nullptr) reports_->Stop();
  }

  int32_t Token(Random& random) const {
    return static_cast<int32_t>(3 + random.Below(static_cast<uint64_t>(transformer_->config().vocab - 3)));
  }
  // Layer 1 selects by both heads, layer 0 by one.
  void MakeCalibration() {
    calibration_.model = model_.fingerprint;
    calibration_.geometry = model_.geometry;
    calibration_.layers.resize(static_cast<size_t>(layers_));
    const std::vector<std::vector<int>> heads = {{0}, {0, 1}};
    for (size_t l = 0; l < heads.size(); ++l) {
      for (const int head : heads[l]) {
        CalibrationHead& h = calibration_.layers[l].heads.emplace_back();
        h.kv_head = head;
        h.offset.assign(static_cast<size_t>(model_.geometry.head_dim), 0.02f);
        h.scale.assign(static_cast<size_t>(model_.geometry.head_dim), 0.2f);
      }
    }
    layout_.emplace(DigestLayout::Create(calibration_.Id(), calibration_.DigestBytesByLayer()).value());
  }

  std::unique_ptr<TierWorker> NewTier(const std::string& name, const ModelInfo& model);

  void Start(OffloadBudget budget, int stores = 2, uint64_t arena_bytes = 64 * kMiB,
             uint32_t slots = 2000, bool calibrated = true);

  HeldTicket NewTicket(uint64_t id, uint64_t epoch = 1);

  // Pushes blocks under the ticket until they are sealed; planes by (block, layer).
  using Planes = std::pair<const std::byte*, const std::byte*>;
  static void Push(TierWorker& tier, const HeldTicket& ticket, absl::Span<const TierBlock> names,
                   int layers, const std::function<Planes(int block, int layer)>& at);
  // KV of `tokens` computed by full attention, its planes and (if wanted) digests in the tier; the next
  // token.
  int32_t Prefill(const HeldTicket& ticket, const std::vector<int32_t>& tokens, bool with_digests);
  HandOverRequest Request(const HeldTicket& ticket, const std::vector<int32_t>& tokens, int32_t next) {
    HandOverRequest request;
    request.ticket = ticket.signed_ticket;
    request.tokens = tokens;
    request.prompt_tokens = kPrompt;
    request.next_token = next;
    return request;
  }
  absl::Status HandOver(const HeldTicket& ticket, const HandOverRequest& request) {
    return engine_->HandOver(ticket, domain_, request);
  }

  struct Answer {
    absl::Status status;
    std::vector<int32_t> tokens;
    FinishReason finish = FinishReason::kRunning;
    DecodeFigures figures;
  };
  Answer Read(TicketId id, const std::function<bool(const TokenEvent&)>& on_event = nullptr);
  std::vector<int32_t> ExpectedSparse(int32_t next, const OffloadBudget& budget);
  std::vector<int32_t> ExpectedFull(int32_t next);
  // Takes what room the stores have, under tickets of the prefill worker.
  void FillStores();
  void EmptyStores() {
    for (const TicketRef& ticket : fillers_) prefill_tier_->tier().Release(ticket);
  }
  // Of the engine's metrics; name as rendered, with its labels.
  double Metric(const std::string& name) const;
  // Reads the answer and has something happen on the way from three tokens on and again, until the
  // engine has lost and retried a miss by it.
  Answer ReadAndDisturb(TicketId id, const std::function<void(LoopbackFaults&)>& disturb);
  // Starts the engine with a hot set of one selection and hands a request of 260 tokens over; its answer
  // is disturbed so. `next`: its first token.
  Answer AnswerDisturbed(int32_t* next, const std::function<void(LoopbackFaults&)>& disturb);
  uint64_t Held() {
    uint64_t held = 0;
    for (auto& store : stores_) {
      const StoreStats stats = store->Stats();
      held += stats.pins + stats.in_flight + stats.output_reserved_blocks;
    }
    return held;
  }

  TempFolder folder_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Transformer> transformer_;
  int layers_ = 0;
  ModelInfo model_;
  KeyDomain domain_;
  Calibration calibration_;
  std::optional<DigestLayout> layout_;
  std::unique_ptr<TextRun> source_;  // the KV that is pushed
  std::vector<int32_t> prompt_;
  std::vector<std::vector<int32_t>> first_selection_;
  int output_ = kOutput;
  absl::Duration transfer_timeout_ = absl::Seconds(5);

  std::unique_ptr<TicketSigner> signer_ = TicketSigner::Generate();
  std::unique_ptr<Transport> transport_ = MakeTestTransport(TestPlane::kLoopback);
  std::vector<std::unique_ptr<TestStore>> stores_;
  ClusterView view_;
  std::unique_ptr<TierWorker> tier_, digest_tier_, prefill_tier_, prefill_digest_tier_;
  std::unique_ptr<KvCache> cache_;
  RecordingCoordinator coordinator_;
  std::unique_ptr<CallPool> control_, reports_;
  std::unique_ptr<TicketReporter> reporter_;
  std::vector<TicketRef> fillers_;
  std::promise<ResumeRequest> resumed_;
  std::atomic<bool> was_resumed_{false};
  ResumingPrefill prefill_{*this};
  MetricsRegistry registry_;
  DecodeMetrics metrics_{registry_};
  DecodeOptions options_;
  std::unique_ptr<DecodeEngine> engine_;
  std::thread engine_thread_;
};

inline OffloadBudget Sparse() { return {.tokens = kBudget, .hot_factor = 2, .fetch_share = 1}; }

}  // namespace kvt
