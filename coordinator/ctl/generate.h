// `kvtide generate`: text in, text out, through the cluster.
#pragma once

#include <cstdint>
#include <string>

#include "coordinator/ctl/cli.h"

namespace kvt::ctl {

struct GenerateOptions {
  std::string text;       // the prompt argument; empty: file or stdin
  bool has_text = false;
  std::string file;       // "-": stdin
  bool chat = false;
  std::string system;
  bool has_system = false;
  std::string model;         // default: the only one that is served
  std::string model_folder;  // default: of cluster.json
  std::string tenant;
  std::string fidelity;  // empty: the tenant's default
  int max_tokens = 256;
  double temperature = 0;
  int top_k = 0;
  double top_p = 1;
  uint64_t seed = 0;
  bool ignore_eos = false;
  bool quiet = false;  // no figures for people
};

// Blocks SIGINT and SIGTERM in this thread and those it starts, and takes them itself. Exit code.
int RunGenerate(const Cli& cli, const GenerateOptions& options);

}  // namespace kvt::ctl
