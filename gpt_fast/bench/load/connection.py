"""Connections that time what they read, with little CPU.

A read from the socket is one callback, which parses and stamps what came; a task is woken once per answer. That is
several times cheaper than awaiting each chunk, and the client shares its machine with the server it measures.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import ssl
import time
import urllib.parse
from collections.abc import Callable, Mapping

from gpt_fast.bench.load.http import ResponseParser
from gpt_fast.errors import TransferError

_READ_BYTES = 16384

Receive = Callable[[int, list[bytes], float], bool]
"""Takes status, pieces of the body, and the time.perf_counter() they were read at; False: hang up."""


class Connection(asyncio.BufferedProtocol):
    """One connection that carries one request at a time. Buffered: a plain Protocol has asyncio allocate a quarter of a
    megabyte for every read."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self.transport: asyncio.Transport | None = None
        self.parser = ResponseParser()
        self._receive: Receive | None = None
        self._done: asyncio.Future[ResponseParser | None] | None = None

    def send(self, request: bytes, receive: Receive) -> asyncio.Future[ResponseParser | None]:
        """Send; the future gives the finished response, or None when ``receive`` hung up. It raises TransferError, and
        what ``receive`` raises."""
        done: asyncio.Future[ResponseParser | None] = asyncio.get_running_loop().create_future()
        self.parser, self._receive, self._done = ResponseParser(), receive, done
        if self.transport is None or self.transport.is_closing():
            self._fail(TransferError("connection closed without an answer"))
        else:
            self.transport.write(request)
        return done

    def close(self, reset: bool = False) -> None:
        """Close; ``reset``: at once, dropping what is unsent and unread, as a client that is gone does."""
        if self.transport is not None:
            self.transport.abort() if reset else self.transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        now = time.perf_counter()
        if self._receive is None or self._done is None or self._done.done():
            self.close(reset=True)  # bytes that nobody asked for: this connection must not be used again
            return
        self.parser.read_at = now
        try:
            pieces = self.parser.feed(self._buffer[:nbytes])
            hang_up = bool(pieces) and not self._receive(self.parser.status, pieces, now)
        except Exception as error:  # raised here it would be logged, and the request would hang
            self._fail(error)
            return
        if hang_up:
            self._done.set_result(None)
            self.close(reset=True)
        elif self.parser.complete:
            self._done.set_result(self.parser)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        try:
            if exc is not None:
                raise TransferError("connection reset")
            self.parser.eof()
            self._done.set_result(self.parser)
        except TransferError as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        self.close(reset=True)


class Endpoint:
    """Where requests go: a parsed ``url``, and the idle connections to it where ``keep_alive`` keeps any. Raises
    ValueError for a URL that is not http(s)://host[:port]/path."""

    def __init__(self, url: str, *, headers: Mapping[str, str], keep_alive: bool = False) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url {url!r} is not of the form http://host:port/path")
        self._host = self._address = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (80 if self._tls is None else 443)
        self._keep_alive = keep_alive
        self._idle: list[Connection] = []
        path = urllib.parse.quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
        given = {"Host": parts.netloc.rpartition("@")[2], "Content-Type": "application/json"}
        given |= {"Connection": "keep-alive" if keep_alive else "close", **headers}
        for name, value in given.items():
            if any(c in "\r\n" or c > "\xff" for c in name + value):
                raise ValueError(f"header {name!r} must be one line of Latin-1")
        self._head = f"POST {path}{f'?{parts.query}' * bool(parts.query)} HTTP/1.1\r\n"
        self._head += "".join(f"{name}: {value}\r\n" for name, value in given.items())

    def request(self, body: bytes) -> bytes:
        return f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode("latin-1") + body

    async def post(self, request: bytes, receive: Receive) -> ResponseParser | None:
        """Send ``request``; returns the finished response, or None when ``receive`` hung up. Raises TransferError. A
        kept connection that the server closed meanwhile is replaced by a fresh one; nothing else is tried twice."""
        while self._idle:
            connection = self._idle.pop()
            try:
                return await self._exchange(connection, request, receive)
            except TransferError:
                if connection.parser.started:
                    raise
        return await self._exchange(await self._connect(), request, receive)

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.close()

    async def _exchange(self, connection: Connection, request: bytes, receive: Receive) -> ResponseParser | None:
        try:
            response = await connection.send(request, receive)
        except BaseException:
            connection.close(reset=True)  # a timeout or Ctrl-C: the server must notice
            raise
        if response is not None and response.reusable and self._keep_alive:
            self._idle.append(connection)
        else:
            connection.close()
        return response

    async def _connect(self) -> Connection:
        server = self._host if self._tls is not None else None
        try:
            transport, connection = await asyncio.get_running_loop().create_connection(
                Connection, self._address, self._port, ssl=self._tls, server_hostname=server
            )
        except ssl.SSLError as error:
            raise TransferError(f"TLS: {error.reason}") from None
        except OSError as error:
            if f"[Errno {errno.ECONNREFUSED}]" in str(error):  # asyncio lists the errors of several addresses
                raise TransferError("connection refused") from None
            raise TransferError(f"cannot connect: {error.strerror or error}") from None
        # The numbers that answered: resolving a name takes a thread each time, and "localhost" is often ::1 first.
        self._address = transport.get_extra_info("peername")[0]
        return connection


def raise_file_limit(wanted: int) -> None:
    """Allow ``wanted`` open files, as far as the system does; each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
