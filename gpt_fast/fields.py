"""What a field may hold, checked and described in one place: for requests, options and model_config.yaml alike.

A kind is called with a value and the name of its field, and returns the value to use. It raises RequestError with a
message that names the field, what it takes and what it got; config.py makes a ConfigError of it. A dataclass states
the kind of a field in the field's type, ``Annotated[int, Whole(1, 16)]``; :func:`kinds_of` collects them.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, NoReturn

from gpt_fast.errors import RequestError

Kind = Callable[[Any, str], Any]  # (value, name of the field) -> value

MAX_DEPTH = 200  # of values inside values; Python's JSON writer gives up somewhere below 1000
_INT_LIMIT = 2**64  # beyond the range of every field; float() and str() fail on much larger ones


def refuse(name: str, takes: str, value: object, code: str = "invalid_value") -> NoReturn:
    """Raise the RequestError of a field ``name`` that takes something else than ``value``."""
    raise RequestError(f"{name} must be {takes}, not {show(value)}", name, code)


@dataclass(frozen=True)
class Whole:
    """An integer from ``least`` to ``most``. ``or_float``: 5.0 is 5, because JSON has one kind of number."""

    least: int
    most: int
    or_float: bool = False

    def __call__(self, value: Any, name: str) -> int:
        number = int(value) if self.or_float and isinstance(value, float) and value.is_integer() else value
        is_whole = isinstance(number, int) and not isinstance(number, bool)
        if is_whole and self.least <= number <= self.most:
            return int(number)
        takes = f"a whole number from {self.least} to {self.most}"
        refuse(name, takes, value, "invalid_value" if is_whole else "invalid_type")


@dataclass(frozen=True)
class Real:
    """A finite number from ``least`` to ``most``, as a float. ``above``: ``least`` itself is not allowed."""

    least: float
    most: float
    above: bool = False

    def __call__(self, value: Any, name: str) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # NaN is not between anything.
        if is_number and self.least <= value <= self.most and not (self.above and value == self.least):
            return float(value)
        least = f"above {self.least:g} and up" if self.above else f"from {self.least:g}"
        takes = f"a number {least} to {self.most:g}"
        refuse(name, takes, value, "invalid_value" if is_number else "invalid_type")


def as_given(value: Any, name: str) -> Any:
    """Anything, because something else checks it."""
    return value


def left_out(value: Any, name: str) -> None:
    """Anything, and nothing looks at it."""


def flag(value: Any, name: str) -> bool:
    """True or false."""
    return value if isinstance(value, bool) else refuse(name, "true or false", value, "invalid_type")


@dataclass(frozen=True)
class Text:
    """A string of ``least`` to ``most`` characters."""

    least: int = 0
    most: int | None = None

    def __call__(self, value: Any, name: str) -> str:
        if not isinstance(value, str):
            refuse(name, "a string", value, "invalid_type")
        if len(value) < self.least or (self.most is not None and len(value) > self.most):
            limits = f"{self.least} or more" if self.most is None else f"{self.least} to {self.most}"
            refuse(name, f"a string of {limits} characters", value)
        check_text(value, name)
        return value


@dataclass(frozen=True)
class OneOf:
    """One of the strings ``choices``. ``any_case``: in small or capital letters."""

    choices: tuple[str, ...]
    any_case: bool = False

    def __call__(self, value: Any, name: str) -> str:
        if isinstance(value, str) and (value.lower() if self.any_case else value) in self.choices:
            return value
        refuse(name, f"one of {', '.join(self.choices)}", value)


@dataclass(frozen=True)
class ListOf:
    """A list of ``least`` to ``most`` times ``item``; ``what`` names them. ``or_text``: a string is a list of one."""

    item: Kind
    what: str
    least: int = 0
    most: int | None = None
    or_text: bool = False

    def __call__(self, value: Any, name: str) -> tuple[Any, ...]:
        values = [value] if self.or_text and isinstance(value, str) else value
        takes = f"{'a string or ' if self.or_text else ''}a list of {self.what}"
        if not isinstance(values, (list, tuple)):
            refuse(name, takes, value, "invalid_type")
        if len(values) < self.least or (self.most is not None and len(values) > self.most):
            limits = f"at least {self.least}" if len(values) < self.least else f"at most {self.most}"
            refuse(name, f"{takes}, {limits} of them", len(values))
        read = []
        for item in values:
            try:
                read.append(self.item(item, name))
            except RequestError as error:
                if error.code == "invalid_text":
                    raise
                wrong = show(item) if values is not value else f"a list with {show(item)}"
                raise RequestError(f"{name} must be {takes}, not {wrong}", name, error.code) from None
        return tuple(read)


@dataclass(frozen=True)
class Struct:
    """An object with the fields ``kinds``. Null counts as not given, in a field of any name, and so does what a kind
    reads as None. ``needed`` are always read."""

    kinds: Mapping[str, Kind]
    needed: tuple[str, ...] = ()

    def __call__(self, value: Any, name: str) -> dict[str, Any]:
        given = json_object(value, name)
        read = {key: self.kinds[key](given.get(key), f"{name}.{key}") for key in self.needed}
        for key, inner in given.items():
            if key in read or inner is None:
                continue
            if key not in self.kinds:
                message = f"{name}: {unknown(key, self.kinds)}"
                raise RequestError(message, f"{name}.{key[:100]}", "unknown_parameter")
            read[key] = self.kinds[key](inner, f"{name}.{key}")
        return {key: inner for key, inner in read.items() if inner is not None or key in self.needed}


def json_object(value: Any, name: str) -> Mapping[str, Any]:
    """A JSON object that may hold anything."""
    return value if isinstance(value, Mapping) else refuse(name, "an object", value, "invalid_type")


@cache
def kinds_of(cls: Any) -> dict[str, Kind]:
    """The fields of the dataclass ``cls``, and the kind of each; bool and str need no annotation."""
    hints = inspect.get_annotations(cls, eval_str=True)
    return {field.name: _kind(hints[field.name]) for field in dataclasses.fields(cls)}


def _kind(hint: Any) -> Kind:
    kind: Kind | None = None
    if typing.get_origin(hint) is Annotated:
        hint, kind = typing.get_args(hint)
    options = typing.get_args(hint) or (hint,)
    plain = kind if kind is not None else flag if bool in options else Text()
    return (lambda value, name: None if value is None else plain(value, name)) if type(None) in options else plain


def check_fields(instance: Any) -> None:
    """Replace each field of a dataclass by what its kind reads. Raises RequestError naming the field."""
    cls: Any = type(instance)
    values = vars(instance)
    for name, kind in kinds_of(cls).items():
        if values[name] is not getattr(cls, name, values):  # a class attribute is the default, which needs no check
            object.__setattr__(instance, name, kind(values[name], name))


def values_in(value: object) -> Iterator[object]:
    """``value`` and everything in it except keys."""
    for level in _levels(value):
        yield from level


def _levels(value: object) -> Iterator[list[object]]:
    """``value`` alone, then what is in it, then what is in that, and so on. Not recursive: JSON may be nested as deeply
    as its parser allows."""
    level = [value]
    while level:
        yield level
        level = [inner for item in level for inner in _inside(item)]


def _inside(item: object) -> Iterable[object]:
    return item.values() if isinstance(item, Mapping) else item if isinstance(item, (list, tuple)) else ()


def texts_of(item: object) -> Iterable[str]:
    """The strings that ``item`` itself shows: it is one, or an object with keys."""
    return (item,) if isinstance(item, str) else map(str, item) if isinstance(item, Mapping) else ()


def check_text(text: str, name: str) -> None:
    """Raise RequestError if ``text`` holds half of a surrogate pair: JSON can spell it, and no tokenizer takes it."""
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        message = f"{name} is not valid text: half of a surrogate pair at character {error.start}"
        raise RequestError(message, name.partition(".")[0], "invalid_text") from None


def check_values(value: object, name: str) -> tuple[int, int]:
    """How many values and how many characters ``value`` holds. Raises RequestError for what cannot be written as JSON
    again everywhere: half of a surrogate pair, a number that is not finite or has more than 64 bits, and values inside
    values MAX_DEPTH times."""
    num_values = num_chars = 0
    for depth, level in enumerate(_levels(value)):
        if depth > MAX_DEPTH:
            raise RequestError(f"{name} is nested too deeply: at most {MAX_DEPTH} levels are allowed", name)
        num_values += len(level)
        for item in level:
            num_chars += _check_value(item, name)
    return num_values, num_chars


def _check_value(item: object, name: str) -> int:
    """How many characters ``item`` itself shows."""
    if isinstance(item, int) and abs(item) >= _INT_LIMIT:
        raise RequestError(f"{name} holds a number of more than 64 bits", name)
    if isinstance(item, float) and not math.isfinite(item):
        raise RequestError(f"{name} holds a number that is not finite", name)
    for text in texts_of(item):
        check_text(text, name)
    return sum(map(len, texts_of(item)))


def unknown(name: str, known: Iterable[str], what: str = "field", where: str = "") -> str:
    """The message for a field or key that does not exist, with the closest of ``known``."""
    close = difflib.get_close_matches(name[:60], list(known), n=1)
    return f"unknown {what} {show(name)}{where}" + (f" (did you mean {close[0]!r}?)" if close else "")


def show(value: object) -> str:
    """``value`` as a short piece of an error message, never a whole hostile payload."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, int) and abs(value) >= _INT_LIMIT:
        return "a number of more than 64 bits"
    text = repr(value if not isinstance(value, str) else value[:60])
    return text if len(text) <= 60 else text[:57] + "..."
