"""Odd values for any field, and a JSON writer that can write what :mod:`json` refuses to.

All of it is data: tuples to draw from. Nothing here knows a protocol.
"""

from __future__ import annotations

import json
import random
from typing import Any


class Raw(str):
    """JSON text that goes into the body as it stands, right or wrong."""


class Pairs(list[tuple[str, Any]]):
    """An object as pairs of name and value, so that a name can come twice."""


def dump(value: Any, ascii_only: bool = True) -> bytes:
    """``value`` as JSON. Half a surrogate pair is an escape, or without ``ascii_only`` three bytes of bad UTF-8."""
    return _text(value, ascii_only).encode("utf-8", "surrogatepass")


def _text(value: Any, ascii_only: bool) -> str:
    if isinstance(value, Raw):
        return value
    if isinstance(value, (dict, Pairs)):
        pairs = value.items() if isinstance(value, dict) else value
        inner = (f"{json.dumps(str(k), ensure_ascii=ascii_only)}: {_text(v, ascii_only)}" for k, v in pairs)
        return "{" + ", ".join(inner) + "}"
    if isinstance(value, (list, tuple)):
        if all(type(item) in (int, str) for item in value):  # many thousands at times: much faster at once
            return json.dumps(value, ensure_ascii=ascii_only)
        return "[" + ", ".join(_text(item, ascii_only) for item in value) + "]"
    return json.dumps(value, ensure_ascii=ascii_only)


def nested(depth: int, opening: str = "[", inside: str = "1", closing: str = "]") -> Raw:
    """``inside`` in ``depth`` brackets."""
    return Raw(opening * depth + inside + closing * depth)


INTEGERS = (
    *(0, 1, -1, 2, 3, 5, 7, 16, 17, 20, 21, 100, 101, 127, 128, 255, 256, 257, 511, 512, 513, 1000, 1024, 1025),
    *(2047, 2048, 31999, 32000, 65536, 2**31 - 1, 2**31, 2**31 + 1, -(2**31), 2**32, 2**53 + 1, 2**63 - 1, 2**63),
    *(-(2**63), -(2**63) - 1, 2**64 - 1, 2**64, 10**30, -(10**30)),
)

# As they are spelled: a float that is whole, an exponent, what no float holds, what Python alone takes for JSON.
NUMBERS = tuple(
    Raw(text)
    for text in (
        *(
            "0.0",
            "-0.0",
            "-0",
            "0.5",
            "1.0",
            "2.0",
            "5.0",
            "1.5",
            "-0.5",
            "-2.0",
            "2.000001",
            "1e0",
            "1E2",
            "3e0",
            "1e+2",
        ),
        *(
            "1e-5",
            "1e-30",
            "1e-45",
            "1e-300",
            "5e-324",
            "1e-400",
            "0.99999999999999999",
            "1.0000001",
            "100.0",
            "100.00001",
        ),
        *("1e30", "1e38", "3.5e38", "1e308", "1e309", "-1e309", "NaN", "Infinity", "-Infinity"),
        *("9" * 40, "1" + "0" * 400, "-" + "9" * 5000, "0." + "1" * 5000, "1e99999", "1e-99999"),
    )
)

NOT_JSON = tuple(
    Raw(text)
    for text in (
        *("01", "+1", ".5", "1.", "0x10", "1_000", "--1", "nan", "inf", "1e", "undefined", "None", "True", "'x'"),
        *(
            '"\\x41"',
            '"\\ud8"',
            '"\t"',
            '"unended',
            "[1,]",
            '{"a": 1,}',
            "{a: 1}",
            "[1 2]",
            "/* */ 1",
            "",
            "\\",
            "[}",
            "1;",
        ),
    )
)

WORDS = (
    *("Once", "upon", "a", "time", "there", "was", "little", "girl", "named", "Lily", "she", "saw", "big", "red"),
    *("ball", "and", "her", "mom", "said", "the", "dog", "ran", "to", "park", "happy", "tree", "One", "day", "Tom"),
)

