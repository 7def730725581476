"""What is quantized how: by rule, as data, and its spelling in ``config.json``.

The rule. Linear layers of the blocks take the mode's scheme. The head, where errors cost most, takes int8 in the modes
int8 and int4, and fp8 in fp8. The embedding table stays as it is (a token reads one row of it), and so do a head that
is tied to it, routers of experts, norms and biases. In int4 two kinds of layers take int8: those whose inputs do not
fill whole groups, and keys and values that several query heads share, where the family stores them apart. Keys and
values are 2 % of a 1.1-billion model; of what small models lose in int4 they were one to two thirds.

The format. A linear layer ``X`` of N outputs and K inputs is stored as plain tensors:

======  =====================  =========================  ============  ================
scheme  ``X.weight``           ``X.scale``                ``X.zero``    ``X.row_scale``
======  =====================  =========================  ============  ================
int8    int8 [N, K]            float32 [N]                --            --
fp8     float8_e4m3fn [N, K]   float32 [N]                --            --
int4    uint8 [N, P / 2]       uint8 [N, P / group_size]  as ``scale``  float32 [N]
======  =====================  =========================  ============  ================

int8 and fp8: ``value = weight * scale``. int4: ``value = (q - zero / 8) * scale * row_scale`` with q in 0..15: 4.5 bits
a weight in groups of 32. P is K rounded up to a multiple of the group size, and what stands in the padding means
nothing. Byte j (0..15) of each 16 bytes, which are 32 values, is ``q[j] | q[j + 16] << 4``: two halves of a vector
register come out of one mask and one shift.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from gpt_fast.config import MODES, ModelConfig
from gpt_fast.errors import CheckpointError, ConfigError
from gpt_fast.kernels.cpu.packing import GROUP_SIZES
from gpt_fast.model.describing import describe

_MODULE = re.compile(r"(layers\.\d+|head)\.\w+", re.ASCII)  # names of linear layers in a Transformer
METHOD = "gpt_fast"  # quant_method of the checkpoints written here

Kind = Literal["int8", "int4", "fp8"]


@dataclass(frozen=True)
class Scheme:
    """How one linear layer is stored."""

    kind: Kind
    group_size: int = 0  # int4: values that share a scale and a zero

    def __str__(self) -> str:
        """As ``config.json`` spells it."""
        return f"{self.kind}-g{self.group_size}" if self.kind == "int4" else self.kind

    def padded(self, in_features: int) -> int:
        """``in_features`` with the padding of the last group."""
        return -(-in_features // self.group_size) * self.group_size if self.kind == "int4" else in_features

    def tensors(self, out_features: int, in_features: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Name, dtype and shape of what is stored; the first dimension of each is the outputs'."""
        n, p, per_row = out_features, self.padded(in_features), (torch.float32, (out_features,))
        if self.kind == "int4":
            per_group = (torch.uint8, (n, p // self.group_size))
            return {"weight": (torch.uint8, (n, p // 2)), "scale": per_group, "zero": per_group, "row_scale": per_row}
        return {"weight": (torch.int8 if self.kind == "int8" else torch.float8_e4m3fn, (n, p)), "scale": per_row}


class Split(NamedTuple):
    """How ``wqkv`` is stored whose queries differ from its keys and values."""

    queries: Scheme
    keys_values: Scheme
    num_queries: int  # outputs that are queries: the first ones

    def __str__(self) -> str:
        """As ``config.json`` spells it."""
        return f"{self.queries}, {self.keys_values}"


@dataclass(frozen=True)
class QuantConfig:
    """The schemes of the kinds of linear layers; None leaves them as they are.

    ``exceptions``: of shared keys and values, and of layers that do not fill whole groups; None: as ``blocks``.
    ``named``: schemes of modules of a Transformer by name, in the place of the rule: a file of others decided them.
    """

    blocks: Scheme | None
    head: Scheme | None
    exceptions: Scheme | None = None
    named: Mapping[str, Scheme | Split] = field(default_factory=dict)

    def scheme(self, module: str, config: ModelConfig) -> Scheme | Split | None:
        """For the module ``module`` of a Transformer of ``config``, named as there; None: it stays as it is."""
        if self.named:
            found = self.named.get(module)
            return found._replace(num_queries=config.q_dim) if isinstance(found, Split) else found
        matrix = describe(config).matrix(module)
        if matrix is None or matrix.tied or matrix.split == "whole":
            return None  # also a router: few weights, and every one of them decides
        if matrix.name == "output":
            return self.head
        if self.blocks is None or self.exceptions is None:
            return self.blocks
        if self.blocks.padded(matrix.inputs) != matrix.inputs:
            return self.exceptions
        if matrix.name == "wqkv" and config.kv_dim < config.q_dim and len(matrix.rows) > 1:
            return Split(self.blocks, self.exceptions, config.q_dim)
        return self.blocks

    def to_json(self) -> dict[str, Any]:
        """``quantization_config`` of a checkpoint's ``config.json``."""
        schemes = [("layers", self.blocks), ("exceptions", self.exceptions), ("output", self.head), *self.named.items()]
        used = [s.queries if isinstance(s, Split) else s for _, s in schemes if s is not None]
        main = next((scheme for scheme in used if scheme.kind == "int4"), used[0])
        return {
            "quant_method": METHOD,
            "bits": 4 if main.kind == "int4" else 8,
            "group_size": main.group_size or -1,  # -1: one scale a row, as other formats spell it
            "symmetric": main.kind != "int4",
            "modules": {name: str(scheme) for name, scheme in schemes if scheme},
        }


def smaller_modes(quant: QuantConfig | None) -> tuple[str, ...]:
    """The modes that take less memory than ``quant``; None: weights that are not quantized."""
    if quant is None:
        return "int8", "int4"
    return ("int4",) if quant.blocks is not None and quant.blocks.kind != "int4" else ()


def quant_config(mode: str, group_size: int = 32, quantize_head: bool = True) -> QuantConfig:
    """The rule of this module for ``mode``. Raises ConfigError for one that is not known."""
    if mode not in MODES:
        raise ConfigError(f"quantize: {mode!r} is not one of {', '.join(MODES)}")
    if group_size not in GROUP_SIZES:
        raise ConfigError(f"group_size: {group_size} is not one of {', '.join(map(str, GROUP_SIZES))}")
    rest = Scheme("fp8" if mode == "fp8" else "int8")
    head = rest if quantize_head else None
    return QuantConfig(Scheme("int4", group_size), head, rest) if mode == "int4" else QuantConfig(rest, head)


def parse_quant_config(raw: Mapping[str, Any], where: str) -> QuantConfig:
    """The inverse of ``QuantConfig.to_json``. Raises CheckpointError naming the key."""
    key, modules = f"{where}: quantization_config.modules", raw.get("modules")
    rule = isinstance(modules, dict) and modules.keys() <= {"layers", "exceptions", "output"}
    if not isinstance(modules, dict) or not modules or not (rule or all(map(_MODULE.fullmatch, modules))):
        raise CheckpointError(f"{key} must give schemes for layers, exceptions and output, not {modules!r}")
    known = {str(s): s for s in (Scheme("int8"), Scheme("fp8"), *(Scheme("int4", size) for size in GROUP_SIZES))}
    schemes: dict[str, Scheme] = {}
    named: dict[str, Scheme | Split] = {}
    for name, spelling in modules.items():
        words = str(spelling).split(", ")
        if not known.keys() >= set(words) or len(words) > 1 + name.endswith(".wqkv"):
            raise CheckpointError(f"{key}: {spelling!r} is not one of {', '.join(sorted(known))}")
        schemes[name] = known[words[0]]
        named[name] = Split(known[words[0]], known[words[1]], 0) if len(words) > 1 else schemes[name]
    if not rule:
        return QuantConfig(None, None, named=named)
    return QuantConfig(schemes.get("layers"), schemes.get("output"), schemes.get("exceptions"))
