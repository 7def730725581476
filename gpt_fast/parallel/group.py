"""The ranks of one model: torchrun starts them and says in the environment who is who."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gpt_fast.errors import ConfigError, RankError

log = logging.getLogger(__name__)

Value = TypeVar("Value")

_CPU = torch.device("cpu")
_PR_SET_PDEATHSIG = 1

_MESSAGE = 256  # numbers that one message holds; what is longer takes another
_FOREVER = timedelta(days=3650)  # a server may be idle for long; who waits for a rank that died is ended otherwise
_CONNECT_S = 30.0  # to torchrun, which listens before it starts ranks
_LAST_WORDS_S = 2.0
_BEAT_S, _SILENT_S = 1.0, 5.5  # how often ranks say that they are there, and when they are believed not to be


def number_of_ranks() -> int:
    """How many processes torchrun started, on all machines; 1 outside of it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def ranks_here() -> int:
    """How many of them are on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", number_of_ranks()))


def refuse_ranks(what: str) -> None:
    """Raises ConfigError where torchrun started several processes, for ``what`` one of them does alone."""
    if number_of_ranks() > 1:
        raise ConfigError(f"{what}: several ranks do not do this together; start one process")


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
        _end_with_parent()
        where: dict[str, Any] = {"backend": "gloo"}
        if device.type == "cuda":
            torch.cuda.set_device(device)
            where = {"backend": "cpu:gloo,cuda:nccl", "device_id": device}
        dist.init_process_group(**where, rank=rank, world_size=count, timeout=_FOREVER)
        self._closing, self._lost = threading.Event(), threading.Event()
        self.on_loss: Callable[[int], object] = lambda rank: None  # called with a rank that is lost, before the end
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

    def agree(self, what: str, value: str) -> None:
        """Raises ConfigError where ``value`` of ``what`` is another one than rank 0's."""
        said = self.say(value)
        if said != value:
            raise ConfigError(f"{what}: rank 0 has {said}, and rank {self.rank} has {value}; all ranks need the same")

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

    @property
    def closed(self) -> bool:
        return self._closing.is_set()

    def close(self) -> None:
        """Wait until all ranks close, and leave."""
        self.wait()
        self._rest()
        self.wait()  # the store is a rank's, and still asked until here
        dist.destroy_process_group()

    def _rest(self) -> None:
        """Watch no more. Threads that Python ends inside the store's C++ would abort the process."""
        self._closing.set()
        self._beating.join(2.0)

    def _end_together(self) -> None:
        """From now on this process ends when another rank does: what waits for a rank that is gone would wait for ever,
        and hold memory and ports."""
        everyone: list[tuple[str, int]] = [("", 0)] * self.count
        dist.all_gather_object(everyone, (socket.gethostname(), os.getpid()))
        here = [(rank, pid) for rank, (host, pid) in enumerate(everyone) if host == socket.gethostname()]
        self.place_here = [rank for rank, _ in here].index(self.rank), len(here)  # among the ranks on this machine
        watched = select.poll()
        rank_of = {}
        for rank, pid in here:
            if rank != self.rank:
                rank_of[descriptor := os.pidfd_open(pid)] = rank
                watched.register(descriptor, select.POLLIN)
        if self.rank == 0 and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._terminate)
        self._heard = [time.monotonic()] * self.count
        self._beating = threading.Thread(target=self._beat, name="gpt-fast-ranks-beat", daemon=True)
        watching = threading.Thread(target=self._watch, args=(watched, rank_of), name="gpt-fast-ranks", daemon=True)
        self._beating.start()
        watching.start()
        atexit.register(self._rest)

    def _watch(self, watched: select.poll, rank_of: Mapping[int, int]) -> None:
        """Ends this process when a rank on this machine has ended, or any rank or the store is silent."""
        while not (ended := watched.poll(_BEAT_S * 1000)):
            since = time.monotonic() - min(self._heard)
            if since > _SILENT_S:
                silent = self._heard.index(min(self._heard))
                return self._lose(silent, f"rank {silent}, or who keeps the ranks' store, is silent for {since:.0f} s")
        self._lose(rank := rank_of[ended[0][0]], f"rank {rank} has ended")

    def _beat(self) -> None:
        """Says again and again that this rank is there, and notes when the others said so."""
        counts = [0] * self.count
        try:
            store = dist.TCPStore(*_store(), is_master=False)  # type: ignore[attr-defined]
            while True:
                store.add(f"gpt-fast-beat-{self.rank}", 1)
                for rank, before in enumerate(counts):
                    counts[rank] = store.add(f"gpt-fast-beat-{rank}", 0)
                    if counts[rank] != before:
                        self._heard[rank] = time.monotonic()
                if self._closing.wait(_BEAT_S):
                    return
        except RuntimeError as why:
            self._lose(0, f"the ranks' store is gone: {why}")

    def _lose(self, rank: int, why: str) -> None:
        """End, because ``rank`` is lost. Rank 0 has a moment to say so to those who wait for answers."""
        if self._closing.is_set():
            return
        log.critical("rank %d of %d ends: %s", self.rank, self.count, why)
        self._lost.set()
        self.on_loss(rank)
        if self.rank == 0:
            time.sleep(_LAST_WORDS_S)
        logging.shutdown()
        os._exit(1)

    def _terminate(self, number: int, _: object) -> None:
        """torchrun ends all ranks when one has ended: then rank 0 speaks its last words first."""
        if not self._lost.wait(0.3):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _end_with_parent() -> None:
    """From now on this process ends when the one that started it does. Raises RankError where that was torchrun and has
    ended already: the other ranks would be waited for for ever."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun keeps the store
        try:
            socket.create_connection(_store(), _CONNECT_S).close()
        except OSError as why:
            raise RankError(f"torchrun has ended, or cannot be reached: {why}") from None


def _store() -> tuple[str, int]:
    """Where the ranks' store is."""
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
