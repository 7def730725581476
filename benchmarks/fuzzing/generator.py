"""Request K of seed S: always the same bytes for the same address, whatever came before and whoever asks.

A request's kind is drawn first, by weight, then all else, from one generator of random numbers that (S, K) seeds. A
repeat is an earlier request, sent again later; its answer has to be that of the first time.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from fuzzing import bodies
from fuzzing.fields import ASKED, LIMITS, PROTOCOLS
from fuzzing.http_faults import MAKERS, METHODS
from fuzzing.shot import Shot, Target, message
from fuzzing.values import Pairs, dump, text

REPEATS = 0.1  # share of requests that are earlier ones again
_CHANGING = (b"health", b"metrics", b"stats")  # pages that are not the same twice
_WEIGHTS = {"native": 6, "v1/completions": 8, "v1/chat/completions": 8, "v1/responses": 8} | dict.fromkeys(
    ("predict", "tokenize", "detokenize"), 3
)
_TRIES = 8  # for an earlier one whose answer may be asked for again

# Routes that take no body, with whether GET must be answered 200 there.
PAGES: dict[str, bool] = {
    "v1/models": True,
    "v1/models/{model}": True,
    "tokenizer_info": True,
    "health": True,
    "metrics": True,
    "stats": True,
    "page": True,
    "v1/models/x": False,
    "v1/models/../../x": False,
    "v1/embeddings": False,
    "v1": False,
    "nope": False,
    "docs": False,
    "HEALTH": False,
}
FOREIGN = (  # TorchServe's own on this port, and what scanners ask everybody for
    *("/ping", "/", "/predictions", "/predictions/", "/predictions/nobody", "/predictions/{model}/9.9", "/invocations"),
    *(
        "/explanations/{model}",
        "/v1/models/{model}:predict",
        "/v1/models/{model}",
        "/v2/models/{model}/infer",
        "/v2/health/live",
    ),
    *(
        "/models",
        "/models/{model}",
        "/api-description",
        "/metrics",
        "/workflows",
        "/wfpredict/x",
        "/favicon.ico",
        "/.env",
        "/v2",
    ),
)


class Generator:
    """All requests of one seed for one target."""

    def __init__(self, target: Target, seed: int) -> None:
        self.target = target
        self.seed = seed
        self._kinds, self._weights = zip(*KINDS.items(), strict=True)

    def shot(self, index: int) -> Shot:
        """Request ``index``."""
        origin = self.origin(index)
        if origin is not None:
            return dataclasses.replace(self._made(origin), index=index, kind="repeat", of=origin)
        return self._made(index)

    def origin(self, index: int) -> int | None:
        """The earlier request that this one repeats, or None."""
        rng = self._rng(index, "repeat")
        if index == 0 or rng.random() >= REPEATS:
            return None
        for _ in range(_TRIES):
            earlier = rng.randrange(index)
            while (of := self.origin(earlier)) is not None:
                earlier = of
            if self._made(earlier).same:
                return earlier
        return None

    def _made(self, index: int) -> Shot:
        rng = self._rng(index, "request")
        maker = rng.choices(self._kinds, self._weights)[0]
        shot: Shot = maker(rng, self.target)
        return dataclasses.replace(shot, index=index, kind=maker.__name__.strip("_"))

    def _rng(self, index: int, what: str) -> random.Random:
        return random.Random(f"{self.seed} {index} {what}")


def _protocol(rng: random.Random, having: str = "") -> str:
    """One of them, or of those with the field ``having``."""
    some = [name for name, fields in PROTOCOLS.items() if not having or having in fields]
    return rng.choices(some, [_WEIGHTS[name] for name in some])[0]


def _path(rng: random.Random, target: Target, protocol: str) -> str:
    if protocol == "native":
        return rng.choice((target.path, target.path, target.versioned))
    return f"{target.versioned}/{protocol}"


def _post(rng: random.Random, target: Target, protocol: str, body: bytes) -> bytes:
    """As clients send JSON."""
    kind = rng.choice(("application/json", "application/json", "application/octet-stream", ""))
    headers = {"Content-Type": kind} if kind else {}
    return message(target, _path(rng, target, protocol), body, method=rng.choice(("POST", "PUT")), headers=headers)


def _json_shot(rng: random.Random, target: Target, protocol: str, body: bodies.Body | Pairs) -> Shot:
    given = dict(body)
    timed = given.get("timeout_s") is not None
    settled = type(given.get("seed")) is int or "seed" not in PROTOCOLS[protocol]
    data = _post(rng, target, protocol, dump(body, rng.random() < 0.7))
    return Shot(0, "", protocol, data, same=settled and not timed, timed=timed)


def _right(rng: random.Random, target: Target) -> Shot:
    protocol = _protocol(rng)
    shot = _json_shot(rng, target, protocol, bodies.right(rng, protocol, target.model))
    return dataclasses.replace(shot, served=True)


def _odd(rng: random.Random, target: Target) -> Shot:
    protocol = _protocol(rng)
    return _json_shot(rng, target, protocol, bodies.odd(rng, protocol, target.model))


def _grammar(rng: random.Random, target: Target) -> Shot:
    protocol = _protocol(rng, "regex")
    return _json_shot(rng, target, protocol, bodies.hostile_grammar(rng, protocol, target.model))


def _json(rng: random.Random, target: Target) -> Shot:
    protocol = _protocol(rng)
    # Cut off behind the seed it is refused, so the answer is always the same.
    return Shot(
        0, "", protocol, _post(rng, target, protocol, bodies.broken_json(rng, protocol, target.model)), same=True
    )


def _big(rng: random.Random, target: Target) -> Shot:
    protocol = _protocol(rng)
    return Shot(0, "", protocol, _post(rng, target, protocol, bodies.big(rng, protocol, target.model)), same=True)


def _http(rng: random.Random, target: Target) -> Shot:
    protocol = _protocol(rng)
    body = dump(bodies.base(rng, protocol, target.model))
    maker = rng.choices(list(MAKERS), list(MAKERS.values()))[0]
    data, lame = maker(rng, target, _path(rng, target, protocol), body)
    asks_state = any(name in data.partition(b" HTTP/")[0] for name in _CHANGING)
    return Shot(0, "", protocol, data, same=not lame and not asks_state, lame=lame)


def _page(rng: random.Random, target: Target) -> Shot:
    if rng.random() < 0.35:
        route = rng.choice(FOREIGN).format(model=target.model)
        body = dump(bodies.base(rng, "native", target.model))
        return Shot(0, "", "foreign", message(target, route, body, method=rng.choice(("GET", "POST", "PUT"))))
    route, exists = rng.choice(list(PAGES.items()))
    name = rng.choice(("GET", "GET", "GET", rng.choice(METHODS)))
    body = rng.choice((b"", b"", b"{}", b"\0", b"x" * 5000))
    path = f"{target.versioned}/{route.format(model=target.model)}"
    served = exists and name == "GET" and not body
    lame = name in ("HEAD", "CONNECT")
    data = message(target, path, body, method=name)
    return Shot(0, "", route, data, served=served, same=route.encode() not in _CHANGING and not lame, lame=lame)


def _hang_up(rng: random.Random, target: Target) -> Shot:
    """A client that is gone before, while or as soon as it is answered."""
    protocol = _protocol(rng, "seed")
    fields, body = PROTOCOLS[protocol], bodies.right(rng, protocol, target.model)
    for name in (*LIMITS, "min_tokens", "best_of", "timeout_s"):
        body.pop(name, None)
    limit = next(name for name in LIMITS if name in fields)
    body |= {limit: rng.choice((1, 20, 200)), "ignore_eos": True}
    if protocol in ("v1/completions", "v1/chat/completions"):
        body["n"] = rng.choice((1, 4))
    asked = ASKED.get(protocol, "prompt")
    if rng.random() < 0.3 and asked != "messages":
        body[asked] = text(rng, 300)
    data = _post(rng, target, protocol, dump(body))
    when = rng.choice(("first", "first", "sent", "sent", "cut"))
    if when == "cut":
        data, when = data[: rng.randrange(1, len(data))], "sent"
    return Shot(0, "", protocol, data, hang_up=when, pause_s=rng.choice((0.0, 0.0, 0.01, 0.05, 0.3)), lame=True)


def _slow(rng: random.Random, target: Target) -> Shot:
    """A right request that arrives in pieces, in two seconds at most."""
    shot = _right(rng, target)
    cuts = sorted({rng.randrange(1, len(shot.data)) for _ in range(rng.randrange(1, 8))})
    return dataclasses.replace(shot, cuts=tuple(cuts), pause_s=rng.choice((0.01, 0.05, 0.25)))


# With their weights. A kind's name is its function's.
KINDS: dict[Callable[[random.Random, Target], Shot], int] = {
    _right: 26,
    _odd: 28,
    _grammar: 10,
    _json: 5,
    _big: 3,
    _http: 14,
    _page: 6,
    _hang_up: 7,
    _slow: 1,
}
