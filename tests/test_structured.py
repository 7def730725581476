"""Grammars: what comes out matches, whatever the model would say; what cannot be compiled is refused by field."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpt_fast import LLM, RequestError, SamplingParams

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def llm(data_dir: Path) -> Iterator[LLM]:
    with LLM(data_dir / "models" / "stories260K_hf", dtype="float32", compile=False) as llm:
        yield llm


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_json_schema(llm: LLM, temperature: float) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    done = llm.generate("Lily", SamplingParams(max_tokens=200, temperature=temperature, seed=1, json_schema=schema))
    answer = json.loads(done.text)
    assert set(answer) == {"name", "age"}
    assert isinstance(answer["age"], int)
    assert done.finish_reason == "stop"


def test_regex_and_choice(llm: LLM) -> None:
    done = llm.generate("a", SamplingParams(max_tokens=50, temperature=1.0, seed=2, regex=r"[0-9]{3}-[a-f]+z"))
    assert re.fullmatch(r"[0-9]{3}-[a-f]+z", done.text)
    done = llm.generate("a", SamplingParams(max_tokens=50, temperature=1.0, seed=2, choice=("red fox", "blue\nfish")))
    assert done.text in ("red fox", "blue\nfish")


def test_constrained_and_free_requests_share_a_batch(llm: LLM) -> None:
    free = SamplingParams(max_tokens=20, temperature=0.0)
    alone = llm.generate("Once", free)
    handles = [llm.submit("Once", free), llm.submit("Once", SamplingParams(max_tokens=20, choice=("yes", "no")))]
    texts = ["".join(delta.text for delta in handle) for handle in handles]
    assert texts[0] == alone.text
    assert texts[1] in ("yes", "no")


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"regex": "("}, "regex"), ({"json_schema": {"type": "nonsense"}}, "json_schema"), ({"choice": []}, "choice")],
)
def test_what_does_not_compile_is_refused_by_field(llm: LLM, fields: dict[str, object], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.prepare("a", SamplingParams(**fields))  # type: ignore[arg-type]
    assert caught.value.param == param


def test_without_the_package_it_is_refused_by_name(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match="llguidance"):
        llm.prepare("a", SamplingParams(regex="a"))
