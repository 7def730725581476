"""Speculative sampling as two papers published it, and the engine's own rule in the same plain form, to compare them.

A draft model guesses some tokens. The target computes its distributions behind all of them in one call. A rule decides
how many of the guesses stay, and draws one more token. Here p is the target's distribution and q the draft model's.

- ``leviathan``: Leviathan et al. 2022, arXiv 2211.17192, algorithm 1 (their gamma is our number of drafts).
- ``chen``: Chen et al. 2023, arXiv 2302.01318, algorithm 2 (their K; they call the target q and the draft p).
- ``coupled``: the rule of this engine. Both models draw with the same noise, and equal tokens stay (kernels/race.py).

The two papers found the same rule at the same time: keep a guess x with probability min(1, p(x) / q(x)); in the place
of the first guess that is not kept draw from max(0, p - q), normalised; behind guesses that were all kept draw from p.
They write it differently, and the code follows each: Leviathan draws all random numbers, finds the first rejection and
then draws from one adjusted distribution; Chen goes from guess to guess and leaves the loop at the first rejection. So
one seed gives two different answers, which have the same distribution.

``coupled`` promises more, and keeps fewer guesses. It gives the token that the target draws without guesses, for every
seed. The papers' rule keeps the distribution and not the single draw: with another draft model the answer of a seed is
another one. It keeps 1 - TV = sum of min(p, q) of the guesses, where TV is the total variation distance of p and q
(Leviathan, theorem 3.5), and two draws from p and q cannot agree more often. ``coupled`` keeps at least
(1 - TV) / (1 + TV) (Daliri et al. 2024, arXiv 2408.07978).

As published, nothing is cached: each call of a model computes the whole sequence. This is for comparison, not for use.
R independent sequences of the same length T go through one step together; V is the vocabulary, K the number of guesses.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast.engine.request import Request
from gpt_fast.engine.sampling import SamplingRow, draw_of, narrowed
from gpt_fast.errors import RequestError
from gpt_fast.kernels.race import race, race_key
from gpt_fast.params import SamplingParams

Forward = Callable[[Tensor], Tensor]  # whole sequences [R, T] int64 -> logits [R, T, V]

_SUPPORTED = frozenset(  # fields of SamplingParams
    ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos")
)


class Verdict(NamedTuple):
    """Of one step: how many guesses of each sequence are kept, and the token behind them; both [R] int64."""

    num_accepted: Tensor
    token: Tensor


class Rule(Protocol):
    """``scores`` are what ``distribution`` returns: their softmax is what a token is drawn from."""

    def draft(self, scores: Tensor, position: int) -> Tensor:
        """A guess for each sequence, [R] int64, at index ``position``. ``scores`` [R, V]: the draft model's there."""

    def verify(self, target: Tensor, draft: Tensor, drafts: Tensor, position: int) -> Verdict:
        """Which of the guesses ``drafts`` [R, K] stay, the first of them at index ``position``. ``draft`` [R, K, V]:
        the scores that they were drawn from. ``target`` [R, K + 1, V]: the target's at their places and behind."""


class Rejection:
    """What the papers have in common: guesses have their own noise, independent of the noise that judges them."""

    def __init__(self, seed: int) -> None:
        self._draft_noise, self._noise = (torch.Generator().manual_seed(race_key(seed, i)[0]) for i in (0, 1))

    def draft(self, scores: Tensor, position: int) -> Tensor:
        """See ``Rule``."""
        return draw(scores.softmax(dim=-1), self._draft_noise)


