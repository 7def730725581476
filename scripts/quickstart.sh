#!/usr/bin/env bash
# Installs this checkout and TorchServe into a virtual environment, and lets `gpt-fast serve` start the bundled demo model
# on this machine's loopback address and stream one completion. The server stays. Run it again to ask again: what is done
# is not done twice.
#
# usage: ./scripts/quickstart.sh [options]
#   --checkpoint MODEL  serve this folder, or owner/name of the Hub, instead of the demo model
#   --draft DIR         a smaller model with the same vocabulary, which guesses tokens ahead; answers do not change
#   --speculative       serve the demo model with the demo draft, by configs/model_config_speculative.yaml
#   --config FILE       the model's configuration (default model_config.yaml; see configs/ for others)
#   --request FILE      the request to send (default request.json)
#   --port BASE         inference port (default 8080, or GPT_FAST_PORT); the others are BASE+1, BASE+2, BASE-1010, BASE-1009
#   --venv DIR          virtual environment to make or use (default .venv, or GPT_FAST_VENV)
#   --install-only      stop after the installation
#   --stop              stop the server that this script started
#   -h, --help          this text
#
# Environment: PYTHON chooses the Python for a new virtual environment, GPT_FAST_TORCH="torch==2.11.0" another torch,
# GPT_FAST_START_TIMEOUT the seconds that the model may take to load (default 900), GPT_FAST_RUN_DIR the folder for logs
# and for what the running server is known by (default .run; one server for each).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

ACTION=serve
SERVE=(serve --run-dir "$RUN_DIR")
ASK=(--background --port "${GPT_FAST_PORT:-8080}" --request "$ROOT/request.json" --timeout "${GPT_FAST_START_TIMEOUT:-900}")
while [ $# -gt 0 ]; do
  case "$1" in
    --checkpoint | --draft | --config | --request | --port | --venv)
      [ $# -ge 2 ] || usage_error "$1 needs a value"
      if [ "$1" = --venv ]; then VENV="$(absolute "$2")"; else ASK+=("$1" "$2"); fi
      shift ;;
    --speculative) ASK+=("$1") ;;
    --install-only) ACTION=install ;;
    --stop) ACTION=stop ;;
    -h | --help) usage; exit 0 ;;
    *) usage_error "unknown option: $1" ;;
  esac
  shift
done

if [ "$ACTION" = stop ]; then
  # The environment that the server was started with does as well: it is only asked to look for processes.
  if [ ! -x "$VENV/bin/python" ] && [ -f "$RUN_DIR/venv" ]; then VENV="$(cat "$RUN_DIR/venv")"; fi
  if [ ! -x "$VENV/bin/python" ]; then
    [ -f "$RUN_DIR/venv" ] || { say "No server was started from here."; exit 0; }
    die "$VENV is gone, and with it what finds the server's processes. Name another one with --venv DIR"
  fi
  exec "$VENV/bin/python" -m gpt_fast "${SERVE[@]}" --stop
fi

say "Installing into $(shown "$VENV") (once)"
mkdir -p "$RUN_DIR"
install_with_java serve
say "  installed; $JAVA_IS"
say "$VENV" >"$RUN_DIR/venv"
if [ "$ACTION" = install ]; then exit 0; fi
exec "$VENV/bin/python" -m gpt_fast "${SERVE[@]}" "${ASK[@]}"
