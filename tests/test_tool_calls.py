"""The bundled demo model calls random functions through everything but HTTP; and benchmarks/tool_calls.py, which judges
a thousand of them, sees what is wrong with an answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import tool_calls

from gpt_fast import LLM

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def ask() -> Iterator[tool_calls.Ask]:
    with LLM(tool_calls.DEMO, compile=False, threads=1) as llm:
        yield tool_calls.in_process(llm)


def test_every_demanded_call_parses_and_holds_to_its_schema(ask: tool_calls.Ask) -> None:
    bodies = [tool_calls.random_request(seed, "demo", 400, parallel=False) for seed in range(24)]
    assert {body["stream"] for body in bodies} == {False, True}
    assert {isinstance(body["tool_choice"], str) for body in bodies} == {False, True}
    found = list(tool_calls.verdicts(ask, iter(bodies)))
    assert [(body["seed"], verdict) for body, verdict in found] == [(seed, "valid") for seed in range(24)]


def test_of_several_calls_all_whole_ones_are_valid(ask: tool_calls.Ask) -> None:
    bodies = [tool_calls.random_request(seed, "demo", 400, parallel=True) for seed in range(100, 108)]
    assert {verdict for _, verdict in tool_calls.verdicts(ask, iter(bodies))} <= {"valid", "cut off"}


@pytest.mark.parametrize("stream", [False, True])
def test_the_model_may_choose_and_what_looks_like_a_call_is_one(ask: tool_calls.Ask, stream: bool) -> None:
    body = tool_calls.random_request(3, "demo", 400, parallel=False)
    body |= {"tool_choice": "auto", "stream": stream, "max_tokens": 20, "temperature": 0}
    calls, content, reason = (tool_calls.read_stream if stream else tool_calls.read_whole)(ask(body))
    assert (reason in ("stop", "length")) == (not calls)
    assert calls or content


@pytest.mark.parametrize("form", [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {}}}])
def test_structured_content_parses(ask: tool_calls.Ask, form: dict[str, Any]) -> None:
    if form["type"] == "json_schema":
        # What instructor sends for a model with a name and an age: nothing is said of further properties.
        age = {"type": "integer", "maximum": 99, "minimum": 0}
        properties = {"name": {"type": "string", "maxLength": 10}, "age": age}
        form["json_schema"]["schema"] = {"properties": properties, "required": ["name", "age"], "type": "object"}
    body = {"model": "demo", "messages": [{"role": "user", "content": "Lily is six."}], "temperature": 0}
    choice = json.loads(ask(body | {"response_format": form}))["choices"][0]
    if form["type"] == "json_object":  # anything may be in it, so a weak model may go on to the limit
        assert choice["message"]["content"].startswith("{")
    else:
        assert set(json.loads(choice["message"]["content"])) == {"name", "age"}
        assert choice["finish_reason"] == "stop"


def body(**changes: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("f", "g")]
    return {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "stream": False} | changes


def answer(*calls: tuple[str, str], content: str | None = None, reason: str = "tool_calls") -> str:
    told = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return json.dumps({"choices": [{"message": {"content": content, "tool_calls": told}, "finish_reason": reason}]})


NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("changes", "said", "verdict"),
    [
        ({}, answer(("g", '{"a": 1}')), "valid"),
        ({"tool_choice": NAMED}, answer(("f", '{"a": 1}')), "valid"),
        ({"tool_choice": NAMED}, answer(("g", '{"a": 1}')), "wrong function: g"),
        ({}, answer(("h", "{}")), "wrong function: h"),
        ({}, answer(("f", '{"a": 1')), "does not parse"),
        ({}, answer(("f", '{"a": "x"}')), "does not validate: 'x' is not of type 'integer'"),
        ({}, answer(("f", '{"a": 1, "b": 2}')), "does not validate: Additional properties are not allowed"),
        ({}, answer(reason="stop", content="Hello"), "no call: stop"),
        ({}, answer(("f", '{"a": 1}'), content="Hello"), "no call: tool_calls"),
        ({}, answer(("f", '{"a": 1}'), ("f", '{"a": 1}')), "too many calls"),
        ({"parallel_tool_calls": True}, answer(("f", '{"a": 1}'), ("f", '{"a": 1}')), "valid"),
        ({"parallel_tool_calls": True}, answer(("f", '{"a": 1}'), ("f", '{"a'), reason="length"), "cut off"),
        ({"parallel_tool_calls": True}, answer(("f", "{}"), ("f", '{"a'), reason="length"), "does not validate"),
    ],
)
def test_the_judge_sees_what_is_wrong(changes: dict[str, Any], said: str, verdict: str) -> None:
    assert tool_calls.judge(body(**changes), said).startswith(verdict)


def test_requests_are_the_same_for_everybody() -> None:
    requests = [tool_calls.random_request(7, "demo", 400, parallel=False) for _ in range(2)]
    assert requests[0] == requests[1] != tool_calls.random_request(8, "demo", 400, parallel=False)
