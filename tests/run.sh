#!/usr/bin/env bash
# Sets up (packages, model) and runs all tests: the second command of the README, and what CI calls.
#   tests/run.sh                 everything, release build
#   tests/run.sh -R REGEX        only the tests whose names match (any ctest option is passed on)
# Without options the sanitizers follow (tests/sanitize/run.sh).
# Environment: KVT_PRESET (release | debug | asan | tsan), KVT_JOBS (parallel compile jobs),
# KVT_SANITIZE=skip (no sanitizers).
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${KVT_PRESET:-release}
jobs=${KVT_JOBS:-$(nproc)}
step() { printf '\n=== [%(%H:%M:%S)T] %s\n' -1 "$*"; }

step "packages"
deploy/install_deps.sh
step "model"
deploy/fetch_model.sh
step "configure ($preset)"
# The quick start configures the same folder without tests.
cmake --preset "$preset" -DKVT_BUILD_TESTS=ON >build-configure.log 2>&1 || { cat build-configure.log; exit 1; }
rm -f build-configure.log
step "build"
cmake --build --preset "$preset" -j "$jobs" | tail -n 3
step "tests"
export UCX_NET_DEVICES=lo
ctest --test-dir "build/$preset" --output-on-failure --no-tests=error "$@"
if (($# == 0)) && [[ $preset == release && ${KVT_SANITIZE:-} != skip ]]; then
  tests/sanitize/run.sh
fi
