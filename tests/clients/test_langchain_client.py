"""langchain-openai: invoke, stream, batch, structured output and tools, by chat and by responses."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from langchain_openai import ChatOpenAI, OpenAI
from openai import LengthFinishReasonError
from pydantic import BaseModel, Field

PROMPT = "Tell me of a cat."


class Pet(BaseModel):
    """A pet."""

    kind: Literal["cat", "dog"]
    age: int = Field(ge=0, le=20)


def adopt(kind: Literal["cat", "dog"]) -> str:
    """Adopt a pet."""
    return f"You have a {kind}."


def chat(base_url: str, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(model="gpt-fast", base_url=base_url, api_key="none", temperature=0, max_retries=0, **more)


@pytest.mark.parametrize("responses", [False, True])
def test_invoke_stream_batch(base_url: str, responses: bool) -> None:
    model = chat(base_url, max_tokens=12, use_responses_api=responses)
    text = model.invoke(PROMPT).text
    assert text
    assert "".join(chunk.text for chunk in model.stream(PROMPT)) == text
    assert [answer.text for answer in model.batch([PROMPT, PROMPT])] == [text, text]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(base_url: str, method: Any) -> None:
    found = chat(base_url).with_structured_output(Pet, method=method).invoke(PROMPT)
    assert isinstance(found, Pet)


def test_json_mode(base_url: str) -> None:
    """It holds the answer to JSON, not to the fields, and the demo model does not end what it begins."""
    model = chat(base_url, max_tokens=40).with_structured_output(Pet, method="json_mode")
    with pytest.raises(LengthFinishReasonError) as caught:
        model.invoke(PROMPT)
    assert str(caught.value.completion.choices[0].message.content).startswith("{")


def test_tools(base_url: str) -> None:
    model = chat(base_url).bind_tools([adopt], tool_choice="adopt")
    (call,) = model.invoke(PROMPT).tool_calls
    assert call["name"] == "adopt"
    assert call["args"]["kind"] in ("cat", "dog")
    assert chat(base_url, max_tokens=12).bind_tools([adopt]).invoke(PROMPT).response_metadata["finish_reason"]


def test_completions(base_url: str) -> None:
    assert OpenAI(model="gpt-fast", base_url=base_url, api_key="none", max_tokens=8).invoke("Once upon a time")
