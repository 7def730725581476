"""Opens a connection, sends one shot over it and tells what came back. gpt_fast.bench.load makes the sockets."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field

from fuzzing.shot import QUICK_S, Shot
from gpt_fast.bench.load.connection import Connection, Receive
from gpt_fast.bench.load.http import ResponseParser
from gpt_fast.errors import TransferError

TIMEOUT_S = 60.0


@dataclass
class Answer:
    """What came back. ``status`` 0: nothing. ``gone``: the client hung up itself. ``fault``: how the transfer broke."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    gone: bool = False
    fault: str = ""
    took_s: float = 0.0

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def refused(self) -> bool:
        """The server is busy and says when to come back."""
        return self.status == 503 and self.headers.get("retry-after", "").isdecimal()


async def fire(host: str, port: int, shot: Shot) -> Answer:
    """Send ``shot`` and read what it waits for. Never raises for what the server does."""
    begin = time.perf_counter()
    pieces: list[bytes] = []

    def receive(status: int, new: list[bytes], now: float) -> bool:
        pieces.extend(new)
        return shot.hang_up != "first"

    answer = Answer()
    try:
        _, connection = await asyncio.get_running_loop().create_connection(Connection, host, port)
    except OSError as error:
        return Answer(fault=f"cannot connect: {error.strerror}")
    try:
        done = await _send(connection, shot, receive)
        if shot.hang_up == "sent":
            await asyncio.sleep(shot.pause_s)
            answer.gone = True
        else:
            response = await asyncio.wait_for(done, QUICK_S if shot.lame and not shot.hang_up else TIMEOUT_S)
            answer.gone = response is None
    except asyncio.TimeoutError:
        answer.gone = shot.lame
        answer.fault = "" if shot.lame else f"no answer within {TIMEOUT_S:.0f} s"
    except TransferError as error:
        answer.fault = str(error)
    finally:
        _drop(connection, done)
    answer.status, answer.headers, answer.body = connection.parser.status, connection.parser.headers, b"".join(pieces)
    answer.took_s = time.perf_counter() - begin
    return answer


async def _send(connection: Connection, shot: Shot, receive: Receive) -> asyncio.Future[ResponseParser | None]:
    first, *rest = shot.pieces
    done = connection.send(first, receive)
    for piece in rest:
        await asyncio.wait({done}, timeout=shot.pause_s)
        if done.done() or connection.transport is None:
            break
        connection.transport.write(piece)
    return done


def _drop(connection: Connection, done: asyncio.Future[ResponseParser | None]) -> None:
    """Close, whatever is under way; a failure that nobody asked for is not reported."""
    if done.done():
        with contextlib.suppress(asyncio.CancelledError):
            done.exception()
    else:
        done.cancel()
    connection.close(reset=True)
