// A program that uses the tier of a running kvtide cluster: it joins as a client, writes the blocks of
// a sequence of a model of its own, finds them again under another ticket, pulls them, compares every
// byte, and prints what it took. A second run finds what the first one wrote.
//
//   tier_client_example --coordinator HOST:PORT --secret-file FILE [--blocks N] [--transport T]
//
// Exit codes: 0 every byte came back; 1 it failed; 2 bad command line.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/log.h"
#include "kvstore/client/cluster_client.h"
#include "kvstore/client/sequence_blocks.h"

namespace {

constexpr kvt::Geometry kGeometry = {.layers = 8, .kv_heads = 4, .head_dim = 64};

// An engine's KV memory: the slots of `blocks` blocks. A slot is one plane of one layer of a block.
class Slots {
 public:
  explicit Slots(int blocks)
      : bytes_(uint64_t{kGeometry.RecordBytes()} * kvt::kPlanes * static_cast<uint64_t>(blocks)),
        memory_(static_cast<std::byte*>(std::aligned_alloc(64, bytes_)), &std::free) {
    std::memset(memory_.get(), 0, bytes_);
    for (uint64_t at = 0; at < bytes_; at += kGeometry.SlotBytes()) {
      addresses_.push_back(memory_.get() + at);
    }
  }
  void Fill() {
    for (uint64_t i = 0; i < bytes_; ++i) {
      memory_.get()[i] = static_cast<std::byte>((i * 2654435761u + (i >> 12)) >> 7);
    }
  }
  // The addresses of one plane of a block, one per layer.
  [[nodiscard]] std::byte* const* Of(size_t block, kvt::Plane plane) const {
    return addresses_.data() +
           (block * kvt::kPlanes + static_cast<size_t>(plane)) * kGeometry.layers;
  }
  [[nodiscard]] uint64_t bytes() const { return bytes_; }
  [[nodiscard]] bool Same(const Slots& other) const {
    return std::memcmp(memory_.get(), other.memory_.get(), bytes_) == 0;
  }

 private:
  const uint64_t bytes_;
  std::unique_ptr<std::byte, decltype(&std::free)> memory_;
  std::vector<std::byte*> addresses_;
};

class Stopwatch {
 public:
  [[nodiscard]] double Ms() const {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - began_)
        .count();
  }

 private:
  std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
};

// `done` runs on a transport's thread and must only hand over: here, a promise.
template <typename Request>
kvt::TransferResult Await(kvt::TierClient& tier,
                          kvt::TransferId (kvt::TierClient::*start)(Request), Request request) {
  std::promise<kvt::TransferResult> promise;
  auto future = promise.get_future();
  request.layer_begin = 0;
  request.layer_end = kGeometry.layers;
  request.done = [&promise](const kvt::TransferResult& result) { promise.set_value(result); };
  (tier.*start)(std::move(request));
  return future.get();  // comes by the transfer's deadline, whatever happens
}

void PrintTransfer(const char* what, const kvt::TransferResult& result, double ms) {
  std::printf("%s: %d blocks, %d lost, %llu bytes in %.2f ms, %.0f MB/s, %u bursts\n", what,
              result.blocks_ok, result.blocks_lost,
              static_cast<unsigned long long>(result.bytes), ms,
              static_cast<double>(result.bytes) / 1000.0 / ms, result.bursts);
}

// Writes those of `blocks` that the tier has not, from `slots`.
absl::Status Write(kvt::ClusterClient& client, const std::vector<int32_t>& tokens,
                   const Slots& slots, int* found) {
  auto ticket = client.Admit({.prompt_tokens = static_cast<uint32_t>(tokens.size())});
  if (!ticket.ok()) return ticket.status();
  kvt::SequenceBlocks sequence(client.Keys(""), ticket->ticket.id);
  sequence.Append(tokens);
  Stopwatch lookup_time;
  const kvt::LookupResult lookup = client.tier().Lookup(*ticket, sequence.blocks());
  *found = lookup.exact_blocks;
  std::printf("lookup: %d of %zu blocks are in the tier, %.2f ms\n", lookup.exact_blocks,
              sequence.blocks().size(), lookup_time.Ms());
  const auto missing = sequence.blocks().subspan(static_cast<size_t>(lookup.exact_blocks));
  Stopwatch write_time;
  auto reserved = client.tier().Reserve(*ticket, missing, 0, kvt::ReserveMode::kAllOrNothing);
  if (!reserved.ok()) {
    client.Finish(*ticket, reserved.status());
    return reserved.status();
  }
  std::vector<kvt::PushBlock> list;
  std::vector<kvt::PlacedBlock*> placed;
  for (size_t i = 0; i < missing.size(); ++i) {
    if (reserved->already_sealed[i]) continue;  // another writer was first
    const size_t block = i + static_cast<size_t>(lookup.exact_blocks);
    list.push_back({.ticket = ticket->ref(),
                    .block = &reserved->blocks[i],
                    .base = slots.Of(block, kvt::Plane::kBase),
                    .residual = slots.Of(block, kvt::Plane::kResidual)});
    placed.push_back(&reserved->blocks[i]);
  }
  std::vector<kvt::TransferOutcome> outcomes(list.size());
  kvt::TierPush push;
  push.blocks = list;
  push.outcomes = absl::MakeSpan(outcomes);
  const kvt::TransferResult pushed = Await(client.tier(), &kvt::TierClient::Push, push);
  size_t sealed = 0;
  for (const kvt::SealOutcome outcome : client.tier().Seal(ticket->ref(), placed)) {
    sealed += outcome == kvt::SealOutcome::kSealed ? 1 : 0;
  }
  if (!list.empty()) PrintTransfer("write", pushed, write_time.Ms());
  const absl::Status status =
      sealed == placed.size() ? absl::OkStatus() : absl::DataLossError("blocks did not seal");
  client.Finish(*ticket, status);
  return status;
}

