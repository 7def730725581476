"""Kernels behind one table of ``torch.ops.gpt_fast.*``: C++ on CPUs that have a variant (cpu.py), else plain torch.

The operations are opaque to torch.compile and take weights in either form: packed, as :func:`prepare_dense`,
:func:`prepare_int8` and :func:`prepare_int4` make them where the C++ kernels run, or plain, which the reference
computes. So the form of the weights, not a flag, decides which path runs, and tests flip between them.

    linear_dense(x, w, out_features)                w float32 or bfloat16
    linear_int8(x, w, scale)                        x is quantized in blocks of 32 (reference.quantize_activations)
    linear_int4(x, w, scale, zero, row_scale)       packed weights hold scale and zero: None for both
    rms_norm(x, weight, eps), silu_mul(gate_up)

Beside the table, for callers that are operations themselves: ``paged_attention``, the attention seam's C++ for what
``takes_attention`` accepts (its plain twin is attention.paged_attention_eager), and ``Decoder``, whole steps of a model
in one call. Both need ``available()``.

Products return float32. On the C++ path each output is one chain of additions in a fixed order: a row's result does
not depend on the other rows of the call nor on the number of threads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gpt_fast.config import ModelConfig
from gpt_fast.kernels import reference
from gpt_fast.kernels.cpu import library as cpu
from gpt_fast.kernels.cpu import packing
from gpt_fast.kernels.cpu.decoder import Decoder, LinearWeights
from gpt_fast.kernels.cpu.library import available, paged_attention, takes_attention
from gpt_fast.kernels.layers import LayerWeights

__all__ = [
    "Decoder",
    "Int4Weights",
    "LayerWeights",
    "LinearWeights",
    "available",
    "linear_dense",
    "linear_int4",
    "linear_int8",
    "paged_attention",
    "prepare_dense",
    "prepare_int4",
    "prepare_int8",
    "rms_norm",
    "silu_mul",
    "takes_attention",
    "takes_shape",
]


def takes_shape(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether ``Decoder`` runs a model of this shape, its weights and cache in ``dtype``, on ``device``."""
    known = dtype in (torch.float32, torch.bfloat16)
    return device.type == "cpu" and known and config.head_dim % 8 == 0 and available()


class Int4Weights(NamedTuple):
    """4-bit weights: packed, with neither scale nor zero, or plain bytes [N, K / 2] with both (packing.py)."""

    data: Tensor
    scale: Tensor | None
    zero: Tensor | None
    row_scale: Tensor


def prepare_dense(w: Tensor) -> Tensor:
    """w [N, K] float32 or bfloat16, packed where the C++ kernels run, else as it is."""
    return packing.pack_dense(w) if available() else w


def prepare_int8(w: Tensor) -> Tensor:
    """w [N, K] int8, packed where the C++ kernels run, else as it is."""
    return packing.pack_int8(w) if available() else w


def prepare_int4(data: Tensor, scale: Tensor, zero: Tensor, row_scale: Tensor) -> Int4Weights:
    """Plain bytes [N, K / 2] with scale and zero [N, K / group_size], packed where the C++ kernels run."""
    if available():
        return Int4Weights(packing.pack_int4_plain(data, scale, zero), None, None, row_scale)
    return Int4Weights(data, scale, zero, row_scale)


def linear_dense(x: Tensor, w: Tensor, out_features: int) -> Tensor:
    """x [..., K], w plain [N, K] or packed -> [..., N] float32."""
    out: Tensor = torch.ops.gpt_fast.linear_dense(x, w, out_features)
    return out


def linear_int8(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """x [..., K], w plain [N, K] int8 or packed, scale [N] float32 -> [..., N] float32."""
    out: Tensor = torch.ops.gpt_fast.linear_int8(x, w, scale)
    return out


def linear_int4(x: Tensor, w: Int4Weights) -> Tensor:
    """x [..., K] -> [..., N] float32."""
    out: Tensor = torch.ops.gpt_fast.linear_int4(x, *w)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., E] float32, weight [E] float32 -> the same shape."""
    out: Tensor = torch.ops.gpt_fast.rms_norm(x, weight, eps)
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [..., 2 F] float32, gate and up side by side -> silu(gate) * up [..., F]."""
    out: Tensor = torch.ops.gpt_fast.silu_mul(gate_up)
    return out


def _linear_dense(x: Tensor, w: Tensor, out_features: int) -> Tensor:
    if w.dim() == 2:
        return reference.linear_dense(x, w)
    if not available():
        return reference.linear_dense(x, packing.unpack_dense(w, out_features))
    return cpu.linear(x, "bfloat16" if w.dtype == torch.bfloat16 else "float32", w, out_features)


def _linear_int8(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    if w.dim() == 2:
        return reference.linear_int8(x, w, scale)
    if not available():
        return reference.linear_int8(x, packing.unpack_int8(w, scale.shape[0], x.shape[-1]), scale)
    return cpu.linear(x, "int8", w, scale.shape[0], scale=scale)


def _linear_int4(x: Tensor, w: Tensor, scale: Tensor | None, zero: Tensor | None, row_scale: Tensor) -> Tensor:
    if scale is not None and zero is not None:
        return reference.linear_int4(x, w, scale, zero, row_scale)
    if not available():
        return reference.linear_int4(x, *packing.unpack_int4_plain(w, row_scale.shape[0]), row_scale)
    return cpu.linear(x, "int4", w, row_scale.shape[0], scale=row_scale, group_size=x.shape[-1] // w.shape[1])


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return cpu.rms_norm(x.contiguous(), weight, eps) if available() else reference.rms_norm(x, weight, eps)


def _silu_mul(gate_up: Tensor) -> Tensor:
    return cpu.silu_mul(gate_up.contiguous()) if available() else reference.silu_mul(gate_up)


_library = torch.library.Library("gpt_fast", "FRAGMENT")
for _schema, _run in (
    ("linear_dense(Tensor x, Tensor w, int out_features) -> Tensor", _linear_dense),
    ("linear_int8(Tensor x, Tensor w, Tensor scale) -> Tensor", _linear_int8),
    ("linear_int4(Tensor x, Tensor w, Tensor? scale, Tensor? zero, Tensor row_scale) -> Tensor", _linear_int4),
    ("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", _rms_norm),
    ("silu_mul(Tensor gate_up) -> Tensor", _silu_mul),
):
    _library.define(_schema)
    _library.impl(_schema.split("(")[0], _run, "CPU")


def _wide(x: Tensor, width: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], width, dtype=torch.float32)


@torch.library.register_fake("gpt_fast::linear_dense")
def _(x: Tensor, w: Tensor, out_features: int) -> Tensor:
    return _wide(x, out_features)


@torch.library.register_fake("gpt_fast::linear_int8")
def _(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return _wide(x, scale.shape[0])


@torch.library.register_fake("gpt_fast::linear_int4")
def _(x: Tensor, w: Tensor, scale: Tensor | None, zero: Tensor | None, row_scale: Tensor) -> Tensor:
    return _wide(x, row_scale.shape[0])


@torch.library.register_fake("gpt_fast::rms_norm")
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.register_fake("gpt_fast::silu_mul")
def _(gate_up: Tensor) -> Tensor:
    return _wide(gate_up, gate_up.shape[-1] // 2)
