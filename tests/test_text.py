"""Stop strings: never shown, not even in part; everything before them is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpt_fast.engine.text import TextStream


class Pieces:
    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def push(self, token: int) -> str:
        return self._pieces[token]

    def flush(self) -> str:
        return ""


def run(pieces: list[str], stop: list[str]) -> tuple[list[str], bool]:
    stream = TextStream(Pieces(pieces), stop)
    out = []
    for i in range(len(pieces)):
        out.append(stream.push(i))
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


@given(st.lists(st.text("ab.", max_size=4), max_size=12), st.lists(st.text("ab.", min_size=1, max_size=3), max_size=3))
def test_equals_cutting_the_whole_text(pieces: list[str], stop: list[str]) -> None:
    out, stopped = run(pieces, stop)
    whole = "".join(pieces)
    # A stop string ends the text at the first token in which any is complete, at the earliest begin there.
    expected, found = whole, False
    so_far = ""
    for piece in pieces:
        so_far += piece
        begins = [i for i in (so_far.find(s) for s in stop) if i >= 0]
        if begins:
            expected, found = so_far[: min(begins)], True
            break
    assert ("".join(out), stopped) == (expected, found)
