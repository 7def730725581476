"""Logits to tokens. R rows, V vocabulary.

The order of operations is that of ``SamplingParams``. One token is drawn from what they leave, by a race whose noise
is a hash of (seed, position, token) (kernels/race.py). So a request draws the same wherever it runs and whatever runs
beside it, and a draft model that draws with the same noise guesses the same token most of the time. The host knows from
the parameters which rows need which operation, so on CUDA it waits for the device once, to fetch the tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gpt_fast.engine.tensors import send, tensor_of
from gpt_fast.kernels import gpu
from gpt_fast.kernels.cpu.library import available
from gpt_fast.kernels.race import Draw, draw, race, race_key
from gpt_fast.outputs import TokenLogprobs
from gpt_fast.params import SamplingParams

NO_TOKEN = -1  # in the place of a token where none can be drawn
_CANDIDATES = 1024  # tokens looked at before a whole row is sorted for top_p


class SamplingRow(NamedTuple):
    """What one row of logits is sampled with."""

    params: SamplingParams  # resolved
    seed: int
    position: int  # the new token's index in its sequence
    token_ids: Sequence[int] = ()  # the sequence so far; only penalties read it
    num_prompt: int = 0  # how many of them are the prompt
    end_ids: frozenset[int] = frozenset()  # what min_tokens forbids
    allowed: Tensor | None = None  # [V] bool on the host, what a grammar allows


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Draw one token per row: logits [R, V] -> [R] int64 on the same device. NO_TOKEN where the largest logit is no
    finite number: a model that computes NaN, or a row whose tokens are all ruled out."""
    return draw_tokens(adjust(logits, rows), [draw_of(row) for row in rows])


def draw_of(row: SamplingRow) -> Draw:
    """What is left to do for ``row`` behind :func:`adjust`."""
    p = row.params
    key = race_key(row.seed, row.position) if p.temperature else (0, 0)
    return Draw(p.temperature or 0.0, p.top_k or 0, 1.0 if p.top_p is None else p.top_p, p.min_p or 0.0, *key)


def only_drawn(row: SamplingRow) -> bool:
    """Whether :func:`adjust` leaves ``row`` as it is, and later rows of its sequence as well."""
    p = row.params
    ending = row.position - row.num_prompt >= p.min_tokens or not row.end_ids
    return ending and row.allowed is None and not p.logit_bias and not p.penalised


