"""Tensors of GGUF files, read as their values: the blocks of ggml (its ggml-common.h has their layout).

Every encoding is ``value = code * step + base`` with a step and a base for each group of 16 or 32 neighbours. In
IQ4_NL, IQ4_XS and MXFP4 four bits choose the code in a table. What goes on to int4 takes codes and groups as they are
(quantize/gguf.py); all else reads values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gpt_fast.checkpoint.stored import StoredTensor, map_file
from gpt_fast.errors import ConfigError
from gpt_fast.gguf import Encoding, Place

# Codes by four bits: of IQ4_NL and IQ4_XS, which lie closer near 0 (kvalues_iq4nl in ggml-common.h), and twice the
# numbers of OCP's E2M1.
_UNEVEN = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8)
_E2M1 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Groups(NamedTuple):
    """Values in groups: ``codes`` int8 [n, groups, values], ``step`` and ``base`` float32 [n, groups]."""

    codes: Tensor
    step: Tensor
    base: Tensor

    def values(self) -> Tensor:
        """Float32 [n, groups * values]."""
        return self.codes.float().mul_(self.step[..., None]).add_(self.base[..., None]).flatten(1)


class GgufTensor(StoredTensor):
    """A matrix in one of the encodings of ``_DECODE``, read as float32. ``raw``: its bytes, uint8 [rows, bytes]."""

    def __init__(self, raw: Tensor, encoding: Encoding, columns: int) -> None:
        super().__init__(raw, mapped=True)
        self.encoding = encoding
        self.dtype, self.order, self.shape = torch.float32, torch.arange(len(raw)), (len(raw), columns)

    def columns(self, start: int, num_columns: int) -> StoredTensor:
        """As of any tensor; whole blocks. Raises ConfigError."""
        size = self.encoding.values
        if start % size or num_columns % size:
            raise ConfigError(f"shard: {num_columns} inputs a rank are no whole blocks of {self.encoding.name}")
        width = self.encoding.num_bytes
        data = self.data.narrow(1, start // size * width, num_columns // size * width)
        return self._view(data, self.order, (self.num_rows, num_columns))

    def transposed(self) -> StoredTensor:
        """The transpose, which is made anew each time that it is read; the transpose of that is this tensor."""
        return TurnedTensor(self)

    def groups(self, begin: int, end: int) -> Groups:
        """Rows [begin, end), as they are stored."""
        assert self.order is not None
        blocks = self.data[self.order[begin:end]].view(-1, self.encoding.num_bytes)
        found = _DECODE[self.encoding.name](blocks)
        return Groups(*(field.reshape(end - begin, -1, *field.shape[2:]) for field in found))

    def rows(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end), float32."""
        return self.groups(begin, end).values()


class TurnedTensor(StoredTensor):
    """The transpose of ``inner``, which is read whole for each piece: only what is written to a file is read so."""

    def __init__(self, inner: GgufTensor) -> None:
        super().__init__(torch.empty(0))
        self.inner, self.shape = inner, inner.shape[::-1]

    def transposed(self) -> StoredTensor:
        return self.inner

    def rows(self, begin: int, end: int) -> Tensor:
        return self.inner.whole()[:, begin:end].t()

    def release(self, begin: int, end: int) -> None:
        self.inner.release(0, self.inner.num_rows)


def open_tensors(places: Mapping[str, Place]) -> dict[str, StoredTensor]:
    """The tensors at ``places``, mapped. Those of three dimensions, experts, become one for each: ``name.{expert}``."""
    maps: dict[Path, Tensor] = {}
    out: dict[str, StoredTensor] = {}
    for name, place in places.items():
        if place.file not in maps:
            maps[place.file] = map_file(place.file)
        raw = maps[place.file][place.begin : place.end]
        if len(place.shape) < 3:
            out[name] = _open(raw, place.encoding, place.shape)
            continue
        stem, _, kind = name.rpartition(".")
        for expert, own in enumerate(raw.view(place.shape[0], -1)):
            out[f"{stem}.{expert}.{kind}"] = _open(own, place.encoding, place.shape[1:])
    return out


def _open(raw: Tensor, encoding: Encoding, shape: tuple[int, ...]) -> StoredTensor:
    if encoding.name in _PLAIN:
        return StoredTensor.of_bytes(raw, _PLAIN[encoding.name], shape)
    tensor = GgufTensor(raw.view(shape[0] if len(shape) > 1 else 1, -1), encoding, shape[-1])
    return tensor if len(shape) > 1 else StoredTensor(tensor.rows(0, 1)[0])


def _numbers(raw: Tensor) -> Tensor:
    """Bytes of float16 [n, 2 k] -> float32 [n, k]."""
    return raw.contiguous().view(torch.float16).float()


def _halves(raw: Tensor) -> Tensor:
    """The low and then the high four bits of bytes [n, k], [n, 2 k]."""
    return torch.cat((raw & 15, raw >> 4), dim=-1)


def _pairs(raw: Tensor) -> Tensor:
    """The four pairs of bits of bytes [n, 2, 32], lowest first, of one half after the other: [n, 8, 32]."""
    return (raw[:, :, None] >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3).view(-1, 8, 32)


def _bits(raw: Tensor, count: int) -> Tensor:
    """The ``count`` lowest bits of bytes [n, k], one after the other: [n, count, k]."""
    return raw[:, None] >> torch.arange(count, dtype=torch.uint8)[:, None] & 1


