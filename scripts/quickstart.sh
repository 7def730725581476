#!/usr/bin/env bash
# Installs gpt-fast and TorchServe, packs the bundled demo model, starts TorchServe on this machine's loopback
# address and streams one completion. Run it again to ask again: what is done is not done twice.
#
# usage: ./scripts/quickstart.sh [options]
#   --checkpoint DIR   serve this checkpoint instead of the demo model (default model_store/demo/target)
#   --draft DIR        a smaller model with the same vocabulary, which guesses tokens ahead; answers do not change
#   --speculative      serve the demo model with the demo draft, by configs/model_config_speculative.yaml
#   --config FILE      the model's configuration (default model_config.yaml; see configs/ for others)
#   --request FILE     the request to send (default request.json)
#   --port BASE        inference port (default 8080, or GPT_FAST_PORT); the others are BASE+1, BASE+2, BASE-1010, BASE-1009
#   --venv DIR         virtual environment to make or use (default .venv, or GPT_FAST_VENV)
#   --install-only     stop after the installation
#   --stop             stop the server that this script started
#   -h, --help         this text
#
# Environment: PYTHON chooses the Python for a new virtual environment, GPT_FAST_TORCH="torch==2.11.0" another torch,
# GPT_FAST_START_TIMEOUT the seconds that the model may take to load (default 900), GPT_FAST_RUN_DIR the folder for logs
# and for what the running server is known by (default .run; one server for each).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

NAME=gpt-fast
CHECKPOINT=""
DRAFT=""
SPECULATIVE=""
CONFIG=""
REQUEST="$ROOT/request.json"
PORT="${GPT_FAST_PORT:-8080}"
ACTION=serve

while [ $# -gt 0 ]; do
  case "$1" in
    --checkpoint | --draft | --config | --request | --port | --venv)
      [ $# -ge 2 ] || usage_error "$1 needs a value"
      case "$1" in
        --checkpoint) CHECKPOINT="$(absolute "$2")" ;;
        --draft) DRAFT="$(absolute "$2")" ;;
        --config) CONFIG="$(absolute "$2")" ;;
        --request) REQUEST="$(absolute "$2")" ;;
        --port) PORT="$2" ;;
        --venv) VENV="$(absolute "$2")" ;;
      esac
      shift ;;
    --speculative) SPECULATIVE=yes ;;
    --install-only) ACTION=install ;;
    --stop) ACTION=stop ;;
    -h | --help) usage; exit 0 ;;
    *) usage_error "unknown option: $1" ;;
  esac
  shift
done
case "$PORT" in '' | *[!0-9]*) usage_error "--port must be a number, not '$PORT'" ;; esac
if [ "$PORT" -lt 2034 ] || [ "$PORT" -gt 65533 ]; then usage_error "--port must be from 2034 to 65533, not $PORT"; fi
if [ -n "$SPECULATIVE" ]; then
  [ -z "$CHECKPOINT$DRAFT" ] || usage_error "--speculative is for the demo models; for others give --checkpoint DIR --draft DIR"
  DRAFT="$ROOT/model_store/demo/draft"
  CONFIG="${CONFIG:-$ROOT/configs/model_config_speculative.yaml}"
fi
CHECKPOINT="${CHECKPOINT:-$ROOT/model_store/demo/target}"
CONFIG="${CONFIG:-$ROOT/model_config.yaml}"

SERVES="$CHECKPOINT with $CONFIG${DRAFT:+ and the draft model $DRAFT}"
server() { "$VENV/bin/python" "$ROOT/scripts/server.py" --run-dir "$RUN_DIR" "$@"; }

STOP_COMMAND="$(command_for quickstart.sh --stop)"

# Sends the request as anyone would; without curl through Python.
ask() {
  local url="http://127.0.0.1:$PORT/predictions/$NAME" headers status=0
  if ! command -v curl >/dev/null 2>&1; then
    say "POST $url  (no curl here, so Python sends it)"
    server ask "$REQUEST" || return $?
    say ""
    return
  fi
  say "\$ curl -N $url -T $(shown "$REQUEST")"
  headers="$RUN_DIR/answer.headers"
  curl -N -sS --noproxy '*' -D "$headers" "$url" -T "$REQUEST" || status=$?
  say ""
  if [ "$status" -ne 0 ]; then return "$status"; fi
  status="$(sed -n -E '/^HTTP/s/^HTTP[^ ]* ([0-9]+).*/\1/p' "$headers" | tail -n 1)"
  case "$status" in 2*) ;; *) say "The server answered with status $status."; return 1 ;; esac
}

STARTED_AT=$SECONDS
if [ "$ACTION" = stop ]; then
  # The environment that the server was started with does as well: it is only asked to look for processes.
  if [ ! -x "$VENV/bin/python" ] && [ -f "$RUN_DIR/venv" ]; then VENV="$(cat "$RUN_DIR/venv")"; fi
  if [ ! -x "$VENV/bin/python" ]; then
    [ -f "$RUN_DIR/venv" ] || [ -f "$RUN_DIR/server.json" ] || { say "No server was started from here."; exit 0; }
    die "$VENV is gone, and with it what finds the server's processes. Name another one with --venv DIR"
  fi
  server stop
  exit 0
fi

for file in "$CONFIG" "$REQUEST" "$ROOT/config.properties"; do
  [ -f "$file" ] || [ "$ACTION" = install ] || die "$file is missing"
done
for folder in "$CHECKPOINT" "${DRAFT:-$CHECKPOINT}"; do
  [ -d "$folder" ] || [ "$ACTION" = install ] || die "$folder is not a checkpoint folder"
done

say "Installing into $(shown "$VENV") (once)"
mkdir -p "$RUN_DIR"
install_with_java serve
say "  installed; $JAVA_IS"
say "$VENV" >"$RUN_DIR/venv"
if [ "$ACTION" = install ]; then exit 0; fi

if running="$(server status 2>/dev/null)"; then
  PORT="${running%% *}"
  if [ "${running#* * }" != "$SERVES" ]; then
    die "a server already runs on port $PORT and serves ${running#* * }. Stop it first: $STOP_COMMAND"
  fi
  say "The server already runs on port $PORT."
else
  say "Starting (log: $(shown "$RUN_DIR/server.log"))"
  export PATH="$VENV/bin:$PATH"
  stage "archive of $(shown "$CHECKPOINT")" "$RUN_DIR/archive.log" "$VENV/bin/python" -m gpt_fast archive \
    --checkpoint "$CHECKPOINT" ${DRAFT:+--draft "$DRAFT"} --name "$NAME" --format no-archive --config "$CONFIG" \
    --output "$ROOT/model_store" || die "no archive, no server"
  server start --model "$NAME" --archive "$NAME" --model-store "$ROOT/model_store" --config "$ROOT/config.properties" \
    --port "$PORT" --serves "$SERVES" --cwd "$ROOT" --timeout "${GPT_FAST_START_TIMEOUT:-900}"
fi

say ""
ask || die "the request failed; the server still runs. Its log: $RUN_DIR/server.log. Stop it: $STOP_COMMAND"
if told="$(server drafts)" && [ -n "$told" ]; then say "$told"; fi
say ""
say "Done in $((SECONDS - STARTED_AT)) s. Ask again:  curl -N http://127.0.0.1:$PORT/predictions/$NAME -T $(shown "$REQUEST")"
say "In a browser:     http://127.0.0.1:$PORT/predictions/$NAME/1.0/page"
say "Stop the server:  $STOP_COMMAND"
