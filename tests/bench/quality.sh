# What sparse attention costs, by the way blocks are chosen, and what an offloaded request pulls at admission
# (sourced by run.sh). The calibration is made once, from texts apart from those of the test.
targets=(quality_bench kvtide-calibrate kvtide kvtide-coordinator kvtide-store kvtide-prefill kvtide-decode)
bench_run() {
  local json=$1
  shift
  need_model
  local texts=$repo/.cache/bench/texts
  local calibration=$repo/.cache/bench/quality.cal
  "$here/quality_texts.sh" "$texts"
  if [[ ! -f $calibration || $bin/kvtide-calibrate -nt $calibration ]]; then
    "$bin/kvtide-calibrate" "$model" --text "$texts"/calibrate/*.txt \
      --out "$calibration.part" --out-every-head "$calibration.every" >&2
    mv "$calibration.part" "$calibration"
  fi
  "$bin/quality_bench" "$model" --calibration "$calibration" --every-head "$calibration.every" \
    --text "$texts"/test/*.txt --json "$json" "$@"
  python3 "$here/admission_bench.py" --bin "$bin" --model "$model" --calibration "$calibration" \
    --text "$texts/test/handbook.txt" --json "$json"
}
