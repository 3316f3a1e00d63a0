#include "kernels/cpu/onednn_matrix.h"

#include <dnnl.hpp>
#include <omp.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/random.h"
#include "kernels/base/units.h"
#include "kernels/cpu/elementwise.h"

namespace kvt {

using dnnl::memory;

namespace {

constexpr int kRowCounts[] = {1, 2, 4, 8, 16, 32, 64, kOneDnnRowsMax};
constexpr int kRowCountsSize = static_cast<int>(std::size(kRowCounts));
// Columns of a slice come in multiples of oneDNN's block.
constexpr int kSliceColumns = 64;

memory::data_type DataType(ComputeType compute) {
  return compute == ComputeType::kBf16 ? memory::data_type::bf16 : memory::data_type::f32;
}
size_t ElementBytes(ComputeType compute) { return compute == ComputeType::kBf16 ? 2 : 4; }

// Primitives created here run on the calling thread alone.
class OneThread {
 public:
  OneThread() : before_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~OneThread() { omp_set_num_threads(before_); }

 private:
  const int before_;
};

// Products of any row count with [in, out] weights of one shape.
struct Shape {
  memory::desc weights;
  std::string implementation;
  struct Rows {
    bool usable = false;
    memory::desc a, c, scratch;
    dnnl::matmul primitive;
  };
  Rows rows[kRowCountsSize];
  size_t scratch_bytes = 0;
};

void Execute(const dnnl::engine& engine, dnnl::stream& stream, const Shape& shape,
             const Shape::Rows& rows, const void* a, const void* weights, float* c, void* scratch) {
  const memory ma(rows.a, engine, const_cast<void*>(a));
  const memory mw(shape.weights, engine, const_cast<void*>(weights));
  const memory mc(rows.c, engine, c);
  const memory ms(rows.scratch, engine, scratch);
  rows.primitive.execute(stream, {{DNNL_ARG_SRC, ma},
                                  {DNNL_ARG_WEIGHTS, mw},
                                  {DNNL_ARG_DST, mc},
                                  {DNNL_ARG_SCRATCHPAD, ms}});
}

}  // namespace

class OneDnnContext {
 public:
  explicit OneDnnContext(int thread_count) : threads(thread_count) {
    for (int i = 0; i < threads; ++i) streams.emplace_back(engine);
  }
  // Null when oneDNN has no packed implementation of the shape.
  const Shape* FindShape(ComputeType compute, int in, int out);

