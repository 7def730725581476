"""A line of the input: one request, in OpenAI's batch format or in this project's own.

OpenAI's (https://platform.openai.com/docs/guides/batch): ``{"custom_id", "method": "POST", "url", "body": {...}}``,
with ``/v1/completions`` or ``/v1/chat/completions`` as ``url``. Our own: ``{"prompt": ..., "max_new_tokens": 50}``,
the fields of a native request, and an ``id`` if you want one. A line that is neither is kept with its fault.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from gpt_fast.errors import RequestError
from gpt_fast.fields import Kind, OneOf, Struct, Text, Whole, json_object
from gpt_fast.serve.protocol.body import MAX_INT_DIGITS, parse_json

MAX_LINE_BYTES = 2**24
URLS = ("/v1/completions", "/v1/chat/completions")
_ENVELOPE: dict[str, Kind] = {"custom_id": Text(1), "method": OneOf(("POST",)), "url": OneOf(URLS), "body": json_object}
# The parser cuts the end off a longer one.
_NUMBER = Whole(1 - 10 ** (MAX_INT_DIGITS - 2), 10 ** (MAX_INT_DIGITS - 1) - 1)
_BATCH = Struct(_ENVELOPE, needed=tuple(_ENVELOPE))


class Line(NamedTuple):
    """``form``: "batch" is OpenAI's, "plain" our own, "unreadable" a line that holds no JSON object. ``name``: the
    ``custom_id`` or ``id``. ``route``: as in serve/routes.py. ``fault``: why there is no request in it. ``content``:
    the request as text that is equal for equal requests, without the name; where the name is wrong, with it."""

    form: Literal["batch", "plain", "unreadable"]
    name: str | int | None
    route: str
    body: Mapping[str, Any]
    fault: RequestError | None
    content: str


def read_line(raw: bytes) -> Line:
    """Understand the envelope of one line. The request in it is parsed by the protocol, once there is a model."""
    try:
        if len(raw) > MAX_LINE_BYTES:
            raise RequestError(f"the line has more than {MAX_LINE_BYTES} bytes", None, "line_too_long", 413)
        value = parse_json(raw)
        whole = _canonical(value)
    except RequestError as fault:
        return Line("unreadable", None, "", {}, fault, raw.decode("latin-1"))
    return _read_plain(value) if _ENVELOPE.keys().isdisjoint(value) else _read_batch(value, whole)


def _read_batch(value: dict[str, Any], whole: str) -> Line:
    try:
        given = _BATCH(value, "line")
    except RequestError as fault:
        return Line("batch", _name_or_none(value.get("custom_id")), "", {}, fault, whole)
    content = _canonical([given["url"], given["body"]])
    return Line("batch", given["custom_id"], given["url"].strip("/"), given["body"], None, content)


def _read_plain(value: dict[str, Any]) -> Line:
    body = {name: inner for name, inner in value.items() if name != "id"}
    fault, name = None, value.get("id")
    if name != _name_or_none(name):
        takes = f"a string or a whole number of less than {MAX_INT_DIGITS} digits"
        fault = RequestError(f"id must be {takes}", "id", "invalid_type")
    content = _canonical(value if fault else body)  # a mended name makes another line of it
    return Line("plain", _name_or_none(name), "", body, fault, content)


def _name_or_none(value: Any) -> str | int | None:
    """``value`` if it can stand in the output as the name of a row."""
    try:
        return _NUMBER(value, "id") if type(value) is int else Text()(value, "id")
    except RequestError:
        return None


def _canonical(value: Any) -> str:
    """JSON that does not depend on the order of fields and on white space. Raises RequestError."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    except RecursionError:
        raise RequestError("the line is nested too deeply", None, "invalid_json") from None
