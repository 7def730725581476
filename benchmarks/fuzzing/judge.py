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
BACK = "the tokens of a text make that text again"

_PATH = re.compile(rb"/(?:home|root|tmp|usr|opt|var|etc|mnt|srv|proc|private|Users|Library|work)/[\w.+/-]{2,}")
_TRACE = re.compile(
    rb"Traceback \(most recent call last\)|File \"[^\"]+\", line \d+|\bat [\w.$]+\([\w$]+\.java:\d+\)"
    rb"|\.(?:py|java|cpp|rs):\d+|site-packages|<[\w.]+ object at 0x|0x[0-9a-f]{9,}"
)
# What TorchServe's front end says when it cannot take a form or a path apart: the worker never sees the request.
_FRONT_END = re.compile(
    rb'\{\s*"code": 500,\s*"type": "(?:ErrorDataDecoder|(?:Array|String)IndexOutOfBounds)Exception"'
)
LINES = "application/x-ndjson"
CONTRADICTION = "contradiction"
_BARE = (413, 417)  # these come from the front end, without a body
# From one time to the next.
_CHANGING = {
    "id",
    "created",
    "created_at",
    "call_id",
    "cached_tokens",
    "prompt_tokens_details",
    "input_tokens_details",
    "draft_n",
    "draft_n_accepted",
    "origin",
    "origins",
}


# The name without which an answer is none.
_MAIN = {"v1/responses": "output", "tokenize": "tokens", "detokenize": "prompt"}


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
        except (ValueError, RecursionError) as error:
            yield f"not JSON ({error}): {_shown(answer.body)}"
            return
        yield from (f"{what}: {_shown(answer.body)}" for what in _object_faults(shot, said))
    elif answer.content_type == "text/event-stream":
        yield from _stream_faults(shot, text)
    elif answer.content_type == LINES:
        yield from _line_faults(shot, text)
    elif (line := error_line(text)) is not None and not _may_fail(shot, _lines(line)[0]["error"]):
        yield f"a stream that ends with an error: {line[:300]}"


def asked(shot: Shot) -> dict[str, Any]:
    """The body of a request that is right."""
    return dict(json.loads(shot.data.partition(b"\r\n\r\n")[2]))


def _object_faults(shot: Shot, said: Any) -> Iterator[str]:
    """Of an answer in one piece, by what it says that it is."""
    if shot.served and shot.route == "predict" and not str(said).startswith(asked(shot)["prompt"]):
        yield "not the prompt with its continuation"
    if not isinstance(said, dict):
        return
    if said.get("error") is not None:
        yield "an error inside"
    elif shot.served and _MAIN.get(shot.route, "") not in ("", *said):
        yield f"without {_MAIN[shot.route]}"
    elif said.get("object") == "response":
        yield from _response_faults(said)
    elif "token_strs" in said:
        num_names = len(said["tokens"] if said["token_strs"] is None else said["token_strs"])
        if not said["count"] == len(said["tokens"]) == num_names:
            yield "another number of tokens than its count"


def _response_faults(response: dict[str, Any]) -> Iterator[str]:
    """Of an answer of v1/responses at its end."""
    usage = response["usage"]
    if usage["input_tokens"] + usage["output_tokens"] != usage["total_tokens"]:
        yield "a wrong sum of tokens"
    states = ["completed"] * (len(response["output"]) - 1) + [response["status"]]
    if not response["output"] or [item["status"] for item in response["output"]] != states:
        yield "items that have not ended"
    if (response["status"], response["incomplete_details"] is None) not in (("completed", True), ("incomplete", False)):
        yield f"the status {response['status']}"


def _line_faults(shot: Shot, text: str) -> Iterator[str]:
    """Of a native stream of JSON lines, which says at its end why it ends."""
    last = _lines(text)[-1]
    if not text.isascii():
        yield "lines that are not ASCII"
    if "error" in last and not _may_fail(shot, last["error"]):
        yield f"a stream with an error: {json.dumps(last)[:300]}"
    elif "error" not in last and "finish_reason" not in last:
        yield f"a stream that ends with {text[-60:]!r}"


