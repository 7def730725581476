"""Schemas that would end the process, take all memory or be answered with another number are refused by name, and
nothing beside them. No grammar is compiled here: some of these must never reach the compiler."""

from __future__ import annotations

from typing import Any

import pytest

from gpt_fast.engine.closed_schema import close_objects
from gpt_fast.engine.schema_limits import MAX_PATTERNS
from gpt_fast.errors import RequestError

NUMBERS: dict[str, dict[str, Any]] = {
    "an id of 64 bits": {"const": 123456789012345678},
    "inside a value": {"properties": {"a": {"enum": ["x", {"b": [-(2**53) - 1]}]}}},
    "the least integer": {"enum": [-(2**63)]},
    "where another keyword holds it": {"not": {"const": 2**63}},
    "a range at the least integer": {"type": "integer", "minimum": -(2**63), "maximum": -(2**63) + 9},
    "a float as its end": {"items": {"type": "integer", "exclusiveMaximum": -1e300}},
}


@pytest.mark.parametrize("schema", NUMBERS.values(), ids=NUMBERS)
def test_numbers_that_would_not_be_kept_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"the_field: (const|enum|maximum|exclusiveMaximum) ") as caught:
        close_objects(schema, "the_field")
    assert (caught.value.status, caught.value.param) == (400, "the_field")


def test_other_numbers_are_the_compiler_s() -> None:
    for schema in (
        {"enum": [2**53, -(2**53), 0.1, 1e15, True, None]},
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        {"type": "number", "exclusiveMinimum": -1e300, "exclusiveMaximum": -9e18},
        {"properties": {"maximum": {"type": "integer"}, "const": {"type": "string"}}},
        {"const": 5, "default": 2**60, "maximum": "odd"},
    ):
        close_objects(schema, "the_field")


def strings(count: int) -> list[dict[str, Any]]:
    return [{"type": "string", "pattern": f"a{i}"} for i in range(count)]


def composed(how: str, count: int) -> dict[str, Any]:
    """A schema by which one string must match ``count`` patterns."""
    if how == "all of them":
        return {"allOf": strings(count)}
    if how == "a property of several objects":
        return {"allOf": [{"type": "object", "properties": {"k": each}} for each in strings(count)]}
    if how == "definitions":
        lists = {f"list{i}": {"type": "array", "items": {"$ref": f"#/$defs/text{i}"}} for i in range(count)}
        texts = {f"text{i}": each for i, each in enumerate(strings(count))}
        return {"allOf": [{"$ref": f"#/$defs/list{i}"} for i in range(count)], "$defs": {**lists, **texts}}
    chain: dict[str, Any] = {}
    for each in strings(count):
        chain = {**each, "anyOf": [chain, {"type": "null"}]}
    return chain


@pytest.mark.parametrize("how", ["all of them", "a property of several objects", "definitions", "in each other"])
def test_a_string_that_must_match_many_patterns_is_refused(how: str) -> None:
    """Each one more takes twice the time and memory."""
    close_objects(composed(how, MAX_PATTERNS), "the_field")
    with pytest.raises(RequestError, match="the_field asks of one string to match more than") as caught:
        close_objects(composed(how, MAX_PATTERNS + 1), "the_field")
    assert caught.value.code == "grammar_too_large"


def test_patterns_of_several_strings_are_not_counted_together() -> None:
    many = strings(100)
    texts = {f"text{i}": each for i, each in enumerate(many)}
    for schema in (
        {"anyOf": many, "description": "one of them"},
        {"type": "object", "properties": texts, "allOf": [{"required": ["text1"]}]},
        {"allOf": [{"type": "object", "properties": {name: each}} for name, each in texts.items()]},
        {"$defs": {**texts, "tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}, "$ref": "#/$defs/tree"},
    ):
        close_objects(schema, "the_field")
