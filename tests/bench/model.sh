# Prefill and decode beside llama.cpp on the same weights in bf16 (sourced by run.sh).
bench_run() {
  local json=$1
  shift
  need_model
  need_llamacpp
  local gguf=$repo/.cache/bench/model.bf16.gguf
  if [[ ! -f $gguf || $model/model.safetensors -nt $gguf ]]; then
    mkdir -p "$(dirname "$gguf")"
    "$llamacpp_python" "$repo/tests/support/hf_to_gguf.py" "$model" "$gguf.part" --type bf16 >&2
    mv "$gguf.part" "$gguf"
  fi
  "$bin/model_bench" "$model" --json "$json" \
    --llamacpp "$llamacpp_python" "$here/llamacpp_worker.py" "$gguf" "$@"
}
