"""What all launches share: whether Triton interprets, dtypes, and the options of a launch."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

# New tokens of a step of a program, enough to verify five drafts of each of eight sequences. The products take them in
# three blocks of rows (linear_kernel.py).
MAX_TOKENS = 48

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"  # Triton reads it when a kernel is defined: at import

# Programmatic dependent launch (Hopper and later): a kernel may begin while the one before it ends, and waits inside.
# It hides launches; $GPT_FAST_GPU_OVERLAP=1 turns it on.
OVERLAP = os.environ.get("GPT_FAST_GPU_OVERLAP", "0") == "1" and not INTERPRETED


@triton.jit
def wait_for_previous(overlap: tl.constexpr) -> None:
    """Let the next kernel begin, then wait for the end of the one before. ``overlap``: OVERLAP at the launch."""
    if overlap:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def power_of_two(n: int, least: int = 1) -> int:
    """The least power of two that is at least ``n`` and ``least`` (one itself)."""
    return max(least, 1 << max(0, n - 1).bit_length())


def options(num_warps: int, num_stages: int = 1) -> dict[str, int | bool]:
    """Keyword arguments of a launch."""
    given: dict[str, int | bool] = {"num_warps": num_warps, "num_stages": num_stages, "overlap": OVERLAP}
    return given | ({"launch_pdl": True} if OVERLAP else {})


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
