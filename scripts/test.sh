#!/usr/bin/env bash
# Installs what the tests need, then runs ruff, mypy and pytest (unit, parity and end-to-end against a real TorchServe).
# Exit status 0 only if all three pass.
#
# usage: ./scripts/test.sh [options] [pytest arguments]
#   --fast       skip what is marked e2e or slow
#   --lint       ruff and mypy only
#   --clients    only tests/clients: other people's clients, in a second environment
#   --venv DIR   virtual environment to make or use (default .venv, or GPT_FAST_VENV)
#   -h, --help   this text
# Everything else goes to pytest, which uses two processes: ./scripts/test.sh --fast -n 0 tests/test_structure.py
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

FAST=""
LINT_ONLY=""
CLIENTS=""
while [ $# -gt 0 ]; do
  case "$1" in
    --fast) FAST=yes ;;
    --lint) LINT_ONLY=yes ;;
    --clients) CLIENTS=yes ;;
    --venv)
      [ $# -ge 2 ] || usage_error "$1 needs a value"
      VENV="$(absolute "$2")"
      shift ;;
    -h | --help) usage; exit 0 ;;
    *) break ;;
  esac
  shift
done

# Whatever a test starts inherits this, and is ended with this script, torchrun's detached ranks included.
GPT_FAST_TEST_RUN="$$-$(date +%s)"
export GPT_FAST_TEST_RUN
on_exit() {
  if [ -x "$VENV/bin/python" ]; then
    "$VENV/bin/python" -m gpt_fast.serve.launch.processes GPT_FAST_TEST_RUN="$GPT_FAST_TEST_RUN" 2>/dev/null || true
  fi
}

cd "$ROOT"
say "Installing into $VENV (once)"
if [ -z "$FAST$LINT_ONLY" ]; then
  install_with_java serve test
  say "  installed; $JAVA_IS"
else
  install_extras serve test
fi

export PATH="$VENV/bin:$PATH"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # the models are tiny: threads only wait for each other
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}" # a thread that spins takes the core that another test needs
export PYTHONUNBUFFERED=1                            # progress shows in a log file too
export TOKENIZERS_PARALLELISM=false # no warning about forks
export HF_HUB_OFFLINE=1             # a test that downloads is a mistake

FAILED=""
TIMES=""
check() { # check NAME COMMAND...: goes on after a failure, so that one run tells all
  local name=$1 started=$SECONDS status=0
  shift
  say ""
  say "$name"
  "$@" </dev/null || status=$?
  if [ "$status" -ne 0 ]; then FAILED="$FAILED $name"; fi
  TIMES="$TIMES, $name $([ "$status" -eq 0 ] && echo passed || echo FAILED) in $((SECONDS - started)) s"
}

# The clients see the packages of the first environment behind their own: torch is not installed twice.
install_clients() {
  local wanted="$ROOT/tests/clients/requirements.txt" stamp="$VENV-clients/installed.txt" log="$RUN_DIR/install.log" main
  main="$("$VENV/bin/python" -c 'import site; print(site.getsitepackages()[0])')"
  if cmp -s "$wanted" "$stamp"; then return; fi
  stage "virtual environment of the clients" "$log" "$VENV/bin/python" -m venv --clear "$VENV-clients" || install_failed "$log"
  printf '%s\n' "$ROOT" "$main" >"$("$VENV-clients/bin/python" -c 'import site; print(site.getsitepackages()[0])')/gpt-fast.pth"
  { grep '^torch==' "$ROOT/constraints.txt"; cat "$ROOT/tests/clients/constraints.txt"; } >"$VENV-clients/constraints.txt"
  stage "clients" "$log" "$VENV-clients/bin/python" -m pip install --no-input --disable-pip-version-check --progress-bar off \
    -c "$VENV-clients/constraints.txt" -r "$wanted" || install_failed "$log"
  cp "$wanted" "$stamp"
}

if [ -n "$CLIENTS" ]; then
  install_clients
  check clients "$VENV-clients/bin/python" -m pytest -n 0 tests/clients "$@"
  say ""
  say "test.sh: ${TIMES#, }"
  [ -z "$FAILED" ]
  exit
fi

check ruff ruff check .
check mypy mypy
if [ -z "$LINT_ONLY" ]; then
  if [ -n "$FAST" ]; then set -- -m "not e2e and not slow" "$@"; fi
  # A file's tests share what they start. The order is conftest.py's; by number of tests, files of one long test come last.
  check pytest python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
fi

say ""
say "test.sh: ${TIMES#, }"
[ -z "$FAILED" ]
