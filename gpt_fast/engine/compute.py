"""The numbers of one step: logits, tokens and log probabilities. No request changes here, so a step that fails can be
tried again with fewer requests, until only the one that makes it fail is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from gpt_fast.engine.request import Request
from gpt_fast.engine.runner import Runner
from gpt_fast.engine.sampling import NO_TOKEN, SamplingRow, draw_of, logprobs, only_drawn, sample
from gpt_fast.engine.scheduler import SequencePlan, StepPlan
from gpt_fast.engine.tensors import tensor_of
from gpt_fast.engine.text import TextStream
from gpt_fast.errors import RequestError
from gpt_fast.kernels.race import Draw
from gpt_fast.outputs import TokenLogprobs
from gpt_fast.params import SamplingParams
from gpt_fast.tokenizer import IncrementalDetokenizer

Item = TypeVar("Item")
Result = TypeVar("Result")


class Scheduled(NamedTuple):
    """A request and what this step computes of it."""

    request: Request
    plan: SequencePlan


class Computed(NamedTuple):
    """A request, what this step computed of it, and the model's answer."""

    request: Request
    plan: SequencePlan
    logits: Tensor  # [plan.num_logits, V]

    @property
    def num_drafts(self) -> int:
        """How many of the plan's tokens the request does not have yet; negative while its prompt goes on."""
        return self.plan.end - self.request.num_tokens

    @property
    def drafts(self) -> tuple[int, ...]:
        return self.plan.tokens[len(self.plan.tokens) - self.num_drafts :] if self.num_drafts > 0 else ()


class Outcome(NamedTuple):
    """What a step found for one request: no token while its prompt goes on, several where drafts were right."""

    kept: int  # tokens of the plan that stay in the cache: all but the drafts that were wrong
    prompt_logprobs: list[TokenLogprobs]  # of the next prompt tokens in order
    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()  # one for each of the tokens, where they were asked for


def draws_of(parts: Sequence[Scheduled]) -> list[Draw] | None:
    """How the token of each part is drawn. None where one makes none, or the host has a part in it: a grammar,
    penalties, log probabilities."""
    rows = [sampling_row(request, (), None) for request, own in parts if _only_samples(request, own)]
    return [draw_of(row) for row in rows] if len(rows) == len(parts) and all(map(only_drawn, rows)) else None


def _only_samples(request: Request, own: SequencePlan) -> bool:
    """Whether the step makes one token of ``request``, and nothing but sampling parameters say which."""
    p = request.params
    asked = p.logprobs is not None or p.prompt_logprobs is not None
    plain = request.grammar is None and request.rules is None and not asked
    return plain and own.num_logits == 1 and own.end == request.num_tokens


def drawn(parts: Sequence[Scheduled], tokens: Sequence[int]) -> list[Outcome] | None:
    """What a step found that drew ``tokens``, one for each part. None where one could not be drawn: whoever computes
    the step again finds out why."""
    if NO_TOKEN in tokens:
        return None
    return [Outcome(len(own.tokens), [], [token]) for (_, own), token in zip(parts, tokens, strict=True)]


def execute(runner: Runner, parts: Sequence[Scheduled]) -> list[Computed]:
    """Run the model over one step."""
    logits = runner.execute(StepPlan(tuple(plan for _, plan in parts)))
    rows = logits.split([plan.num_logits for _, plan in parts])
    return [Computed(*part, own) for part, own in zip(parts, rows, strict=True)]


def sample_tokens(parts: Sequence[Computed]) -> list[Outcome | Exception]:
    """The next tokens of each part, or its own fault (a grammar, logits that are not finite). The token behind each
    draft is sampled as if the draft were right, and the tokens behind the first wrong draft are dropped: what is left
    equals sampling one token in each step. Raises what the work for all parts together raises."""
    rows = attempt(lambda some: [_rows(part) for part in some], parts)
    logits: list[Tensor] = []
    sampling: list[SamplingRow] = []
    for part, own in zip(parts, rows, strict=True):
        if own and not isinstance(own, Exception):
            first = part.plan.num_logits - part.num_drafts - 1  # the row that predicts the first new token
            whole = len(own) == part.plan.num_logits
            logits.append(part.logits if whole else part.logits[first : first + len(own)])
            sampling += own
    found = iter(_sample(logits[0] if len(logits) == 1 else torch.cat(logits), sampling) if sampling else [])
    return [
        own if isinstance(own, Exception) else _outcome(part, [next(found) for _ in own])
        for part, own in zip(parts, rows, strict=True)
    ]


