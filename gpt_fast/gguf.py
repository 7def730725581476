"""The header of GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): metadata, and tensors' places.

Nothing is believed: every count, length and offset is checked against the size of the file before it is used, so a
damaged file costs no more memory than its own header. llama.cpp's Python library reads the same files; it checks no
bounds, and it takes 11 s and 700 MB for the header of a vocabulary of 128 thousand tokens, which takes 0.3 s here.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
import sys
from array import array
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from gpt_fast.errors import CheckpointError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_HEADER = 2**26  # bytes; a vocabulary of 256 thousand tokens with its merges has a fifth of that
_MAX_ENTRIES = 2**24  # of an array, and numbers of keys and tensors
_MAX_MATRICES = 2**18  # in a file; a trillion weights in 61 layers of 384 experts are a quarter of that
_MAX_SIZE = 2**48  # of a dimension
_ALIGNMENT = 32  # bytes, where general.alignment does not say
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class Encoding(NamedTuple):
    """How tensors hold their values: ``values`` neighbours of a row in ``num_bytes`` bytes."""

    name: str
    values: int
    num_bytes: int


ENCODINGS = {
    code: Encoding(*row)
    for code, row in {
        0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
        6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
        12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 20: ("IQ4_NL", 32, 18),
        23: ("IQ4_XS", 256, 136), 39: ("MXFP4", 32, 17),
    }.items()
}  # fmt: skip
# The names of those that are not read.
_REFUSED = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 24: "I8",
    25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
}  # fmt: skip


class Place(NamedTuple):
    """Where a tensor lies: ``shape`` [rows, ..., columns], bytes [``begin``, ``end``) of ``file``."""

    file: Path
    shape: tuple[int, ...]
    encoding: Encoding
    begin: int
    end: int


class Header(NamedTuple):
    """``metadata``: numbers, strings, and arrays of them by key, of the first file. ``tensors``: of all ``files``."""

    files: list[Path]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Place]


def is_gguf(path: Path) -> bool:
    """Whether ``path`` is a file that begins as a GGUF file does, or is named as one."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(4) == MAGIC or path.suffix == ".gguf"


def first_part(path: Path) -> Path:
    """The file with the metadata of the model that ``path`` is a part of: itself, unless it is a later part."""
    part = _PART.fullmatch(path.name)
    return path.with_name(f"{part['stem']}-00001-of-{part['count']}.gguf") if part else path


def name_of_gguf(path: Path) -> str:
    """The name of the file ``path`` without its ending and its number."""
    part = _PART.fullmatch(path.name)
    return part["stem"] if part else path.stem


def all_parts(path: Path) -> list[Path]:
    """The files of the model whose first one is ``path``."""
    part = _PART.fullmatch(path.name)
    if part is None:
        return [path]
    return [path.with_name(f"{part['stem']}-{i + 1:05}-of-{part['count']}.gguf") for i in range(int(part["count"]))]


def read_header(path: Path) -> Header:
    """The header of the model in ``path``, of all its parts. Raises CheckpointError, naming the file, for a damaged
    one, a part that is missing, and tensors in an encoding that is not read."""
    files, metadata, tensors = all_parts(first_part(path)), dict[str, Any](), dict[str, Place]()
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; the model is in {len(files)} files")
        own, found = _Reader(file).read()
        metadata = metadata or own
        for name, place in found.items():
            if name in tensors:
                raise CheckpointError(f"{file}: tensor {name!r} is in {tensors[name].file.name} as well")
            tensors[name] = place
    return Header(files, metadata, tensors)


def read_metadata(path: Path) -> Mapping[str, Any]:
    """The metadata of the model in ``path`` alone, whatever its tensors are. Raises CheckpointError."""
    return _Reader(first_part(path)).metadata()


