# The spill store beside its disk (sourced by run.sh). The folder is beside the build: a temporary one is often
# in memory.
targets=(spill_bench kvtide kvtide-coordinator kvtide-store kvtide-prefill kvtide-decode)
bench_run() {
  local json=$1
  shift
  "$bin/spill_bench" --json "$json" --folder "$repo/build/spill-bench" "$@"
  need_model
  python3 "$here/disk_hit_bench.py" --bin "$bin" --model "$model" --json "$json" --folder "$repo/build/disk-hit"
}
