"""JSON bodies for one protocol: right ones in random combinations, odd ones, hostile grammars, and very large ones."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from fuzzing.fields import ASKED, GRAMMARS, LIMITS, PROTOCOLS, UNKNOWN, Field, ids
from fuzzing.talk import FORGERIES
from fuzzing.values import NOT_JSON, STRINGS, Pairs, Raw, anything, deep, dump, nested, text

Body = dict[str, Any]

# Without them a grammar can be followed to its end: each forbids tokens that it may need.
_AGAINST_GRAMMARS = ("min_tokens", "logit_bias", "ignore_eos", "stop_token_ids", "allowed_token_ids", "bad_words")
MILLION = 1_000_000


def base(rng: random.Random, protocol: str, model: str) -> Body:
    """The least that a protocol asks for, such as a prompt; where it generates, few tokens, and a seed, so that its
    answer can come again."""
    fields = PROTOCOLS[protocol]
    name = ASKED.get(protocol, "prompt")
    body: Body = {name: fields[name].right(rng)}
    if "model" in fields:
        body["model"] = model
    if "seed" in fields:
        limit = next(name for name in LIMITS if name in fields)
        body |= {limit: fields[limit].right(rng), "seed": rng.randrange(2**31)}
    return body


def right(rng: random.Random, protocol: str, model: str) -> Body:
    """A request that must be served: up to eight more fields, then what excludes each other is taken out."""
    fields = PROTOCOLS[protocol]
    body = base(rng, protocol, model)
    free = [name for name in fields if name not in body]
    for name in rng.sample(free, rng.randrange(0, min(9, len(free) + 1))):
        body[name] = fields[name].right(rng)
    for name, share in (
        ("stream", 0.6),
        ("temperature", 0.5),
    ):  # half of the fields change little; these two matter most
        if name in fields and rng.random() < share:
            body[name] = fields[name].right(rng)
    _agree(rng, protocol, body)
    names = list(body)
    rng.shuffle(names)
    return {name: body[name] for name in names}


def _agree(rng: random.Random, protocol: str, body: Body) -> None:
    """Take out or change what cannot stand beside something else, by the rules that the README and OpenAI document."""
    grammars = [name for name in GRAMMARS if name in body]
    for name in grammars[1:]:
        del body[name]
    if grammars or body.get("tools"):
        for name in _AGAINST_GRAMMARS:
            body.pop(name, None)
    limits = [name for name in LIMITS if name in body]
    for name in limits[:-1]:
        del body[name]
    if "min_tokens" in body:
        body["min_tokens"] = rng.randint(0, body[limits[-1]])
    if body.get("stream_options") is not None:
        body["stream"] = True
    if protocol.startswith("v1/") and body.get("return_origins"):
        body["logprobs"] = body.get("logprobs", 1) if protocol == "v1/completions" else True
    if body.get("echo") and "logprobs" in body:
        body.pop("prompt_logprobs", None)
    if (body.get("echo") and "logprobs" in body) or "prompt_logprobs" in body:
        body["stream"] = False
        body.pop("stream_options", None)
    if "allowed_token_ids" in body:
        body.pop("bad_words", None)
    if protocol == "tokenize" and "messages" in body:
        del body["prompt"]
    if body.get("continue_final_message"):
        body.pop("add_generation_prompt", None)
    if body.get("tools"):
        body.pop("guided_grammar", None)
    if body.get("top_logprobs"):
        body["logprobs"] = True
    if body.get("best_of") is not None:
        body["best_of"] = body.get("n", 1)


def odd(rng: random.Random, protocol: str, model: str) -> Body | Pairs:
    """A right request in which one to three things are wrong."""
    fields = PROTOCOLS[protocol]
    body = right(rng, protocol, model) if rng.random() < 0.4 else base(rng, protocol, model)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if rng.random() < 0.9:
            name = rng.choice(list(fields))
            body[name] = _odd_value(rng, fields[name])
        else:
            every = [*UNKNOWN, *(name for others in PROTOCOLS.values() for name in others)]
            body[rng.choice(every)] = anything(rng)
    if rng.random() < 0.06:
        del body[rng.choice(list(body))]
    if rng.random() < 0.06:
        return Pairs([*body.items(), rng.choice(list(body.items()))])
    return body


def _odd_value(rng: random.Random, field: Field) -> Any:
    return field.odd(rng) if rng.random() < 0.85 else field.right(rng)


def hostile_grammar(rng: random.Random, protocol: str, model: str) -> Body:
    """A grammar that is impossible, endless or huge, or a good one together with what contradicts it."""
    fields = PROTOCOLS[protocol]
    body = base(rng, protocol, model)
    body["stream"] = rng.random() < 0.4
    name = rng.choice([name for name in GRAMMARS if name in fields])
    if rng.random() < 0.75:
        body[name] = fields[name].odd(rng)
        return body
    body[name] = fields[name].right(rng)
    against = rng.choice(_AGAINST_GRAMMARS)
    body[against] = fields[against].right(rng)
    if rng.random() < 0.3:
        other = rng.choice([other for other in GRAMMARS if other in fields])
        body[other] = fields[other].right(rng)
    return body


def broken_json(rng: random.Random, protocol: str, model: str) -> bytes:
    """Bytes that are almost a request: cut off, in another encoding, with a comma too many, or no object."""
    whole = dump(right(rng, protocol, model), rng.random() < 0.5)
    made: tuple[Callable[[], bytes], ...] = (
        lambda: whole[: rng.randrange(len(whole))],
        lambda: whole[: rng.randrange(len(whole))] + rng.randbytes(3) + whole[-20:],
        lambda: b"\xef\xbb\xbf" + whole,
        lambda: whole.decode("utf-8", "surrogatepass").encode(rng.choice(("utf-16", "utf-16-le", "utf-32", "utf-7"))),
        lambda: whole[:-1] + b",}",
        lambda: whole + rng.choice((b"{}", b"\0", b"x", whole, b"]")),
        lambda: b"[" + whole + b"]",
        lambda: json.dumps(whole.decode("latin-1")).encode(),
        lambda: rng.choice((b"", b" ", b"\n\n", b"{}", b"[]", b"null", b"0", b'""', b"true", b"{", b"\0" * 40, b"NaN")),
        lambda: rng.randbytes(rng.choice((1, 10, 200))),
        lambda: dump({**base(rng, protocol, model), "temperature": rng.choice(NOT_JSON)}),
        lambda: dump(deep(rng)),
        lambda: dump({**base(rng, protocol, model), rng.choice(list(PROTOCOLS[protocol])): deep(rng)}),
    )
    return rng.choice(made)()


def big(rng: random.Random, protocol: str, model: str) -> bytes:
    """Around a megabyte, or as many items as fit one: what is in one piece or in very many."""
    body = base(rng, protocol, model)
    body.update(rng.choice(_BIG_COMMON)(rng) if rng.random() < 0.4 else rng.choice(_BIG[protocol])(rng))
    return dump(body, rng.random() < 0.5)


def _long_text(rng: random.Random) -> str:
    size = rng.choice((2_000, 20_000, 200_000, MILLION, MILLION, 1_300_000))
    unit = rng.choice((*STRINGS, *FORGERIES, text(rng, 12) + " ", "a", "ab", " ", "\n", "é", "😀", "1")) or "x"
    # By bytes as they will be sent: an escaped character takes six.
    return unit * max(1, size // len(json.dumps(unit)))


def _many(rng: random.Random) -> int:
    return int(rng.choice((64, 120, 128, 129, 137, 200, 256, 257, 1000, 20_000)))


_BIG_COMMON: tuple[Callable[[random.Random], Body], ...] = (
    lambda rng: {"logit_bias": {str(i): rng.choice((1, -1.0)) for i in range(rng.choice((500, 1024, 1025, 50_000)))}},
    lambda rng: {"stop": ["x" * 1024] * rng.choice((16, 17, 900)), "stream": True},
    lambda rng: {"stop": ["a" * i + "b" for i in range(1000, 1016)]},
    lambda rng: {"stop_token_ids": list(range(rng.choice((500, 100_000))))},
    lambda rng: {f"field_{i}": i for i in range(50_000)},
    lambda rng: {"x" * rng.choice((10_000, MILLION)): 1},
    lambda rng: {"seed": nested(rng.choice((900, 100_000)))},
    lambda rng: {"temperature": Raw("1" + "0" * 900_000)},
    lambda rng: {"regex": rng.choice(("a?", "(a|b)", "[a-z]", ".", "a{3}")) * rng.choice((2_000, 200_000))},
    lambda rng: {"choice": [f"{text(rng, 2)} {i}" for i in range(rng.choice((300, 3_000, 30_000)))]},
    lambda rng: {"choice": Raw(json.dumps([f"choice {i}" for i in range(60_000)]))},
    lambda rng: {"json_schema": {"properties": {f"p{i}": {"type": "string"} for i in range(rng.choice((900, 9_000)))}}},
    lambda rng: {"json_schema": {"enum": [f"e{i}" for i in range(rng.choice((1_000, 60_000)))]}},
    lambda rng: {"json_schema": {"description": _long_text(rng), "type": "boolean"}},
)
_BIG_PROMPTS: tuple[Callable[[random.Random], Body], ...] = (
    lambda rng: {"prompt": _long_text(rng)},
    lambda rng: {"prompt": ids(rng, rng.choice((480, 511, 512, 513, 5_000, 150_000)))},
)
_BIG: dict[str, tuple[Callable[[random.Random], Body], ...]] = {
    "native": _BIG_PROMPTS,
    "predict": _BIG_PROMPTS,
    "tokenize": (lambda rng: {"prompt": _long_text(rng), "return_token_strs": rng.random() < 0.5},),
    "detokenize": (lambda rng: {"tokens": ids(rng, rng.choice((512, 20_000, 200_000)))},),
    "v1/responses": (
        lambda rng: {"input": _long_text(rng)},
        lambda rng: {"input": [{"role": "user", "content": "hi"}] * rng.choice((50, 1_000, 10_000))},
        lambda rng: {
            "input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]
            * rng.choice((20, 8_000))
        },
        lambda rng: {"metadata": {f"k{i}": "v" * 20 for i in range(20_000)}, "stream": True},
        lambda rng: {"instructions": _long_text(rng)},
    ),
    "v1/completions": (
        lambda rng: {"prompt": _long_text(rng), "echo": rng.random() < 0.5},
        lambda rng: {"prompt": [text(rng, 2)] * _many(rng), "max_tokens": 1},
        lambda rng: {"prompt": [[5]] * _many(rng), "max_tokens": 2, "n": rng.choice((1, 2, 16))},
        lambda rng: {"prompt": [_long_text(rng)[:30_000]] * 30},
        lambda rng: {"prompt": ids(rng, rng.choice((480, 511, 150_000))), "max_tokens": 0, "echo": True, "logprobs": 5},
        lambda rng: {"n": 16, "max_tokens": 8, "logprobs": 5, "stream": True},
    ),
    "v1/chat/completions": (
        lambda rng: {"messages": [{"role": "user", "content": _long_text(rng)}]},
        lambda rng: {"messages": [{"role": "user", "content": "hi"}] * rng.choice((50, 1_000, 20_000))},
        lambda rng: {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * rng.choice((100, 20_000))}]
        },
        lambda rng: {"chat_template_kwargs": {"x": [_long_text(rng)[:1000]] * 100}},
        lambda rng: {"metadata": {f"k{i}": "v" * 20 for i in range(20_000)}},
        lambda rng: {"n": 16, "max_tokens": 8, "stream": True},
    ),
}
