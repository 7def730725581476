"""Bytes of an HTTP/1.1 answer to pieces of its body, by httptools (llhttp, the parser of Node.js). No sockets here."""

from __future__ import annotations

from gpt_fast.errors import MissingPackageError, TransferError

try:
    import httptools
except ImportError:
    raise MissingPackageError("a load test needs httptools: pip install 'gpt-fast-serve[bench]'") from None


class ResponseParser:
    """One response: ``feed`` what arrives, ``eof`` when nothing more will; ``complete`` turns True at its end. A chunk
    comes out of ``feed`` once it is whole, so a piece is what the server wrote at once; a body that is not chunked
    comes out as it arrives. ``reusable``: the connection may carry another request after this response."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = False
        self.reusable = False
        self.started = False  # some of the response has arrived
        self.read_at = 0.0  # time.perf_counter() of the last read
        self._pieces: list[bytes] = []
        self._chunk: list[bytes] | None = None  # the parts of a chunk that has begun
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """The pieces of body that ``data`` completes. Raises TransferError for what is not HTTP."""
        self.started, self._pieces = True, []
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self.complete:
                raise TransferError("more bytes than the answer announced") from None
            raise TransferError(f"{'malformed chunk' if self.status else 'not an HTTP answer'} ({error})") from None
        return self._pieces

    def eof(self) -> None:
        """The server closed. Raises TransferError unless the response is complete by that."""
        if not self.started:
            raise TransferError("connection closed without an answer")
        ends_by_close = self.status and not {"content-length", "transfer-encoding"} & self.headers.keys()
        if not self.complete and not ends_by_close:
            raise TransferError("connection closed in the middle of the answer")
        self.complete = True

    # httptools calls these.

    def on_message_begin(self) -> None:
        if self.complete:
            raise ValueError("a second answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_chunk_header(self) -> None:
        self._chunk = []

    def on_body(self, data: bytes) -> None:
        (self._pieces if self._chunk is None else self._chunk).append(data)

    def on_chunk_complete(self) -> None:
        if self._chunk:  # the last chunk is empty
            self._pieces.append(b"".join(self._chunk))

    def on_message_complete(self) -> None:
        if self.status < 200:  # an interim answer; the real one follows
            self.status, self.headers = 0, {}
        else:
            self.complete, self.reusable = True, self._parser.should_keep_alive()
