"""One generated request: its bytes, how they are sent, and what may be said of the answer."""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass

QUICK_S = 1.0  # for an answer to what is not a whole request; the client then hangs up


@dataclass(frozen=True)
class Target:
    """The served model that requests go to."""

    host: str
    port: int
    path: str  # /predictions/<model>

    @classmethod
    def of(cls, url: str) -> Target:
        """Raises ValueError for a URL that is not http://host[:port]/predictions/<model>."""
        parts = urllib.parse.urlsplit(url)
        path = parts.path.rstrip("/")
        if parts.scheme != "http" or not parts.hostname or not path.startswith("/predictions/") or path.count("/") != 2:
            raise ValueError(f"url {url!r} is not of the form http://host:port/predictions/<model>")
        return cls(parts.hostname, parts.port or 80, path)

    @property
    def model(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def versioned(self) -> str:
        """What the other routes begin with."""
        return f"{self.path}/1.0"


@dataclass(frozen=True)
class Shot:
    """Request ``index`` of a seed.

    ``data`` goes over the wire in pieces that end at ``cuts``, with ``pause_s`` between them. ``hang_up``: "sent",
    ``pause_s`` after the last byte; "first", at the first bytes of the answer's body; else all of it is read.
    ``served``: a 200 is the only right answer. ``same``: sent again it must get the same answer. ``timed``: it sets a
    time limit, so 504 is right as well. ``lame``: it is no whole HTTP request, or one that has no whole answer; the
    server may say anything but a 5xx, or nothing. ``of``: the earlier request that this one repeats.
    """

    index: int
    kind: str
    route: str
    data: bytes
    cuts: tuple[int, ...] = ()
    pause_s: float = 0.0
    hang_up: str = ""
    served: bool = False
    same: bool = False
    timed: bool = False
    lame: bool = False
    of: int | None = None

    @property
    def pieces(self) -> list[bytes]:
        """``data`` as it is sent."""
        ends = [*self.cuts, len(self.data)]
        return [self.data[begin:end] for begin, end in zip([0, *self.cuts], ends, strict=True)]


def message(
    target: Target,
    path: str,
    body: bytes = b"",
    *,
    method: str = "POST",
    headers: Mapping[str, str] | None = None,
    length: str | None = "",
) -> bytes:
    """An HTTP request. ``length``: what Content-Length says, by itself the truth, None for no such header."""
    given = {"Host": f"{target.host}:{target.port}", "Connection": "close", **(headers or {})}
    if length is not None:
        given["Content-Length"] = length or str(len(body))
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1", "replace") + body
