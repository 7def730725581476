"""Triton kernels for steps of few tokens on a GPU, and programs made of them.

Nothing here is imported by the rest of the package unless a model runs on CUDA: Triton may be absent.

    linear.py     products of up to 16 rows with dense, int8, int4, fp8 weights; norm, bias, SwiGLU, residual fused
    attention.py  attention over the paged cache: split over the length for decoding, by blocks of queries for prompts
    fused.py      embedding; what a norm needs; q and k norm, rotation and cache write
    program.py    GpuProgram: whole steps of up to 16 new tokens, made from a model's description
    graphs.py     CapturedProgram: the same replayed from CUDA graphs
    *_kernel.py   the Triton code. Its plain twins: gpt_fast/model (transformer.py, attention.py, rope.py)

Under TRITON_INTERPRET=1, set before Triton is imported, everything runs on a CPU, slowly: for tests.
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
    if os.environ.get("GPT_FAST_KERNELS") == "reference":
        return False
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability() >= (8, 0)
