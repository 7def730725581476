"""Rules that verify guesses: each gives the target's distribution, and the test that says so finds wrong rules."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_model import EOS, VOCAB_SIZE, FakeModel, FakeModelLLM
from test_cli import gpt_fast
from test_sampling import DRAWS, distance
from torch import Tensor

from gpt_fast import LLM, SamplingParams
from gpt_fast.engine.speculate import published
from gpt_fast.engine.speculate.published import RULES, Coupled, Guesses, Rejection, Verdict
from gpt_fast.errors import RequestError

DEMO = Path(__file__).parents[1] / "model_store" / "demo"
PAPERS = ("leviathan", "chen")

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- distributions ----

_GENERATOR = torch.Generator().manual_seed(3)
V = 7
TARGET = 1.5 * torch.randn(V, V, generator=_GENERATOR)  # logits behind each token
DRAFT = 0.6 * TARGET + torch.randn(V, V, generator=_GENERATOR)


def target(tokens: Tensor) -> Tensor:
    return TARGET[tokens]


def draft(tokens: Tensor) -> Tensor:
    return DRAFT[tokens]


def softmax_of(table: Tensor, params: SamplingParams) -> Tensor:
    """[V, V] float64: what follows each token."""
    return published.distribution(table, params).double().softmax(dim=-1)


def sampling(**fields: float) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, **fields}).resolved()  # type: ignore[arg-type]


def two_tokens(rule: Any, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """The first and the second token behind token 0, each [DRAWS]. Two guesses in the first step; where no guess was
    right, the second token comes from its own step."""
    start = torch.zeros(DRAWS, 1, dtype=torch.int64)
    drafts, (right, token) = published.step(target, draft, rule, start, 2, params)
    first = drafts[:, 0].where(right > 0, token)
    second = drafts[:, 1].where(right > 1, token)
    known = torch.stack((start[:, 0], first), dim=1)
    drafts, (again, token) = published.step(target, draft, rule, known, 1, params)
    return first, second.where(right > 0, drafts[:, 0].where(again > 0, token))


def verdicts(rule: Any, params: SamplingParams) -> list[bool]:
    """Whether the first token, and the first two together, are distributed as the target's."""
    probs = softmax_of(TARGET, params)
    first, second = two_tokens(rule, params)
    single = distance(first, probs[0])
    joint = distance(first * V + second, (probs[0][:, None] * probs).flatten())
    return [found < limit for found, limit in (single, joint)]


@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 0.5}, {"temperature": 2.0}, {"top_p": 0.8}, {"temperature": 0.8, "top_k": 4, "min_p": 0.02}],
    ids=str,
)
@pytest.mark.parametrize("name", RULES)
def test_tokens_are_distributed_as_the_targets(name: str, fields: dict[str, float]) -> None:
    assert verdicts(RULES[name](1), sampling(**fields)) == [True, True]


class SameNoise:
    """What judges a guess is the noise that it was drawn with."""

    def __init__(self, rule: Rejection) -> None:
        self.draft, self.verify = rule.draft, rule.verify
        for noise in (rule._draft_noise, rule._noise):
            noise.manual_seed(0)


