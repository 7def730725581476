"""Grammars in Lark that are long, or that would end the process or take all memory."""

from __future__ import annotations

import json
import threading
from functools import cache
from typing import Any

import pytest
from fake_model import EOS, Bytes

from gpt_fast.engine.lark_limits import check_lark, with_room
from gpt_fast.engine.schema_limits import MAX_PATTERNS
from gpt_fast.errors import RequestError
from gpt_fast.params import SamplingParams

pytest.importorskip("llguidance")
grammar = pytest.importorskip("gpt_fast.engine.grammar")


@cache
def compiler() -> Any:
    return grammar.GrammarCompiler(Bytes(), EOS + 1, (EOS,))


def intersection(count: int) -> str:
    return "start: X\nX: " + " & ".join(f"/.*a{i}.*/" for i in range(count)) + "\n"


def schema(inner: dict[str, Any]) -> str:
    return "start: %json " + json.dumps(inner) + "\n"


def test_a_chain_of_rules_as_long_as_a_grammar_can_have_is_compiled() -> None:
    """The compiler goes along it by recursion, which a usual stack ended at about 2,700 rules, with the process."""
    rules = "".join(f"x{i}: x{i + 1}\n" for i in range(4500))
    own = compiler().compile(SamplingParams(grammar=f'start: x0\n{rules}x4500: "a"\n'))
    assert own.allowed().nonzero()[:, 0].tolist() == [ord("a")]
    own.advance(ord("a"))
    assert own.complete


def test_room_is_for_one_thread_and_errors_come_through() -> None:
    before = threading.stack_size()
    assert with_room(lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        with_room(lambda: 1 // 0)
    assert threading.stack_size() == before


@pytest.mark.parametrize(
    "text",
    [
        intersection(MAX_PATTERNS + 1),
        intersection(40),
        schema({"const": -(2**63)}),
        schema({"allOf": [{"type": "string", "pattern": f"a{i}"} for i in range(30)]}),
    ],
)
def test_what_would_end_the_process_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="grammar") as caught:
        check_lark(text, "grammar")
    assert (caught.value.status, caught.value.param) == (400, "grammar")


def test_what_only_looks_so_is_compiled() -> None:
    ands = "&" * 20
    for text in (
        intersection(MAX_PATTERNS),
        f'start: X "\\"{ands}" // {ands}\nX: /{ands}\\/{ands}/ # {ands}\n',
        schema({"enum": ["%json", 2**53]}),
    ):
        assert compiler().compile(SamplingParams(grammar=text)) is not None
    for text in ('start: "%json {"\n', "start: %json [1]\n", "start: %json {" * 1000):
        check_lark(text, "grammar")
