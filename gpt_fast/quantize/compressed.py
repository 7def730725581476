"""Checkpoints in the format compressed-tensors, which llm-compressor writes (``quant_method: compressed-tensors``).

For a linear layer ``X`` of N outputs and K inputs, ``value = (q - zero) * scale``:

===============  =========================  ================================================================
pack-quantized   X.weight_packed            int32 [N, K * bits / 32]: ``q + 2^(bits - 1)`` of 4 or 8 bits, the first
                                            in the lowest bits
                 X.weight_zero_point        int32 [N / 8, groups]: zeros of 4 bits in the same way, of eight outputs
                 X.weight_shape             int64 [2]: N and K
                 X.weight_g_idx             int32 [K]: the group of each input
int-quantized    X.weight                   int8 [N, K]
float-quantized  X.weight                   float8_e4m3fn [N, K]
mxfp4-           X.weight_packed            uint8 [N, K / 2], and X.weight_scale uint8 [N, K / 32]: stacked.py
pack-quantized
others           X.weight_scale             [N, groups], [N, 1] or [1]; of 8-bit floats also one for each block
                 X.input_scale and others   of static activations: not needed
===============  =========================  ================================================================

Weights of 8 bits stay as they are, and so do codes of 4 bits; their scales and zeros become those of int4 here
(``tinygemm.regrid``). Floats of 8 and 4 bits, and int8 in groups, are read as plain weights. Activations are rounded as
for our own weights, or not at all, whatever the file says of them. A layer's tensors decide how it is read, not the
lists of targets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast.checkpoint.shard import Cut
from gpt_fast.checkpoint.stacked import Mxfp4Tensor
from gpt_fast.checkpoint.stored import Report, StoredTensor
from gpt_fast.config import ModelConfig
from gpt_fast.errors import CheckpointError
from gpt_fast.kernels.cpu.packing import GROUP_SIZES
from gpt_fast.model.description import Part
from gpt_fast.quantize.formats import Format, Specs, Tensors, beside, in_order
from gpt_fast.quantize.hub import column_order, store_order
from gpt_fast.quantize.linear import QuantizedLinear
from gpt_fast.quantize.scheme import Scheme
from gpt_fast.quantize.tinygemm import MIDDLE, regrid

METHOD = "compressed-tensors"
_MXFP4 = "mxfp4-pack-quantized"
_STATUS = ("compressed", "frozen")  # the latter in older files
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", _MXFP4, "naive-quantized", "mixed-precision")
_PACKED, _SHAPE, _SCALE = "weight_packed", "weight_shape", "weight_scale"
_ZERO, _GROUPS = "weight_zero_point", "weight_g_idx"
_OF_ACTIVATIONS = tuple(f"{what}_{kind}" for what in ("input", "output") for kind in ("scale", "zero_point"))
_CHUNK = 1 << 21  # weights converted at a time


class ScaledTensor(StoredTensor):
    """Numbers of 8 bits read as float32, each times its scale: one of ``scale`` for each ``block``, outputs and inputs.

    ``codes``: int8 or float8 [N, K], or int32 that hold four unsigned numbers each (``pack-quantized``). ``dtype``: the
    one of 16 bits that the model had before.
    """

    def __init__(self, codes: StoredTensor, shape: tuple[int, ...], scale: Tensor, block: tuple[int, int]) -> None:
        super().__init__(codes.data.view(torch.uint8)[:, : shape[1]], mapped=codes.mapped)
        self.dtype = scale.dtype if scale.dtype.itemsize == 2 else torch.bfloat16
        self._stored, self._scale, self._block = codes.dtype, scale.float(), block
        self.order, self._column = torch.arange(self.shape[0]), 0

    def columns(self, start: int, num_columns: int) -> StoredTensor:
        out = self._view(self.data.narrow(1, start, num_columns), self.order, (self.num_rows, num_columns))
        out._column += start
        return out

    def rows(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end), float32."""
        assert self.order is not None
        chosen, inputs = self.order[begin:end], self._column + torch.arange(self.shape[1])
        scale = self._scale[chosen // self._block[0]][:, inputs // self._block[1]]
        codes = self.data[chosen]
        codes = signed(codes) if self._stored == torch.int32 else codes.view(self._stored)
        return codes.float().mul_(scale)


def read_compressed(
    raw: Mapping[str, Any], where: str, wanted: Sequence[Part], tensors: Tensors
) -> tuple[dict[str, StoredTensor], Format]:
    """The tensors of a checkpoint whose ``quantization_config`` is ``raw``, some as plain weights and without those of
    activations; and how its layers are held. Raises CheckpointError naming what is not supported."""
    block = _check_header(raw, where)
    linears = [part for part in wanted if part.target.endswith(".weight") and len(part.shape) == 2]
    out = dict(tensors)
    for part in linears:
        for name in _OF_ACTIVATIONS:
            out.pop(beside(part, name), None)
        if (plain := _plain(part, tensors, block, where)) is not None:
            out[part.source] = plain
            for name in (_PACKED, _SCALE, _SHAPE):
                out.pop(beside(part, name), None)
    compressed = CompressedFormat(linears, out, where)
    return out, compressed if compressed.schemes else Format()


def _check_header(raw: Mapping[str, Any], where: str) -> tuple[int, int] | None:
    """Raise CheckpointError for what is not read. Returns the size of blocks that share a scale, if there are any."""
    where, block = f"{where}: quantization_config", None
    if (form := raw.get("format")) not in _FORMATS:
        raise CheckpointError(f"{where}.format {form!r} is not supported, only {', '.join(_FORMATS)}")
    if (status := raw.get("quantization_status", "compressed")) not in _STATUS:
        raise CheckpointError(f"{where}.quantization_status {status!r} is not supported, only {', '.join(_STATUS)}")
    for name in ("kv_cache_scheme", "transform_config", "sparsity_config"):
        value = raw.get(name)
        if value and not (isinstance(value, dict) and value.get("format") == "dense"):
            raise CheckpointError(f"{where}.{name} is not supported")
    groups = raw.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise CheckpointError(f"{where}.config_groups must give a scheme by name")
    for name, group in groups.items():
        weights = group["weights"] if isinstance(group.get("weights"), dict) else {}
        bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
        found = f"{where}.config_groups.{name}"
        if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)) and form != _MXFP4:
            known = "int 4, int 8, float 8 and MXFP4"
            raise CheckpointError(f"{found}.weights: {kind} of {bits} bits is not supported, only {known}")
        if strategy not in ("tensor", "channel", "group", "block") or (strategy == "block" and kind == "int"):
            raise CheckpointError(f"{found}.weights.strategy {strategy!r} is not supported for {kind} of {bits} bits")
        if strategy == "block":
            block = _block(weights.get("block_structure"), block, found)
    return block


