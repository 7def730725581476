"""What a grammar in llguidance's form of Lark must not hold, because the process would end over it or take all memory,
and the room that long ones need."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gpt_fast.engine.closed_schema import close_objects
from gpt_fast.engine.schema_limits import MAX_PATTERNS
from gpt_fast.errors import RequestError, try_later

Result = TypeVar("Result")

# llguidance goes from rule to rule by recursion, 3 kB each time. Only what is used of a stack takes memory.
_STACK_BYTES = 2**28
_starting = threading.Lock()  # the size of the next thread's stack is one number for all
_JSON = re.compile(r"%json\s*")
_TEXTS = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/')  # and comments


def check_lark(grammar: str, name: str) -> None:
    """Raise RequestError naming the field ``name`` for too many intersections, and for schemas in ``grammar`` that are
    not usable as a schema alone."""
    if _TEXTS.sub("", grammar).count("&") >= MAX_PATTERNS:
        message = f"{name} intersects terminals {MAX_PATTERNS} times and more"
        raise RequestError(message, name, "grammar_too_large")
    for found in _JSON.finditer(grammar):
        try:
            schema, _ = json.JSONDecoder().raw_decode(grammar, found.end())
        except (ValueError, RecursionError):  # the compiler refuses it
            continue
        if isinstance(schema, Mapping):
            close_objects(schema, name)


def with_room(work: Callable[[], Result]) -> Result:
    """What ``work`` returns or raises, in a thread with a stack for as many rules as a grammar can have."""
    with ThreadPoolExecutor(1, "gpt-fast-grammar") as pool:
        with _starting:
            before = threading.stack_size(_STACK_BYTES)
            try:
                done = pool.submit(work)
            except RuntimeError:
                raise try_later("there is no memory to compile a grammar") from None
            finally:
                threading.stack_size(before)
        return done.result()
