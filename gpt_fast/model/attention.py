"""The one attention seam: every query of every layer goes through :func:`attend`.

A *step* computes some new tokens of some sequences: one each (decode), many of one (prefill), a few each of which a
prefix may be kept (verify), or any mixture, by one operation without modes. All new tokens of a step stand in one flat
row; :class:`StepLayout` says which sequence each belongs to and where its keys and values live.

Legend: N new tokens of the step, S sequence slots (fixed; unused ones have no queries), P pages a sequence may
have, G page size, H query heads, K key-value heads, D head dimension.

The cache is paged: page p of a layer is ``cache[p]`` of shape [G, K, D]; position t of slot s is at
``cache[page_table[s, t // G], t % G]``. Page 0 is never allocated: rows that only pad a step write there. A cache of
int8 has a scale for every position and head, chosen when it is written, so no later token changes what is stored.

The operation is opaque to the compiler (one custom op a layer), so ragged lengths never cause recompilation.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast.kernels import gpu
from gpt_fast.kernels.cache import LayerCache, StepLayout


class Scoring(NamedTuple):
    """How scores become weights: the fields of ``description.Attention``, and the tensors that it names.

    slopes: [H] float32, ALiBi's; None: without. sinks: [H], scores without a key; None: without.
    """

    window: int
    scale: float
    cap: float = 0.0
    slopes: Tensor | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether torch's own operation does it."""
        return not self.cap and self.slopes is None and self.sinks is None


def alibi_slopes(num_heads: int, rank: int = 0, num_ranks: int = 1) -> Tensor:
    """[H] float32: the slopes of ALiBi for any number of heads (Press et al. 2021, arXiv 2108.12409). Where ranks share
    a model, those of the ``num_heads`` that ``rank`` has."""
    total = num_heads * num_ranks
    power = 1 << int(math.log2(total))

    def geometric(count: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / count) for i in range(count)]

    slopes = geometric(power) + geometric(2 * power)[::2][: total - power]
    return torch.tensor(slopes[rank * num_heads :][:num_heads], device="cpu")


def attend(q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, layout: StepLayout, scoring: Scoring) -> Tensor:
    """Write ``k``/``v`` [N, K, D] into the cache, then attend ``q`` [N, H, D] causally to each one's own sequence.

    Returns [N, H, D].
    """
    out: Tensor = torch.ops.gpt_fast.paged_attention(q, k, v, *cache, *layout, *scoring)
    return out


def attend_plain(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """The same mathematics without cache or pages, [B, T, H or K, D] -> [B, T, H, D]: training, and the reference."""
    num_tokens = q.shape[1]
    heads = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if scoring.plain and not 0 < scoring.window < num_tokens:
        out = F.scaled_dot_product_attention(*heads, is_causal=True, scale=scoring.scale, enable_gqa=True)
    else:
        out = _weigh(*heads, causal_mask(num_tokens, num_tokens, scoring.window, q.device), scoring)
    return out.transpose(1, 2)


def _weigh(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """q [..., H, t, D], k and v [..., K, T, D]; ``mask`` [..., t, T], True where a query may look -> [..., H, t, D].

    Keys stand at consecutive positions.
    """
    if scoring.plain:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scoring.scale, enable_gqa=True)
    group = q.shape[-3] // k.shape[-3]
    k, v = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
    scores = (q @ k.transpose(-1, -2)).float() * scoring.scale
    if scoring.cap:
        scores = scoring.cap * torch.tanh(scores / scoring.cap)
    if scoring.slopes is not None:
        position = torch.arange(k.shape[-2], device=k.device)
        own = position[-1] if mask is None else (mask * position).amax(-1, keepdim=True)
        scores = scores + scoring.slopes[:, None, None] * (position - own)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    if scoring.sinks is None:
        return scores.softmax(-1).to(v.dtype) @ v
    sinks = scoring.sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1].to(v.dtype) @ v


def causal_mask(num_queries: int, num_keys: int, window: int, device: torch.device) -> Tensor:
    """[num_queries, num_keys] bool: True where the query, the last ones of the keys' positions, may look."""
    query = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    key = torch.arange(num_keys, device=device)[None, :]
    mask = key <= query
    return mask & (key > query - window) if window else mask


