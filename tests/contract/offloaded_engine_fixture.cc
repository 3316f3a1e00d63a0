#include "tests/contract/offloaded_engine_fixture.h"

namespace kvt {

std::unique_ptr<TierWorker> OffloadedEngineTest::NewTier(const std::string& name, const ModelInfo& model) {
  TierClientConfig config;
  config.worker = name;
  config.worker_epoch = BootEpoch(1);
  config.model = model;
  config.options.transport = TierTransport::kUcx;
  config.options.transfer_timeout = transfer_timeout_;
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

void OffloadedEngineTest::Start(OffloadBudget budget, int stores, uint64_t arena_bytes,
           uint32_t slots, bool calibrated) {
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
  if (calibrated) {
    deps.calibration = &calibration_;
    deps.digest_layout = &*layout_;
    deps.digest_tier = &digest_tier_->tier();
  }
  engine_ = DecodeEngine::Create(options_, deps).value();
  engine_thread_ = std::thread([this] { engine_->Run(); });
}

HeldTicket OffloadedEngineTest::NewTicket(uint64_t id, uint64_t epoch) {
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

OffloadedEngineTest::Answer OffloadedEngineTest::Read(
    TicketId id, const std::function<bool(const TokenEvent&)>& on_event) {
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

double OffloadedEngineTest::Metric(const std::string& name) const {
  const std::string text = "\n" + registry_.Render();
  const size_t at = text.find("\n" + name + " ");
  EXPECT_NE(at, std::string::npos) << name;
  return at == std::string::npos ? -1 : std::atof(text.c_str() + at + name.size() + 2);
}

OffloadedEngineTest::Answer OffloadedEngineTest::AnswerDisturbed(
    int32_t* next, const std::function<void(LoopbackFaults&)>& disturb) {
  output_ = 260;
  Start({.tokens = kBudget, .hot_factor = 1, .fetch_share = 1});
  const HeldTicket ticket = NewTicket(1);
  *next = Prefill(ticket, prompt_, true);
  const absl::Status status = HandOver(ticket, Request(ticket, prompt_, *next));
  EXPECT_TRUE(status.ok()) << status;
  prefill_tier_->tier().Release(ticket.ref());
  return ReadAndDisturb(ticket.ticket.id, disturb);
}

OffloadedEngineTest::Answer OffloadedEngineTest::ReadAndDisturb(
    TicketId id, const std::function<void(LoopbackFaults&)>& disturb) {
  size_t seen = 0;
  size_t disturbed = 0;
  return Read(id, [&](const TokenEvent& event) {
    seen += event.tokens.size();
    if (event.finish != FinishReason::kRunning || seen < 3 + 16 * disturbed) return true;
    if (Metric("kvtide_decode_misses_retried_total") > 0) return true;
    ++disturbed;
    for (auto& store : stores_) disturb(*store->faults());
    return true;
  });
}

void OffloadedEngineTest::FillStores() {
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

}  // namespace kvt