def draw_tokens(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """:func:`sample` for logits [R, V] that are adjusted already."""
    if logits.device.type == "cpu" and available():
        return draw(logits.float(), draws)
    return plain_draw(logits, draws)


def plain_draw(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """:func:`draw_tokens` in torch. The host does not wait for a GPU."""
    largest, greedy = logits.max(dim=-1)
    drawable = largest.isfinite()
    sampled = [i for i, own in enumerate(draws) if own.temperature]
    if not sampled:
        return greedy.where(drawable, NO_TOKEN)
    device = logits.device
    index = tensor_of(sampled, torch.int64, device)
    keys = tensor_of([(draws[i].low, draws[i].high) for i in sampled], torch.int32, device)
    drawn = race(narrowed(logits[index], [draws[i] for i in sampled]), keys)
    return greedy.index_copy(0, index, drawn).where(drawable, NO_TOKEN)


def adjust(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Everything before temperature: [R, V] -> [R, V], float32 if anything changed, else the same tensor."""
    if all(map(only_drawn, rows)):
        return logits
    device = logits.device
    masked = [i for i, row in enumerate(rows) if row.allowed is not None]
    if masked:
        allowed = send(torch.stack([row.allowed for row in rows if row.allowed is not None]), device)
        index = tensor_of(masked, torch.int64, device)
        logits = logits.float().index_copy(0, index, logits[index].float().masked_fill(~allowed, -torch.inf))
    entries = [(i, token, bias) for i, row in enumerate(rows) for token, bias in _additions(row)]
    if entries:
        where = tuple(tensor_of([e[k] for e in entries], torch.int64, device) for k in (0, 1))
        values = tensor_of([e[2] for e in entries], torch.float32, device)
        logits = logits.float().index_put(where, values, accumulate=True)
    penalised = [i for i, row in enumerate(rows) if row.params.penalised]
    if penalised:
        index = tensor_of(penalised, torch.int64, device)
        part = _penalise(logits[index].float(), [rows[i] for i in penalised])
        logits = logits.float().index_copy(0, index, part)
    return logits


def _additions(row: SamplingRow) -> list[tuple[int, float]]:
    """Token ids and what is added to their logits."""
    added = list(row.params.logit_bias.items())
    if row.position - row.num_prompt < row.params.min_tokens:
        added += [(token, -torch.inf) for token in row.end_ids]
    return added


def _penalise(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Penalties of every row, at the tokens of its sequence alone: [R, V] float32 -> the same."""
    (num_rows, vocab_size), device = logits.shape, logits.device
    tokens, counted = array("q"), []  # what is looked at, and of each row how many tokens of prompt and completion
    for row in rows:
        # The other two are of the completion.
        begin = row.num_prompt if row.params.repetition_penalty in (None, 1.0) else 0
        tokens.fromlist(list(row.token_ids[begin:]))
        counted.append((row.num_prompt - begin, len(row.token_ids) - row.num_prompt))
    if not tokens:
        return logits
    # Of each token its row, and whether it was generated. On the host: only places go to the device.
    parts = torch.tensor(counted)
    row_of = torch.arange(num_rows).repeat_interleave(parts.sum(dim=1))
    was_generated = torch.tensor([False, True]).repeat(num_rows).repeat_interleave(parts.flatten())
    places = torch.frombuffer(tokens, dtype=torch.int64) + row_of * vocab_size
    generated = send(places[was_generated], device)
    places, row_of = send(places, device), send(row_of, device)
    one = torch.ones(1, device=device)
    counts = torch.zeros(logits.numel(), device=device).scatter_add_(0, generated, one.expand(generated.shape))[places]
    given = [row.params for row in rows]
    penalties = [(p.repetition_penalty or 1.0, p.frequency_penalty, p.presence_penalty) for p in given]
    repetition, frequency, presence = tensor_of(penalties, torch.float32, device)[row_of].unbind(1)
    values = logits.flatten()[places]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - counts * frequency - (counts > 0) * presence
    return logits.flatten().scatter(0, places, values).view(num_rows, vocab_size)  # a token's values are all the same


def narrowed(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Temperature and what follows it: [R, V] logits -> [R, V] float32, whose softmax each row is drawn from; -infinity
    for tokens that are ruled out. No row may have temperature 0."""
    device = logits.device
    temperatures = tensor_of([own.temperature for own in draws], torch.float32, device)
    scaled = logits.float() / temperatures[:, None]
    min_p = [own.min_p for own in draws]
    if any(min_p):  # Nguyen et al. 2024, arXiv 2407.01082; log 0 = -inf drops nothing
        least = scaled.amax(dim=-1) + tensor_of(min_p, torch.float32, device).log()
        scaled = scaled.masked_fill(scaled < least[:, None], -torch.inf)
    limited = [i for i, own in enumerate(draws) if 0 < own.top_k < scaled.shape[1] or own.top_p < 1.0]
    if limited:
        index = tensor_of(limited, torch.int64, device)
        part = scaled[index]
        least = _least_kept(part, [draws[i] for i in limited])
        scaled = scaled.index_copy(0, index, part.masked_fill(part < least[:, None], -torch.inf))
    return scaled


def _least_kept(scaled: Tensor, draws: Sequence[Draw]) -> Tensor:
    """[R] the smallest logit that top_k and then top_p (Holtzman et al. 2019, arXiv 1904.09751) keep; ties are kept."""
    count = vocab_size = scaled.shape[1]
    top_k = [min(own.top_k or vocab_size, vocab_size) for own in draws]
    top_p = [own.top_p for own in draws]
    if scaled.device.type == "cuda" and gpu.available():
        from gpt_fast.kernels.gpu.least_kept import least_kept

        counts = tensor_of(top_k, torch.int32, scaled.device)
        return least_kept(scaled, counts, tensor_of(top_p, torch.float32, scaled.device))
    # Without the kernel CUDA sorts everything: asking whether the candidates suffice would wait for the device.
    if scaled.device.type == "cpu" and vocab_size > _CANDIDATES:
        limits = [k for k in top_k if k < vocab_size]
        count = max([_CANDIDATES if any(p < 1.0 for p in top_p) else 1, *limits])
    ranked, keep = _ranked(scaled, top_k, top_p, count)
    if count < vocab_size and bool((keep[:, -1] & torch.tensor([k > count for k in top_k])).any()):
        ranked, keep = _ranked(scaled, top_k, top_p, vocab_size)
    last = keep.sum(dim=-1, keepdim=True).clamp(min=1) - 1
    return ranked.gather(1, last)[:, 0]


def _ranked(scaled: Tensor, top_k: list[int], top_p: list[float], count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest of each row in falling order, and which of them top_k and top_p keep; both [R, count]."""
    device = scaled.device
    ranked = scaled.topk(count, dim=-1).values
    limits = tensor_of(top_k, torch.int64, device)[:, None]
    keep = torch.arange(count, device=device)[None, :] < limits
    if all(p >= 1.0 for p in top_p):
        return ranked, keep
    # top_p is a share of what top_k left: of what equals the last token that it keeps, too. Relative to the greatest,
    # because at a low temperature a total is too large a number to be exact.
    least = ranked.gather(1, limits.clamp(max=count) - 1).masked_fill(limits == scaled.shape[1], -torch.inf)
    total = log_total((scaled - ranked[:, :1]).masked_fill(scaled < least, -torch.inf))
    limit = tensor_of(top_p, torch.float32, device)[:, None]
    mass = (ranked - ranked[:, :1] - total[:, None]).exp().masked_fill(~keep, 0.0).cumsum(dim=-1)
    likelier = torch.cat((torch.zeros_like(mass[:, :1]), mass[:, :-1]), dim=-1)
    return ranked, keep & ((likelier < limit) | (limit >= 1.0))


def log_total(scaled: Tensor) -> Tensor:
    """[R, C] -> [R]: the logarithm of each row's sum of exponentials, with the same bits whatever rows are beside it:
    torch's logsumexp shares the sum of a single long row among threads, and so adds in another order."""
    return scaled.amax(dim=-1) - scaled.log_softmax(dim=-1).amax(dim=-1)


def logprobs(logits: Tensor, tokens: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Log probabilities under the model's own distribution, logits [R, V], of each row's token and its likeliest ones.
    Row i lists the ``num_top[i]`` likeliest tokens, or all V; ties in order of the token id are not promised."""
    table = logits.float().log_softmax(dim=-1)
    chosen = table.gather(1, tensor_of(list(tokens), torch.int64, logits.device)[:, None])[:, 0].tolist()
    top = table.topk(min(table.shape[1], max(1, *num_top)), dim=-1)
    values, ids = top.values.tolist(), top.indices.tolist()
    return [
        TokenLogprobs(token, chosen[i], tuple(zip(ids[i][:count], values[i][:count], strict=True)))
        for i, (token, count) in enumerate(zip(tokens, num_top, strict=True))
    ]
