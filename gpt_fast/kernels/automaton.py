"""A suffix automaton: what followed the last tokens of a sequence where they stood before, or in another sequence.

It knows all substrings of a sequence that grows, and finds the longest ending that occurred earlier in constant time
for each token, on average (Blumer et al. 1985). In C++ (``cpu/src/automaton.h``) a token takes about 60
bytes, and 0.1 us while all of it fits a core's cache (50,000 tokens), 0.8 us at ten times that; in Python 6 us and 500
bytes.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpt_fast.kernels.cpu.library import available, library

_PLAIN_BYTES = 500  # a token, in Python
_REFRESHED = 4  # shorter endings whose latest place is kept up to date


class Guess(NamedTuple):
    """What may come next."""

    length: int  # tokens of the longest known ending
    tokens: tuple[int, ...]  # that followed it


NOTHING = Guess(0, ())


class Automaton:
    """By C++. Token ids have 32 bits. Where memory for more tokens is refused it gives back all it has, and finds
    nothing from then on. Raises MemoryError where there is no memory to begin with."""

    def __init__(self) -> None:
        lib = library()
        self.num_tokens = 0
        self._handle = lib.gpt_fast_automaton()
        if not self._handle:
            raise MemoryError("no memory for a suffix automaton")
        weakref.finalize(self, lib.gpt_fast_automaton_free, self._handle)

    def extend(self, tokens: Sequence[int], most: int = 0) -> Guess:
        """Append ``tokens``; returns the longest ending that occurred before and ``most`` tokens that followed it where
        it occurred last. A repetition goes on repeating."""
        self.num_tokens += len(tokens)
        return self._call(library().gpt_fast_automaton_extend, tokens, most)

    def find(self, tokens: Sequence[int], most: int) -> Guess:
        """The longest ending of another sequence ``tokens`` that occurs in this one, and up to ``most`` tokens that
        followed it, up to a negative one."""
        return self._call(library().gpt_fast_automaton_find, tokens, most)

    def _call(self, function: Callable[..., None], tokens: Sequence[int], most: int) -> Guess:
        given, found = array("i", tokens), array("i", bytes(4 * (2 + most)))
        function(self._handle, given.buffer_info()[0], len(given), found.buffer_info()[0], most)
        return Guess(found[0], tuple(found[2 : 2 + found[1]]))

    @property
    def num_bytes(self) -> int:
        """Memory that it holds."""
        return int(library().gpt_fast_automaton_bytes(self._handle))


class PlainAutomaton:
    """The twin in Python. State 0 is that of the empty string."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]  # to the state of the longest ending that more places share
        self._length = [0]  # of a state's longest string
        self._place = [-1]  # index of the last token of a place where it occurs, a late one
        self._last = 0
        self._match_length, self._match_place = 0, -1  # of the longest ending that occurred before

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int], most: int = 0) -> Guess:
        """See ``Automaton``."""
        for token in tokens:
            self._append(token)
        if not self._match_length:
            return NOTHING
        begin, period = self._match_place + 1, len(self._tokens) - self._match_place - 1
        return Guess(self._match_length, tuple(self._tokens[begin + i % period] for i in range(most)))

    def find(self, tokens: Sequence[int], most: int) -> Guess:
        """See ``Automaton``."""
        at = length = 0
        for token in tokens:
            while at and token not in self._next[at]:
                at = self._link[at]
                length = self._length[at]
            if token in self._next[at]:
                at, length = self._next[at][token], length + 1
        following = self._tokens[self._place[at] + 1 :][:most] if length else []
        ends = (i for i, token in enumerate(following) if token < 0)
        return Guess(length, tuple(following[: next(ends, most)]))

    @property
    def num_bytes(self) -> int:
        """About the memory that it holds."""
        return _PLAIN_BYTES * len(self._tokens)

    def _append(self, token: int) -> None:
        place, new = len(self._tokens), self._state({}, self._length[self._last] + 1, len(self._tokens))
        self._tokens.append(token)
        at = self._last
        while at >= 0 and token not in self._next[at]:
            self._next[at][token] = new
            at = self._link[at]
        self._link[new] = self._branch(at, token) if at >= 0 else 0
        self._last, at = new, self._link[new]
        self._match_length, self._match_place = self._length[at], self._place[at]
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


def automaton_class() -> type[Automaton] | type[PlainAutomaton]:
    """The one that runs here. The first call may compile the kernels for some seconds."""
    return Automaton if available() else PlainAutomaton