def _gather(cache: LayerCache, pages: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values in ``pages`` [..., p], [..., K, p * G, D] each."""
    pages = pages.long()

    def gathered(data: Tensor, scales: Tensor | None) -> Tensor:
        out = data[pages].to(dtype)
        if scales is not None:
            out = out * scales[pages][..., None].to(dtype)
        return out.flatten(-4, -3).transpose(-3, -2)

    return gathered(cache.k, cache.k_scale), gathered(cache.v, cache.v_scale)


def paged_attention_eager(
    q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, layout: StepLayout, scoring: Scoring
) -> Tensor:
    """The seam in plain torch where the host can read lengths: a product for each sequence that has several new tokens,
    and one for all sequences that decode."""
    cache.write(k, v, layout.write_slots)
    out = torch.zeros_like(q)
    starts, lengths = layout.query_start.tolist(), layout.context_len.tolist()
    counts = [end - begin for begin, end in itertools.pairwise(starts)]
    decoding = [s for s, count in enumerate(counts) if count == 1]
    for s, count in enumerate(counts):
        if count > 1 or (count == 1 and len(decoding) == 1):
            rows = slice(starts[s], starts[s + 1])
            out[rows] = _attend_one(q[rows], cache, layout.page_table[s], lengths[s], scoring)
    if len(decoding) > 1:
        longest = max(lengths[s] for s in decoding)
        tables = layout.page_table[decoding, : -(-longest // cache.k.shape[1])]
        chosen = torch.tensor([starts[s] for s in decoding])
        out[chosen] = _attend_masked(q[chosen], cache, tables, layout.context_len[decoding] - 1, scoring)
    return out


def _attend_one(q: Tensor, cache: LayerCache, pages: Tensor, length: int, scoring: Scoring) -> Tensor:
    """The last new tokens q [n, H, D] of one sequence of ``length`` tokens in ``pages``; returns [n, H, D]."""
    num_queries, page_size, window = q.shape[0], cache.k.shape[1], scoring.window
    first = max(0, length - num_queries - window + 1) // page_size * page_size if window else 0
    pages = pages[first // page_size : -(-length // page_size)]
    num_keys = length - first
    keys, values = (t[None, :, :num_keys] for t in _gather(cache, pages, q.dtype))
    mask = None
    if num_queries > 1 or (window and num_keys > window):
        mask = causal_mask(num_queries, num_keys, window, q.device)
    return _weigh(q.transpose(0, 1)[None], keys, values, mask, scoring)[0].transpose(0, 1)


def _attend_masked(q: Tensor, cache: LayerCache, page_tables: Tensor, positions: Tensor, scoring: Scoring) -> Tensor:
    """One new token of each of N sequences: q [N, H, D], page_tables [N, p], positions [N]; returns [N, H, D]."""
    keys, values = _gather(cache, page_tables, q.dtype)
    key = torch.arange(keys.shape[2], device=q.device)[None, :]
    mask = key <= positions[:, None]
    if scoring.window:
        mask &= key > positions[:, None] - scoring.window
    # What an earlier holder left in a page may be infinite, and weights of 0 would not hide that.
    for stale in (keys, values):
        stale.masked_fill_(~mask[:, None, :, None], 0.0)
    return _weigh(q[:, :, None], keys, values, mask[:, None, None], scoring)[:, :, 0]


def paged_attention_static(
    q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, layout: StepLayout, scoring: Scoring
) -> Tensor:
    """The seam in plain torch without reading lengths on the host: every shape fixed, so a CUDA graph can hold it.

    Each token gathers all pages its sequence may have; what lies outside its context is masked.
    """
    cache.write(k, v, layout.write_slots)
    start, context_len = layout.query_start, layout.context_len
    token = torch.arange(q.shape[0], device=q.device, dtype=start.dtype)
    slot = (torch.searchsorted(start, token, right=True) - 1).clamp_(max=context_len.shape[0] - 1)
    position = context_len[slot] - (start[slot + 1] - token)  # [N]; negative on rows that only pad
    return _attend_masked(q, cache, layout.page_table[slot], position.clamp(min=0), scoring)


def _paged_attention(*arguments: Any) -> Tensor:
    """The operation behind ``attend``: plain torch on a CPU, Triton's kernel on a GPU where it runs."""
    q, k, v = arguments[:3]
    cache, layout, scoring = LayerCache(*arguments[3:7]), StepLayout(*arguments[7:11]), Scoring(*arguments[11:])
    if q.device.type == "cpu":
        return paged_attention_eager(q, k, v, cache, layout, scoring)
    if gpu.available() and scoring.plain:
        from gpt_fast.kernels.gpu.attention import attend as attend_written

        cache.write(k, v, layout.write_slots)
        return attend_written(q, cache, layout, scoring.window, scoring.scale)
    return paged_attention_static(q, k, v, cache, layout, scoring)


# The low-level library API: its call costs a few microseconds, the decorator's some tens.
_library = torch.library.Library("gpt_fast", "FRAGMENT")
_library.define(
    "paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!)? k_scale, "
    "Tensor(d!)? v_scale, Tensor query_start, Tensor context_len, Tensor page_table, Tensor write_slots, "
    "int window, float scale, float cap, Tensor? slopes, Tensor? sinks) -> Tensor"
)
_library.impl("paged_attention", _paged_attention, "CPU")
_library.impl("paged_attention", _paged_attention, "CUDA")


@torch.library.register_fake("gpt_fast::paged_attention")
def _(q: Tensor, *_: object) -> Tensor:
    return torch.empty_like(q)
