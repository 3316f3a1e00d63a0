// An offloaded request's last prefill step and its digests in the tier: the real pipeline over a small
// model, compared with DigestSelector and MakeDigest on the same sequence alone, and a real store.
#include "prefill_worker/digest_write.h"

#include <cstring>
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/base/random.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/model/digest_selector.h"
#include "kernels/model/model_config.h"
#include "kernels/model/text_run.h"
#include "prefill_worker/layer_pipeline.h"
#include "tests/contract/tier_fixture.h"
#include "tests/support/model_folder.h"
#include "tests/support/random_model.h"

namespace kvt {
namespace {

constexpr int kChunk = 128;
constexpr int kBudget = 320;
constexpr int kBlocksMax = 64;

class DigestWriteTest : public TierTest {
 protected:
  void SetUp() override {
    WriteRandomModel(RandomModelSpecs()[1], folder_.path());
    device_ = MakeCpuDevice({.threads = 2}).value();
    transformer_ = Transformer::Load(folder_.path(), *device_, {}).value();
    geometry_ = transformer_->geometry();
  }

  std::vector<int32_t> Tokens(int count, uint64_t seed) const {
    Random random(seed);
    std::vector<int32_t> tokens(static_cast<size_t>(count));
    for (int32_t& token : tokens) {
      token = static_cast<int32_t>(random.Below(static_cast<uint64_t>(transformer_->config().vocab)));
    }
    return tokens;
  }
  CalibrationHead Head(int kv_head) const {
    const auto dim = static_cast<size_t>(geometry_.head_dim);
    return {kv_head, std::vector<float>(dim, 0.02f), std::vector<float>(dim, 0.3f)};
  }
  // heads[l]: of layer l.
  Calibration MakeCalibration(const std::vector<std::vector<int>>& heads) const {
    Calibration calibration;
    calibration.model = "f00d";
    calibration.geometry = geometry_;
    for (const std::vector<int>& layer : heads) {
      CalibrationLayer& out = calibration.layers.emplace_back();
      for (const int head : layer) out.heads.push_back(Head(head));
    }
    return calibration;
  }
  static DigestLayout Layout(const Calibration& calibration) {
    return DigestLayout::Create(calibration.Id(), calibration.DigestBytesByLayer()).value();
  }

  // Two sequences that take turns in chunks, so that the last step of each has the other's rows, too.
  std::vector<std::shared_ptr<FirstSelection>> Prefill(
      const Calibration& calibration, const std::vector<std::vector<int32_t>>& sequences) {
    const int slots = 2 * geometry_.layers * kBlocksMax * static_cast<int>(sequences.size());
    const auto cache = KvCache::Create(*device_, geometry_,
                                       {.slot_count = static_cast<uint32_t>(slots),
                                        .table_rows = static_cast<int>(sequences.size()),
                                        .blocks_per_row = kBlocksMax}).value();
    TaskQueue queue(1024);
    int steps_done = 0;
    const auto selector =
        FirstSelector::Create(*transformer_, calibration, kBlocksMax, kBudget).value();
    const auto pipeline = LayerPipeline::Create(
        *transformer_, *cache, queue, 2 * kChunk, 4, selector.get(),
        {.layer_written = [](uint64_t, int) {},
         .step_done = [&](const PipelineResult&) { ++steps_done; }}).value();
    uint32_t slot = 0;
    for (size_t s = 0; s < sequences.size(); ++s) {
      auto pairs = std::make_shared<std::vector<SlotPair>>();
      for (int i = 0; i < geometry_.layers * kBlocksMax; ++i, slot += 2) {
        pairs->push_back({slot, slot + 1});
      }
      pipeline->SetTable(static_cast<int>(s), kBlocksMax, pairs);
    }
    std::vector<std::shared_ptr<FirstSelection>> selections(sequences.size());
    std::vector<size_t> done(sequences.size());
    for (int step = 1;; ++step) {
      std::vector<PipelineSegment> segments;
      for (size_t s = 0; s < sequences.size(); ++s) {
        const size_t left = sequences[s].size() - done[s];
        if (left == 0) continue;
        const size_t count = std::min<size_t>(left, kChunk);
        PipelineSegment segment{.table_row = static_cast<int>(s),
                                .first_position = static_cast<int>(done[s]),
                                .tokens = absl::MakeConstSpan(sequences[s]).subspan(done[s], count),
                                .sample = std::nullopt};
        done[s] += count;
        if (count == left) {
          segment.sample = SampleParams();
          selections[s] = selector->New(static_cast<int>(sequences[s].size()));
          segment.selection = selections[s].get();
        }
        segments.push_back(segment);
      }
      if (segments.empty()) break;
      pipeline->Enqueue(static_cast<uint64_t>(step), segments);
      const absl::Time deadline = absl::Now() + absl::Seconds(60);
      while (steps_done < step && absl::Now() < deadline) queue.RunAll(absl::Seconds(1));
      EXPECT_EQ(steps_done, step);
      if (steps_done != step) break;
    }
    for (const auto& selection : selections) selection->Finish();
    return selections;
  }

