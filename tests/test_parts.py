"""A step in parts gives what the whole step gives, and each sequence's new tokens go where they belong."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gpt_fast.config import ModelConfig
from gpt_fast.engine.parts import FEW, parts_of
from gpt_fast.engine.runner import Runner
from gpt_fast.engine.scheduler import SequencePlan, StepPlan
from gpt_fast.model import steps
from gpt_fast.model.transformer import Transformer

PAGE = 4


def sequence(slot: int, count: int, start: int = 0, is_prompt: bool = False, num_logits: int = 1) -> SequencePlan:
    tokens = tuple((7 * p + 3 * slot) % 40 for p in range(start, start + count))
    pages = tuple(range(1 + 12 * slot, 13 + 12 * slot))
    return SequencePlan(slot, tokens, start, 0, pages, num_logits, start + count, is_prompt)


@given(st.lists(st.tuples(st.integers(1, 2 * FEW), st.booleans()), max_size=30), st.integers(FEW, 5 * FEW))
def test_every_sequence_is_in_one_part(given: list[tuple[int, bool]], most: int) -> None:
    plan = StepPlan(tuple(sequence(s, n, is_prompt=p, num_logits=s % 2) for s, (n, p) in enumerate(given)))
    parts = parts_of(plan, most)
    found = [s for part in parts for s in part.plan.sequences]
    assert sorted(s.slot for s in found) == list(range(len(given)))
    assert [part.prompts for part in parts] == sorted(part.prompts for part in parts)  # prompts last
    assert sum(part.prompts for part in parts) <= 1
    for part in parts:
        assert all((s.is_prompt or len(s.tokens) > FEW) == part.prompts for s in part.plan.sequences)
        assert part.prompts or part.plan.num_tokens <= most
        every = [token for s in plan.sequences for token in s.tokens]
        assert [every[i] for i in part.tokens] == [token for s in part.plan.sequences for token in s.tokens]
        rows = [s.slot for s in plan.sequences for _ in range(s.num_logits)]
        assert [rows[i] for i in part.rows] == [s.slot for s in part.plan.sequences for _ in range(s.num_logits)]
    groups = [part.plan for part in parts if not part.prompts]
    for group, following in itertools.pairwise(groups):
        assert group.num_tokens + len(following.sequences[0].tokens) > most, "a group ends only where it is full"


@torch.inference_mode()
@pytest.mark.parametrize(
    ("counts", "parts"),
    [
        ([1, 20, 1, 3], [[0, 2, 3], [1]]),
        ([18, 30], [[0, 1]]),  # no generated token: one step
        ([16, 1, 16, 16, 17], [[0, 1, 2], [3], [4]]),
    ],
)
def test_parts_give_what_the_whole_step_gives(
    counts: list[int], parts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    served = steps.TorchModel(
        Transformer(ModelConfig("llama", 40, 32, 2, 2, 1, 16, 48, 64)), kernels=False, compile=False
    )
    sizes: dict[str, Any] = {"max_batch": 8, "max_seq_len": 48, "num_pages": 100, "page_size": PAGE, "prefill_chunk": 8}
    whole, apart = (Runner(served, **sizes) for _ in range(2))
    ran: list[list[int]] = []

    class Apart:
        most = 40

        def step(self, tokens: Tensor, *others: Any) -> Tensor:
            new = others[2].query_start.diff().tolist()
            ran.append([s for s, count in enumerate(new) if count])
            assert len(tokens) == sum(new[s] for s in ran[-1]) == sum(counts[s] for s in ran[-1])
            return step(tokens, *others)

        prompts = step

    step, held = apart._step, Apart()
    seen = [5 * s % 7 for s in range(len(counts))]
    before = StepPlan(tuple(sequence(s, n) for s, n in enumerate(seen) if n))
    plan = StepPlan(tuple(sequence(s, n, seen[s], num_logits=1 + s % 2 * (n > 1)) for s, n in enumerate(counts)))
    for runner in (whole, apart):
        if before.sequences:
            runner.execute(before)
    monkeypatch.setattr(type(step), "apart", held)
    got = apart.execute(plan)
    assert ran == parts
    ran.clear()
    tokens = torch.tensor([token for s in plan.sequences for token in s.tokens])
    assert torch.equal(apart.execute(plan, tokens), got)  # tokens that the host does not know
    monkeypatch.setattr(type(step), "apart", None)
    torch.testing.assert_close(got, whole.execute(plan))
    for ours, theirs in zip(apart.cache, whole.cache, strict=True):
        torch.testing.assert_close(ours.k, theirs.k)
