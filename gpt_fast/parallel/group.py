"""The ranks of one model: torchrun starts them and says in the environment who is who."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Value = TypeVar("Value")

_FOREVER = timedelta(days=3650)  # a server may be idle for long; who waits for a rank that died is ended otherwise


class Group:
    """This process is ``rank`` of ``count``."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count
        dist.init_process_group("gloo", rank=rank, world_size=count, timeout=_FOREVER)

    @classmethod
    def from_environment(cls) -> Group | None:
        """As torchrun says; None outside of it, or for one process."""
        count = int(os.environ.get("WORLD_SIZE", "1"))
        return cls(int(os.environ["RANK"]), count) if count > 1 else None

    def say(self, value: Value | None) -> Value:
        """What rank 0 says, in every rank."""
        said: list[Value | None] = [value]
        dist.broadcast_object_list(said, src=0)
        assert said[0] is not None
        return said[0]

    def wait(self) -> None:
        """Until all ranks are here."""
        dist.barrier()

    def gather(self, places: Tensor) -> None:
        """Fill the row of each rank in ``places`` [count, n] from its own."""
        rows = [torch.empty(places.shape[1:]) for _ in range(self.count)]
        dist.all_gather(rows, places[self.rank].contiguous())
        for row, found in zip(places, rows, strict=True):
            row.copy_(found)

    def greatest(self, numbers: Tensor) -> Tensor:
        """The greatest of all ranks' ``numbers``, one by one."""
        found = numbers.clone()
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found

    def close(self) -> None:
        dist.destroy_process_group()
