"""litellm, as a client of OpenAI's routes and under its name for vLLM's server."""

from __future__ import annotations

from typing import Any

import litellm
import pytest

MESSAGES = [{"role": "user", "content": "Tell me of a cat."}]


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_chat_whole_and_streamed(base_url: str, provider: str) -> None:
    asked: dict[str, Any] = {"model": f"{provider}/gpt-fast", "api_base": base_url, "api_key": "none"}
    asked |= {"messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    text = litellm.completion(**asked).choices[0].message.content
    assert text
    chunks = litellm.completion(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


def test_completions(base_url: str) -> None:
    asked: dict[str, Any] = {"model": "text-completion-openai/gpt-fast", "api_base": base_url, "api_key": "none"}
    answer = litellm.text_completion(**asked, prompt="Once upon a time", max_tokens=8, temperature=0)
    assert answer.choices[0].text
    assert answer.usage.completion_tokens == 8


def test_a_wrong_field_is_told(base_url: str) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(
            model="openai/gpt-fast", api_base=base_url, api_key="none", messages=MESSAGES, temperature=-1, num_retries=0
        )
