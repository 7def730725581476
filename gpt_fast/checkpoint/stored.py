"""Tensors in files: mapped, read in pieces and let go again.

A checkpoint's file is mapped into memory, not read. :class:`StoredTensor` is a view of such a mapping; ``copy_to``
moves it into its destination a few megabytes at a time and tells the kernel that the pages read are no longer
needed, so that a load holds the weights once and not twice.

safetensors_file.py reads and writes safetensors; torch.save's files are read here, with ``weights_only=True``.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import pickle
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt_fast.errors import CheckpointError

_CHUNK = 4 << 20  # bytes read between two releases
_MADV_DONTNEED = 4  # <sys/mman.h>


class Slice(NamedTuple):
    """A range of a stored tensor along one axis: what one tensor-parallel rank takes of it."""

    axis: int  # 0 rows, 1 columns
    start: int
    length: int

    def of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that is left of ``shape``."""
        assert self.start >= 0, self
        assert self.start + self.length <= shape[self.axis], (self, shape)
        return (*shape[: self.axis], self.length, *shape[self.axis + 1 :])


class StoredTensor:
    """A tensor whose bytes lie in ``raw`` (uint8, one dimension), usually a mapped file.

    ``interleaved`` > 0: the rows are those of heads of that many dimensions whose rotary pairs are neighbours
    (2i, 2i + 1); ``rows`` yields them in the halves' order (i, i + D / 2) instead.
    """

    def __init__(
        self, raw: Tensor, dtype: torch.dtype, shape: tuple[int, ...], *, mapped: bool, interleaved: int = 0
    ) -> None:
        assert raw.dtype == torch.uint8
        assert raw.numel() == math.prod(shape) * dtype.itemsize
        self.raw, self.dtype, self.shape = raw, dtype, shape
        self.mapped = mapped  # pages can be dropped and come back from the file
        self.interleaved = interleaved

    @classmethod
    def of(cls, tensor: Tensor, *, mapped: bool) -> StoredTensor:
        """Wrap ``tensor``; its memory is shared if it is contiguous."""
        flat = tensor.detach().contiguous().view(-1)
        return cls(flat.view(torch.uint8), tensor.dtype, tuple(tensor.shape), mapped=mapped and tensor.is_contiguous())

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes

    def part(self, start: int, num_rows: int, interleaved: int = 0) -> StoredTensor:
        """Rows [start, start + num_rows) as a stored tensor of their own, in the same memory."""
        assert start + num_rows <= self.num_rows
        raw = self.raw[start * self.row_bytes : (start + num_rows) * self.row_bytes]
        return StoredTensor(raw, self.dtype, (num_rows, *self.shape[1:]), mapped=self.mapped, interleaved=interleaved)

    def rows(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end), as a view where alignment and order allow; do not write to it."""
        out = self._read(begin, end)
        if self.interleaved:
            heads = out.view(-1, self.interleaved // 2, 2, *out.shape[1:])
            out = heads.transpose(1, 2).reshape(out.shape)
        return out

    def _read(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end) in the file's own order."""
        chunk = self.raw[begin * self.row_bytes : end * self.row_bytes]
        if chunk.data_ptr() % self.dtype.itemsize:
            chunk = chunk.clone()  # a header of odd length leaves every tensor behind it misaligned
        return chunk.view(self.dtype).view(end - begin, *self.shape[1:])

    def release(self, begin: int, end: int) -> None:
        """Let the pages of rows [begin, end) leave memory; reading them again is allowed."""
        if self.mapped and _madvise is not None and end > begin:
            page = mmap.PAGESIZE
            address = self.raw.data_ptr() + begin * self.row_bytes
            first = address // page * page
            _madvise(first, address + (end - begin) * self.row_bytes - first, _MADV_DONTNEED)

    def chunks(self) -> list[tuple[int, int]]:
        """Row ranges of about ``_CHUNK`` bytes that cover the tensor; never a part of an interleaved head."""
        unit = self.interleaved or 1
        step = max(1, _CHUNK // max(1, self.row_bytes) // unit) * unit
        return [(a, min(a + step, self.num_rows)) for a in range(0, self.num_rows, step)]

    def copy_to(self, target: Tensor, take: Slice | None = None, report: Callable[[int], object] | None = None) -> None:
        """Copy into ``target`` (any dtype and device, shape of ``take`` or of all), converting piece by piece.

        ``report`` is called with the number of bytes read after each piece.
        """
        shape = take.of(self.shape) if take else self.shape
        assert tuple(target.shape) == shape, (tuple(target.shape), shape)
        if not self.shape:
            target.copy_(self.rows(0, 1)[0])
            return
        low, high = (take.start, take.start + take.length) if take and take.axis == 0 else (0, self.num_rows)
        for begin, end in self.chunks():
            a, b = max(begin, low), min(end, high)
            if a < b:
                piece = self.rows(begin, end)[a - begin : b - begin]
                if take and take.axis == 1:
                    piece = piece[:, take.start : take.start + take.length]
                target[a - low : b - low].copy_(piece)
                self.release(begin, end)
            if report:
                report((end - begin) * self.row_bytes)

    def equals(self, other: StoredTensor) -> bool:
        """Whether both hold the same values; they may share memory."""
        if self.shape != other.shape or self.dtype != other.dtype:
            return False
        if self.raw.data_ptr() == other.raw.data_ptr():
            return True
        for begin, end in self.chunks():
            same = torch.equal(self.rows(begin, end), other.rows(begin, end))
            self.release(begin, end)
            other.release(begin, end)
            if not same:
                return False
        return True


def _find_madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None  # elsewhere pages are dropped under pressure only
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_int
    return function


_madvise = _find_madvise()


def map_file(path: Path) -> Tensor:
    """The file's bytes as a read-only mapping, uint8 [size]. It lives as long as a view of it does."""
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")  # nothing here writes to it
        return torch.frombuffer(mapping, dtype=torch.uint8)


def _is_zip(path: Path) -> bool:
    """Whether ``path`` has the format that torch.save has written since 1.6, the one that can be mapped."""
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


def read_torch_file(path: Path) -> dict[str, Any]:
    """The dictionary in a file of torch.save, mapped where its format allows.

    No code in the file is run. Raises CheckpointError when it is damaged or holds more than tensors and plain values.
    """
    mapped = _is_zip(path)
    try:
        value = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as e:  # torch raises whatever its readers do: pickle, zip, runtime, key and index errors
        # Not torch's own words: they say how to read the file all the same, which would run what is in it.
        named = re.search(r"GLOBAL ([\w.]{1,100})", str(e)) if isinstance(e, pickle.UnpicklingError) else None
        raise CheckpointError(
            f"{path} cannot be read as a torch file of tensors and plain values: "
            + (f"it holds {named[1]}, and reading that would run code" if named else "it is damaged or of another kind")
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, not a dictionary of tensors")
    return value


def stored_tensors(values: Mapping[str, Any], path: Path) -> dict[str, StoredTensor]:
    """Wrap the tensors of a state dict read by :func:`read_torch_file`."""
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{path}: {name!r} is {type(value).__name__}, not a tensor")
        # A tensor may repeat one number without end; such a one would take memory that the file does not have.
        if value.layout != torch.strided or value.nbytes > value.untyped_storage().nbytes():
            raise CheckpointError(f"{path}: {name!r} of shape {list(value.shape)} is not stored whole")
    mapped = _is_zip(path)
    return {name: StoredTensor.of(value, mapped=mapped) for name, value in values.items()}
