"""Objects of a schema have the properties that they name and no others, also where several schemas say together what
they are; what says ``additionalProperties`` stays as it says. Through the real compiler, on a vocabulary of bytes."""

from __future__ import annotations

import copy
import json
import random
from functools import cache
from typing import Any

import pytest
from fake_model import EOS, Bytes

from gpt_fast.engine.closed_schema import close_objects
from gpt_fast.errors import RequestError
from gpt_fast.params import SamplingParams

pytest.importorskip("llguidance")
grammar = pytest.importorskip("gpt_fast.engine.grammar")


@cache
def compiler() -> Any:
    return grammar.GrammarCompiler(Bytes(), EOS + 1, (EOS,))


def takes(schema: dict[str, Any], value: Any) -> bool:
    compiled = compiler().compile(SamplingParams(json_schema=schema))
    try:
        for id in json.dumps(value).encode():
            if not compiled.allowed()[id]:
                return False
            compiled.advance(id)
        return compiled.complete or bool(compiled.allowed()[EOS])
    except RequestError:
        return False


def thing(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


NUMBER: dict[str, Any] = {"type": "integer"}
NODE = {"$ref": "#/$defs/Node"}
TREE = {"type": "object", "properties": {"value": NUMBER, "next": {"anyOf": [NODE, {"type": "null"}]}}}
BASE = {"Base": thing(a=NUMBER), "Node": TREE}

# Schema, what it takes, what it does not take.
CASES: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "plain": (thing(a=NUMBER), [{"a": 1}], [{"a": 1, "b": 2}, {}]),
    "inside": (
        thing(list={"type": "array", "items": thing(a=NUMBER)}),
        [{"list": [{"a": 1}]}, {"list": []}],
        [{"list": [{"a": 1, "b": 2}]}],
    ),
    "in a tuple": (
        {"type": "array", "prefixItems": [thing(a=NUMBER)], "items": False},
        [[{"a": 1}]],
        [[{"a": 1, "b": 2}]],
    ),
    "no properties": ({"type": "object"}, [{}, {"a": {"b": 1}}], [[], 1]),
    "says true": (thing(a=NUMBER) | {"additionalProperties": True}, [{"a": 1, "b": [{}]}], [{"b": 1}]),
    "says a schema": (thing(a=NUMBER) | {"additionalProperties": NUMBER}, [{"a": 1, "b": 2}], [{"a": 1, "b": "x"}]),
    "the schema of others": (
        {"type": "object", "additionalProperties": thing(a=NUMBER)},
        [{"x": {"a": 1}}],
        [{"x": {"a": 1, "b": 2}}],
    ),
    "patterns": (
        {"type": "object", "patternProperties": {"^x": NUMBER}},
        [{"x1": 1}, {}],
        [{"y": 1}],
    ),
    "one of two": (
        {"anyOf": [thing(a=NUMBER), thing(b=NUMBER)]},
        [{"a": 1}, {"b": 1}],
        [{"a": 1, "b": 2}],
    ),
    "a definition or nothing": (
        thing(a={"anyOf": [{"$ref": "#/$defs/Base"}, {"type": "null"}]}) | {"$defs": BASE},
        [{"a": None}, {"a": {"a": 1}}],
        [{"a": {"a": 1, "b": 2}}],
    ),
    "a tree": (
        {"$ref": "#/$defs/Node", "$defs": BASE},
        [{"value": 1, "next": {"value": 2, "next": None}}],
        [{"value": 1, "next": {"value": 2, "more": 3}}],
    ),
    "all of two": (
        {"allOf": [thing(a=NUMBER), thing(b=NUMBER)]},
        [{"a": 1, "b": 2}],
        [{"a": 1}, {"a": 1, "b": 2, "c": 3}],
    ),
    "all of a definition": (
        {"allOf": [{"$ref": "#/$defs/Base"}], "description": "as pydantic 1 writes it", "$defs": BASE},
        [{"a": 1}],
        [{"a": 1, "b": 2}],
    ),
    "an heir": (
        {"allOf": [{"$ref": "#/$defs/Base"}, thing(b=NUMBER)], "$defs": BASE | {"part-0": NUMBER}},
        [{"a": 1, "b": 2}],
        [{"a": 1}, {"a": 1, "b": 2, "c": 3}],
    ),
    "an heir of what stands in a list": (
        thing(
            x={"anyOf": [thing(a=NUMBER), NUMBER]},
            y={"allOf": [{"$ref": "#/properties/x/anyOf/0"}, thing(b=NUMBER)]},
        ),
        [{"x": 1, "y": {"a": 1, "b": 2}}],
        [{"x": 1, "y": {"a": 1}}, {"x": 1, "y": {"a": 1, "b": 2, "c": 3}}],
    ),
    "properties beside a definition": (
        thing(b=NUMBER) | {"$ref": "#/$defs/Base", "$defs": BASE},
        [{"b": 2, "a": 1}],
        [{"b": 2, "a": 1, "c": 3}],
    ),
    "properties beside alternatives": (
        thing(a=NUMBER) | {"anyOf": [thing(b=NUMBER), thing(c=NUMBER)]},
        [{"a": 1, "b": 2}, {"a": 1, "c": 2}],
        [{"a": 1}, {"a": 1, "b": 2, "d": 3}],
    ),
    "a part says true": (
        {"allOf": [thing(a=NUMBER) | {"additionalProperties": True}, thing(b=NUMBER)]},
        [{"a": 1, "b": 2, "c": 3}],
        [{"a": 1}],
    ),
    "a tree's heir": (
        {"allOf": [NODE, thing(b=NUMBER)], "$defs": BASE},
        [{"value": 1, "next": {"value": 2}, "b": 3}],
        [{"value": 1, "next": {"value": 2, "b": 4}, "b": 3}],
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_object_has_what_it_names_and_no_more(case: Any) -> None:
    schema, good, bad = case
    before = copy.deepcopy(schema)
    for value in good:
        assert takes(schema, value), value
    for value in bad:
        assert not takes(schema, value), value
    assert schema == before


def test_objects_behind_a_tuple_are_closed() -> None:
    """As drafts before 2020-12 write it."""
    draft = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array"}
    schema = {**draft, "items": [NUMBER], "additionalItems": thing(a=NUMBER)}
    assert takes(schema, [1, {"a": 1}])
    assert not takes(schema, [1, {"a": 1, "b": 2}])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_closing_only_takes_values_away(case: Any) -> None:
    """What the closed schema takes, the schema takes; by another library."""
    jsonschema: Any = pytest.importorskip("jsonschema")
    schema, good, bad = case
    for value in (*good, *bad):
        closed = jsonschema.Draft202012Validator(close_objects(schema, "json_schema")).is_valid(value)
        assert closed == (value in good)
        assert jsonschema.Draft202012Validator(schema).is_valid(value) or not closed


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/nowhere"}, {"allOf": [{"$ref": "http://x/y"}]}, {"allOf": 3}, {"$ref": 5},
        {"properties": None}, {"type": "object", "patternProperties": ["a"]},
        {"$ref": "#", "properties": 5, "$defs": 5},
    ],
)  # fmt: skip
def test_what_is_no_schema_is_the_compiler_s_to_refuse(schema: dict[str, Any]) -> None:
    close_objects(schema, "json_schema")
    with pytest.raises(RequestError) as caught:
        compiler().compile(SamplingParams(json_schema=schema))
    assert caught.value.param == "json_schema"


