#!/usr/bin/env bash
# A private venv with llama.cpp (llama-cpp-python 0.3.36) built for this processor, for goldens and
# for benchmarks that compare with it. Never for tests/run.sh: the build takes 10 minutes or more.
#
#   tests/support/llamacpp_venv.sh [VENV]      default: .cache/llamacpp-venv
#
# Prints the path of its python on the last line. Does nothing when the venv is complete.
# KVT_LLAMACPP_VENV names one that exists already. KVT_PIP_ARGS is passed to pip.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
venv=${1:-${KVT_LLAMACPP_VENV:-$repo/.cache/llamacpp-venv}}
packages=(llama-cpp-python==0.3.36 gguf==0.19.0 safetensors==0.8.0 tokenizers==0.23.3 numpy==2.4.6)

if ! "$venv/bin/python" -c 'import gguf, llama_cpp, numpy, safetensors, tokenizers' 2>/dev/null; then
  [[ ! -e $venv || -f $venv/.kvtide || -z $(ls -A "$venv") ]] ||
    { echo "llamacpp_venv: $venv exists and lacks llama_cpp, gguf, safetensors, tokenizers or numpy" >&2; exit 1; }
  echo "llamacpp_venv: building ${packages[0]} into $venv (10 minutes or more)" >&2
  rm -rf "$venv"
  python3 -m venv "$venv"
  touch "$venv/.kvtide"
  # shellcheck disable=SC2086
  CMAKE_ARGS="-DGGML_NATIVE=ON" CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) timeout 3600 \
    "$venv/bin/pip" --disable-pip-version-check install -q --no-binary llama-cpp-python \
    ${KVT_PIP_ARGS:-} "${packages[@]}" >&2
fi
echo "$venv/bin/python"
