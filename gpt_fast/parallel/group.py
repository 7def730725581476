"""The ranks of one model: torchrun starts them and says in the environment who is who."""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gpt_fast.errors import ConfigError

log = logging.getLogger(__name__)

Value = TypeVar("Value")

_CPU = torch.device("cpu")
_PR_SET_PDEATHSIG = 1

_MESSAGE = 256  # numbers that one message holds; what is longer takes another
_FOREVER = timedelta(days=3650)  # a server may be idle for long; who waits for a rank that died is ended otherwise


def number_of_ranks() -> int:
    """How many processes torchrun started, on all machines; 1 outside of it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def ranks_here() -> int:
    """How many of them are on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", number_of_ranks()))


def device_of_rank(device: torch.device) -> torch.device:
    """``device``, or of the GPUs of this machine the one of this rank. Raises ConfigError where there are too few."""
    if device.type != "cuda" or number_of_ranks() == 1:
        return device
    found, asked = torch.cuda.device_count(), ranks_here()
    if asked > found:
        raise ConfigError(f"device: {asked} ranks on this machine need a GPU each, and torch sees {found}")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


class Group:
    """This process is ``rank`` of ``count``. ``device``: where it computes; messages are on CPUs in any case."""

    def __init__(self, rank: int, count: int, device: torch.device = _CPU) -> None:
        self.rank, self.count = rank, count
        where: dict[str, Any] = {"backend": "gloo"}
        if device.type == "cuda":
            torch.cuda.set_device(device)
            where = {"backend": "cpu:gloo,cuda:nccl", "device_id": device}
        dist.init_process_group(**where, rank=rank, world_size=count, timeout=_FOREVER)
        self._closing = False
        self._end_together()

    @classmethod
    def from_environment(cls, device: torch.device = _CPU) -> Group | None:
        """As torchrun says; None outside of it, or for one process."""
        return cls(int(os.environ["RANK"]), number_of_ranks(), device) if number_of_ranks() > 1 else None

    def say(self, value: Value | None) -> Value:
        """What rank 0 says, in every rank."""
        said: list[Value | None] = [value]
        dist.broadcast_object_list(said, src=0)
        assert said[0] is not None
        return said[0]

    def tell(self, numbers: Sequence[int]) -> None:
        """Rank 0 tells the others ``numbers``, which :meth:`hear` them."""
        message = torch.zeros(max(_MESSAGE, 1 + len(numbers)), dtype=torch.int64)
        message[: 1 + len(numbers)] = torch.tensor([len(numbers), *numbers])
        dist.broadcast(message[:_MESSAGE], src=0)
        if len(message) > _MESSAGE:
            dist.broadcast(message[_MESSAGE:], src=0)

    def hear(self) -> list[int]:
        """What rank 0 tells next."""
        message = torch.zeros(_MESSAGE, dtype=torch.int64)
        dist.broadcast(message, src=0)
        count = 1 + int(message[0])
        if count > _MESSAGE:
            rest = torch.zeros(count - _MESSAGE, dtype=torch.int64)
            dist.broadcast(rest, src=0)
            message = torch.cat((message, rest))
        return message[1:count].tolist()

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
        self._closing = True
        self.wait()
        dist.destroy_process_group()

    def _end_together(self) -> None:
        """From now on this process ends when the one that started it does, or another rank on this machine: what waits
        for a rank that is gone would wait for ever, and hold memory and ports."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        everyone: list[tuple[str, int]] = [("", 0)] * self.count
        dist.all_gather_object(everyone, (socket.gethostname(), os.getpid()))
        others = [pid for host, pid in everyone if host == socket.gethostname() and pid != os.getpid()]
        threading.Thread(target=self._watch, args=(others,), name="gpt-fast-ranks", daemon=True).start()

    def _watch(self, pids: Sequence[int]) -> None:
        watched = select.poll()
        number_of = {}
        for pid in pids:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._end(pid)
                return
            number_of[descriptor] = pid
            watched.register(descriptor, select.POLLIN)
        self._end(number_of[watched.poll()[0][0]])

    def _end(self, pid: int) -> None:
        if self._closing:
            return
        log.critical("rank %d ends, because process %d of the same model has ended", self.rank, pid)
        logging.shutdown()
        os._exit(1)