def _outcome(part: Computed, found: Sequence[tuple[int, TokenLogprobs | None]]) -> Outcome | Exception:
    """Of the tokens ``found`` behind the known ones and behind each draft, those up to the first wrong draft."""
    prompt_logprobs, num_known = _prompt_logprobs(part), len(part.plan.tokens) - len(part.drafts)
    if not found:
        return Outcome(num_known, prompt_logprobs)
    if found[0][0] == NO_TOKEN:
        return _no_token(part.request, part.logits[-part.num_drafts - 1])
    count = 1
    while count < len(found) and found[count - 1][0] == part.drafts[count - 1] and found[count][0] != NO_TOKEN:
        count += 1
    entries = [entry for _, entry in found[:count] if entry is not None]
    return Outcome(num_known + count - 1, prompt_logprobs, [token for token, _ in found[:count]], entries)


def _sample(logits: Tensor, sampling: Sequence[SamplingRow]) -> list[tuple[int, TokenLogprobs | None]]:
    """The token of each row of ``logits`` [R, V], and its log probabilities where they were asked for."""
    tokens: list[int] = sample(logits, sampling).tolist()
    wanting = [i for i, row in enumerate(sampling) if row.params.logprobs is not None and tokens[i] != NO_TOKEN]
    if not wanting:
        return [(token, None) for token in tokens]
    rows = logits[tensor_of(wanting, torch.int64, logits.device)]
    found = logprobs(rows, [tokens[i] for i in wanting], [sampling[i].params.logprobs or 0 for i in wanting])
    entries = dict(zip(wanting, found, strict=True))
    return [(token, entries.get(i)) for i, token in enumerate(tokens)]


def _prompt_logprobs(part: Computed) -> list[TokenLogprobs]:
    """Of the prompt tokens that this step predicts; after a preemption, without those that are known already."""
    request, num_top = part.request, part.request.params.prompt_logprobs
    if num_top is None:
        return []
    first = part.plan.end - part.plan.num_logits + 1  # the position that the first row of the logits predicts
    positions = range(max(first, len(request.prompt_logprobs)), min(part.plan.end + 1, request.num_prompt))
    if not positions:
        return []
    rows = part.logits[positions.start - first : positions.stop - first]
    return logprobs(rows, request.token_ids[positions.start : positions.stop], [num_top] * len(positions))


def _rows(part: Computed) -> list[SamplingRow]:
    """How the next token is sampled, and then the one behind each draft; nothing while the prompt goes on."""
    if part.num_drafts < 0:
        return []
    request, drafts = part.request, part.drafts
    masks = request.grammar.along(drafts) if request.grammar is not None else [None] * (len(drafts) + 1)
    return [sampling_row(request, drafts[:i], allowed) for i, allowed in enumerate(masks)]


def sampling_row(request: Request, drafts: tuple[int, ...], allowed: Tensor | None) -> SamplingRow:
    """How the token behind ``drafts`` is sampled if they are right. ``allowed``: [V] bool, by the request's grammar."""
    if request.rules is not None:
        tail = max(request.num_prompt, request.num_tokens - request.rules.num_read)
        allowed = request.rules.mask([*request.token_ids[tail:], *drafts], allowed)
    token_ids = [*request.token_ids, *drafts] if drafts and request.params.penalised else request.token_ids
    position = request.num_tokens + len(drafts)
    return SamplingRow(request.params, request.seed, position, token_ids, request.num_prompt, request.end_ids, allowed)


def _no_token(request: Request, logits: Tensor) -> RequestError:
    """Why no token could be drawn from ``logits`` [V]."""
    if bool(logits.isfinite().all()) and request.rules is not None:
        return request.rules.contradiction()
    if bool(logits.isfinite().all()):
        message = "min_tokens forbids the tokens that may end the answer, and no other may follow here"
        return RequestError(message, "min_tokens", "contradiction")
    message = "the model computed numbers that are not finite: its weights are damaged, or its dtype is too narrow"
    return RequestError(message, None, "model_error", 500)


def attempt(
    work: Callable[[Sequence[Item]], Sequence[Result | Exception]], items: Sequence[Item | Exception]
) -> list[Result | Exception]:
    """The result of ``work`` for each item; an item that is an exception already is its own result. Where ``work``
    raises, it is done again for each half, down to single items. The result of an item that fails alone is its
    exception; the other items lose nothing."""
    sound = [item for item in items if not isinstance(item, Exception)]
    try:
        results = iter(work(sound) if sound else [])
    except Exception as error:
        middle = len(sound) // 2
        results = iter([error] if not middle else attempt(work, sound[:middle]) + attempt(work, sound[middle:]))
    return [item if isinstance(item, Exception) else next(results) for item in items]


def probe(runner: Runner, slot: int, rows: int = 1) -> None:
    """Compute a token and rows - 1 drafts that nobody needs, in ``slot`` and page 0, and sample behind each. Raises if
    nothing works any more."""
    text, pages = TextStream(IncrementalDetokenizer(None)), (0,) * -(-rows // runner.page_size)
    request = Request("probe", [0], SamplingParams().resolved(), seed=0, max_tokens=1, end_ids=frozenset(), text=text)
    sample_tokens(execute(runner, [Scheduled(request, SequencePlan(slot, (0,) * rows, 0, 0, pages, rows, rows))]))
