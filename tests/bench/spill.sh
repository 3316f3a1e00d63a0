# The spill store beside its disk (sourced by run.sh). The folder is beside the build: a temporary one is often
# in memory.
bench_run() {
  local json=$1
  shift
  "$bin/spill_bench" --json "$json" --folder "$repo/build/spill-bench" "$@"
}
