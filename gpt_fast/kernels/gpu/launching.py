"""What all launches share: how many tokens a step has, whether Triton interprets, dtypes."""

from __future__ import annotations

import os

import torch
import triton.language as tl

MAX_TOKENS = 64  # new tokens of a step of a program: what one program of a product takes (linear.py)

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"  # Triton reads it when a kernel is defined: at import


def power_of_two(n: int, least: int = 1) -> int:
    """The least power of two that is at least ``n`` and ``least`` (one itself)."""
    return max(least, 1 << max(0, n - 1).bit_length())


def half(dtype: torch.dtype) -> torch.dtype:
    """The 16-bit float that goes with activations of ``dtype``: of the constants beside int4 weights."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float16


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    """``dtype``, one of the three float dtypes, as Triton names it."""
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype]


def compute_dtype(dtype: torch.dtype) -> tl.dtype:
    """The dtype in which the operands of products meet: ``dtype``; interpreted, bfloat16 becomes float32.

    The interpreter holds bfloat16 as bits and would multiply the bits.
    """
    return triton_dtype(torch.float32 if INTERPRETED and dtype == torch.bfloat16 else dtype)
