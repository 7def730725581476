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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt_fast.errors import CheckpointError

_CHUNK = 4 << 20  # bytes read between two releases
_MADV_DONTNEED = 4  # <sys/mman.h>

Report = Callable[[int], object] | None  # is called with the number of bytes of each piece that was read


class StoredTensor:
    """A tensor by rows, which are read when they are asked for.

    ``data``: its values, usually a view of a mapped file. ``order``: int64 [rows] or None; row i is row ``order[i]`` of
    ``data``. ``mapped``: whether the pages of ``data`` can leave memory and come back from the file.
    """

    def __init__(self, data: Tensor, *, mapped: bool = False, order: Tensor | None = None) -> None:
        self.dtype, self.mapped, self.order = data.dtype, mapped, order
        num_rows = data.shape[:1] if order is None else order.shape
        self.shape: tuple[int, ...] = (*num_rows, *data.shape[1:])
        self.data = data if data.dim() else data.view(1)

    @classmethod
    def of_bytes(cls, raw: Tensor, dtype: torch.dtype, shape: tuple[int, ...], *, mapped: bool) -> StoredTensor:
        """A tensor whose bytes are ``raw``, uint8 with one dimension."""
        if raw.data_ptr() % dtype.itemsize == 0:
            return cls(raw.view(dtype).view(shape), mapped=mapped)
        # A header of odd length leaves every tensor behind it misaligned. Rows of bytes are copied when they are read.
        out = cls(raw.view(math.prod(shape[:1]), -1), mapped=mapped)
        out.dtype, out.shape = dtype, shape
        return out

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes

    def _view(self, data: Tensor, order: Tensor | None, shape: tuple[int, ...]) -> StoredTensor:
        out = StoredTensor(data, mapped=self.mapped, order=order)
        out.dtype, out.shape = self.dtype, shape
        return out

    def part(self, start: int, num_rows: int) -> StoredTensor:
        """Rows [start, start + num_rows)."""
        assert start + num_rows <= self.num_rows
        shape = (num_rows, *self.shape[1:])
        if self.order is None:
            return self._view(self.data[start : start + num_rows], None, shape)
        return self._view(self.data, self.order[start : start + num_rows], shape)

    def picked(self, rows: Tensor) -> StoredTensor:
        """The rows with the indices ``rows``, int64 [n], in that order."""
        order = rows if self.order is None else self.order[rows]
        return self._view(self.data, order, (len(rows), *self.shape[1:]))

    def columns(self, start: int, num_columns: int) -> StoredTensor:
        """Columns [start, start + num_columns) of a matrix."""
        assert start + num_columns <= self.shape[1]
        width = self.dtype.itemsize // self.data.dtype.itemsize  # more than 1 for rows of bytes
        data = self.data.narrow(1, start * width, num_columns * width)
        return self._view(data, self.order, (self.num_rows, num_columns))

    def transposed(self) -> StoredTensor:
        """The transpose of a matrix: its columns as rows. Misaligned data and picked rows are read for it at once."""
        if self.order is None and self.data.dtype == self.dtype:
            return StoredTensor(self.data.t(), mapped=self.mapped)
        return StoredTensor(self.rows(0, self.num_rows).t())

    def rows(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end), as a view where alignment and order allow; do not write to it."""
        out = self.data[begin:end] if self.order is None else self.data[self.order[begin:end]]
        if out.dtype != self.dtype:
            out = out.clone(memory_format=torch.contiguous_format).view(self.dtype).view(end - begin, *self.shape[1:])
        return out

    def release(self, begin: int, end: int) -> None:
        """Let the pages of rows [begin, end) leave memory; reading them again is allowed."""
        if not self.mapped or _madvise is None or not end > begin:
            return
        if self.order is not None:
            picked = self.order[begin:end]
            begin, end = int(picked.min()), int(picked.max()) + 1
        piece = self.data[begin:end]
        span = sum((n - 1) * stride for n, stride in zip(piece.shape, piece.stride(), strict=True)) + 1
        if piece.numel():
            first = piece.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
            _madvise(first, piece.data_ptr() + span * piece.element_size() - first, _MADV_DONTNEED)

    def chunks(self) -> list[tuple[int, int]]:
        """Row ranges of about ``_CHUNK`` bytes that cover the tensor."""
        step = max(1, _CHUNK // max(1, self.row_bytes))
        return [(a, min(a + step, self.num_rows)) for a in range(0, self.num_rows, step)]

    def pieces(self, report: Report = None, step: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """All rows, in pieces with the index of their first row. A piece's pages are released behind it.

        A piece has ``step`` rows, or about ``_CHUNK`` bytes.
        """
        step = step or max(1, _CHUNK // max(1, self.row_bytes))
        for begin in range(0, self.num_rows, step):
            end = min(begin + step, self.num_rows)
            yield begin, self.rows(begin, end)
            self.release(begin, end)
            if report:
                report((end - begin) * self.row_bytes)

    def copy_to(self, target: Tensor, report: Report = None) -> None:
        """Copy into ``target`` of the same shape and of any dtype and device, converting piece by piece."""
        assert tuple(target.shape) == self.shape, (tuple(target.shape), self.shape)
        rows = target if self.shape else target.view(1)
        for begin, end in self.chunks():
            rows[begin:end].copy_(self.rows(begin, end))
            self.release(begin, end)
            if report:
                report((end - begin) * self.row_bytes)

    def equals(self, other: StoredTensor) -> bool:
        """Whether both hold the same values."""
        if self.shape != other.shape or self.dtype != other.dtype:
            return False
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
    """The bytes of the file ``path``, which is not empty, as a read-only mapping, uint8 [size].

    The mapping lives as long as a view of it does.
    """
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")  # nothing here writes to it
        return torch.frombuffer(mapping, dtype=torch.uint8)


def read_torch_file(path: Path) -> tuple[dict[str, Any], bool]:
    """The dictionary in a file of torch.save, and whether it is mapped: the format from before torch 1.6 cannot be.

    No code in the file is run. Raises CheckpointError when it is damaged or holds more than tensors and plain values.
    """
    with open(path, "rb") as file:
        mapped = file.read(4) == b"PK\x03\x04"
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
    return value, mapped


def stored_tensors(values: Mapping[str, Any], path: Path, mapped: bool) -> dict[str, StoredTensor]:
    """Wrap the tensors of a state dict read by :func:`read_torch_file`."""
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{path}: {name!r} is {type(value).__name__}, not a tensor")
        # A tensor may repeat one number without end; such a one would take memory that the file does not have.
        if value.layout != torch.strided or value.nbytes > value.untyped_storage().nbytes():
            raise CheckpointError(f"{path}: {name!r} of shape {list(value.shape)} is not stored whole")
    return {name: StoredTensor(value.detach(), mapped=mapped) for name, value in values.items()}