class Leviathan(Rejection):
    """Algorithm 1 of arXiv 2211.17192."""

    def verify(self, target: Tensor, draft: Tensor, drafts: Tensor, position: int) -> Verdict:
        """See ``Rule``."""
        p, q = target.softmax(dim=-1), draft.softmax(dim=-1)
        rows, count = drafts.shape
        # The paper rejects where r > p(x) / q(x). r is never 0, so what the target rules out is never kept.
        r = 1 - uniform(count * rows, self._noise).view(count, rows).T
        num_accepted = (r <= ratio(p[:, :-1], q, drafts)).long().cumprod(dim=1).sum(dim=1)
        # Behind the last guess q counts as 0, so that the adjusted distribution is p itself there.
        adjusted = residual(p, F.pad(q, (0, 0, 0, 1)))
        return Verdict(num_accepted, draw(adjusted[torch.arange(rows), num_accepted], self._noise))


class Chen(Rejection):
    """Algorithm 2 of arXiv 2302.01318."""

    def verify(self, target: Tensor, draft: Tensor, drafts: Tensor, position: int) -> Verdict:
        """See ``Rule``."""
        p, q = target.softmax(dim=-1), draft.softmax(dim=-1)
        num_accepted = torch.zeros(len(drafts), dtype=torch.int64)
        token = torch.empty_like(num_accepted)
        going = torch.arange(len(drafts))  # sequences whose guesses were all kept so far
        for t in range(drafts.shape[1]):
            # The paper keeps where r < min(1, p(x) / q(x)). r is never 1, so what both find equally likely is kept.
            kept = uniform(len(going), self._noise) < ratio(p[going, t], q[going, t], drafts[going, t]).clamp(max=1)
            left, going = going[~kept], going[kept]
            token[left] = draw(residual(p[left, t], q[left, t]), self._noise)
            num_accepted[going] += 1
        token[going] = draw(p[going, -1], self._noise)
        return Verdict(num_accepted, token)


class Coupled:
    """The engine's rule: guess and verdict are races with one noise. Sequence i is drawn with ``seed`` + i."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def draft(self, scores: Tensor, position: int) -> Tensor:
        """See ``Rule``."""
        return race(scores, self._keys(len(scores), position))

    def verify(self, target: Tensor, draft: Tensor, drafts: Tensor, position: int) -> Verdict:
        """See ``Rule``; it does not need ``draft``."""
        rows, count = drafts.shape
        drawn = [race(target[:, t], self._keys(rows, position + t)) for t in range(count + 1)]
        tokens = torch.stack(drawn, dim=1)
        num_accepted = (tokens[:, :-1] == drafts).long().cumprod(dim=1).sum(dim=1)
        return Verdict(num_accepted, tokens.gather(1, num_accepted[:, None])[:, 0])

    def _keys(self, rows: int, position: int) -> Tensor:
        return torch.tensor([race_key(self._seed + i, position) for i in range(rows)], dtype=torch.int32)


RULES: dict[str, Callable[[int], Rule]] = {"leviathan": Leviathan, "chen": Chen, "coupled": Coupled}  # made of a seed


def uniform(count: int, noise: torch.Generator) -> Tensor:
    """[count] float64, in [0, 1)."""
    return torch.rand(count, dtype=torch.float64, generator=noise)


def draw(weights: Tensor, noise: torch.Generator) -> Tensor:
    """One token of each row, as likely as its share of ``weights`` [R, V], by inversion -> [R] int64."""
    steps = weights.double().cumsum(dim=-1)
    reached = steps[:, -1:] * uniform(len(weights), noise)[:, None]
    return torch.searchsorted(steps, reached, right=True)[:, 0]


def ratio(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """p(x) / q(x) of ``tokens`` [...], under distributions [..., V]."""
    return (p.gather(-1, tokens[..., None]) / q.gather(-1, tokens[..., None]))[..., 0]


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What a token in the place of a rejected one is drawn from: max(0, p - q) [..., V], not normalised. Where rounding
    leaves nothing of it, p and q are equal, and it is p."""
    left = (p - q).clamp(min=0)
    return torch.where(left.sum(dim=-1, keepdim=True) > 0, left, p)


def distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """``logits`` [R, T, V] -> [R, T, V] float32 on the host, whose softmax tokens are drawn from: after temperature,
    min_p, top_k and top_p, as in the engine. At temperature 0 all probability is on the likeliest token. ``params`` are
    resolved. Raises RequestError for logits that are not finite."""
    rows = logits.float().cpu().flatten(0, -2)
    if not rows.amax(dim=-1).isfinite().all():
        message = "a model computed numbers that are not finite: its weights are damaged, or its dtype is too narrow"
        raise RequestError(message, None, "model_error", 500)
    if params.temperature:
        scores = narrowed(rows, [draw_of(SamplingRow(params, seed=0, position=0))] * len(rows))
    else:
        scores = torch.full_like(rows, -torch.inf).scatter_(1, rows.argmax(dim=-1, keepdim=True), 0.0)
    return scores.view_as(logits)


@torch.inference_mode()
def step(
    target: Forward, draft: Forward, rule: Rule, tokens: Tensor, count: int, params: SamplingParams
) -> tuple[Tensor, Verdict]:
    """Guess ``count`` tokens behind ``tokens`` [R, T] and verify them. Returns the guesses [R, K] and the verdict. One
    call of ``target`` and ``count`` calls of ``draft``, whose vocabularies are the same."""
    length, scores = tokens.shape[1], []
    for position in range(length, length + count):
        scores.append(distribution(draft(tokens)[:, -1:], params))
        tokens = torch.cat((tokens, rule.draft(scores[-1][:, 0], position)[:, None]), dim=1)
    expected = distribution(target(tokens)[:, length - 1 :], params)
    guessed = torch.cat(scores, dim=1) if scores else expected[:, :0]
    return tokens[:, length:], rule.verify(expected, guessed, tokens[:, length:], length)


@dataclass
class Guesses:
    """What became of the guesses of one answer, or of several."""

    num_tokens: int = 0  # of the answers
    num_calls: int = 0  # of the target
    num_drafted: int = 0
    num_accepted: int = 0  # guesses that are in the answers
    num_rejected: int = 0  # guesses that another token replaced; those behind them were not judged

    @property
    def acceptance_rate(self) -> float:
        """Share of the guesses that were judged; 0 if there were none."""
        return self.num_accepted / max(1, self.num_accepted + self.num_rejected)

    @property
    def tokens_per_call(self) -> float:
        """Tokens that a call of the target gives; 0 if there was none."""
        return self.num_tokens / max(1, self.num_calls)


def generate(
    target: Forward, draft: Forward, rule: Rule, request: Request, count: int, tally: Guesses
) -> Iterator[str]:
    """Complete ``request``, which no engine has, with up to ``count`` guesses for each call of ``target``; yields the
    text that each call made certain. Adds to ``tally``. Raises RequestError for what ``refuse`` names."""
    refuse(request.params)
    while request.finish_reason is None:
        num_guesses = min(count, request.max_tokens - request.num_output - 1)
        drafts, verdict = step(target, draft, rule, torch.tensor([request.token_ids]), num_guesses, request.params)
        right, before = int(verdict.num_accepted), request.num_output
        text = request.append([*drafts[0, :right].tolist(), int(verdict.token)], time.monotonic())
        taken = request.num_output - before  # fewer where the answer ends within the guesses
        tally.num_calls += 1
        tally.num_tokens += taken
        tally.num_drafted += num_guesses
        tally.num_accepted += min(right, taken)
        tally.num_rejected += right < min(taken, num_guesses)
        yield text


def refuse(params: SamplingParams) -> None:
    """Raise RequestError for the first field of ``params`` that these rules do not serve."""
    params, usual = params.resolved(), SamplingParams().resolved()
    for field in dataclasses.fields(params):
        if field.name not in _SUPPORTED and getattr(params, field.name) != getattr(usual, field.name):
            message = f"{field.name} is not served by the published rules; leave it out, or take the method coupled"
            raise RequestError(message, field.name)
