"""Experts that a checkpoint stores in one tensor, as tensors of each expert, and back (gpt-oss).

``X.3.weight``, the weights of expert 3, are found in ``X`` [experts, inputs, outputs], or in ``X_blocks`` uint8
[experts, outputs, inputs / 32, 16] and ``X_scales`` uint8 [experts, outputs, inputs / 32]; ``X.3.bias`` in ``X_bias``
[experts, outputs]. Blocks and scales are MXFP4 (OCP Microscaling Formats 1.0): a byte holds two numbers of 4 bits, the
first in its low half, and 32 numbers share a power of two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from gpt_fast.checkpoint.stored import StoredTensor
from gpt_fast.errors import ConfigError

_GROUP = 32
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device="cpu")
_VALUES = torch.cat((_FP4, -_FP4))
_BIAS = 127  # of the exponents


class Mxfp4Tensor(StoredTensor):
    """``blocks`` [rows, columns / 2] and ``scales`` [rows, columns / 32] read as bfloat16, which holds them exactly."""

    def __init__(self, blocks: Tensor, scales: Tensor, mapped: bool) -> None:
        super().__init__(blocks, mapped=mapped)
        self.dtype, self.scales, self.order = torch.bfloat16, scales, torch.arange(len(blocks))
        self.shape = (len(blocks), 2 * blocks.shape[1])

    def columns(self, start: int, num_columns: int) -> StoredTensor:
        """As of any tensor; whole groups. Raises ConfigError."""
        if start % _GROUP or num_columns % _GROUP:
            raise ConfigError(f"shard: {num_columns} inputs a rank are no whole groups of MXFP4")
        data = self.data.narrow(1, start // 2, num_columns // 2)
        out = self._view(data, self.order, (self.num_rows, num_columns))
        out.scales = self.scales.narrow(1, start // _GROUP, num_columns // _GROUP)
        return out

    def rows(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end), bfloat16."""
        assert self.order is not None
        chosen = self.order[begin:end]
        blocks, exponents = self.data[chosen], self.scales[chosen].int() - _BIAS
        values = _VALUES[torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1).int()]
        return torch.ldexp(values.unflatten(1, (-1, _GROUP)), exponents[..., None]).flatten(1).bfloat16()


def unstacked(tensors: Mapping[str, StoredTensor], wanted: Iterable[str]) -> dict[str, StoredTensor]:
    """``tensors``, where those that ``wanted`` names expert by expert take the place of the stacked ones."""
    out, stacks = dict(tensors), dict[tuple[str, str], list[str]]()
    for name in wanted:
        stem, _, kind = name.rpartition(".")
        base, _, expert = stem.rpartition(".")
        if expert.isdigit() and name not in tensors:
            stacks.setdefault((base, kind), []).append(name)
    for (base, kind), names in stacks.items():
        stack = base + ("_bias" if kind == "bias" else "" if base in tensors else "_blocks")
        stored, scales = tensors.get(stack), tensors.get(base + "_scales")
        if stored is None or len(stored.shape) < 2 or len(stored.shape) > 4 or stored.shape[0] != len(names):
            continue  # check_tensors tells what is missing
        if len(stored.shape) < 4:
            for i, name in enumerate(names):
                out[name] = StoredTensor(stored.rows(i, i + 1)[0].t(), mapped=stored.mapped)
        elif scales is not None and scales.shape == stored.shape[:-1] and stored.shape[-1] == _GROUP // 2:
            for i, name in enumerate(names):
                blocks = stored.rows(i, i + 1)[0].flatten(1)
                out[name] = Mxfp4Tensor(blocks, scales.rows(i, i + 1)[0], stored.mapped)
            del out[base + "_scales"]
        else:
            continue
        del out[stack]
    return out


class _Stack(StoredTensor):
    """``each`` of some experts' tensors of one shape, transposed and stacked while they are read."""

    def __init__(self, each: Sequence[StoredTensor]) -> None:
        super().__init__(torch.empty(0))
        self._each, self.dtype, self.shape = each, each[0].dtype, (len(each), *each[0].shape[::-1])

    def rows(self, begin: int, end: int) -> Tensor:
        """Those of the experts [begin, end)."""
        return torch.stack([tensor.whole().t() for tensor in self._each[begin:end]])

    def release(self, begin: int, end: int) -> None:
        for tensor in self._each[begin:end]:
            tensor.release(0, tensor.num_rows)


def stacked(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The inverse of :func:`unstacked` for weights in floating point."""
    out, stacks = dict[str, StoredTensor](), dict[str, dict[int, StoredTensor]]()
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        base, _, expert = stem.rpartition(".")
        if expert.isdigit():
            stacks.setdefault(base + "_bias" * (kind == "bias"), {})[int(expert)] = tensor
        else:
            out[name] = tensor
    return out | {name: _Stack([each[i] for i in sorted(each)]) for name, each in stacks.items()}
