// The spill store beside the disk it is on, in the same run, interleaved.
//
//   spill_bench [--json FILE] [--folder DIR] [--mib N] [--memory MIB] [--batch MIB] [--record
//   BYTES]
//               [--threads N] [--callers N] [--buffer KIB] [--rounds N] [--layouts]
//
// The set is larger than the memory that the process may have (RLIMIT_DATA); the page cache is not
// used.
#include "tests/bench/spill_bench.h"

#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/units.h"

int main(int argc, char** argv) {
  kvt::SpillBenchOptions options;
  options.folder = "spill-bench";
  std::string json;
  bool layouts = false;
  CLI::App app("The spill store beside its disk.");
  app.add_option("--json", json);
  app.add_option("--folder", options.folder);
  app.add_option("--mib", options.set_mib);
  app.add_option("--memory", options.memory_mib);
  app.add_option("--batch", options.batch_mib);
  app.add_option("--record", options.record_bytes);
  app.add_option("--threads", options.io_threads);
  app.add_option("--buffer", options.write_buffer_kib);
  app.add_option("--callers", options.callers);
  app.add_option("--rounds", options.rounds);
  app.add_flag("--layouts", layouts);
  CLI11_PARSE(app, argc, argv);
  KVT_CHECK(options.set_mib >= 2 * options.memory_mib, "the set must be twice the memory");

  std::vector<kvt::BenchRow> rows;
  if (!layouts) kvt::RunSpillIndex(&rows);
  const rlimit limit{options.memory_mib * kvt::kMiB, options.memory_mib * kvt::kMiB};
  KVT_CHECK(setrlimit(RLIMIT_DATA, &limit) == 0);
  std::filesystem::create_directories(options.folder);
  if (layouts) {
    kvt::RunSpillLayouts(options);
  } else {
    kvt::RunSpillDisk(options, &rows);
  }
  std::error_code ignored;
  std::filesystem::remove_all(options.folder, ignored);
  rusage usage{};
  KVT_CHECK(getrusage(RUSAGE_SELF, &usage) == 0);
  std::printf("set %lu MiB, memory allowed %lu MiB, used at most %ld MiB\n", options.set_mib,
              options.memory_mib, usage.ru_maxrss / 1024);
  if (json.empty()) return 0;
  std::ofstream out(json);
  out << "{\"rows\": [";
  for (size_t i = 0; i < rows.size(); ++i) {
    out << (i == 0 ? "" : ", ") << "{\"name\": \"" << rows[i].name
        << "\", \"value\": " << rows[i].value << ", \"unit\": \"" << rows[i].unit << "\"}";
  }
  out << "]}\n";
  return out.good() ? 0 : 1;
}
