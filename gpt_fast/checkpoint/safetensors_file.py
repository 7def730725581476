"""The safetensors format (https://github.com/huggingface/safetensors#format): read with every check, write in a stream.

A file is eight bytes of header length, a JSON header of names, dtypes, shapes and byte ranges, and the bytes.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from gpt_fast.checkpoint.stored import StoredTensor, map_file
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
CODES = {dtype: code for code, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000  # bytes; the limit of the reference implementation


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of a safetensors file, mapped. Raises CheckpointError naming the file when it is corrupt."""
    header, data_start = _safetensors_header(path)
    raw = map_file(path)
    available = raw.numel() - data_start
    out: dict[str, StoredTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        dtype, shape, begin, end = _safetensors_entry(path, name, entry, available)
        spans.append((begin, end, name))
        out[name] = StoredTensor(raw[data_start + begin : data_start + end], dtype, shape, mapped=True)
    covered = 0
    for begin, end, name in sorted(spans):
        if begin < covered:
            raise CheckpointError(f"{path}: tensor {name!r} overlaps the one before it")
        if begin > covered:
            raise CheckpointError(f"{path}: {begin - covered} bytes before tensor {name!r} belong to none")
        covered = end
    if covered != available:
        raise CheckpointError(f"{path}: {available - covered} bytes after the last tensor; the file is damaged")
    return out


def _safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """The JSON header without ``__metadata__``, and where the data begins."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length < 2 or length > min(_MAX_HEADER, size - 8):
            raise CheckpointError(f"{path}: not a safetensors file, or cut short ({size} bytes, header of {length})")
        try:
            header = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=_no_duplicates)
        except (ValueError, RecursionError) as e:
            raise CheckpointError(f"{path}: the safetensors header is damaged: {e}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the safetensors header is not an object")
    header.pop("__metadata__", None)
    return header, 8 + length


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a name occurs twice")
    return out


def _safetensors_entry(
    path: Path, name: str, entry: object, available: int
) -> tuple[torch.dtype, tuple[int, ...], int, int]:
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


def write_safetensors(
    path: Path,
    tensors: Mapping[str, StoredTensor],
    dtype: torch.dtype | None = None,
    report: Callable[[int], object] | None = None,
) -> None:
    """Write ``tensors`` in their order, converted to ``dtype`` if given, a piece at a time.

    ``report`` is called with the number of bytes read for each piece.

    The file appears under its name when it is whole. Raises OSError when it cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, tensor in tensors.items():
        kind = dtype or tensor.dtype
        end = begin + math.prod(tensor.shape) * kind.itemsize
        header[name] = {"dtype": CODES[kind], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor in tensors.values():
                for first, last in tensor.chunks():
                    piece = tensor.rows(first, last).to("cpu", dtype or tensor.dtype).contiguous().view(-1)
                    size = piece.numel() * piece.element_size()
                    file.write((ctypes.c_char * size).from_address(piece.data_ptr()))
                    tensor.release(first, last)
                    if report:
                        report((last - first) * tensor.row_bytes)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
