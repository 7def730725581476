"""Files of weights: which of them a directory has, safetensors read and written, files of torch.save read.

A safetensors file (https://github.com/huggingface/safetensors#format) is eight bytes of header length, a JSON header
of names, dtypes, shapes and byte ranges, and the bytes. A file of torch.save is read with ``weights_only=True``.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from gpt_fast.checkpoint.files import SINGLE
from gpt_fast.checkpoint.json_values import read_json
from gpt_fast.checkpoint.stored import Report, StoredTensor, map_file
from gpt_fast.errors import CheckpointError

# Buffers that old versions of transformers saved: rotary frequencies, causal masks.
_BUFFERS = ("rotary_emb.inv_freq", *(f".{n}.{kind}" for n in ("attn", "attention") for kind in ("bias", "masked_bias")))
# fmt: off
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}
# fmt: on
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_MAX_HEADER = 100_000_000  # bytes; the limit of the reference implementation

Specs = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # dtype and shape of each tensor by name


def weight_files(directory: Path) -> list[Path]:
    """The files that hold the weights of ``directory``; safetensors come before torch's format."""
    for single in SINGLE:
        index = directory / f"{single}.index.json"
        if (directory / single).is_file():
            return [directory / single]
        if index.is_file():
            mapping = read_json(index).get("weight_map")
            if not isinstance(mapping, dict) or not all(isinstance(name, str) for name in mapping.values()):
                raise CheckpointError(f"{index} has no weight_map of tensor names to file names")
            files = [directory / name for name in sorted(set(mapping.values()))]
            for file in files:
                if file.parent != directory:
                    raise CheckpointError(f"{index} names {file.name!r} outside its own directory")
                if not os.path.isfile(file):  # unlike Path.is_file() also where the name is too long for the system
                    raise CheckpointError(f"{file!s:.300} is missing; {index.name} needs it")
            return files
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory")
    raise CheckpointError(f"{directory} has no weights: none of {', '.join(SINGLE)}, whole or with an index")


def open_weights(files: list[Path]) -> dict[str, StoredTensor]:
    """Every tensor of ``files`` by name, mapped and not yet read, without buffers. Raises CheckpointError."""
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        found = read_safetensors(path) if path.suffix == ".safetensors" else read_torch_file(path)[0]
        for name, tensor in found.items():
            if name in tensors:
                raise CheckpointError(f"{path}: tensor {name!r} is in another file of {path.parent} as well")
            tensors[name] = tensor
    return {name: t for name, t in tensors.items() if not name.endswith(_BUFFERS)}


def read_torch_file(path: Path) -> tuple[dict[str, StoredTensor], object]:
    """The tensors in a file of torch.save, mapped unless its format is that from before torch 1.6.

    Also what stands under ``model_args`` in a training checkpoint, which has its tensors under ``model``; else None.
    No code in the file is run. Raises CheckpointError when it is damaged or holds more than tensors and plain values.
    """
    with open(path, "rb") as file:
        start = file.read(4)
    mapped = start == b"PK\x03\x04"
    if not mapped and start[:1] != b"\x80":
        raise CheckpointError(f"{path} is no checkpoint known here: not safetensors, llama2.c's .bin or a torch file")
    try:
        values = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as e:  # torch raises whatever its readers do: pickle, zip, runtime, key and index errors
        # Not torch's own words: they say how to read the file all the same, which would run what is in it.
        named = re.search(r"GLOBAL ([\w.]{1,100})", str(e)) if isinstance(e, pickle.UnpicklingError) else None
        raise CheckpointError(
            f"{path} cannot be read as a torch file of tensors and plain values: "
            + (f"it holds {named[1]}, and reading that would run code" if named else "it is damaged or of another kind")
        ) from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds {type(values).__name__}, not a dictionary of tensors")
    facts = None
    if isinstance(values.get("model"), dict):
        values, facts = values["model"], values.get("model_args")  # the optimizer's state stays behind
    for name, value in values.items():
        if not isinstance(value, Tensor) or not isinstance(name, str):
            raise CheckpointError(f"{path}: {name!r} is {type(value).__name__}, not a tensor with a name")
        # A tensor may repeat one number without end; such a one would take memory that the file does not have.
        if value.layout != torch.strided or value.nbytes > value.untyped_storage().nbytes():
            raise CheckpointError(f"{path}: {name!r} of shape {list(value.shape)} is not stored whole")
    return {name: StoredTensor(value.detach(), mapped=mapped) for name, value in values.items()}, facts


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of a safetensors file, mapped. Raises CheckpointError naming the file when it is corrupt."""
    size = path.stat().st_size
    raw = map_file(path) if size else torch.empty(0, dtype=torch.uint8)
    length = int.from_bytes(raw[:8].numpy().tobytes(), "little")
    if size < 8 or length < 2 or length > min(_MAX_HEADER, size - 8):
        raise CheckpointError(f"{path}: not a safetensors file, or cut short ({size} bytes, header of {length})")
    header, data = _header(path, raw[8 : 8 + length].numpy().tobytes()), raw[8 + length :]
    out: dict[str, StoredTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        begin, end, out[name] = _entry(path, name, entry, data)
        spans.append((begin, end, name))
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


def _entry(path: Path, name: str, entry: object, data: Tensor) -> tuple[int, int, StoredTensor]:
    """Where the tensor of a header's ``entry`` begins and ends in ``data``, and the tensor; every value is checked."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError(f"{path}: tensor {name!r} has no dtype, shape and data_offsets")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in _DTYPES:
        raise CheckpointError(f"{path}: tensor {name!r} has the unsupported dtype {code!r}")
    if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{path}: tensor {name!r} has the shape {shape!r} and offsets {offsets!r}")
    (begin, end), dtype = offsets, _DTYPES[code]
    if begin > end or end > len(data):
        raise CheckpointError(
            f"{path}: tensor {name!r} lies at {begin}:{end} of {len(data)} bytes; the file is cut short or damaged"
        )
    if math.prod(shape) * dtype.itemsize != end - begin:
        raise CheckpointError(f"{path}: tensor {name!r} of shape {shape} and dtype {code} has {end - begin} bytes")
    if math.prod(n or 1 for n in shape) >= 2**60:  # of no bytes, and yet too large for torch
        raise CheckpointError(f"{path}: tensor {name!r} has the shape {shape}")
    return begin, end, StoredTensor.of_bytes(data[begin:end], dtype, tuple(shape))


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
    path: Path, tensors: Mapping[str, StoredTensor], dtype: torch.dtype | None = None, report: Report = None
) -> None:
    """Write ``tensors``, converted to ``dtype`` if given, a piece at a time.

    The file appears under its name when it is whole. Raises OSError when it cannot be written.
    """
    start, begin = layout({name: (dtype or tensor.dtype, tensor.shape) for name, tensor in tensors.items()})
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            file.write(start)
            for name in begin:
                for _, rows in tensors[name].pieces(report):
                    write_rows(file, rows.to("cpu", dtype or tensors[name].dtype))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
