// The numerics contract (DESIGN 2), bit for bit: the logits of a position depend on its sequence
// alone, whatever the batch mates, chunk bounds, prefix reuse, placement in slots, and number of
// threads. On seeded random models in both compute types, and on the real model where it is there.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "kernels/base/check.h"
#include "kernels/base/random.h"
#include "kernels/base/units.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/model/model_config.h"
#include "kernels/model/transformer.h"
#include "tests/support/model_folder.h"
#include "tests/support/random_model.h"

namespace kvt {
namespace {

using Compute = TransformerOptions::Compute;
using Tokens = std::vector<int32_t>;
using Logits = std::vector<float>;  // [rows][vocab]

constexpr absl::Duration kDeadline = absl::Seconds(100);
constexpr int kTableRows = 20;
constexpr int kRowTokens = 640;
constexpr uint64_t kSeed = 20261129;

// One sequence's share of a step.
struct Rows {
  int table_row;
  int first_position;
  Tokens tokens;
};

// A loaded model with room for kTableRows sequences of kRowTokens tokens, each block in slots of its
// own, scattered over the arena.
class Bench {
 public:
  Bench(const std::string& folder, Compute compute, int threads) {
    CpuDeviceOptions options;
    options.threads = threads;
    device_ = MakeCpuDevice(options).value();
    auto model = Transformer::Load(folder, *device_, {.compute = compute});
    KVT_CHECK(model.ok(), model.status().ToString());
    model_ = std::move(model).value();
    layers_ = model_->geometry().layers;
    vocab_ = static_cast<size_t>(model_->config().vocab);
    stream_ = device_->NewStream(StreamPriority::kNormal);
    event_ = device_->NewEvent();
    state_ = model_->NewStepState({.rows = 600, .logits_rows = 600, .segments = kTableRows}).value();
    constexpr int kBlocks = kRowTokens / kBlockTokens;
    const uint32_t slots = 2u * static_cast<uint32_t>(kTableRows * layers_ * kBlocks);
    cache_ = KvCache::Create(*device_, model_->geometry(),
                             {.slot_count = slots, .table_rows = kTableRows,
                              .blocks_per_row = kBlocks}).value();
    // A permutation of the slots: odd multiplier modulo a power of two, skipping what is too large.
    uint32_t modulus = 1;
    while (modulus < slots) modulus *= 2;
    uint32_t next = 0;
    const auto take = [&] {
      do next = (next * 5 + 12345) % modulus;
      while (next >= slots);
      return next;
    };
    for (int row = 0; row < kTableRows; ++row) {
      for (int layer = 0; layer < layers_; ++layer) {
        std::vector<SlotPair> pairs(kBlocks);
        for (SlotPair& pair : pairs) {
          pair.base = take();
          pair.residual = take();
        }
        cache_->SetTable(*stream_, row, layer, 0, pairs);
      }
    }
  }

  // One step; logits of every row.
  Logits Step(const std::vector<Rows>& rows) {
    std::vector<StepSegment> segments;
    size_t count = 0;
    for (const Rows& r : rows) {
      segments.push_back(
          {r.table_row, r.first_position, r.tokens, static_cast<int>(r.tokens.size())});
      count += r.tokens.size();
    }
    model_->Begin(*stream_, *state_, *cache_, segments);
    for (int layer = 0; layer < layers_; ++layer) {
      model_->ProjectQkv(*stream_, *state_, layer);
      model_->Attend(*stream_, *state_, layer);
      model_->FinishLayer(*stream_, *state_, layer);
    }
    model_->Logits(*stream_, *state_);
    Logits logits(count * vocab_);
    model_->ReadLogits(*stream_, *state_, logits.data());
    stream_->Record(*event_);
    KVT_CHECK(event_->HostWait(kDeadline));
    return logits;
  }

