"""Drafts by looking up what followed the last tokens where they stood before: in the same sequence, or, where that is
asked for, in answers to earlier requests.

SAM decoding (Hu et al. 2024, arXiv 2411.10666) drafts so, by a suffix automaton (kernels/automaton.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from gpt_fast.engine.request import Request
from gpt_fast.engine.speculate.drafter import Drafter, Wish
from gpt_fast.kernels.automaton import NOTHING, Automaton, Guess, PlainAutomaton, automaton_class

_BURST = 2048  # tokens taken in at once: a long text must not hold a step up
_ENDING = 16  # tokens that are looked up in other answers
_SEPARATOR = -1  # between answers; no token


class LookupDrafter(Drafter):
    """Takes the drafts of a request from its own prompt and answer, and from the last ``history`` tokens of finished
    answers where they know a longer ending. Other prompts are not remembered: what an answer copies from a prompt, it
    copies from its own.

    An ending of n tokens that is known gives n - 1 drafts at most: the longer it is, the surer is what followed it."""

    def __init__(self, history: int = 0) -> None:
        self._new = automaton_class()
        self._automata: dict[Request, Automaton | PlainAutomaton] = {}
        self._history = History(history) if history else None

    def draft(self, wishes: Sequence[Wish]) -> list[tuple[int, ...]]:
        """See ``Drafter``."""
        if self._history is not None:
            self._history.take_in()
        return [self._guess(request, most) for request, most in wishes]

    def end(self, request: Request) -> None:
        """See ``Drafter``."""
        self._automata.pop(request, None)
        if self._history is not None:
            self._history.add(request.token_ids[request.num_prompt :])

    @property
    def num_bytes(self) -> int:
        """Memory that the automata hold."""
        own = sum(automaton.num_bytes for automaton in self._automata.values())
        return own + (self._history.num_bytes if self._history is not None else 0)

    def _guess(self, request: Request, most: int) -> tuple[int, ...]:
        automaton = self._automata.get(request)
        if automaton is None:
            automaton = self._automata[request] = self._new()
        known = automaton.num_tokens
        best = automaton.extend(request.token_ids[known : known + _BURST], most)
        if automaton.num_tokens < request.num_tokens:
            best = NOTHING
        if self._history is not None and best.length < _ENDING:
            found = self._history.find(request.token_ids[-_ENDING:], most)
            best = found if found.length > best.length else best
        return best.tokens[: max(0, best.length - 1)]


class History:
    """The last answers, at most ``num_tokens`` tokens: two automata of half of that, of which the older one is dropped
    when the newer one is full."""

    def __init__(self, num_tokens: int) -> None:
        self._half = num_tokens // 2
        self._new = automaton_class()
        self._newer, self._older = self._new(), self._new()
        self._coming: list[int] = []  # not taken in yet

    def add(self, answer: Sequence[int]) -> None:
        """Remember ``answer``, or its beginning where more comes in at once than can be remembered."""
        room = self._half - len(self._coming) - 1
        if answer and room > 0:
            self._coming += [*answer[:room], _SEPARATOR]

    def take_in(self) -> None:
        """Make some of what was added findable."""
        if not self._coming:
            return
        if self._newer.num_tokens == self._half:
            self._newer, self._older = self._new(), self._newer
        count = min(_BURST, self._half - self._newer.num_tokens)
        self._newer.extend(self._coming[:count])
        del self._coming[:count]

    def find(self, ending: Sequence[int], most: int) -> Guess:
        """What followed the longest of the endings of ``ending`` that an answer has; of equal ones the later one."""
        newer, older = self._newer.find(ending, most), self._older.find(ending, most)
        return older if older.length > newer.length else newer

    @property
    def num_bytes(self) -> int:
        """Memory that the automata hold."""
        return self._newer.num_bytes + self._older.num_bytes
