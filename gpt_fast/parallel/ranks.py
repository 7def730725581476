"""What ranks show each other inside a step: in the C++ program by memory that they share, or by a collective of torch;
in plain torch see collectives.py."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from array import array
from collections.abc import Sequence
from ctypes import Structure

import torch

from gpt_fast.errors import RankError
from gpt_fast.kernels.cpu import structs
from gpt_fast.kernels.cpu.library import available, library
from gpt_fast.parallel import collectives
from gpt_fast.parallel.group import Group, ranks_here

log = logging.getLogger(__name__)

_ANNOUNCED = 64  # bytes, as kAnnounced of ranks.h
_GATHER = ctypes.CFUNCTYPE(None, ctypes.c_int64)


_MOST = 64  # that add up in shared memory: kMostRanks of kernels/cpu/src/ranks.h


class Ranks:
    """``rank`` of ``count``. ``capacity``: floats that each rank shows at a time; more go one after the other."""

    sum = staticmethod(collectives.sum_of_ranks)
    side_by_side = staticmethod(collectives.side_by_side)

    def __init__(self, group: Group, capacity: int = 2**18, *, shared: bool = True) -> None:
        if shared and group.count > _MOST:
            raise RankError(f"{group.count} ranks on one machine; at most {_MOST} can share its memory")
        self.rank, self.count = group.rank, group.count
        self._group, self._shared, self._most = group, shared, capacity // 2 - 1
        self._kept: list[object] = []
        where = {"memory": self._share(group, capacity)} if shared else self._gather_by(group, capacity)
        self.struct: Structure = structs.Ranks(rank=self.rank, count=self.count, capacity=capacity, missing=-1, **where)
        group.on_loss = self.lose

    @classmethod
    def of(cls, group: Group | None) -> Ranks | None:
        """The ranks of ``group``, which share memory where they are on one machine; None for one process."""
        return None if group is None else cls(group, shared=available() and group.count == ranks_here())

    def tell(self, numbers: Sequence[int]) -> None:
        """Rank 0 tells the others ``numbers``, which :meth:`hear` them."""
        if not self._shared:
            return self._group.tell(numbers)
        if len(numbers) > self._most:
            raise RankError(f"a step of {len(numbers)} numbers, more than the {self._most} that ranks tell each other")
        told = array("q", numbers)
        library().gpt_fast_tell(ctypes.byref(self.struct), structs.address(told), len(told))

    def hear(self) -> list[int]:
        """What rank 0 tells next; waits for it."""
        if not self._shared:
            return self._group.hear()
        found = library().gpt_fast_hear(ctypes.byref(self.struct))
        return [int(n) for n in found[1 : 1 + found[0]]]

    def lose(self, rank: int) -> None:
        """Wait for no rank any more, because ``rank`` is lost."""
        self.struct.missing = rank

    def check(self) -> None:
        """Raises RankError where another rank has not taken part in a step."""
        if self.struct.missing >= 0:
            raise RankError(f"rank {self.struct.missing} of {self.count} is lost")

    def _share(self, group: Group, capacity: int) -> int:
        """The address of memory that all ranks see. It has no name, so nothing is left of it however they end."""
        size = self.count * _ANNOUNCED + 2 * self.count * capacity * 4
        descriptor = os.memfd_create("gpt-fast-ranks") if self.rank == 0 else -1
        path = group.say(f"/proc/{os.getpid()}/fd/{descriptor}" if self.rank == 0 else None)
        if self.rank == 0:
            os.posix_fallocate(descriptor, 0, size)  # an error here, and not a crash when it is used
        else:
            descriptor = os.open(path, os.O_RDWR)
        group.wait()
        memory = mmap.mmap(descriptor, size)
        os.close(descriptor)
        view = ctypes.c_char.from_buffer(memory)
        self._kept += [memory, view]
        return ctypes.addressof(view)

    def _gather_by(self, group: Group, capacity: int) -> dict[str, int | None]:
        places = torch.zeros(self.count, capacity)

        def gather(count: int) -> None:
            try:
                group.gather(places[:, :count])
            except RuntimeError as why:  # nobody above this C++ frame would see it
                log.error("%s", why)
                self.lose((self.rank + 1) % self.count)

        callback = _GATHER(gather)
        self._kept += [places, callback]
        return {"gather": ctypes.cast(callback, ctypes.c_void_p).value, "gathered": places.data_ptr()}
