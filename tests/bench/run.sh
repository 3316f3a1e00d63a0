#!/usr/bin/env bash
# run.sh NAME --json FILE [further arguments of the benchmark]
#
# Builds the benchmark, gets what it needs, runs it, prints its table and writes
# {"rows":[{"name":...,"value":...,"unit":...}]} to FILE. A benchmark is a function bench_NAME below,
# called with the JSON path and the further arguments.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

build() {
  [[ -f build/release/build.ninja ]] || cmake --preset release >/dev/null
  cmake --build --preset release --target "$@" >/dev/null
}

bench_burst() {
  build burst_bench
  build/release/bin/burst_bench --json "$@"
}

name=${1:-}
if ! declare -F "bench_$name" >/dev/null || [[ ${2:-} != --json || -z ${3:-} ]]; then
  echo "usage: $0 NAME --json FILE [arguments]; NAME is one of:" \
    "$(declare -F | sed -n 's/^declare -f bench_//p' | tr '\n' ' ')" >&2
  exit 2
fi
shift 2
"bench_$name" "$@"
