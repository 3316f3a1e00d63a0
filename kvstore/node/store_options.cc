#include "kvstore/node/store_options.h"

namespace kvt {

StoreOptions ReadStoreOptions(OptionsTable table) {
  StoreOptions options;
  table.GetBytes("arena_bytes", &options.arena_bytes, 2 * kMiB, 16 * 1024 * kGiB);
  table.Get("lease", &options.lease, absl::Seconds(1), absl::Minutes(10));
  table.Get("ucx", &options.ucx);
  table.Get("ucx_listen", &options.ucx_listen);
  table.Get("ucx_net_devices", &options.ucx_net_devices);
  table.Get("ucx_tls", &options.ucx_tls);
  table.Get("shm", &options.shm);
  table.Get("shm_socket", &options.shm_socket);
  table.Get("advertise_host", &options.advertise_host);
  table.Get("address_file", &options.address_file);
  table.Get("ticket_public_key_file", &options.ticket_public_key_file);
  table.Get("populate_threads", &options.populate_threads, 1, 64);
  if (!options.ucx && !options.shm) {
    table.Problem("ucx", "at least one of ucx and shm must be on: workers need a data plane");
  }
  return options;
}

}  // namespace kvt