def _stream_faults(shot: Shot, text: str) -> Iterator[str]:
    told = events(text)
    if not text.isascii():  # some readers take other characters for line ends
        yield "a stream of events that is not ASCII"
    for event in told:
        error = event if event.get("type") == "error" else event.get("error")
        if error is not None and not _may_fail(shot, error):
            yield f"a stream with an error: {json.dumps(event)[:300]}"
    if text.startswith("event:"):
        yield from _named_faults(text, told)
    elif not text.endswith("data: [DONE]\n\n"):
        yield f"a stream that ends with {text[-60:]!r}"


def _named_faults(text: str, told: list[dict[str, Any]]) -> Iterator[str]:
    """Of a stream of v1/responses: events with names and numbers, whose pieces are those of the answer at its end."""
    heads = [f"event: {event.get('type')}\ndata: " for event in told]
    blocks = text.split("\n\n")
    if blocks.pop() or not all(map(str.startswith, blocks, heads)) or len(blocks) != len(heads):
        yield "events that are not named as they are"
    if [event.get("sequence_number") for event in told] != list(range(len(told))):
        yield "events that are not numbered from 0 on"
    if told[-1].get("type") == "error":
        return
    last = told[-1].get("response", {})
    if told[0].get("type") != "response.created" or told[-1].get("type") != f"response.{last.get('status')}":
        yield f"a stream from {told[0].get('type')} to {told[-1].get('type')}"
        return
    yield from _response_faults(last)
    for i, item in enumerate(last["output"]):
        pieces = "".join(event["delta"] for event in told if "delta" in event and event["output_index"] == i)
        if pieces != (item["arguments"] if "arguments" in item else item["content"][0]["text"]):
            yield f"pieces of item {i} that are not its text: {pieces[:100]!r}"


def _lines(text: str) -> list[dict[str, Any]]:
    """The objects of a native stream of JSON lines; what is none counts as an error."""
    return events("".join(f"data: {line}\n" for line in text.removesuffix("\n").split("\n")))


def _may_fail(shot: Shot, error: dict[str, Any]) -> bool:
    """Whether a stream may end so: the request's time was up, or what it demands leaves no token at some point."""
    code = error.get("code")
    return (shot.timed and code == "timeout") or (not shot.served and code == CONTRADICTION)


def error_line(text: str) -> str | None:
    """The error that a native stream ends with, or None."""
    last = text.rstrip("\n").rpartition("\n")[2]
    return last if last.startswith('{"error"') else None


def events(text: str) -> list[dict[str, Any]]:
    """The objects of a stream of server-sent events; what is none counts as an error."""
    found = []
    for line in text.split("\n"):
        if line.startswith("data:") and line[5:].strip() != "[DONE]":
            try:
                found.append(dict(json.loads(line[5:])))
            except (ValueError, TypeError, RecursionError):
                found.append({"error": {"message": f"no event: {line[:100]}"}})
    return found


def normal(answer: Answer) -> str:
    """``answer`` without what changes from time to time: ids, dates, cached tokens, drafts, where a stream is cut."""
    text = answer.body.decode("utf-8", "replace")
    if answer.content_type == "text/event-stream":
        text = json.dumps(_merged(events(text)), sort_keys=True)
    elif answer.content_type == LINES:
        text = json.dumps(_joined(_lines(text)), sort_keys=True)
    elif answer.content_type == "application/json":
        with contextlib.suppress(ValueError, RecursionError):
            text = json.dumps(_constant(json.loads(text)), sort_keys=True)
    return f"{answer.status} {answer.content_type} {text}"


def _constant(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _constant(inner) for name, inner in value.items() if name not in _CHANGING}
    return [_constant(inner) for inner in value] if isinstance(value, list) else value


def _joined(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Lines as one object: texts and lists joined."""
    joined: dict[str, Any] = {}
    for line in lines:
        for name, value in _constant(line).items():
            joined[name] = joined[name] + value if name in joined and isinstance(value, (str, list)) else value
    return joined


def _merged(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """A stream as one object: for each choice its text and log probabilities joined, and how it ended. Of a stream of
    v1/responses the last event has all of it."""
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
        merged |= {name: _constant(event[name]) for name in ("usage", "error", "model", "response") if event.get(name)}
    return merged


def _shown(body: bytes) -> str:
    return repr(body[:300].decode("utf-8", "replace"))


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