  // A whole sequence in chunks.
  Logits Prefill(int table_row, const Tokens& tokens, int chunk, int first = 0) {
    Logits all;
    for (size_t at = static_cast<size_t>(first); at < tokens.size();
         at += static_cast<size_t>(chunk)) {
      const size_t n = std::min(static_cast<size_t>(chunk), tokens.size() - at);
      const auto from = tokens.begin() + static_cast<ptrdiff_t>(at);
      const Logits part = Step({{table_row, static_cast<int>(at),
                                 Tokens(from, from + static_cast<ptrdiff_t>(n))}});
      all.insert(all.end(), part.begin(), part.end());
    }
    return all;
  }

  // Copies the bytes of the first `blocks` blocks of one sequence into the slots of another.
  void CopyPrefix(int from, int to, int blocks) {
    for (int layer = 0; layer < layers_; ++layer) {
      for (int b = 0; b < blocks; ++b) {
        const SlotPair& a = cache_->Table(from, layer)[b];
        const SlotPair& z = cache_->Table(to, layer)[b];
        std::memcpy(cache_->SlotAddress(z.base), cache_->SlotAddress(a.base), cache_->slot_bytes());
        std::memcpy(cache_->SlotAddress(z.residual), cache_->SlotAddress(a.residual),
                    cache_->slot_bytes());
      }
    }
  }

  // Overwrites a block's slots: whoever reads it before it is computed again is found out.
  void Spoil(int row, int block) {
    for (int layer = 0; layer < layers_; ++layer) {
      const SlotPair& pair = cache_->Table(row, layer)[block];
      std::memset(cache_->SlotAddress(pair.base), 0x3a, cache_->slot_bytes());
      std::memset(cache_->SlotAddress(pair.residual), 0x77, cache_->slot_bytes());
    }
  }

  // Whether the KV of a block is the same, bit for bit, in two sequences, both planes, all layers.
  bool SameKv(int a, int b, int block) const {
    for (int layer = 0; layer < layers_; ++layer) {
      const SlotPair& x = cache_->Table(a, layer)[block];
      const SlotPair& y = cache_->Table(b, layer)[block];
      if (std::memcmp(cache_->SlotAddress(x.base), cache_->SlotAddress(y.base),
                      cache_->slot_bytes()) != 0 ||
          std::memcmp(cache_->SlotAddress(x.residual), cache_->SlotAddress(y.residual),
                      cache_->slot_bytes()) != 0) {
        return false;
      }
    }
    return true;
  }

  // Lets one sequence read the first blocks of another in place.
  void SharePrefix(int from, int to, int blocks) {
    for (int layer = 0; layer < layers_; ++layer) {
      const SlotPair* table = cache_->Table(from, layer);
      cache_->SetTable(*stream_, to, layer, 0,
                       std::vector<SlotPair>(table, table + blocks));
    }
  }

  Tokens RandomTokens(int count, uint64_t seed) const {
    Random random(seed);
    Tokens tokens(static_cast<size_t>(count));
    for (int32_t& token : tokens) token = static_cast<int32_t>(random.Below(vocab_));
    return tokens;
  }

  Logits Row(const Logits& logits, size_t row) const {
    return {logits.begin() + static_cast<ptrdiff_t>(row * vocab_),
            logits.begin() + static_cast<ptrdiff_t>((row + 1) * vocab_)};
  }
  Logits LastRow(const Logits& logits) const { return Row(logits, logits.size() / vocab_ - 1); }
  size_t vocab() const { return vocab_; }
  const std::string& numerics_id() const { return model_->numerics_id(); }

 private:
  std::unique_ptr<Device> device_;
  std::unique_ptr<Transformer> model_;
  std::unique_ptr<KvCache> cache_;
  std::unique_ptr<StepState> state_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Event> event_;
  int layers_ = 0;
  size_t vocab_ = 0;
};

// Bits, not values: a NaN equals itself and 0 is not -0.
::testing::AssertionResult SameBits(const Logits& a, const Logits& b) {
  if (a.size() != b.size()) return ::testing::AssertionFailure() << a.size() << " and " << b.size();
  size_t different = 0, first = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::memcmp(&a[i], &b[i], sizeof(float)) != 0 && different++ == 0) first = i;
  }
  if (different == 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << different << " of " << a.size() << " differ, first at "
                                       << first << ": " << a[first] << " and " << b[first];
}

struct Case {
  std::string model;  // a random spec's name, or "real"
  Compute compute;
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const RandomModelSpec& spec : RandomModelSpecs()) {
    cases.push_back({spec.name, Compute::kF32});
    cases.push_back({spec.name, Compute::kBf16});
  }
  cases.push_back({"real", Compute::kBf16});
  cases.push_back({"real", Compute::kF32});
  return cases;
}

