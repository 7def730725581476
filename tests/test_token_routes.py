"""tokenize, detokenize and tokenizer_info: the demo's vocabulary over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpt_fast.errors import RequestError
from gpt_fast.serve.protocol.openai_common import OpenAIContext
from gpt_fast.serve.protocol.token_routes import detokenize, tokenize, tokenizer_info
from gpt_fast.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(Path(__file__).resolve().parents[1] / "model_store" / "demo" / "target")
CONTEXT = OpenAIContext(models=("demo",), max_model_len=512, tokenizer=TOKENIZER)


def test_a_text_and_its_tokens() -> None:
    ids = TOKENIZER.encode("Once upon a time")
    found = tokenize({"model": "demo", "prompt": "Once upon a time", "return_token_strs": True}, CONTEXT)
    assert found == {"count": len(ids), "max_model_len": 512, "tokens": ids, "token_strs": found["token_strs"]}
    assert found["token_strs"][0] == "<s>"
    assert tokenize({"prompt": "Once upon a time", "add_special_tokens": False}, CONTEXT)["tokens"] == ids[1:]
    assert detokenize({"tokens": ids[1:]}, CONTEXT) == {"prompt": "Once upon a time"}
    assert tokenize({"prompt": "</s>", "add_special_tokens": False}, CONTEXT)["tokens"] == list(TOKENIZER.eos_token_ids)
    assert tokenize({"prompt": ""}, CONTEXT)["count"] == 1
    assert tokenize({"prompt": "", "add_special_tokens": False}, CONTEXT)["tokens"] == []
    assert detokenize({"tokens": []}, CONTEXT) == {"prompt": ""}


def test_messages_become_the_prompt_of_a_chat() -> None:
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    shown = TOKENIZER.decode(tokenize({"messages": talk}, CONTEXT)["tokens"])
    assert shown == "user: Hi\nassistant: Yes\nassistant:"
    body = {"messages": talk, "continue_final_message": True}
    assert TOKENIZER.decode(tokenize(body, CONTEXT)["tokens"]) == "user: Hi\nassistant: Yes"


def test_what_clients_ask_of_the_tokenizer() -> None:
    info = tokenizer_info(CONTEXT)
    assert (info["bos_token"], info["eos_token"], info["chat_template"]) == ("<s>", "</s>", None)


@pytest.mark.parametrize(
    ("call", "body", "param"),
    [
        (tokenize, {}, "prompt"),
        (tokenize, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        (tokenize, {"prompt": 5}, "prompt"),
        (tokenize, {"prompt": "a", "model": "no"}, "model"),
        (tokenize, {"prompt": "a", "text": "b"}, "text"),
        (tokenize, {"messages": [{"role": "robot", "content": ""}]}, "messages.0.role"),
        (detokenize, {}, "tokens"),
        (detokenize, {"tokens": "a"}, "tokens"),
        (detokenize, {"tokens": [TOKENIZER.vocab_size]}, "tokens"),
        (detokenize, {"tokens": [-1]}, "tokens.0"),
    ],
)
def test_refused_by_name(call: Any, body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        call(body, CONTEXT)
    assert caught.value.param == param


def test_without_a_tokenizer_there_is_nothing_to_tell() -> None:
    for call in (lambda c: tokenize({"prompt": "a"}, c), lambda c: detokenize({"tokens": [1]}, c), tokenizer_info):
        with pytest.raises(RequestError, match="no tokenizer"):
            call(OpenAIContext(models=("demo",), max_model_len=512))
