"""``gpt-fast generate --verbose`` with drafts: each token in the colour of where it comes from, and at the end what the
drafts brought and cost."""

from __future__ import annotations

import dataclasses
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING, get_args

from gpt_fast.bench.drafting import BreakEven, StepLog, Tally, break_even, plain_step_s, speculating
from gpt_fast.outputs import Completion, Delta, Origin
from gpt_fast.params import SamplingParams
from gpt_fast.tokenizer import IncrementalDetokenizer

if TYPE_CHECKING:
    from gpt_fast.engine.speculate.speculation import Speculation
    from gpt_fast.llm import LLM

# Name and number of each colour (ECMA-48). Readers who do not tell red from green tell these apart.
_COLOURS: dict[Origin, tuple[str, int]] = {
    "accepted": ("green", 32),
    "corrected": ("magenta", 35),
    "bonus": ("cyan", 36),
}
_MEANINGS: dict[Origin, str] = {
    "accepted": "a right draft",
    "corrected": "in the place of the first wrong draft",
    "bonus": "behind drafts that were all right",
    "plain": "without drafts",
}
_ENOUGH_STEPS = 8  # for a mean
_PLAIN_TOKENS = 17  # the first of them comes from the prompt's step


def shows_colours(stream: IO[str]) -> bool:
    """Whether ``stream`` is a terminal whose user wants colours (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def legend(coloured: bool) -> str:
    """Which colour means what, in one line."""
    parts = []
    for origin, meaning in _MEANINGS.items():
        name, _ = _COLOURS.get(origin, ("no colour", 0))
        parts.append(f"{_coloured(origin, origin) if coloured else origin} ({name}): {meaning}")
    return "; ".join(parts)


def _coloured(text: str, origin: Origin) -> str:
    return f"\x1b[{_COLOURS[origin][1]}m{text}\x1b[0m" if text and origin in _COLOURS else text


class Painter:
    """Colours the text of one completion piece by piece. A character has the colour of the token that completes it."""

    def __init__(self, detokenizer: IncrementalDetokenizer) -> None:
        self._detokenizer = detokenizer
        self._ahead: deque[tuple[Origin, int]] = deque()  # characters to come: deltas withhold some

    def paint(self, delta: Delta) -> str:
        """The text of ``delta``, with colours and otherwise the same."""
        for token, origin in zip(delta.token_ids, delta.origins, strict=True):
            self._ahead.append((origin, len(self._detokenizer.push(token))))
        painted, text = "", delta.text
        while text and self._ahead:
            origin, length = self._ahead.popleft()
            painted += _coloured(text[:length], origin)
            if length > len(text):
                self._ahead.appendleft((origin, length - len(text)))
            text = text[length:]
        return painted + text  # an unfinished character at the end belongs to no token


class OriginReport:
    """Counts and times what ``llm``, which has a drafter, does from now on. ``coloured``: whether text gets colours."""

    def __init__(self, llm: LLM, speculation: Speculation, coloured: bool) -> None:
        self._llm, self._speculation, self._coloured = llm, speculation, coloured
        self._times, self._tally = StepLog(llm.engine), Tally()
        self._latest: tuple[list[int], SamplingParams]  # tokens up to the middle of the latest answer, how it was drawn

    def painter(self, prompt: str | Sequence[int]) -> Callable[[Delta], str]:
        """What makes text of the deltas of ``prompt``'s completion, with colours or as it is."""
        if not self._coloured:
            return lambda delta: delta.text
        return Painter(IncrementalDetokenizer(self._llm.tokenizer, self._llm.encode(prompt))).paint

    def add(self, prompt: str | Sequence[int], params: SamplingParams, done: Completion) -> None:
        """Count the completion of ``prompt``."""
        self._tally.add(done)
        self._latest = [*self._llm.encode(prompt), *done.token_ids[: len(done.token_ids) // 2]], params

    def lines(self) -> list[str]:
        """The totals, for people. May run a few steps without drafts, for their time."""
        tally, counts = self._tally, self._speculation.counts
        num_tokens = sum(tally.origins.values())
        if not num_tokens:
            return []
        names: tuple[Origin, ...] = get_args(Origin)
        by_origin = [f"{tally.origins[o]} {o} ({tally.origins[o] / num_tokens:.0%})" for o in names if tally.origins[o]]
        lines = [f"tokens: {num_tokens}, of them {', '.join(by_origin)}"]
        if tally.acceptance is None:
            return [*lines, "drafts: none"]
        pairs = zip(counts.accepted_per_position, counts.drafted_per_position, strict=True)
        positions = ", ".join(f"{accepted / drafted:.0%}" for accepted, drafted in pairs)
        right = f"{tally.num_drafted} verified, {tally.num_accepted} right ({tally.acceptance:.0%})"
        lines.append(f"drafts: {right}; by position {positions}")
        if tally.tokens_per_step is not None:
            lines.append(
                f"mean accepted length: {tally.tokens_per_step:.2f} tokens for each step of the target "
                f"({tally.num_tokens} tokens behind the first in {tally.num_steps} steps)"
            )
        found = break_even(self._times.steps, tally.acceptance, self._plain_step_s(), batch_size=1)
        return lines + (_break_even_lines(found) if found is not None else [])

    def _plain_step_s(self) -> float | None:
        """Seconds of a step without drafts: from the run, or if it had too few of them, of a few more tokens."""
        steps = list(self._times.steps)
        if sum(not step.num_drafts for step in steps) < _ENOUGH_STEPS:
            measured, (prompt, params) = StepLog(self._llm.engine), self._latest
            params = dataclasses.replace(params, max_tokens=_PLAIN_TOKENS, ignore_eos=True, stop=())
            with speculating(self._speculation, most=0):
                self._llm.generate(prompt, params)
            steps += measured.steps
        return plain_step_s(steps, batch_size=1)


def _break_even_lines(found: BreakEven) -> list[str]:
    draft, verify, plain = (f"{1e3 * s:.3f} ms" for s in (found.draft_s, found.verify_s, found.plain_s))
    gain, needed = found.speedup, found.accepted_needed
    return [
        f"times: one draft {draft}, the step that verifies {found.drafts:.1f} drafts {verify}, a plain step {plain}",
        "break-even: speculation pays when (accepted + 1) x plain step > k x draft step + verification step",
        f"  ({found.accepted:.2f} + 1) x {plain} = {1e3 * found.plain_side_s:.3f} ms",
        f"  {found.drafts:.1f} x {draft} + {verify} = {1e3 * found.draft_side_s:.3f} ms",
        f"  it {'pays' if gain > 1 else 'loses'}: {gain:.2f} times the tokens of plain steps in the same time; "
        f"from {needed:.2f} accepted drafts a step on it pays",
    ]