class NumericsContract : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (GetParam().model == "real") {
      folder_ = RealModelFolder();
      KVT_SKIP_WITHOUT_MODEL(folder_);
      return;
    }
    for (const RandomModelSpec& spec : RandomModelSpecs()) {
      if (spec.name == GetParam().model) WriteRandomModel(spec, temp_.path());
    }
    folder_ = temp_.path();
  }
  std::unique_ptr<Bench> NewBench(int threads = 2) {
    return std::make_unique<Bench>(folder_, GetParam().compute, threads);
  }
  // The real model is slow: shorter sequences, the same shapes.
  int Length(int tokens) const { return GetParam().model == "real" ? tokens / 2 : tokens; }

 private:
  TempFolder temp_;
  std::string folder_;
};

TEST_P(NumericsContract, ChunkBounds_DoNotChangeLogits) {
  const auto bench = NewBench();
  const Tokens tokens = bench->RandomTokens(Length(550), kSeed);
  const Logits want = bench->Prefill(0, tokens, 512);
  for (const int chunk : {100, 16}) {
    EXPECT_TRUE(SameBits(bench->Prefill(1, tokens, chunk), want)) << "chunk " << chunk;
  }
  // Token by token, the first positions.
  const Tokens head(tokens.begin(), tokens.begin() + 40);
  const Logits steps = bench->Prefill(2, head, 1);
  EXPECT_TRUE(SameBits(steps, Logits(want.begin(), want.begin() + static_cast<ptrdiff_t>(
                                                       40 * bench->vocab()))));
}

TEST_P(NumericsContract, BatchMates_DoNotChangeLogits) {
  const auto bench = NewBench();
  constexpr int kSequences = 17;
  std::vector<Tokens> sequences;
  std::vector<Logits> want;
  for (int s = 0; s < kSequences; ++s) {
    sequences.push_back(bench->RandomTokens(Length(3 + s * 23), kSeed + static_cast<uint64_t>(s)));
    want.push_back(bench->LastRow(bench->Prefill(s, sequences.back(), 512)));
  }
  for (const int batch : {1, 3, 8, 17}) {
    std::vector<Rows> rows;
    for (int s = 0; s < batch; ++s) {
      const Tokens& tokens = sequences[static_cast<size_t>(s)];
      rows.push_back({s, static_cast<int>(tokens.size()) - 1, {tokens.back()}});
    }
    const Logits got = bench->Step(rows);
    for (int s = 0; s < batch; ++s) {
      EXPECT_TRUE(SameBits(bench->Row(got, static_cast<size_t>(s)), want[static_cast<size_t>(s)]))
          << "row " << s << " of " << batch;
    }
  }
  // Decode rows beside a prefill chunk, the chunk in the middle.
  const Tokens chunk = bench->RandomTokens(Length(200), kSeed + 99);
  const Logits alone = bench->Prefill(18, chunk, 512);
  std::vector<Rows> mixed;
  for (int s = 0; s < 8; ++s) {
    if (s == 3) mixed.push_back({19, 0, chunk});
    const Tokens& tokens = sequences[static_cast<size_t>(s)];
    mixed.push_back({s, static_cast<int>(tokens.size()) - 1, {tokens.back()}});
  }
  const Logits got = bench->Step(mixed);
  EXPECT_TRUE(SameBits(bench->Row(got, 0), want[0]));
  EXPECT_TRUE(SameBits(bench->LastRow(got), want[7]));
  const auto chunk_begin = got.begin() + static_cast<ptrdiff_t>(3 * bench->vocab());
  EXPECT_TRUE(SameBits(Logits(chunk_begin, chunk_begin + static_cast<ptrdiff_t>(alone.size())),
                       alone));
}

