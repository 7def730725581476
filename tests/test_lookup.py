"""Drafts by lookup: the automaton in C++ and in Python, what is guessed from it, and what is kept of requests."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from fake_model import FakeModelLLM, check_idle

from gpt_fast import LLM, SamplingParams
from gpt_fast.engine.request import Request
from gpt_fast.engine.speculate import lookup
from gpt_fast.engine.speculate.drafter import Wish
from gpt_fast.engine.speculate.lookup import History, LookupDrafter
from gpt_fast.kernels.automaton import NOTHING, Automaton, Guess, PlainAutomaton
from gpt_fast.kernels.cpu.library import available

needs_cpp = pytest.mark.skipif(not available(), reason="no C++ kernels here")
BOTH = [pytest.param(Automaton, marks=needs_cpp), PlainAutomaton]
AnyAutomaton = type[Automaton] | type[PlainAutomaton]


def text(draw: random.Random, alphabet: int, length: int) -> list[int]:
    """Random tokens, in which pieces of what came before come again."""
    tokens: list[int] = []
    while len(tokens) < length:
        if tokens and draw.random() < 0.1:
            begin = draw.randrange(len(tokens))
            tokens += tokens[begin : begin + draw.randrange(1, 60)]
        tokens.append(draw.randrange(alphabet))
    return tokens[:length]


# ---- the automaton ----


@needs_cpp
@pytest.mark.parametrize("alphabet", [1, 2, 3, 10, 50])
def test_cpp_finds_what_python_finds(alphabet: int) -> None:
    draw = random.Random(alphabet)
    for length in [*range(0, 200, 7), 4000]:
        ours, plain, tokens = Automaton(), PlainAutomaton(), text(draw, alphabet, length)
        assert ours.find([1, 2], 3) == plain.find([1, 2], 3) == NOTHING
        for i, token in enumerate(tokens):
            most = draw.randrange(9)
            assert ours.extend([token], most) == plain.extend([token], most)
            if i % 9 == 0:
                begin = draw.randrange(i + 1)
                other = [*text(draw, alphabet + 1, 5), *tokens[begin : begin + 12]][: draw.randrange(17)]
                assert ours.find(other, most) == plain.find(other, most)
        pieces = Automaton()
        for begin in range(0, length, 50):
            pieces.extend(tokens[begin : begin + 50])
        assert pieces.extend([], 5) == ours.extend([], 5)
        assert pieces.num_tokens == plain.num_tokens == length


@pytest.mark.parametrize("new", BOTH)
@pytest.mark.parametrize("alphabet", [1, 2, 3, 9])
def test_the_automaton_finds_the_longest_ending_that_occurred_before(alphabet: int, new: AnyAutomaton) -> None:
    draw = random.Random(alphabet)
    tokens = [draw.randrange(alphabet) for _ in range(120)]
    other = [draw.randrange(alphabet) for _ in range(40)]
    automaton = new()
    for end in range(1, len(tokens) + 1):
        known, guess = tokens[:end], automaton.extend(tokens[end - 1 : end], 1)
        found = automaton.find(other, 1)
        assert guess.length == longest_ending(known, known[:-1])
        assert found.length == longest_ending(other, known)
        if guess.length:
            assert occurs([*known[end - guess.length :], *guess.tokens], known)
        if found.length:
            assert occurs([*other[len(other) - found.length :], *found.tokens], known)


def longest_ending(tokens: Sequence[int], where: Sequence[int]) -> int:
    return max(n for n in range(len(tokens) + 1) if occurs(tokens[len(tokens) - n :], where))


def occurs(piece: Sequence[int], where: Sequence[int]) -> bool:
    return any(where[i : i + len(piece)] == piece for i in range(len(where) - len(piece) + 1))


@pytest.mark.parametrize("new", BOTH)
def test_a_guess_is_what_followed_last_and_a_repetition_goes_on(new: AnyAutomaton) -> None:
    automaton = new()
    assert automaton.extend([1, 2, 3, 4, 5, 6, 1, 2, 3], 3) == Guess(3, (4, 5, 6))
    assert automaton.extend([], 8) == Guess(3, (4, 5, 6, 1, 2, 3, 4, 5))
    assert automaton.extend([7, 1, 2, 3], 2) == Guess(3, (7, 1))
    assert automaton.extend([9, 9, 9, 9, 9], 4) == Guess(4, (9, 9, 9, 9))
    assert automaton.extend([8], 4) == NOTHING
    assert automaton.find([5, 1, 2, 3], 2) == Guess(3, (9, 9))
    assert automaton.find([50], 2) == NOTHING
    assert automaton.find([9, 8], 2) == Guess(2, ())  # nothing followed yet


@needs_cpp
@pytest.mark.parametrize("alphabet", [1, 2, 50, 32_000])
def test_bytes_a_token_are_few_and_bounded(alphabet: int) -> None:
    draw, automaton, most = random.Random(alphabet), Automaton(), 0.0
    for num_tokens in range(2000, 60_000, 2000):
        automaton.extend([draw.randrange(alphabet) for _ in range(2000)])
        most = max(most, automaton.num_bytes / num_tokens)
    assert most < 100


@needs_cpp
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system does not keep a process to such a limit")
def test_an_automaton_without_memory_finds_nothing_and_costs_nothing_else() -> None:
    code = """
