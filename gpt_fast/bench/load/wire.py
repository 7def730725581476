"""How each protocol asks, and how the pieces of its answer are read. One class per way of answering."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from gpt_fast.bench.load.options import LoadOptions
from gpt_fast.bench.load.prompts import Prompt
from gpt_fast.errors import AnswerError

REFUSED = (429, 503)  # the server says that it is full: no failure, but no answer either

_TAIL = 4096  # bytes; an error that ends a native stream is shorter


@dataclass(frozen=True)
class Usage:
    """Tokens as the server counted them."""

    prompt_tokens: int
    completion_tokens: int


class Reader:
    """Reads one answer: the pieces of its body as they arrive. ``text``: the completion, once it is finished. A piece
    of text is a chunk of the native plain-text stream, or a server-sent event of the OpenAI protocols that holds
    text."""

    _num_texts = 0  # in a piece

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.text = ""
        self._pieces: list[bytes] = []

    def feed(self, piece: bytes) -> int:
        """Take a piece of the body; returns how many pieces of text it held."""
        self._pieces.append(piece)
        return self._num_texts

    def finish(self) -> None:
        """The body is complete. Raises AnswerError when it tells of a failure."""
        raise NotImplementedError


class NativeReader(Reader):
    """Plain text, as the native protocol and most plain TorchServe handlers stream it. It has no place for usage."""

    _num_texts = 1

    def finish(self) -> None:
        """Status and headers have long been sent when a stream breaks: the error is then the body's last line."""
        body = b"".join(self._pieces)
        self.text = body.decode("utf-8", "replace")
        last_line = body[-_TAIL:].rstrip(b"\n").rpartition(b"\n")[2]
        if last_line.startswith(b'{"error"'):
            try:
                error = json.loads(last_line)["error"]
            except ValueError:
                return  # a completion may well be about JSON
            if isinstance(error, dict) and {"message", "type"} <= error.keys():
                raise AnswerError(str(error["message"]))


class EventReader(Reader):
    """Server-sent events of the OpenAI protocols, with usage in one of the last and ``[DONE]`` as the end."""

    def __init__(self) -> None:
        super().__init__()
        self._rest = b""  # of a line that has not ended
        self._done = False

    def feed(self, piece: bytes) -> int:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return sum([self._line(line.strip()) for line in lines])

    def finish(self) -> None:
        self._line(self._rest.strip())
        if not self._done:
            raise AnswerError("the stream ended without [DONE]")

    def _line(self, line: bytes) -> int:
        if not line.startswith(b"data:"):
            return 0  # an empty line, a comment, a field that this protocol does not use
        if line[5:].strip() == b"[DONE]":
            self._done = True
            return 0
        event = _object(line[5:], "malformed event")
        self.usage = _usage(event) or self.usage
        text = _first_text(event)
        self.text += text
        return 1 if text else 0


class JsonReader(Reader):
    """An answer in one piece (``"stream": false``), of any of the protocols. It has no times but its end."""

    def finish(self) -> None:
        answer = _object(b"".join(self._pieces), "the answer is not a JSON object")
        self.usage = _usage(answer)
        self.text = str(answer.get("text", "")) or _first_text(answer)


def reader(protocol: str, stream: bool) -> Reader:
    """A fresh reader for one answer."""
    if not stream:
        return JsonReader()
    return NativeReader() if protocol == "native" else EventReader()


def request_body(o: LoadOptions, prompt: Prompt, seed: int, stream: bool) -> bytes:
    """The JSON of one request; what is None or off is left out, for servers that know fewer fields."""
    limit = prompt.max_new_tokens or o.max_new_tokens
    body: dict[str, Any] = {"stream": stream, "seed": seed}
    if o.protocol == "native":
        body |= {"prompt": prompt.content, "max_new_tokens": limit}
    else:
        chat = {"messages": [{"role": "user", "content": prompt.content}]}
        body |= {"model": o.model, "max_tokens": limit}
        body |= chat if o.protocol == "openai-chat" else {"prompt": prompt.content}
        if stream:
            body["stream_options"] = {"include_usage": True}
    if o.temperature is not None:
        body["temperature"] = o.temperature
    if o.ignore_eos:
        body["ignore_eos"] = True
    return json.dumps(body).encode()


def error_message(answer: object) -> str | None:
    """What an error body says: ``{"error": {"message"}}``, TorchServe's ``{"code", "type", "message"}``; else None."""
    if not isinstance(answer, dict):
        return None
    error = answer.get("error")
    if error is not None:
        return str(error.get("message", error) if isinstance(error, dict) else error)
    return str(answer["message"]) if "code" in answer and "message" in answer else None


def _object(data: bytes, otherwise: str) -> dict[str, Any]:
    """A JSON object that is no error; AnswerError with its message, or with ``otherwise`` for what is none."""
    try:
        answer = json.loads(data)
    except ValueError:
        raise AnswerError(otherwise) from None
    message = error_message(answer)
    if message is not None or not isinstance(answer, dict):
        raise AnswerError(message or otherwise)
    return answer


def _usage(answer: dict[str, Any]) -> Usage | None:
    match answer.get("usage"):
        case {"prompt_tokens": int(prompt), "completion_tokens": int(completion)}:
            return Usage(prompt, completion)
    return None


def _first_text(answer: dict[str, Any]) -> str:
    """The text of the first choice; empty when there is none, as in an event that only names the role."""
    match answer.get("choices"):
        case [{"text": str(text)}, *_]:
            return text
        case [{"delta": {"content": str(text)}} | {"message": {"content": str(text)}}, *_]:
            return text
    return ""
