"""A row of the output: what one line of the input was answered.

==========  ========================================================================================================
a line was  its row
==========  ========================================================================================================
OpenAI's    ``{"id": "batch_req_<digest>", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}``
plain       ``{"line", "id", "digest", "text", "token_ids", "finish_reason", "usage", "error": null}``, or ``error``
unreadable  ``{"line", "id": null, "custom_id": null, "digest", "response": null, "error"}``, for readers of both
==========  ========================================================================================================

An *answer* is a row without its head: what two lines have in common that ask the same. ``error`` has OpenAI's fields
``message``, ``type``, ``param`` and ``code``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from gpt_fast.batch.lines import Line
from gpt_fast.errors import RequestError
from gpt_fast.serve.protocol.request import error_body

Answer = dict[str, Any]

_HEAD = ("line", "id", "custom_id", "digest")
_ID = "batch_req_"
_DIGEST = re.compile(r"[0-9a-f]{32}")
_MENDED_ELSEWHERE = ("not_installed", "model_not_found")  # codes of refusals that another run may not meet


def answer_of(line: Line, digest: str, body: dict[str, Any]) -> Answer:
    """The answer to ``line`` whose protocol says ``body``."""
    if line.form == "plain":
        body["usage"].pop("cached_tokens", None)  # says more about the run than about the answer
        return {**body, "error": None}
    body["id"] = f"{body['id'].partition('-')[0]}-{digest}"  # the same in each run
    return _response(200, digest, body)


def refusal_of(line: Line, digest: str, error: RequestError) -> Answer:
    """The answer to ``line``, which is refused or has failed with ``error``."""
    body = json.loads(error_body(error))
    if line.form == "plain":
        return {"error": body["error"]}
    if line.fault is not None:  # there was no request that a server could have answered
        return {"response": None, "error": body["error"]}
    return _response(error.status, digest, body)


def _response(status: int, digest: str, body: dict[str, Any]) -> Answer:
    return {"response": {"status_code": status, "request_id": f"req_{digest}", "body": body}, "error": None}


def write_row(line: Line, number: int, digest: str, answer: Answer) -> bytes:
    """The row of ``line``, the one with this ``number`` (from 1), with its line end."""
    head: dict[str, Any] = {"line": number, "id": line.name, "digest": digest}
    if line.form == "batch":
        head = {"id": _ID + digest, "custom_id": line.name}
    elif line.form == "unreadable":
        head = {"line": number, "id": None, "custom_id": None, "digest": digest}
    return to_bytes(head | answer)


def read_row(raw: bytes) -> tuple[str, Answer]:
    """The digest and the answer of a row. Raises ValueError for a row that was not written here."""
    try:
        row = json.loads(raw)
    except ValueError:
        row = None
    match row:
        case {"digest": str(digest)}:
            pass
        case {"id": str(named)} if named.startswith(_ID):
            digest = named.removeprefix(_ID)
        case _:
            digest = ""
    if not (_DIGEST.fullmatch(digest) and _is_answer(row, digest)):
        raise ValueError("not a row of gpt-fast batch")
    return digest, {name: value for name, value in row.items() if name not in _HEAD}


def _is_answer(row: dict[str, Any], digest: str) -> bool:
    """Whether ``row`` holds an answer that was made here. OpenAI's own rows have the same fields: there the ids of a
    request and its answer differ, and an error has no type."""
    match row:
        case {"response": {"request_id": request_id, "body": {}}, "error": None}:
            return bool(request_id == f"req_{digest}")
        case {"error": {"type": _, "code": _}}:
            return True
        case {"error": None}:
            return "response" not in row
    return False


def to_bytes(value: Mapping[str, Any]) -> bytes:
    """``value`` as a line of JSON in UTF-8. Halves of surrogate pairs, which UTF-8 does not have, are escaped."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def error_in(answer: Answer) -> Mapping[str, Any] | None:
    """What went wrong, if anything did."""
    response = answer.get("response")
    return answer["error"] or (response["body"].get("error") if response is not None else None)


def is_final(answer: Answer) -> bool:
    """Whether asking again would bring nothing new: not so where the server failed or had no time left, and where a
    package or a name of the model was missing."""
    error = error_in(answer)
    return error is None or (error["type"] != "server_error" and error["code"] not in _MENDED_ELSEWHERE)


def new_tokens(answer: Answer) -> int:
    """The number of tokens that were generated for it."""
    body = answer if answer.get("response") is None else answer["response"]["body"]
    return int(body.get("usage", {}).get("completion_tokens", 0))
