// A store node in this process, as kvtide-store composes it: arena, node, data plane server and a
// tick. It can restart (empty, with a new boot epoch) and be killed. Control goes through a gate.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kernels/base/mutex.h"
#include "kernels/base/units.h"
#include "kvstore/media/arena.h"
#include "kvstore/node/store_node.h"
#include "kvstore/transport/loopback.h"
#include "kvstore/transport/transport.h"
#include "tests/support/disk_front.h"
#include "tests/support/gated_store.h"

namespace kvt {

enum class TestPlane { kLoopback, kUcx, kShm };
// Those to test with.
std::vector<TestPlane> TestPlanes();
std::string TestPlaneName(TestPlane plane);
std::unique_ptr<Transport> MakeTestTransport(TestPlane plane);

struct TestStoreOptions {
  TestPlane plane = TestPlane::kLoopback;
  uint64_t arena_bytes = 32 * kMiB;
  absl::Duration lease = absl::Seconds(10);
  WireVersionRange versions{};  // what its control claims to speak
};

class TestStore {
 public:
  TestStore(std::string name, TestStoreOptions options, std::string ticket_key);
  ~TestStore();

  [[nodiscard]] const std::string& name() const { return name_; }
  // As a view names it; its control address is its name.
  [[nodiscard]] StoreRef ref() const;
  GatedStore& gate() { return gate_; }
  // Null unless loopback.
  LoopbackFaults* faults();
  [[nodiscard]] StoreStats Stats() { return node_->StatsNow(); }

  // From now on Promote is answered by disk().
  void PlayDisk();
  // Plays its disk. Of this boot.
  DiskFront& disk() { return *disk_; }

  // Control and data plane are gone.
  void Kill();
  // A new boot: nothing is left of what was stored.
  void Restart();
  // Changes one stored byte of a block's plane.
  void FlipByte(const BlockPlace& place, Plane plane, uint32_t offset);

 private:
  void Start();
  void Stop();

  const std::string name_;
  const TestStoreOptions options_;
  const std::string ticket_key_;
  uint64_t epoch_ = 0;
  GatedStore gate_{nullptr};
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<StoreNode> node_;
  std::unique_ptr<DiskFront> disk_;
  std::unique_ptr<TransportServer> server_;
  LoopbackServer* loopback_ = nullptr;

  Mutex mu_;
  CondVar wake_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread ticker_;
};

}  // namespace kvt
