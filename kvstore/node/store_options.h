// The [store] table of kvtide-store's configuration; [node] is kvstore/client/node_options.h. Read
// in main only; docs/CONFIG.md lists every key.
#pragma once

#include <cstdint>
#include <string>

#include "absl/time/time.h"
#include "kernels/base/options.h"
#include "kernels/base/units.h"

namespace kvt {

struct StoreOptions {
  // Rounded up to whole slabs, which are a 64th of it (2 to 64 MiB).
  uint64_t arena_bytes = kGiB;
  absl::Duration lease = absl::Seconds(10);
  // The data plane. At least one of ucx and shm.
  bool ucx = true;
  std::string ucx_listen = "127.0.0.1:0";  // numeric address
  std::string ucx_net_devices;             // UCX_NET_DEVICES; empty: UCX chooses
  std::string ucx_tls;                     // UCX_TLS; empty: UCX chooses
  bool shm = true;
  // Socket over which same-host workers get the arena's mapping; its folder must exist and belong
  // to this user. Empty: /tmp/kvtide-<uid>/<name>.<pid>.sock, whose folder is made.
  std::string shm_socket;
  // How workers on other hosts name this one, where `listen` and `ucx_listen` say 0.0.0.0.
  std::string advertise_host;
  // Gets the control address once the store serves.
  std::string address_file;
  // Hex Ed25519 key that tickets are checked with; for a store without a coordinator, which
  // otherwise gives it.
  std::string ticket_public_key_file;
  // Threads that populate the arena at start.
  int populate_threads = 2;

  // Bytes of one tenant in memory; beyond them its own cold blocks go, then its reservations are
  // refused. 0: no bound.
  uint64_t tenant_bytes = 0;
  // The same on disk; beyond it the tenant's own oldest go for its newest. 0: no bound.
  uint64_t tenant_disk_bytes = 0;
  // The second medium: a folder of this store alone; empty: none.
  std::string spill_folder;
  uint64_t spill_bytes = 64 * kGiB;  // of all files in it
  // Also what one request alone used. Off: one-time prompts do not wear the disk.
  bool spill_one_time = false;
  // Percent of the arena in use: above the first the background spills, until the second.
  int spill_watermark_high = 90;
  int spill_watermark_low = 80;
  // What came back from disk and is in use stays in memory for so long.
  absl::Duration spill_hold = absl::Seconds(5);
  // How long a reservation waits for blocks that two requests used to reach the disk, before they
  // are dropped for it.
  absl::Duration spill_wait = absl::Milliseconds(200);
  int spill_readers = 2;        // threads that read back
  bool spill_direct_io = true;  // past the page cache

  // A block takes at least this much of the arena: bounds the tables beside it. Smaller ones
  // (models of a few KiB a block) fill the tables before the arena.
  static constexpr uint64_t kBlockBytesMin = 32 * kKiB;
};

// Reads the table; problems are collected in its file and reported by OptionsFile::Finish().
StoreOptions ReadStoreOptions(OptionsTable table);

}  // namespace kvt
