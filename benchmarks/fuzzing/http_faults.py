"""What can be odd or wrong about a request around its body: paths, methods, headers, content types, framing.

Each maker takes a generator of random numbers, the target and a right body for a path, and gives the bytes with
whether they are ``lame``: no whole HTTP request, or one that gets no whole answer.
"""

from __future__ import annotations

import gzip
import random
import urllib.parse
from collections.abc import Callable

from fuzzing.shot import Target, message
from fuzzing.values import STRINGS

Made = tuple[bytes, bool]
Maker = Callable[[random.Random, Target, str, bytes], Made]

METHODS = (
    "GET",
    "PUT",
    "PATCH",
    "DELETE",
    "OPTIONS",
    "HEAD",
    "TRACE",
    "CONNECT",
    "BREW",
    "post",
    "PROPFIND",
    "G" * 300,
)

CONTENT_TYPES = (
    *("application/json", "application/json; charset=utf-8", "application/json; charset=latin-1", "APPLICATION/JSON"),
    *(
        "application/json; charset=utf-16",
        "application/json; charset=nonsense",
        'application/json; charset="',
        "application/json;",
    ),
    *(
        "text/plain",
        "text/plain; charset=utf-16",
        "text/plain; charset=nonsense",
        "text/html",
        "application/octet-stream",
    ),
    *(
        "application/x-www-form-urlencoded",
        "application/x-www-form-urlencoded; charset=nonsense",
        "multipart/form-data",
    ),
    *(
        "multipart/form-data; boundary=",
        "multipart/form-data; boundary=x",
        "multipart/mixed; boundary=x",
        "image/png",
        "",
        "/",
        ";",
        "json",
    ),
    *("application/xml", "application/vnd.api+json", "application/grpc", "é/ü", "a" * 2000),
)


def content_type(rng: random.Random, target: Target, path: str, body: bytes) -> Made:
    """A right body under any content type."""
    return message(target, path, body, headers={"Content-Type": rng.choice(CONTENT_TYPES)}), False


def form(rng: random.Random, target: Target, path: str, body: bytes) -> Made:
    """What browsers and ``curl -d`` send: fields, JSON as a field, percent signs that stand for nothing."""
    quoted = urllib.parse.quote_from_bytes(body).encode()
    forms = (
        b"prompt=Once+upon&max_new_tokens=5",
        *(name + b"=" + quoted for name in (b"data", b"body", b"request", b"", b"a=b&data")),
        *(quoted, body, body.replace(b" ", b"+")),
        *(
            b"data=%zz",
            b"%",
            b"&&&",
            b"=",
            b"a" * 5000,
            b"prompt[]=a&prompt[]=b",
            b"data=" + quoted + b"&data=" + quoted,
        ),
    )
    sent = rng.choice(forms)
    return message(target, path, sent, headers={"Content-Type": "application/x-www-form-urlencoded"}), False


def multipart(rng: random.Random, target: Target, path: str, body: bytes) -> Made:
    """Parts with and without names, files, types and ends."""
    mark = rng.choice((b"x", b"----curl123", b"a b", b"\xc3\xa9"))
    name = rng.choice((b"data", b"body", b"prompt", b"", b"../data", b'da"ta', b"\xff"))
    extra = rng.choice(
        (b"", b'; filename="request.json"', b'; filename="../../x"', b'; filename=""', b"; filename*=utf-8''x")
    )
    kinds = (b"", b"Content-Type: application/json\r\n", b"Content-Type: text/plain; charset=nonsense\r\n")
    part = b'--%s\r\nContent-Disposition: form-data; name="%s"%s\r\n%s\r\n%s\r\n' % (
        mark,
        name,
        extra,
        rng.choice(kinds),
        body,
    )
    parts = part * rng.choice((1, 1, 1, 2, 30)) + rng.choice((b"--" + mark + b"--\r\n", b"", b"--" + mark + b"\r\n"))
    if rng.random() < 0.15:
        parts = parts[: rng.randrange(len(parts))]
    said = mark if rng.random() < 0.85 else b"other"
    kind = {"Content-Type": f"multipart/form-data; boundary={said.decode('latin-1')}"}
    return message(target, path, parts, headers=kind), False


def method(rng: random.Random, target: Target, path: str, body: bytes) -> Made:
    """Any method, with and without a body."""
    name = rng.choice(METHODS)
    sent = body if rng.random() < 0.5 else b""
    return message(target, path, sent, method=name), name in ("HEAD", "CONNECT")


