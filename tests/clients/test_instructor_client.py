"""instructor: a pydantic model out of a chat, by schema, by JSON and by tools."""

from __future__ import annotations

from typing import Any, Literal

import instructor
import openai
import pytest
from pydantic import BaseModel, Field

MESSAGES: Any = [{"role": "user", "content": "Which pet?"}]


class Pet(BaseModel):
    """A pet."""

    kind: Literal["cat", "dog"]
    age: int = Field(ge=0, le=20)


@pytest.mark.parametrize("mode", ["JSON_SCHEMA", "TOOLS", "TOOLS_STRICT"])
def test_a_model_of_pydantic(base_url: str, mode: str) -> None:
    plain = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    client = instructor.from_openai(plain, mode=getattr(instructor.Mode, mode))
    found = client.chat.completions.create(
        model="gpt-fast", messages=MESSAGES, response_model=Pet, max_retries=0, temperature=0, max_tokens=100
    )
    assert isinstance(found, Pet)


def test_json_mode_asks_for_any_object(base_url: str) -> None:
    """The schema is in the prompt alone, and the demo model does not read it: what comes is JSON, of other fields."""
    plain = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode.JSON)
    asked: dict[str, Any] = {"model": "gpt-fast", "messages": MESSAGES, "max_retries": 0, "temperature": 0}
    with pytest.raises(Exception, match="max_tokens length limit"):
        client.chat.completions.create(**asked, response_model=Pet, max_tokens=10)
    held = {"structured_outputs": {"json": Pet.model_json_schema()}, "response_format": None}
    found = client.chat.completions.create(**asked, response_model=Pet, max_tokens=60, extra_body=held)
    assert isinstance(found, Pet)


def test_partial_objects_stream(base_url: str) -> None:
    plain = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    parts = list(
        client.chat.completions.create_partial(
            model="gpt-fast", messages=MESSAGES, response_model=Pet, temperature=0, max_tokens=100
        )
    )
    assert parts[-1].kind in ("cat", "dog")
