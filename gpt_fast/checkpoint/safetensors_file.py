"""The safetensors format (https://github.com/huggingface/safetensors#format): read with every check, write in a stream.

A file is eight bytes of header length, a JSON header of names, dtypes, shapes and byte ranges, and the bytes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from gpt_fast.checkpoint.stored import Report, StoredTensor, map_file
from gpt_fast.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000  # bytes; the limit of the reference implementation

Specs = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # dtype and shape of each tensor by name


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of a safetensors file, mapped. Raises CheckpointError naming the file when it is corrupt."""
    size = path.stat().st_size
    raw = map_file(path) if size else torch.empty(0, dtype=torch.uint8)
    length = int.from_bytes(_bytes(raw[:8]), "little")
    if size < 8 or length < 2 or length > min(_MAX_HEADER, size - 8):
        raise CheckpointError(f"{path}: not a safetensors file, or cut short ({size} bytes, header of {length})")
    header, data = _header(path, _bytes(raw[8 : 8 + length])), raw[8 + length :]
    out: dict[str, StoredTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        dtype, shape, begin, end = _entry(path, name, entry, len(data))
        spans.append((begin, end, name))
        out[name] = StoredTensor.of_bytes(data[begin:end], dtype, shape, mapped=True)
    covered = 0
    for begin, end, name in sorted(spans):
        if begin < covered:
            raise CheckpointError(f"{path}: tensor {name!r} overlaps the one before it")
        if begin > covered:
            raise CheckpointError(f"{path}: {begin - covered} bytes before tensor {name!r} belong to none")
        covered = end
    if covered != len(data):
        raise CheckpointError(f"{path}: {len(data) - covered} bytes after the last tensor; the file is damaged")
    return out


def _bytes(raw: Tensor) -> bytes:
    return bytes(raw.numpy())


def _header(path: Path, text: bytes) -> dict[str, Any]:
    """The JSON header without ``__metadata__``."""
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path}: the safetensors header is damaged: {e}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the safetensors header is not an object")
    header.pop("__metadata__", None)
    return header


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a name occurs twice")
    return out


def _entry(path: Path, name: str, entry: object, available: int) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    """One header entry, checked: dtype, shape, and the half-open byte range within the data."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError(f"{path}: tensor {name!r} has no dtype, shape and data_offsets")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise CheckpointError(f"{path}: tensor {name!r} has the unsupported dtype {code!r}")
    if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{path}: tensor {name!r} has the shape {shape!r} and offsets {offsets!r}")
    begin, end = offsets
    if begin > end or end > available:
        raise CheckpointError(
            f"{path}: tensor {name!r} lies at {begin}:{end} of {available} bytes; the file is cut short or damaged"
        )
    dtype = DTYPES[code]
    if math.prod(shape) * dtype.itemsize != end - begin:
        raise CheckpointError(f"{path}: tensor {name!r} of shape {shape} and dtype {code} has {end - begin} bytes")
    return dtype, tuple(shape), begin, end


def _sizes(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value)


def layout(specs: Specs) -> tuple[bytes, dict[str, int]]:
    """What a file of these tensors begins with, and where each of them begins in the file, in the file's order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin: dict[str, int] = {}
    end = 0
    # Widest dtypes first, so that every tensor is aligned to its own.
    for name, (dtype, shape) in sorted(specs.items(), key=lambda item: -item[1][0].itemsize):
        begin[name] = end
        end += math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [begin[name], end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text
    return start, {name: len(start) + offset for name, offset in begin.items()}


def write_rows(file: BinaryIO, rows: Tensor) -> None:
    """Write the bytes of ``rows`` where ``file`` stands."""
    file.write(rows.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def write_safetensors(
    path: Path,
    tensors: Mapping[str, StoredTensor],
    dtype: torch.dtype | None = None,
    report: Report = None,
) -> None:
    """Write ``tensors``, converted to ``dtype`` if given, a piece at a time.

    The file appears under its name when it is whole. Raises OSError when it cannot be written.
    """
    start, begin = layout({name: (dtype or tensor.dtype, tensor.shape) for name, tensor in tensors.items()})
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            file.write(start)
            for tensor in map(tensors.__getitem__, begin):
                for first, last in tensor.chunks():
                    write_rows(file, tensor.rows(first, last).to("cpu", dtype or tensor.dtype))
                    tensor.release(first, last)
                    if report:
                        report((last - first) * tensor.row_bytes)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
