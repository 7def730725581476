"""What all launches share: whether Triton interprets, and the options of a launch."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"  # Triton reads it when a kernel is defined: at import

# Programmatic dependent launch (Hopper and later): a kernel may begin while the one before it ends, and waits inside.
# It hides launches; $GPT_FAST_GPU_OVERLAP=1 turns it on.
OVERLAP = os.environ.get("GPT_FAST_GPU_OVERLAP", "0") == "1" and not INTERPRETED


def power_of_two(n: int) -> int:
    """The least power of two that is at least ``n`` and 1."""
    return 1 << max(0, n - 1).bit_length()


def options(num_warps: int, num_stages: int = 1) -> dict[str, int | bool]:
    """Keyword arguments of a launch."""
    given: dict[str, int | bool] = {"num_warps": num_warps, "num_stages": num_stages, "overlap": OVERLAP}
    if OVERLAP:
        given["launch_pdl"] = True
    return given


def half_dtype(dtype: torch.dtype) -> tl.dtype:
    """The 16-bit float that goes with activations of ``dtype``: of the constants beside int4 weights."""
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float16


def compute_dtype(dtype: torch.dtype) -> tl.dtype:
    """In which the operands of products meet: ``dtype``; interpreted, bfloat16 becomes float32.

    The interpreter holds bfloat16 as bits and would multiply the bits.
    """
    if INTERPRETED and dtype == torch.bfloat16:
        return tl.float32
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype]


def version() -> str:
    """Triton's version."""
    return str(triton.__version__)
