"""Weights rounded to int8 and int4 in C++ (``src/quantize.h``); ``quantize/rtn.py`` is the twin in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from gpt_fast.kernels.cpu.library import FORMATS, library
from gpt_fast.kernels.cpu.packing import GROUP_SIZES

_READ = {torch.float32: FORMATS["float32"], torch.bfloat16: FORMATS["bfloat16"]}


def quantize_int8(rows: Tensor) -> dict[str, Tensor]:
    """``rows`` [n, K] on the CPU, of any floating dtype, on as many threads as torch has -> weight int8 [n, K], scale
    float32 [n].

    Raises UnavailableError without kernels.
    """
    rows = _readable(rows)
    made = {"weight": torch.empty(rows.shape, dtype=torch.int8), "scale": torch.empty(len(rows))}
    places = [tensor.data_ptr() for tensor in made.values()]
    threads = torch.get_num_threads()
    library().gpt_fast_quantize_int8(rows.data_ptr(), _READ[rows.dtype], *rows.shape, *places, threads)
    return made


def quantize_int4(rows: Tensor, group_size: int) -> dict[str, Tensor]:
    """``rows`` [n, K] on the CPU, of any floating dtype, on as many threads as torch has -> int4 in plain bytes.

    weight uint8 [n, P / 2], scale and zero uint8 [n, P / group_size], row_scale float32 [n], where P is K rounded up to
    whole groups. Raises UnavailableError without kernels, and ValueError for another group size than GROUP_SIZES.
    """
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size ({group_size}) is not one of {', '.join(map(str, GROUP_SIZES))}")
    rows = _readable(rows)
    (n, k), groups = rows.shape, -(-rows.shape[1] // group_size)
    shapes = {"weight": groups * group_size // 2, "scale": groups, "zero": groups}
    made = {name: torch.empty((n, width), dtype=torch.uint8) for name, width in shapes.items()}
    made["row_scale"] = torch.empty(n)
    places = [tensor.data_ptr() for tensor in made.values()]
    threads = torch.get_num_threads()
    library().gpt_fast_quantize(rows.data_ptr(), _READ[rows.dtype], n, k, group_size, *places, threads)
    return made


def _readable(rows: Tensor) -> Tensor:
    return (rows if rows.dtype in _READ else rows.float()).contiguous()
