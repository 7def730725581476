"""What the protocols check alike in a JSON body: texts that are no text, numbers no field takes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from gpt_fast.errors import RequestError
from gpt_fast.params import show

_INT_LIMIT = 2**64  # beyond every field's range; math.isfinite and str() choke on much larger ones


def check_values(name: str, value: Any) -> None:
    """Raise RequestError, naming the field ``name``, if ``value`` holds half a surrogate pair or an absurd integer.

    JSON can spell both; no tokenizer takes the one, no conversion to float the other.
    """
    pending = [value]
    while pending:  # not recursive: a body may be nested as deeply as its parser allowed
        item = pending.pop()
        if isinstance(item, str):
            if not item.isascii() and any("\ud800" <= char <= "\udfff" for char in item):
                message = f"{name[:100]} is not valid text: half of a surrogate pair"
                raise RequestError(message, name[:100], "invalid_text")
        elif isinstance(item, int):
            if abs(item) >= _INT_LIMIT:
                raise RequestError(f"{name} is out of range", name)
        elif isinstance(item, Mapping):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, list):
            pending += item


def is_number(value: Any) -> bool:
    """Whether JSON calls ``value`` a number: Python calls true one, too."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def default_tokens(default: int, values: Mapping[str, Any]) -> int:
    """``max_tokens`` for a request that does not say: a default never contradicts the request's ``min_tokens``."""
    least = values.get("min_tokens", 0)
    return max(default, int(least)) if is_number(least) and 0 <= least < 2**31 else default


def unknown(name: str, known: Iterable[str]) -> str:
    """The message for a field that does not exist."""
    close = difflib.get_close_matches(name[:60], list(known), n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"unknown field {show(name)}{hint}"


def kind(value: Any) -> str:
    """What JSON calls ``value``, for messages."""
    kinds = {str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "an array"}
    return "null" if value is None else kinds.get(type(value), "an object")
