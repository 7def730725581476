"""v1/responses as translation: items in as a chat's messages, an answer out as items, whole and event by event."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from typing import Any

import pytest
from fake_model import Bytes
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gpt_fast.errors import RequestError
from gpt_fast.outputs import Completion, Delta
from gpt_fast.serve.protocol.openai_chat import parse_chat
from gpt_fast.serve.protocol.openai_common import OpenAIContext
from gpt_fast.serve.protocol.openai_responses import ResponsesRequest, parse_responses
from gpt_fast.tokenizer.chat import ChatTemplate

TEMPLATE = """{% for m in messages %}[{{ m.role }}{% if m.reasoning_content %} ({{ m.reasoning_content }}){% endif %}: \
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}]\
{% endfor %}\
{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{# <think> </think> #}"""


CONTEXT = OpenAIContext(
    models=("tiny",),
    max_model_len=2000,
    tokenizer=Bytes(),
    template=ChatTemplate(TEMPLATE, {}, "the test"),
    clock=lambda: 2000.9,
    new_id=lambda: "id",
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def asked(**fields: Any) -> ResponsesRequest:
    return parse_responses({"model": "tiny", "input": "Hi"} | fields, CONTEXT)


def prompt(**fields: Any) -> str:
    return Bytes().decode(asked(**fields).prompts[0])  # type: ignore[arg-type]


def answered(text: str, reason: Any = "stop", step: int = 3, **fields: Any) -> Any:
    """The answer to a request whose sequence is ``text``: a Response, or a stream's events."""
    request = asked(**fields)
    done = Completion(text, tuple(text.encode()), reason, num_prompt_tokens=7, num_cached_tokens=2)
    if not request.stream:
        return Response.model_validate_json(request.write_end([done]))
    body, pieces = "", [text[i : i + step] for i in range(0, len(text), step)] or [""]
    for i, piece in enumerate(pieces):
        last = i == len(pieces) - 1
        body += request.write_delta(0, Delta(piece, (1,), reason if last else None, done if last else None))
    body += request.write_end([done])
    assert body.isascii()
    events = []
    for block in body.split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append(EVENT.validate_json(data.removeprefix("data: ")))
        assert name == f"event: {events[-1].type}"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


def test_items_become_messages() -> None:
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Ulm?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Let me see."}],
        },
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Ulm"}'},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "warm"},
        {"role": "assistant", "content": "Warm."},
        {"role": "assistant", "content": "Really."},
        {"role": "user", "content": "And Bonn?"},
    ]
    calls = ('{"name": "weather", "arguments": {"city": "Ulm"}}', '{"name": "weather", "arguments": {}}')
    written = "".join(f"<tool_call>{call}</tool_call>" for call in calls)
    assert prompt(input=items, instructions="Obey.") == (
        f"[system: Obey.][system: Be brief.][user: Ulm?][assistant (Hm.): Let me see.{written}]"
        "[tool: warm][assistant: Warm.][assistant: Really.][user: And Bonn?]"
    )


def test_the_effort_is_that_of_a_chat() -> None:
    template = ChatTemplate("Effort: {{ reasoning_effort }}", {}, "the test")
    body = {"model": "tiny", "input": "Hi", "reasoning": {"effort": "low", "summary": "auto"}}
    request = parse_responses(body, dataclasses.replace(CONTEXT, template=template))
    assert Bytes().decode(request.prompts[0]) == "Effort: low"  # type: ignore[arg-type]


def test_a_call_as_openai_s_client_parsed_it_may_be_sent_back() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Ulm"}'}
    parsed = {**call, "parsed_arguments": {"city": "Ulm"}, "novel": None}
    assert prompt(input=[parsed]) == prompt(input=[call])


def test_an_item_whose_type_is_null_is_a_message() -> None:
    """As OpenAI's client writes an EasyInputMessage that was made without a type."""
    message = {"role": "user", "content": "Ulm?"}
    assert prompt(input=[{**message, "type": None, "phase": None}]) == prompt(input=[message])


def test_the_same_chat_is_the_same_request() -> None:
    fields: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "seed": 3, "top_k": 5}
    response = asked(tools=[TOOL], tool_choice={"type": "function", "name": "weather"}, max_output_tokens=9, **fields)
    nested = {"type": "function", "function": {key: value for key, value in TOOL.items() if key != "type"}}
    choice = {"type": "function", "function": {"name": "weather"}}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "tools": [nested], "tool_choice": choice}
    chat = parse_chat({**body, "max_tokens": 9, **fields}, CONTEXT)
    assert (response.prompts, response.params) == (chat.prompts, chat.params)
    form = {"type": "json_schema", "name": "n", "schema": PARAMETERS, "strict": True}
    assert asked(text={"format": form}).params.grammar == asked(text={"format": form}).params.grammar is not None
    assert asked(text={"format": {"type": "text"}}).params.grammar is None


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_thinking_then_text_then_calls(stream: bool) -> None:
    call = '{"name": "weather", "arguments": {"city": "Ulm"}}'
    text = f"<think>\nHm.\n</think>\n\nLet me see.\n<tool_call>\n{call}\n</tool_call>"
    found = answered(text, tools=[TOOL], stream=stream)
    response = found[-1].response if stream else found
    thinking, message, function = response.output
    assert (thinking.type, thinking.content[0].text) == ("reasoning", "Hm.")
    assert (message.type, message.content[0].text) == ("message", "Let me see.")
    assert (function.type, function.name, json.loads(function.arguments)) == (
        "function_call",
        "weather",
        {"city": "Ulm"},
    )
    assert response.status == message.status == function.status == "completed"
    assert (response.usage.input_tokens, response.usage.input_tokens_details.cached_tokens) == (7, 2)
    assert response.store is False


