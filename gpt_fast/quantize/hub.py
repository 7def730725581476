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

GPTQ's first format stores ``zero - 1``. With ``desc_act`` the inputs of a group are scattered: columns are then sorted
by group, and the layer gathers its inputs in that order (``Int4Linear.order``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast.checkpoint.families import FAMILIES, Part, parts, read_config, read_json
from gpt_fast.checkpoint.loading import build, check_weights, open_weights, progress_bar, resolve_tying
from gpt_fast.checkpoint.stored import StoredTensor
from gpt_fast.config import ModelConfig
from gpt_fast.errors import CheckpointError
from gpt_fast.kernels.cpu.packing import nibbles
from gpt_fast.model.transformer import Transformer
from gpt_fast.quantize.apply import Choose, swap_layers
from gpt_fast.quantize.linear import Int4Linear
from gpt_fast.quantize.rtn import LARGEST, ZERO_STEPS
from gpt_fast.quantize.scheme import GROUP_SIZES, Scheme

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where outputs 0 .. 7 stand in an int32, in fours of bits from the lowest
_NAMES = {"gptq": ("qweight", "qzeros", "scales", "g_idx"), "awq": ("qweight", "qzeros", "scales")}


class Format(NamedTuple):
    """What ``quantization_config`` says."""

    method: str  # gptq | awq
    group_size: int  # -1: one group
    zero_offset: int  # to add to stored zeros


def parse_format(raw: Mapping[str, Any], where: str) -> Format:
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
        return Format("awq", group_size, 0)
    layout = raw.get("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise CheckpointError(f"{where}: quantization_config.checkpoint_format {layout!r} is not supported")
    return Format("gptq", group_size, 1 if layout == "gptq" else 0)


def load_hub(
    directory: str | Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: bool = False,
    *,
    column_major: bool = False,
) -> Transformer:
    """The model of a GPTQ or AWQ checkpoint. Raises CheckpointError naming files, keys and tensors."""
    found = open_hub(directory)
    model = build(found.config, dtype, device, column_major, lambda m: swap_layers(m, found.choose, device))
    parameters = dict(model.named_parameters())
    with progress_bar(len(found.wanted), progress, "loading tensors") as report, torch.no_grad():
        for part in found.wanted:
            if part.source in found.packed:
                layer = model.get_submodule(part.target.removesuffix(".weight"))
                assert isinstance(layer, Int4Linear)
                _store(layer, part, _read(found.weights, part, found.format), str(directory))
            else:
                target = parameters[part.target][part.start : part.start + part.shape[0]]
                found.weights[part.source].copy_to(target)
            if report:
                report(1)
    return model


class HubCheckpoint(NamedTuple):
    """A GPTQ or AWQ checkpoint, mapped and checked."""

    config: ModelConfig
    weights: Mapping[str, StoredTensor]
    format: Format
    wanted: list[Part]
    packed: set[str]  # sources of ``wanted`` that are stored in 4 bits
    choose: Choose


def open_hub(directory: str | Path) -> HubCheckpoint:
    """Raises CheckpointError, naming keys and tensors, before anything is built by what ``config.json`` says."""
    directory = Path(directory)
    where = str(directory / "config.json")
    config = read_config(directory)
    found = parse_format(read_json(directory / "config.json")["quantization_config"], where)
    weights = open_weights(directory)
    if FAMILIES[config.family].names["output"] + ".qweight" not in weights:
        config, weights = resolve_tying(config, weights)
    wanted = parts(config)
    packed = {part.source for part in wanted if _prefix(part) + "qweight" in weights}
    _check(wanted, packed, weights, found, str(directory))
    scheme = Scheme("int4", found.group_size if found.group_size > 0 else max(GROUP_SIZES))

    def choose(module: str) -> Scheme | None:
        states = {part.source in packed for part in wanted if part.target == module + ".weight"}
        if len(states) == 2:
            raise CheckpointError(f"{directory}: only a part of {module} is quantized, which is one matrix here")
        return scheme if True in states else None

    return HubCheckpoint(config, weights, found, wanted, packed, choose)


class _Layer(NamedTuple):
    """One linear layer as stored, unpacked."""

    codes: Tensor  # uint8 [N, K]
    zeros: Tensor  # int32 [groups, N]
    scales: Tensor  # [groups, N]
    group_of: Tensor  # int64 [K]


def _read(weights: Mapping[str, StoredTensor], part: Part, found: Format) -> _Layer:
    k = part.shape[1]
    qweight, qzeros, scales = (_whole(weights[_prefix(part) + name]) for name in _NAMES["awq"])
    size = found.group_size if found.group_size > 0 else k
    if found.method == "awq":
        codes, zeros = _unpack(qweight, _AWQ_ORDER).t(), _unpack(qzeros, _AWQ_ORDER)
        return _Layer(codes, zeros, scales, torch.arange(k) // size)
    codes = _unpack(qweight.t().contiguous(), range(8))
    g_idx = weights.get(_prefix(part) + "g_idx")
    group_of = torch.arange(k) // size if g_idx is None else _whole(g_idx).long()
    return _Layer(codes, _unpack(qzeros, range(8)) + found.zero_offset, scales, group_of)


def _unpack(packed: Tensor, order: Sequence[int]) -> Tensor:
    """int32 [R, C] -> int32 [R, 8 C]: value j of each stands at four-bit position ``order[j]``."""
    shifts = torch.tensor([4 * position for position in order], dtype=torch.int32)
    return ((packed[:, :, None] >> shifts) & 15).flatten(1)


def _store(layer: Int4Linear, part: Part, found: _Layer, where: str) -> None:
    """Write one stored layer as rows of ``layer``."""
    n, k = part.shape
    size = layer.scheme.group_size
    order = found.group_of.argsort(stable=True)
    groups = found.group_of[order]
    # A single group over all inputs is repeated; the inputs of every other must fill one of ours.
    if found.scales.shape[0] > 1 and not torch.equal(groups, torch.arange(k) // size):
        raise CheckpointError(f"{where}: {_prefix(part)}g_idx has groups of other sizes than {size}")
    codes = F.pad(found.codes[:, order].to(torch.uint8), (0, -k % size))
    first = groups[torch.arange(0, k, size)]
    scale, zero = found.scales[first].t().float(), found.zeros[first].t()
    if scale.amin() < 0:
        raise CheckpointError(f"{where}: {_prefix(part)}scales has negative values")
    row_scale = (scale.amax(1) / LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
    rows = slice(part.start, part.start + n)
    layer.weight[rows].copy_(nibbles(codes.contiguous()))
    layer.scale[rows].copy_((scale / row_scale[:, None]).round_())
    layer.zero[rows].copy_(ZERO_STEPS * zero)
    layer.row_scale[rows].copy_(row_scale)
    new = None if torch.equal(order, torch.arange(k)) else order.to(layer.weight.device)
    if part.start and not (new is layer.order or (new is not None and _same(layer.order, new))):
        raise CheckpointError(f"{where}: {_prefix(part)}g_idx differs from that of the layers it is fused with")
    layer.order = new


def _same(a: Tensor | None, b: Tensor) -> bool:
    return a is not None and torch.equal(a, b)


def _whole(tensor: StoredTensor) -> Tensor:
    return tensor.rows(0, tensor.num_rows)


def _prefix(part: Part) -> str:
    return part.source.removesuffix("weight")


def _check(wanted: list[Part], packed: set[str], weights: dict[str, StoredTensor], found: Format, where: str) -> None:
    """As check_weights for plain tensors, and every quantized layer must have its tensors in their shapes."""
    known = set()
    for part in wanted:
        if part.source not in packed:
            continue
        n, k = part.shape
        groups = -(-k // found.group_size) if found.group_size > 0 else 1
        shapes = {
            "qweight": (k // 8, n) if found.method == "gptq" else (k, n // 8),
            "qzeros": (groups, n // 8),
            "scales": (groups, n),
        }
        for name, shape in shapes.items():
            tensor = weights.get(_prefix(part) + name)
            if tensor is None or tensor.shape != shape or (name != "scales" and tensor.dtype != torch.int32):
                stored = "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
                raise CheckpointError(f"{where}: {_prefix(part)}{name} is {stored}, not {list(shape)}")
        known |= {_prefix(part) + name for name in _NAMES[found.method]}
        bias = _prefix(part) + "bias"
        if bias in weights and bias not in {p.source for p in wanted} and not _whole(weights[bias]).any():
            known.add(bias)  # AutoGPTQ writes biases of zeros for layers that have none
    check_weights(
        [part for part in wanted if part.source not in packed],
        {name: tensor for name, tensor in weights.items() if name not in known},
        where,
    )
