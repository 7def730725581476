"""The one attention seam: every query of every layer goes through :func:`attend`.

A *step* computes some new tokens of some sequences: one each (decode), many of one (prefill), a few each of
which a prefix may be kept (verify), or any mixture. All new tokens of a step stand in one flat row of
``num_tokens``; :class:`StepLayout` says which sequence each belongs to and where its keys and values live.
Because verify and prefill are the same shape of work as decode, there is one operation and no modes.

Legend: N new tokens of the step, S sequence slots (fixed; unused ones have no queries), P pages a sequence may
have, G page size, H query heads, K key-value heads, D head dimension.

The cache is paged: page p of a layer is ``cache[p]`` of shape [G, K, D]; position t of slot s is at
``cache[page_table[s, t // G], t % G]``. Page 0 is never allocated: rows that only pad a step write there. A cache of
int8 has a scale for every position and head, chosen when it is written, so no later token changes what is stored.

The operation is opaque to the compiler (one custom op a layer), so ragged lengths never cause recompilation.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast.kernels import gpu
from gpt_fast.kernels.cache import LayerCache


class StepLayout(NamedTuple):
    """Where the new tokens of one step belong. Fixed shapes except ``write_slots``.

    query_start: [S + 1] int32, tokens ``query_start[s]:query_start[s + 1]`` belong to slot s.
    context_len: [S] int32, tokens of slot s after this step (cached before it plus new).
    page_table:  [S, P] int32, pages of slot s in order; entries past the context are ignored.
    write_slots: [N] int64, flat cache slot (page * G + offset) that receives each new token's key and value.
    """

    query_start: Tensor
    context_len: Tensor
    page_table: Tensor
    write_slots: Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, layout: StepLayout, window: int) -> Tensor:
    """Write ``k``/``v`` [N, K, D] into the cache, then attend ``q`` [N, H, D] causally to each one's own sequence.

    Returns [N, H, D]. ``window`` > 0 limits each query to the last ``window`` positions, itself included.
    """
    out: Tensor = torch.ops.gpt_fast.paged_attention(
        q, k, v, cache.k, cache.v, *layout, window, cache.k_scale, cache.v_scale
    )
    return out


def attend_plain(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """The same mathematics without cache or pages, [B, T, H or K, D] -> [B, T, H, D]: training, and the reference."""
    num_tokens = q.shape[1]
    mask = None
    if window and window < num_tokens:
        mask = causal_mask(num_tokens, num_tokens, window, q.device)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    return out.transpose(1, 2)


def causal_mask(num_queries: int, num_keys: int, window: int, device: torch.device) -> Tensor:
    """[num_queries, num_keys] bool: True where the query, the last ones of the keys' positions, may look."""
    query = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    key = torch.arange(num_keys, device=device)[None, :]
    mask = key <= query
    return mask & (key > query - window) if window else mask


def _gather(cache: Tensor, scales: Tensor | None, pages: Tensor, dtype: torch.dtype) -> Tensor:
    """Pages [..., p] of ``cache`` as contiguous [..., p * G, K, D]."""
    pages = pages.long()
    out = cache[pages].to(dtype)
    if scales is not None:
        out = out * scales[pages][..., None].to(dtype)
    return out.flatten(-4, -3)


