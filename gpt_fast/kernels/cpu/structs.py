"""The structs that Python hands to the C++ kernels, as their headers declare them."""

from __future__ import annotations

import ctypes
import re
from array import array
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).with_name("src")

_HEADERS = "".join(path.read_text(encoding="utf-8") for path in SOURCES.glob("*.h"))
_KINDS: dict[str, Any] = {"int64_t": ctypes.c_int64, "double": ctypes.c_double}


def _struct(name: str) -> Any:
    """The struct ``name`` of the headers, which alone say what fields it has."""
    _, behind = _HEADERS.split(f"\nstruct {name} {{\n")
    body = behind.partition("\n};")[0]
    fields: list[tuple[str, Any]] = []
    for kind, names in re.findall(r"^ +(\w[\w* ]*[* ])(\w+(?:, \w+)*);", body, re.MULTILINE):
        fields += [(n, ctypes.c_void_p if "*" in kind else _KINDS[kind.strip()]) for n in names.split(", ")]
    _KINDS[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return _KINDS[name]


Linear, Embedding, Op, Ranks, Program = map(_struct, ("Linear", "Embedding", "Op", "Ranks", "Program"))
Step, Draw, Chain = map(_struct, ("Step", "Draw", "Chain"))


def address(numbers: array[int]) -> int:
    """Where the first of ``numbers`` stands."""
    return numbers.buffer_info()[0]


CHECKED = (Linear, Op, Program, Step, Draw, Chain, Ranks)  # in the order of gpt_fast_struct_bytes
