"""What a completion must match: grammars that any model can satisfy, and grammars that hurt.

Hostile: nothing matches them, they repeat without end, they are huge, they refer to themselves, they backtrack.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from fuzzing.values import WORDS, Raw, anything, nested, number, string

Draw = Callable[[random.Random], Any]

# Short whatever the model says: an answer of a few tokens gets somewhere, one of many ends.
REGEXES = (
    "[a-z]{1,8}",
    "(yes|no|maybe)",
    "[0-9]{3}-[0-9]{2}",
    "Once upon a [a-z ]{1,20}",
    "(ab)*c",
    "[A-Z][a-z]+\\.",
    ".*",
)
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    {"enum": ["red", "green", "blue"]},
    {"type": "boolean"},
    {"const": {"a": [1, 2, 3]}},
    {"type": "object", "properties": {"n": {"type": "number"}, "b": {"type": "null"}}, "additionalProperties": False},
    {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^[a-f]{2}$"}]},
)


def choices(rng: random.Random) -> list[str]:
    """A few words to choose from, some the beginning of others."""
    few = [rng.choice(WORDS) for _ in range(rng.randrange(1, 6))]
    return few + [word + " and so on" for word in few[:2]]


def response_format(rng: random.Random) -> dict[str, Any]:
    """OpenAI's way to say it."""
    if rng.random() < 0.3:
        return {"type": "text"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": rng.choice(SCHEMAS)}}


def text_format(rng: random.Random) -> dict[str, Any]:
    """The field ``text`` of v1/responses, which says the same."""
    form = response_format(rng)
    return {"format": {"type": form["type"], **form.get("json_schema", {})}} | rng.choice(({}, {"verbosity": "medium"}))


BAD_REGEXES = (
    *("[^\\s\\S]", "[^\\x00-\\U0010FFFF]", "a^", "$a", "(?!)", "(?=a)b", "\\b\\B", "(?<=x)y", "(a)\\1", "a{5}{0}b&c"),
    *("(a+)+b", "(a|a)*b", "((a*)*)*c", "(x+x+)+y", "(.*)*(.*)*(.*)*z", "(a?){30}a{30}", "([a-z]+[0-9]*)+!"),
    *(
        "a{100000}",
        "a{1,1000000}",
        "(a{1000}){1000}",
        "((((a{50}){50}){50}){50})",
        ".{0,100000}b",
        "[a-z]{9999999999}",
        "a{2,1}",
    ),
    *(
        "(",
        ")",
        "[",
        "[]",
        "[z-a]",
        "*",
        "+",
        "?",
        "a**",
        "\\",
        "\\q",
        "\\p{Nope}",
        "\\p{L}{1,3000}",
        "(?P<n",
        "(?i)x",
        "(?x) a b",
    ),
    *(
        "",
        "\0",
        "\ud800",
        "\n",
        "^$",
        "^",
        "\\Z",
        "[\ud800-\udfff]",
        "😀+",
        "é|e\u0301",
        "\\u{110000}",
        "\\x{ffffffff}",
        "[[:alpha:]]",
    ),
    *(
        "(" * 300 + "a" + ")" * 300,
        "a?" * 3000,
        "|".join(f"w{i}" for i in range(4000)),
        "[" + "a-z" * 5000 + "]",
        "." * 20_000,
    ),
    "(.|\n)*" * 40,
)

_CYCLE = {"$ref": "#"}
BAD_SCHEMAS: tuple[Any, ...] = (
    *(
        True,
        False,
        {},
        [],
        "object",
        1,
        None,
        {"type": "nothing"},
        {"type": []},
        {"type": ["string", "null"]},
        {"not": {}},
    ),
    *(
        _CYCLE,
        {"allOf": [_CYCLE]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    ),
    {"$ref": "#/$defs/missing"},
    {"$ref": "http://127.0.0.1:9/schema.json"},
    {"$ref": "file:///etc/passwd"},
    {"type": "object", "properties": {"next": _CYCLE}, "required": ["next"]},  # only an endless value fits
    {"type": "object", "properties": {"next": _CYCLE}},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"type": "object", "required": ["a"], "properties": {"a": False}},
    {"type": "integer", "minimum": 5, "maximum": 4},
    {"type": "integer", "minimum": 10**30, "maximum": 10**31},
    {"type": "integer", "multipleOf": 0},
    {"type": "number", "minimum": 0.1, "exclusiveMaximum": 0.1},
    {"type": "number", "multipleOf": 1e-300},
    {"type": "string", "minLength": 5, "maxLength": 4},
    {"type": "string", "minLength": 10**6},
    {"type": "string", "maxLength": -1},
    {"type": "array", "minItems": 10**9},
    {"type": "array", "items": {"type": "string"}, "minItems": 3, "maxItems": 2},
    {"type": "array", "uniqueItems": True, "items": {"enum": [1]}, "minItems": 2},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "nonsense"},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"anyOf": []},
    {"enum": []},
    {"const": "\ud800"},
    {"enum": ["\ud800", "a"]},
    {"properties": {"\ud800": {}}},
    {"patternProperties": {"(": {}}},
    {"patternProperties": {"^(a+)+$": {"type": "string"}}},
    {"if": {"type": "string"}, "then": {"maxLength": 3}},
    {"dependentRequired": {"a": ["b"]}},
    {"$schema": "nonsense", "type": "string"},
    {"type": "object", "additionalProperties": {"type": "object", "additionalProperties": _CYCLE}},
    {"unevaluatedProperties": False},
    {"x-guidance": {"whitespace_flexible": True, "separators": 5}},
)