def nothing_else(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    return torch.ones(tokens.shape)


def upside_down(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    return (q.gather(-1, tokens[..., None]) / p.gather(-1, tokens[..., None]))[..., 0]


def targets_own(p: Tensor, q: Tensor) -> Tensor:
    return p


def the_other_way(p: Tensor, q: Tensor) -> Tensor:
    return (q - p).clamp(min=0) + 1e-9


WRONG: dict[str, tuple[str, Any]] = {
    "every guess is kept": ("ratio", nothing_else),
    "q / p in the place of p / q": ("ratio", upside_down),
    "a rejected guess is replaced by p": ("residual", targets_own),
    "a rejected guess is replaced by q - p": ("residual", the_other_way),
}


@pytest.mark.parametrize("fields", [{}, {"temperature": 2.0}, {"top_p": 0.8}], ids=str)
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", PAPERS)
def test_a_wrong_rule_is_found_out(
    name: str, wrong: str, fields: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, *WRONG[wrong])
    assert verdicts(RULES[name](1), sampling(**fields)) == [False, False]


@pytest.mark.parametrize("fields", [{}, {"temperature": 2.0}, {"top_p": 0.8}], ids=str)
@pytest.mark.parametrize("name", PAPERS)
def test_noise_that_draft_and_acceptance_share_is_found_out(name: str, fields: dict[str, float]) -> None:
    rule = RULES[name](1)
    assert isinstance(rule, Rejection)
    assert verdicts(SameNoise(rule), sampling(**fields)) == [False, False]


@pytest.mark.parametrize("fields", [{}, {"temperature": 2.0}, {"top_p": 0.8}], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_a_biased_sampler_is_found_out(name: str, fields: dict[str, float]) -> None:
    def sharper(tokens: Tensor) -> Tensor:
        return TARGET[tokens] * 1.04  # as at a temperature 4 % lower

    params = sampling(**fields)
    probs = softmax_of(TARGET, params)
    start = torch.zeros(DRAWS, 1, dtype=torch.int64)
    drafts, (right, token) = published.step(sharper, draft, RULES[name](1), start, 1, params)
    found, limit = distance(drafts[:, 0].where(right > 0, token), probs[0])
    assert found > limit


class FreshNoise(Coupled):
    """Takes guesses that agree, and draws once more where they do not: likely tokens come too often."""

    def verify(self, target: Tensor, draft: Tensor, drafts: Tensor, position: int) -> Verdict:
        right, _ = super().verify(target, draft, drafts, position)
        there = target[torch.arange(len(drafts)), right]
        return Verdict(right, published.draw(there.softmax(dim=-1), torch.Generator().manual_seed(position)))


class AlwaysKept(Coupled):
    def verify(self, target: Tensor, draft: Tensor, drafts: Tensor, position: int) -> Verdict:
        right, token = super().verify(target, draft, drafts, position)
        return Verdict(torch.full_like(right, drafts.shape[1]), token)


@pytest.mark.parametrize("rule", [FreshNoise, AlwaysKept])
def test_a_wrong_coupled_rule_is_found_out(rule: Callable[[int], Coupled]) -> None:
    assert verdicts(rule(1), sampling()) == [False, False]


# ---- acceptance ----


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.5}, {"top_p": 0.8}], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_as_many_guesses_are_kept_as_the_papers_say(name: str, fields: dict[str, float]) -> None:
    params = sampling(**fields)
    both = torch.minimum(softmax_of(TARGET, params), softmax_of(DRAFT, params))  # [V, V]
    one = float(both[0].sum())  # 1 - TV
    two = float((both[0] * both.sum(dim=-1)).sum())  # the first is kept and the second is, too
    _, (right, _) = published.step(target, draft, RULES[name](5), torch.zeros(DRAWS, 1, dtype=torch.int64), 2, params)
    for least, expected in ((1, one), (2, two)):
        share = float((right >= least).double().mean())
        scatter = 4 * (expected * (1 - expected) / DRAWS) ** 0.5
        if name in PAPERS:
            assert abs(share - expected) < scatter
        elif least == 1:
            assert one / (2 - one) - scatter < share < one + scatter  # (1 - TV) / (1 + TV)


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("name", RULES)
def test_a_draft_model_that_is_the_target_is_always_right(name: str, count: int) -> None:
    start = torch.zeros(1000, 1, dtype=torch.int64)
    drafts, (right, token) = published.step(target, target, RULES[name](0), start, count, sampling())
    assert drafts.shape == (1000, count)
    assert (right == count).all()
    assert ((token >= 0) & (token < V)).all()


@pytest.mark.parametrize("name", RULES)
def test_a_draft_model_that_is_never_right_costs_its_guesses_alone(name: str) -> None:
    low = torch.tensor([0.0] * 4 + [-torch.inf] * 3).expand(V, V)
    start = torch.zeros(1000, 1, dtype=torch.int64)
    models = (lambda tokens: low[tokens], lambda tokens: low.flip(1)[tokens].masked_fill(low[tokens] == 0, -torch.inf))
    _, (right, token) = published.step(*models, RULES[name](0), start, 3, sampling())
    assert (right == 0).all()
    assert (token < 4).all()


def test_a_residual_that_rounding_leaves_empty_is_the_target() -> None:
    p, q = torch.tensor([[0.5, 0.5], [0.75, 0.25]]), torch.tensor([[0.5, 0.5000001], [0.25, 0.75]])
    assert published.residual(p, q).tolist() == [[0.5, 0.5], [0.5, 0.0]]


# ---- completions ----


class Near(FakeModel):
    """The fake model with other numbers here and there."""

    def forward(self, tokens: Tensor) -> Tensor:
        noise = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
        return super().forward(tokens) + 0.3 * noise


REQUESTS = [
    {"max_tokens": 30, "temperature": 0.0},
    {"max_tokens": 1, "temperature": 1.0, "seed": 1},
    {"max_tokens": 40, "temperature": 1.0, "seed": 2, "ignore_eos": True},
    {"max_tokens": 40, "temperature": 0.7, "seed": 3, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.5, "seed": 4, "stop": ("a", "b", "c"), "top_k": 50},
    {"temperature": 1.0, "seed": 5, "stop_token_ids": tuple(range(60, 90))},
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with FakeModelLLM() as loaded:
        yield loaded


def complete(llm: LLM, name: str, fields: dict[str, Any]) -> tuple[Any, str, Guesses]:
    request, tally = llm.prepare("Once", SamplingParams(**fields)), Guesses()
    rule = RULES[name](request.seed)
    text = "".join(published.generate(FakeModel().forward, Near().forward, rule, request, 4, tally))
    return request.completion(), text, tally


@pytest.mark.parametrize("fields", REQUESTS, ids=str)
def test_coupled_gives_the_tokens_of_the_engine(llm: LLM, fields: dict[str, Any]) -> None:
    found, text, tally = complete(llm, "coupled", fields)
    wanted = llm.generate("Once", SamplingParams(**fields))
    assert (found.token_ids, text, found.finish_reason) == (wanted.token_ids, wanted.text, wanted.finish_reason)
    assert tally.num_tokens == len(wanted.token_ids)


@pytest.mark.parametrize("name", PAPERS)
def test_a_greedy_answer_is_the_same_by_every_rule(llm: LLM, name: str) -> None:
    found, text, _ = complete(llm, name, REQUESTS[0])
    wanted = llm.generate("Once", SamplingParams(**REQUESTS[0]))
    assert (found.token_ids, text) == (wanted.token_ids, wanted.text)


@pytest.mark.parametrize("fields", REQUESTS, ids=str)
@pytest.mark.parametrize("name", RULES)
def test_an_answer_ends_where_it_should_and_every_guess_is_counted(llm: LLM, name: str, fields: dict[str, Any]) -> None:
    found, text, tally = complete(llm, name, fields)
    assert found.text == text
    assert not any(stop in text for stop in fields.get("stop", ()))
    ends = {EOS, *fields.get("stop_token_ids", ())} if not fields.get("ignore_eos") else set()
    assert not ends & {*found.token_ids[:-1]}
    if found.finish_reason == "length":
        assert len(found.token_ids) == fields.get("max_tokens", 128 - found.num_prompt_tokens)
    assert tally.num_tokens == len(found.token_ids)
    assert tally.num_accepted + tally.num_rejected <= tally.num_drafted <= 4 * tally.num_calls
    assert tally.num_calls - 1 <= tally.num_tokens - tally.num_accepted <= tally.num_calls
    assert 0 <= tally.acceptance_rate <= 1


@pytest.mark.parametrize("name", PAPERS)
def test_a_seed_gives_one_answer_and_another_seed_another(llm: LLM, name: str) -> None:
    first, again, other = (complete(llm, name, {**REQUESTS[2], "seed": s})[0].token_ids for s in (2, 2, 2 + 2**32))
    assert first == again != other


UNSERVED: list[dict[str, Any]] = [
    {"min_tokens": 3},
    {"presence_penalty": 1.0},
    {"frequency_penalty": 1.0},
    {"repetition_penalty": 1.1},
    {"logit_bias": {5: 1.0}},
    {"bad_words": ("a",)},
    {"allowed_token_ids": (5,)},
    {"include_stop_str_in_output": True},
    {"skip_special_tokens": False},
    {"n": 2},
    {"logprobs": 0},
    {"prompt_logprobs": 1},
    {"json_schema": {"type": "object"}},
    {"regex": "a+"},
    {"choice": ("a", "b")},
    {"grammar": 'start: "a"'},
    {"shown_special_tokens": (1,)},
    {"timeout_s": 9.0},
]


@pytest.mark.parametrize("fields", UNSERVED, ids=lambda fields: next(iter(fields)))
def test_what_the_rules_do_not_serve_is_refused_by_name(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(RequestError, match=f"^{name} is not served") as caught:
        published.refuse(SamplingParams(**fields))
    assert caught.value.param == name


def test_every_other_field_is_served() -> None:
    refused = {name for fields in UNSERVED for name in fields}
    assert {field.name for field in dataclasses.fields(SamplingParams)} - refused == published._SUPPORTED
    published.refuse(SamplingParams(max_tokens=1, temperature=1.0, top_k=2, top_p=0.5, min_p=0.1, seed=1, stop="a"))


def test_a_model_that_computes_no_numbers_is_told() -> None:
    with pytest.raises(RequestError, match="not finite"):
        published.distribution(torch.full((1, 1, V), torch.nan), sampling())


# ---- the command ----


def asked(method: str, *more: str | Path) -> Any:
    where = ("--checkpoint", DEMO / "target", "--dtype", "float32", "--no-compile", "--prompt", "Once upon a time")
    return gpt_fast("generate", *where, "--method", method, "--max-new-tokens", "12", *more)


@pytest.mark.parametrize("method", PAPERS)
def test_the_command_prints_the_completion_and_on_stderr_the_counts(method: str) -> None:
    plain = asked("coupled", "--temperature", "0")
    found = asked(method, "--temperature", "0", "--draft", DEMO / "draft", "--speculate-k", "3")
    assert found.returncode == 0, found.stderr
    assert found.stdout == plain.stdout
    assert f"{method}: " in found.stderr
    for words in ("judged drafts accepted", "tokens made for each call of the target", "draft calls", "without cache"):
        assert words in found.stderr


def test_the_command_gives_its_counts_as_json() -> None:
    found = asked("leviathan", "--draft", DEMO / "draft", "--temperature", "1", "--seed", "4", "--json")
    assert found.returncode == 0, found.stderr
    text, last = found.stdout.rsplit("\n", 2)[:2]
    facts = json.loads(last)
    assert (facts["method"], facts["text"], facts["num_new_tokens"]) == ("leviathan", text, 12)
    judged = facts["num_accepted"] + facts["num_rejected"]
    assert 0 < judged <= facts["num_drafted"] == facts["draft_calls"]
    assert facts["acceptance_rate"] == round(facts["num_accepted"] / judged, 4)
    assert facts["tokens_per_call"] == round(12 / facts["target_calls"], 4)
    assert facts["accepted_per_call"] == round(facts["num_accepted"] / facts["target_calls"], 4)
    assert facts["target_s"] + facts["draft_s"] <= facts["total_s"] + 0.001  # they are rounded


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ((), "give --draft"),
        (("--draft", "lookup"), "give --draft"),
        (("--draft", DEMO / "draft", "--speculate", "never"), "leave --speculate never out"),
        (("--draft", DEMO / "draft", "--kv-cache-dtype", "int8"), "has no KV cache: leave --kv-cache-dtype int8 out"),
        (("--draft", DEMO / "draft", "--profile", "x"), "--profile"),
        (("--draft", "/nowhere"), "/nowhere"),
        (("--draft", DEMO / "draft", "--temperature", "-1"), "temperature"),
    ],
)
def test_what_the_command_cannot_do_is_refused_by_name(more: tuple[str, ...], named: str) -> None:
    found = asked("chen", *more)
    assert found.returncode == 1
    assert named in found.stderr
    assert not found.stdout


def test_a_conversation_is_refused() -> None:
    options = ("--method", "chen", "--draft", DEMO / "draft")
    found = gpt_fast("generate", "--checkpoint", DEMO / "target", "--interactive", *options)
    assert (found.returncode, found.stdout) == (1, "")
    assert "--interactive" in found.stderr


def test_a_draft_model_whose_rotation_grows_with_the_sequence_is_refused(tmp_path: Path) -> None:
    for path in (DEMO / "draft").iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = asked("leviathan", "--draft", tmp_path)
    assert found.returncode == 1
    assert "(dynamic)" in found.stderr
    assert str(tmp_path) in found.stderr
