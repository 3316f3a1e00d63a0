#!/usr/bin/env bash
# The data path under sanitizers: builds only what that takes, in build/asan (AddressSanitizer,
# LeakSanitizer, UndefinedBehaviorSanitizer) and build/tsan (ThreadSanitizer), and runs its tests. CI runs
# both (tests/run.sh).
#   tests/sanitize/run.sh [all] [asan] [tsan] [-- ctest options]
# Environment: KVT_JOBS (parallel compile jobs).
# Suppressions (*.supp beside this file) name vendor libraries only; lint_operations checks it.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=$PWD/tests/sanitize
jobs=${KVT_JOBS:-$(nproc)}
# What CI runs: under AddressSanitizer the data path and what stands on it; under ThreadSanitizer the data path
# over UCX alone, because it does not see the fences of the shared-memory rings, and without the tests of
# injected faults, which have not been seen to pass there yet. `all` has ThreadSanitizer do what the other
# does. The model's kernels have tests of their own; their threads are OpenMP's, not instrumented.
targets=(transport_test)
more=(transport_unit_test index_test media_test tier_client_test store_data_test store_api_test store_node_test
      store_spill_test client_test rpc_test membership_test)
asan_tests='*'
tsan_tests='*ucx*:*Ucx*-*Fault*:*Network*'
tsan_all=0
step() { printf '\n=== [%(%H:%M:%S)T] %s\n' -1 "$*"; }

presets=()
while (($#)); do
  case "$1" in
    asan|tsan) presets+=("$1"); shift ;;
    all) tsan_all=1; tsan_tests='-*/shm:*/Shm:*Shm*'; shift ;;
    --) shift; break ;;
    *) echo "usage: tests/sanitize/run.sh [all] [asan] [tsan] [-- ctest options]" >&2; exit 2 ;;
  esac
done
((${#presets[@]})) || presets=(asan tsan)

export UCX_NET_DEVICES=lo
export ASAN_OPTIONS=detect_stack_use_after_return=0:strict_init_order=1:${ASAN_OPTIONS:-}
export LSAN_OPTIONS=suppressions=$here/lsan.supp:print_suppressions=0:${LSAN_OPTIONS:-}
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1:suppressions=$here/ubsan.supp:${UBSAN_OPTIONS:-}
export TSAN_OPTIONS=suppressions=$here/tsan.supp:second_deadlock_stack=1:history_size=4:${TSAN_OPTIONS:-}

for preset in "${presets[@]}"; do
  step "$preset: configure"
  cmake --preset "$preset" >build-configure.log 2>&1 || { cat build-configure.log; exit 1; }
  rm -f build-configure.log
  known=$(ninja -C "build/$preset" -t targets all)
  build=()
  wanted=("${targets[@]}")
  if [[ $preset == asan ]] || ((tsan_all)); then wanted+=("${more[@]}"); fi
  for target in "${wanted[@]}"; do
    grep -q "^$target: phony" <<<"$known" || { echo "no target $target: update tests/sanitize/run.sh" >&2; exit 1; }
    build+=("$target")
  done
  step "$preset: build ${build[*]}"
  cmake --build --preset "$preset" -j "$jobs" --target "${build[@]}" | tail -n 3
  step "$preset: tests"
  filter=${preset}_tests
  regex="^($(IFS='|'; echo "${build[*]}"))\$"
  GTEST_FILTER=${GTEST_FILTER:-${!filter}} ctest --test-dir "build/$preset" --output-on-failure --no-tests=error -R "$regex" "$@"
done
