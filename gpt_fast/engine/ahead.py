"""Steps that begin before the host knows the tokens of the step before them.

Between two steps a GPU waits for the host: for tokens to be fetched, texts to be put together, the next step to be
planned and launched. So do the cores of a CPU, while Python runs on one of them. A step whose tokens nothing but logits
and a seed decide needs none of it: the tokens go into the next step where they are, on the device or in another thread,
and the host deals with them meanwhile. If a request turns out to have ended, its row in the next step is thrown away.
Whatever else is due (a prompt, a grammar, penalties, log probabilities) waits for the host as ever. On a CPU, whose
steps are long, a step behind that has not started is left out when a request comes (``Runner.hold``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gpt_fast.engine.compute import Outcome, Scheduled, drawn, draws_of, sampling_row
from gpt_fast.engine.model import Drawing
from gpt_fast.engine.runner import Runner
from gpt_fast.engine.sampling import draw_of, draw_tokens
from gpt_fast.engine.scheduler import Scheduler, StepPlan
from gpt_fast.engine.tensors import Fetched, tensor_of
from gpt_fast.kernels.race import Draw


class Begun(NamedTuple):
    """A step that is being computed, and the tokens that were ``found``, one for each of ``parts``. On a GPU they are a
    copy of ``tokens`` [R] int64."""

    plan: StepPlan
    parts: Sequence[Scheduled]
    found: Fetched | Drawing
    tokens: Tensor | None = None

    def outcomes(self) -> list[Outcome] | None:
        """Waits for the tokens. None: see ``drawn``."""
        return drawn(self.parts, self.found.tolist())


def begin(runner: Runner, plan: StepPlan, parts: Sequence[Scheduled]) -> Begun | None:
    """Begin the step ``plan``; None where the host has a part in one of its tokens."""
    draws = draws_of(parts)
    if draws is None:
        return None
    drawing = runner.begin(plan, draws)
    if drawing is not None:
        return Begun(plan, parts, drawing)
    return _begun(plan, parts, runner.execute(plan), draws)


def begin_behind(runner: Runner, scheduler: Scheduler, before: Begun) -> Begun | None:
    """Begin the step behind ``before``, whose tokens the host does not know. None where something else is due."""
    following = scheduler.behind(before.parts)
    if following is None:
        return None
    plan, index = following
    parts = [Scheduled(before.parts[i].request, own) for i, own in zip(index, plan.sequences, strict=True)]
    rows = [sampling_row(part.request, (), None) for part in parts]
    draws = [draw_of(row._replace(position=row.position + 1)) for row in rows]
    try:
        if before.tokens is None:
            assert not isinstance(before.found, Fetched)
            drawing = runner.begin(plan, draws, before.found, index)
            assert drawing is not None
            return Begun(plan, parts, drawing)
        whole = len(index) == len(before.parts)
        tokens = before.tokens if whole else before.tokens[tensor_of(index, torch.int64, before.tokens.device)]
        return _begun(plan, parts, runner.execute(plan, tokens.clamp(min=0)), draws)
    except Exception:
        scheduler.take_back(parts)
        raise


def _begun(plan: StepPlan, parts: Sequence[Scheduled], logits: Tensor, draws: Sequence[Draw]) -> Begun:
    with torch.inference_mode():
        tokens = draw_tokens(logits, draws)
        return Begun(plan, parts, Fetched(tokens), tokens)
