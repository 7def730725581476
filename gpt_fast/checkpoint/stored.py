"""Tensors in files: mapped, read in pieces and let go again.

A checkpoint's file is mapped into memory, not read. :class:`StoredTensor` is a view of such a mapping; ``pieces`` reads
a few megabytes at a time and tells the kernel that the pages behind are no longer needed, so that a load holds the
weights once and not twice. weight_files.py opens the files.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import math
import mmap
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from tqdm import tqdm

if TYPE_CHECKING:
    from typing_extensions import Self

_CHUNK = 4 << 20  # bytes read between two releases
# int madvise(void *address, size_t length, int advice). Elsewhere pages leave memory under pressure only.
_madvise = ctypes.CDLL(None).madvise if sys.platform == "linux" else None

Report = Callable[[int], object] | None  # is called with the number of bytes of each piece that was read


@contextlib.contextmanager
def progress_bar(total: int, wanted: bool, what: str) -> Iterator[Report]:
    """A bar of ``total`` bytes, as the function that moves it on; None where nobody would see it."""
    if wanted and sys.stderr.isatty():
        with tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, desc=what) as bar:
            yield bar.update
    else:
        yield None


class StoredTensor:
    """A tensor by rows, which are read when they are asked for.

    ``data``: its values, usually a view of a mapped file. ``order``: int64 [rows] or None; row i is row ``order[i]`` of
    ``data``. ``mapped``: whether the pages of ``data`` can leave memory and come back from the file.
    """

    def __init__(self, data: Tensor, *, mapped: bool = False) -> None:
        self.dtype, self.mapped = data.dtype, mapped
        self.order: Tensor | None = None
        self.shape: tuple[int, ...] = tuple(data.shape)
        self.data = data if data.dim() else data.view(1)

    @classmethod
    def of_bytes(cls, raw: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> StoredTensor:
        """A tensor whose bytes are ``raw``, uint8 with one dimension, in a mapped file."""
        if not raw.numel():
            return cls(torch.empty(shape, dtype=dtype))
        if raw.data_ptr() % dtype.itemsize == 0:
            return cls(raw.view(dtype).view(shape), mapped=True)
        # A header of odd length leaves every tensor behind it misaligned. Rows of bytes are copied when they are read.
        out = cls(raw.view(math.prod(shape[:1]), -1), mapped=True)
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

    def _view(self, data: Tensor, order: Tensor | None, shape: tuple[int, ...]) -> Self:
        out = copy.copy(self)
        out.data, out.order, out.shape = data, order, shape
        return out

    def part(self, start: int, num_rows: int) -> StoredTensor:
        """Rows [start, start + num_rows)."""
        assert start + num_rows <= self.num_rows
        rows = slice(start, start + num_rows)
        data, order = (self.data[rows], None) if self.order is None else (self.data, self.order[rows])
        return self._view(data, order, (num_rows, *self.shape[1:]))

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
        return StoredTensor(self.whole().t())

    def rows(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end), as a view where alignment and order allow; do not write to it."""
        out = self.data[begin:end] if self.order is None else self.data[self.order[begin:end]]
        if out.dtype != self.dtype:
            out = out.clone(memory_format=torch.contiguous_format).view(self.dtype).view(end - begin, *self.shape[1:])
        return out

    def whole(self) -> Tensor:
        """All rows at once: for what is small, like scales."""
        return self.rows(0, self.num_rows)

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
            length = piece.data_ptr() + span * piece.element_size() - first
            _madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_DONTNEED)

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
        target = target if self.shape else target.view(1)
        for begin, rows in self.pieces(report):
            target[begin : begin + len(rows)].copy_(rows)

    def equals(self, other: StoredTensor) -> bool:
        """Whether both hold the same values."""
        if self.shape != other.shape or self.dtype != other.dtype:
            return False
        pairs = zip(self.pieces(), other.pieces(), strict=True)
        return all(torch.equal(ours, theirs) for (_, ours), (_, theirs) in pairs)


def map_file(path: Path) -> Tensor:
    """The bytes of the file ``path``, which is not empty, as a read-only mapping, uint8 [size].

    The mapping lives as long as a view of it does.
    """
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")  # nothing here writes to it
        return torch.frombuffer(mapping, dtype=torch.uint8)
