"""How each protocol asks, and how the pieces of its answer are read. One class per way of answering.

A reader is given the body's pieces as they arrive and says how many pieces of text they held. A piece is one chunk
of the native plain-text stream, or one server-sent event with text of the OpenAI protocols.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

PROTOCOLS = ("native", "openai-completions", "openai-chat")
REFUSED = (429, 503)  # the server says that it is full: no failure, but no answer either

_TAIL = 4096  # bytes; an error that ends a native stream is shorter


class AnswerError(Exception):
    """The server said in the body that the request failed, or the body is not what the protocol promises."""


@dataclass(frozen=True)
class Usage:
    """Tokens as the server counted them."""

    prompt_tokens: int
    completion_tokens: int


class Reader(Protocol):
    """Reads one answer."""

    usage: Usage | None

    def feed(self, piece: bytes) -> int:
        """Take a piece of the body; returns how many pieces of text it held."""

    def finish(self) -> None:
        """The body is complete. Raises AnswerError when it tells of a failure."""

    @property
    def text(self) -> str:
        """The completion so far."""


def reader(protocol: str, stream: bool) -> Reader:
    """A fresh reader for one answer."""
    if not stream:
        return JsonReader()
    return NativeReader() if protocol == "native" else EventReader()


def request_body(
    protocol: str,
    prompt: str | Sequence[int],
    max_new_tokens: int,
    *,
    model: str,
    temperature: float | None,
    seed: int | None,
    ignore_eos: bool,
    stream: bool,
) -> bytes:
    """The JSON of one request; what is None or off is left out, for servers that know fewer fields."""
    body: dict[str, Any]
    if protocol == "native":
        body = {"prompt": prompt, "max_new_tokens": max_new_tokens, "stream": stream}
    else:
        body = {"model": model, "max_tokens": max_new_tokens, "stream": stream}
        if protocol == "openai-chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if stream:
            body["stream_options"] = {"include_usage": True}
    if temperature is not None:
        body["temperature"] = temperature
    if seed is not None:
        body["seed"] = seed
    if ignore_eos:
        body["ignore_eos"] = True
    return json.dumps(body).encode()


class NativeReader:
    """Plain text, as the native protocol and most plain TorchServe handlers stream it. It has no place for usage."""

    usage: Usage | None = None

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def feed(self, piece: bytes) -> int:
        self._pieces.append(piece)
        return 1

    @property
    def text(self) -> str:
        return b"".join(self._pieces).decode("utf-8", "replace")

    def finish(self) -> None:
        """Status and headers have long been sent when a stream breaks: the error is then the body's last line."""
        last_line = b"".join(self._pieces[-_TAIL:])[-_TAIL:].rstrip(b"\n").rpartition(b"\n")[2]
        if not last_line.startswith(b'{"error"'):
            return
        try:
            error = json.loads(last_line)["error"]
        except ValueError:
            return  # a completion may well be about JSON
        if isinstance(error, dict) and {"message", "type"} <= error.keys():
            raise AnswerError(str(error["message"]))


class EventReader:
    """Server-sent events of the OpenAI protocols, with usage in one of the last and ``[DONE]`` as the end."""

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self._texts: list[str] = []
        self._rest = b""  # of a line that has not ended
        self._done = False

    def feed(self, piece: bytes) -> int:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return sum([self._line(line.rstrip(b"\r")) for line in lines])

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def finish(self) -> None:
        if self._rest:
            self._line(self._rest)
        if not self._done:
            raise AnswerError("the stream ended without [DONE]")

    def _line(self, line: bytes) -> int:
        if not line.startswith(b"data:"):
            return 0  # an empty line, a comment, a field that this protocol does not use
        data = line[5:].strip()
        if data == b"[DONE]":
            self._done = True
            return 0
        try:
            event = json.loads(data)
        except ValueError:
            raise AnswerError("malformed event") from None
        message = error_message(event)
        if message is not None:
            raise AnswerError(message)
        if not isinstance(event, dict):
            raise AnswerError("malformed event")
        self.usage = _usage(event) or self.usage
        text = _first_text(event)
        if text:
            self._texts.append(text)
        return 1 if text else 0


class JsonReader:
    """An answer in one piece (``"stream": false``), of any of the protocols. It has no times but its end."""

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.text = ""
        self._pieces: list[bytes] = []

    def feed(self, piece: bytes) -> int:
        self._pieces.append(piece)
        return 0

    def finish(self) -> None:
        try:
            answer = json.loads(b"".join(self._pieces))
        except ValueError:
            raise AnswerError("the answer is not JSON") from None
        message = error_message(answer)
        if message is not None:
            raise AnswerError(message)
        if isinstance(answer, dict):
            self.usage = _usage(answer)
            self.text = str(answer.get("text", "")) or _first_text(answer)


def error_message(answer: object) -> str | None:
    """What an error body says: ``{"error": {"message"}}``, TorchServe's ``{"code", "type", "message"}``; else None."""
    if not isinstance(answer, dict):
        return None
    error = answer.get("error")
    if isinstance(error, dict):
        return str(error.get("message", error))
    if error is not None:
        return str(error)
    if "code" in answer and "message" in answer:
        return str(answer["message"])
    return None


def _usage(answer: dict[str, Any]) -> Usage | None:
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return None
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if not isinstance(prompt, int) or not isinstance(completion, int):
        return None
    return Usage(prompt, completion)


def _first_text(answer: dict[str, Any]) -> str:
    """The text of the first choice; empty when there is none, as in an event that only names the role."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return ""
    choice = choices[0]
    message = choice.get("delta") or choice.get("message") or {}
    return str(choice.get("text") or (message.get("content") if isinstance(message, dict) else "") or "")
