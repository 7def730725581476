"""Whole decoder steps in C++: the structs that ``cpu/decoder.h`` reads, and the class that fills them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt_fast.kernels.cache import check_cache
from gpt_fast.kernels.cpu.library import CACHE_FORMATS, FORMATS, library
from gpt_fast.kernels.layers import LayerWeights

_I, _P = ctypes.c_int64, ctypes.c_void_p


class _Linear(ctypes.Structure):
    _fields_ = [(name, _I) for name in ("format", "n", "k", "group_size", "out_stride")] + [
        (name, _P) for name in ("data", "scale", "bias")
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _Linear) for name in ("wqkv", "wkv", "wo", "w13", "w2")),
        *((name, _P) for name in ("attention_norm", "ffn_norm", "q_norm", "k_norm")),
        *((name, _P) for name in ("k_cache", "v_cache", "k_scale", "v_scale")),
        ("window", _I),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        ("layers", _P),
        *((name, _I) for name in ("num_layers", "dim", "ffn_dim", "heads", "kv_heads", "head_dim")),
        ("eps", ctypes.c_double),
        ("norm", _P),
        ("output", _Linear),
        ("embedding", _P),
        *((name, _I) for name in ("embedding_bfloat16", "embedding_packed", "cache_format", "page_size")),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        ("tokens", _P),
        ("num_tokens", _I),
        *((name, _P) for name in ("cos", "sin", "query_start", "context_len", "page_table", "write_slots")),
        *((name, _I) for name in ("slots", "pages_per_slot", "longest")),
        ("rows", _P),
        ("num_rows", _I),
        ("logits", _P),
    ]


class LinearWeights(NamedTuple):
    """One linear layer as the kernels hold it: ``kind`` is a key of FORMATS, ``data`` packed (packing.py)."""

    kind: str
    data: Tensor
    out_features: int
    in_features: int
    scale: Tensor | None = None  # int8, and int4's row_scale: [N] float32
    group_size: int = 0  # int4
    bias: Tensor | None = None  # [N]


class Decoder:
    """Runs whole steps of a Llama-like model in C++ (``cpu/decoder.h``): model.py's ``Transformer.step``.

    ``embedding``: the plain table [V, E] float32 or bfloat16, or packed dense weights that the head shares.
    ``cache``: per layer keys and values [num_pages, page_size, K, D] of one dtype, float32, bfloat16, or int8 with the
    scales of keys and values [num_pages, page_size, K] float32 as third and fourth; written in place.
    Weights may differ in format from layer to layer. Everything given is kept alive by this object.
    """

    def __init__(
        self,
        embedding: Tensor | LinearWeights,
        layers: Sequence[LayerWeights[LinearWeights]],
        norm: Tensor,
        output: LinearWeights,
        cache: Sequence[Sequence[Tensor | None]],
        *,
        num_heads: int,
        eps: float,
    ) -> None:
        self._library = library()
        for which, kind in enumerate((_Linear, _Layer, _Model, _Step)):
            assert self._library.gpt_fast_struct_bytes(which) == ctypes.sizeof(kind), f"{kind.__name__} differs"
        self._kept: list[Any] = []
        k_cache = check_cache(cache, len(layers))
        if k_cache.dtype not in CACHE_FORMATS:
            raise ValueError(f"the cache must be float32, bfloat16 or int8, not {k_cache.dtype}")
        if k_cache.shape[3] % 8:
            raise ValueError(f"head_dim ({k_cache.shape[3]}) is not a multiple of 8")
        table = embedding.data if isinstance(embedding, LinearWeights) else embedding
        if table.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"the embedding must be float32 or bfloat16, not {table.dtype}")
        blocks = (_Layer * len(layers))(*(self._layer(layer, *each) for layer, each in zip(layers, cache, strict=True)))
        self.vocab_size = output.out_features
        self._model = _Model(
            ctypes.addressof(blocks),
            len(layers),
            output.in_features,
            layers[0].w13.out_features // 2,
            num_heads,
            k_cache.shape[2],
            k_cache.shape[3],
            eps,
            self._float(norm),
            self._linear(output),
            self._pointer(table),
            table.dtype == torch.bfloat16,
            isinstance(embedding, LinearWeights),
            CACHE_FORMATS[k_cache.dtype],
            k_cache.shape[1],
        )
        self._kept += [blocks, cache]

    def step(
        self,
        tokens: Tensor,  # [N] int64
        cos: Tensor,  # [N, D / 2] float32
        sin: Tensor,
        query_start: Tensor,  # the fields of attention.StepLayout
        context_len: Tensor,
        page_table: Tensor,
        write_slots: Tensor,
        rows: Tensor,  # [R] int64
    ) -> Tensor:
        """Logits [R, V] float32 of the tokens in ``rows``; keys and values of all tokens go into the cache."""
        logits = torch.empty(rows.shape[0], self.vocab_size)
        given = (tokens, cos, sin, query_start, context_len, page_table, write_slots, rows)
        tokens, cos, sin, query_start, context_len, page_table, write_slots, rows = (t.contiguous() for t in given)
        step = _Step(
            tokens.data_ptr(),
            tokens.shape[0],
            *(t.data_ptr() for t in (cos, sin, query_start, context_len, page_table, write_slots)),
            *page_table.shape,
            0,
            rows.data_ptr(),
            rows.shape[0],
            logits.data_ptr(),
        )
        threads = torch.get_num_threads()
        self._library.gpt_fast_decoder_step(ctypes.addressof(self._model), ctypes.addressof(step), threads)
        return logits

    def _layer(
        self,
        layer: LayerWeights[LinearWeights],
        k: Tensor | None,
        v: Tensor | None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> _Layer:
        width = layer.wqkv.out_features + (layer.wkv.out_features if layer.wkv else 0)
        return _Layer(
            self._linear(layer.wqkv, width),
            self._linear(layer.wkv, width),
            *(self._linear(w) for w in (layer.wo, layer.w13, layer.w2)),
            *(self._float(t) for t in (layer.attention_norm, layer.ffn_norm, layer.q_norm, layer.k_norm)),
            *(None if t is None else t.data_ptr() for t in (k, v, k_scale, v_scale)),
            layer.window,
        )

    def _linear(self, w: LinearWeights | None, out_stride: int = 0) -> _Linear:
        if w is None:
            return _Linear()
        return _Linear(
            FORMATS[w.kind],
            w.out_features,
            w.in_features,
            w.group_size,
            out_stride or w.out_features,
            self._pointer(w.data),
            self._float(w.scale),
            self._float(w.bias),
        )

    def _float(self, t: Tensor | None) -> int | None:
        return None if t is None else self._pointer(t.detach().float())

    def _pointer(self, t: Tensor) -> int:
        t = t.contiguous()
        self._kept.append(t)
        return t.data_ptr()
