"""Requests that wait for their turn. No torch here."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator

from gpt_fast.engine.request import Request


class Queue:
    """Those that ran before and gave their pages back come first, then the first to arrive of the groups that have the
    fewest running. A group is what was asked for together, so no request waits until all of another's many sequences
    have run. Which requests are one client's is not known here."""

    def __init__(self) -> None:
        self._preempted: deque[Request] = deque()
        self._groups: dict[str, deque[Request]] = {}  # those that never ran, in order of arrival; no group is empty
        # A heap of the first of each group by arrival, and of some that are no longer: thousands cost no search.
        self._heads: list[tuple[float, int, Request]] = []
        self._numbers = itertools.count()

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
        group = self._groups.setdefault(request.group, deque())
        group.append(request)
        if len(group) == 1:
            self._note_head(request)

    def put_back(self, request: Request) -> None:
        """Take in one that ran."""
        self._preempted.appendleft(request)

    def remove(self, request: Request) -> None:
        """Take ``request`` out, if it is there."""
        group: deque[Request] = self._groups.get(request.group, deque())
        if request in self._preempted:
            self._preempted.remove(request)
        elif request in group:
            was_head = group[0] is request
            group.remove(request)
            if not group:
                del self._groups[request.group]
            elif was_head:
                self._note_head(group[0])
            if len(self._heads) > 2 * len(self._groups):
                self._heads = [entry for entry in self._heads if self._is_head(entry[2])]
                heapq.heapify(self._heads)

    def _note_head(self, request: Request) -> None:
        heapq.heappush(self._heads, (request.arrival, next(self._numbers), request))

    def _is_head(self, request: Request) -> bool:
        group = self._groups.get(request.group)
        return group is not None and group[0] is request

    def next(self, running: Iterable[Request], among: Collection[Request] | None) -> Request | None:
        """Whose turn it is beside those that are ``running``; not that of one that is paused. ``among``: of these
        requests alone."""
        counts = Counter(request.group for request in running)

        def asked(requests: Iterable[Request]) -> Iterator[Request]:
            return (r for r in requests if not r.paused and (among is None or r in among))

        if again := [*asked(self._preempted)]:
            return min(again, key=lambda request: counts[request.group])
        if among is not None:
            heads = [head for group in self._groups.values() if (head := next(asked(group), None)) is not None]
            return min(heads, key=lambda request: (counts[request.group], request.arrival), default=None)
        return self._first_of_the_fewest(counts)

    def _first_of_the_fewest(self, counts: Counter[str]) -> Request | None:
        """The first to arrive of the groups with the fewest of ``counts``, which are those of a few groups."""
        busy = []
        while self._heads:
            head = self._heads[0][2]
            if self._is_head(head):
                if not counts[head.group]:
                    break
                busy.append(self._heads[0])
            heapq.heappop(self._heads)
        others = (request for _, _, request in self._heads[:1] or busy)
        found = min(others, key=lambda request: (counts[request.group], request.arrival), default=None)
        for entry in busy:
            heapq.heappush(self._heads, entry)
        return found
