"""Requests are refused by field, and defaults resolve in the documented order."""

from __future__ import annotations

from typing import Any

import pytest

from gpt_fast.errors import RequestError
from gpt_fast.params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", "5"),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("top_k", 1.5),
        ("top_k", -2),
        ("top_p", 0),
        ("top_p", 1.01),
        ("min_p", -0.5),
        ("seed", 1.5),
        ("seed", 2**64),
        ("stop", 5),
        ("stop", [1]),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [-1]),
        ("min_tokens", -1),
        ("ignore_eos", 1),
    ],
)
def test_a_bad_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert field in caught.value.message


def test_a_hostile_value_is_not_echoed_whole() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(temperature="x" * 100_000)  # type: ignore[arg-type]
    assert len(caught.value.message) < 200


def test_max_new_tokens_is_an_alias() -> None:
    assert SamplingParams(max_new_tokens=7).max_tokens == 7


def test_min_tokens_beyond_max_tokens() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(max_tokens=3, min_tokens=4)
    assert caught.value.param == "min_tokens"


def test_temperature_left_out() -> None:
    sampled = SamplingParams(temperature=0.6, top_p=0.9)
    assert SamplingParams().resolved().temperature == 0.0
    assert SamplingParams(top_k=5).resolved().temperature == 1.0
    assert SamplingParams().resolved(sampled).temperature == 0.6
    assert SamplingParams().resolved(sampled).top_p == 0.9
    assert SamplingParams(temperature=0.0).resolved(sampled).temperature == 0.0
    assert SamplingParams(top_k=-1).resolved().top_k == 0


def test_resolving_twice_changes_nothing() -> None:
    once = SamplingParams(top_p=0.5, max_new_tokens=3, stop="a").resolved()
    assert once.resolved() == once


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n", 0, "n must be a whole number from 1 to 16, not 0"),
        ("n", "2", "n must be a whole number from 1 to 16, not '2'"),
        ("top_p", 0, "top_p must be a number above 0 and up to 1, not 0"),
        ("temperature", True, "temperature must be a number from 0 to 100, not True"),
        ("ignore_eos", 1, "ignore_eos must be true or false, not 1"),
        ("stop", 5, "stop must be a string or a list of strings of 1 to 1024 characters, not 5"),
        ("stop", "", "stop must be a string or a list of strings of 1 to 1024 characters, not ''"),
        ("stop", ["a", 5], "stop must be a string or a list of strings of 1 to 1024 characters, not a list with 5"),
        ("choice", [], "choice must be a list of non-empty strings, at least 1 of them, not 0"),
        ("logit_bias", {"x": 1}, "logit_bias has the key 'x', which is no token id"),
        ("json_schema", [], "json_schema must be an object, not a list"),
        ("regex", "a\ud800", "regex is not valid text: half of a surrogate pair at character 1"),
        ("json_schema", {"maximum": 2**64}, "json_schema holds a number of more than 64 bits"),
    ],
)
def test_a_message_says_what_would_be_accepted_and_what_was_given(field: str, value: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert (str(caught.value), caught.value.message, caught.value.param) == (message, message, field)


def test_numbers_keep_their_type_whatever_json_wrote() -> None:
    params = SamplingParams(max_tokens=5.0, seed=7.0, temperature=1, logit_bias={5: 1}, stop_token_ids=[2.0])  # type: ignore[arg-type]
    assert [repr(v) for v in (params.max_tokens, params.seed, params.temperature)] == ["5", "7", "1.0"]
    assert (repr(params.logit_bias), repr(params.stop_token_ids)) == ("{5: 1.0}", "(2,)")
