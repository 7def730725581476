"""Weights of GGUF files in the formats of this project, decided tensor by tensor: files mix encodings.

====================  ====  ==========================================================================================
Q4_0, Q4_1, Q4_K      int4  codes as they are, in the same groups of 32; scales and zeros in a byte each, as for those
                            of gpt-fast (tinygemm.py)
Q5_0, Q5_1, Q5_K,     int8  rounded to nearest, with one scale for each row in the place of one for each group
Q6_K, Q8_0, Q2_K,
Q3_K, IQ4_NL,
IQ4_XS, MXFP4
F32, F16, BF16        --    as they are; so are tables, routers and a head that is also the table
====================  ====  ==========================================================================================

What is one matrix here (gate and up; keys and values, with queries where all have as many bits) takes the wider format
of its tensors.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gpt_fast.checkpoint.gguf_tensors import GgufTensor, TurnedTensor
from gpt_fast.checkpoint.stored import Report, StoredTensor
from gpt_fast.config import ModelConfig
from gpt_fast.model.describing import describe, parts
from gpt_fast.quantize.formats import RoundedFormat, Tensors
from gpt_fast.quantize.scheme import QuantConfig, Scheme, Split
from gpt_fast.quantize.tinygemm import MIDDLE, regrid

_INT4, _INT8 = Scheme("int4", 32), Scheme("int8")
_FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K")
_CHUNK = 1 << 20  # weights converted at a time


class GgufFormat(RoundedFormat):
    """``tensors`` of a GGUF file with a model of ``config``, each linear layer in the format nearest to its own."""

    def __init__(self, config: ModelConfig, tensors: Tensors) -> None:
        named = _schemes(config, tensors)
        super().__init__(QuantConfig(None, None, named=named) if named else None)
        if named:
            self.method, self.dtype = "GGUF", torch.bfloat16

    def pieces(
        self, stored: StoredTensor, scheme: Scheme, device: torch.device | str, report: Report = None
    ) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """``stored`` as the tensors of ``scheme``: codes of four bits as they are, all else rounded to nearest."""
        if scheme != _INT4 or not isinstance(stored, GgufTensor) or stored.encoding.name not in _FOUR_BITS:
            yield from super().pieces(stored, scheme, device, report)
            return
        step = max(1, _CHUNK // stored.shape[1])
        for begin in range(0, stored.num_rows, step):
            end = min(begin + step, stored.num_rows)
            yield begin, regrid(*_codes_and_grid(stored, begin, end), scheme)
            stored.release(begin, end)
            if report:
                report((end - begin) * stored.row_bytes)


def _schemes(config: ModelConfig, tensors: Tensors) -> dict[str, Scheme | Split]:
    """The scheme of each linear layer all of whose tensors are quantized, by the module's name."""
    found: dict[str, list[Scheme | None]] = {}
    description = describe(config)
    for part in parts(config):
        module, _, kind = part.target.rpartition(".")
        matrix = description.matrix(module) if kind == "weight" else None
        if matrix is not None and matrix.split != "whole":  # which routers are
            found.setdefault(module, []).append(_scheme(tensors.get(part.source)))
    out: dict[str, Scheme | Split] = {}
    for module, schemes in found.items():
        each = [scheme for scheme in schemes if scheme is not None]
        if len(each) < len(schemes):
            continue
        queries, others = each[0], _wider(each[1:] or each)
        if module.endswith(".wqkv") and queries != others:
            out[module] = Split(queries, others, config.q_dim)
        else:
            out[module] = _wider(each)
    return out


def _scheme(tensor: StoredTensor | None) -> Scheme | None:
    tensor = tensor.inner if isinstance(tensor, TurnedTensor) else tensor
    if not isinstance(tensor, GgufTensor):
        return None
    return _INT4 if tensor.encoding.name in _FOUR_BITS else _INT8


def _wider(schemes: list[Scheme]) -> Scheme:
    return _INT4 if set(schemes) == {_INT4} else _INT8


def _codes_and_grid(stored: GgufTensor, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of rows [begin, end) the codes, uint8 [n, K] from 0 to 15, and the grid [n, groups, 2]: of each group what one
    code is worth, and the value of the middle code."""
    codes, step, middle = stored.groups(begin, end)
    if stored.encoding.name == "Q4_0":  # counts from -8
        codes = codes + MIDDLE
    else:
        middle = middle + MIDDLE * step
    falling = step < 0  # then the codes are counted from the other end
    if falling.any():
        codes = torch.where(falling[..., None], 15 - codes, codes)
        middle = torch.where(falling, middle - step, middle)
    return codes.view(torch.uint8).flatten(1), torch.stack((step.abs(), middle), dim=-1)