TEST_P(NumericsContract, PrefixReuse_DoesNotChangeLogits) {
  const auto bench = NewBench();
  const Tokens tokens = bench->RandomTokens(Length(300), kSeed + 7);
  const Logits want = bench->Prefill(0, tokens, 512);
  const int blocks = static_cast<int>((tokens.size() - 1) / kBlockTokens);
  const int reused = blocks * kBlockTokens;
  const Logits suffix(want.begin() + static_cast<ptrdiff_t>(static_cast<size_t>(reused) *
                                                            bench->vocab()), want.end());
  bench->CopyPrefix(0, 1, blocks);
  EXPECT_TRUE(SameBits(bench->Prefill(1, tokens, 512, reused), suffix)) << "copied slots";
  bench->SharePrefix(0, 2, blocks);
  EXPECT_TRUE(SameBits(bench->Prefill(2, tokens, 512, reused), suffix)) << "shared slots";
  // Half of the prefix reused, the rest computed in chunks.
  bench->CopyPrefix(0, 3, blocks / 2);
  const int half = blocks / 2 * kBlockTokens;
  EXPECT_TRUE(SameBits(bench->LastRow(bench->Prefill(3, tokens, 100, half)),
                       bench->LastRow(want)));
}

// What a prefill job with holes does: lost ranges are computed in place, in order, over the KV that
// exists before them; what lies behind them is not touched.
TEST_P(NumericsContract, HolesComputedInPlace_EqualAFullPrefillBitForBit) {
  const auto bench = NewBench();
  const Tokens tokens = bench->RandomTokens(Length(400), kSeed + 11);
  const Logits want = bench->Prefill(0, tokens, 512);
  const int full = static_cast<int>(tokens.size()) / kBlockTokens;
  bench->CopyPrefix(0, 1, full);
  const std::vector<std::pair<int, int>> holes = {{0, 1}, {3, 6}, {full / 2, full / 2 + 2}};
  for (const auto& [begin, end] : holes) {
    for (int b = begin; b < end; ++b) {
      bench->Spoil(1, b);
      EXPECT_FALSE(bench->SameKv(0, 1, b));
    }
  }
  for (const auto& [begin, end] : holes) {
    const Tokens until(tokens.begin(), tokens.begin() + end * kBlockTokens);
    (void)bench->Prefill(1, until, 32, begin * kBlockTokens);
  }
  for (int b = 0; b < full; ++b) EXPECT_TRUE(bench->SameKv(0, 1, b)) << "block " << b;
  const int reused = static_cast<int>(tokens.size() - 1) / kBlockTokens * kBlockTokens;
  EXPECT_TRUE(SameBits(bench->LastRow(bench->Prefill(1, tokens, 512, reused)),
                       bench->LastRow(want)));
}

TEST_P(NumericsContract, Threads_DoNotChangeLogitsOrId) {
  const auto two = NewBench(2);
  const Tokens tokens = two->RandomTokens(Length(150), kSeed + 8);
  const Logits want = two->Prefill(0, tokens, 100);
  for (const int threads : {1, 3}) {
    const auto bench = NewBench(threads);
    EXPECT_EQ(bench->numerics_id(), two->numerics_id());
    EXPECT_TRUE(SameBits(bench->Prefill(0, tokens, 100), want)) << threads << " threads";
  }
}

INSTANTIATE_TEST_SUITE_P(Models, NumericsContract, ::testing::ValuesIn(Cases()),
                         [](const ::testing::TestParamInfo<Case>& info) {
                           std::string name = info.param.model + "_" +
                                              (info.param.compute == Compute::kF32 ? "f32" : "bf16");
                           std::replace_if(name.begin(), name.end(),
                                           [](char c) { return !std::isalnum(c); }, '_');
                           return name;
                         });

}  // namespace
}  // namespace kvt
