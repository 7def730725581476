"""An HTTP server whose every byte and pause a test decides, with notes of what it saw and when."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(piece: bytes | str) -> bytes:
    data = piece.encode() if isinstance(piece, str) else piece
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def whole(status: int, body: bytes | str, headers: str = "") -> bytes:
    data = body.encode() if isinstance(body, str) else body
    return f"HTTP/1.1 {status} Whatever\r\n{headers}Content-Length: {len(data)}\r\n\r\n".encode() + data


def event(content: Any) -> bytes:
    return chunk(f"data: {content if isinstance(content, str) else json.dumps(content)}\n\n")


@dataclass
class Exchange:
    """One request as the server sees it. Times are of time.perf_counter(), which the client in this process shares."""

    body: dict[str, Any]
    headers: dict[str, str]
    writer: asyncio.StreamWriter
    arrival: float
    writes: list[float] = field(default_factory=list)

    async def send(self, *pieces: bytes) -> None:
        """Write ``pieces`` at once."""
        self.writes.append(time.perf_counter())
        self.writer.write(b"".join(pieces))
        await self.writer.drain()

    def reset(self) -> None:
        """Drop the connection with a reset instead of an orderly end."""
        linger = struct.pack("ii", 1, 0)
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.writer.transport.abort()


Answer = Callable[[Exchange], Awaitable[None]]


class FakeServer:
    """Serves ``answer`` on a free loopback port from a thread. The connection stays open for the next request unless
    ``answer`` closes the writer; ``close_after``: it is closed after each answer without saying so."""

    def __init__(self, answer: Answer, close_after: bool = True) -> None:
        self.answer = answer
        self.close_after = close_after
        self.exchanges: list[Exchange] = []
        self.num_connections = 0
        self.num_hung_up = 0
        self.in_flight = 0
        self.peak_in_flight = 0
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._ready = threading.Event()

    def __enter__(self) -> FakeServer:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._connection, "127.0.0.1", 0, backlog=1024))
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/predictions/m"
        self._ready.set()
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
            self._loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        self._loop.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.decode().split("\r\n")[1:-2]
                headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
                body = json.loads(await reader.readexactly(int(headers["content-length"])))
                exchange = Exchange(body, headers, writer, time.perf_counter())
                self.exchanges.append(exchange)
                await self._serve(exchange, reader)
                if self.close_after:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client closed
        finally:
            writer.close()

    async def _serve(self, exchange: Exchange, reader: asyncio.StreamReader) -> None:
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        answering = asyncio.ensure_future(self.answer(exchange))
        hang_up = asyncio.ensure_future(reader.read(1))  # ends when the client is gone; it sends nothing else
        try:
            await asyncio.wait({answering, hang_up}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                self.num_hung_up += 1
                answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
        finally:
            hang_up.cancel()
            await asyncio.gather(hang_up, return_exceptions=True)
            self.in_flight -= 1
