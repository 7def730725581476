"""Logits to tokens.

Order: temperature, min_p, top_k, top_p; what is left is renormalised and one token drawn by inversion of the
cumulative distribution in vocabulary order. The one uniform number behind a draw is a hash of (seed, position), so
a request draws the same wherever it runs and whatever runs beside it; nothing here keeps a state.

Every operation is row-wise. Which rows need which of them is known on the host from their parameters, so a batch of
mixed requests costs no host synchronisation on CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gpt_fast.params import SamplingParams

_CANDIDATES = 1024  # tokens looked at before a whole row is sorted for top_p


class SamplingRow(NamedTuple):
    """What one row of logits is sampled with; ``position`` is the new token's index in its sequence."""

    params: SamplingParams  # resolved
    seed: int
    position: int


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """A number in [0, 1) that is a function of its arguments: splitmix64 (Steele et al. 2014) over a counter.

    ``stream`` separates several draws at one position (acceptance and resampling in speculation).
    """
    z = _mix((seed * 0x9E3779B97F4A7C15 + stream * 0xD1B54A32D192ED03) & _MASK)
    z = _mix((z + (position + 1) * 0x9E3779B97F4A7C15) & _MASK)
    return (z >> 11) * 2.0**-53


_MASK = 2**64 - 1


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Draw one token per row: logits [R, V] -> [R] int64."""
    greedy = logits.argmax(dim=-1)
    sampled = [i for i, row in enumerate(rows) if row.params.temperature]
    if not sampled:
        return greedy
    device = logits.device
    index = torch.tensor(sampled, device=device)
    probs = probabilities(logits[index], [rows[i].params for i in sampled])
    noise = [uniform(rows[i].seed, rows[i].position) for i in sampled]
    drawn = invert(probs, torch.tensor(noise, device=device, dtype=torch.float64))
    return greedy.index_copy(0, index, drawn)


def probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The distribution each row is drawn from: [R, V] logits -> [R, V] float32; no row may have temperature 0."""
    device = logits.device
    scaled = logits.float() / torch.tensor([p.temperature for p in params], device=device)[:, None]
    scaled = _min_p(scaled, [p.min_p or 0.0 for p in params])
    vocab_size = scaled.shape[1]
    limited = [i for i, p in enumerate(params) if 0 < (p.top_k or 0) < vocab_size or (p.top_p or 1.0) < 1.0]
    if limited:
        index = torch.tensor(limited, device=device)
        part = scaled[index]
        least = _least_kept(part, [params[i] for i in limited])
        scaled = scaled.index_copy(0, index, part.masked_fill(part < least[:, None], -torch.inf))
    return scaled.softmax(dim=-1)


def _min_p(scaled: Tensor, min_p: list[float]) -> Tensor:
    """Drop tokens less likely than ``min_p`` times the likeliest (Nguyen et al. 2024, arXiv 2407.01082)."""
    if not any(min_p):
        return scaled
    limit = scaled.amax(dim=-1) + torch.tensor(min_p, device=scaled.device).log()  # log 0 = -inf drops nothing
    return scaled.masked_fill(scaled < limit[:, None], -torch.inf)


def _least_kept(scaled: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """[R] the smallest logit that top_k and then top_p (Holtzman et al. 2019, arXiv 1904.09751) keep; ties are kept."""
    rows, vocab_size = scaled.shape
    device = scaled.device
    top_k = [min(p.top_k or vocab_size, vocab_size) for p in params]
    top_p = [1.0 if p.top_p is None else p.top_p for p in params]
    # On CUDA everything is sorted, since asking whether the candidates suffice would wait for the device.
    few = scaled.device.type == "cpu" and vocab_size > _CANDIDATES
    nucleus = any(p < 1.0 for p in top_p)
    count = vocab_size
    if few:
        count = _CANDIDATES if nucleus else min(max(top_k), vocab_size)
        count = max(count, max((k for k in top_k if k < vocab_size), default=0))
    while True:
        ranked = scaled.topk(count, dim=-1).values  # [R, count], descending
        rank = torch.arange(count, device=device)[None, :]
        keep = rank < torch.tensor(top_k, device=device)[:, None]
        if nucleus:
            # A row's own normaliser: over all tokens where top_k is off, else over those that it kept.
            total = torch.where(
                torch.tensor([k == vocab_size for k in top_k], device=device),
                scaled.logsumexp(dim=-1),
                ranked.masked_fill(~keep, -torch.inf).logsumexp(dim=-1),
            )
            limit = torch.tensor(top_p, device=device)[:, None]
            mass = (ranked - total[:, None]).exp().masked_fill(~keep, 0.0).cumsum(dim=-1)
            before = torch.cat((mass.new_zeros(rows, 1), mass[:, :-1]), dim=-1)  # likelier tokens' probability
            keep &= (before < limit) | (limit >= 1.0)
        if count == vocab_size or not bool((keep[:, -1] & torch.tensor([k > count for k in top_k])).any()):
            break
        count = vocab_size
    last = keep.sum(dim=-1, keepdim=True).clamp(min=1) - 1
    return ranked.gather(1, last)[:, 0]


def invert(probs: Tensor, noise: Tensor) -> Tensor:
    """Draw from each row of probs [R, V] by noise [R] in [0, 1): the first token where the cumulated sum exceeds it."""
    cumulated = probs.cumsum(dim=-1, dtype=torch.float64)
    threshold = noise[:, None] * cumulated[:, -1:]
    drawn = (cumulated <= threshold).sum(dim=-1)
    # Rounding could point past the last possible token.
    last = probs.shape[1] - 1 - (probs > 0).flip(-1).to(torch.int8).argmax(dim=-1)
    return torch.minimum(drawn, last)
