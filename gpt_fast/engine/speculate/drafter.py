"""What a drafter is: anything that guesses the next tokens of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from gpt_fast.engine.request import Request
from gpt_fast.engine.speculate.times import DraftTimes


class Wish(NamedTuple):
    """At most ``most`` drafts for ``request``, which has one token to compute."""

    request: Request
    most: int


class Drafter(Protocol):
    """The engine's thread alone calls it."""

    def draft(self, wishes: Sequence[Wish]) -> list[tuple[int, ...]]:
        """The tokens that may follow each request's, in order; none where there is no guess. Between two steps."""
        ...

    def missing(self, request: Request) -> int:
        """Tokens that it would have to compute for ``request`` before the first draft."""
        return 0

    def measure(self) -> DraftTimes | None:
        """What drafts cost; None: next to nothing."""
        return None

    def end(self, request: Request) -> None:
        """``request`` has ended, or failed: nothing more is asked for it, and what is kept for it can go."""
        return
