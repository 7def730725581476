"""What all launches share: how many tokens a step has, whether Triton interprets, dtypes, what a GPU holds."""

from __future__ import annotations

import functools
import os

import torch
import triton
import triton.language as tl

# A product and a sum in one instruction: later versions of Triton do that only where they are told to.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

MAX_TOKENS = 64  # new tokens of a step of a program: what one program of a product takes (linear.py)

MULTIPROCESSORS = 132  # of an H100, for which launches are divided

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


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program may take on a multiprocessor of ``device``: 227 kB on an H100, 163 on an A100, 99 on an
    L40S. Without a GPU an H100's."""
    if device.type != "cuda":
        return 227 * 1024
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])
