"""Configuration from outside: unknown keys and wrong types are refused by name."""

from __future__ import annotations

import pytest

from gpt_fast.config import ConfigError, EngineConfig, ModelConfig, from_mapping


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
    ("key", "value"), [("dtype", "float8"), ("device", "tpu"), ("max_batch", 0), ("page_size", -1)]
)
def test_wrong_value(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        from_mapping(EngineConfig, {key: value}, "yaml")


def test_null_is_accepted_where_it_means_something() -> None:
    assert from_mapping(EngineConfig, {"max_seq_len": None, "compile": False}, "yaml").max_seq_len is None


def test_impossible_heads() -> None:
    with pytest.raises(ConfigError, match="num_key_value_heads"):
        ModelConfig("llama", 10, 8, 1, 4, 3, 2, 8, 16)
