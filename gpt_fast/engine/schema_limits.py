"""What a JSON schema must not hold: llguidance would end the process over it, take all memory, or write another number.

It counts in floats, and where a range ends at the least integer of 64 bits, its search for digits never ends. The
intersection of n patterns takes time and memory like 2^n, which its own limits do not see.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gpt_fast.errors import RequestError
from gpt_fast.fields import values_in

MAX_EXACT = 2**53  # the greatest whole number up to which each is a float
LEAST_BOUND = -9_200_000_000_000_000_000
MAX_PATTERNS = 8  # that one string must match: 0.1 s and 10 MB for simple ones, twice that for each one more


def check_numbers(schema: Any, name: str) -> None:
    """Raise RequestError naming the field ``name`` for numbers that would not be kept as they are."""
    for part in values_in(schema):
        if not isinstance(part, Mapping):
            continue
        for key in ("const", "enum"):
            if any(abs(number) > MAX_EXACT for number in _numbers(part.get(key))):
                message = f"{name}: {key} holds a number beyond 2^53, which would be rounded; use a string"
                raise RequestError(message, name)
        for key in ("maximum", "exclusiveMaximum"):
            if any(number < LEAST_BOUND for number in _numbers(part.get(key))):
                raise RequestError(f"{name}: {key} must be at least {LEAST_BOUND}", name)


def _numbers(value: Any) -> Iterator[float]:
    return (each for each in values_in(value) if isinstance(each, (int, float)))


class Patterns:
    """Finds strings that must match more than MAX_PATTERNS. ``target`` gives the schema at a pointer."""

    def __init__(self, schema: Any, target: Callable[[Any], Any]) -> None:
        said = {str(text) for part in values_in(schema) if isinstance(part, Mapping) for text in _patterns(part)}
        self._few, self._target = len(said) <= MAX_PATTERNS, target
        self._seen: set[frozenset[int]] = set()
        self._counts: dict[int, int] = {}

    def too_many(self, nodes: Sequence[Any], parts: Callable[[Any], Iterator[Mapping[str, Any]]]) -> bool:
        """Whether a value of which all of ``nodes`` are said, or one inside it, must match too many. ``parts`` gives
        all that a schema says of the same value."""
        key = frozenset(map(id, nodes))
        if self._few or key in self._seen:
            return False
        self._seen.add(key)
        if sum(map(self._count, nodes)) > MAX_PATTERNS:
            return True
        inside = defaultdict[str, list[Any]](list)
        for part in (part for node in nodes for part in parts(node)):
            for place, inner in _inside(part):
                inside[place].append(inner)
        return any(self.too_many(same, parts) for same in inside.values() if len(same) > 1)

    def _count(self, node: Any) -> int:
        """Patterns that a value must match by ``node``: of alternatives those of the one that has most."""
        if not isinstance(node, Mapping):
            return 0
        if id(node) not in self._counts:
            self._counts[id(node)] = 0  # for one that refers to itself
            count = len(_patterns(node)) + sum(map(self._count, _list(node.get("allOf"))))
            for key in ("anyOf", "oneOf"):
                count += max(map(self._count, _list(node.get(key))), default=0)
            self._counts[id(node)] = count + (self._count(self._target(node["$ref"])) if "$ref" in node else 0)
        return self._counts[id(node)]


def _patterns(part: Mapping[str, Any]) -> list[Any]:
    return [part[key] for key in ("pattern", "format") if isinstance(part.get(key), str)]


def _inside(part: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas of values inside a value, and which ones."""
    properties = part.get("properties")
    if isinstance(properties, Mapping):
        yield from ((f"property {name}", inner) for name, inner in properties.items())
    for key in ("items", "additionalProperties"):
        if key in part:
            yield key, part[key]
    yield from ((f"item {i}", inner) for i, inner in enumerate(_list(part.get("prefixItems"))))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
