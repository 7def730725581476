"""A step in parts gives what the whole step gives, and each sequence's new tokens go where they belong."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gpt_fast.config import ModelConfig
from gpt_fast.kernels.cache import LayerCache, StepLayout
from gpt_fast.model.step_parts import FEW, StepInputs, run_in_parts, share_out
from gpt_fast.model.transformer import Transformer

PAGE = 4


@given(st.lists(st.integers(0, 2 * FEW), max_size=30), st.integers(FEW, 5 * FEW))
def test_every_slot_with_new_tokens_is_in_one_part(counts: list[int], most: int) -> None:
    groups, long = share_out(counts, most)
    assert sorted([*(s for group in groups for s in group), *long]) == [s for s, n in enumerate(counts) if n]
    assert all(counts[s] > FEW for s in long)
    for group in groups:
        assert group == sorted(group)
        assert 1 <= sum(counts[s] for s in group) <= most
        assert all(counts[s] <= FEW for s in group)
    for group, following in itertools.pairwise(groups):
        assert sum(counts[s] for s in group) + counts[following[0]] > most, "a group ends only where it is full"


def step_of(counts: list[int], seen: list[int], chosen: list[int]) -> StepInputs:
    pages = -(-max(n + count for n, count in zip(seen, counts, strict=True)) // PAGE)
    table = torch.arange(1, 1 + len(counts) * pages, dtype=torch.int32).view(len(counts), pages)
    where = [(s, seen[s] + i) for s, count in enumerate(counts) for i in range(count)]
    positions = torch.tensor([p for _, p in where])
    layout = StepLayout(
        torch.tensor([0, *counts]).cumsum(0).int(),
        torch.tensor([n + count for n, count in zip(seen, counts, strict=True)]).int(),
        table,
        torch.tensor([int(table[s, p // PAGE]) * PAGE + p % PAGE for s, p in where]),
    )
    tokens = torch.tensor([(7 * p + 3 * s) % 40 for s, p in where])
    return StepInputs(tokens, positions, positions + 1, layout, torch.tensor(chosen))


@torch.inference_mode()
@pytest.mark.parametrize(
    ("counts", "parts"),
    [
        ([1, 20, 0, 1, 3], [[0, 3, 4], [1]]),
        ([18, 0, 30], []),  # no generated token: one step
        ([16, 1, 16, 16, 17], [[0, 1, 2], [3], [4]]),
    ],
)
def test_parts_give_what_the_whole_step_gives(counts: list[int], parts: list[list[int]]) -> None:
    torch.manual_seed(1)
    model = Transformer(ModelConfig("llama", 40, 32, 2, 2, 1, 16, 48, 64))
    seen = [5 * s % 7 for s in range(len(counts))]
    step = step_of(counts, seen, [0, 2, sum(counts) - 1, sum(counts) - 2])
    start = [LayerCache(*(torch.randn(60, PAGE, 1, 16) for _ in range(2))) for _ in range(2)]

    def copies() -> list[LayerCache]:
        return [LayerCache(layer.k.clone(), layer.v.clone()) for layer in start]

    whole_cache, cache = copies(), copies()
    ran: list[list[int]] = []

    def run(part: StepInputs) -> Tensor:
        new = part.layout.query_start.diff().tolist()
        ran.append([s for s, count in enumerate(new) if count])
        assert all(new[s] == counts[s] for s in ran[-1])
        return model.step(*part[:3], cache, *part[3:])

    wanted = model.step(*step[:3], whole_cache, *step[3:])
    got = run_in_parts(step, 40, run, run)
    assert ran == (parts or [[s for s, n in enumerate(counts) if n]])
    torch.testing.assert_close(got, wanted)
    for ours, theirs in zip(cache, whole_cache, strict=True):
        torch.testing.assert_close(ours.k, theirs.k)
