#!/usr/bin/env bash
# The GPU programme: correctness of every kernel, the machine's ceilings, decoding by precision, batch and context,
# steps of 1 to 40 rows that verify drafts against one row, a profile. At most ten minutes on one CUDA machine that has
# PyTorch and Triton; nothing is installed or downloaded.
#
# usage: benchmarks/gpu.sh [--quick] [--smoke] [--tune] [--gpt-fast CHECKOUT] [--out FILE] [--plot FILE] ...   (see --help)
#   PYTHON names the interpreter (default python3).
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
exec "${PYTHON:-python3}" "$ROOT/benchmarks/gpu" "$@"
