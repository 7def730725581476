"""llama2.c's ``.bin`` files (https://github.com/karpathy/llama2.c, export.py): versions 0, 1 and 2.

Version 0 is seven integers and float32 tensors, told by its exact size; 1 and 2 begin with a magic number and pad
their header to 256 bytes. Version 2 holds its matrices as Q8_0: int8 in groups that share a float32 scale.

The readers give tensors by the names of Meta's own Llama code, which llama2.c and gpt-fast share; convert.py
makes a Hugging Face checkpoint of them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gpt_fast.checkpoint.stored import StoredTensor, map_file
from gpt_fast.config import ModelConfig
from gpt_fast.errors import CheckpointError, ConfigError

_MAGIC = 0x616B3432  # "ak42"
_HEADER_BYTES = 256  # versions 1 and 2
_F32 = torch.float32


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
    """A matrix stored as int8 in groups of ``group_size`` neighbours with a float32 scale each; read as float32."""

    def __init__(self, quants: Tensor, scales: StoredTensor, shape: tuple[int, int], group_size: int) -> None:
        super().__init__(quants.view(torch.int8).view(shape))
        self.dtype, self.scales, self.group_size = _F32, scales, group_size

    def picked(self, rows: Tensor) -> StoredTensor:
        """The rows with these indices."""
        out = Q80Tensor(self.data.view(-1), self.scales, (self.data.shape[0], self.data.shape[1]), self.group_size)
        out.order, out.shape = rows, (len(rows), self.shape[1])
        return out

    def rows(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end), float32."""
        rows = torch.arange(begin, end) if self.order is None else self.order[begin:end]
        groups = (rows[:, None] * self.shape[1] + torch.arange(self.shape[1])) // self.group_size  # may span rows
        low, high = int(groups.min()), int(groups.max()) + 1
        return self.data[rows].float() * self.scales.rows(low, high)[groups - low]


def read_header(path: Path) -> Header | None:
    """The header of a ``.bin`` file, or None when it is no such file. Raises CheckpointError for a newer version."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(_HEADER_BYTES)
    if len(start) < 28:
        return None
    if len(start) == _HEADER_BYTES and struct.unpack_from("<I", start)[0] == _MAGIC:
        version, *sizes = struct.unpack_from("<8i", start, 4)
        if version not in (1, 2):
            raise CheckpointError(f"{path}: llama2.c version {version} is not supported, only 0, 1 and 2")
        (tied,) = struct.unpack_from("<B", start, 36)
        (group_size,) = struct.unpack_from("<i", start, 37) if version == 2 else (0,)
        header = Header._make((*sizes, bool(tied), version, group_size))
        if min(sizes) < 1 or (version == 2 and group_size < 1):
            raise CheckpointError(f"{path}: the header's sizes make no sense: {header}")
        if _num_bytes(header) != size:
            raise CheckpointError(f"{path} has {size} bytes; its header asks for {_num_bytes(header)}; it is cut short")
        return header
    sizes = list(struct.unpack_from("<7i", start))
    tied = sizes[5] > 0  # a negative vocabulary says that the head has weights of its own
    sizes[5] = abs(sizes[5])
    header = Header._make((*sizes, tied, 0, 0))
    return header if min(sizes) > 0 and sizes[3] <= sizes[0] and _num_bytes(header) == size else None


def _layout(h: Header) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes in the file's order; ``{}`` stands for the layer and the tensor is repeated for each."""
    head_dim = h.dim // h.n_heads
    kv_dim = h.n_kv_heads * head_dim
    attention = (
        ("layers.{}.attention.wq", (h.dim, h.dim)),
        ("layers.{}.attention.wk", (kv_dim, h.dim)),
        ("layers.{}.attention.wv", (kv_dim, h.dim)),
        ("layers.{}.attention.wo", (h.dim, h.dim)),
    )
    mlp = (
        ("layers.{}.feed_forward.w1", (h.hidden_dim, h.dim)),
        ("layers.{}.feed_forward.w2", (h.dim, h.hidden_dim)),
        ("layers.{}.feed_forward.w3", (h.hidden_dim, h.dim)),
    )
    if h.version == 0:
        yield "tok_embeddings", (h.vocab_size, h.dim)
        yield "layers.{}.attention_norm", (h.dim,)
        yield from attention
        yield "layers.{}.ffn_norm", (h.dim,)
        yield from mlp
        yield "norm", (h.dim,)
        yield "freqs_cos", (h.seq_len, head_dim // 2)
        yield "freqs_sin", (h.seq_len, head_dim // 2)
    else:
        yield "layers.{}.attention_norm", (h.dim,)
        yield "layers.{}.ffn_norm", (h.dim,)
        yield "norm", (h.dim,)
        yield "tok_embeddings", (h.vocab_size, h.dim)
        yield from attention
        yield from mlp
    if not h.tied:
        yield "output", (h.vocab_size, h.dim)


def _entries(h: Header) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Name, shape and bytes of every tensor in the file's order."""
    for template, shape in _layout(h):
        numel = shape[0] * (shape[1] if len(shape) > 1 else 1)
        quantized = h.version == 2 and len(shape) > 1
        num_bytes = numel + numel // h.group_size * 4 if quantized else numel * 4
        for layer in range(h.n_layers if "{}" in template else 1):
            yield template.format(layer) + ".weight", shape, num_bytes


def _num_bytes(h: Header) -> int:
    if h.n_layers > 100_000:  # a random file; not worth counting through
        return -1
    return (28 if h.version == 0 else _HEADER_BYTES) + sum(num_bytes for _, _, num_bytes in _entries(h))


def read_bin(path: Path, header: Header) -> tuple[ModelConfig, dict[str, StoredTensor]]:
    """The model in ``path`` and its tensors, mapped, by Meta's names. llama2.c fixes norm_eps and the rotary base."""
    h, raw = header, map_file(path)
    try:
        config = ModelConfig(
            family="llama",
            vocab_size=h.vocab_size,
            dim=h.dim,
            num_layers=h.n_layers,
            num_heads=h.n_heads,
            num_kv_heads=h.n_kv_heads,
            head_dim=h.dim // h.n_heads,
            ffn_dim=h.hidden_dim,
            max_seq_len=h.seq_len,
            norm_eps=1e-5,
            rope_theta=10000.0,
            tie_embeddings=h.tied,
        )
    except ConfigError as e:
        raise CheckpointError(f"{path}: {e}") from None
    tensors: dict[str, StoredTensor] = {}
    begin = 28 if h.version == 0 else _HEADER_BYTES
    for name, shape, num_bytes in _entries(h):
        data = raw[begin : begin + num_bytes]
        if h.version == 2 and len(shape) > 1:
            numel = shape[0] * shape[1]
            scales = StoredTensor.of_bytes(data[numel:], _F32, (numel // h.group_size,), mapped=False)
            tensors[name] = Q80Tensor(data[:numel], scales, (shape[0], shape[1]), h.group_size)
        else:
            tensors[name] = StoredTensor.of_bytes(data, _F32, shape, mapped=True)
        begin += num_bytes
    return config, tensors
