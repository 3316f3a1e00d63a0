// A StoreNode over a small arena, with a coordinator's key, tickets, and names of blocks: for tests
// of the node by itself, through gRPC, and over data planes.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "kernels/base/clock.h"
#include "kernels/layout/checksum.h"
#include "kvstore/media/arena.h"
#include "kvstore/node/store_node.h"
#include "kvstore/wire/ticket.h"

namespace kvt {

inline constexpr char kTestFingerprint[] = "f1";
inline constexpr char kTestNumerics[] = "cpu/test";

inline Geometry TestGeometry() { return Geometry{.layers = 3, .kv_heads = 2, .head_dim = 32}; }

// The coordinator's part.
class TicketMaker {
 public:
  TicketMaker() : signer_(TicketSigner::Generate()) {}
  [[nodiscard]] std::string PublicKey() const { return signer_->PublicKey(); }
  [[nodiscard]] SignedTicket Make(uint64_t id, uint32_t epoch = 1,
                                  const std::string& tenant = "") const {
    Ticket ticket;
    ticket.id = TicketId(id);
    ticket.epoch = TicketEpoch(epoch);
    ticket.tenant = tenant;
    ticket.model_fingerprint = kTestFingerprint;
    ticket.numerics_id = kTestNumerics;
    return signer_->Sign(ticket);
  }
  [[nodiscard]] SignedTicket Sign(const Ticket& ticket) const { return signer_->Sign(ticket); }

 private:
  std::unique_ptr<TicketSigner> signer_;
};

inline TicketRef Ref(uint64_t id, uint32_t epoch = 1) {
  return TicketRef{TicketId(id), TicketEpoch(epoch)};
}

inline OpenSessionRequest TestOpen(const std::string& worker, uint64_t boot = 1) {
  OpenSessionRequest request;
  request.worker = worker;
  request.worker_epoch = BootEpoch(boot);
  request.geometry = TestGeometry();
  request.model_fingerprint = kTestFingerprint;
  request.numerics_id = kTestNumerics;
  return request;
}

// Blocks of the sequence of tokens seed, seed + 1, ... of a tenant.
inline std::vector<BlockName> TestNames(int count, int seed, const std::string& tenant = "") {
  KeyDomain domain;
  domain.cluster_secret = "0123456789abcdef";
  domain.model_fingerprint = kTestFingerprint;
  domain.numerics_id = kTestNumerics;
  domain.geometry = TestGeometry();
  domain.tenant = tenant;
  const KeyChain chain(domain);
  std::vector<BlockName> names(count);
  BlockKey parent = chain.Root();
  for (int i = 0; i < count; ++i) {
    names[i].parent = parent;
    for (int t = 0; t < kBlockTokens; ++t) names[i].tokens.push_back(seed + i * kBlockTokens + t);
    names[i].key = parent = chain.Next(parent, names[i].tokens, Provenance::kExact);
  }
  return names;
}

// The bytes that a plane of the block with that key has: a function of key, plane and position, so
// that foreign bytes are seen.
inline std::vector<std::byte> TestBytes(const BlockKey& key, Plane plane) {
  std::vector<std::byte> bytes(TestGeometry().RecordBytes());
  uint64_t word = key.Hash64() + static_cast<uint64_t>(plane) * 0x9e3779b97f4a7c15ull;
  for (size_t i = 0; i < bytes.size(); i += sizeof(word)) {
    word = word * 6364136223846793005ull + 1442695040888963407ull;
    std::memcpy(&bytes[i], &word, sizeof(word));
  }
  return bytes;
}

inline std::vector<uint64_t> TestChecksums(const BlockKey& key, Plane plane) {
  const std::vector<std::byte> bytes = TestBytes(key, plane);
  const uint32_t slice = TestGeometry().SliceBytes();
  std::vector<uint64_t> sums;
  for (uint32_t i = 0; i < TestGeometry().SlicesPerRecord(); ++i) {
    sums.push_back(SliceChecksum(&bytes[i * slice], slice, ChecksumSeed(key.Hash64(), plane, i)));
  }
  return sums;
}

// Owns arena and node. `blocks`: how many the arena holds.
class StoreUnderTest {
 public:
  explicit StoreUnderTest(int blocks, const Clock& clock = RealClock::Get(),
                          absl::Duration lease = absl::Seconds(10)) {
    StoreNodeConfig config;
    config.name = "store-0";
    config.epoch = BootEpoch(77);
    config.host_id = "test-host";
    config.lease = lease;
    config.slab_bytes = 4 * TestGeometry().RecordBytes();
    config.blocks_max = 1 << 16;
    const int slabs = (blocks + 1) / 2;
    absl::StatusOr<Arena> arena =
        Arena::Create(slabs * config.slab_bytes, config.blocks_max * kPlanes);
    EXPECT_TRUE(arena.ok()) << arena.status();
    arena_ = std::make_unique<Arena>(*std::move(arena));
    node_ = std::make_unique<StoreNode>(config, *arena_, clock);
    EXPECT_TRUE(node_->AddTicketKey(tickets_.PublicKey()).ok());
  }
  StoreNode& node() { return *node_; }
  Arena& arena() { return *arena_; }
  const TicketMaker& tickets() const { return tickets_; }

 private:
  TicketMaker tickets_;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<StoreNode> node_;
};

}  // namespace kvt
