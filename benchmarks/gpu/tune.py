"""Which division of a product is fastest on this GPU: bytes per second under several, weights rotating past the cache.

What it finds goes into ``linear.tiling`` by hand; it never depends on the number of activation rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gpt_fast.kernels.gpu import linear
from gpt_fast.kernels.gpu.graphs import CudaCapture
from gpu.synthetic import num_bytes, random_weights

_COPIES = 6  # of some tens of megabytes: more than a second-level cache holds


class Tried(NamedTuple):
    """One division, and its bytes per second or why it does not run."""

    division: linear.Tiling
    used: bool  # the one that ``linear.tiling`` gives
    rate: float
    error: str


def divisions(used: linear.Tiling) -> list[linear.Tiling]:
    """Neighbours of ``used``, itself first."""
    found = [used._replace(tile=tile, stages=stages) for tile in (32, 64) for stages in (3, 4, 6)]
    found += [used._replace(warps=1), used._replace(splits=2 * used.splits), used._replace(splits=-(-used.splits // 2))]
    return list(dict.fromkeys([used, *found]))


def compare(
    precision: str, n: int, k: int, gated: bool, seconds: Callable[[Callable[[], object], float], float]
) -> Iterator[Tried]:
    """One row of activations times [n, k]; ``seconds(run, most)`` times a run."""
    device = torch.device("cuda")
    copies = [random_weights(precision, n, k, device) for _ in range(_COPIES)]
    x = torch.randn(1, k, device=device).bfloat16()

    def sweep(division: linear.Tiling) -> Tensor:
        for w in copies:
            out = linear.linear(x, w, gated=gated, division=division)
        return out

    used = linear.tiling(copies[0])
    for division in divisions(used):
        try:
            run = CudaCapture()(functools.partial(sweep, division))
            rate = sum(num_bytes(w) for w in copies) / seconds(run, 0.2)
        except Exception as error:  # too much shared memory: Triton raises its own types
            yield Tried(division, division == used, 0.0, str(error).splitlines()[0])
        else:
            yield Tried(division, division == used, rate, "")
