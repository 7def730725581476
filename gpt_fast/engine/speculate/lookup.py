"""Drafts by looking up what followed the last tokens where they stood before in the same sequence.

A suffix automaton (Blumer et al. 1985) finds the longest ending of a sequence that occurred earlier, in constant time
for each token; SAM decoding (Hu et al. 2024, arXiv 2411.10666) drafts so. Nothing is shared between requests.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

from gpt_fast.engine.request import Request
from gpt_fast.engine.speculate.drafter import Wish

MIN_MATCH = 3  # tokens; shorter endings are followed by too many things
_BURST = 2048  # tokens taken in at once: a long prompt must not hold a step up
_REFRESHED = 4  # shorter endings whose latest place is kept up to date


class SuffixAutomaton:
    """All substrings of a sequence that grows. State 0 is the empty one."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]  # to the state of the longest ending that more places share
        self._length = [0]  # of a state's longest string
        self._place = [-1]  # index of the last token of a place where it occurs, a late one
        self._last = 0
        self.match_length = 0  # of the longest ending that occurred before
        self.match_place = -1  # index of the last token of that earlier place

    def extend(self, tokens: Iterable[int]) -> None:
        """Append ``tokens``."""
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        place, new = len(self.tokens), self._state({}, self._length[self._last] + 1, len(self.tokens))
        self.tokens.append(token)
        at = self._last
        while at >= 0 and token not in self._next[at]:
            self._next[at][token] = new
            at = self._link[at]
        self._link[new] = self._branch(at, token) if at >= 0 else 0
        self._last, at = new, self._link[new]
        self.match_length, self.match_place = self._length[at], self._place[at]
        for _ in range(_REFRESHED):
            if at > 0:
                self._place[at] = place
                at = self._link[at]

    def _branch(self, at: int, token: int) -> int:
        """The state of the string of ``at`` with ``token`` behind it, split off a longer one where needed."""
        found = self._next[at][token]
        if self._length[found] == self._length[at] + 1:
            return found
        copy = self._state(dict(self._next[found]), self._length[at] + 1, self._place[found])
        self._link[copy], self._link[found] = self._link[found], copy
        while at >= 0 and self._next[at].get(token) == found:
            self._next[at][token] = copy
            at = self._link[at]
        return copy

    def _state(self, following: dict[int, int], length: int, place: int) -> int:
        self._next.append(following)
        self._link.append(0)
        self._length.append(length)
        self._place.append(place)
        return len(self._length) - 1

    def guess(self, count: int) -> tuple[int, ...]:
        """``count`` tokens that followed the longest known ending; a repetition goes on repeating."""
        if self.match_length < MIN_MATCH:
            return ()
        begin, period = self.match_place + 1, len(self.tokens) - self.match_place - 1
        return tuple(self.tokens[begin + i % period] for i in range(count))


class LookupDrafter:
    """Takes the drafts of a request from the prompt and the answer of that request."""

    def __init__(self) -> None:
        self._automata: weakref.WeakKeyDictionary[Request, SuffixAutomaton] = weakref.WeakKeyDictionary()

    def draft(self, wishes: Sequence[Wish]) -> list[tuple[int, ...]]:
        """See ``Drafter``."""
        return [self._guess(request, count) for request, count in wishes]

    def _guess(self, request: Request, count: int) -> tuple[int, ...]:
        automaton = self._automata.setdefault(request, SuffixAutomaton())
        known = len(automaton.tokens)
        automaton.extend(request.token_ids[known : known + _BURST])
        return automaton.guess(count) if len(automaton.tokens) == request.num_tokens else ()

    def missing(self, request: Request) -> int:
        """See ``Drafter``."""
        return 0

    def measure(self, max_batch: int) -> None:
        """See ``Drafter``: a guess costs microseconds."""
