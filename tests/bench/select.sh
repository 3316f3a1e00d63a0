# What choosing blocks costs a core, by part (sourced by run.sh).
bench_run() {
  local json=$1
  shift
  "$bin/select_bench" --json "$json" "$@"
}
