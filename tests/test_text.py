"""Stop strings: never shown, not even in part; everything before them is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt_fast.engine.request import Request
from gpt_fast.engine.text import TextStream
from gpt_fast.params import SamplingParams


class Pieces:
    def __init__(self, pieces: list[str], rest: str = "") -> None:
        self._pieces, self._rest = pieces, rest

    def push(self, token: int) -> str:
        return self._pieces[token]

    def flush(self) -> str:
        return self._rest


def run(pieces: list[str], stop: list[str], first: int = 0) -> tuple[list[str], bool]:
    """What comes out, and whether it stopped. Pieces before the ``first`` may not stop."""
    stream = TextStream(Pieces(pieces), stop)
    out = []
    for i in range(len(pieces)):
        out.append(stream.push(i, may_stop=i >= first))
        if stream.stopped:
            break
    else:
        out.append(stream.flush())
    assert "".join(out) == stream.text
    return out, stream.stopped


def test_a_stop_string_over_several_tokens() -> None:
    assert run(["Hel", "lo\n", "\nUser", ": hi"], ["\n\nUser:"]) == (["Hel", "lo", "", ""], True)


def test_what_only_looked_like_a_stop_string_is_given_late_but_whole() -> None:
    out, stopped = run(["a", "##", "b"], ["###"])
    assert (out, stopped) == (["a", "", "##b", ""], False)


def test_the_earliest_of_several_wins() -> None:
    assert "".join(run(["one two three"], ["three", "two"])[0]) == "one "


def test_may_stop_false_lets_it_pass() -> None:
    stream = TextStream(Pieces(["END", "x", "END"]), ["END"])
    assert stream.push(0, may_stop=False) == "END"
    assert stream.push(1) == "x"
    assert stream.push(2) == ""
    assert stream.stopped


def test_a_stop_string_counts_where_it_ends() -> None:
    assert run(["x E", "N", "D"], ["END"], first=2) == (["x ", "", ""], True)
    assert run(["x E", "N", "D", " y"], ["END"], first=3) == (["x ", "", "END", " y", ""], False)
    assert run(["ab", "x"], ["abc", "b"], first=1) == (["", "abx", ""], False)


def test_a_stop_string_that_the_end_of_the_text_completes_is_why_it_ends() -> None:
    """Half a character that nothing follows is U+FFFD."""
    text = TextStream(Pieces(["a", ""], rest="\ufffd"), ["\ufffd"])
    request = Request("r", [0], SamplingParams().resolved(), seed=0, max_tokens=2, end_ids=frozenset(), text=text)
    assert request.append([0, 1], now=0.0) == "a"
    assert request.finish_reason == "stop"


@pytest.mark.parametrize(("included", "wanted"), [(False, "ab"), (True, "abEND")])
def test_a_token_that_ends_the_answer_is_text_of_it_where_that_is_asked_for(included: bool, wanted: str) -> None:
    params = SamplingParams(include_stop_str_in_output=included).resolved()
    text = TextStream(Pieces(["a", "b", "END", "x"]))
    request = Request("r", [0], params, seed=0, max_tokens=9, end_ids=frozenset({2}), text=text)
    assert request.append([0, 1, 2, 3], now=0.0) == wanted == text.text
    assert (request.finish_reason, request.token_ids) == ("stop", [0, 0, 1, 2])


@given(
    st.lists(st.text("ab.", max_size=4), max_size=12),
    st.lists(st.text("ab.", min_size=1, max_size=3), max_size=3),
    st.integers(0, 4),
)
def test_equals_cutting_the_whole_text(pieces: list[str], stop: list[str], first: int) -> None:
    out, stopped = run(pieces, stop, first)
    whole = "".join(pieces)
    # A stop string ends the text at the first token that may stop and completes one, at the earliest begin there.
    expected, found = whole, False
    so_far = ""
    for number, piece in enumerate(pieces):
        before, so_far = len(so_far), so_far + piece
        begins = [i for s in stop if (i := so_far.find(s, max(0, before + 1 - len(s)))) >= 0]
        if begins and number >= first:
            expected, found = so_far[: min(begins)], True
            break
    assert ("".join(out), stopped) == (expected, found)
