"""llama2.c's ``.bin`` files (https://github.com/karpathy/llama2.c, export.py): versions 0, 1 and 2.

Version 0 is seven integers and float32 tensors, told by its exact size; 1 and 2 begin with a magic number and pad
their header to 256 bytes. Version 2 holds its matrices as Q8_0: int8 in groups that share a float32 scale.

Tensors get the names of Meta's own Llama code, which llama2.c and gpt-fast share; convert.py makes a Hugging Face
checkpoint of them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt_fast.checkpoint.stored import StoredTensor, map_file
from gpt_fast.errors import CheckpointError

_MAGIC = 0x616B3432  # "ak42"
_SIZES = (28, 256, 256)  # bytes of the header, by version

# The tensors in the order of the file; those of layers are repeated for each layer, one kind after the other.
_ATTENTION = tuple(f"layers.{{}}.attention.{name}" for name in ("wq", "wk", "wv", "wo"))
_MLP = tuple(f"layers.{{}}.feed_forward.{name}" for name in ("w1", "w2", "w3"))
_NORMS = ("layers.{}.attention_norm", "layers.{}.ffn_norm")
_ORDER_0 = ("tok_embeddings", _NORMS[0], *_ATTENTION, _NORMS[1], *_MLP, "norm", "freqs_cos", "freqs_sin", "output")
_ORDER = (*_NORMS, "norm", "tok_embeddings", *_ATTENTION, *_MLP, "output")


class Header(NamedTuple):
    """The seven integers every version begins with, in their order, and what the version adds."""

    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    seq_len: int
    tied: bool
    version: int
    group_size: int  # of Q8_0; 0 in other versions


class Q80Tensor(StoredTensor):
    """``quants`` int8 [rows, columns], whose groups of ``group_size`` neighbours have a scale each; read as float32."""

    def __init__(self, quants: Tensor, scales: Tensor, group_size: int) -> None:
        super().__init__(quants, mapped=True)
        self.dtype, self.order = torch.float32, torch.arange(len(quants))
        self.scales, self.group_size = scales, group_size

    def rows(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end), float32."""
        assert self.order is not None
        rows, width = self.order[begin:end], self.shape[1]
        groups = (rows[:, None] * width + torch.arange(width)) // self.group_size  # one may span rows
        return self.data[rows].float() * self.scales[groups]


def read_header(path: Path) -> Header | None:
    """The header of a ``.bin`` file, or None when it is no such file. Raises CheckpointError for a newer version."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(256)
    if len(start) < _SIZES[0]:
        return None
    if len(start) < _SIZES[1] or struct.unpack_from("<I", start)[0] != _MAGIC:
        *sizes, vocab_size, seq_len = struct.unpack_from("<7i", start)
        # A negative vocabulary says that the head has its own weights.
        header = Header._make((*sizes, abs(vocab_size), seq_len, vocab_size > 0, 0, 0))
        sound = min(header[:7]) > 0 and header.n_heads <= header.dim
        return header if sound and _file_bytes(header) == size else None
    version, *sizes, tied, group_size = struct.unpack_from("<8iBi", start, 4)
    if version not in (1, 2):
        raise CheckpointError(f"{path}: llama2.c version {version} is not supported, only 0, 1 and 2")
    header = Header._make((*sizes, bool(tied), version, group_size if version == 2 else 0))
    if min(sizes) < 1 or (version == 2 and group_size < 1):
        raise CheckpointError(f"{path}: the header's sizes make no sense: {header}")
    if _file_bytes(header) != size:
        raise CheckpointError(f"{path} has {size} bytes; its header asks for {_file_bytes(header)}; it is cut short")
    return header


def _layout(h: Header) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
    """Name, with ``{}`` for the layer, shape, bytes and number of each kind of tensor, in the file's order."""
    head_dim = h.dim // h.n_heads
    kv_dim = h.n_kv_heads * head_dim
    # fmt: off
    shapes = {
        "tok_embeddings": (h.vocab_size, h.dim), "output": (h.vocab_size, h.dim),
        "wq": (h.dim, h.dim), "wk": (kv_dim, h.dim), "wv": (kv_dim, h.dim), "wo": (h.dim, h.dim),
        "w1": (h.hidden_dim, h.dim), "w2": (h.dim, h.hidden_dim), "w3": (h.hidden_dim, h.dim),
        "freqs_cos": (h.seq_len, head_dim // 2), "freqs_sin": (h.seq_len, head_dim // 2),
    }
    # fmt: on
    for name in _ORDER if h.version else _ORDER_0:
        shape = shapes.get(name.rpartition(".")[2], (h.dim,))
        numel = math.prod(shape)
        num_bytes = numel + numel // h.group_size * 4 if h.version == 2 and len(shape) > 1 else numel * 4
        if not (name == "output" and h.tied):
            yield name, shape, num_bytes, h.n_layers if name.startswith("layers.") else 1


def _file_bytes(h: Header) -> int:
    return _SIZES[h.version] + sum(num_bytes * number for _, _, num_bytes, number in _layout(h))


def read_bin(path: Path, h: Header) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    """The tensors in ``path``, mapped, by Meta's names, and what Meta's ``params.json`` would say beside them."""
    tensors: dict[str, StoredTensor] = {}
    raw, begin = map_file(path), _SIZES[h.version]
    for name, shape, num_bytes, number in _layout(h):
        for layer in range(number):
            data, numel = raw[begin : begin + num_bytes], math.prod(shape)
            begin += num_bytes
            if h.version == 2 and len(shape) > 1:
                scales = StoredTensor.of_bytes(data[numel:], torch.float32, (numel // h.group_size,))
                quants = data[:numel].view(torch.int8).view(shape)
                tensor: StoredTensor = Q80Tensor(quants, scales.whole(), h.group_size)
            else:
                tensor = StoredTensor.of_bytes(data, torch.float32, shape)
            tensors[name.format(layer) + ".weight"] = tensor
    return tensors, {"n_heads": h.n_heads, "n_kv_heads": h.n_kv_heads, "max_seq_len": h.seq_len}
