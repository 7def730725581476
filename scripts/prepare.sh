#!/usr/bin/env bash
# Downloads a checkpoint from the Hugging Face hub and, if asked, quantizes it. Checkpoints load as they are: there is
# no conversion step. Gated models need `hf auth login` or HF_TOKEN first.
#
# usage: ./scripts/prepare.sh REPO [options]
#   REPO               owner/name, for example TinyLlama/TinyLlama-1.1B-Chat-v1.0
#   --quantize MODE    also write a quantized copy beside it: int8, int4 or fp8
#   --output DIR       where checkpoints go (default checkpoints)
#   --venv DIR         virtual environment to make or use (default .venv, or GPT_FAST_VENV)
#   -h, --help         this text
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

REPO=""
MODE=""
OUTPUT="$ROOT/checkpoints"
while [ $# -gt 0 ]; do
  case "$1" in
    --quantize | --output | --venv)
      [ $# -ge 2 ] || usage_error "$1 needs a value"
      case "$1" in
        --quantize) MODE="$2" ;;
        --output) OUTPUT="$(absolute "$2")" ;;
        --venv) VENV="$(absolute "$2")" ;;
      esac
      shift ;;
    -h | --help) usage; exit 0 ;;
    -*) usage_error "unknown option: $1" ;;
    *) [ -z "$REPO" ] || usage_error "one REPO at a time, not both $REPO and $1"; REPO="$1" ;;
  esac
  shift
done
[ -n "$REPO" ] || usage_error "REPO is missing"
case "$MODE" in
  "" | int8 | int4 | fp8) ;;
  *) usage_error "--quantize takes int8, int4 or fp8, not $MODE" ;;
esac

install_extras serve
GPT_FAST="$VENV/bin/gpt-fast"
CHECKPOINT="$OUTPUT/$REPO"
"$GPT_FAST" download "$REPO" --out "$CHECKPOINT"
if [ -n "$MODE" ]; then
  "$GPT_FAST" quantize --checkpoint "$CHECKPOINT" --mode "$MODE" --out "$CHECKPOINT-$MODE" --resume
  CHECKPOINT="$CHECKPOINT-$MODE"
fi
say "Serve it:  $(command_for quickstart.sh --checkpoint "$CHECKPOINT")"
