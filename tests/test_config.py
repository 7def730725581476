"""Configuration from outside: unknown keys and wrong types are refused by name."""

from __future__ import annotations

import typing
from typing import Any

import pytest

from gpt_fast.config import DEFAULT_MAX_BATCH, EngineConfig, ModelConfig, from_mapping
from gpt_fast.errors import ConfigError

RANGES: dict[str, tuple[float, float]] = {
    "max_seq_len": (1, 2**30),
    "max_batch": (1, 4096),
    "max_waiting": (1, 2**20),
    "prefill_chunk": (1, 2**16),
    "page_size": (1, 4096),
    "num_pages": (1, 2**30),
    "memory_share": (0.01, 1),
    "threads": (1, 2**20),
    "speculate_k": (1, 15),
    "lookup_history": (0, 2**20),
}


def test_unknown_key_names_the_closest_and_all_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'max_seqlen' in x.yaml \(did you mean 'max_seq_len'\?\).*page_size"):
        from_mapping(EngineConfig, {"max_seqlen": 3}, "x.yaml")


@pytest.mark.parametrize(
    ("key", "value"),
    [("max_batch", "8"), ("max_batch", True), ("compile", 1), ("max_seq_len", 1.5), ("device", None), ("dtype", 32)],
)
def test_wrong_type(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{key} in yaml must be"):
        from_mapping(EngineConfig, {key: value}, "yaml")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dtype", "float8"),
        ("device", "tpu"),
        ("device", "auto:1"),
        ("device", "cuda:"),
        ("max_batch", 0),
        ("page_size", -1),
    ],
)
def test_wrong_value(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        from_mapping(EngineConfig, {key: value}, "yaml")


@pytest.mark.parametrize("key", RANGES)
def test_every_number_has_a_least_and_a_greatest_value(key: str) -> None:
    least, greatest = RANGES[key]
    for good in (least, greatest):
        options = {key: good, "draft": "lookup"}  # without which lookup_history means nothing
        assert getattr(from_mapping(EngineConfig, options, "yaml"), key) == good
    for wrong in (least - 1, -1, -(10**30), greatest + 1, 10**30):
        number = "a number of more than 64 bits" if abs(wrong) > 2**64 else wrong
        message = f"{key} in yaml must be a .*number from {least} to {greatest}, not {number}$"
        with pytest.raises(ConfigError, match=message):
            from_mapping(EngineConfig, {key: wrong}, "yaml")
        with pytest.raises(ConfigError, match=message.replace(" in yaml", "")):
            EngineConfig(**{key: wrong})


def test_no_number_is_without_a_range() -> None:
    numbers = {name for name, hint in typing.get_type_hints(EngineConfig).items() if {int, float} & parts(hint)}
    assert numbers == RANGES.keys()
    with pytest.raises(ConfigError, match=r"memory_share must be a number from 0\.01 to 1, not nan"):
        EngineConfig(memory_share=float("nan"))


def parts(hint: object) -> set[object]:
    return set(typing.get_args(hint)) or {hint}


def test_a_batch_that_nobody_asked_for_is_told_from_one_that_was() -> None:
    assert (EngineConfig().max_batch, EngineConfig().num_slots) == (None, DEFAULT_MAX_BATCH)
    assert (EngineConfig(max_batch=8).max_batch, EngineConfig(max_batch=3).num_slots) == (8, 3)


def test_who_guesses_tokens() -> None:
    asked: tuple[tuple[dict[str, Any], str | None], ...] = (
        ({}, None), ({"draft": "x"}, "x"), ({"speculate": "auto"}, "lookup"),
        ({"draft": "x", "speculate": "auto"}, "x"),
        ({"speculate": "never"}, None), ({"draft": "x", "speculate": "never"}, None),
    )  # fmt: skip
    for options, drafter in asked:
        assert EngineConfig(**options).drafter == drafter


def test_null_is_accepted_where_it_means_something() -> None:
    assert from_mapping(EngineConfig, {"max_seq_len": None, "compile": False}, "yaml").max_seq_len is None


def test_impossible_heads() -> None:
    with pytest.raises(ConfigError, match="num_key_value_heads"):
        ModelConfig("llama", 10, 8, 1, 4, 3, 2, 8, 16)