def paged_attention_eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    page_table: Tensor,
    write_slots: Tensor,
    window: int,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """The seam in plain torch for lengths that the host can read: one product per sequence that has several new
    tokens, one for all sequences that decode."""
    cache = LayerCache(k_cache, v_cache, k_scale, v_scale)
    cache.write(k, v, write_slots)
    out = torch.zeros_like(q)
    starts, lengths = query_start.tolist(), context_len.tolist()
    counts = [end - begin for begin, end in itertools.pairwise(starts)]
    decoding = [s for s, count in enumerate(counts) if count == 1]
    for s, count in enumerate(counts):
        if count > 1 or (count == 1 and len(decoding) == 1):
            rows = slice(starts[s], starts[s + 1])
            out[rows] = _attend_one(q[rows], cache, page_table[s], lengths[s], window)
    if len(decoding) > 1:
        longest = max(lengths[s] for s in decoding)
        tables = page_table[decoding, : -(-longest // k_cache.shape[1])]
        chosen = torch.tensor([starts[s] for s in decoding])
        positions = context_len[decoding] - 1
        out[chosen] = _attend_masked(q[chosen], cache, tables, positions, window)
    return out


def _attend_one(q: Tensor, cache: LayerCache, pages: Tensor, length: int, window: int) -> Tensor:
    """The last new tokens q [n, H, D] of one sequence of ``length`` tokens in ``pages``; returns [n, H, D]."""
    num_queries, page_size = q.shape[0], cache.k.shape[1]
    first = max(0, length - num_queries - window + 1) // page_size * page_size if window else 0
    pages = pages[first // page_size : -(-length // page_size)]
    keys = _gather(cache.k, cache.k_scale, pages, q.dtype)[: length - first].transpose(0, 1)  # [K, T, D]
    values = _gather(cache.v, cache.v_scale, pages, q.dtype)[: length - first].transpose(0, 1)
    mask = None
    if num_queries > 1 or (window and length - first > window):
        mask = causal_mask(num_queries, length - first, window, q.device)
    heads = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
    )
    return heads[0].transpose(0, 1)


def _attend_masked(q: Tensor, cache: LayerCache, page_tables: Tensor, positions: Tensor, window: int) -> Tensor:
    """One new token of each of N sequences: q [N, H, D], page_tables [N, p], positions [N]; returns [N, H, D]."""
    keys = _gather(cache.k, cache.k_scale, page_tables, q.dtype).transpose(1, 2)  # [N, K, T, D]
    values = _gather(cache.v, cache.v_scale, page_tables, q.dtype).transpose(1, 2)
    key = torch.arange(keys.shape[2], device=q.device)[None, :]
    mask = key <= positions[:, None]
    if window:
        mask &= key > positions[:, None] - window
    # What an earlier holder left in a page may be infinite, and weights of 0 would not hide that.
    for stale in (keys, values):
        stale.masked_fill_(~mask[:, None, :, None], 0.0)
    heads = F.scaled_dot_product_attention(
        q[:, :, None], keys, values, attn_mask=mask[:, None, None], enable_gqa=True
    )  # [N, H, 1, D]
    return heads[:, :, 0]


def paged_attention_static(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    page_table: Tensor,
    write_slots: Tensor,
    window: int,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """The seam in plain torch without reading lengths on the host: every shape fixed, so a CUDA graph can hold it.

    Each token gathers all pages its sequence may have; what lies outside its context is masked.
    """
    cache = LayerCache(k_cache, v_cache, k_scale, v_scale)
    cache.write(k, v, write_slots)
    num_tokens = q.shape[0]
    token = torch.arange(num_tokens, device=q.device, dtype=query_start.dtype)
    slot = (torch.searchsorted(query_start, token, right=True) - 1).clamp_(max=context_len.shape[0] - 1)
    position = context_len[slot] - (query_start[slot + 1] - token)  # [N]; negative on rows that only pad
    return _attend_masked(q, cache, page_table[slot], position.clamp(min=0), window)


def _paged_attention_cuda(*arguments: Any) -> Tensor:
    """Triton's kernel where it runs; its twin otherwise."""
    if gpu.available():
        from gpt_fast.kernels.gpu.attention import paged_attention

        return paged_attention(*arguments)
    return paged_attention_static(*arguments)


_SCHEMA = (
    "paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor query_start, "
    "Tensor context_len, Tensor page_table, Tensor write_slots, int window, Tensor(c!)? k_scale=None, "
    "Tensor(d!)? v_scale=None) -> Tensor"
)
# The low-level library API: its call costs a few microseconds, the decorator's some tens.
_library = torch.library.Library("gpt_fast", "FRAGMENT")
_library.define(_SCHEMA)
_library.impl("paged_attention", paged_attention_eager, "CPU")
_library.impl("paged_attention", _paged_attention_cuda, "CUDA")


@torch.library.register_fake("gpt_fast::paged_attention")
def _(q: Tensor, *_: object) -> Tensor:
    return torch.empty_like(q)