import random, resource
from gpt_fast.kernels.automaton import Automaton, NOTHING
draw = random.Random(0)
tokens = [7, 7, 7, *(draw.randrange(1000) for _ in range(50_000))]
automaton = Automaton()
assert automaton.extend(tokens[:3], 1).tokens
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, -1))
sizes = []
for _ in range(60):
    automaton.extend(tokens)
    sizes.append(automaton.num_bytes)
assert 10**6 < max(sizes) < 2**26, sizes
assert sizes[-1] < 1000, sizes
assert automaton.extend(tokens[:3], 4) == automaton.find(tokens[:3], 4) == NOTHING
assert Automaton().extend(tokens[:3], 1).tokens
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---- the drafter ----


def request_of(prompt: Sequence[int], answer: Sequence[int] = ()) -> Request:
    with FakeModelLLM() as llm:
        request = llm.prepare(list(prompt), SamplingParams())
    request.token_ids += answer
    return request


@pytest.fixture(params=BOTH)
def new(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AnyAutomaton:
    """The automaton that drafters made in this test have."""
    monkeypatch.setattr(lookup, "automaton_class", lambda: request.param)
    return request.param


def test_the_longer_the_known_ending_the_more_drafts(new: AnyAutomaton) -> None:
    drafter = LookupDrafter()
    for length in range(8):
        piece = list(range(40, 40 + length))
        (draft,) = drafter.draft([Wish(request_of([*piece, 1, 2, 3, 4, *piece]), 4)])
        assert draft == (1, 2, 3, 4)[: max(0, length - 1)]


def test_a_long_prompt_is_taken_in_over_several_steps(new: AnyAutomaton, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    class Watched(new):  # type: ignore[misc, valid-type]
        def extend(self, tokens: Sequence[int], most: int = 0) -> Guess:
            taken.append(len(tokens))
            return super().extend(tokens, most)

    monkeypatch.setattr(lookup, "automaton_class", lambda: Watched)
    drafter, request = LookupDrafter(), request_of([1])
    request.token_ids = [5, 6, 7, 8] * 2500
    drafts = [drafter.draft([Wish(request, 2)]) for _ in range(6)]
    assert sum(taken) == request.num_tokens
    assert max(taken) <= 2048
    assert drafts == [[()]] * 4 + [[(5, 6)]] * 2


def test_requests_leave_nothing_behind(new: AnyAutomaton) -> None:
    two_words = {"logit_bias": {1: 90.0, 2: 90.0}, "ignore_eos": True}
    params = [SamplingParams(max_tokens=20, temperature=1.0, seed=i, **two_words) for i in range(60)]
    drafter = LookupDrafter()
    with FakeModelLLM(drafter=lambda *_: drafter, num_pages=20) as llm:
        handles = [llm.submit([1, 2, 1, 2, 1, 2], each) for each in params]
        for handle in handles[::9]:
            handle.cancel()
        for handle in handles:  # which the caller goes on holding
            list(handle)
        check_idle(llm)
        assert drafter.num_bytes == 0
        assert llm.engine.speculation.counts.num_drafts > 100  # type: ignore[union-attr]


# ---- other answers ----


def take_in(history: History) -> None:
    for _ in range(100):
        history.take_in()


def test_history_is_the_last_answers_and_no_more_than_was_asked_for(new: AnyAutomaton) -> None:
    history = History(1000)
    answers = [list(range(100 * i, 100 * i + 90)) for i in range(40)]
    most = 0
    for answer in answers:
        history.add(answer)
        take_in(history)
        most = max(most, history.num_bytes)
    found = [history.find(answer[:20], 3) == Guess(20, tuple(answer[20:23])) for answer in answers]
    assert not any(found[:-11])
    assert all(found[-5:])
    assert most <= 1000 * (100 if new is Automaton else 500)
    for _ in range(30):  # much at once, and more than there is room for
        history.add(range(10_000, 19_000))
    take_in(history)
    assert history.find([10_000, 10_001, 10_002], 2).tokens == (10_003, 10_004)
    assert history._newer.num_tokens + history._older.num_tokens <= 1000
    nothing = History(1)
    nothing.add([1, 2, 3])
    take_in(nothing)
    assert nothing.find([1, 2], 1) == NOTHING


def test_history_does_not_go_across_the_end_of_an_answer(new: AnyAutomaton) -> None:
    history = History(1000)
    history.add([1, 2, 3])
    history.add([4, 5, 6])
    take_in(history)
    assert history.find([1, 2], 5) == Guess(2, (3,))
    assert history.find([2, 3, 4], 5) == Guess(1, (5, 6))


def test_the_later_of_two_answers_is_guessed(new: AnyAutomaton) -> None:
    history = History(48)
    for last in range(6):  # over both halves
        history.add([1, 2, 3, 4, last, 90 + last, 80 + last])
        take_in(history)
        assert history.find([3, 4], 1) == Guess(2, (last,))


def test_other_answers_help_where_the_own_text_knows_less(new: AnyAutomaton) -> None:
    drafter = LookupDrafter(history=1000)
    drafter.end(request_of([30, 31, 32, 33], [1, 2, 3, 4, 5, 6]))
    cases: dict[tuple[int, ...], tuple[int, ...]] = {
        (9, 1, 2, 3): (4, 5),
        (2, 3, 4, 8, 2, 3, 4): (8, 2),  # as long in the own text
        (2, 3, 4, 8, 1, 2, 3, 4): (5, 6),  # longer in the other answer
        (30, 31, 32): (),  # another prompt
    }
    for tokens, expected in cases.items():
        assert drafter.draft([Wish(request_of(tokens), 2)]) == [expected]


def test_the_same_question_is_answered_in_fewer_steps_only_with_history(new: AnyAutomaton) -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=1, ignore_eos=True)

    def accepted(**options: Any) -> list[int]:
        with FakeModelLLM(drafter=lambda *_: LookupDrafter(**options)) as llm:
            return [llm.generate([3, 4, 5], params).num_accepted for _ in range(2)]

    first, second = accepted()
    assert first == second
    first, second = accepted(history=1000)
    assert second > 15 > first


def test_history_needs_lookup() -> None:
    with pytest.raises(ValueError, match=r"lookup_history: only lookup .* draft is int8"):
        LLM("nowhere", draft="int8", lookup_history=10)
    with pytest.raises(ValueError, match=r"lookup_history: only lookup .* there is no draft"):
        LLM("nowhere", lookup_history=10)
