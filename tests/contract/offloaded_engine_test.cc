// The decode engine with requests of the offloaded class over real stores in this process: admission,
// misses, write-back, and what happens when a store is lost or a request is cancelled. The prompt's KV
// is computed here and pushed as a prefill worker does; answers are compared with one sequence decoded
// alone over the same selected sets.
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
namespace {

constexpr uint64_t kSeed = 20261201;
constexpr char kSecret[] = "0123456789abcdef0123456789abcdef";
constexpr char kCapability[] = "fedcba9876543210";
constexpr int kPrompt = 800;
constexpr int kOutput = 40;
constexpr int kBudget = kSinkTokens + kRecentTokens + 8 * kBlockTokens;

int32_t ArgMax(absl::Span<const float> logits) {
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

  std::unique_ptr<TierWorker> NewTier(const std::string& name, const ModelInfo& model) {
    TierClientConfig config;
    config.worker = name;
    config.worker_epoch = BootEpoch(1);
    config.model = model;
    config.options.transport = TierTransport::kUcx;
    config.options.breaker_pause = absl::Milliseconds(20);
    config.options.breaker_pause_max = absl::Milliseconds(100);
    config.transports = {transport_.get()};
    config.connect_store = [this](const std::string& address) -> std::shared_ptr<StoreApi> {
      for (auto& store : stores_) {
        if (store->name() == address) {
          return std::shared_ptr<StoreApi>(&store->gate(), [](StoreApi*) {});
        }
      }
      return nullptr;
    };
    auto worker = std::make_unique<TierWorker>(std::move(config), RealClock::Get());
    worker->tier().SetView(view_);
    EXPECT_TRUE(worker->tier().WaitConnected(absl::Seconds(20)).ok());
    return worker;
  }

  void Start(OffloadBudget budget, int stores = 2, uint64_t arena_bytes = 64 * kMiB,
             uint32_t slots = 2000) {
    for (int i = 0; i < stores; ++i) {
      stores_.push_back(std::make_unique<TestStore>(
          absl::StrCat("store-", i), TestStoreOptions{.arena_bytes = arena_bytes},
          signer_->PublicKey()));
      view_.stores.push_back(stores_.back()->ref());
    }
    view_.version = 1;
    tier_ = NewTier("decode", model_);
    ModelInfo digests = model_;
    digests.geometry = layout_->geometry();
    digest_tier_ = NewTier("decode/digest", digests);
    prefill_tier_ = NewTier("prefill", model_);
    prefill_digest_tier_ = NewTier("prefill/digest", digests);
    cache_ = KvCache::Create(*device_, model_.geometry,
                             {.slot_count = slots, .table_rows = 8, .blocks_per_row = 128})
                 .value();
    control_ = std::make_unique<CallPool>(2);
    reports_ = std::make_unique<CallPool>(1);
    reporter_ = std::make_unique<TicketReporter>(coordinator_, *reports_);
    options_.batch_max = 4;
    options_.offload = budget;
    DecodeEngineDeps deps;
    deps.node = "decode";
    deps.transformer = transformer_.get();
    deps.cache = cache_.get();
    deps.tier = &tier_->tier();
    deps.coordinator = &coordinator_;
    deps.control = control_.get();
    deps.reporter = reporter_.get();
    deps.connect_prefill = [this](const std::string&) {
      return std::shared_ptr<PrefillApi>(&prefill_, [](PrefillApi*) {});
    };
    deps.metrics = &metrics_;
    deps.clock = &RealClock::Get();
    deps.calibration = &calibration_;
    deps.digest_layout = &*layout_;
    deps.digest_tier = &digest_tier_->tier();
    engine_ = DecodeEngine::Create(options_, deps).value();
    engine_thread_ = std::thread([this] { engine_->Run(); });
  }

  HeldTicket NewTicket(uint64_t id, uint64_t epoch = 1) {
    HeldTicket held;
    held.ticket.id = TicketId(id);
    held.ticket.epoch = TicketEpoch(epoch);
    held.ticket.model = model_.name;
    held.ticket.model_fingerprint = model_.fingerprint;
    held.ticket.numerics_id = model_.numerics_id;
    held.ticket.stores = view_.stores;
    held.ticket.prompt_tokens = kPrompt;
    held.ticket.output_tokens_max = static_cast<uint32_t>(output_);
    held.ticket.fidelity = Fidelity::kSparse;
    held.ticket.request_class = RequestClass::kOffloaded;
    held.ticket.capability = kCapability;
    held.ticket.present_by_unix_ms = absl::ToUnixMillis(absl::Now()) + 60'000;
    held.signed_ticket = signer_->Sign(held.ticket);
    return held;
  }

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
  Answer Read(TicketId id, const std::function<bool(const TokenEvent&)>& on_event = nullptr) {
    Answer answer;
    const std::shared_ptr<TokenStream> stream = engine_->Stream(id);
    if (stream == nullptr) {
      answer.status = absl::NotFoundError("no stream");
      return answer;
    }
    answer.status = stream->Read(kCapability, 0, [&](const TokenEvent& event) {
      answer.tokens.insert(answer.tokens.end(), event.tokens.begin(), event.tokens.end());
      if (event.finish != FinishReason::kRunning) {
        answer.finish = event.finish;
        answer.figures = event.figures;
      }
      return on_event == nullptr || on_event(event);
    });
    return answer;
  }
  std::vector<int32_t> ExpectedSparse(int32_t next, const OffloadBudget& budget);
  std::vector<int32_t> ExpectedFull(int32_t next);
  // Takes what room the stores have, under tickets of the prefill worker.
  void FillStores() {
    uint64_t id = 1000;
    for (uint32_t blocks = 64; blocks > 0; blocks /= 2) {
      while (true) {
        const HeldTicket ticket = NewTicket(++id);
        if (!prefill_tier_->tier().Reserve(ticket, {}, blocks, ReserveMode::kAllOrNothing).ok()) break;
        fillers_.push_back(ticket.ref());
        ASSERT_LT(fillers_.size(), 1000u) << "a store without an end";
      }
    }
  }
  void EmptyStores() {
    for (const TicketRef& ticket : fillers_) prefill_tier_->tier().Release(ticket);
  }
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

void OffloadedEngineTest::Push(TierWorker& tier, const HeldTicket& ticket,
                               absl::Span<const TierBlock> names, int layers,
                               const std::function<Planes(int block, int layer)>& at) {
  auto reserved = tier.tier().Reserve(ticket, names, 0, ReserveMode::kAllOrNothing);
  ASSERT_TRUE(reserved.ok()) << reserved.status();
  std::vector<const std::byte*> base, residual;
  std::vector<int> blocks;
  for (size_t b = 0; b < names.size(); ++b) {
    if (reserved->already_sealed[b]) continue;
    blocks.push_back(static_cast<int>(b));
    for (int l = 0; l < layers; ++l) {
      base.push_back(at(static_cast<int>(b), l).first);
      residual.push_back(at(static_cast<int>(b), l).second);
    }
  }
  if (blocks.empty()) return;
  std::vector<PushBlock> list;
  for (size_t i = 0; i < blocks.size(); ++i) {
    list.push_back({.ticket = ticket.ref(),
                    .block = &reserved->blocks[static_cast<size_t>(blocks[i])],
                    .base = &base[i * static_cast<size_t>(layers)],
                    .residual = &residual[i * static_cast<size_t>(layers)]});
  }
  std::vector<TransferOutcome> outcomes(list.size());
  TransferWaiter waiter;
  tier.tier().Push({.blocks = list, .layer_begin = 0, .layer_end = layers,
                    .outcomes = absl::MakeSpan(outcomes), .done = waiter.Done()});
  ASSERT_EQ(waiter.Wait().blocks_ok, static_cast<int>(list.size()));
}

int32_t OffloadedEngineTest::Prefill(const HeldTicket& ticket, const std::vector<int32_t>& tokens,
                                     bool with_digests) {
  std::vector<std::vector<CalibrationHead>> heads;
  for (const CalibrationLayer& layer : calibration_.layers) heads.push_back(layer.heads);
  auto selector = DigestSelector::Create(*source_, calibration_.bits, heads).value();
  const int last = static_cast<int>(tokens.size()) - 1;
  EXPECT_TRUE(source_->Prefill(absl::MakeConstSpan(tokens).first(static_cast<size_t>(last)), 0,
                               nullptr).ok());
  for (int l = 0; l < layers_; ++l) {
    EXPECT_TRUE(selector->MakeDigests(l, 0, last / kBlockTokens).ok());
  }
  first_selection_.clear();
  const std::vector<float> logits =
      source_->Decode(absl::MakeConstSpan(tokens).last(1), last,
                      [&](int layer, int position, const LayerActivations& a) {
                        first_selection_.push_back(
                            selector->Select(layer, {position}, a.qkv, a.qkv_stride, kBudget).value()[0]);
                        return RowSelections::Full();
                      }).value();
  SequenceBlocks names(KeyChain(domain_), ticket.ticket.id);
  names.Append(tokens);
  std::vector<TierBlock> all(names.blocks().begin(), names.blocks().end());
  if (names.HasTail()) all.push_back(names.Tail());
  const KvCache& cache = source_->cache();
  Push(*prefill_tier_, ticket, all, layers_, [&](int block, int layer) -> Planes {
    const SlotPair pair = source_->Table(layer)[block];
    return {reinterpret_cast<const std::byte*>(cache.SlotAddress(pair.base)),
            reinterpret_cast<const std::byte*>(cache.SlotAddress(pair.residual))};
  });
  if (with_digests) {
    // Every full block's, joined as the tier keeps them.
    auto digest_heads = DigestHeads::Create(*device_, calibration_).value();
    const auto count = static_cast<size_t>(names.blocks().size());
    DeviceBuffer joined = device_->Allocate(count * layout_->BlockBytes()).value();
    for (int l = 0; l < layers_; ++l) {
      DeviceBuffer digests = device_->Allocate(count * layout_->LayerBytes(l)).value();
      MakeDigestArgs args;
      args.geometry = model_.geometry;
      args.spec = digest_heads->Spec(l);
      args.slots = cache.slots();
      args.blocks = source_->Table(l);
      args.count = static_cast<int>(count);
      args.digests = digests.as<uint8_t>();
      device_->ops().MakeDigest(source_->stream(), args);
      EXPECT_TRUE(source_->Wait().ok());
      for (size_t b = 0; b < count; ++b) {
        std::memcpy(joined.as<uint8_t>() + b * layout_->BlockBytes() + layout_->LayerOffset(l),
                    digests.as<uint8_t>() + b * layout_->LayerBytes(l), layout_->LayerBytes(l));
      }
    }
    SequenceBlocks digest_names(KeyChain(layout_->Domain(domain_)), ticket.ticket.id);
    digest_names.Append(tokens);
    Push(*prefill_digest_tier_, ticket, digest_names.blocks(), 1, [&](int block, int) -> Planes {
      const auto* at = joined.as<std::byte>() + static_cast<size_t>(block) * layout_->BlockBytes();
      return {at, at + layout_->BlockBytes() / 2};
    });
    prefill_digest_tier_->tier().Release(ticket.ref());
  }
  return ArgMax(logits);
}

// As sync-recall does it, over blocks that are all here; no fetch cap.
std::vector<int32_t> OffloadedEngineTest::ExpectedSparse(int32_t next, const OffloadBudget& budget) {
  std::vector<std::vector<CalibrationHead>> heads;
  for (const CalibrationLayer& layer : calibration_.layers) heads.push_back(layer.heads);
  auto run = TextRun::Create(*transformer_, kPrompt + output_ + kBlockTokens).value();
  auto selector = DigestSelector::Create(*run, calibration_.bits, heads).value();
  std::vector<int32_t> tokens = prompt_;
  EXPECT_TRUE(run->Prefill(tokens, 0, nullptr).ok());
  for (int l = 0; l < layers_; ++l) EXPECT_TRUE(selector->MakeDigests(l, 0, kPrompt / kBlockTokens).ok());
  tokens.push_back(next);
  while (static_cast<int>(tokens.size()) < kPrompt + output_) {
    const int position = static_cast<int>(tokens.size()) - 1;
    const auto select = [&](int layer, int at, const LayerActivations& a) {
      return RowSelections{
          false, false, selector->Select(layer, {at}, a.qkv, a.qkv_stride, budget.tokens).value()};
    };
    const std::vector<float> logits = run->Decode({&tokens.back(), 1}, position, select).value();
    tokens.push_back(ArgMax(logits));
    if ((position + 1) % kBlockTokens != 0) continue;
    const int block = position / kBlockTokens;
    for (int l = 0; l < layers_; ++l) EXPECT_TRUE(selector->MakeDigests(l, block, block + 1).ok());
  }
  return {tokens.begin() + kPrompt, tokens.end()};
}

std::vector<int32_t> OffloadedEngineTest::ExpectedFull(int32_t next) {
  auto run = TextRun::Create(*transformer_, kPrompt + kOutput).value();
  std::vector<int32_t> tokens = prompt_;
  EXPECT_TRUE(run->Prefill(tokens, 0, nullptr).ok());
  tokens.push_back(next);
  while (static_cast<int>(tokens.size()) < kPrompt + kOutput) {
    const auto full = [](int, int, const LayerActivations&) { return RowSelections::Full(); };
    tokens.push_back(ArgMax(
        run->Decode({&tokens.back(), 1}, static_cast<int>(tokens.size()) - 1, full).value()));
  }
  return {tokens.begin() + kPrompt, tokens.end()};
}

OffloadBudget Sparse() { return {.tokens = kBudget, .hot_factor = 2, .fetch_share = 1}; }

TEST_F(OffloadedEngineTest, Sparse_WithDigestsAndFirstSelection_EqualsTheReferenceAndPullsAPart) {
  Start(Sparse());
  const HeldTicket ticket = NewTicket(1);
  const int32_t next = Prefill(ticket, prompt_, true);
  HandOverRequest request = Request(ticket, prompt_, next);
  request.selections = first_selection_;
  request.calibration_id = calibration_.Id();
  ASSERT_TRUE(HandOver(ticket, request).ok());
  prefill_tier_->tier().Release(ticket.ref());
  const Answer answer = Read(ticket.ticket.id);
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(answer.finish, FinishReason::kLength);
  EXPECT_EQ(answer.tokens, ExpectedSparse(next, Sparse()));
  const DecodeFigures& f = answer.figures;
  EXPECT_TRUE(f.offloaded);
  EXPECT_EQ(f.sequence_bytes, 50 * f.block_bytes);
  // Sink and 8 recent blocks, 8 selected ones, 41 digests.
  EXPECT_EQ(f.digest_bytes, 41u * layout_->BlockBytes());
  EXPECT_LE(f.admission_bytes, (9 + 8) * f.block_bytes + f.digest_bytes);
  EXPECT_EQ(f.computed.exact, 0u);
  EXPECT_EQ(f.computed.sparse, static_cast<uint64_t>(kOutput - 1));
  EXPECT_EQ(f.sparse_steps, static_cast<uint64_t>(kOutput - 1));
  EXPECT_GT(f.hot_misses, 0u);
  EXPECT_LT(f.hot_misses, f.selected_blocks);
  EXPECT_GT(f.write_back_bytes, 0u);
}

TEST_F(OffloadedEngineTest, NoDigestsNoSelection_MakesThemFromPlanesForItselfAndTheNext) {
  Start(Sparse());
  const HeldTicket ticket = NewTicket(1);
  const int32_t next = Prefill(ticket, prompt_, false);
  ASSERT_TRUE(HandOver(ticket, Request(ticket, prompt_, next)).ok());
  const Answer answer = Read(ticket.ticket.id);
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(answer.tokens, ExpectedSparse(next, Sparse()));
  EXPECT_EQ(answer.figures.digest_bytes, 0u);
  EXPECT_EQ(answer.figures.admission_bytes, answer.figures.sequence_bytes);
  ASSERT_TRUE(Eventually([this] { return engine_->Idle(); }));
  const HeldTicket second = NewTicket(2);
  ASSERT_TRUE(HandOver(second, Request(second, prompt_, next)).ok());
  const Answer again = Read(second.ticket.id);
  ASSERT_TRUE(again.status.ok()) << again.status;
  EXPECT_EQ(again.tokens, answer.tokens);
  EXPECT_EQ(again.figures.digest_bytes, 41u * layout_->BlockBytes());
  EXPECT_LT(again.figures.admission_bytes, again.figures.sequence_bytes / 2);
  prefill_tier_->tier().Release(ticket.ref());
}

// The answer's blocks go to the tier with their digests: a dialogue that goes on makes none.
TEST_F(OffloadedEngineTest, CompletedBlocks_LeaveTheirDigestsInTheTier) {
  Start({.tokens = 4096, .hot_factor = 1, .fetch_share = 1});  // exact, so that others may read them
  const HeldTicket ticket = NewTicket(1);
  const int32_t next = Prefill(ticket, prompt_, true);
  ASSERT_TRUE(HandOver(ticket, Request(ticket, prompt_, next)).ok());
  const Answer answer = Read(ticket.ticket.id);
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  ASSERT_TRUE(Eventually([this] { return engine_->Idle(); }));
  std::vector<int32_t> dialogue = prompt_;
  dialogue.insert(dialogue.end(), answer.tokens.begin(), answer.tokens.end());
  SequenceBlocks names(KeyChain(layout_->Domain(domain_)), TicketId(2));
  names.Append(dialogue);
  const HeldTicket reader = NewTicket(2);
  const LookupResult found = prefill_digest_tier_->tier().Lookup(reader, names.blocks());
  // All but the last block, whose digest would have been made by a further step.
  EXPECT_GE(found.exact_blocks, static_cast<int>(names.blocks().size()) - 1);
  prefill_digest_tier_->tier().Release(reader.ref());
  prefill_tier_->tier().Release(ticket.ref());
}

TEST_F(OffloadedEngineTest, BudgetOfEverything_EqualsFullAttentionAndIsExact) {
  const OffloadBudget everything{.tokens = 4096, .hot_factor = 1, .fetch_share = 1};
  Start(everything);
  const HeldTicket ticket = NewTicket(1);
  const int32_t next = Prefill(ticket, prompt_, true);
  ASSERT_TRUE(HandOver(ticket, Request(ticket, prompt_, next)).ok());
  prefill_tier_->tier().Release(ticket.ref());
  const Answer answer = Read(ticket.ticket.id);
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(answer.tokens, ExpectedFull(next));
  EXPECT_EQ(answer.figures.computed.exact, static_cast<uint64_t>(kOutput - 1));
  EXPECT_EQ(answer.figures.computed.sparse, 0u);
  EXPECT_EQ(answer.figures.sparse_steps, 0u);
  EXPECT_GT(answer.figures.hot_misses, 0u);
}

TEST_F(OffloadedEngineTest, SelectionsOfNonsense_AreIgnored) {
  Start(Sparse());
  const HeldTicket ticket = NewTicket(1);
  const int32_t next = Prefill(ticket, prompt_, true);
  HandOverRequest request = Request(ticket, prompt_, next);
  request.calibration_id = calibration_.Id();
  request.selections = {{-5, 0, 3, 3, 2, 70000, 7}, {49, 48, 1}};
  ASSERT_TRUE(HandOver(ticket, request).ok());
  prefill_tier_->tier().Release(ticket.ref());
  const Answer answer = Read(ticket.ticket.id);
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(answer.tokens, ExpectedSparse(next, Sparse()));
}

TEST_F(OffloadedEngineTest, Cancel_WhileItSteps_NothingStays) {
  Start(Sparse());
  const HeldTicket ticket = NewTicket(1);
  const int32_t next = Prefill(ticket, prompt_, true);
  ASSERT_TRUE(HandOver(ticket, Request(ticket, prompt_, next)).ok());
  prefill_tier_->tier().Release(ticket.ref());
  size_t seen = 0;
  const Answer answer = Read(ticket.ticket.id, [&](const TokenEvent& event) {
    seen += event.tokens.size();
    if (seen >= 3 && event.finish == FinishReason::kRunning) {
      (void)engine_->Cancel(ticket.ticket.id, kCapability);
    }
    return true;
  });
  EXPECT_TRUE(answer.finish == FinishReason::kCancelled || answer.finish == FinishReason::kLength);
  // The destructor checks slots, pins and reservations.
}

TEST_F(OffloadedEngineTest, TwoAndAResidentOne_StepInTurnAndEachIsAsAlone) {
  Start(Sparse());
  std::vector<HeldTicket> tickets = {NewTicket(1), NewTicket(2), NewTicket(3)};
  tickets[2].ticket.request_class = RequestClass::kResident;
  tickets[2].signed_ticket = signer_->Sign(tickets[2].ticket);
  int32_t next = 0;
  for (const HeldTicket& ticket : tickets) next = Prefill(ticket, prompt_, true);
  for (const HeldTicket& ticket : tickets) {
    ASSERT_TRUE(HandOver(ticket, Request(ticket, prompt_, next)).ok());
    prefill_tier_->tier().Release(ticket.ref());
  }
  const std::vector<int32_t> sparse = ExpectedSparse(next, Sparse());
  for (size_t i = 0; i < tickets.size(); ++i) {
    const Answer answer = Read(tickets[i].ticket.id);
    ASSERT_TRUE(answer.status.ok()) << answer.status;
    EXPECT_EQ(answer.tokens, i < 2 ? sparse : ExpectedFull(next)) << i;
    EXPECT_EQ(answer.figures.offloaded, i < 2);
  }
}

TEST_F(OffloadedEngineTest, CompletedBlocksThatNoStoreTakes_StayOnTheDevice) {
  output_ = 260;  // 16 blocks, more than are set aside
  Start(Sparse(), 1, 2 * kMiB);
  const HeldTicket ticket = NewTicket(1);
  const int32_t next = Prefill(ticket, prompt_, false);  // digests would be evicted for the answer
  FillStores();
  ASSERT_TRUE(HandOver(ticket, Request(ticket, prompt_, next)).ok());
  const Answer answer = Read(ticket.ticket.id);
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(answer.tokens, ExpectedSparse(next, Sparse()));
  EXPECT_EQ(answer.figures.write_back_bytes, 0u);
  EmptyStores();
  prefill_tier_->tier().Release(ticket.ref());
}

TEST_F(OffloadedEngineTest, StoreHasRoomAgain_TakesTheBlocksItRefused) {
  output_ = 1100;
  Start(Sparse(), 1, 2 * kMiB);
  const HeldTicket ticket = NewTicket(1);
  const int32_t next = Prefill(ticket, prompt_, false);
  FillStores();
  ASSERT_TRUE(HandOver(ticket, Request(ticket, prompt_, next)).ok());
  std::atomic<size_t> tokens{0};
  auto reader = std::async(std::launch::async, [&] {
    return Read(ticket.ticket.id, [&](const TokenEvent& event) {
      tokens += event.tokens.size();
      return true;
    });
  });
  EXPECT_TRUE(Eventually([&] { return tokens >= 40; }));  // two blocks were refused
  const uint64_t before = stores_[0]->Stats().pushed_bytes;
  EmptyStores();
  // Those two and the one completed next.
  const uint64_t block_bytes = 2 * model_.geometry.RecordBytes();
  EXPECT_TRUE(Eventually([&] { return stores_[0]->Stats().pushed_bytes >= before + 3 * block_bytes; }));
  (void)engine_->Cancel(ticket.ticket.id, kCapability);
  const Answer answer = reader.get();
  EXPECT_TRUE(answer.status.ok()) << answer.status;
  prefill_tier_->tier().Release(ticket.ref());
}

TEST_F(OffloadedEngineTest, NoStoreTakesBlocksAndTheDeviceIsFull_RequestFailsAndSaysSo) {
  output_ = 260;
  const int blocks = BlocksFor(static_cast<uint64_t>(kPrompt + output_));
  const uint64_t slots = ShapeFor(calibration_, Sparse(), blocks).Slots();
  Start(Sparse(), 1, 2 * kMiB, static_cast<uint32_t>(slots) + 3);  // no further block fits
  const HeldTicket ticket = NewTicket(1);
  const int32_t next = Prefill(ticket, prompt_, false);  // digests would be evicted for the answer
  FillStores();
  ASSERT_TRUE(HandOver(ticket, Request(ticket, prompt_, next)).ok());
  const Answer answer = Read(ticket.ticket.id);
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kUnavailable) << answer.status;
  EXPECT_NE(answer.status.message().find("no device memory"), std::string::npos) << answer.status;
  EXPECT_GT(answer.tokens.size(), 64u);
  EmptyStores();
  prefill_tier_->tier().Release(ticket.ref());
}

// Everything stored is lost while the request loads or steps. Prefill computes it again, or, when the
// stores cannot be reached at that moment, decode does; on a slow machine the request may have ended.
TEST_F(OffloadedEngineTest, StoresRestartEmpty_RequestIsComputedAgainAndEndsWell) {
  Start(Sparse());
  const HeldTicket ticket = NewTicket(1);
  const int32_t next = Prefill(ticket, prompt_, true);
  const HeldTicket again = NewTicket(1, 2);
  coordinator_.regrant_reply.ticket = again.signed_ticket;
  coordinator_.regrant_reply.prefill_address = "prefill";
  std::future<ResumeRequest> resumed = resumed_.get_future();
  ASSERT_TRUE(HandOver(ticket, Request(ticket, prompt_, next)).ok());
  prefill_tier_->tier().Release(ticket.ref());
  auto reader = std::async(std::launch::async, [&] { return Read(ticket.ticket.id); });
  for (auto& store : stores_) store->Restart();
  view_.version = 2;
  view_.stores.clear();
  for (auto& store : stores_) view_.stores.push_back(store->ref());
  const std::vector<TierWorker*> tiers = {tier_.get(), digest_tier_.get(), prefill_tier_.get(),
                                          prefill_digest_tier_.get()};
  for (TierWorker* tier : tiers) tier->tier().SetView(view_);
  const auto is_ready = [](const auto& future) {
    return future.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  };
  EXPECT_TRUE(Eventually([&] { return is_ready(resumed) || is_ready(reader); }));
  const bool sent_back = is_ready(resumed);
  if (sent_back) {
    const ResumeRequest request = resumed.get();
    for (TierWorker* tier : tiers) EXPECT_TRUE(tier->tier().WaitConnected(absl::Seconds(20)).ok());
    const int32_t token = Prefill(again, request.tokens, true);
    const absl::Status status = HandOver(again, Request(again, request.tokens, token));
    EXPECT_TRUE(status.ok()) << status;
    prefill_tier_->tier().Release(again.ref());
  }
  const Answer answer = reader.get();
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(answer.tokens.size(), static_cast<size_t>(kOutput));
  EXPECT_EQ(answer.tokens[0], next);
  EXPECT_EQ(answer.figures.recomputed_suffixes, sent_back ? 1u : 0u);
}

}  // namespace
}  // namespace kvt
