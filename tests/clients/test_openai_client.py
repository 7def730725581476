"""OpenAI's own client: completions, chat, responses, models, with the fields of vLLM's server as extra_body."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

MESSAGES: Any = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Tell me of a cat."}]
AGE = {"type": "integer", "minimum": 0, "maximum": 20}
PET = {"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}, "age": AGE}}
SCHEMA: Any = {**PET, "required": ["kind", "age"], "additionalProperties": False}
MODEL = "gpt-fast"


@pytest.fixture(scope="module")
def client(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)


def test_models(client: openai.OpenAI) -> None:
    names = [model.id for model in client.models.list()]
    assert MODEL in names
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")


def test_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt=["Once", "The dog"], n=2, max_tokens=8, seed=1)
    assert len(whole.choices) == 4
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 32
    asked: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 20, "temperature": 0}
    text = client.completions.create(**asked).choices[0].text
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.completions.create(**asked, stream=True, stream_options=options))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20
    scored = client.completions.create(model=MODEL, prompt="Once upon", max_tokens=0, echo=True, logprobs=1).choices[0]
    assert scored.text == "Once upon"
    assert scored.logprobs is not None
    assert scored.logprobs.token_logprobs is not None
    assert scored.logprobs.token_logprobs[0] is None


def test_vllms_fields(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time", "temperature": 0}

    def complete(max_tokens: int = 16, **extra: Any) -> Any:
        return client.completions.create(**asked, max_tokens=max_tokens, extra_body=extra).choices[0]

    free = complete(return_token_ids=True)
    assert len(free.token_ids) == 16
    word = free.text.split()[1]
    assert word not in complete(bad_words=[word]).text.split()
    few = free.token_ids[:3]
    assert set(complete(allowed_token_ids=few, return_token_ids=True).token_ids) <= set(few)
    assert complete(guided_choice=["red", "blue"]).text in ("red", "blue")
    assert complete(structured_outputs={"regex": "[a-c]{4}"}, max_tokens=40).text.strip("abc") == ""
    assert complete(guided_grammar='root ::= "yes" | "no"').text in ("yes", "no")
    assert complete(stop=[word], include_stop_str_in_output=True).text.endswith(word)
    cut = complete(truncate_prompt_tokens=2, return_token_ids=True, prompt_logprobs=1)
    assert cut.prompt_token_ids == free.prompt_token_ids[-2:]
    assert cut.prompt_logprobs[0] is None
    assert str(cut.prompt_token_ids[1]) in cut.prompt_logprobs[1]
    with pytest.raises(openai.BadRequestError, match="priority"):
        complete(priority=1)


def test_chat(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 12}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2, store=True, user="me").choices[0]
    assert whole.logprobs is not None
    assert len(whole.logprobs.content or []) == 12
    chunks = client.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    begun = [*MESSAGES, {"role": "assistant", "content": "The cat is"}]
    more = client.chat.completions.create(
        **{**asked, "messages": begun}, extra_body={"continue_final_message": True, "add_generation_prompt": False}
    )
    assert more.choices[0].message.content


def test_a_schema_and_a_tool(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=form, temperature=0)
    assert set(json.loads(answer.choices[0].message.content or "")) == {"kind", "age"}
    tools: Any = [{"type": "function", "function": {"name": "adopt", "parameters": SCHEMA}}]
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, tools=tools, tool_choice="required", parallel_tool_calls=False, temperature=0
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls is not None
    assert set(json.loads(message.tool_calls[0].function.arguments)) == {"kind", "age"}


def test_responses(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 12}
    whole = client.responses.create(**asked, input="Tell me of a cat.", instructions="Be kind.")
    assert whole.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage is not None
    assert whole.usage.output_tokens == 12
    events = list(client.responses.create(**asked, input=MESSAGES, stream=True))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    form: Any = {"format": {"type": "json_schema", "name": "pet", "schema": SCHEMA, "strict": True}}
    with client.responses.stream(model=MODEL, input="A pet?", text=form, temperature=0) as stream:
        final = stream.get_final_response()
    assert final.status == "completed"
    assert set(json.loads(final.output_text)) == {"kind", "age"}
    with pytest.raises(openai.BadRequestError, match="keeps no answers"):
        client.responses.create(**asked, input="a", previous_response_id=whole.id)


def test_responses_call_functions(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "name": "adopt", "parameters": SCHEMA, "strict": True}]
    asked: dict[str, Any] = {"model": MODEL, "tools": tools, "parallel_tool_calls": False, "temperature": 0}
    (call,) = client.responses.create(**asked, input="A pet?", tool_choice="required").output
    assert call.type == "function_call"
    assert set(json.loads(call.arguments)) == {"kind", "age"}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "It likes you."}
    turns = [{"role": "user", "content": "A pet?"}, call.model_dump(), result]
    assert client.responses.create(**asked, input=turns, tool_choice="none", max_output_tokens=9).output_text
    choice: Any = {"type": "function", "name": "adopt"}
    events = list(client.responses.create(**asked, input="A pet?", tool_choice=choice, stream=True))
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert events[-1].type == "response.completed"
    assert "".join(pieces) == events[-1].response.output[0].arguments  # type: ignore[union-attr]
