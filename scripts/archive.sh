#!/usr/bin/env bash
# Builds an archive for TorchServe: handler, package, model_config.yaml, checkpoint and draft model. Example:
#   scripts/archive.sh --checkpoint checkpoints/TinyLlama --name gpt-fast --format no-archive --output model_store
# --help lists the options. Uses the environment GPT_FAST_VENV, else .venv of this checkout, where there is one.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${GPT_FAST_VENV:-$root/.venv}/bin/python"
[ -x "$python" ] || python=python3
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m gpt_fast archive "$@"
