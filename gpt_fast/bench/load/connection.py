"""Connections that time what they read, with little CPU.

A read from the socket is one callback, which parses and stamps what came; a task is woken once per answer. That is
several times cheaper than awaiting each chunk, and the client shares its machine with the server it measures.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
import urllib.parse
from collections.abc import Callable, Mapping

from gpt_fast.bench.load.http import ResponseParser, TransferError

_READ_BYTES = 16384

Receive = Callable[[int, list[bytes], float], bool]
"""Takes status, pieces of the body, and the time.perf_counter() they were read at; False: hang up."""


class Connection(asyncio.BufferedProtocol):
    """One connection that carries one request at a time.

    Buffered: a plain Protocol has asyncio allocate a quarter of a megabyte for every read.
    """

    def __init__(self) -> None:
        self._buffer = bytearray(_READ_BYTES)
        self.transport: asyncio.Transport | None = None
        self.parser = ResponseParser()
        self._receive: Receive | None = None
        self._done: asyncio.Future[ResponseParser | None] | None = None

    def send(self, request: bytes, receive: Receive) -> asyncio.Future[ResponseParser | None]:
        """Send; the future gives the finished response, or None when ``receive`` hung up.

        It raises TransferError, and what ``receive`` raises.
        """
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
            if reset:
                self.transport.abort()
            else:
                self.transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        now = time.perf_counter()
        if self._receive is None or self._done is None or self._done.done():
            self.close(reset=True)  # bytes that nobody asked for: this connection must not be used again
            return
        self.parser.read_at = now
        try:
            pieces = self.parser.feed(bytes(self._buffer[:nbytes]))
            hang_up = bool(pieces) and not self._receive(self.parser.status, pieces, now)
        except Exception as error:  # raised here it would be logged, and the request would hang
            self._fail(error)
            return
        if hang_up:
            self._done.set_result(None)
            self.close(reset=True)
        elif self.parser.complete:
            self._done.set_result(self.parser)
            if not self.parser.reusable:
                self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if exc is not None:
            self._fail(TransferError("connection reset"))
            return
        try:
            self.parser.eof()
        except TransferError as error:
            self._fail(error)
        else:
            self._done.set_result(self.parser)

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        self.close(reset=True)


class Endpoint:
    """Where requests go: a parsed ``url``, and the idle connections to it where ``keep_alive`` keeps any.

    Raises ValueError for a URL that is not http(s)://host[:port]/path.
    """

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None, keep_alive: bool = False) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url {url!r} is not of the form http://host:port/path")
        self.url = url
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.keep_alive = keep_alive
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._addresses: list[tuple[socket.AddressFamily, str]] | None = None
        self._connected = False
        self._idle: list[Connection] = []
        path = urllib.parse.quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._") + (
            f"?{parts.query}" * bool(parts.query)
        )
        given = {
            "Host": parts.netloc.rpartition("@")[2],
            "Content-Type": "application/json",
            "Connection": "keep-alive" if keep_alive else "close",
            **(headers or {}),
        }
        for name, value in given.items():
            if any(c in name + value for c in "\r\n"):
                raise ValueError(f"header {name!r} must be one line")
        self._head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in given.items())

    def request(self, body: bytes) -> bytes:
        """The whole request, ready to send."""
        return f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode("latin-1") + body

    async def post(self, request: bytes, receive: Receive) -> ResponseParser | None:
        """Send ``request``; returns the finished response, or None when ``receive`` hung up. Raises TransferError.

        A kept connection that the server closed meanwhile is replaced by a fresh one; nothing else is tried twice.
        """
        while self._idle:
            connection = self._idle.pop()
            if connection.transport is None or connection.transport.is_closing():
                continue
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
        self._idle.clear()

    async def _exchange(self, connection: Connection, request: bytes, receive: Receive) -> ResponseParser | None:
        try:
            response = await connection.send(request, receive)
        except BaseException:
            connection.close(reset=True)  # a timeout or Ctrl-C: the server must notice
            raise
        if response is not None and response.reusable and self.keep_alive:
            self._idle.append(connection)
        else:
            connection.close()
        return response

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            if self._addresses is None:  # once: resolving a name takes a thread each time
                found = await loop.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
                self._addresses = [(family, str(address[0])) for family, *_, address in found]
            while True:
                family, host = self._addresses[0]
                try:
                    _, connection = await loop.create_connection(
                        Connection,
                        host,
                        self.port,
                        family=family,
                        ssl=self._tls,
                        server_hostname=self.host if self._tls is not None else None,
                    )
                    self._connected = True
                    return connection
                except ConnectionRefusedError:
                    # "localhost" is often ::1 first, and the server on 127.0.0.1 alone.
                    if self._connected or len(self._addresses) == 1:
                        raise
                    self._addresses = self._addresses[1:]
        except ConnectionRefusedError:
            raise TransferError("connection refused") from None
        except ssl.SSLError as error:
            raise TransferError(f"TLS: {error.reason}") from None
        except OSError as error:
            raise TransferError(f"cannot connect: {error.strerror or error}") from None


def raise_file_limit(wanted: int) -> None:
    """Allow ``wanted`` open files, as far as the system does; each connection is one."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        enough = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft != resource.RLIM_INFINITY and soft < enough:
            resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))
