#!/usr/bin/env bash
# One benchmark: builds it, gets what it needs (model, private venv), runs it, prints its table and
# writes {"rows": [{"name", "value", "unit"}]}.
#
#   tests/bench/run.sh NAME [--json FILE] [ARGUMENTS OF THE BENCHMARK]
#
# NAME is a file tests/bench/NAME.sh, sourced here. It may set `targets` (to build; default
# NAME_bench), defines `bench_run JSON ARGUMENTS...`, and may call need_model (sets $model) and
# need_llamacpp (sets $llamacpp_python). Environment: KVT_PRESET, KVT_JOBS, KVT_MODEL_DIR,
# KVT_LLAMACPP_VENV.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
names() { (cd "$here" && ls -- *.sh | grep -v '^run\.sh$' | sed 's/\.sh$//' | tr '\n' ' '); }
usage() { echo "usage: tests/bench/run.sh NAME [--json FILE] [ARGUMENTS]; NAME: $(names)" >&2; exit 2; }

(($# >= 1)) || usage
name=$1
shift
[[ $name =~ ^[a-z0-9_]+$ && $name != run && -f $here/$name.sh ]] || usage
json=$repo/build/bench-$name.json
arguments=()
while (($#)); do
  case $1 in
    --json)
      (($# >= 2)) || usage
      json=$2
      shift 2
      ;;
    *)
      arguments+=("$1")
      shift
      ;;
  esac
done
[[ $json == /* ]] || json=$PWD/$json
preset=${KVT_PRESET:-release}
bin=$repo/build/$preset/bin

need_model() {
  model=${KVT_MODEL_DIR:-$repo/var/models/SmolLM2-135M-Instruct}
  [[ -f $model/config.json ]] || "$repo/deploy/fetch_model.sh" >&2
  [[ -f $model/config.json ]] || { echo "run.sh: no model in $model" >&2; exit 1; }
}
need_llamacpp() {
  llamacpp_python=$("$repo/tests/support/llamacpp_venv.sh" | tail -n 1)
}

targets=("${name}_bench")
# shellcheck source=/dev/null
source "$here/$name.sh"

cd "$repo"
mkdir -p build "$(dirname "$json")"
# The quick start configures the same folder without benchmarks.
cmake --preset "$preset" -DKVT_BUILD_TESTS=ON >build/configure.log 2>&1 ||
  { cat build/configure.log >&2; exit 1; }
cmake --build --preset "$preset" -j "${KVT_JOBS:-$(nproc)}" --target "${targets[@]}" >build/build.log 2>&1 ||
  { tail -n 40 build/build.log >&2; exit 1; }
rm -f "$json"
# Before other sessions' programs while it measures, where the kernel groups processes by session and
# lets us (root); KVT_BENCH_NICE=0 leaves it alone.
autogroup=/proc/self/autogroup
if [[ ${KVT_BENCH_NICE:--15} != 0 && -w $autogroup ]]; then
  before=$(sed 's/.*nice //' "$autogroup")
  if echo "${KVT_BENCH_NICE:--15}" 2>/dev/null >"$autogroup"; then
    trap 'echo "$before" >"$autogroup"' EXIT
  fi
fi
bench_run "$json" ${arguments[@]+"${arguments[@]}"}
[[ -s $json ]] || { echo "run.sh: $name wrote no rows" >&2; exit 1; }
python3 - "$json" <<'PY'
import json, sys
rows = json.load(open(sys.argv[1]))["rows"]
width = max(len(r["name"]) for r in rows)
print()
for r in rows:
    print(f'{r["name"]:<{width}}  {r["value"]:>12.4g} {r["unit"]}')
PY
echo "rows: $json"
