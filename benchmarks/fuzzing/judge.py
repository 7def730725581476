"""What an answer must be, whatever was asked: its faults by demand, and its normal form for comparing two of them."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from fuzzing.client import Answer
from fuzzing.shot import Shot

MAX_REFUSAL_BYTES = 4096  # a refusal explains; it does not send the request back

STATUS = "no 5xx but refusals with Retry-After"
WHOLE = "every answer arrives whole and is what it says it is"
SERVED = "requests that are right are served"
SECRET = "no path of the server's machine, no traceback in any answer"
SAME = "the same request gets the same answer"

_PATH = re.compile(rb"/(?:home|root|tmp|usr|opt|var|etc|mnt|srv|proc|private|Users|Library|work)/[\w.+/-]{2,}")
_TRACE = re.compile(
    rb"Traceback \(most recent call last\)|File \"[^\"]+\", line \d+|\bat [\w.$]+\([\w$]+\.java:\d+\)"
    rb"|\.(?:py|java|cpp|rs):\d+|site-packages|<[\w.]+ object at 0x|0x[0-9a-f]{9,}"
)
# What TorchServe's front end says when it cannot take a form or a path apart: the worker never sees the request.
_FRONT_END = re.compile(
    rb'\{\s*"code": 500,\s*"type": "(?:ErrorDataDecoder|(?:Array|String)IndexOutOfBounds)Exception"'
)
_BARE = (413, 417)  # these come from the front end, without a body
# From one time to the next.
_CHANGING = {
    "id",
    "created",
    "cached_tokens",
    "prompt_tokens_details",
    "draft_n",
    "draft_n_accepted",
    "origin",
    "origins",
}


def faults(shot: Shot, answer: Answer, secrets: Iterable[bytes] = ()) -> Iterator[tuple[str, str]]:
    """Each demand that ``answer`` breaks, with what it did. ``secrets``: more that no answer may hold."""
    yield from ((SECRET, f"the answer holds {leak[:200]!r}") for leak in leaks(shot, answer, secrets))
    if answer.refused or answer.gone:
        return
    if answer.status >= 500:
        if not of_front_end(answer) and not (answer.status == 504 and shot.timed and b'"timeout"' in answer.body):
            yield STATUS, f"{answer.status}: {_shown(answer.body)}"
        return
    if shot.lame:
        return
    if answer.fault:
        yield WHOLE, answer.fault
    elif answer.status >= 400:
        yield from ((WHOLE, what) for what in _refusal_faults(answer))
        if shot.served:
            yield SERVED, f"{answer.status}: {_shown(answer.body)}"
    else:
        yield from ((WHOLE, what) for what in _success_faults(shot, answer))


def of_front_end(answer: Answer) -> bool:
    """Whether TorchServe's front end failed by itself, in one of the known ways that nothing behind it can change."""
    return answer.status == 500 and _FRONT_END.match(answer.body) is not None


def leaks(shot: Shot, answer: Answer, secrets: Iterable[bytes]) -> Iterator[bytes]:
    """What tells of the server's inside and was not in the request."""
    told = b"\n".join([*(f"{k}: {v}".encode() for k, v in answer.headers.items()), answer.body])
    for pattern in (_PATH, _TRACE):
        yield from (found[0] for found in pattern.finditer(told) if found[0] not in shot.data)
    yield from (secret for secret in secrets if secret in told and secret not in shot.data)


def _refusal_faults(answer: Answer) -> Iterator[str]:
    if len(answer.body) > MAX_REFUSAL_BYTES:
        yield f"a refusal of {len(answer.body)} bytes: {_shown(answer.body)}"
    if answer.status in _BARE and not answer.body:
        return
    try:
        said = json.loads(answer.body)
        error = said.get("error", said)
        if not isinstance(error["message"], str):
            yield f"{answer.status} whose message is no text: {_shown(answer.body)}"
    except (ValueError, KeyError, TypeError, AttributeError):
        yield f"{answer.status} without an error object: {_shown(answer.body)}"


def _success_faults(shot: Shot, answer: Answer) -> Iterator[str]:
    try:
        text = answer.body.decode("utf-8")
    except UnicodeDecodeError as error:
        yield f"not UTF-8 at byte {error.start}"
        return
    if answer.content_type == "application/json":
        try:
            said = json.loads(text, parse_constant=_no_number)
        except ValueError as error:
            yield f"not JSON ({error}): {_shown(answer.body)}"
            return
        if isinstance(said, dict) and said.get("error") is not None:
            yield f"{answer.status} with an error inside: {_shown(answer.body)}"
    elif answer.content_type == "text/event-stream":
        yield from _stream_faults(shot, text)
    elif error_line(text) is not None and not shot.timed:
        yield f"a stream that ends with an error: {error_line(text)}"


def _stream_faults(shot: Shot, text: str) -> Iterator[str]:
    if not text.endswith("data: [DONE]\n\n"):
        yield f"a stream that ends with {text[-60:]!r}"
    for event in events(text):
        if "error" in event and not (shot.timed and event["error"].get("code") == "timeout"):
            yield f"a stream with an error: {json.dumps(event)[:300]}"


def error_line(text: str) -> str | None:
    """The error that a native stream ends with, or None."""
    last = text.rstrip("\n").rpartition("\n")[2]
    return last[:300] if last.startswith('{"error"') else None


def events(text: str) -> list[dict[str, Any]]:
    """The objects of a stream of server-sent events; what is none counts as an error."""
    found = []
    for line in text.split("\n"):
        if line.startswith("data:") and line[5:].strip() != "[DONE]":
            try:
                found.append(dict(json.loads(line[5:])))
            except (ValueError, TypeError):
                found.append({"error": {"message": f"no event: {line[:100]}"}})
    return found


def normal(answer: Answer) -> str:
    """``answer`` without what changes from time to time: ids, dates, cached tokens, drafts, where a stream is cut."""
    text = answer.body.decode("utf-8", "replace")
    if answer.content_type == "text/event-stream":
        text = json.dumps(_merged(events(text)), sort_keys=True)
    elif answer.content_type == "application/json":
        with contextlib.suppress(ValueError):
            text = json.dumps(_constant(json.loads(text)), sort_keys=True)
    return f"{answer.status} {answer.content_type} {text}"


def _constant(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _constant(inner) for name, inner in value.items() if name not in _CHANGING}
    return [_constant(inner) for inner in value] if isinstance(value, list) else value


def _merged(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """A stream as one object: for each choice its text and log probabilities joined, and how it ended."""
    merged: dict[str, Any] = {}
    for event in stream:
        for choice in event.get("choices", ()):
            into = merged.setdefault(f"choice {choice['index']}", {})
            delta = choice.get("delta") or {}
            into["text"] = into.get("text", "") + (choice.get("text") or delta.get("content") or "")
            into["reason"] = choice.get("finish_reason") or into.get("reason")
            for name, entries in (choice.get("logprobs") or {}).items():
                if name not in _CHANGING:
                    into[name] = into.get(name, []) + _constant(entries or [])
        merged |= {name: _constant(event[name]) for name in ("usage", "error", "model") if event.get(name)}
    return merged


def _shown(body: bytes) -> str:
    return repr(body[:300].decode("utf-8", "replace"))


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