def _wide_schema(rng: random.Random) -> dict[str, Any]:
    names = [f"property_{i}" for i in range(rng.choice((100, 600, 2000, 9000)))]
    schema: dict[str, Any] = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    return schema | ({"required": names} if rng.random() < 0.5 else {})


def _long_enum(rng: random.Random) -> dict[str, Any]:
    return {"enum": [f"value {i} of the enum" for i in range(rng.choice((100, 1000, 5000, 20_000)))]}


def _deep_schema(rng: random.Random) -> Raw:
    depth = rng.choice((20, 60, 100, 150, 250, 320, 450))
    opening = rng.choice(('{"type": "array", "items": ', '{"properties": {"a": ', '{"anyOf": [', '{"not": '))
    closing = {"{": "}", "[": "]"}
    return nested(depth, opening, "{}", "".join(closing[c] for c in reversed(opening) if c in closing))


def _branching_schema(rng: random.Random) -> dict[str, Any]:
    """Each definition refers to the next one twice: small to write, 2**n when written out."""
    count = rng.choice((5, 15, 30, 60))
    both = rng.choice(("anyOf", "allOf", "oneOf"))
    defs = {f"d{i}": {both: [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": defs | {f"d{count}": {"type": "string"}}}


def _pattern_schema(rng: random.Random) -> dict[str, Any]:
    return {"type": "string", "pattern": rng.choice(BAD_REGEXES)}


def bad_schema(rng: random.Random) -> Any:
    """A schema that is wrong, impossible, endless or huge."""
    if rng.random() < 0.6:
        return rng.choice(BAD_SCHEMAS)
    made: tuple[Draw, ...] = (_wide_schema, _long_enum, _deep_schema, _branching_schema, _pattern_schema, anything)
    return rng.choice(made)(rng)


def bad_choice(rng: random.Random) -> Any:
    """Choices that are no strings, or very many, long, alike or odd."""
    made: tuple[Draw, ...] = (
        anything,
        lambda r: [string(r) for _ in range(r.randrange(1, 6))],
        lambda r: [r.choice(WORDS), number(r)],
        lambda r: ["same"] * r.choice((2, 50)),
        lambda r: ["a" * i for i in range(1, r.choice((10, 200, 1200)))],
        lambda r: Raw(json.dumps([f"choice {i}" for i in range(r.choice((300, 1000, 3000, 20_000, 90_000)))])),
        lambda r: [chr(0x4E00 + i) * 3 for i in range(r.choice((20, 500, 3000)))],
        lambda r: ["\U0001f600" * 2000, "x" * 50_000],
        lambda r: [chr(i) for i in range(1, 256)],
    )
    return rng.choice(made)(rng)


def bad_regex(rng: random.Random) -> Any:
    """A pattern that is wrong, impossible, endless or huge."""
    return anything(rng) if rng.random() < 0.1 else rng.choice(BAD_REGEXES)


def _tool(rng: random.Random, name: Any, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": rng.choice(WORDS), "parameters": parameters}}


def tools(rng: random.Random) -> list[dict[str, Any]]:
    """One or two functions."""
    objects = [schema for schema in SCHEMAS if schema.get("type") == "object"]
    return [_tool(rng, name, rng.choice(objects)) for name in ("f", "get-it.now")[: rng.randrange(1, 3)]]


def bad_tools(rng: random.Random) -> Any:
    """``tools`` gone wrong: no list, names that are none or twice there, schemas that cannot be."""
    made: tuple[Draw, ...] = (
        anything,
        lambda r: [anything(r)],
        lambda r: [{"type": r.choice(("function", "custom", None)), "function": anything(r)}],
        lambda r: [_tool(r, anything(r), {})],
        lambda r: [_tool(r, "f", bad_schema(r))],
        lambda r: [_tool(r, "f", {"type": "object", "properties": {string(r): bad_schema(r)}})],
        lambda r: tools(r) * 2,
    )
    return rng.choice(made)(rng)


def flat_tools(rng: random.Random) -> list[dict[str, Any]]:
    """A function as v1/responses takes it: with calls in the input two do not fit into a small context."""
    return [{"type": "function", **tool["function"]} for tool in tools(rng)[:1]]


def bad_flat_tools(rng: random.Random) -> Any:
    """The same gone wrong."""
    return rng.choice((_flat(bad_tools(rng)), [{"type": rng.choice(("web_search", "mcp", "custom", 5))}], tools(rng)))


def _flat(value: Any) -> Any:
    """Tools of a chat without their ``function`` around the name; of what is none, as much as is one."""
    if not isinstance(value, list):
        return value
    inner = [tool.get("function") if isinstance(tool, dict) else tool for tool in value]
    return [{"type": "function", **each} if isinstance(each, dict) else each for each in inner]


def bad_tool_choice(rng: random.Random) -> Any:
    """A choice of what is not there, or in the form of another route."""
    named = {"type": "function", "function": {"name": string(rng)}}
    flat = {"type": "function", "name": rng.choice(("f", string(rng)))}
    return rng.choice(("required", "any", named, flat, {"type": "function"}, anything(rng)))


def bad_format(rng: random.Random) -> Any:
    """``response_format`` gone wrong."""
    made: tuple[Draw, ...] = (
        anything,
        lambda r: {"type": anything(r)},
        lambda r: {"type": "json_schema", "json_schema": anything(r)},
        lambda r: {"type": "json_schema"},
        lambda r: {"type": "json_object", "extra": anything(r)},
        lambda r: {"type": "json_object"},
        lambda r: {
            "type": "json_schema",
            "json_schema": {"name": string(r), "schema": bad_schema(r), "strict": anything(r)},
        },
        lambda r: {"type": "json_schema", "json_schema": {"name": "x", "schema": bad_schema(r)}},
    )
    return rng.choice(made)(rng)


def bad_text_format(rng: random.Random) -> Any:
    """``text`` gone wrong."""
    form = bad_format(rng)
    inner = form.pop("json_schema", {}) if isinstance(form, dict) else None
    if isinstance(inner, dict) and rng.random() < 0.8:
        form |= inner
    return rng.choice(({"format": form}, {"format": form, "verbosity": string(rng)}, anything(rng)))
