# Prefill that streams its KV into the tier beside the same prefill in one process (sourced by run.sh).
targets=(kvtide kvtide-run kvtide-coordinator kvtide-store kvtide-prefill kvtide-decode)
bench_run() {
  local json=$1
  shift
  need_model
  python3 "$here/push_bench.py" --bin "$bin" --model "$model" --json "$json" "$@"
}