def test_a_call_has_an_id_that_the_template_takes_back() -> None:
    template = ChatTemplate("[TOOL_CALLS]{{ tools }}", {}, "the test")  # Mistral's, which insist on 9 characters
    context = dataclasses.replace(CONTEXT, template=template, new_id=lambda: "0123456789abcdef")
    request = parse_responses({"model": "tiny", "input": "Hi", "tools": [TOOL]}, context)
    text = '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Ulm"}}]'
    (call,) = json.loads(request.write_end([Completion(text, (1,), "stop")]))["output"]
    assert (call["type"], call["call_id"]) == ("function_call", "012345678")


def test_a_stream_event_by_event() -> None:
    events = answered("yo", stream=True, step=1, store=True)
    assert [event.type.removeprefix("response.") for event in events] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done", "completed"),
    ]
    assert [event.delta for event in events[4:6]] == ["y", "o"]
    assert events[2].item.status == "in_progress"
    assert events[2].item.content == []
    assert events[0].response.output == []
    assert events[0].response.usage is None


def test_an_answer_that_is_cut_off_is_incomplete() -> None:
    found = answered("yo", "length")
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert found.output[0].status == "incomplete"
    assert answered("yo", "length", stream=True)[-1].type == "response.incomplete"


def test_an_empty_answer_is_an_empty_message() -> None:
    assert answered("").output_text == ""
    assert answered("", stream=True)[-1].response.output[0].content[0].text == ""


def test_a_failure_in_a_stream_is_an_event() -> None:
    request = asked(stream=True)
    request.write_delta(0, Delta("y", (1,)))
    text = request.write_error(RequestError("its time was up", "timeout_s", "timeout", 504))
    event = EVENT.validate_json(text.strip().split("\n")[1].removeprefix("data: "))
    assert (event.type, event.message, event.code) == ("error", "its time was up", "timeout")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": "x" * 3000}, "input"),
        ({"input": [5]}, "input.0"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0.type"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]}, "input.0.arguments"),
        ({"input": [{"type": "function_call", "call_id": "a b", "name": "f", "arguments": ""}]}, "input.0.call_id"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"messages": []}, "messages"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "no"}}, "tool_choice.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "regex"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"model": "gpt-4o"}, "model"),
        # What the answer quotes has to be JSON again.
        ({"user": "\ud800"}, "user"),
        ({"metadata": {"\ud800": "a"}}, "metadata"),
        ({"metadata": {"a": 5}}, "metadata"),
        ({"metadata": "a"}, "metadata"),
        ({"user": 5}, "user"),
        ({"reasoning": {"summary": functools.reduce(lambda inner, _: [inner], range(300), [])}}, "reasoning"),
        ({"reasoning": {"summary": math.inf}}, "reasoning"),
        ({"text": {"format": {"type": "text", "name": "\udfff"}}}, "text"),
        ({"tools": [{**TOOL, "parameters": {"a": -math.inf}}]}, "tools"),
    ],
    ids=lambda v: json.dumps(v)[:60],
)
def test_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        asked(**fields)
    assert caught.value.param == param


def test_an_unknown_field_of_a_function_is_told_where_it_is() -> None:
    with pytest.raises(RequestError, match=r"^tools\.0: unknown field 'novel'"):
        asked(tools=[{**TOOL, "novel": True}])
