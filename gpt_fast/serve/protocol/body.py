"""A request as TorchServe delivers it, to one JSON object.

TorchServe hands a handler ``{parameter name: value}`` and the same curl command arrives in different shapes,
depending on its flags and on ``decode_input_request``:

==============================================  ==================================================================
``-T request.json``, ``--data-binary`` ...      ``{"body": bytes}``
``-H 'Content-Type: application/json' -d ...``  ``{"body": dict}`` if it parsed, otherwise ``{"body": bytes}``
``-H 'Content-Type: text/plain' -d ...``        ``{"body": str}`` if it is UTF-8, otherwise ``{"body": bytes}``
``-d '{...}'`` (a form, says curl)              ``{}``: lost; with a "=" in it ``{text before it: rest}``
``-F data=@request.json``, gRPC                 ``{"data": bytes}``, or a dict if the part says application/json
==============================================  ==================================================================

Whatever cannot be understood is refused with a RequestError that says why; nothing is guessed.
"""

from __future__ import annotations

import codecs
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

from gpt_fast.errors import RequestError
from gpt_fast.fields import show

EXAMPLE = '{"prompt": "Once upon a time", "max_new_tokens": 50}'
_BETTER = "send it with -T request.json, or add -H 'Content-Type: application/json'"
MAX_INT_DIGITS = 40  # more than any field allows; longer ones would cost quadratic time to convert and to print


def read_body(entry: Mapping[str, Any], max_bytes: int, content_length: int | None = None) -> dict[str, Any]:
    """The JSON object in ``entry``, one element of the ``data`` TorchServe gives to ``handle``. ``content_length`` is
    the request's header of that name: the size when TorchServe has already parsed the body, and the proof that a form
    was put together again as it had been sent. Raises RequestError: 413 above ``max_bytes``, otherwise 400."""
    if content_length is not None:
        _check_size(content_length, max_bytes)
    for name in ("body", "data"):
        if name in entry:
            if others := [key for key in entry if key != name]:
                _refuse(f"the form has the field {show(others[0])} beside {name!r}; put everything into the JSON")
            return _object(entry[name], max_bytes)
    if not entry and content_length:
        lost = "the body was sent as a form (what curl -d does), of which TorchServe keeps nothing"
        _refuse(f"{lost}; {_BETTER}", "form")
    if not entry:
        _refuse(f"the body is empty; send a JSON object such as {EXAMPLE}", "empty_body")
    return _object(_from_form(entry, content_length), max_bytes)


def parse_json(text: str | bytes | bytearray) -> dict[str, Any]:
    """The object that ``text`` is the JSON of; strict where :mod:`json` is not. Raises RequestError, always 400."""
    if not isinstance(text, str):
        text = _decode(bytes(text))
    if not text.strip():
        _refuse(f"the body is empty; send a JSON object such as {EXAMPLE}", "empty_body")
    try:
        # A number that is cut stays far outside every field's range, so that the field's own check refuses it by name.
        value = json.loads(text, object_pairs_hook=_unique, parse_int=lambda digits: int(digits[:MAX_INT_DIGITS]))
    except json.JSONDecodeError as error:
        _refuse(f"the body is not JSON: {error}; send an object such as {EXAMPLE}")
    except RecursionError:
        _refuse("the body is nested too deeply")
    return _check_object(value)


def _object(value: Any, max_bytes: int) -> dict[str, Any]:
    if isinstance(value, (bytes, bytearray, str)):
        _check_size(len(value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value), max_bytes)
        return parse_json(value)
    return _check_object(value)


def _check_object(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    kind = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    what = kind.get(type(value), "null")
    _refuse(f"the body is {what}, not a JSON object; send one object a request, such as {EXAMPLE}", "invalid_type")


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        message = f"the body has {num_bytes} bytes, at most {max_bytes} are allowed (max_body_bytes)"
        raise RequestError(message, None, "body_too_large", 413)


def _decode(raw: bytes) -> str:
    if raw.startswith(codecs.BOM_UTF8):
        _refuse("the body starts with a byte order mark; send JSON in plain UTF-8 without one", "invalid_encoding")
    if raw.startswith(b"\x1f\x8b"):
        _refuse("the body is compressed by gzip, which is not supported; send plain JSON", "invalid_encoding")
    if json.detect_encoding(raw) != "utf-8":
        _refuse("the body looks like UTF-16 or UTF-32; send JSON in UTF-8", "invalid_encoding")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse(f"the body is not UTF-8: {error.reason} at byte {error.start}", "invalid_encoding")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise RequestError(f"the field {show(twice)} is there more than once", twice[:100], "duplicate_field")
    return fields


def _from_form(entry: Mapping[str, Any], content_length: int | None) -> bytes:
    """The text that ``curl -d '{...}'`` sent and TorchServe took apart at "&" and "=" as if it were a form. What
    follows the last "&" is lost unless it has a "=" as well, percent escapes are decoded, and of a name that comes
    twice one stays: all of these show in the length. Only a "+" that became a blank does not."""
    if not next(iter(entry)).lstrip().startswith(("{", "[")):
        names = ", ".join(show(name) for name in list(entry)[:5])
        _refuse(f"the body is a form with the fields {names}; send a JSON object such as {EXAMPLE}", "form")
    pieces = []
    for name, value in entry.items():
        raw = value.encode() if isinstance(value, str) else bytes(value)
        pieces.append(name.encode("utf-8", "surrogatepass") + (b"=" + raw if raw else b""))
    text = b"&".join(pieces)
    if content_length is not None and len(text) != content_length:
        _refuse(f"the body was sent as a form (what curl -d does), which changed it on the way; {_BETTER}", "form")
    return text


def _refuse(message: str, code: str = "invalid_json") -> NoReturn:
    raise RequestError(message, None, code)
