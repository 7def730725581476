"""benchmarks/same_answers.py at a small size; and it finds a rule that keeps what the target would not have written."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import same_answers
from identity.difference import difference
from identity.mixed import LONGEST, Mix
from identity.serving import Answer

from gpt_fast import Completion, SamplingParams
from gpt_fast.engine import engine
from gpt_fast.engine.compute import Computed, Outcome, sample_tokens
from gpt_fast.outputs import TokenLogprobs

pytestmark = pytest.mark.usefixtures("one_thread")

MODELS = Path(__file__).parent / "data" / "models"
STORY = list(range(3, 500)) * 2


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str]:
    target, draft = (str(MODELS / name) for name in ("stories260K_hf", "llama2xs_280K_hf"))
    words = ["same_answers.py", "--target", target, "--requests", "24", "--seed", "6", "--draft", draft, *more]
    monkeypatch.setattr(sys, "argv", words)
    return same_answers.main(), capsys.readouterr().out


def test_nothing_differs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = run(monkeypatch, capsys, "lookup", "random", "--runs", "alone", "few pages", "--json")
    assert status == 0
    assert "DIFFERS" not in out
    rows = json.loads(out.splitlines()[-1])
    assert [(row["draft"].rpartition("/")[2], row["run"]) for row in rows] == [
        ("none", "few pages"), ("llama2xs_280K_hf", "alone"), ("llama2xs_280K_hf", "few pages"),
        ("lookup", "alone"), ("lookup", "few pages"), ("random", "alone"), ("random", "few pages"),
    ]  # fmt: skip
    assert all((row["drafted"] > row["accepted"] > 0) == (row["draft"] != "none") for row in rows)


def test_a_wrong_rule_is_found_and_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lenient(parts: Sequence[Computed]) -> list[Outcome | Exception]:
        """Keeps a first draft that was wrong in the place of the right token."""
        return [found._replace(tokens=_spoiled(part, found)) if isinstance(found, Outcome) else found
                for part, found in zip(parts, sample_tokens(parts), strict=True)]  # fmt: skip

    monkeypatch.setattr(engine, "sample_tokens", lenient)
    status, out = run(monkeypatch, capsys, "--runs", "alone")
    assert status == 1
    assert "DIFFERS: token " in out
    assert "origin: corrected); request " in out


def _spoiled(part: Computed, found: Outcome) -> Sequence[int]:
    wrong = part.drafts and len(found.tokens) == 1
    return [part.drafts[0]] if wrong else found.tokens


def test_requests_are_the_same_for_a_seed_and_mix_everything() -> None:
    asks = Mix(STORY, 512, 512, 3).requests(500)
    assert asks == Mix(STORY, 512, 512, 3).requests(500)
    assert asks != Mix(STORY, 512, 512, 4).requests(500)
    of_chats = {"grammar", "shown_special_tokens"}  # no fields of a request: tests/test_tool_calls.py
    fields = {f.name for f in dataclasses.fields(SamplingParams)} - {"seed", "n", "timeout_s"} - of_chats
    default = SamplingParams()
    used = Counter(n for ask in asks for n in fields if getattr(ask.params, n) != getattr(default, n))
    assert {name for name in fields if used[name] < 8} == set()
    assert len(asks) > 520, "several samples of a prompt"
    lengths = sorted(len(ask.prompt) for ask in asks)
    assert lengths[0] == 1
    assert lengths[-1] > 200
    assert max(ask.params.max_tokens or 0 for ask in asks) > LONGEST - 50
    assert all(len(ask.prompt) + (ask.params.max_tokens or 0) <= 512 for ask in asks)
    beginnings = Counter(tuple(ask.prompt[:16]) for ask in asks if len(ask.prompt) > 16)
    assert beginnings.most_common(4)[3][1] > 15, "shared"


DONE = Completion("ab", (1, 2), "stop", (TokenLogprobs(1, -0.5), TokenLogprobs(2, -0.25)), None)


def answer(**changes: Any) -> Answer:
    done = dataclasses.replace(DONE, **changes)
    return Answer(done, "", done.text, list(done.token_ids), list(done.logprobs or ()))


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (answer(), ""),
        (answer(text="ac"), "text 'ac', not 'ab'"),
        (answer(token_ids=(1, 3)), "token 1 of 2 is 3, not 2"),
        (answer(token_ids=(1,), logprobs=DONE.logprobs), "1 tokens, not 2"),
        (answer(finish_reason="length"), "finish_reason length, not stop"),
        (answer(logprobs=(DONE.logprobs[0], TokenLogprobs(2, -0.25 - 2**-40))), "logprobs 1 of 2"),  # type: ignore[index]
        (answer(prompt_logprobs=(None,)), "prompt_logprobs differ"),
        (Answer(DONE, "", "a", [1, 2], list(DONE.logprobs or ())), "the pieces are not the completion"),
        (Answer(error="no"), "error 'no', not ''"),
        (answer(finish_reason="abort", text="a", token_ids=(1,), logprobs=DONE.logprobs[:1]), ""),  # type: ignore[index]
        (answer(finish_reason="abort", text="b", token_ids=(1,), logprobs=DONE.logprobs[:1]), "text 'b' of 'ab'"),  # type: ignore[index]
        (answer(finish_reason="abort", text="a", token_ids=(2,), logprobs=()), "token 0 of 2 is 2, not 1"),
    ],
)  # fmt: skip
def test_differences_are_found_and_told(found: Answer, told: str) -> None:
    why = difference(answer(), found)
    assert why.startswith(told)
    assert bool(why) == bool(told)
