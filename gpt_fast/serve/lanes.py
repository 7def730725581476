"""Threads for what a request needs before and after the model: parsing, encoding, compiling its grammar, long answers.

The thread that talks to the server, and the engine's, wait for none of it: what takes long here releases Python's lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, NamedTuple

GIVE_BACK_S = 2.0  # between two times that memory is given back
_M_ARENA_MAX = -8  # <malloc.h>


class Lanes(NamedTuple):
    """Threads in which requests are understood. ``light``: one, in order of arrival, for what takes milliseconds."""

    light: Executor
    heavy: Executor

    @classmethod
    def start(cls) -> Lanes:
        _glibc("mallopt", _M_ARENA_MAX, 1)  # they share one heap: what one frees then serves the others
        return cls(ThreadPoolExecutor(1, "gpt-fast-light"), _Heavy(2, "gpt-fast-heavy"))


def _glibc(function: str, *args: int) -> None:
    """Call it where the C library is glibc, which keeps memory that has been freed unless it is told."""
    with contextlib.suppress(OSError, AttributeError):
        getattr(ctypes.CDLL(None), function)(*args)


class _Heavy(ThreadPoolExecutor):
    """Gives memory back now and then: large bodies and grammars leave their heaps in pieces."""

    _given_back = 0.0  # monotonic seconds

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if (now := time.monotonic()) > self._given_back + GIVE_BACK_S:
            self._given_back = now
            super().submit(_glibc, "malloc_trim", 0)
        return super().submit(fn, *args, **kwargs)