_HEADERS: tuple[dict[str, str], ...] = (
    {"Expect": "100-continue"},
    {"Expect": "the worst"},
    {"Accept": "image/png"},
    {"Accept": "text/event-stream", "Accept-Charset": "utf-16"},
    {"Accept-Encoding": "gzip, br"},
    {"Content-Encoding": "gzip"},
    {"Content-Encoding": "nonsense"},
    {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Key": "x", "Sec-WebSocket-Version": "13"},
    {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAARAAAAAAAIAAAAA"},
    {"Connection": "keep-alive"},
    {"Authorization": "Bearer " + "x" * 500},
    {"Cookie": "a=b; " * 300},
    {"Range": "bytes=5-2"},
    {"If-None-Match": "*", "If-Modified-Since": "never"},
    {"X-Request-Id": "é\x01\x7f", "X-Forwarded-For": "127.0.0.1, nonsense"},
    {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"},
    {"url_path": "health", "ts-url-path": "v1/models", "url-path": "v1/completions"},
    {"Content-Language": "x" * 3000},
    {"Host": "other.example:99999"},
    {"Host": ""},
    {"TE": "trailers", "Trailer": "X"},
    {"x": "y" * 7000},
    {"x": "y" * 20_000},
    {f"X-{i}": "z" for i in range(300)},
)


def headers(rng: random.Random, target: Target, path: str, body: bytes) -> Made:
    """Headers that ask for what there is not, are very long, or very many."""
    return message(target, path, body, headers=rng.choice(_HEADERS)), False


def compressed(rng: random.Random, target: Target, path: str, body: bytes) -> Made:
    """A gzipped body, said to be one or not."""
    said = {"Content-Encoding": "gzip"} if rng.random() < 0.7 else {}
    return message(target, path, gzip.compress(body, mtime=0), headers=said), False


def odd_path(rng: random.Random, target: Target, path: str, body: bytes) -> Made:
    """Queries, escapes, dots, slashes, odd characters and great length behind the model's name."""
    odd = (
        *(
            "?prompt=x",
            "?body=x",
            "?data={}",
            "?data=a&data=b",
            "?a=%zz",
            "?%",
            "?&=&",
            "?" + "a=b&" * 500,
            "#x",
            ";a=b",
        ),
        *(
            "/",
            "//",
            "/.",
            "/..",
            "/../health",
            "/%2e%2e/health",
            "/%00",
            "/%zz",
            "/%",
            "/%ff%fe",
            "/%F0%9F%98%80",
            "/ü",
        ),
        *(
            "/1.0",
            "/1.0/",
            "/1",
            "/9.9",
            "/1.0/1.0",
            "/latest",
            "/1.0/health/",
            "/1.0//health",
            "/1.0/HEALTH",
            "/1.0/v1",
        ),
        *(
            "/1.0/v1/models/",
            "/1.0/v1/models/%3Cs%3E",
            "/1.0/v1/models/" + "x" * 3000,
            "/1.0/" + "y/" * 1000,
            ":predict",
        ),
    )
    where = target.path if rng.random() < 0.6 else path
    chosen = rng.choice(odd) if rng.random() < 0.8 else "/1.0/v1/models/" + urllib.parse.quote(_sendable(rng))
    name = rng.choice(("GET", "POST", "PUT"))
    return message(target, where + chosen, body if name != "GET" else b"", method=name), False


def _sendable(rng: random.Random) -> str:
    return rng.choice(STRINGS).encode("utf-8", "replace").decode()


def chunked(rng: random.Random, target: Target, path: str, body: bytes) -> Made:
    """A body in chunks: right, with extensions and trailers, or with sizes that are none."""
    half = len(body) // 2
    two = b"%x\r\n%s\r\n%x\r\n%s\r\n" % (half, body[:half], len(body) - half, body[half:]) if half else b""
    kind = rng.randrange(7)
    sent = (
        two + b"0\r\n\r\n",
        b"%x;name=value\r\n%s\r\n0\r\nX-Trailer: y\r\n\r\n" % (len(body), body),
        b"".join(b"1\r\n%c\r\n" % byte for byte in body[:500]) + b"0\r\n\r\n",
        two,  # no end
        b"zz\r\n" + body,
        b"-5\r\n" + body + b"\r\n0\r\n\r\n",
        b"ffffffffffffffff\r\n" + body,
    )[kind]
    return message(target, path, sent, headers={"Transfer-Encoding": "chunked"}, length=None), kind > 1


def framing(rng: random.Random, target: Target, path: str, body: bytes) -> Made:
    """Lengths that lie, lines that are none, two requests at once, other protocols: not a whole request."""
    whole = message(target, path, body)
    size = len(body)
    lengths = (
        str(size + 50),
        str(max(0, size - 5)),
        "-1",
        "0",
        "abc",
        "99999999999999999999",
        "9" * 12,
        "1e2",
        f"{size}, {size}",
        "+5",
    )
    head, _, _ = whole.partition(b"\r\n\r\n")
    odd = (
        *(message(target, path, body, length=length) for length in lengths),
        message(target, path, body, length=None),
        message(target, path, body, headers={"Transfer-Encoding": "chunked"}),
        message(target, path, body, headers={"Transfer-Encoding": "gzip"}),
        head + b"\r\nContent-Length: 3\r\n\r\n" + body,
        whole + whole,
        whole + b"GARBAGE\r\n\r\n",
        whole.replace(b"HTTP/1.1", rng.choice((b"HTTP/1.0", b"HTTP/9.9", b"HTTP/1.1 x", b"http/1.1", b"")), 1),
        whole.replace(b"\r\n", b"\n"),
        whole.replace(b"Host:", b"Host", 1),
        whole.replace(b"Host:", rng.choice((b" Host:", b"Host :", b"H\0st:", b"H\xc3\xb6st:", b":")), 1),
        whole.replace(
            b" " + path.encode("latin-1", "replace"),
            rng.choice((b"", b" *", b" http://x.example/y", b" nopath", b" " + b"/a" * 8000)),
            1,
        ),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 20,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 60,  # a TLS greeting
        *(b"", b"\r\n\r\n", b"\0" * 100, b"GET\r\n\r\n", rng.randbytes(300), b"A" * 9000),
        whole[: rng.randrange(1, len(whole))],
    )
    return rng.choice(odd), True


def huge_body(rng: random.Random, target: Target, path: str, body: bytes) -> Made:
    """More bytes than the server takes, sent or only announced."""
    if rng.random() < 0.5:
        return message(target, path, b"{" + b" " * 7_000_000), True
    return message(target, path, body, length=str(rng.choice((7_000_000, 2**31, 2**40)))), True


# With their weights.
MAKERS: dict[Maker, int] = {
    content_type: 18,
    form: 12,
    multipart: 14,
    method: 10,
    headers: 14,
    compressed: 4,
    odd_path: 14,
    chunked: 6,
    framing: 12,
    huge_body: 1,
}
