"""What every wire protocol makes of one HTTP request, and how the answer is told. No torch, no HTTP here.

A job is one or more sequences to generate (several prompts, or several samples of one) and the words around them.
The server submits ``sequences`` to the engine, hands every delta back to :meth:`Job.delta` and sends what it returns;
native.py and openai.py are the two languages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from gpt_fast.errors import RequestError
from gpt_fast.outputs import Completion, Delta
from gpt_fast.params import SamplingParams


class Page(NamedTuple):
    """An answer that needs no model."""

    content_type: str
    body: str


@dataclass(frozen=True)
class SequenceRequest:
    """One sequence for the engine. ``prompt``: text, or token ids as they are."""

    prompt: str | list[int]
    params: SamplingParams


class Job(Protocol):
    """One HTTP request, understood."""

    @property
    def sequences(self) -> tuple[SequenceRequest, ...]:
        """What to generate; ``params.n`` > 1 stands for that many sequences in a row."""

    @property
    def stream(self) -> bool:
        """Whether the answer goes out piece by piece."""

    @property
    def content_type(self) -> str:
        """Of the answer, streamed or not."""

    def named(self, error: RequestError) -> RequestError:
        """``error`` of the engine about a sequence, its field named as the client wrote it."""

    def delta(self, index: int, delta: Delta) -> str:
        """What to send, streaming, when sequence ``index`` has something new (its last delta has the completion);
        empty to send nothing."""

    def end(self, completions: Sequence[Completion]) -> str:
        """What to send when all sequences have ended: streaming, the closing words; else the whole answer."""

    def broken(self, error: RequestError) -> str:
        """What to send, streaming, when the answer cannot go on after its status has been sent."""
