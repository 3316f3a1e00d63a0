# Bursts over UCX/TCP and shared memory beside their ceilings (sourced by run.sh).
bench_run() {
  local json=$1
  shift
  "$bin/burst_bench" --json "$json" "$@"
}
