"""Just enough of HTTP/1.1 (RFC 9112) to read a streamed answer: bytes in, pieces of body out. No sockets here."""

from __future__ import annotations

MAX_HEAD_BYTES = 65536
MAX_SIZE_LINE = 1024  # of a chunk, with its extensions


class TransferError(Exception):
    """The connection, or what came over it, broke; the message is short and the same for the same cause."""


class ResponseParser:
    """One response, byte by byte: ``feed`` what arrives, ``eof`` when nothing more will.

    ``complete`` turns True at the response's end. A chunk comes out of ``feed`` once it is whole, so a piece is what
    the server wrote at once; a body of known length comes out as it arrives.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = False
        self.reusable = False  # the connection may carry another request
        self.read_at = 0.0  # time.perf_counter() of the last read
        self._buffer = bytearray()
        self._chunked = False
        self._left: int | None = None  # bytes of a body of known length; None: it ends with the connection
        self._in_trailer = False

    @property
    def started(self) -> bool:
        """Whether any of the response has arrived."""
        return bool(self.status or self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """The pieces of body that ``data`` completes. Raises TransferError for what is not HTTP."""
        if self.complete:
            raise TransferError("more bytes than the answer announced")
        if not self._buffer and self.status and not self._chunked:
            return self._plain(data)
        self._buffer += data
        if not self.status and not self._take_head():
            return []
        if self._chunked:
            return self._chunks()
        rest, self._buffer = bytes(self._buffer), bytearray()
        return self._plain(rest)

    def eof(self) -> None:
        """The server closed. Raises TransferError unless the response is complete by that."""
        if self.complete:
            return
        if not self.started:
            raise TransferError("connection closed without an answer")
        if not self.status or self._chunked or self._left is not None:
            raise TransferError("connection closed in the middle of the answer")
        self.complete = True

    def _take_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES or (len(self._buffer) >= 5 and self._buffer[:5] != b"HTTP/"):
                raise TransferError("not an HTTP answer")
            return False
        lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        version, _, rest = lines[0].partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
            raise TransferError("not an HTTP answer")
        status = int(rest[:3])
        if 100 <= status < 200:  # an interim answer; the real one follows
            return self._take_head() if self._buffer else False
        self.status = status
        for line in lines[1:]:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        self._chunked = self.headers.get("transfer-encoding", "").lower().endswith("chunked")
        length = self.headers.get("content-length")
        if not self._chunked and length is not None:
            if not length.isdecimal():
                raise TransferError("malformed content-length")
            self._left = int(length)
        elif status in (204, 304):
            self._left = 0
        ends_by_close = not self._chunked and self._left is None
        kept = "keep-alive" if version == "HTTP/1.1" else "close"
        self.reusable = not ends_by_close and self.headers.get("connection", kept).lower() == "keep-alive"
        self.complete = self._left == 0
        return True

    def _plain(self, data: bytes) -> list[bytes]:
        if self._left is not None:
            if len(data) > self._left:
                raise TransferError("more bytes than the answer announced")
            self._left -= len(data)
            self.complete = self._left == 0
        return [data] if data else []

    def _chunks(self) -> list[bytes]:
        pieces = []
        buffer, at = self._buffer, 0
        while not self.complete:
            line_end = buffer.find(b"\r\n", at)
            if line_end < 0:
                if len(buffer) - at > MAX_SIZE_LINE:
                    raise TransferError("malformed chunk")
                break
            if self._in_trailer:
                self.complete = line_end == at
                at = line_end + 2
                continue
            size = _chunk_size(buffer[at:line_end])
            begin = line_end + 2
            if size == 0:
                self._in_trailer = True
                at = begin
                continue
            if len(buffer) < begin + size + 2:
                break
            if buffer[begin + size : begin + size + 2] != b"\r\n":
                raise TransferError("malformed chunk")
            pieces.append(bytes(buffer[begin : begin + size]))
            at = begin + size + 2
        del buffer[:at]
        if self.complete and buffer:
            raise TransferError("more bytes than the answer announced")
        return pieces


def _chunk_size(line: bytearray) -> int:
    digits = bytes(line).split(b";", 1)[0].strip()
    # int() alone would take "+5", "0x5" and "1_0" as well.
    if not digits or len(digits) > 8 or digits.strip(b"0123456789abcdefABCDEF"):
        raise TransferError("malformed chunk")
    return int(digits, 16)