def _q4_0(raw: Tensor) -> Groups:
    step = _numbers(raw[:, :2])
    return Groups((_halves(raw[:, 2:]).view(torch.int8) - 8)[:, None], step, torch.zeros_like(step))


def _q4_1(raw: Tensor) -> Groups:
    return Groups(_halves(raw[:, 4:]).view(torch.int8)[:, None], _numbers(raw[:, :2]), _numbers(raw[:, 2:4]))


def _fives(low: Tensor, fifth: Tensor) -> Tensor:
    """Codes of five bits, int8 [n, 1, 32]: four of each in ``low`` [n, 16], one in the bits of ``fifth`` [n, 4]."""
    bits = (fifth[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)
    return (_halves(low) | bits << 4).view(torch.int8)[:, None]


def _q5_0(raw: Tensor) -> Groups:
    step = _numbers(raw[:, :2])
    return Groups(_fives(raw[:, 6:], raw[:, 2:6]) - 16, step, torch.zeros_like(step))


def _q5_1(raw: Tensor) -> Groups:
    return Groups(_fives(raw[:, 8:], raw[:, 4:8]), _numbers(raw[:, :2]), _numbers(raw[:, 2:4]))


def _q8_0(raw: Tensor) -> Groups:
    step = _numbers(raw[:, :2])
    return Groups(raw[:, None, 2:].view(torch.int8), step, torch.zeros_like(step))


def _steps_and_bases(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Of the eight groups of a block of Q4_K and Q5_K: 6 bits of each, as parts of two float16."""
    first, second, rest = raw[:, 4:16].view(-1, 3, 4).unbind(1)
    steps = torch.cat((first & 63, rest & 15 | (first >> 6) << 4), dim=1)
    bases = torch.cat((second & 63, rest >> 4 | (second >> 6) << 4), dim=1)
    return _numbers(raw[:, :2]) * steps, -_numbers(raw[:, 2:4]) * bases


def _q4_k(raw: Tensor) -> Groups:
    codes = _halves(raw[:, 16:].view(-1, 4, 32)).view(-1, 8, 32)
    return Groups(codes.view(torch.int8), *_steps_and_bases(raw))


def _q5_k(raw: Tensor) -> Groups:
    codes = _halves(raw[:, 48:].view(-1, 4, 32)).view(-1, 8, 32) | _bits(raw[:, 16:48], 8) << 4
    return Groups(codes.view(torch.int8), *_steps_and_bases(raw))


def _q6_k(raw: Tensor) -> Groups:
    low = _halves(raw[:, :128].view(-1, 2, 64)).view(-1, 8, 32)
    step = _numbers(raw[:, 208:]) * raw[:, 192:208].view(torch.int8)
    codes = (low | _pairs(raw[:, 128:192].view(-1, 2, 32)) << 4).view(torch.int8) - 32
    return Groups(codes.view(-1, 16, 16), step, torch.zeros_like(step))


def _q2_k(raw: Tensor) -> Groups:
    step, base = _numbers(raw[:, 80:82]) * (raw[:, :16] & 15), -_numbers(raw[:, 82:]) * (raw[:, :16] >> 4)
    return Groups(_pairs(raw[:, 16:80].view(-1, 2, 32)).view(torch.int8).view(-1, 16, 16), step, base)


def _q3_k(raw: Tensor) -> Groups:
    codes = (_pairs(raw[:, 32:96].view(-1, 2, 32)) | _bits(raw[:, :32], 8) << 2).view(torch.int8) - 4
    high = (raw[:, None, 104:108] >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3).flatten(1)
    step = _numbers(raw[:, 108:]) * ((_halves(raw[:, 96:104]) | high << 4).view(torch.int8) - 32)
    return Groups(codes.view(-1, 16, 16), step, torch.zeros_like(step))


def _looked_up(table: Tensor, raw: Tensor) -> Tensor:
    """What ``table`` has for each four bits of bytes [..., k], in the order of ``_halves``: [..., 2 k]."""
    codes = _halves(raw)
    return table.index_select(0, codes.flatten().int()).view(codes.shape)  # indexing takes four times as long


def _iq4_nl(raw: Tensor) -> Groups:
    step = _numbers(raw[:, :2])
    return Groups(_looked_up(_UNEVEN, raw[:, 2:])[:, None], step, torch.zeros_like(step))


def _iq4_xs(raw: Tensor) -> Groups:
    low = torch.stack((raw[:, 4:8] & 15, raw[:, 4:8] >> 4), dim=-1).flatten(1)
    high = (raw[:, 2:4, None] >> torch.arange(0, 8, 2, dtype=torch.uint8) & 3).flatten(1)
    step = _numbers(raw[:, :2]) * ((low | high << 4).view(torch.int8) - 32)
    return Groups(_looked_up(_UNEVEN, raw[:, 8:].view(-1, 8, 16)), step, torch.zeros_like(step))


def _mxfp4(raw: Tensor) -> Groups:
    step = torch.exp2(raw[:, :1].double() - 128).float()  # half of the exponent's power: the codes are twice too large
    return Groups(_looked_up(_E2M1, raw[:, 1:])[:, None], step, torch.zeros_like(step))


_DECODE: dict[str, Callable[[Tensor], Groups]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k,
    "Q6_K": _q6_k, "Q2_K": _q2_k, "Q3_K": _q3_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
}  # fmt: skip
