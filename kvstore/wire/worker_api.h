// What front ends and workers ask of prefill and decode workers. Implemented by the workers and by
// the gRPC client stubs (worker_rpc.h), which also serve an implementation. Thread-safe.
//
// A request's life: front end -> Prefill.Submit (streams events; the last names the decode worker)
// -> Prefill calls Decode.HandOver -> front end -> Decode.Attach from token 0 (streams tokens).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/base/ids.h"
#include "kvstore/index/block_key.h"
#include "kvstore/wire/coordinator_api.h"
#include "kvstore/wire/ticket.h"

namespace kvt {

struct SamplingParams {
  double temperature = 0;  // 0: greedy
  int top_k = 0;           // 0: off
  double top_p = 1.0;
  uint64_t seed = 0;
  friend bool operator==(const SamplingParams&, const SamplingParams&) = default;
};

struct SubmitRequest {
  SignedTicket ticket;
  std::vector<int32_t> tokens;  // ticket.prompt_tokens of them
  SamplingParams sampling;
  std::vector<int32_t> stop_tokens;  // the model's eos ids unless the caller ignores them
};

// What prefill did for a request.
struct PrefillFigures {
  uint64_t prompt_tokens = 0;
  uint64_t reused_tokens = 0;    // prefix hit
  uint64_t computed_tokens = 0;
  uint64_t pulled_bytes = 0;
  uint64_t pull_bursts = 0;
  uint64_t disk_blocks = 0;      // of those pulled: a store read them from its disk first
  uint64_t disk_bytes = 0;       // of pulled_bytes
  // Tokens whose KV the tier has, and that were computed because fetching it would have taken longer;
  // and why, by medium.
  uint64_t declined_tokens = 0;
  std::string declined;
  uint64_t pushed_bytes = 0;
  uint64_t push_bursts = 0;
  uint64_t saturated_values = 0;
  absl::Duration queued;
  absl::Duration compute;        // first chunk to first token
  absl::Duration hand_over;      // first token to acknowledged hand-over
};

struct PrefillEvent {
  enum class Kind : uint8_t { kProgress = 0, kFirstToken = 1, kHandedOver = 2 };
  Kind kind = Kind::kProgress;
  uint64_t tokens_done = 0;  // kProgress: prompt tokens present so far
  int32_t token = 0;         // kFirstToken: position prompt_tokens
  std::string decode_address;  // kHandedOver
  NodeName decode_worker;
  SignedTicket ticket;         // kHandedOver: grant D
  PrefillFigures figures;      // kHandedOver
};

// A suffix job (DESIGN 7): the decode worker lost stored blocks. `tokens` are all known ids, prompt and
// output so far; prefill reuses what the stores still have, recomputes the rest, and hands over to
// ticket.decode_worker again.
struct ResumeRequest {
  SignedTicket ticket;  // re-granted
  std::vector<int32_t> tokens;
  uint32_t prompt_tokens = 0;  // the first so many are the prompt
  SamplingParams sampling;
  std::vector<int32_t> stop_tokens;
  // As in HandOverRequest: how the sequence's blocks are named here, and are to be named again.
  uint32_t approximate_tokens = 0;
  Provenance provenance = Provenance::kExact;
};

struct HandOverRequest {
  SignedTicket ticket;          // grant D
  std::vector<int32_t> tokens;  // prompt (and, after a resume, output) whose KV lies in the tier
  uint32_t prompt_tokens = 0;
  // The token after `tokens`, sampled by prefill; after a resume too, where it equals what decode
  // would have sampled (numerics contract).
  int32_t next_token = 0;
  SamplingParams sampling;
  std::vector<int32_t> stop_tokens;
  PrefillFigures figures;
  // The last so many of `tokens` have KV of this provenance, not exact: their blocks have other names
  // (SequenceBlocks::Append). From a block's start on; 0: all are exact.
  uint32_t approximate_tokens = 0;
  Provenance provenance = Provenance::kExact;
  // The first selection of an offloaded request: by layer the blocks that the last of `tokens` chooses
  // from its middle (kernels/select/attention_stats.h), as indices into the sequence, ascending; none
  // in a dense layer. Empty: none was made. Made with the calibration of that id, as the digests that
  // lie in the tier beside the planes (kvstore/client/digest_blocks.h).
  std::vector<std::vector<int32_t>> selections;
  std::string calibration_id;
};
inline constexpr int kSelectionLayersMax = 256;
inline constexpr size_t kCalibrationIdBytesMax = 64;

enum class FinishReason : uint8_t { kRunning = 0, kStop = 1, kLength = 2, kCancelled = 3 };

struct DecodeFigures {
  uint64_t output_tokens = 0;
  uint64_t pulled_bytes = 0;
  uint64_t pull_bursts = 0;
  uint64_t blocks_pulled = 0;
  uint64_t disk_blocks = 0;        // of those: a store read them from its disk first
  uint64_t disk_bytes = 0;         // of pulled_bytes
  uint64_t block_bytes = 0;        // both planes of one block
  uint64_t write_back_bytes = 0;
  uint64_t prompt_tokens_computed = 0;  // by decode: only while no store is reachable
  uint64_t recomputed_suffixes = 0;
  TokenCounts computed;            // output tokens by fidelity
  absl::Duration admission;        // hand-over to first decode step
  // Of a request served offloaded; otherwise all zero.
  bool offloaded = false;
  uint64_t sequence_bytes = 0;   // KV of its tokens at admission, both planes
  uint64_t admission_bytes = 0;  // pulled before the first step, planes and digests
  uint64_t digest_bytes = 0;     // of those: digests
  uint64_t selected_blocks = 0;  // chosen from the middle, over all sparse steps and layers
  uint64_t hot_misses = 0;       // of those: were not on the device
  uint64_t sparse_steps = 0;     // steps in which a layer left something out
};

struct TokenEvent {
  std::vector<int32_t> tokens;  // in order; the first event of an attach starts at from_token
  FinishReason finish = FinishReason::kRunning;
  DecodeFigures figures;        // with the last event
  PrefillFigures prefill;       // with the last event
};

struct AttachRequest {
  TicketId id;
  std::string capability;
  uint64_t from_token = 0;  // index among the output tokens
};

// Returns false when the receiver is gone: stop producing. An implementation calls its sink at least
// once a second while a stream runs (kProgress, or a TokenEvent without tokens, when there is
// nothing new), so that a receiver that vanished is noticed and a server can shut down.
using PrefillSink = std::function<bool(const PrefillEvent&)>;
using TokenSink = std::function<bool(const TokenEvent&)>;

class PrefillApi {
 public:
  virtual ~PrefillApi() = default;
  // Streams until handed over (OK) or failed (typed). Blocks; `sink` runs on the calling thread. When
  // `sink` returns false the stream is detached, not cancelled.
  virtual absl::Status Submit(const SubmitRequest& request, const PrefillSink& sink) = 0;
  // Returns when the suffix job is queued; its hand-over arrives at the decode worker.
  virtual absl::Status Resume(const ResumeRequest& request) = 0;
  virtual absl::Status Cancel(TicketId id, const std::string& capability) = 0;
};

class DecodeApi {
 public:
  virtual ~DecodeApi() = default;
  // Returns when the request is accepted and its blocks are pinned (or known lost). Refusals:
  // ResourceExhausted (no slots, batch full: ask another), Unauthenticated, FailedPrecondition (wrong
  // model or geometry, both named).
  virtual absl::Status HandOver(const HandOverRequest& request) = 0;
  // Streams tokens from `from_token` until the request ends. Blocks. NotFound: unknown ticket.
  virtual absl::Status Attach(const AttachRequest& request, const TokenSink& sink) = 0;
  virtual absl::Status Cancel(TicketId id, const std::string& capability) = 0;
};

}  // namespace kvt
