# Several offloaded requests at once against one alone (sourced by run.sh), over the licences of the machine.
targets=(kvtide kvtide-coordinator kvtide-store kvtide-prefill kvtide-decode)
bench_run() {
  local json=$1
  shift
  need_model
  local -a texts=()
  local name
  for name in GPL-3 GFDL-1.3 MPL-1.1 LGPL-2.1 GPL-2 MPL-2.0 Apache-2.0; do
    texts+=("/usr/share/common-licenses/$name")
  done
  python3 "$here/offloaded_bench.py" --bin "$bin" --model "$model" --json "$json" \
    --calibration "$repo/deploy/calibrations/SmolLM2-135M-Instruct.cal" --text "${texts[@]}" "$@"
}