// Reads the sequence under a ticket of its own.
absl::Status Read(kvt::ClusterClient& client, const std::vector<int32_t>& tokens, Slots& slots) {
  auto ticket = client.Admit({.prompt_tokens = static_cast<uint32_t>(tokens.size())});
  if (!ticket.ok()) return ticket.status();
  kvt::SequenceBlocks sequence(client.Keys(""), ticket->ticket.id);
  sequence.Append(tokens);
  Stopwatch read_time;
  const kvt::LookupResult lookup = client.tier().Lookup(*ticket, sequence.blocks());
  std::vector<kvt::PullBlock> list;
  for (size_t i = 0; i < static_cast<size_t>(lookup.exact_blocks); ++i) {
    list.push_back({.ticket = ticket->ref(),
                    .block = &lookup.blocks[i],
                    .base = slots.Of(i, kvt::Plane::kBase),
                    .residual = slots.Of(i, kvt::Plane::kResidual)});
  }
  std::vector<kvt::TransferOutcome> outcomes(list.size());
  kvt::TierPull pull;
  pull.blocks = list;
  pull.outcomes = absl::MakeSpan(outcomes);
  const kvt::TransferResult pulled = Await(client.tier(), &kvt::TierClient::Pull, pull);
  PrintTransfer("read", pulled, read_time.Ms());
  client.Finish(*ticket);
  if (static_cast<size_t>(pulled.blocks_ok) != sequence.blocks().size()) {
    return absl::NotFoundError("not all blocks came back");
  }
  return absl::OkStatus();
}

absl::Status Run(const kvt::ClusterClientOptions& options, int blocks) {
  auto client = kvt::ClusterClient::Connect(options);
  if (!client.ok()) return client.status();
  std::printf("%s joined %s\n", (*client)->name().c_str(), options.coordinator.c_str());
  for (const kvt::StoreLinkFigures& store : (*client)->tier().Figures()) {
    std::printf("store %s: %s over %s\n", store.name.c_str(), store.state.c_str(),
                store.transport.c_str());
  }
  std::vector<int32_t> tokens;
  for (int i = 0; i < blocks * kvt::kBlockTokens; ++i) tokens.push_back(1000 + i);
  Slots written(blocks);
  written.Fill();
  int found = 0;
  if (auto status = Write(**client, tokens, written, &found); !status.ok()) return status;
  Slots read(blocks);
  if (auto status = Read(**client, tokens, read); !status.ok()) return status;
  if (!read.Same(written)) return absl::DataLossError("bytes differ");
  std::printf("verified: %llu bytes are identical, %d blocks were there before\n",
              static_cast<unsigned long long>(read.bytes()), found);
  (*client)->Close();
  return absl::OkStatus();
}

int Usage() {
  std::fprintf(stderr,
               "usage: tier_client_example --coordinator HOST:PORT --secret-file FILE\n"
               "                           [--blocks N] [--transport auto|ucx|shm]\n");
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  kvt::ClusterClientOptions options;
  // A model of this program's own. A real engine gives the fingerprint of its weights, an id of how it
  // computes, and its geometry; or only the name of a model that the cluster serves.
  options.model.name = "tier-client-example";
  options.model.fingerprint = "example-1";
  options.model.numerics_id = "example/none";
  options.model.geometry = kGeometry;
  options.model.context_tokens_max = 32 * 1024;
  int blocks = 64;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string key = argv[i];
    const std::string value = argv[i + 1];
    if (key == "--coordinator") {
      options.coordinator = value;
    } else if (key == "--secret-file") {
      options.tier.cluster_secret_file = value;
    } else if (key == "--blocks") {
      blocks = std::atoi(value.c_str());
    } else if (key == "--transport") {
      options.tier.transport = value == "ucx"   ? kvt::TierTransport::kUcx
                               : value == "shm" ? kvt::TierTransport::kShm
                                                : kvt::TierTransport::kAuto;
    } else {
      return Usage();
    }
  }
  if (argc % 2 == 0 || blocks < 1 || blocks > 2048) return Usage();
  if (options.tier.cluster_secret_file.empty()) return Usage();
  if (const absl::Status status =
          kvt::InitLog("tier_client_example", kvt::LogLevel::kWarning, "");
      !status.ok()) {
    return 1;
  }
  const absl::Status status = Run(options, blocks);
  if (status.ok()) return 0;
  std::fprintf(stderr, "tier_client_example: %s\n", status.ToString().c_str());
  return 1;
}
