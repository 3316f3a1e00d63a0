// Digests: kernels/cuda/select_blocks.h.
#include <cuda_fp16.h>

#include "kernels/base/check.h"
#include "kernels/cuda/cuda_launch.h"
#include "kernels/cuda/select_blocks.h"
#include "kernels/cuda/select_math.h"
#include "kernels/cuda/select_spec.h"
#include "kernels/layout/named_layout.h"
#include "kernels/layout/planes.h"

namespace kvt {
namespace {

constexpr int kDigestThreads = 128;

struct DigestParams {
  SelectSpec spec;
  const uint8_t* slots;
  const SlotPair* blocks;
  const uint32_t* entries;
  uint8_t* digests;
  int count;
  uint32_t slot_bytes;
  uint32_t slice_bytes;
};

// A thread makes the codes of 32 channels of one token.
template <int kBits>
__global__ void __launch_bounds__(kDigestThreads)
    DigestKernel(const __grid_constant__ DigestParams params) {
  const SelectSpec& spec = params.spec;
  const int64_t thread = int64_t{blockIdx.x} * kDigestThreads + threadIdx.x;
  const int token = static_cast<int>(thread % kBlockTokens);
  const int64_t group = thread / kBlockTokens;
  const int first = static_cast<int>(group % (spec.head_dim / 32)) * 32;
  const int64_t task = group / (spec.head_dim / 32);
  const int h = static_cast<int>(task % spec.head_count);
  const int64_t block = task / spec.head_count;
  if (block >= params.count) return;

  const DigestHead& head = spec.heads[h];
  const SlotPair pair = params.blocks[block];
  if (pair.base == kSlotNone) __trap();
  const size_t slice = static_cast<size_t>(head.kv_head) * params.slice_bytes;
  const uint8_t* base = params.slots + size_t{pair.base} * params.slot_bytes + slice;
  const uint8_t* residual = pair.residual == kSlotNone
                                ? nullptr
                                : params.slots + size_t{pair.residual} * params.slot_bytes + slice;
  const uint32_t entry =
      params.entries == nullptr ? static_cast<uint32_t>(block) : params.entries[block];
  auto* digest = reinterpret_cast<uint32_t*>(params.digests + size_t{entry} * spec.digest_bytes +
                                             static_cast<size_t>(h) * spec.head_bytes);
  uint32_t codes[32];
  KVT_UNROLL
  for (int i = 0; i < 32; ++i) {
    const int d = first + i;
    const uint32_t at = KOffset(token, d);
    const uint16_t bits =
        residual == nullptr ? JoinBase(base[at]) : JoinTarget(base[at], residual[at]);
    codes[i] = SelectKeyCode(__half2float(__ushort_as_half(bits)), head.offset[d],
                             1.0f / head.scale[d], kBits);
  }
  SelectWriteCodes<kBits>(digest, spec.head_dim, token, first, [&](int i) { return codes[i]; });
}

using DigestKernelPointer = void (*)(DigestParams);
DigestKernelPointer DigestKernelOf(int bits) {
  return bits == 2 ? DigestKernel<2> : bits == 3 ? DigestKernel<3> : DigestKernel<4>;
}

}  // namespace

absl::Status CudaMakeDigest(const MakeDigestArgs& args, CUstream_st* stream) {
  constexpr char kOp[] = "make digest";
  KVT_RETURN_IF_ERROR(ValidateSelectSpec(kOp, args.geometry, args.spec));
  if (args.count < 0)
    return absl::InvalidArgumentError(absl::StrCat(kOp, ": count = ", args.count));
  if (args.count == 0) return absl::OkStatus();
  if (args.slots == nullptr || args.blocks == nullptr ||
      !IsAligned(args.digests, sizeof(uint32_t))) {
    return absl::InvalidArgumentError(
        absl::StrCat(kOp, ": slots or blocks is null, or digests null or not 4-byte aligned"));
  }
  DigestParams params = {};
  params.spec = SelectSpecOf(args.spec, args.geometry.head_dim);
  params.slots = args.slots;
  params.blocks = args.blocks;
  params.entries = args.entries;
  params.digests = args.digests;
  params.count = args.count;
  params.slot_bytes = args.geometry.SlotBytes();
  params.slice_bytes = args.geometry.SliceBytes();
  const int64_t threads =
      int64_t{args.count} * params.spec.head_count * (params.spec.head_dim / 32) * kBlockTokens;
  const auto grid = static_cast<unsigned>((threads + kDigestThreads - 1) / kDigestThreads);
  return CudaLaunch(kOp, DigestKernelOf(args.spec.bits), dim3(grid), kDigestThreads, stream,
                    params);
}

}  // namespace kvt
