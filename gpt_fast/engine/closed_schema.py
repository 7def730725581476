"""JSON schemas whose objects have the properties that they name and no others.

By JSON Schema's rules an object may have any further property unless ``additionalProperties`` forbids it. Nobody who
asks a model for an object means that, and a weak model adds properties without end. So an object that names properties
and says nothing of others is closed, as vLLM's default backend does. One that names no property stays open.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from gpt_fast.engine.schema_limits import MAX_PATTERNS, Patterns, check_numbers
from gpt_fast.errors import RequestError

# How grammars spell JSON, as llguidance's options: with free white space a weak model can go on with blanks for ever.
ONE_SPELLING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_SAYS = ("additionalProperties", "unevaluatedProperties")
_NAMES = ("properties", "patternProperties")
_SCHEMAS_BY_NAME = (*_NAMES, "$defs", "definitions")  # objects of schemas
# Schemas of a value inside: one, or a list.
_SCHEMAS_INSIDE = ("items", "prefixItems", "additionalItems", "contains", "additionalProperties")
_SAME_VALUE = ("allOf", "anyOf", "oneOf", "then", "else")  # schemas of the value itself: one, or a list
_MAX_PARTS = 100_000  # to look at: 0.3 s


def close_objects(schema: Mapping[str, Any], name: str) -> dict[str, Any]:
    """``schema`` with its objects closed. One that is composed (``allOf``, or ``$ref`` and ``anyOf`` beside properties)
    is closed as a whole: parts that were closed each for itself would exclude the properties of the others. Raises
    RequestError naming the field ``name`` where too many schemas are composed of too many, or are too deep, and for
    what schema_limits.py refuses."""
    check_numbers(schema, name)
    try:
        return _Closing(schema).closed()
    except _TooManyPatternsError:
        message = f"{name} asks of one string to match more than {MAX_PATTERNS} patterns and formats at once"
        raise RequestError(message, name, "grammar_too_large") from None
    except (_TooManyPartsError, RecursionError):
        message = f"{name} composes too many schemas of too many others; make it smaller"
        raise RequestError(message, name, "grammar_too_large") from None


class _TooManyPartsError(Exception):
    """More than _MAX_PARTS."""


class _TooManyPatternsError(Exception):
    """More than MAX_PATTERNS."""


class _Closing:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._open: dict[str, Any] = {}  # definitions that are parts of something composed, by their new name
        self._open_names: dict[str, str] = {}  # of the pointer to the original
        self._num_parts = 0  # that were looked at
        self._patterns = Patterns(root, self._target)

    def closed(self) -> dict[str, Any]:
        closed: dict[str, Any] = self._visit(self._root, part=False)
        return closed | {"$defs": {**_definitions(closed), **self._open}} if self._open else closed

    def _visit(self, node: Any, part: bool) -> Any:
        """``node`` closed; one that is a ``part`` of something composed stays open itself."""
        if isinstance(node, list):
            return [self._visit(each, part) for each in node]
        if not isinstance(node, Mapping):
            return node
        if self._patterns.too_many([node], lambda each: self._parts(each, set())):
            raise _TooManyPatternsError
        new = dict(node)
        for key in _SCHEMAS_BY_NAME:
            if isinstance(new.get(key), Mapping):
                new[key] = {name: self._visit(inner, part=False) for name, inner in new[key].items()}
        for key in _SCHEMAS_INSIDE:
            if key in new:
                new[key] = self._visit(new[key], part=False)
        composed = self._is_composed(node)
        for key in _SAME_VALUE:
            if key in new:
                new[key] = self._visit(new[key], part or composed)
        if "$ref" in new and (part or composed):
            new["$ref"] = self._open_copy(new["$ref"])
        alternatives = not composed and any(key in node for key in (*_SAME_VALUE, "$ref"))
        return new if part or alternatives else self._close(node, new)

    @staticmethod
    def _is_composed(node: Mapping[str, Any]) -> bool:
        """Whether several schemas, and not one of several, say what the value is."""
        own = any(key in node for key in (*_NAMES, *_SAYS))
        others = sum(key in node for key in ("anyOf", "oneOf", "then", "else", "$ref"))
        return "allOf" in node or others > 1 or bool(own and others)

    def _close(self, node: Mapping[str, Any], new: dict[str, Any]) -> dict[str, Any]:
        parts = list(self._parts(node, set()))
        if any(key in each for each in parts for key in _SAYS):
            return new
        for key in _NAMES:
            named = [name for each in parts if isinstance(each.get(key), Mapping) for name in each[key]]
            if (named or key in new) and isinstance(new.get(key, {}), Mapping):  # else the compiler refuses it
                new[key] = {**new.get(key, {}), **{name: {} for name in named if name not in new.get(key, {})}}
        if any(key in new for key in _NAMES):
            new["additionalProperties"] = False
        return new

    def _parts(self, node: Any, seen: set[str]) -> Iterator[Mapping[str, Any]]:
        """``node`` and all schemas that say something of the same value."""
        if not isinstance(node, Mapping):
            return
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise _TooManyPartsError
        yield node
        for key in _SAME_VALUE:
            inner = node.get(key, ())
            for each in inner if isinstance(inner, list) else (inner,):
                yield from self._parts(each, seen)
        pointer = node.get("$ref")
        if isinstance(pointer, str) and pointer not in seen:
            seen.add(pointer)
            yield from self._parts(self._target(pointer), seen)

    def _open_copy(self, pointer: Any) -> Any:
        """A pointer to a copy of the definition that is open itself."""
        target = self._target(pointer)
        if target is None:
            return pointer  # the compiler refuses it
        if pointer not in self._open_names:
            name = f"part-{len(self._open_names)}"
            while name in _definitions(self._root):
                name += "-"
            self._open_names[pointer] = name
            self._open[name] = {}
            self._open[name] = self._visit(target, part=True)
        return f"#/$defs/{self._open_names[pointer]}"

    def _target(self, pointer: Any) -> Any:
        """The schema at a pointer into the root (RFC 6901, as a part of an address); None if there is none."""
        if not (isinstance(pointer, str) and (pointer == "#" or pointer.startswith("#/"))):
            return None
        node: Any = self._root
        for step in pointer.split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(node, list):
                node = node[int(name)] if name.isdecimal() and len(name) < 6 and int(name) < len(node) else None
            else:
                node = node.get(name) if isinstance(node, Mapping) else None
        return node


def _definitions(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The definitions of ``schema``; none where what stands there is no object."""
    found = schema.get("$defs")
    return found if isinstance(found, Mapping) else {}