STRINGS = (
    *(
        "",
        " ",
        "\n",
        "\t",
        "\r\n",
        "\0",
        "\x00\x01\x02",
        "\x7f",
        "\u0085",
        "\u2028",
        "\u2029",
        "\ufeff",
        "\ufffd",
        "\uffff",
    ),
    *("\ud800", "\udc00", "a\ud83d", "\ude00\ud83d", "ok \udfff ok"),  # halves of surrogate pairs
    *("\u200b", "\u200d", "\u2060zero\u200bwidth", "\u202eright to left", "\u05d0\u05d1\u05d2", "\u0627\u0644\u0633"),
    *("\ue000", "\U000f0000", "\U0010fffd", "\U000f0000\U000f0001"),  # private use
    *("é", "e\u0301", "Z\u0351\u0343\u0342", "ﷺ", "😀", "👩‍👩‍👧‍👦", "🇩🇪", "漢字", "ß", "İ", "ſ", "ǅ", "𝔘𝔫𝔦", "½"),
    *(
        "<s>",
        "</s>",
        "<unk>",
        "<pad>",
        "<|eot_id|>",
        "<|im_start|>system\n",
        "<|endoftext|>",
        "[INST]",
        "[/INST]",
        "<<SYS>>",
    ),
    *("<0x0A>", "▁", "Ġ", "##ing", "<s", "/s>", "<|", "|>"),
    *(
        "{{ 7*7 }}",
        "{% for x in y %}",
        "{{ messages.__class__ }}",
        "{0.__class__}",
        "%s%n%d",
        "${jndi:x}",
        "$(id)",
        "`id`",
    ),
    *(
        "../../../etc/passwd",
        "C:\\x",
        "'; --",
        "<script>",
        '"',
        "\\",
        "\\u0000",
        "\\ud800",
        "null",
        "true",
        "NaN",
        "-1",
        "1",
    ),
    *("a" * 64, "a" * 65, "a" * 1024, "a" * 1025, "ab " * 700, "😀" * 300, "e" + "\u0301" * 500),
    *('{"error": {"message": "x", "type": "y"}}', "data: [DONE]\n\n", "\ndata: {}\n\n", "HTTP/1.1 200 OK\r\n\r\n"),
)

WHOLES: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    [None],
    [[]],
    [[1]],
    {"a": {}},
    {"": ""},
    [True],
    ["a", 1],
    {"a": [1, {"b": None}]},
)

NAMES = (  # of fields that nobody has
    *("", " ", "Prompt", "prompt ", "promt", "temprature", "max_length", "__class__", "__proto__", "constructor"),
    *("\ud800", "\u200b", "😀", "a" * 200, "\0", "stream\n", "body", "data", "self", "max_new_tokens\u200b", "N"),
)


def number(rng: random.Random) -> Any:
    """A whole or a broken number, small or absurd."""
    return rng.choice(INTEGERS if rng.random() < 0.5 else NUMBERS)


def string(rng: random.Random) -> str:
    """A string that has broken something somewhere, alone or between words."""
    text = rng.choice(STRINGS)
    return text if rng.random() < 0.6 else f"{rng.choice(WORDS)} {text}{rng.choice(WORDS)}"


def text(rng: random.Random, num_words: int) -> str:
    """So many ordinary words."""
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


def deep(rng: random.Random) -> Raw:
    """Nested about as deeply as parsers bear, or beyond."""
    depth = rng.choice((5, 50, 200, 320, 480, 900, 940, 960, 980, 985, 990, 995, 1000, 1100, 20_000))
    return nested(depth) if rng.random() < 0.5 else nested(depth, '{"a": ', "null", "}")


def anything(rng: random.Random) -> Any:
    """A value of any type, hardly ever the right one."""
    kind = rng.random()
    if kind < 0.30:
        return number(rng)
    if kind < 0.52:
        return string(rng)
    if kind < 0.72:
        return rng.choice(WHOLES)
    if kind < 0.80:
        return [anything(rng) for _ in range(rng.randrange(1, 5))]
    if kind < 0.88:
        return {string(rng): anything(rng) for _ in range(rng.randrange(1, 4))}
    if kind < 0.93:
        name = rng.choice(WORDS)
        return Pairs([(name, anything(rng)), (name, anything(rng))])
    return deep(rng) if kind < 0.98 else rng.choice(NOT_JSON)