  // The same of one sequence alone, through the tools that calibration measures with.
  FirstSelection Alone(const Calibration& calibration, const std::vector<int32_t>& tokens) {
    const auto run = TextRun::Create(*transformer_, static_cast<int>(tokens.size())).value();
    std::vector<std::vector<CalibrationHead>> heads;
    for (const CalibrationLayer& layer : calibration.layers) heads.push_back(layer.heads);
    const auto selector = DigestSelector::Create(*run, calibration.bits, heads).value();
    FirstSelection expected;
    expected.position = static_cast<int>(tokens.size()) - 1;
    expected.blocks = static_cast<int>(tokens.size()) / kBlockTokens;
    expected.digests.resize(calibration.layers.size());
    expected.selected.resize(calibration.layers.size());
    const auto observe = [&](int layer, int first, const LayerActivations& a) {
      const auto l = static_cast<size_t>(layer);
      if (first + a.rows != static_cast<int>(tokens.size()) || selector->dense(layer)) return;
      EXPECT_TRUE(selector->MakeDigests(layer, 0, expected.blocks).ok());
      expected.selected[l] =
          selector->Select(layer, {expected.position}, a.qkv + (a.rows - 1) * a.qkv_stride,
                           a.qkv_stride, kBudget).value()[0];
      expected.digests[l] = Digests(calibration, *run, layer, expected.blocks);
    };
    EXPECT_TRUE(run->Prefill(tokens, 0, observe).ok());
    return expected;
  }
  std::vector<uint8_t> Digests(const Calibration& calibration, TextRun& run, int layer,
                               int blocks) const {
    const auto heads = DigestHeads::Create(*device_, calibration).value();
    MakeDigestArgs args;
    args.geometry = geometry_;
    args.spec = heads->Spec(layer);
    args.slots = run.cache().slots();
    args.blocks = run.Table(layer);
    args.count = blocks;
    std::vector<uint8_t> digests(static_cast<size_t>(blocks) *
                                 args.spec.Bytes(geometry_.head_dim));
    DeviceBuffer out = device_->Allocate(digests.size()).value();
    args.digests = out.as<uint8_t>();
    device_->ops().MakeDigest(run.stream(), args);
    EXPECT_TRUE(run.Wait().ok());
    std::memcpy(digests.data(), out.data(), digests.size());
    return digests;
  }

