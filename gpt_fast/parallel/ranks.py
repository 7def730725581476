"""What ranks show each other inside a step: in the C++ program by memory that they share, or by a collective of torch;
in plain torch see collectives.py."""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
from ctypes import Structure

import torch

from gpt_fast.kernels.cpu import structs
from gpt_fast.parallel import collectives
from gpt_fast.parallel.group import Group

_ANNOUNCED = 64  # bytes, as kAnnounced of ranks.h
_GATHER = ctypes.CFUNCTYPE(None, ctypes.c_int64)


class Ranks:
    """``rank`` of ``count``. ``capacity``: floats that each rank shows at a time; more go one after the other."""

    sum = staticmethod(collectives.sum_of_ranks)
    side_by_side = staticmethod(collectives.side_by_side)

    def __init__(self, group: Group, capacity: int = 2**20, *, shared: bool = True) -> None:
        self.rank, self.count = group.rank, group.count
        self._kept: list[object] = []
        where = {"memory": self._share(group, capacity)} if shared else self._gather_by(group, capacity)
        self.struct: Structure = structs.Ranks(rank=self.rank, count=self.count, capacity=capacity, **where)

    def _share(self, group: Group, capacity: int) -> int:
        """The address of memory that all ranks see. No file of it is left once all have opened it."""
        size = self.count * _ANNOUNCED + 2 * self.count * capacity * 4
        path = group.say(f"/dev/shm/gpt-fast-{secrets.token_hex(8)}" if self.rank == 0 else None)
        if self.rank == 0:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            os.ftruncate(descriptor, size)
        group.wait()
        if self.rank != 0:
            descriptor = os.open(path, os.O_RDWR)
        memory = mmap.mmap(descriptor, size)
        os.close(descriptor)
        group.wait()
        if self.rank == 0:
            os.unlink(path)
        view = ctypes.c_char.from_buffer(memory)
        self._kept += [memory, view]
        return ctypes.addressof(view)

    def _gather_by(self, group: Group, capacity: int) -> dict[str, int | None]:
        places = torch.zeros(self.count, capacity)

        def gather(count: int) -> None:
            group.gather(places[:, :count])

        callback = _GATHER(gather)
        self._kept += [places, callback]
        return {"gather": ctypes.cast(callback, ctypes.c_void_p).value, "gathered": places.data_ptr()}
