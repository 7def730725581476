#!/usr/bin/env bash
# Tests of the C++ kernels, which gcc's sanitizers watch.
#
#     scripts/sanitize.sh address,undefined    # reads and writes beside a tensor, undefined behaviour
#     scripts/sanitize.sh thread               # threads that touch the same memory without an order
#     scripts/sanitize.sh thread tests/test_ahead.py -k paused    # these tests and options of pytest
#
# Reports go to standard error; the status is 1 if there is one. The kernels are built first, for some minutes, into a
# separate cache.
set -euo pipefail
cd "$(dirname "$0")/.."
kind=${1:-}
[[ $kind == address,undefined || $kind == thread ]] || { sed -n '2,6s/^# \?//p' "$0"; exit 2; }
shift
tests=(tests/test_kernels_cpu.py tests/test_kernels_attention.py tests/test_same_rows.py tests/test_cpu_model.py)
[[ $kind == thread ]] && tests=(tests/test_same_rows.py tests/test_cpu_model.py tests/test_ahead.py)

folder=${GPT_FAST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/gpt_fast}/sanitize-$kind
mkdir -p "$folder"
printf '#!/bin/sh\nexec g++ "$@" -O1 -g -fsanitize=%s\n' "$kind" > "$folder/g++"
chmod +x "$folder/g++"
export CXX=$folder/g++ GPT_FAST_CACHE=$folder OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
built=$(python -c 'from gpt_fast.kernels.cpu.building import build; print(build())')
export GPT_FAST_KERNEL_DIR=${built%/*}  # gcc does not run beside the library for threads, so nothing may be built below

library() { g++ -print-file-name="lib$1.so"; }
if [[ $kind == thread ]]; then
  preload=$(library tsan)
else
  preload="$(library asan) $(library ubsan)"
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# Python and torch are not built this way: their leaks and locks say nothing about the kernels.
ASAN_OPTIONS=detect_leaks=0 TSAN_OPTIONS=ignore_noninstrumented_modules=1 LD_PRELOAD=$preload \
  python -m pytest -s -n 0 "${@:-${tests[@]}}" 2> >(tee "$log" >&2)
if grep -qE 'runtime error:|(Address|Thread)Sanitizer' "$log"; then
  echo "scripts/sanitize.sh: the reports above are faults" >&2
  exit 1
fi
