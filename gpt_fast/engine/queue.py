"""Requests that wait for their turn. No torch here."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator

from gpt_fast.engine.request import Request


class Queue:
    """Those that ran before and gave their pages back come first, then the first to arrive of the groups that have the
    fewest running. So no client waits until all of another's many sequences have run."""

    def __init__(self) -> None:
        self._preempted: deque[Request] = deque()
        self._groups: dict[str, deque[Request]] = {}  # those that never ran, in order of arrival; no group is empty

    def __len__(self) -> int:
        return len(self._preempted) + self.num_new

    @property
    def num_new(self) -> int:
        """Those that never ran."""
        return sum(map(len, self._groups.values()))

    def __bool__(self) -> bool:
        return bool(self._preempted or self._groups)

    def __iter__(self) -> Iterator[Request]:
        yield from self._preempted
        for group in self._groups.values():
            yield from group

    def add(self, request: Request) -> None:
        self._groups.setdefault(request.group, deque()).append(request)

    def put_back(self, request: Request) -> None:
        """Take in one that ran."""
        self._preempted.appendleft(request)

    def remove(self, request: Request) -> None:
        """Take ``request`` out, if it is there."""
        group = self._groups.get(request.group, ())
        if request in self._preempted:
            self._preempted.remove(request)
        elif request in group:
            self._groups[request.group].remove(request)
            if not group:
                del self._groups[request.group]

    def next(self, running: Iterable[Request], among: Collection[Request] | None) -> Request | None:
        """Whose turn it is beside those that are ``running``; not that of one that is paused. ``among``: of these
        requests alone."""
        counts = Counter(request.group for request in running)

        def asked(requests: Iterable[Request]) -> Iterator[Request]:
            return (r for r in requests if not r.paused and (among is None or r in among))

        if again := [*asked(self._preempted)]:
            return min(again, key=lambda request: counts[request.group])
        heads = [head for group in self._groups.values() if (head := next(asked(group), None)) is not None]
        return min(heads, key=lambda request: (counts[request.group], request.arrival), default=None)
