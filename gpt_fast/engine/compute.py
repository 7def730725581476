"""The numbers of one step: logits, tokens and log probabilities. Nothing of a request changes here.

So a step that fails can be tried again with fewer requests, until only the one that makes it fail is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from torch import Tensor

from gpt_fast.engine.request import Request
from gpt_fast.engine.runner import Runner
from gpt_fast.engine.sampling import NO_TOKEN, SamplingRow, logprobs, sample
from gpt_fast.engine.scheduler import SequencePlan, StepPlan
from gpt_fast.engine.text import TextStream
from gpt_fast.errors import RequestError
from gpt_fast.outputs import TokenLogprobs
from gpt_fast.params import SamplingParams

Item = TypeVar("Item")
Result = TypeVar("Result")
Part = tuple[Request, SequencePlan]  # a request and what a step computes of it


class Outcome(NamedTuple):
    """What a step found for one request. ``token`` is None while its prompt is not computed to the end."""

    prompt_logprobs: list[TokenLogprobs]  # of the next prompt tokens in order
    token: int | None = None
    logprobs: TokenLogprobs | None = None


def compute(runner: Runner, parts: Sequence[Part]) -> list[Outcome | Exception]:
    """Run one step; gives each part its outcome, or the fault that is its own (a grammar, logits that are no numbers).

    Raises what the work for all parts together raises.
    """
    logits = runner.execute(StepPlan(tuple(sequence for _, sequence in parts)))
    outcomes: list[Outcome | Exception] = []
    due: list[int] = []  # the parts whose next token can be sampled
    rows: list[int] = []  # the row of logits of each
    sampling: list[SamplingRow] = []
    first = 0
    for i, (request, sequence) in enumerate(parts):
        last = first + sequence.num_logits
        outcomes.append(Outcome(_prompt_logprobs(request, sequence, logits[first:last])))
        if sequence.num_logits and sequence.start + len(sequence.tokens) == request.num_tokens:
            try:
                sampling.append(_row(request))
            except Exception as error:
                outcomes[i] = error
            else:
                due.append(i)
                rows.append(last - 1)
        first = last
    if due:
        chosen = logits if len(rows) == len(logits) else logits[rows]
        found = _sample(chosen, sampling)
        for i, row, (token, entry) in zip(due, rows, found, strict=True):
            known = outcomes[i]
            assert isinstance(known, Outcome)
            outcomes[i] = _no_token(logits[row]) if token == NO_TOKEN else known._replace(token=token, logprobs=entry)
    return outcomes


def _sample(logits: Tensor, sampling: Sequence[SamplingRow]) -> list[tuple[int, TokenLogprobs | None]]:
    """The token of each row of ``logits`` [R, V], and its log probabilities where they were asked for."""
    tokens: list[int] = sample(logits, sampling).tolist()
    entries: list[TokenLogprobs | None] = [None] * len(tokens)
    wanting = [i for i, row in enumerate(sampling) if row.params.logprobs is not None and tokens[i] != NO_TOKEN]
    if wanting:
        num_top = [sampling[i].params.logprobs or 0 for i in wanting]
        for i, entry in zip(wanting, logprobs(logits[wanting], [tokens[i] for i in wanting], num_top), strict=True):
            entries[i] = entry
    return list(zip(tokens, entries, strict=True))


def _prompt_logprobs(request: Request, sequence: SequencePlan, logits: Tensor) -> list[TokenLogprobs]:
    """Of the prompt tokens that ``logits`` [sequence.num_logits, V] predict and that are not known yet.

    Row j predicts the token at position ``start + 1 + j``. After a preemption some are known from before.
    """
    num_top = request.params.prompt_logprobs
    if num_top is None:
        return []
    begin = max(sequence.start + 1, len(request.prompt_logprobs))
    end = min(sequence.start + 1 + sequence.num_logits, request.num_prompt)
    if begin >= end:
        return []
    rows = logits[begin - sequence.start - 1 : end - sequence.start - 1]
    return logprobs(rows, request.token_ids[begin:end], [num_top] * (end - begin))


def _row(request: Request) -> SamplingRow:
    return SamplingRow(
        request.params,
        request.seed,
        request.num_tokens,
        request.token_ids,
        request.num_prompt,
        request.end_ids,
        None if request.grammar is None else request.grammar.allowed(),
    )


def _no_token(logits: Tensor) -> RequestError:
    """Why no token could be drawn from ``logits`` [V]."""
    if bool(logits.isfinite().all()):
        message = "min_tokens forbids the tokens that may end the answer, and no other may follow here"
        return RequestError(message, "min_tokens", "contradiction")
    message = "the model computed numbers that are not finite: its weights are damaged, or its dtype is too narrow"
    return RequestError(message, None, "model_error", 500)


def in_halves(work: Callable[[Sequence[Item]], list[Result]], items: Sequence[Item]) -> list[Result | Exception]:
    """``work(items)``, one result for each item. Where that raises, each half by itself, down to single items.

    An item that fails alone has its exception for a result, so that one bad item costs the others some repeated work
    and nothing else.
    """
    try:
        return list(work(items))
    except Exception as error:
        if len(items) == 1:
            return [error]
        middle = len(items) // 2
        return in_halves(work, items[:middle]) + in_halves(work, items[middle:])


def probe(runner: Runner) -> None:
    """Compute and sample one token in the page that belongs to nobody. Raises what ends an engine: nothing works."""
    request = Request(
        id="probe",
        token_ids=[0],
        params=SamplingParams().resolved(),
        seed=0,
        max_tokens=1,
        end_ids=frozenset(),
        text=TextStream(_NoText()),
    )
    compute(runner, [(request, SequencePlan((0,), 0, (0,), 1, 1))])


class _NoText:
    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""
