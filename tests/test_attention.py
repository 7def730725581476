"""The paged paths against the plain one: any mixture of prefill, decode and verify, any pages, any window."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpt_fast.kernels.cache import LayerCache, StepLayout
from gpt_fast.model.attention import (
    Scoring,
    alibi_slopes,
    attend_plain,
    paged_attention_eager,
    paged_attention_static,
)

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, SLOTS = 4, 2, 8, 4, 5


def split(lengths: list[int], generator: torch.Generator) -> list[list[int]]:
    """For each sequence the sizes of its parts: random cuts of its length, so that steps mix all kinds of work."""
    parts = []
    for length in lengths:
        sizes = []
        while length:
            sizes.append(min(length, int(torch.randint(1, 8, (), generator=generator))))
            length -= sizes[-1]
        parts.append(sizes)
    return parts


@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize("window", [0, 1, 3, 6, 100])
@pytest.mark.parametrize("paged", [paged_attention_eager, paged_attention_static])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("adjusted", [False, True])
def test_steps_of_any_mixture_equal_whole_sequences(
    paged: Callable[..., Tensor], window: int, padding: int, integers: bool, adjusted: bool
) -> None:
    generator = torch.Generator().manual_seed(window)
    lengths = [1, 17, 8, 30]
    sequences = [
        [torch.randn(1, n, h, HEAD_DIM, generator=generator) for h in (HEADS, KV_HEADS, KV_HEADS)] for n in lengths
    ]
    more = (2.0, alibi_slopes(HEADS), torch.randn(HEADS, generator=generator)) if adjusted else ()
    scoring = Scoring(window, HEAD_DIM**-0.5, *more)
    expected = [attend_plain(q, k, v, scoring)[0] for q, k, v in sequences]
    pages_each = -(-max(lengths) // PAGE_SIZE)
    order = torch.randperm(SLOTS * pages_each, generator=generator) + 1
    table = order.view(SLOTS, pages_each).int()
    shape = (SLOTS * pages_each + 1, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    # Whatever an earlier holder left in a page must not show, not even what a model that overflowed left.
    k_cache, v_cache = torch.full(shape, torch.nan), torch.full(shape, torch.inf)
    scales: tuple[Tensor, ...] = ()
    if integers:
        k_cache, v_cache = (torch.full(shape, 99, dtype=torch.int8) for _ in range(2))
        scales = torch.full(shape[:3], torch.nan), torch.full(shape[:3], torch.inf)
    parts, done = split(lengths, generator), [0] * len(lengths)
    outputs: list[list[Tensor]] = [[] for _ in lengths]
    while any(parts):
        flat: list[tuple[Tensor, Tensor, Tensor]] = []
        start, context, slots, members = [0], [0] * SLOTS, [], []
        for s in range(SLOTS):
            count = parts[s].pop(0) if s < len(lengths) and parts[s] else 0
            if count:
                begin, done[s] = done[s], done[s] + count
                flat.append(tuple(t[0, begin : done[s]] for t in sequences[s]))  # type: ignore[arg-type]
                slots += [int(table[s, p // PAGE_SIZE]) * PAGE_SIZE + p % PAGE_SIZE for p in range(begin, done[s])]
                context[s] = done[s]
                members.append((s, count))
            start.append(start[-1] + count)
        q, k, v = (torch.cat([f[i] for f in flat] + [torch.zeros(padding, *flat[0][i].shape[1:])]) for i in range(3))
        layout = StepLayout(
            torch.tensor(start, dtype=torch.int32),
            torch.tensor(context, dtype=torch.int32),
            table,
            torch.tensor(slots + [0] * padding),
        )
        out = paged(q, k, v, LayerCache(k_cache, v_cache, *scales), layout, scoring)
        assert out[: len(out) - padding].isfinite().all()
        at = 0
        for s, count in members:
            outputs[s].append(out[at : at + count])
            at += count
    for s, whole in enumerate(expected):
        # Rounded to 1/127 of the largest number of a head; weights and sums make it less.
        tolerance = 0.05 if integers else 1e-5
        torch.testing.assert_close(torch.cat(outputs[s]), whole, atol=tolerance, rtol=tolerance)