  const int threads;
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  std::vector<dnnl::stream> streams;  // one a member
  Mutex mutex;                        // guards the maps: matrices may be packed by several threads
  std::map<std::tuple<ComputeType, int, int>, std::unique_ptr<Shape>> shapes;
  std::map<std::tuple<ComputeType, int, int>, bool> probed;  // slices agree with the whole
};

void OneDnnContextDeleter::operator()(OneDnnContext* context) const { delete context; }

OneDnnContextPtr NewOneDnnContext(int threads) { return OneDnnContextPtr(new OneDnnContext(threads)); }

namespace {

// Primitives of all row counts; their probe is done by ProbeRows.
std::unique_ptr<Shape> MakeShape(const dnnl::engine& engine, ComputeType compute, int in, int out) {
  const OneThread one_thread;
  const memory::data_type type = DataType(compute);
  auto shape = std::make_unique<Shape>();
  const auto a_desc = [&](int m) { return memory::desc({m, in}, type, memory::format_tag::ab); };
  const auto c_desc = [&](int m) {
    return memory::desc({m, out}, memory::data_type::f32, memory::format_tag::ab);
  };
  const dnnl::matmul::primitive_desc packed(
      {a_desc(64), memory::desc({in, out}, type, memory::format_tag::any), c_desc(64)}, engine);
  shape->weights = packed.weights_desc();
  shape->implementation = packed.impl_info_str();
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  for (int i = 0; i < kRowCountsSize; ++i) {
    Shape::Rows& rows = shape->rows[i];
    rows.a = a_desc(kRowCounts[i]);
    rows.c = c_desc(kRowCounts[i]);
    const dnnl::matmul::primitive_desc pd({rows.a, shape->weights, rows.c}, attributes, engine);
    if (shape->implementation != pd.impl_info_str()) continue;
    rows.scratch = pd.scratchpad_desc();
    shape->scratch_bytes = std::max(shape->scratch_bytes, rows.scratch.get_size());
    rows.primitive = dnnl::matmul(pd);
    rows.usable = true;
  }
  return shape;
}

// Random act rows, the same for every shape.
std::vector<uint8_t> ProbeRowsOf(ComputeType compute, int in) {
  Random random(17);
  std::vector<uint8_t> a(static_cast<size_t>(kOneDnnRowsMax) * static_cast<size_t>(in) *
                         ElementBytes(compute));
  for (size_t i = 0; i < a.size() / ElementBytes(compute); ++i) {
    const float value = static_cast<float>(random.Uniform() * 4 - 2);
    if (compute == ComputeType::kBf16) {
      const uint16_t bits = RoundToBf16(value);
      std::memcpy(&a[i * 2], &bits, 2);
    } else {
      std::memcpy(&a[i * 4], &value, 4);
    }
  }
  return a;
}

// Takes row counts that do not give the largest one's rows bit for bit out of the set. Returns
// whether the largest itself treats a row alike wherever it stands.
bool ProbeRows(const dnnl::engine& engine, Shape& shape, ComputeType compute, int in, int out,
               const void* weights) {
  dnnl::stream stream(engine);
  std::vector<uint8_t> scratch(shape.scratch_bytes + 1);
  const std::vector<uint8_t> a = ProbeRowsOf(compute, in);
  const size_t row_bytes = static_cast<size_t>(in) * ElementBytes(compute);
  const size_t columns = static_cast<size_t>(out);
  const Shape::Rows& largest = shape.rows[kRowCountsSize - 1];
  if (!largest.usable) return false;
  std::vector<float> want(columns * kOneDnnRowsMax), got(columns * kOneDnnRowsMax);
  Execute(engine, stream, shape, largest, a.data(), weights, want.data(), scratch.data());
  // Rotated by an odd step, each row stands elsewhere.
  constexpr int kStep = 37;
  std::vector<uint8_t> rotated(a.size());
  for (int r = 0; r < kOneDnnRowsMax; ++r) {
    std::memcpy(&rotated[static_cast<size_t>((r + kStep) % kOneDnnRowsMax) * row_bytes],
                &a[static_cast<size_t>(r) * row_bytes], row_bytes);
  }
  Execute(engine, stream, shape, largest, rotated.data(), weights, got.data(), scratch.data());
  for (int r = 0; r < kOneDnnRowsMax; ++r) {
    if (std::memcmp(&want[static_cast<size_t>(r) * columns],
                    &got[static_cast<size_t>((r + kStep) % kOneDnnRowsMax) * columns],
                    columns * sizeof(float)) != 0) {
      return false;
    }
  }
  for (int i = 0; i + 1 < kRowCountsSize; ++i) {
    Shape::Rows& rows = shape.rows[i];
    if (!rows.usable) continue;
    Execute(engine, stream, shape, rows, a.data(), weights, got.data(), scratch.data());
    rows.usable = std::memcmp(want.data(), got.data(),
                              static_cast<size_t>(kRowCounts[i]) * columns * sizeof(float)) == 0;
  }
  return true;
}

// Columns of one member: a range of the product's columns, or with kSwiGlu the same range of gate
// and of up, stacked.
struct Slice {
  int begin = 0;
  int columns = 0;  // of one of the two
  const Shape* shape = nullptr;
  WeightArena::Piece weights;
};

class OneDnnMatrix final : public CpuMatrix {
 public:
  OneDnnMatrix(OneDnnContext& context, ComputeType compute, MatmulEpilogue epilogue,
               int in_features, int out_features, std::vector<Slice> slices)
      : CpuMatrix(compute, epilogue, in_features, out_features),
        context_(context),
        slices_(std::move(slices)) {
    set_implementation(absl::StrCat("onednn-", DNNL_VERSION_MAJOR, ".", DNNL_VERSION_MINOR, ".",
                                    DNNL_VERSION_PATCH, " ", slices_[0].shape->implementation));
  }

  size_t bytes() const override {
    size_t sum = 0;
    for (const Slice& slice : slices_) {
      if (slice.columns > 0) sum += slice.shape->weights.get_size();
    }
    return sum;
  }
  size_t WorkspaceBytes(int) const override {
    size_t largest = 0;
    for (const Slice& slice : slices_) largest = std::max(largest, SliceWorkspaceBytes(slice));
    return largest * slices_.size();
  }
  void Multiply(const MatmulArgs& args, TeamMember& member) const override;

