"""Sampling: the right distribution, and the same draw in whatever company."""

from __future__ import annotations

import pytest
import torch

from gpt_fast.engine.sampling import SamplingRow, adjust, invert, logprobs, probabilities, sample, uniform
from gpt_fast.params import SamplingParams


def row(position: int = 5, seed: int = 0, **fields: float) -> SamplingRow:
    return SamplingRow(SamplingParams(**{"temperature": 1.0, **fields}).resolved(), seed, position)  # type: ignore[arg-type]


def kept(logits: torch.Tensor, **fields: float) -> list[int]:
    probs = probabilities(logits[None], [row(**fields).params])[0]
    return probs.nonzero().flatten().tolist()


LOGITS = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03]).log()


def test_temperature_zero_is_argmax() -> None:
    logits = torch.randn(4, 50)
    assert sample(logits, [row(temperature=0.0)] * 4).tolist() == logits.argmax(-1).tolist()


def test_top_k_top_p_min_p_keep_what_they_say() -> None:
    assert kept(LOGITS, top_k=2) == [0, 1]
    assert kept(LOGITS, top_k=500) == [0, 1, 2, 3, 4]
    assert kept(LOGITS, top_p=0.5) == [0]
    assert kept(LOGITS, top_p=0.51) == [0, 1]
    assert kept(LOGITS, top_p=0.91) == [0, 1, 2, 3]
    assert kept(LOGITS, min_p=0.29) == [0, 1, 2]
    assert kept(LOGITS.flip(0), top_k=1) == [4]


def test_the_order_is_temperature_min_p_top_k_top_p() -> None:
    # top_p sees what top_k left, renormalised: 0.5 and 0.25 are then 2/3 and 1/3.
    assert kept(LOGITS, top_k=2, top_p=0.66) == [0]
    assert kept(LOGITS, top_k=2, top_p=0.67) == [0, 1]
    # min_p comes after temperature: at 2 the ratio 0.15 / 0.5 is its square root, 0.55.
    assert kept(LOGITS, temperature=2.0, min_p=0.5) == [0, 1, 2]
    # top_p comes after min_p: without the last two tokens the first is 0.556 of the rest.
    assert kept(LOGITS, min_p=0.2, top_p=0.55) == [0]


def test_wide_vocabularies_take_the_short_way_to_the_same_answer() -> None:
    generator = torch.Generator().manual_seed(0)
    peaked = torch.randn(5000, generator=generator) * 5
    flat = torch.randn(5000, generator=generator) * 0.1  # its nucleus is wider than the candidates
    for logits in (peaked, flat):
        for fields in ({"top_p": 0.9}, {"top_k": 3000, "top_p": 0.8}, {"top_k": 2000}, {"top_k": 40, "top_p": 0.5}):
            ranked = logits.sort(descending=True)
            probs = ranked.values.softmax(-1)
            keep = torch.arange(5000) < fields.get("top_k", 5000)
            probs = probs * keep / (probs * keep).sum()
            keep &= (probs.double().cumsum(-1) - probs) < fields.get("top_p", 1.0)
            expected = ranked.indices[keep].sort().values.tolist()
            actual = kept(logits, **fields)
            assert abs(len(actual) - len(expected)) <= 1  # one token may fall either side of the limit by rounding
            assert len(set(actual) ^ set(expected)) <= 1


def test_draws_follow_the_distribution() -> None:
    count = 20_000
    rows = [row(position=i, seed=3) for i in range(count)]
    drawn = sample(LOGITS.expand(count, 5), rows)
    frequency = torch.bincount(drawn, minlength=5) / count
    torch.testing.assert_close(frequency, LOGITS.exp(), atol=0.012, rtol=0)


def test_a_draw_does_not_depend_on_its_company() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 3000, generator=generator)
    rows = [
        row(seed=1),
        row(seed=2, top_k=50),
        row(seed=3, top_p=0.9),
        row(seed=4, min_p=0.1),
        row(temperature=0.0),
        row(seed=6, temperature=0.7, top_k=900, top_p=0.95),
    ]
    together = sample(logits, rows).tolist()
    alone = [int(sample(logits[i : i + 1], rows[i : i + 1])) for i in range(6)]
    assert together == alone


def test_uniform_is_a_function_of_seed_position_and_stream() -> None:
    assert uniform(1, 2) == uniform(1, 2)
    values = {uniform(s, p) for s in range(-3, 96) for p in range(30)}
    assert len(values) == 33 * 30 * 3
    assert all(0 <= v < 1 for v in values)
    assert abs(sum(values) / len(values) - 0.5) < 0.02


@pytest.mark.parametrize("noise", [0.0, 0.999999999999, 1 - 2**-53])
def test_inversion_never_leaves_the_support(noise: float) -> None:
    probs = torch.tensor([[0.0, 0.3, 0.7, 0.0]])
    assert int(invert(probs, torch.tensor([noise], dtype=torch.float64))) in (1, 2)


def test_penalties_bias_and_min_tokens_act_on_their_tokens_alone() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5, 0.0, 3.0]])

    def adjusted(tokens: list[int], num_prompt: int, **fields: object) -> list[float]:
        params = SamplingParams(temperature=0.0, **fields).resolved()  # type: ignore[arg-type]
        rows = [SamplingRow(params, 0, len(tokens), tokens, num_prompt, frozenset({4}))]
        return adjust(logits, rows)[0].tolist()

    # token 0 in the prompt, 1 generated twice, 2 generated once
    tokens = [0, 1, 1, 2]
    assert adjusted(tokens, 1, presence_penalty=0.5) == [2.0, -1.5, 0.0, 0.0, 3.0]
    assert adjusted(tokens, 1, frequency_penalty=0.5) == [2.0, -2.0, 0.0, 0.0, 3.0]
    assert adjusted(tokens, 1, repetition_penalty=2.0) == [1.0, -2.0, 0.25, 0.0, 3.0]
    assert adjusted(tokens, 1, logit_bias={3: 5.0, 0: -100.0}) == [-98.0, -1.0, 0.5, 5.0, 3.0]
    assert adjusted(tokens, 1, min_tokens=4) == [2.0, -1.0, 0.5, 0.0, -torch.inf]
    assert adjusted(tokens, 1, min_tokens=3) == logits[0].tolist()
    # bias comes before the penalties: 0.5 + 1 is halved
    assert adjusted(tokens, 1, repetition_penalty=2.0, logit_bias={2: 1.0})[2] == 0.75


def test_adjusting_one_row_leaves_the_others() -> None:
    logits = torch.randn(3, 40)
    penalised = SamplingRow(SamplingParams(repetition_penalty=2.0).resolved(), 0, 3, [1, 2, 3], 1)
    out = adjust(logits, [row(), penalised, row(temperature=0.0)])
    assert torch.equal(out[0], logits[0])
    assert torch.equal(out[2], logits[2])
    assert not torch.equal(out[1], logits[1])


def test_logprobs_are_of_the_models_own_distribution() -> None:
    found = logprobs(LOGITS.expand(2, 5), [3, 0], [2, 0])
    assert found[0].token == 3
    assert found[0].logprob == pytest.approx(float(LOGITS[3]))
    assert [token for token, _ in found[0].top] == [0, 1]
    assert found[0].top[1][1] == pytest.approx(float(LOGITS[1]))
    assert found[1].top == ()