@pytest.mark.parametrize("wrong", [None, 5, ["part-0"]])
def test_definitions_that_are_none_do_no_harm(wrong: Any) -> None:
    schema = {"$defs": wrong, "$ref": "#/properties/a", **thing(a={"type": "object"})}
    assert close_objects(schema, "json_schema")["$defs"] == {"part-0": {"type": "object"}}


def test_too_much_composed_of_too_much_is_refused() -> None:
    many = {"$defs": {"a": {"anyOf": [{}] * 2000}}, "prefixItems": [{"allOf": [{"$ref": "#/$defs/a"}]}] * 700}
    deep: dict[str, Any] = {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(2000)}}
    for schema in (many, {**deep, "$ref": "#/$defs/d0", "properties": {}}):
        with pytest.raises(RequestError, match=r"the_field .* make it smaller"):
            close_objects(schema, "the_field")
    assert close_objects({**many, "prefixItems": many["prefixItems"][:40]}, "the_field")


def test_a_pointer_may_be_written_as_a_part_of_an_address() -> None:
    named = {"type": "object", "properties": {"a": {"const": 1}}}
    own = {"type": "object", "properties": {"z": {"const": 2}}, "required": ["z", "a"]}
    schema = {"$defs": {"b c": named}, "$ref": "#/$defs/b%20c", **own}
    assert takes(schema, {"a": 1, "z": 2}) or takes(schema, {"z": 2, "a": 1})
    assert not takes(schema, {"z": 2, "a": 3})


def test_a_random_walk_ends_with_the_properties_that_are_named() -> None:
    """The demo model added properties without end: here the end is forced, whatever is drawn."""
    schema = thing(a={"type": "boolean"}, b={"enum": ["x", "y"]})
    for seed in range(10):
        rng, compiled, said = random.Random(seed), compiler().compile(SamplingParams(json_schema=schema)), []
        while not compiled.complete:
            id = rng.choice(compiled.allowed().nonzero()[:, 0].tolist())
            compiled.advance(id)
            said.append(id)
        assert set(json.loads(bytes(b for b in said if b != EOS))) == {"a", "b"}
