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
  table.GetBytes("tenant_bytes", &options.tenant_bytes, 0, 16 * 1024 * kGiB);
  table.GetBytes("tenant_disk_bytes", &options.tenant_disk_bytes, 0, 1024 * 1024 * kGiB);
  table.Get("spill_folder", &options.spill_folder);
  table.GetBytes("spill_bytes", &options.spill_bytes, 16 * kMiB, 256 * 1024 * kGiB);
  table.Get("spill_one_time", &options.spill_one_time);
  table.Get("spill_watermark_high", &options.spill_watermark_high, 10, 99);
  table.Get("spill_watermark_low", &options.spill_watermark_low, 5, 98);
  table.Get("spill_wait", &options.spill_wait, absl::ZeroDuration(), absl::Seconds(5));
  table.Get("spill_hold", &options.spill_hold, absl::ZeroDuration(), absl::Minutes(10));
  table.Get("spill_readers", &options.spill_readers, 1, 16);
  table.Get("spill_direct_io", &options.spill_direct_io);
  if (options.spill_watermark_low >= options.spill_watermark_high) {
    table.Problem("spill_watermark_low", "must be below spill_watermark_high");
  }
  if (!options.ucx && !options.shm) {
    table.Problem("ucx", "at least one of ucx and shm must be on: workers need a data plane");
  }
  return options;
}

}  // namespace kvt
