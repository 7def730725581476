"""What drafts rest on: a row's numbers do not depend on the rows beside it, in any family."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import families_table
import pytest
import torch
from programs import needs_cpp
from test_drafts import Knowing, seen
from torch import Tensor

from gpt_fast import LLM, SamplingParams
from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.engine.runner import Runner
from gpt_fast.engine.scheduler import SequencePlan, StepPlan
from gpt_fast.engine.speculate.speculation import Speculation
from gpt_fast.model.steps import serve

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    needs_cpp,
]

MODES = (None, "int8", "int4")
MOST = 16  # rows: a token and 15 drafts
PAGES = 12  # of 8 tokens, for each of two sequences


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for every family, which the first test that wants it fills."""
    return {name: tmp_path_factory.mktemp("families") / name for name in families_table.FAMILIES}


def folder_of(name: str, saved: dict[str, Path]) -> Path:
    if not saved[name].exists():
        families_table.FAMILIES[name]().save_pretrained(saved[name])
    return saved[name]


def runner_of(folder: Path, mode: str | None, cache_dtype: torch.dtype | None = None) -> Runner:
    model = serve(Checkpoint.open(folder).build(torch.float32, quantize=mode))
    sizes = {"max_batch": 2, "max_seq_len": 8 * PAGES, "num_pages": 1 + 2 * PAGES, "page_size": 8, "prefill_chunk": 64}
    return Runner(model, cache_dtype=cache_dtype, **sizes)


def part(slot: int, tokens: Sequence[int], start: int, end: int, num_logits: int) -> SequencePlan:
    first = 1 + slot * PAGES
    pages = tuple(range(first, first + PAGES)) if start == 0 else ()
    return SequencePlan(slot, tuple(tokens[start:end]), start, 0 if start == 0 else PAGES, pages, num_logits, 20)


@pytest.mark.parametrize(
    ("mode", "cache_dtype"), [(None, None), (None, torch.int8), ("int8", None), ("int4", None)],
    ids=["float32", "int8 cache", "int8", "int4"],
)  # fmt: skip
@pytest.mark.parametrize("name", families_table.FAMILIES)
def test_a_row_has_the_same_bits_alone_and_beside_drafts(
    name: str, mode: str | None, cache_dtype: torch.dtype | None, saved: dict[str, Path]
) -> None:
    runner = runner_of(folder_of(name, saved), mode, cache_dtype)
    tokens, other = families_table.prompts(2, 64, seed=2)[1], families_table.prompts(2, 64, seed=3)[1]

    def rows(*parts: SequencePlan) -> Tensor:
        return runner.execute(StepPlan(parts)).clone()

    rows(part(0, tokens, 0, 20, 0), part(1, other, 0, 33, 0))
    alone = torch.cat([rows(part(0, tokens, place, place + 1, 1)) for place in range(20, 20 + MOST)])
    for count in range(2, MOST + 1):
        assert torch.equal(rows(part(0, tokens, 20, 20 + count, count)), alone[:count]), count
    for count in (1, 3, 8):
        beside = rows(part(0, tokens, 24, 24 + count, count), part(1, other, 33, 38, 5))
        assert torch.equal(beside[:count], alone[4 : 4 + count]), f"{count} beside another sequence"


def asked() -> list[tuple[list[int], SamplingParams]]:
    """Greedy and sampled, logged. One sequence grows beyond 32 tokens, where some families rotate otherwise."""
    fields: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 2}, {"temperature": 0.8, "top_p": 0.9, "logprobs": 1},
        {"temperature": 1.0, "repetition_penalty": 1.3, "logprobs": 0, "prompt_logprobs": 1},
    ]  # fmt: skip
    prompts = families_table.prompts(3, 40, seed=4)
    return [(prompt, SamplingParams(max_tokens=24, seed=i, ignore_eos=True, **own))
            for i, (prompt, own) in enumerate(zip(prompts, fields, strict=True))]  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", families_table.FAMILIES)
def test_drafts_change_no_answer_of_any_family(name: str, mode: str | None, saved: dict[str, Path]) -> None:
    prompts, params = (list(column) for column in zip(*asked(), strict=True))
    options: dict[str, Any] = {"dtype": "float32", "quantize": mode, "max_seq_len": 96, "max_batch": 3}
    with LLM(folder_of(name, saved), prefix_cache=False, threads=1, **options) as llm:
        plain = [llm.generate(prompt, own) for prompt, own in asked()]  # one at a time
        truth = {(*prompt, own.seed): done.token_ids for prompt, own, done in zip(prompts, params, plain, strict=True)}
        llm.engine.speculation = Speculation(Knowing(truth, error_rate=0.2), 7)
        done = llm.generate(prompts, params)
    assert [seen(d) for d in done] == [seen(d) for d in plain]
    assert 0 < sum(d.num_accepted for d in done) < sum(d.num_drafted for d in done)