  // A worker of digests, as WorkerDaemon opens it beside the planes'.
  std::unique_ptr<TierWorker> DigestWorker(const std::string& name, const DigestLayout& layout) {
    model_.geometry = layout.geometry();
    return StartConnected(name + "/digest", FastOptions());
  }
  KeyChain Chain(const DigestLayout& layout) const {
    KeyDomain planes;
    planes.cluster_secret = kTestSecret;
    planes.model_fingerprint = model_.fingerprint;
    planes.numerics_id = model_.numerics_id;
    planes.geometry = geometry_;
    return KeyChain(layout.Domain(planes));
  }
  SequenceBlocks PlaneNames(const std::vector<int32_t>& tokens, TicketId ticket) const {
    SequenceBlocks names(TestChain(), ticket);
    names.Append(tokens);
    return names;
  }
  // How many digest blocks are in the tier afterwards.
  int Store(TierWorker& worker, const HeldTicket& ticket, DigestWrite& write) {
    if (write.list.empty()) return write.present;
    TransferWaiter waiter;
    worker.tier().Push({.blocks = write.list, .layer_begin = 0, .layer_end = 1,
                        .outcomes = absl::MakeSpan(write.outcomes), .done = waiter.Done()});
    EXPECT_EQ(waiter.Wait().blocks_lost, 0);
    return write.present + SealDigestWrite(worker.tier(), ticket.ref(), write);
  }

