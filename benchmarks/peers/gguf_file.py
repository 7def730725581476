"""What a GGUF file holds, from its header alone. Standard library only.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import itertools
import struct
from pathlib import Path
from typing import Any, BinaryIO

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def read_header(path: str | Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The file's values by key, and bytes of each tensor, with what pads it to the file's alignment.

    Raises ValueError for another kind of file.
    """
    with Path(path).open("rb") as file:
        if file.read(4) != b"GGUF" or _number(file, "I") < 2:
            raise ValueError(f"{path} is not a GGUF file of version 2 or later")
        num_tensors, num_values = _number(file, "Q"), _number(file, "Q")
        values: dict[str, Any] = {}
        for _ in range(num_values):
            key = _value(file, _STRING)
            values[key] = _value(file, _number(file, "I"))
        offsets = {}
        for _ in range(num_tensors):
            name = _value(file, _STRING)
            file.seek(8 * _number(file, "I") + 4, 1)  # dimensions and type
            offsets[name] = _number(file, "Q")
        alignment = values.get("general.alignment", 32)
        data = -(-file.tell() // alignment) * alignment
    ends = sorted([*offsets.values(), Path(path).stat().st_size - data])
    following = dict(itertools.pairwise(ends))
    return values, {name: following[offset] - offset for name, offset in offsets.items()}


def bytes_per_token(path: str | Path) -> int:
    """Bytes of weights that decoding one token reads: all but the embedding, unless it is the head as well."""
    sizes = read_header(path)[1]
    unused = sizes["token_embd.weight"] if "output.weight" in sizes else 0
    return sum(sizes.values()) - unused


def kv_bytes_per_token(path: str | Path, element_bytes: int) -> int:
    """Bytes of keys and values that one token caches in all layers."""
    values = read_header(path)[0]
    arch = values["general.architecture"]
    num_heads = values[f"{arch}.attention.head_count"]
    num_kv_heads = values.get(f"{arch}.attention.head_count_kv", num_heads)
    key_dim = values.get(f"{arch}.attention.key_length", values[f"{arch}.embedding_length"] // num_heads)
    value_dim = values.get(f"{arch}.attention.value_length", key_dim)
    return int(values[f"{arch}.block_count"] * num_kv_heads * (key_dim + value_dim) * element_bytes)


def _number(file: BinaryIO, kind: str) -> Any:
    (value,) = struct.unpack(f"<{kind}", file.read(struct.calcsize(f"<{kind}")))
    return value


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return file.read(_number(file, "Q")).decode("utf-8", errors="replace")
    if kind == _ARRAY:
        inner, count = _number(file, "I"), _number(file, "Q")
        return [_value(file, inner) for _ in range(count)]
    return _number(file, _SCALARS[kind])
