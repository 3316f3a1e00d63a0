#!/usr/bin/env bash
# The first command of the README. On a bare Debian 12: installs what is needed, builds, fetches a
# real model, starts a coordinator, two stores, one prefill and two decode workers on this machine,
# asks a question about a long real text, streams the answer, shows what lies where, stops cleanly.
#
#   deploy/quickstart.sh [--keep]     --keep leaves the cluster running (stop it: kvtide down)
set -euo pipefail
cd "$(dirname "$0")/.."
keep=0
case "${1:-}" in
  "") ;;
  --keep) keep=1 ;;
  *) echo "usage: deploy/quickstart.sh [--keep]" >&2; exit 2 ;;
esac
step() { printf '\n=== [%(%H:%M:%S)T] %s\n' -1 "$*"; }

bin=build/release/bin
run_dir=var/run/quickstart
text=/usr/share/common-licenses/GPL-3
[[ -r $text ]] || { echo "quickstart: $text is missing (Debian's base-files carries it)" >&2; exit 1; }

step "packages"
deploy/install_deps.sh
step "build (build/release)"
cmake --preset release -DKVT_BUILD_TESTS=OFF >build-configure.log 2>&1 || { cat build-configure.log; exit 1; }
rm -f build-configure.log
cmake --build --preset release | tail -n 1
step "model"
deploy/fetch_model.sh

step "cluster: 1 coordinator, 2 stores, 1 prefill worker, 2 decode workers"
cleanup() { "$bin/kvtide" down --run-dir "$run_dir" >/dev/null 2>&1 || true; }
trap cleanup EXIT
"$bin/kvtide" up --config deploy/quickstart.toml --run-dir "$run_dir"

step "a question about $(basename "$text") ($(wc -w <"$text") words)"
question="$(cat "$text")

In one sentence: what is the purpose of the license above?"
printf '%s' "$question" | "$bin/kvtide" generate --run-dir "$run_dir" --chat --file - --max-tokens 96
step "the same text again: its prefix lies in the tier"
printf '%s Answer briefly.' "$question" | "$bin/kvtide" generate --run-dir "$run_dir" --chat --file - --max-tokens 32

step "kvtide tier"
"$bin/kvtide" tier --run-dir "$run_dir"
step "kvtide status"
"$bin/kvtide" status --run-dir "$run_dir"

if ((keep)); then
  trap - EXIT
  echo "left running; ask it: $bin/kvtide generate --run-dir $run_dir --chat 'Hello'"
  echo "stop it: $bin/kvtide down --run-dir $run_dir"
else
  step "stop"
  trap - EXIT
  "$bin/kvtide" down --run-dir "$run_dir"
fi
