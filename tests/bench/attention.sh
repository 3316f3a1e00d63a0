# Paged attention beside rooflines of the same run (sourced by run.sh).
bench_run() {
  local json=$1
  shift
  "$bin/attention_bench" --json "$json" "$@"
}
