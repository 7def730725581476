"""What the machine allows: measured memory bandwidth, and the ceiling it sets on decoding.

Decoding one sequence reads every weight once per token, so tokens per second are at most bandwidth over bytes per
token. The bandwidth is measured on this machine, in this process, by reading memory that does not fit its caches.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from gpt_fast.kernels.cpu.library import READ_ORDERS, available, read
from gpt_fast.kernels.huge_pages import empty

_CPU_BYTES = 512 * 2**20
_CUDA_BYTES = 2 * 2**30


class Roofline(NamedTuple):
    """The limit on decoding one sequence. Bytes, bytes per second, tokens per second."""

    bytes_per_token: int
    bandwidth: float

    @property
    def ceiling(self) -> float:
        """Tokens per second if nothing but reading took time."""
        return self.bandwidth / self.bytes_per_token

    def share(self, tokens_per_second: float) -> float:
        """Achieved part of the ceiling; above 1 the weights come from a cache."""
        return tokens_per_second / self.ceiling


@functools.cache
def read_bandwidth(device_type: str, threads: int | None = None) -> float:
    """Bytes per second of reading on ``cpu`` or ``cuda``.

    On a CPU by a loop that only reads, on huge pages as the kernels' weights are, in the fastest of three orders;
    without the kernels by a matrix-vector product, which reads faster than a sum. On CUDA by a copy, read and write
    counted.

    ``threads`` only keys the cache: it should be the number of threads in use. Takes a fraction of a second.
    """
    if device_type == "cuda":
        source = torch.zeros(_CUDA_BYTES, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        return _best(lambda: target.copy_(source), 2 * source.numel(), torch.cuda.synchronize)
    if available():
        data = empty((_CPU_BYTES,), torch.uint8).fill_(1)
        return max(_best(functools.partial(read, data, order), data.numel()) for order in READ_ORDERS)
    matrix, vector = torch.ones(_CPU_BYTES // 4 // 2048, 2048), torch.ones(2048)
    return _best(lambda: torch.mv(matrix, vector), matrix.nbytes)


def _best(run: Callable[[], object], num_bytes: int, wait: Callable[[], object] = lambda: None) -> float:
    best = float("inf")
    for _ in range(5):
        wait()
        begin = time.perf_counter()
        run()
        wait()
        best = min(best, time.perf_counter() - begin)
    return num_bytes / best