 private:
  int Stacked(const Slice& slice) const {
    return slice.columns * (epilogue_kind() == MatmulEpilogue::kSwiGlu ? 2 : 1);
  }
  size_t PanelBytes(const Slice& slice) const {
    return RoundUp(static_cast<size_t>(kOneDnnRowsMax) * static_cast<size_t>(Stacked(slice)) * 4, 64);
  }
  size_t PaddedBytes() const {
    return RoundUp(static_cast<size_t>(kOneDnnRowsMax) * static_cast<size_t>(in_features()) *
                       ElementBytes(compute()), 64);
  }
  size_t SliceWorkspaceBytes(const Slice& slice) const {
    if (slice.columns == 0) return 0;
    return PanelBytes(slice) + PaddedBytes() + RoundUp(slice.shape->scratch_bytes, 64);
  }
  // Panel rows to their place, with the epilogue.
  void Finish(const MatmulArgs& args, const Slice& slice, int row, int rows, const float* panel) const;

  OneDnnContext& context_;
  const std::vector<Slice> slices_;
};

void OneDnnMatrix::Multiply(const MatmulArgs& args, TeamMember& member) const {
  const Slice& slice = slices_[static_cast<size_t>(member.index())];
  if (slice.columns == 0) return;
  uint8_t* workspace = static_cast<uint8_t*>(args.workspace) +
                       WorkspaceBytes(0) / slices_.size() * static_cast<size_t>(member.index());
  float* panel = reinterpret_cast<float*>(workspace);
  uint8_t* padded = workspace + PanelBytes(slice);
  uint8_t* scratch = padded + PaddedBytes();
  const size_t row_bytes = static_cast<size_t>(in_features()) * ElementBytes(compute());
  for (int row = 0; row < args.rows;) {
    const int rows = std::min(args.rows - row, kOneDnnRowsMax);
    int choice = 0;
    while (kRowCounts[choice] < rows || !slice.shape->rows[choice].usable) ++choice;
    const uint8_t* a = static_cast<const uint8_t*>(args.a) + static_cast<size_t>(row) * row_bytes;
    if (kRowCounts[choice] != rows) {
      const size_t used = static_cast<size_t>(rows) * row_bytes;
      std::memcpy(padded, a, used);
      std::memset(padded + used, 0, static_cast<size_t>(kRowCounts[choice]) * row_bytes - used);
      a = padded;
    }
    Execute(context_.engine, context_.streams[static_cast<size_t>(member.index())], *slice.shape,
            slice.shape->rows[choice], a, slice.weights.data, panel, scratch);
    Finish(args, slice, row, rows, panel);
    row += rows;
  }
}

void OneDnnMatrix::Finish(const MatmulArgs& args, const Slice& slice, int row, int rows,
                          const float* panel) const {
  const size_t columns = static_cast<size_t>(slice.columns);
  const size_t panel_stride = static_cast<size_t>(Stacked(slice));
  const bool swiglu = args.epilogue == MatmulEpilogue::kSwiGlu;
  const size_t stride = static_cast<size_t>(swiglu ? out_features() / 2 : out_features());
  for (int r = 0; r < rows; ++r) {
    const float* from = panel + static_cast<size_t>(r) * panel_stride;
    const size_t at = static_cast<size_t>(row + r) * stride + static_cast<size_t>(slice.begin);
    switch (args.epilogue) {
      case MatmulEpilogue::kStore:
        std::memcpy(static_cast<float*>(args.out) + at, from, columns * sizeof(float));
        break;
      case MatmulEpilogue::kAdd: {
        float* out = static_cast<float*>(args.out) + at;
        for (size_t c = 0; c < columns; ++c) out[c] += from[c];
        break;
      }
      case MatmulEpilogue::kSwiGlu:
        CpuSwiGluRow(from, from + columns, slice.columns, compute(),
                     static_cast<uint8_t*>(args.out) + at * ElementBytes(compute()));
        break;
    }
  }
}

// Rows [begin, begin + columns) of the stacked parts as a dense [in][columns] f32 matrix.
void CopyColumns(absl::Span<const WeightPart> parts, int in, int begin, int columns, float* out,
                 int out_stride) {
  int first = 0;
  for (const WeightPart& part : parts) {
    const WeightReader reader(part, in);
    const int from = std::max(begin, first);
    const int to = std::min(begin + columns, first + part.out_features);
    for (int o = from; o < to; ++o) {
      for (int i = 0; i < in; ++i) {
        out[static_cast<size_t>(i) * static_cast<size_t>(out_stride) +
            static_cast<size_t>(o - begin)] = reader.At(o - first, i);
      }
    }
    first += part.out_features;
  }
}

}  // namespace

const Shape* OneDnnContext::FindShape(ComputeType compute, int in, int out) {
  std::unique_ptr<Shape>& shape = shapes[{compute, in, out}];
  if (shape == nullptr) shape = MakeShape(engine, compute, in, out);
  return shape.get();
}

absl::StatusOr<std::unique_ptr<CpuMatrix>> PackOneDnnMatrix(OneDnnContext& context,
                                                            WeightArena& arena, ComputeType compute,
                                                            MatmulEpilogue epilogue,
                                                            int in_features,
                                                            absl::Span<const WeightPart> parts) {
  const bool swiglu = epilogue == MatmulEpilogue::kSwiGlu;
  int out_features = 0;
  for (const WeightPart& part : parts) out_features += part.out_features;
  const int divided = swiglu ? out_features / 2 : out_features;
  const int blocks = static_cast<int>(CeilDiv(static_cast<uint64_t>(divided), kSliceColumns));
  MutexLock lock(context.mutex);
  try {
    const OneThread one_thread;
    dnnl::stream stream(context.engine);
    std::vector<Slice> slices(static_cast<size_t>(context.threads));
    for (int t = 0; t < context.threads; ++t) {
      Slice& slice = slices[static_cast<size_t>(t)];
      slice.begin = std::min(divided, blocks * t / context.threads * kSliceColumns);
      slice.columns =
          std::min(divided, blocks * (t + 1) / context.threads * kSliceColumns) - slice.begin;
      if (slice.columns == 0) continue;
      const int stacked = slice.columns * (swiglu ? 2 : 1);
      slice.shape = context.FindShape(compute, in_features, stacked);
      std::vector<float> plain(static_cast<size_t>(in_features) * static_cast<size_t>(stacked));
      if (swiglu) {
        CopyColumns(parts.subspan(0, 1), in_features, slice.begin, slice.columns, plain.data(),
                    stacked);
        CopyColumns(parts.subspan(1, 1), in_features, slice.begin, slice.columns,
                    plain.data() + slice.columns, stacked);
      } else {
        CopyColumns(parts, in_features, slice.begin, slice.columns, plain.data(), stacked);
      }
      KVT_ASSIGN_OR_RETURN(slice.weights, arena.Take(slice.shape->weights.get_size()));
      memory source({{in_features, stacked}, memory::data_type::f32, memory::format_tag::ab},
                    context.engine, plain.data());
      memory packed(slice.shape->weights, context.engine, slice.weights.data);
      dnnl::reorder(source, packed).execute(stream, source, packed);
      stream.wait();
      const auto [probe, is_new] =
          context.probed.try_emplace({compute, in_features, stacked}, false);
      if (is_new) {
        probe->second = ProbeRows(context.engine, *context.shapes[{compute, in_features, stacked}],
                                  compute, in_features, stacked, slice.weights.data);
      }
      if (!probe->second) return nullptr;
    }
    // Member 0 has columns unless there are fewer blocks than members; then the last has.
    if (slices[0].shape == nullptr) slices[0].shape = slices.back().shape;
    return std::make_unique<OneDnnMatrix>(context, compute, epilogue, in_features, out_features,
                                          std::move(slices));
  } catch (const dnnl::error&) {
    return nullptr;
  }
}

bool OneDnnBf16IsFaster() {
  if (!__builtin_cpu_supports("avx512bf16")) return false;
  const auto isa = dnnl::get_effective_cpu_isa();
  if (isa == dnnl::cpu_isa::avx512_core_amx) return true;
  return __builtin_cpu_is("amd") && isa >= dnnl::cpu_isa::avx512_core_bf16;
}

}  // namespace kvt
