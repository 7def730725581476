"""Triton kernels for steps on a GPU, and programs made of them.

program.py makes whole steps of linear.py, attention.py, experts.py and fused.py; their Triton code is in *_kernel.py,
its plain twins in gpt_fast/model (transformer.py, attention.py, experts.py, rope.py). graphs.py replays steps.
least_kept.py and race.py draw tokens, with twins in gpt_fast/engine/sampling.py and gpt_fast/kernels/race.py. The rest
of the package imports nothing but this file unless a model runs on CUDA: Triton may be absent. Under
TRITON_INTERPRET=1, set before Triton is imported, everything runs on a CPU, slowly: for tests.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch


@functools.cache
def available() -> bool:
    """Whether the kernels run here: a CUDA device of compute capability 8.0 or more, and Triton installed.

    ``$GPT_FAST_KERNELS=reference`` switches them off.
    """
    if os.environ.get("GPT_FAST_KERNELS") == "reference" or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
