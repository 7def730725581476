"""The race that draws tokens: of each row the token whose exponentially distributed time is over first.

Token i takes ``E / e^(logit - greatest logit)``, where E is noise of mean 1: a hash of the row's key and of i. Which
token comes first is distributed as the softmax of the logits (Efraimidis & Spirakis 2006; the logarithm of the times
gives the Gumbel-max trick). Two models whose distributions are near each other draw the same token from the same key
most of the time: at least (1 - d) / (1 + d) of it, where d is their total variation distance (Daliri et al. 2025).

u of the noise ``-ln(1 - u)`` has 31 bits: what is less likely than about 1e-9 is not drawn as often as it should be.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gpt_fast.kernels.cpu import structs
from gpt_fast.kernels.cpu.library import library

_MASK = 2**64 - 1


def race_key(seed: int, position: int) -> tuple[int, int]:
    """The key of a draw, two signed integers of 32 bits: splitmix64 (Steele et al. 2014) over a counter."""
    z = 0
    for word in (seed, position + 1):
        z = (z + word * 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z ^= z >> 31
    return (z & 0xFFFFFFFF) - 2**31, (z >> 32) - 2**31


class Draw(NamedTuple):
    """How a token is drawn from a row of logits; engine/sampling.py says what the fields mean, and C++ reads them."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    low: int = 0  # of the key
    high: int = 0


_PACKED = struct.Struct("".join(kind._type_ for _, kind in structs.Draw._fields_))


def draw_table(draws: Iterable[Draw]) -> array[int]:
    """``draws`` as C++ reads them, one behind the other. Structs of ctypes take three times as long."""
    return array("b", b"".join([_PACKED.pack(*own) for own in draws]))


def draw(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Draw one token per row by C++: logits [R, V] float32 on the CPU -> [R] int64; -1 for a row with NaN, or whose
    greatest logit is not finite. Its twin is ``engine.sampling.plain_draw``; they agree except where rounding
    decides."""
    logits = logits.contiguous()
    tokens = torch.empty(logits.shape[0], dtype=torch.int64)
    table = draw_table(draws)
    where = (logits.data_ptr(), structs.address(table), tokens.data_ptr())
    library().gpt_fast_draw(*where, *logits.shape, torch.get_num_threads())
    return tokens


def race(logits: Tensor, keys: Tensor) -> Tensor:
    """Draw one token per row: logits [R, V] float32, keys [R, 2] int32 -> [R] int64; -1 for a row with NaN, or whose
    greatest logit is not finite. The key of a row decides its noise. By Triton on a GPU, else by :func:`plain_race`;
    they agree except where two times differ only by rounding."""
    if logits.device.type == "cuda":
        from gpt_fast.kernels.gpu.race import race as gpu_race

        return gpu_race(logits, keys)
    return plain_race(logits, keys)


def plain_race(logits: Tensor, keys: Tensor) -> Tensor:
    """The race in plain torch."""
    greatest = logits.amax(dim=-1, keepdim=True)  # NaN where the row has one
    token = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    times = exponential(token, keys[:, :1], keys[:, 1:]) / (logits - greatest).exp()
    return times.argmin(dim=-1).where(greatest[:, 0].isfinite(), -1)


def exponential(token: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Noise of mean 1, float32, for int32 ``token`` under the key ``low``, ``high``."""
    hashed = _mix(_mix(token ^ low) ^ high)
    u = ((hashed >> 1) & 0x7FFFFFFF).float().add(0.5).mul(2.0**-31).clamp(max=1 - 2.0**-24)
    return -torch.log1p(-u)


def _mix(x: Tensor) -> Tensor:
    """One round of lowbias32 (Wellons 2018). int32 stands for 32 bits: products wrap, shifts bring zeros in."""
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x7FEB352D
    x = (x ^ (x >> 15 & 0x1FFFF)) * (0x846CA68B - 2**32)
    return x ^ (x >> 16 & 0xFFFF)
