"""Sampling: the right distribution, and the same draw in whatever company."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch

from gpt_fast.engine.sampling import (
    NO_TOKEN,
    SamplingRow,
    adjust,
    draw_of,
    log_total,
    logprobs,
    narrowed,
    plain_draw,
    sample,
)
from gpt_fast.kernels.race import Draw, draw, exponential, race, race_key
from gpt_fast.params import SamplingParams


def row(position: int = 5, seed: int = 0, **fields: float) -> SamplingRow:
    return SamplingRow(SamplingParams(**{"temperature": 1.0, **fields}).resolved(), seed, position)  # type: ignore[arg-type]


def kept(logits: torch.Tensor, **fields: float) -> list[int]:
    return narrowed(logits[None], [draw_of(row(**fields))])[0].isfinite().nonzero().flatten().tolist()


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


def test_a_total_has_the_same_bits_alone_and_in_company_whatever_is_ruled_out_behind() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)  # among which torch would share a single row
    try:
        scaled = 3 * torch.randn(64, 50257)
        together = log_total(scaled)
        torch.testing.assert_close(together.double(), scaled.double().logsumexp(-1), atol=1e-5, rtol=0)
        for count in (1, 2, 5):
            assert torch.equal(torch.cat([log_total(part) for part in scaled.split(count)]), together)
    finally:
        torch.set_num_threads(before)
    ranked = scaled.topk(3000).values.masked_fill(torch.arange(3000) >= 900, -torch.inf)
    for width in (1024, 1500, 1501, 2999):
        assert torch.equal(log_total(ranked[:, :width]), log_total(ranked))


def test_the_order_is_temperature_min_p_top_k_top_p() -> None:
    # top_p sees what top_k left, renormalised: 0.5 and 0.25 are then 2/3 and 1/3.
    assert kept(LOGITS, top_k=2, top_p=0.66) == [0]
    assert kept(LOGITS, top_k=2, top_p=0.67) == [0, 1]
    # min_p comes after temperature: at 2 the ratio 0.15 / 0.5 is its square root, 0.55.
    assert kept(LOGITS, temperature=2.0, min_p=0.5) == [0, 1, 2]
    # top_p comes after min_p: without the last two tokens the first is 0.556 of the rest.
    assert kept(LOGITS, min_p=0.2, top_p=0.55) == [0]


def test_top_p_is_as_exact_at_the_lowest_temperature() -> None:
    assert kept(torch.tensor([2.5, 2.5, 2.5, 0.0]), temperature=1e-5, top_p=0.99) == [0, 1, 2]
    close = torch.tensor([300.0, 300.0, 300.0, 300.0 - 3 * 2.0**-10])  # the last is 1 / 19 as likely as each
    for top_p in (0.97, 0.98):
        assert kept(close, temperature=1e-3, top_p=top_p) == [0, 1, 2]


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


Sampler = Callable[[torch.Tensor, Sequence[SamplingRow]], torch.Tensor]
DRAWS = 100_000


def chi_square(draw: Sampler, **fields: float) -> tuple[float, float]:
    """``distance`` of 100,000 draws from 40 tokens."""
    logits = torch.randn(40, generator=torch.Generator().manual_seed(8)) * 2
    probs = narrowed(logits[None], [draw_of(row(**fields))])[0].double().softmax(-1)
    params = row(**fields).params
    rows = [SamplingRow(params, seed=i // 1000, position=i % 1000) for i in range(DRAWS)]
    return distance(draw(logits.expand(DRAWS, 40), rows), probs)


def distance(drawn: torch.Tensor, probs: torch.Tensor) -> tuple[float, float]:
    """How far tokens ``drawn`` [N] are from ``probs`` [V] (chi-square), and the greatest value that 1 in 10,000 true
    samplers exceeds. Tokens expected fewer than five times count as one. Infinite for a token that is ruled out."""
    found, expected = torch.bincount(drawn, minlength=len(probs)).double(), probs.double() * len(drawn)
    impossible = float(found[probs == 0].sum())
    often = expected >= 5
    found, expected = (torch.cat((v[often], v[~often].sum()[None])) for v in (found, expected))
    found, expected = found[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3  # Wilson & Hilferty 1931
    return float(((found - expected) ** 2 / expected).sum()) if not impossible else torch.inf, limit


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 0.5}, {"temperature": 2.0}, {"top_p": 0.9}, {"top_k": 7, "top_p": 0.8}]
)
@pytest.mark.parametrize("sampler", [sample, lambda logits, rows: plain_draw(logits, [draw_of(r) for r in rows])])
def test_draws_follow_the_distribution(sampler: Sampler, fields: dict[str, float]) -> None:
    found, limit = chi_square(sampler, **fields)
    assert found < limit


@pytest.mark.parametrize("fields", [{}, {"temperature": 2.0}, {"top_p": 0.9}])
def test_a_biased_sampler_is_found_out(fields: dict[str, float]) -> None:
    def biased(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        return sample(logits * 1.04, rows)  # as at a temperature 4 % lower

    found, limit = chi_square(biased, **fields)
    assert found > limit


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


def test_every_position_of_every_seed_has_its_own_key() -> None:
    assert race_key(1, 2) == race_key(1, 2)
    keys = {race_key(s, p) for s in (*range(-3, 96), 2**63) for p in range(30)}
    assert len(keys) == 100 * 30
    assert all(-(2**31) <= word < 2**31 for key in keys for word in key)


def test_noise_is_exponential_and_tokens_and_keys_have_their_own() -> None:
    token = torch.arange(200_000, dtype=torch.int32)
    first, second = (exponential(token, *torch.tensor(race_key(0, p), dtype=torch.int32)) for p in (0, 1))
    for noise in (first, second):
        ranks = 1 - (-noise.sort().values.double()).exp()
        steps = (torch.arange(len(ranks)) + 0.5) / len(ranks)
        assert (ranks - steps).abs().max() < 1.95 / len(ranks) ** 0.5  # Kolmogorov's limit for 1 in 1,000
    for one, other in ((first, second), (first[:-1], first[1:]), (first[:-256], first[256:])):
        together = torch.stack((one, other)).corrcoef()[0, 1]
        assert abs(together) < 4 / len(one) ** 0.5


CHOICES: dict[str, list[float | int | None]] = {
    "temperature": [0.0, 0.3, 1.0, 1.7],
    "top_k": [None, 1, 5, 900],
    "top_p": [None, 1e-300, 1e-6, 0.1, 0.5, 0.9, 0.999],
    "min_p": [None, 0.05, 0.3, 1.0],
}


@pytest.mark.parametrize("vocab_size", [1, 7, 8, 40, 5003])
def test_the_kernel_draws_as_its_plain_twin(vocab_size: int) -> None:
    generator, choose = torch.Generator().manual_seed(vocab_size), random.Random(vocab_size)
    logits = torch.randn(600, vocab_size, generator=generator) * 5
    logits[torch.rand(600, vocab_size, generator=generator) < 0.3] = -torch.inf
    logits[:, 0] = 0.0
    rows = [
        SamplingRow(SamplingParams(**{k: choose.choice(v) for k, v in CHOICES.items()}).resolved(), 7, p)  # type: ignore[arg-type]
        for p in range(600)
    ]
    draws = [draw_of(r) for r in rows]
    drawn, plain = draw(logits, draws), plain_draw(logits, draws)
    assert (drawn != plain).sum() <= 1  # two times, or a token at a limit, may differ by rounding alone
    assert logits.gather(1, drawn[:, None]).isfinite().all()


def test_top_p_is_a_share_of_all_that_top_k_keeps_ties_included() -> None:
    """By torch and by the kernel. Logits of bfloat16 are often equal."""
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.1]).log()
    assert kept(logits, top_k=2, top_p=0.39) == [0]  # the shares are 0.4 and three times 0.2
    assert kept(logits, top_k=2, top_p=0.6) == [0, 1, 2, 3]
    generator, choose = torch.Generator().manual_seed(2), random.Random(2)
    tied = torch.randint(-4, 5, (600, 30), generator=generator).float()
    rows = [
        row(position=p, top_k=choose.choice([2, 5, 12]), top_p=choose.choice([0.3, 0.6, 0.8, 0.95])) for p in range(600)
    ]
    draws = [draw_of(r) for r in rows]
    assert (draw(tied, draws) != plain_draw(tied, draws)).sum() <= 1


def by_kernel(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return draw(logits, [Draw(temperature)] * len(logits))


def by_torch(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return plain_draw(logits, [Draw(temperature)] * len(logits))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("sampler", [by_kernel, by_torch])
def test_a_row_without_a_finite_greatest_logit_draws_nothing(
    sampler: Callable[[torch.Tensor, float], torch.Tensor], temperature: float
) -> None:
    logits = torch.zeros(5, 19)
    logits[0, 3] = torch.nan
    logits[1, 18] = torch.nan
    logits[2, 11] = torch.inf
    logits[3] = -torch.inf
    drawn = sampler(logits, temperature).tolist()
    assert drawn[:4] == [NO_TOKEN] * 4
    assert drawn[4] >= 0


def test_two_near_distributions_draw_the_same_token_most_of_the_time() -> None:
    generator = torch.Generator().manual_seed(5)
    keys = torch.tensor([race_key(0, p) for p in range(20_000)], dtype=torch.int32)
    target = torch.randn(1, 300, generator=generator) * 3
    draft = target + torch.randn(1, 300, generator=generator) * 0.5
    distance = float((target.softmax(-1) - draft.softmax(-1)).abs().sum()) / 2
    same = float((race(target.expand(20_000, -1), keys) == race(draft.expand(20_000, -1), keys)).double().mean())
    assert same > (1 - distance) / (1 + distance) - 0.01


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


def test_penalties_equal_their_definition_to_the_last_bit() -> None:
    generator, rows, expected = torch.Generator().manual_seed(0), [], []
    logits = torch.randn(6, 50, generator=generator) * 3
    logits[0, 7] = -torch.inf  # what a grammar forbids
    for i, (repetition, frequency, presence) in enumerate(
        [(1.3, 0.0, 0.0), (1.0, 0.7, 0.0), (1.0, 0.0, -0.4), (0.8, -1.3, 1.1), (1.0, 0.3, 0.9), (2.0, 0.1, 0.1)]
    ):
        tokens = torch.randint(0, 50, (40 * i,), generator=generator).tolist()
        fields = {"repetition_penalty": repetition, "frequency_penalty": frequency, "presence_penalty": presence}
        rows.append(SamplingRow(SamplingParams(**fields).resolved(), 0, len(tokens), tokens, len(tokens) // 3))
        generated = torch.tensor([tokens[len(tokens) // 3 :].count(token) for token in range(50)], dtype=torch.float32)
        seen = torch.tensor([token in tokens for token in range(50)])
        repeated = torch.where(logits[i] > 0, logits[i] / repetition, logits[i] * repetition)
        penalised = torch.where(seen, repeated, logits[i])
        expected.append(penalised - generated * frequency - (generated > 0) * presence)
    assert torch.equal(adjust(logits, rows), torch.stack(expected))
    assert torch.equal(adjust(logits[:1], rows[:1]), logits[:1]), "nothing was said yet"


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


def test_of_a_small_vocabulary_all_log_probabilities_come() -> None:
    [entry] = logprobs(LOGITS.expand(1, 5), [3], [20])
    assert sorted(token for token, _ in entry.top) == [0, 1, 2, 3, 4]
    assert sum(math.exp(value) for _, value in entry.top) == pytest.approx(1)