class _Reader:
    """One file, read from its beginning; each method goes on where the last one stopped."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._num_tensors = path, 0, 0
        try:
            self._size = path.stat().st_size
            with open(path, "rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self._size else b""
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None

    def read(self) -> tuple[dict[str, Any], dict[str, Place]]:
        """Metadata and tensors."""
        metadata = self.metadata()
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= 2**16 or alignment & (alignment - 1):
            raise self._wrong(f"general.alignment must be a power of two, not {alignment!r:.40}")
        found: dict[str, tuple[tuple[int, ...], Encoding, int]] = {}
        num_matrices = 0
        for _ in range(self._num_tensors):
            name, shape, encoding, offset = self._tensor(alignment)
            if name in found:
                raise self._wrong(f"tensor {name!r} occurs twice")
            found[name] = (shape, encoding, offset)
            num_matrices += shape[0] if len(shape) > 2 else 1  # each expert is one
            if num_matrices > _MAX_MATRICES:
                raise self._wrong(f"it is damaged: its tensors are more than {_MAX_MATRICES} matrices")
        start = -(-self._at // alignment) * alignment
        places = {name: self._place(name, start, *facts) for name, facts in found.items()}
        for one, other in pairwise(sorted((p.begin, p.end, name) for name, p in places.items())):
            if other[0] < one[1]:
                raise self._wrong(f"tensors {one[2]!r} and {other[2]!r} overlap")
        return metadata, places

    def metadata(self) -> dict[str, Any]:
        """All keys and their values."""
        if self._data[:4] != MAGIC:
            raise self._wrong(f"is no GGUF file; it begins with {bytes(self._data[:4])!r}")
        self._at = 4
        version = self._number("I")
        if version not in _VERSIONS:
            order = "is in the order of big-endian machines" if not version & 0xFFFF else f"has version {version}"
            raise self._wrong(f"{order}; only versions 2 and 3 are read, in little-endian order. Convert it again")
        self._num_tensors, num_keys = self._count(), self._count()
        values: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            if key in values:
                raise self._wrong(f"key {key!r} occurs twice")
            values[key] = self._value(self._number("I"), key)
        return values

    def _wrong(self, said: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {said}")

    def _take(self, num_bytes: int) -> bytes:
        begin, self._at = self._at, self._at + num_bytes
        if self._at > min(self._size, _MAX_HEADER):
            limit = f"{self._size} bytes" if self._size < _MAX_HEADER else f"{_MAX_HEADER} bytes of header"
            raise self._wrong(f"it is cut short or damaged: more than its {limit} are needed at byte {begin}")
        return self._data[begin : self._at]

    def _number(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _count(self) -> int:
        count: int = self._number("Q")
        if count > _MAX_ENTRIES:
            raise self._wrong(f"it is damaged: it speaks of {count} entries at byte {self._at - 8}")
        return count

    def _string(self) -> str:
        return self._take(self._number("Q")).decode("utf-8", errors="replace")

    def _value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        of = self._number("I") if kind == _ARRAY else None
        if of == _STRING:
            return [self._string() for _ in range(self._count())]
        if of not in _SCALARS:
            raise self._wrong(f"{key!r} has a value of an unknown kind")
        code = _SCALARS[of].replace("?", "B")
        out = array(code, self._take(self._count() * struct.calcsize("<" + code)))
        if sys.byteorder == "big":
            out.byteswap()
        return out

    def _tensor(self, alignment: int) -> tuple[str, tuple[int, ...], Encoding, int]:
        """Name, shape, encoding, and the offset in the data."""
        name, num_dims = self._string(), self._number("I")
        if not 1 <= num_dims <= 4:
            raise self._wrong(f"tensor {name!r} has {num_dims} dimensions, not 1 to 4")
        shape = tuple(self._number("Q") for _ in range(num_dims))[::-1]
        code, offset = self._number("I"), self._number("Q")
        if code not in ENCODINGS:
            kind = _REFUSED.get(code, f"encoding {code}")
            known = ", ".join(encoding.name for encoding in ENCODINGS.values())
            raise self._wrong(f"tensor {name!r} is in {kind}, which is not supported; only {known}")
        encoding = ENCODINGS[code]
        if not all(1 <= size <= _MAX_SIZE for size in shape) or shape[-1] % encoding.values:
            raise self._wrong(f"tensor {name!r} in {encoding.name} has the shape {list(shape)}")
        if offset % alignment:
            raise self._wrong(f"tensor {name!r} begins at {offset}, no multiple of {alignment} bytes")
        return name, shape, encoding, offset

    def _place(self, name: str, start: int, shape: tuple[int, ...], encoding: Encoding, offset: int) -> Place:
        begin = start + offset
        end = begin + math.prod(shape) // encoding.values * encoding.num_bytes
        if end > self._size:
            raise self._wrong(f"tensor {name!r} ends at byte {end} of {self._size}; the file is cut short or damaged")
        return Place(self._path, shape, encoding, begin, end)