def _block(given: object, before: tuple[int, int] | None, where: str) -> tuple[int, int]:
    """``block_structure`` as it is written, [128, 128] or once "128x128"; the same for all."""
    sizes = given.split("x") if isinstance(given, str) else given
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(str(n).isdecimal() and int(n) > 0 for n in sizes):
        raise CheckpointError(f"{where}.weights.block_structure {given!r} is not two sizes")
    found = (int(sizes[0]), int(sizes[1]))
    if before not in (None, found):
        raise CheckpointError(f"{where}.weights.block_structure {given!r} differs from that of another group")
    return found


def _plain(part: Part, tensors: Tensors, block: tuple[int, int] | None, where: str) -> StoredTensor | None:
    """The weight ``part`` where it is stored as floats of 8 or 4 bits, or as int8 in groups; None for others. Raises
    CheckpointError."""
    scale, packed, weight = (tensors.get(beside(part, name)) for name in (_SCALE, _PACKED, "weight"))
    if scale is None or len(part.stored_shape) != 2:
        return None
    (n, k), values, where = part.stored_shape, scale.whole(), f"{where}: {beside(part, _SCALE)}"
    if packed is not None and packed.dtype == scale.dtype == torch.uint8 and packed.shape == (n, k // 2):
        if k % 32 or values.shape != (n, k // 32):
            raise CheckpointError(f"{where} is {list(values.shape)} for MXFP4 weights {[n, k]}")
        return Mxfp4Tensor(packed.data, values, packed.mapped)
    codes = weight if packed is None else packed
    if codes is None or (codes.dtype, *codes.shape) not in (
        (torch.float8_e4m3fn, n, k), (torch.int8, n, k), (torch.int32, n, -(-k // 4))
    ):  # fmt: skip
        return None
    if codes.dtype != torch.float8_e4m3fn and (values.numel() in (1, n) or beside(part, _ZERO) in tensors):
        return None  # int8 as it is here
    if block is not None and values.shape == (-(-n // block[0]), -(-k // block[1])):
        return ScaledTensor(codes, (n, k), values, block)
    if values.numel() == 1:
        return ScaledTensor(codes, (n, k), values.view(1, 1), (n, k))
    if values.dim() != 2 or values.shape[0] != n or not values.shape[1] or k % values.shape[1]:
        raise CheckpointError(f"{where} is {list(values.shape)} for weights of 8 bits {[n, k]}")
    return ScaledTensor(codes, (n, k), values, (1, k // values.shape[1]))


class CompressedFormat(Format):
    """Layers of integers, each as its tensors say. ``schemes``: by the name of the module."""

    method, has_values = METHOD, False

    def __init__(self, linears: Sequence[Part], tensors: Tensors, where: str) -> None:
        """Raises CheckpointError for a layer that cannot be read, or that is fused of differently quantized ones."""
        super().__init__()
        self._tensors, self._where = tensors, where
        found: dict[str, set[Scheme | None]] = {}
        for part in linears:
            found.setdefault(part.target.removesuffix(".weight"), set()).add(self._scheme(part))
        for module, schemes in found.items():
            if len(schemes) > 1:
                kinds = ", ".join(sorted(str(scheme or "not quantized") for scheme in schemes))
                raise CheckpointError(f"{where}: parts of {module}, which is one matrix here, differ: {kinds}")
        self.schemes = {module: scheme for module, (scheme,) in found.items() if scheme is not None}

    def _scheme(self, part: Part) -> Scheme | None:
        """How the layer is held of which ``part`` is; None: not quantized. Raises CheckpointError."""
        weight, scale = (self._tensors.get(beside(part, name)) for name in ("weight", _SCALE))
        if beside(part, _PACKED) not in self._tensors and (weight is None or weight.dtype != torch.int8):
            return None
        where, k = f"{self._where}: {beside(part, '')}", part.shape[1]
        if part.layout.kind == "transposed":
            raise CheckpointError(f"{where}weight is stored transposed in this family, which is not read quantized")
        sizes = self._tensors.get(beside(part, _SHAPE))
        if sizes is not None and sizes.whole().tolist() != list(part.shape):
            raise CheckpointError(f"{where}{_SHAPE} is not that of the model, {list(part.shape)}")
        if scale is None:
            raise CheckpointError(f"{where}{_SCALE} is missing")
        groups = scale.shape[1] if len(scale.shape) == 2 else 1
        if self._bits(part) == 8:
            if beside(part, _ZERO) in self._tensors:
                raise CheckpointError(f"{where}{_ZERO}: int8 with zeros is not supported")
            return Scheme("int8")
        size = k // max(1, groups) if groups != 1 else max(GROUP_SIZES)
        if not groups or k % groups or size % min(GROUP_SIZES):
            least = min(GROUP_SIZES)
            raise CheckpointError(
                f"{where}{_SCALE} is {groups} groups of {k} inputs, not of a multiple of {least} each"
            )
        return Scheme("int4", max(own for own in GROUP_SIZES if size % own == 0))

    def _bits(self, part: Part) -> int:
        packed = self._tensors.get(beside(part, _PACKED))
        return 8 if packed is None or packed.shape == (part.shape[0], -(-part.shape[1] // 4)) else 4

    def scheme(self, module: str, config: ModelConfig) -> Scheme | None:
        return self.schemes.get(module)

    def tensors(self, part: Part, scheme: Scheme | None) -> Specs:
        """Weights and scales, and what else is stored of the layer and known here."""
        if scheme is None:
            return super().tensors(part, None)
        n, k = part.shape
        scale = self._tensors.get(beside(part, _SCALE))
        shape: tuple[int, ...] = (n, 1)
        if scale is not None and (scale.shape in ((), (1,)) or scale.shape[0] == n):
            shape = scale.shape  # the number of groups is one that fits: _scheme
        more: Specs = {
            _ZERO: (torch.int32, (-(-n // 8), shape[-1] if len(shape) == 2 else 1)),
            _GROUPS: (torch.int32, (k,)),
            _SHAPE: (torch.int64, (2,)),
        }
        if beside(part, _PACKED) in self._tensors:
            out: Specs = {_PACKED: (torch.int32, (n, -(-k * self._bits(part) // 32)))}
            out |= {name: spec for name, spec in more.items() if beside(part, name) in self._tensors}
        else:
            out = {"weight": (torch.int8, (n, k))}
        return {beside(part, name): spec for name, spec in (out | {_SCALE: (None, shape)}).items()}

    def fill(self, layer: QuantizedLinear, part: Part, tensors: Tensors, cut: Cut, report: Report) -> None:
        """Raises CheckpointError for groups of inputs that ``layer`` cannot have, ConfigError for those that ranks
        cannot divide."""
        # As RoundedFormat does: a rank that has columns reads whole rows, whose greatest scale decides.
        stored = tensors.get(beside(part, _PACKED)) or tensors[part.source]
        steps, middles = self._grid(part, tensors, stored.shape[0])
        order = self._order(layer, part, tensors, cut)
        weight, steps, middles = (cut.rows_of(in_order(t, part.layout)) for t in (stored, steps, middles))
        width = part.shape[1] * cut.num_columns
        for begin, rows in weight.pieces(report, max(1, _CHUNK // width)):
            step, middle = (grid.rows(begin, begin + len(rows)) for grid in (steps, middles))
            if layer.scheme.kind == "int8":
                codes = rows if rows.dtype == torch.int8 else signed(unpacked(rows, 8)[:, :width])
                found = {"weight": codes, "scale": step[:, 0]}
            else:
                codes = unpacked(rows, 4)[:, :width]
                codes = codes if order is None else codes[:, order]
                codes = F.pad(codes, (0, -width % layer.scheme.group_size)).contiguous()
                each = codes.shape[1] // layer.scheme.group_size // step.shape[1]  # of our groups in one of theirs
                grid = torch.stack((step, middle), dim=-1).repeat_interleave(each, dim=1)
                found = regrid(codes, grid, layer.scheme)
            layer.store(part.start + begin, {name: cut.columns_of(tensor) for name, tensor in found.items()})

    def _grid(self, part: Part, tensors: Tensors, n: int) -> tuple[StoredTensor, StoredTensor]:
        """Of every group of the ``n`` stored outputs, what one code is worth, and the value of the middle code: float32
        [n, groups]."""
        scale, zeros = tensors[beside(part, _SCALE)], tensors.get(beside(part, _ZERO))
        step = scale.whole().float()
        step = step.view(1, 1).expand(n, 1) if step.numel() == 1 else step
        zero = torch.full_like(step, MIDDLE)
        if zeros is not None:
            packed = zeros.whole().t()
            zero = unpacked(packed, 4)[:, :n].t().float()
        return StoredTensor(step.contiguous()), StoredTensor((MIDDLE - zero) * step)

    def _order(self, layer: QuantizedLinear, part: Part, tensors: Tensors, cut: Cut) -> Tensor | None:
        """How the columns are sorted where inputs of a group are scattered; ``layer`` is told."""
        group_of, scale = tensors.get(beside(part, _GROUPS)), tensors[beside(part, _SCALE)]
        where, order = f"{self._where}: {beside(part, _GROUPS)}", None
        if group_of is not None and int(group_of.rows(0, 1)[0]) >= 0:  # -1 in all where they are not used
            size = group_of.num_rows // scale.shape[-1]
            order = column_order(group_of.whole().long(), size, cut, where)
        store_order(layer, part, order, where)
        return order


def signed(codes: Tensor) -> Tensor:
    """uint8 -> int8: less 128."""
    return (codes ^ 128).view(torch.int8)


def unpacked(words: Tensor, bits: int) -> Tensor:
    """int32 [n, W] -> uint8 [n, W * 32 / bits], the lowest bits first."""
    data = words.flatten().view(torch.uint8).view(len(words), -1)
    return data if bits == 8 else torch.stack((data & 15, data >> 4), dim=-1).flatten(1)