  TempFolder folder_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Transformer> transformer_;
  Geometry geometry_;
};

TEST_P(DigestWriteTest, FirstSelection_OfTwoSequencesInOneStep_IsThatOfEachAlone) {
  const std::vector<std::vector<int32_t>> sequences = {Tokens(700, 1), Tokens(743, 2)};
  for (const auto& heads : std::vector<std::vector<std::vector<int>>>{{{}, {1, 0}}, {{0}, {1}}}) {
    const Calibration calibration = MakeCalibration(heads);
    const auto selections = Prefill(calibration, sequences);
    for (size_t s = 0; s < sequences.size(); ++s) {
      const FirstSelection expected = Alone(calibration, sequences[s]);
      EXPECT_EQ(selections[s]->selected, expected.selected);
      EXPECT_EQ(selections[s]->digests, expected.digests);
      for (size_t l = 0; l < heads.size(); ++l) {
        const int chosen = heads[l].empty() ? 0 : SelectedBlocks(kBudget, expected.position);
        EXPECT_EQ(selections[s]->selected[l].size(), static_cast<size_t>(chosen));
      }
    }
  }
}

TEST_P(DigestWriteTest, SequenceWithoutAMiddle_HasDigestsAndSelectsNothing) {
  const Calibration calibration = MakeCalibration({{0}, {1}});
  const auto selections = Prefill(calibration, {Tokens(100, 1), Tokens(7, 2)});
  const FirstSelection expected = Alone(calibration, Tokens(100, 1));
  EXPECT_EQ(selections[0]->digests, expected.digests);
  EXPECT_EQ(selections[0]->blocks, 6);
  EXPECT_EQ(selections[1]->blocks, 0);
  for (const auto& selection : selections) {
    for (const auto& layer : selection->selected) EXPECT_TRUE(layer.empty());
  }
}

TEST_P(DigestWriteTest, DigestsWritten_AreReadBackByAnotherWorkerAndShared) {
  StartStores(2);
  const Calibration calibration = MakeCalibration({{1}, {0, 1}});
  const DigestLayout layout = Layout(calibration);
  const std::vector<int32_t> tokens = Tokens(1000, 5);
  const auto selections = Prefill(calibration, {tokens});
  const auto prefill = DigestWorker("prefill", layout);
  const HeldTicket ticket = NewTicket(View());
  const SequenceBlocks names = PlaneNames(tokens, ticket.ticket.id).Under(Chain(layout));
  const auto write = OpenDigestWrite(prefill->tier(), ticket, names, layout, *selections[0]);
  EXPECT_EQ(write->refused, 0);
  EXPECT_EQ(write->list.size(), 62u);
  ASSERT_EQ(Store(*prefill, ticket, *write), 62);

  // Another worker, another request: found under its own names, nothing to write.
  const auto decode = DigestWorker("decode", layout);
  const HeldTicket other = NewTicket(View());
  const SequenceBlocks again = PlaneNames(tokens, other.ticket.id).Under(Chain(layout));
  const auto nothing = OpenDigestWrite(decode->tier(), other, again, layout, *selections[0]);
  EXPECT_EQ(nothing->present, 62);
  EXPECT_TRUE(nothing->list.empty());
  const LookupResult found = decode->tier().Lookup(other, again.blocks());
  ASSERT_EQ(found.exact_blocks, 62);
  TestSlots slots(layout.geometry(), 62);
  ASSERT_EQ(decode->PullAll(other.ref(), found.blocks, slots).blocks_ok, 62);
  for (int block = 0; block < 62; ++block) {
    std::vector<uint8_t> joined(layout.BlockBytes());
    const size_t half = joined.size() / 2;
    std::memcpy(joined.data(), *slots.Addresses(block, Plane::kBase), half);
    std::memcpy(joined.data() + half, *slots.Addresses(block, Plane::kResidual), half);
    for (int layer = 0; layer < geometry_.layers; ++layer) {
      const size_t bytes = layout.LayerBytes(layer);
      const auto l = static_cast<size_t>(layer);
      EXPECT_EQ(std::memcmp(joined.data() + layout.LayerOffset(layer),
                            selections[0]->digests[l].data() + static_cast<size_t>(block) * bytes,
                            bytes), 0) << "block " << block << " layer " << layer;
    }
    for (size_t i = layout.DigestBytes(); i < joined.size(); ++i) EXPECT_EQ(joined[i], 0);
  }
  // Another calibration finds nothing under its names.
  const DigestLayout stale = Layout(MakeCalibration({{0}, {0, 1}}));
  EXPECT_EQ(stale.geometry(), layout.geometry());
  const SequenceBlocks others = PlaneNames(tokens, other.ticket.id).Under(Chain(stale));
  EXPECT_EQ(decode->tier().Lookup(other, others.blocks()).base_blocks, 0);
  prefill->tier().Release(ticket.ref());
  decode->tier().Release(other.ref());
  EXPECT_TRUE(Eventually([&] { return Pins() == 0; }));
}

TEST_P(DigestWriteTest, StoresWithoutRoomOrGone_RefuseAndNothingIsHeld) {
  TestStoreOptions small;
  small.arena_bytes = 256 * kKiB;
  StartStores(1, small);
  const Calibration calibration = MakeCalibration({{1}, {0, 1}});
  const DigestLayout layout = Layout(calibration);
  const std::vector<int32_t> tokens = Tokens(1000, 5);
  const auto selections = Prefill(calibration, {tokens});
  const auto worker = DigestWorker("prefill", layout);
  const HeldTicket ticket = NewTicket(View());
  const SequenceBlocks names = PlaneNames(tokens, ticket.ticket.id).Under(Chain(layout));
  // Two sequences of other requests fill it.
  for (int32_t first : {1, 2}) {
    const HeldTicket other = NewTicket(View());
    SequenceBlocks held(Chain(layout), other.ticket.id);
    held.Append(std::vector<int32_t>(1000, first));
    ASSERT_TRUE(worker->tier().Reserve(other, held.blocks(), 0, ReserveMode::kAllOrNothing).ok());
  }
  const auto full = OpenDigestWrite(worker->tier(), ticket, names, layout, *selections[0]);
  EXPECT_EQ(full->refused, 62);
  EXPECT_EQ(Store(*worker, ticket, *full), 0);
  stores_[0]->Kill();
  const auto gone = OpenDigestWrite(worker->tier(), ticket, names, layout, *selections[0]);
  EXPECT_EQ(gone->refused, 62);
  EXPECT_EQ(Store(*worker, ticket, *gone), 0);
}

INSTANTIATE_TEST_SUITE_P(Planes, DigestWriteTest, ::testing::Values(TestPlane::kLoopback),
                         [](const auto& info) { return TestPlaneName(info.param); });

}  // namespace
}  // namespace kvt
