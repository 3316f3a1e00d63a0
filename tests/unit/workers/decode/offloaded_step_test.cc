// Steps of the offloaded class on the CPU device, with a real (seeded random) model and a host store in
// the tier's place, against one sequence decoded alone by TextRun over the same selected sets.
#include "decode_worker/offload/offloaded_step.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/base/random.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/model/digest_selector.h"
#include "kernels/model/model_config.h"
#include "kernels/model/text_run.h"
#include "kernels/select/attention_stats.h"
#include "tests/support/model_folder.h"
#include "tests/support/random_model.h"

namespace kvt {
namespace {

constexpr uint64_t kSeed = 20261130;
constexpr int kSteps = 40;
constexpr int kRowsMax = 4;
constexpr int kContextBlocks = 64;
constexpr absl::Duration kDeadline = absl::Seconds(60);
constexpr int kFixedTokens = kSinkTokens + kRecentTokens;

int32_t ArgMax(absl::Span<const float> logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

// What a worker does with the blocks of a sequence around its steps.
void Open(OffloadedSlots& slots, int blocks, int position) {
  const MiddleBlocks middle = MiddleOf(position);
  for (int b = 0; b < blocks; ++b) {
    if (b >= middle.first && b < middle.end) {
      slots.AppendStored();
    } else {
      ASSERT_TRUE(slots.AppendWhole());
    }
  }
}
void LetGoOld(OffloadedSlots& slots, int next_position, uint64_t step) {
  const MiddleBlocks middle = MiddleOf(next_position);
  for (int b = middle.first; b < middle.end; ++b) {
    if (slots.whole(b)) slots.LetGo(b, step);
  }
}

class OffloadedStepTest : public testing::Test {
 protected:
  struct Seq {
    std::vector<int32_t> tokens;  // the last one's KV is not there yet
    int prompt = 0;
    std::unique_ptr<TextRun> source;  // of the prompt's KV
    std::map<std::pair<int, int>, std::vector<uint8_t>> store;  // (layer, block) -> both planes
    std::optional<OffloadedSlots> slots;
    DigestBuffer digests;
    int table_row = 0;
    std::vector<OffloadedRowResult> results;
    int position() const { return static_cast<int>(tokens.size()) - 1; }
  };

  OffloadedStepTest() {
    WriteRandomModel(RandomModelSpecs()[1], folder_.path());
    device_ = MakeCpuDevice({.threads = 2}).value();
    model_ = Transformer::Load(folder_.path(), *device_, {}).value();
    layers_ = model_->geometry().layers;
  }

  // heads[l]: selecting KV heads.
  Calibration MakeCalibration(const std::vector<std::vector<int>>& heads) const {
    const Geometry& geometry = model_->geometry();
    Calibration calibration;
    calibration.geometry = geometry;
    calibration.layers.resize(heads.size());
    Random random(kSeed + 1);
    for (size_t l = 0; l < heads.size(); ++l) {
      for (const int head : heads[l]) {
        CalibrationHead& h = calibration.layers[l].heads.emplace_back();
        h.kv_head = head;
        for (int d = 0; d < geometry.head_dim; ++d) {
          h.offset.push_back(0.01f * static_cast<float>(random.Below(10)));
          h.scale.push_back(0.1f + 0.02f * static_cast<float>(random.Below(10)));
        }
      }
    }
    return calibration;
  }

  void Start(const std::vector<std::vector<int>>& heads, OffloadBudget budget) {
    budget_ = budget;
    calibration_ = MakeCalibration(heads);
    heads_ = DigestHeads::Create(*device_, calibration_).value();
    stream_ = device_->NewStream(StreamPriority::kNormal);
    constexpr uint32_t kSlots = 8000;
    cache_ = KvCache::Create(*device_, model_->geometry(),
                             {.slot_count = kSlots, .table_rows = kRowsMax,
                              .blocks_per_row = kContextBlocks})
                 .value();
    pool_ = std::make_unique<SlotPool>(layers_, kSlots);
    queue_ = std::make_unique<TaskQueue>(1000);
    step_ = OffloadedStep::Create(
                *model_, *cache_, *heads_, budget, *stream_, *queue_, kRowsMax,
                {.fetch = [this](int layer, absl::Span<const OffloadedFetch> fetches,
                                 std::function<void(const std::vector<bool>&)> done) {
                   queue_->Post([this, layer, fetches, done] { Fetch(layer, fetches, done); });
                 },
                 .step_done = [this](const OffloadedStepResult& result) { result_ = result; }})
                .value();
  }
  void TearDown() override {
    for (auto& seq : sequences_) seq->slots->Release(0);
    if (pool_ != nullptr) {
      EXPECT_EQ(pool_->free(), pool_->total());
      EXPECT_EQ(pool_->reserved(), 0u);
    }
  }

  void Await(const std::function<bool()>& done) {
    const absl::Time deadline = absl::Now() + kDeadline;
    while (!done()) {
      ASSERT_LT(absl::Now(), deadline);
      queue_->RunAll(absl::Milliseconds(100));
    }
  }

  void Fetch(int layer, absl::Span<const OffloadedFetch> fetches,
             const std::function<void(const std::vector<bool>&)>& done) {
    std::vector<bool> ok;
    for (const OffloadedFetch& f : fetches) {
      Seq& seq = *stepping_[static_cast<size_t>(f.row)];
      ok.push_back(!(fail_row_ == f.row && fail_layer_ == layer));
      if (ok.back()) {
        FromStore(seq, layer, f.fetch.block, f.fetch.pair);
      } else {
        fail_row_ = -1;  // once
      }
    }
    done(ok);
  }
  void FromStore(const Seq& seq, int layer, int block, SlotPair pair) const {
    const std::vector<uint8_t>& bytes = seq.store.at({layer, block});
    std::memcpy(cache_->SlotAddress(pair.base), bytes.data(), cache_->slot_bytes());
    std::memcpy(cache_->SlotAddress(pair.residual), bytes.data() + cache_->slot_bytes(),
                cache_->slot_bytes());
  }
  static std::vector<uint8_t> Bytes(const KvCache& cache, SlotPair pair) {
    std::vector<uint8_t> bytes(2 * cache.slot_bytes());
    std::memcpy(bytes.data(), cache.SlotAddress(pair.base), cache.slot_bytes());
    std::memcpy(bytes.data() + cache.slot_bytes(), cache.SlotAddress(pair.residual),
                cache.slot_bytes());
    return bytes;
  }

  std::vector<int32_t> Prompt(uint64_t seed, int tokens) const {
    Random random(kSeed + seed);
    std::vector<int32_t> prompt;
    for (int i = 0; i < tokens; ++i) {
      prompt.push_back(
          static_cast<int32_t>(random.Below(static_cast<uint64_t>(model_->config().vocab))));
    }
    return prompt;
  }

  // A sequence whose first `tokens - 1` tokens have KV in its store.
  Seq& Admit(uint64_t seed, int tokens) {
    auto owned = std::make_unique<Seq>();
    Seq& seq = *owned;
    sequences_.push_back(std::move(owned));
    seq.tokens = Prompt(seed, tokens);
    seq.prompt = tokens;
    seq.table_row = static_cast<int>(sequences_.size()) - 1;
    seq.source = TextRun::Create(*model_, tokens + kSteps).value();
    EXPECT_TRUE(seq.source->Prefill(absl::MakeConstSpan(seq.tokens).first(seq.tokens.size() - 1), 0,
                                    nullptr).ok());
    const int blocks = (tokens - 1 + kBlockTokens - 1) / kBlockTokens;
    const int full = (tokens - 1) / kBlockTokens;
    for (int l = 0; l < layers_; ++l) {
      for (int b = 0; b < blocks; ++b) {
        seq.store[{l, b}] = Bytes(seq.source->cache(), seq.source->Table(l)[b]);
      }
    }
    const int blocks_max = (tokens + kSteps) / kBlockTokens + 1;
    const OffloadedShape shape = ShapeFor(calibration_, budget_, blocks_max);
    std::optional<OffloadedSlots> slots = OffloadedSlots::TryCreate(*pool_, shape);
    EXPECT_TRUE(slots.has_value());
    seq.slots.emplace(std::move(*slots));
    seq.digests = DigestBuffer::Create(*device_, calibration_.DigestBytesByLayer(), blocks_max).value();
    Open(*seq.slots, blocks, seq.position());
    for (int b = 0; b < blocks; ++b) {
      step_->SetBlock(seq.table_row, *seq.slots, b);
      for (int l = 0; l < layers_; ++l) {
        const SlotPair pair = seq.slots->Pair(l, b);
        if (pair.base != kSlotNone) FromStore(seq, l, b, pair);
      }
    }
    for (int b = 0; b < full; ++b) MakeDigest(seq, b);
    return seq;
  }
  // From the block's own slots, or through a hot one.
  void MakeDigest(Seq& seq, int block) {
    for (int l = 0; l < layers_; ++l) {
      if (heads_->dense(l)) continue;
      SlotPair pair = seq.slots->Pair(l, block);
      if (pair.base == kSlotNone) {
        pair = seq.slots->HotPairs(l)[0];
        FromStore(seq, l, block, pair);
      }
      const auto index = static_cast<uint32_t>(block);
      step_->MakeDigests(seq.digests, l, {&pair, 1}, {&index, 1});
      bool made = false;
      step_->Then([&made] { made = true; });
      Await([&made] { return made; });
    }
  }

  // One step of these sequences; results[i] is of stepping[i].
  OffloadedStepResult Step(const std::vector<Seq*>& stepping) {
    stepping_ = stepping;
    std::vector<OffloadedRow> rows;
    for (Seq* seq : stepping) {
      if (seq->position() / kBlockTokens == seq->slots->blocks()) {
        EXPECT_TRUE(seq->slots->AppendWhole());
        step_->SetBlock(seq->table_row, *seq->slots, seq->position() / kBlockTokens);
      }
      rows.push_back({.slots = &*seq->slots, .digests = &seq->digests, .table_row = seq->table_row,
                      .position = seq->position(), .token = seq->tokens.back(), .sample = {}});
    }
    result_.reset();
    step_->Enqueue(++steps_, rows);
    Await([this] { return result_.has_value(); });
    pool_->Retire(steps_);
    return *result_;
  }
  void Advance(Seq& seq, const OffloadedRowResult& result) {
    seq.results.push_back(result);
    const int written = seq.position();
    seq.tokens.push_back(result.token);
    if ((written + 1) % kBlockTokens == 0) {
      const int block = written / kBlockTokens;
      for (int l = 0; l < layers_; ++l) seq.store[{l, block}] = Bytes(*cache_, seq.slots->Pair(l, block));
      MakeDigest(seq, block);
    }
    LetGoOld(*seq.slots, seq.position(), steps_);
  }
  void Run(const std::vector<Seq*>& stepping, int steps) {
    for (int i = 0; i < steps; ++i) {
      const OffloadedStepResult result = Step(stepping);
      ASSERT_EQ(result.rows.size(), stepping.size());
      for (size_t r = 0; r < stepping.size(); ++r) Advance(*stepping[r], result.rows[r]);
    }
  }

  // The same sequence alone, by TextRun, with the same policy over its own scores. Also compares the
  // KV that the steps wrote.
  void ExpectAsAlone(const Seq& seq) {
    std::vector<std::vector<CalibrationHead>> heads;
    for (const CalibrationLayer& layer : calibration_.layers) heads.push_back(layer.heads);
    auto run = TextRun::Create(*model_, seq.prompt + kSteps).value();
    auto selector = DigestSelector::Create(*run, calibration_.bits, heads).value();
    std::vector<int32_t> tokens(seq.tokens.begin(), seq.tokens.begin() + seq.prompt);
    ASSERT_TRUE(run->Prefill(absl::MakeConstSpan(tokens).first(tokens.size() - 1), 0, nullptr).ok());
    SlotPool pool(layers_, 8000);
    std::optional<OffloadedSlots> slots =
        OffloadedSlots::TryCreate(pool, seq.slots->shape());
    ASSERT_TRUE(slots.has_value());
    const int known = seq.prompt - 1;
    Open(*slots, (known + kBlockTokens - 1) / kBlockTokens, known);
    for (int l = 0; l < layers_; ++l) {
      ASSERT_TRUE(selector->MakeDigests(l, 0, known / kBlockTokens).ok());
    }
    while (tokens.size() < seq.tokens.size()) {
      const int position = static_cast<int>(tokens.size()) - 1;
      if (position / kBlockTokens == slots->blocks()) {
        ASSERT_TRUE(slots->AppendWhole());
      }
      const auto select = [&](int layer, int at, const LayerActivations& activations) {
        if (selector->dense(layer)) return RowSelections::Full();
        const MiddleBlocks middle = MiddleOf(at);
        const auto scores =
            selector->Score(layer, {at}, activations.qkv, activations.qkv_stride).value();
        const int tokens_of_layer = slots->shape().budgets[static_cast<size_t>(layer)];
        std::vector<int32_t> blocks = TopBlocks(scores[0], SelectedBlocks(tokens_of_layer, at));
        std::vector<float> of_blocks;
        for (int32_t& block : blocks) {
          of_blocks.push_back(scores[0][static_cast<size_t>(block)]);
          block += middle.first;
        }
        if (static_cast<int>(blocks.size()) == middle.count()) of_blocks.clear();
        std::vector<int32_t> read =
            slots->Select(layer, blocks, of_blocks, FetchesMax(budget_, at / kBlockTokens + 1)).blocks;
        if (budget_.attend_resident) {
          read = slots->WithResident(layer, std::move(read), middle.first, middle.end);
        }
        return RowSelections{false, false, {std::move(read)}};
      };
      const std::vector<float> logits =
          run->Decode({&tokens.back(), 1}, position, select).value();
      tokens.push_back(ArgMax(logits));
      if ((position + 1) % kBlockTokens == 0) {
        const int block = position / kBlockTokens;
        for (int l = 0; l < layers_; ++l) ASSERT_TRUE(selector->MakeDigests(l, block, block + 1).ok());
      }
      LetGoOld(*slots, position + 1, 0);
    }
    slots->Release(0);
    EXPECT_EQ(seq.tokens, tokens);
    for (int l = 0; l < layers_; ++l) {
      for (int b = known / kBlockTokens; b < seq.slots->blocks(); ++b) {
        const auto stored = seq.store.find({l, b});
        const bool complete = (b + 1) * kBlockTokens < static_cast<int>(seq.tokens.size());
        if (!complete || stored == seq.store.end()) continue;
        EXPECT_EQ(stored->second, Bytes(run->cache(), run->Table(l)[b])) << "layer " << l << " block " << b;
      }
    }
  }

  TempFolder folder_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Transformer> model_;
  int layers_ = 0;
  OffloadBudget budget_;
  Calibration calibration_;
  std::unique_ptr<DigestHeads> heads_;
  std::unique_ptr<KvCache> cache_;
  std::unique_ptr<SlotPool> pool_;
  std::unique_ptr<TaskQueue> queue_;
  std::vector<std::unique_ptr<Seq>> sequences_;
  std::unique_ptr<OffloadedStep> step_;
  std::unique_ptr<Stream> stream_;  // drained before what its operations use
  std::vector<Seq*> stepping_;
  std::optional<OffloadedStepResult> result_;
  uint64_t steps_ = 0;
  int fail_row_ = -1;
  int fail_layer_ = 0;
};

TEST_F(OffloadedStepTest, SparseSteps_EqualPlainDecodingOverTheSameSets) {
  Start({{1}, {0, 1}}, {.tokens = kFixedTokens + 8 * kBlockTokens, .hot_factor = 2, .fetch_share = 1});
  Seq& seq = Admit(1, 700);
  Run({&seq}, kSteps);
  ExpectAsAlone(seq);
  int hits = 0, misses = 0;
  for (const OffloadedRowResult& result : seq.results) {
    EXPECT_FALSE(result.exact);
    EXPECT_EQ(result.left_out + result.lost, 0);
    misses += result.misses;
    hits += result.selected - result.misses;
  }
  EXPECT_GT(misses, 0);
  EXPECT_GT(hits, 0);
}

TEST_F(OffloadedStepTest, BudgetDividedByLosses_EqualsPlainDecodingOverTheSameSets) {
  Start({{1}, {0}}, {.tokens = kFixedTokens + 8 * kBlockTokens, .hot_factor = 2, .fetch_share = 1});
  calibration_.layers[0].losses = {0.5, 0.2, 0.05};
  calibration_.layers[1].losses = {0.002, 0.001, 0.0005};
  Seq& seq = Admit(10, 700);
  const std::vector<int>& selected = seq.slots->shape().selected;
  EXPECT_GT(selected[0], 8);
  EXPECT_EQ(selected[0] + selected[1], 2 * 8);
  Run({&seq}, kSteps);
  ExpectAsAlone(seq);
  EXPECT_GE(seq.results[0].selected, 2 * 8 - 2);  // by the position's place in its block
}

TEST_F(OffloadedStepTest, AttendResident_ReadsWhatIsThereToo) {
  Start({{1}, {0}}, {.tokens = kFixedTokens + 8 * kBlockTokens, .hot_factor = 2, .fetch_share = 1,
                     .attend_resident = true});
  Seq& seq = Admit(1, 700);
  Run({&seq}, kSteps);
  ExpectAsAlone(seq);
  const OffloadedSlots& slots = *seq.slots;
  const MiddleBlocks middle = MiddleOf(seq.position());
  const std::vector<int32_t> there = slots.WithResident(0, {}, middle.first, middle.end);
  EXPECT_GT(static_cast<int>(there.size()), slots.shape().selected[0]);
  for (const int32_t b : there) EXPECT_NE(slots.Pair(0, b).base, kSlotNone) << b;
}

TEST_F(OffloadedStepTest, DenseLayer_ReadsEverythingThere) {
  Start({{}, {0}}, {.tokens = kFixedTokens + 5 * kBlockTokens, .hot_factor = 1, .fetch_share = 1});
  Seq& seq = Admit(2, 600);
  Run({&seq}, kSteps);
  ExpectAsAlone(seq);
}

TEST_F(OffloadedStepTest, BudgetOfEverything_EqualsFullAttentionAndIsExact) {
  Start({{1}, {0}}, {.tokens = 4096, .hot_factor = 1, .fetch_share = 1});
  Seq& seq = Admit(3, 500);
  Run({&seq}, kSteps);
  for (const OffloadedRowResult& result : seq.results) EXPECT_TRUE(result.exact);
  EXPECT_GT(seq.results[0].misses, 0);
  std::vector<int32_t> tokens(seq.tokens.begin(), seq.tokens.begin() + seq.prompt);
  auto run = TextRun::Create(*model_, seq.prompt + kSteps).value();
  ASSERT_TRUE(run->Prefill(absl::MakeConstSpan(tokens).first(tokens.size() - 1), 0, nullptr).ok());
  while (tokens.size() < seq.tokens.size()) {
    const auto full = [](int, int, const LayerActivations&) { return RowSelections::Full(); };
    tokens.push_back(ArgMax(
        run->Decode({&tokens.back(), 1}, static_cast<int>(tokens.size()) - 1, full).value()));
  }
  EXPECT_EQ(seq.tokens, tokens);
  for (int l = 0; l < layers_; ++l) {
    for (int b = seq.prompt / kBlockTokens; (b + 1) * kBlockTokens < static_cast<int>(tokens.size()); ++b) {
      EXPECT_EQ((seq.store.at({l, b})), Bytes(run->cache(), run->Table(l)[b])) << b;
    }
  }
}

TEST_F(OffloadedStepTest, Batch_EachRowIsAsAlone) {
  Start({{0}, {1}}, {.tokens = kFixedTokens + 6 * kBlockTokens, .hot_factor = 2, .fetch_share = 1});
  Seq& a = Admit(4, 640);
  Seq& b = Admit(5, 333);
  Seq& c = Admit(6, 90);  // no middle at all
  Run({&a, &b, &c}, kSteps);
  for (const Seq* seq : {&a, &b, &c}) ExpectAsAlone(*seq);
  for (const OffloadedRowResult& result : c.results) EXPECT_TRUE(result.exact);
}

TEST_F(OffloadedStepTest, FetchCap_LeavesOutTheLowestAndStillEqualsTheReference) {
  Start({{0}, {1}}, {.tokens = kFixedTokens + 12 * kBlockTokens, .hot_factor = 2, .fetch_share = 0.05});
  Seq& seq = Admit(7, 700);
  Run({&seq}, kSteps);
  EXPECT_GT(seq.results[0].left_out, 0);
  for (const OffloadedRowResult& result : seq.results) {
    EXPECT_LE(result.misses, layers_ * FetchesMax(budget_, 47));
  }
  ExpectAsAlone(seq);
}

TEST_F(OffloadedStepTest, LostFetch_RowSaysSoOthersGoOnAndARepeatIsRight) {
  Start({{0}, {1}}, {.tokens = kFixedTokens + 6 * kBlockTokens, .hot_factor = 2, .fetch_share = 1});
  Seq& a = Admit(8, 640);
  Seq& b = Admit(9, 500);
  fail_row_ = 0;
  fail_layer_ = 1;
  const OffloadedStepResult lost = Step({&a, &b});
  EXPECT_EQ(lost.rows[0].lost, 1);
  EXPECT_EQ(lost.rows[1].lost, 0);
  Advance(b, lost.rows[1]);
  Run({&a, &b}, kSteps - 1);
  ExpectAsAlone(b);
  // The repeated step's selection is the first one's, all of it there.
  EXPECT_EQ(a.results[0].lost, 0);
  ExpectAsAlone(a);
}

}  // namespace
}  // namespace kvt
