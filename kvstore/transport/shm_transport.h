// The data plane on one host. The store's arena and record table (kvstore/media) are mapped
// read-only by the client: a pull is a gather from the mapping straight into the destinations, with
// the handle checked before and after and the checksum in the same pass. Pushes go through a ring
// per client; the store's thread copies them into the arena and verifies them.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kvstore/media/record_table.h"
#include "kvstore/media/shared_mapping.h"
#include "kvstore/transport/transport.h"
#include "kvstore/transport/transport_server.h"

namespace kvt {

struct ShmOptions {
  // Threads of one channel that gather; 1 to 8.
  int gather_threads = 1;
  // CPU of the first gather thread; -1: none. For benchmarks.
  int cpu = -1;
  // What this end claims to speak. For tests.
  TransportVersions versions{};

  [[nodiscard]] absl::Status Validate() const;
};

std::unique_ptr<Transport> MakeShmTransport(const ShmOptions& options);

struct ShmServerOptions {
  // The control socket; its folder must exist and belong to this user. A stale file is replaced.
  std::string socket_path;
  int cpu = -1;
  TransportVersions versions{};  // for tests
};

// `arena` and `table` are the store's; both outlive the server. Only processes of the same user are
// let in. Unavailable with path and cause.
absl::StatusOr<std::unique_ptr<TransportServer>> StartShmServer(const ShmServerOptions& options,
                                                                const SharedMapping& arena,
                                                                const RecordTable& table,
                                                                PieceResolver& resolver);

}  // namespace kvt
