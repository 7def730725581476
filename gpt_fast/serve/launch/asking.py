"""Asks a running server, as a client would. Proxies that the environment names have no part in it."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from gpt_fast.errors import ServerError
from gpt_fast.serve.launch.record import MODEL, Server

_LONGEST_LINE = 2**16  # bytes, of an error


def fetch(address: str, path: str, timeout_s: float = 60) -> str:
    """The answer to GET ``path``, of the server at ``address`` (host:port). Raises OSError, and HTTPException also for
    an error's status."""
    connection = http.client.HTTPConnection(address, timeout=timeout_s)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        if answer.status >= 400:
            raise http.client.HTTPException(f"{path} was answered with status {answer.status}")
        return answer.read().decode()
    finally:
        connection.close()


def ready_workers(management: str, model: str) -> int:
    """How many workers of ``model`` can serve, by the management port (host:port). /ping would say Healthy while the
    model still loads. Raises OSError, HTTPException, ValueError, LookupError or TypeError where it does not say."""
    (found,) = json.loads(fetch(management, f"/models/{model}", timeout_s=5))
    return sum(worker["status"] == "READY" for worker in found["workers"])


def ask(server: Server, request_file: Path) -> None:
    """Send the JSON in ``request_file`` and print the answer as it comes, and a line end. Raises ServerError for an
    error's status, for an answer that breaks off, and for one whose last line is an error, as of a stream."""
    connection = http.client.HTTPConnection(server.address, timeout=600)
    connection.request(
        "POST",
        f"/predictions/{MODEL}",
        body=request_file.read_bytes(),
        headers={"Content-Type": "application/json"},
    )
    end = b""
    with _whole():
        answer = connection.getresponse()
        try:
            while piece := answer.read1():
                end = (end + piece)[-_LONGEST_LINE:]
                sys.stdout.buffer.write(piece)
                sys.stdout.buffer.flush()
        finally:
            print(flush=True)
    if answer.status >= 400:
        raise ServerError(f"the server answered with status {answer.status}")
    if _is_error(end.rstrip(b"\n").rpartition(b"\n")[2]):
        raise ServerError("the server ended the answer with an error")


def _is_error(line: bytes) -> bool:
    """Whether a last line is an error's JSON: the status of a stream has been sent before there is one."""
    try:
        return {"message", "type", "param", "code"} <= set(json.loads(line)["error"])
    except (ValueError, TypeError, LookupError, RecursionError):
        return False


def drafts(server: Server) -> str:
    """What became of the tokens that were guessed ahead since the model was loaded; nothing where none ever are. Raises
    ServerError where the server does not say."""
    with _whole():
        page = fetch(server.address, f"/predictions/{MODEL}/1.0/metrics")
    numbers = dict(re.findall(r"^vllm:spec_decode_num_(\w+)_tokens_total\{[^}]*\} (\d+)$", page, re.MULTILINE))
    if not numbers:
        return ""
    drafted, accepted = int(numbers["draft"]), int(numbers["accepted"])
    if not drafted:
        return "No tokens were guessed ahead so far."
    return f"{drafted} tokens were guessed ahead so far, and {accepted} of them were right ({accepted / drafted:.0%})."


@contextlib.contextmanager
def _whole() -> Iterator[None]:
    """Raises ServerError in the place of what http.client raises: the worker or all of the server may end meanwhile."""
    try:
        yield
    except http.client.HTTPException as error:
        raise ServerError(f"the server gave no whole answer: {error}") from error
