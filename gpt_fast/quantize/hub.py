"""Checkpoints that others quantized to 4 bits: GPTQ (AutoGPTQ, GPTQModel) and AWQ (AutoAWQ, layout GEMM).

Both store a linear layer of K inputs and N outputs as ``value = (q - zero) * scale`` with eight codes in an int32.
Codes and zeros stay as they are. A scale becomes the nearest of 255 parts of the largest in its row: what that moves a
weight by is a small part of what it was rounded by.

=======  =============================================  ===================================================
GPTQ     qweight int32 [K / 8, N]: inputs 8i .. 8i + 7   qzeros int32 [groups, N / 8], scales [groups, N],
                                                        g_idx [K]: the group of each input
AWQ      qweight int32 [K, N / 8]: outputs 8i .. 8i + 7  qzeros int32 [groups, N / 8], scales [groups, N]
         in the order 0 2 4 6 1 3 5 7                   in the same order
=======  =============================================  ===================================================

GPTQ's first format stores ``zero - 1``, taken from the eight of an int32 as from one number: a zero of 0 borrows from
the next one. With ``desc_act`` the inputs of a group are scattered: columns are then sorted by group, and the layer
gathers its inputs in that order (``QuantizedLinear.order``). Ranks cannot divide such inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast.checkpoint.shard import Cut
from gpt_fast.checkpoint.stored import Report, StoredTensor
from gpt_fast.config import ModelConfig
from gpt_fast.errors import CheckpointError, ConfigError
from gpt_fast.kernels.cpu.packing import GROUP_SIZES, nibbles
from gpt_fast.model.description import Part
from gpt_fast.quantize.formats import Format, Specs, Tensors, beside
from gpt_fast.quantize.linear import QuantizedLinear
from gpt_fast.quantize.rtn import LARGEST, ZERO_STEPS
from gpt_fast.quantize.scheme import Scheme

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where outputs 0 .. 7 stand in an int32, in fours of bits from the lowest


class Header(NamedTuple):
    """What ``quantization_config`` says."""

    method: str  # gptq | awq
    group_size: int  # -1: one group
    zero_offset: int  # to add to eight stored zeros, an int32

    def inputs_of_group(self, num_inputs: int) -> int:
        return self.group_size if self.group_size > 0 else num_inputs


def parse_header(raw: Mapping[str, Any], where: str) -> Header:
    """Raises CheckpointError naming the key for what is not supported."""
    method = raw.get("quant_method")
    bits, group_size = raw.get("bits", raw.get("w_bit")), raw.get("group_size", raw.get("q_group_size"))
    if bits != 4:
        raise CheckpointError(f"{where}: quantization_config.bits {bits!r} is not supported for {method}, only 4")
    if group_size not in (*GROUP_SIZES, -1):
        known = ", ".join(map(str, GROUP_SIZES))
        raise CheckpointError(f"{where}: quantization_config.group_size {group_size!r} is not one of {known}, -1")
    if method == "awq":
        version = str(raw.get("version", "gemm")).lower()
        if version != "gemm" or raw.get("zero_point", True) is not True:
            raise CheckpointError(
                f"{where}: AWQ in version {version!r} with zero_point {raw.get('zero_point')!r} is not supported, only "
                "'gemm' with zero points"
            )
        return Header("awq", group_size, 0)
    layout = raw.get("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise CheckpointError(f"{where}: quantization_config.checkpoint_format {layout!r} is not supported")
    return Header("gptq", group_size, 0x11111111 if layout == "gptq" else 0)


class HubFormat(Format):
    """The tensors of a GPTQ or AWQ checkpoint, each layer's as its ``quantization_config`` says."""

    has_values = False

    def __init__(self, header: Header, wanted: Sequence[Part], tensors: Tensors, where: str) -> None:
        """``tensors``: all of the checkpoint's. Raises CheckpointError for a fused layer that is quantized in part."""
        super().__init__()
        self.method, self._header, self._tensors, self._where = header.method, header, tensors, where
        packed: dict[str, set[bool]] = {}  # by module
        for part in wanted:
            module, _, kind = part.target.rpartition(".")
            if kind == "weight":
                packed.setdefault(module, set()).add(beside(part, "qweight") in tensors)
        for module, found in packed.items():
            if len(found) > 1:
                raise CheckpointError(f"{where}: only a part of {module} is quantized, which is one matrix here")
        self._layers = {module for module, found in packed.items() if found == {True}}
        self._scheme = Scheme("int4", header.inputs_of_group(max(GROUP_SIZES)))

    def scheme(self, module: str, config: ModelConfig) -> Scheme | None:
        return self._scheme if module in self._layers else None

    def tensors(self, part: Part, scheme: Scheme | None) -> Specs:
        """Codes, zeros, scales and, where they are stored, the groups of the inputs."""
        if scheme is None:
            return super().tensors(part, None)
        n, k = part.shape
        groups, g_idx = -(-k // self._header.inputs_of_group(k)), self._tensors.get(beside(part, "g_idx"))
        out: Specs = {
            "qweight": (torch.int32, (k // 8, n) if self.method == "gptq" else (k, n // 8)),
            "qzeros": (torch.int32, (groups, n // 8)),
            "scales": (None, (groups, n)),
        }
        if self.method == "gptq" and g_idx is not None:
            out["g_idx"] = (g_idx.dtype, (k,))
        return {beside(part, name): spec for name, spec in out.items()}

    def fill(self, layer: QuantizedLinear, part: Part, tensors: Tensors, cut: Cut, report: Report) -> None:
        """Raises CheckpointError for scales, groups of inputs and orders of rows that ``layer`` cannot have,
        ConfigError for inputs that ranks cannot divide."""
        k, size, where = part.shape[1], layer.scheme.group_size, f"{self._where}: {beside(part, '')}"
        if part.layout.kind in ("heads", "pairs"):
            raise CheckpointError(
                f"{where}qweight: this family stores its rows in an order that is not read from {self.method} "
                "checkpoints; use the unquantized checkpoint and quantize"
            )
        codes, zeros, scales, group_of = self._unpacked(part, tensors, cut)
        groups = group_of.sort().values
        # A single group over all inputs is repeated; the inputs of every other must fill one of ours.
        order = column_order(group_of, size if scales.shape[0] > 1 else len(group_of), cut, f"{where}g_idx")
        codes = codes if order is None else codes[:, order]
        codes = F.pad(codes.to(torch.uint8), (0, -k % size)).contiguous()
        if scales.amin() < 0:
            raise CheckpointError(f"{where}scales has negative values")
        row_scale = (scales.amax(0).float() / LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)  # of whole rows
        first = groups[torch.arange(cut.column * k, cut.column * k + k, size)]
        scale, zero = (scales[first].t().float() / row_scale[:, None]).round_(), ZERO_STEPS * zeros[first].t()
        layer.store(part.start, {"weight": nibbles(codes), "scale": scale, "zero": zero, "row_scale": row_scale})
        store_order(layer, part, order, f"{where}g_idx")
        for name in self.tensors(part, layer.scheme):
            tensors[name].release(0, tensors[name].num_rows)
            if report:
                report(tensors[name].num_bytes // cut.num_columns)

    def _unpacked(self, part: Part, tensors: Tensors, cut: Cut) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Codes int32 [N, K] of the outputs and inputs that are ``part``; zeros int32 [groups, N] and scales
        [groups, N] of these outputs and of all inputs; the group of each input, int64 [all of them]."""
        qweight, qzeros, scales = (tensors[beside(part, name)] for name in ("qweight", "qzeros", "scales"))
        k = part.shape[1]
        group_of = torch.arange(k * cut.num_columns) // self._header.inputs_of_group(k * cut.num_columns)
        if self.method == "awq":
            codes = _outputs(qweight.part(cut.column * k, k), cut, _AWQ_ORDER).t()
            return codes, _outputs(qzeros, cut, _AWQ_ORDER), _outputs(scales, cut), group_of
        g_idx = tensors.get(beside(part, "g_idx"))
        group_of = group_of if g_idx is None else g_idx.whole().long()
        packed = _outputs(qweight.part(cut.column * k // 8, k // 8), cut)
        zeros = _outputs(qzeros, cut, range(8), self._header.zero_offset)
        return _unpack(packed.t().contiguous(), range(8)), zeros, _outputs(scales, cut), group_of


def column_order(group_of: Tensor, size: int, cut: Cut, where: str) -> Tensor | None:
    """How columns are sorted by ``group_of``, the group of each input, int64 [all inputs]; None: they are already.

    Raises CheckpointError, with ``where``, for groups not of ``size``, ConfigError for inputs that ranks divide.
    """
    every, order = torch.arange(len(group_of)), group_of.argsort(stable=True)
    if not torch.equal(group_of[order], every // size):
        raise CheckpointError(f"{where} has groups of other sizes than {size}")
    if torch.equal(order, every):
        return None
    if cut.num_columns > 1:
        raise ConfigError(f"shard: {where} scatters each group over the inputs of all ranks (desc_act)")
    return order


def store_order(layer: QuantizedLinear, part: Part, order: Tensor | None, where: str) -> None:
    """Let ``layer`` gather its inputs in ``order``, of ``part``. Raises CheckpointError if other parts have another."""
    before, new = layer.order, None if order is None else order.to(layer.weight.device)
    if part.start and not (new is before or (new is not None and before is not None and torch.equal(before, new))):
        raise CheckpointError(f"{where} differs from that of the layers it is fused with")
    layer.order = new


def without_empty_biases(wanted: Sequence[Part], tensors: Tensors) -> dict[str, StoredTensor]:
    """``tensors`` without the biases of zeros that AutoGPTQ writes for layers that have none."""
    known = {part.source for part in wanted}
    empty = {beside(part, "bias") for part in wanted if beside(part, "qweight") in tensors} - known
    return {name: t for name, t in tensors.items() if name not in empty or bool(t.whole().any())}


def _outputs(stored: StoredTensor, cut: Cut, order: Sequence[int] = (), add: int = 0) -> Tensor:
    """The columns of ``stored`` that are outputs of ``cut``; with an ``order`` eight of them stand in each number, to
    which ``add`` is added before."""
    each = len(order) or 1
    found = []
    for start, num in cut.rows or ((0, stored.shape[1] * each),):
        first, end = start // each, -(-(start + num) // each)
        read = stored.columns(first, end - first).whole()
        read = _unpack(read + add, order) if order else read
        found.append(read[:, start - first * each :][:, :num])
    return torch.cat(found, dim=1)


def _unpack(packed: Tensor, order: Sequence[int]) -> Tensor:
    """int32 [R, C] -> int32 [R, 8 C]: value j of each stands at four-bit position ``order[j]``."""
    shifts = torch.tensor([4 * position for position in order], dtype=torch.int32)
    return ((packed[:, :, None] >> shifts) & 15).flatten(1)
