#include "tests/support/test_store.h"

#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kvstore/client/host_id.h"
#include "kvstore/transport/shm_transport.h"
#include "kvstore/transport/ucx_transport.h"

namespace kvt {
namespace {

constexpr uint64_t kSlabBytes = 256 * kKiB;
constexpr uint32_t kBlocksMax = 4096;

std::string FreshName(const std::string& name) {
  static std::atomic<int> count{0};
  return absl::StrCat(name, "-", getpid(), "-", count++);
}

UcxOptions OnLoopbackDevice() {
  UcxOptions options;
  options.tls = "tcp";
  options.net_devices = "lo";
  return options;
}

}  // namespace

std::vector<TestPlane> TestPlanes() {
  return {TestPlane::kLoopback, TestPlane::kUcx, TestPlane::kShm};
}

std::string TestPlaneName(TestPlane plane) {
  switch (plane) {
    case TestPlane::kLoopback:
      return "Loopback";
    case TestPlane::kUcx:
      return "Ucx";
    case TestPlane::kShm:
      return "Shm";
  }
  return "";
}

std::unique_ptr<Transport> MakeTestTransport(TestPlane plane) {
  switch (plane) {
    case TestPlane::kLoopback:
      return MakeLoopbackTransport();
    case TestPlane::kUcx: {
      auto transport = MakeUcxTransport(OnLoopbackDevice());
      KVT_CHECK(transport.ok(), transport.status().ToString());
      return *std::move(transport);
    }
    case TestPlane::kShm:
      return MakeShmTransport(ShmOptions{});
  }
  return nullptr;
}

TestStore::TestStore(std::string name, TestStoreOptions options, std::string ticket_key)
    : name_(std::move(name)), options_(options), ticket_key_(std::move(ticket_key)) {
  Start();
  ticker_ = std::thread([this] {
    MutexLock lock(mu_);
    while (!stopping_) {
      if (node_ != nullptr) node_->Tick();
      wake_.WaitFor(mu_, absl::Milliseconds(20));
    }
  });
}

TestStore::~TestStore() {
  {
    MutexLock lock(mu_);
    stopping_ = true;
  }
  wake_.NotifyAll();
  ticker_.join();
  Stop();
}

StoreRef TestStore::ref() const {
  StoreRef ref;
  ref.name = name_;
  ref.epoch = BootEpoch(epoch_);
  ref.control_address = name_;
  return ref;
}

LoopbackFaults* TestStore::faults() {
  return loopback_ == nullptr ? nullptr : &loopback_->Faults();
}

void TestStore::Kill() {
  gate_.SetTarget(nullptr);
  if (loopback_ != nullptr) {
    loopback_->Faults().Kill();
  } else {
    server_->Stop();
  }
}

void TestStore::Restart() {
  Stop();
  Start();
}

void TestStore::FlipByte(const BlockPlace& place, Plane plane, uint32_t offset) {
  const uint64_t record = plane == Plane::kBase ? place.base_offset : place.residual_offset;
  KVT_CHECK(record != kNoOffset && record + offset < arena_->size());
  arena_->data()[record + offset] ^= std::byte{0x10};
}

void TestStore::Start() {
  MutexLock lock(mu_);
  auto arena = Arena::Create(options_.arena_bytes, kBlocksMax * kPlanes);
  KVT_CHECK(arena.ok(), arena.status().ToString());
  arena_ = std::make_unique<Arena>(*std::move(arena));
  StoreNodeConfig config;
  config.name = name_;
  config.epoch = BootEpoch(++epoch_);
  config.host_id = LocalHostId();
  config.lease = options_.lease;
  config.versions = options_.versions;
  config.slab_bytes = kSlabBytes;
  config.blocks_max = kBlocksMax;
  node_ = std::make_unique<StoreNode>(config, *arena_, RealClock::Get());
  disk_ = std::make_unique<DiskFront>(*node_, arena_->table());
  const absl::Status key = node_->AddTicketKey(ticket_key_);
  KVT_CHECK(key.ok(), key.ToString());
  DataPlaneAddresses addresses;
  switch (options_.plane) {
    case TestPlane::kLoopback: {
      auto server = StartLoopbackServer(FreshName(name_), *disk_);
      KVT_CHECK(server.ok(), server.status().ToString());
      loopback_ = server->get();
      server_ = *std::move(server);
      addresses.ucx_address = server_->Address();
      break;
    }
    case TestPlane::kUcx: {
      UcxServerOptions options;
      options.ucx = OnLoopbackDevice();
      auto server = StartUcxServer(options, arena_->bytes(), *disk_);
      KVT_CHECK(server.ok(), server.status().ToString());
      server_ = *std::move(server);
      addresses.ucx_address = server_->Address();
      break;
    }
    case TestPlane::kShm: {
      ShmServerOptions options;
      const char* folder = std::getenv("TMPDIR");
      options.socket_path = absl::StrCat(folder == nullptr ? "/tmp" : folder, "/kvt-",
                                         FreshName(name_), ".sock");
      auto server = StartShmServer(options, arena_->mapping(), arena_->table(), *disk_);
      KVT_CHECK(server.ok(), server.status().ToString());
      server_ = *std::move(server);
      addresses.shm_socket = options.socket_path;
      break;
    }
  }
  node_->SetDataPlane(addresses);
  gate_.SetTarget(node_.get());
}

void TestStore::PlayDisk() {
  gate_.SetPromote([this](const PromoteRequest& request) { return disk_->Promote(request); });
}

void TestStore::Stop() {
  gate_.SetTarget(nullptr);
  gate_.Drain();
  server_->Stop();
  MutexLock lock(mu_);
  loopback_ = nullptr;
  server_.reset();
  disk_.reset();
  node_.reset();
  arena_.reset();
}

}  // namespace kvt
