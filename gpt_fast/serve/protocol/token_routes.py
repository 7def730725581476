"""``POST tokenize`` and ``detokenize``, and ``tokenizer_info``: the vocabulary over HTTP, as vLLM's server gives it.

Clients such as lm-evaluation-harness count and cut their prompts with it, and need no tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpt_fast.errors import RequestError
from gpt_fast.fields import Kind, Text, flag
from gpt_fast.serve.protocol.chat_messages import chat_prompt
from gpt_fast.serve.protocol.openai_common import OpenAIContext
from gpt_fast.serve.protocol.openai_fields import MESSAGES
from gpt_fast.serve.protocol.request import Prompt, read_fields, read_prompt, require
from gpt_fast.tokenizer import Tokenizer


def _tokens(value: Any, name: str) -> Prompt:
    """The kind of ``tokens``: unlike a prompt's, they may be none, as those of an empty text are."""
    return [] if value == [] else read_prompt(value, name)


TOKENIZE: dict[str, Kind] = {
    **MESSAGES,
    "model": Text(),
    "prompt": Text(),
    **dict.fromkeys(("add_special_tokens", "return_token_strs"), flag),
}
DETOKENIZE: dict[str, Kind] = {"model": Text(), "tokens": _tokens}


def tokenize(body: Mapping[str, Any], context: OpenAIContext) -> dict[str, Any]:
    """The token ids of ``prompt``, or of ``messages``. Names of special tokens in the prompt are those tokens, which is
    how clients learn their ids; v1/completions takes them for text. Raises RequestError naming the field."""
    given, tokenizer = _read(body, TOKENIZE, context)
    if ("prompt" in given) == ("messages" in given):
        raise RequestError("give prompt or messages, one of the two", "prompt")
    if "prompt" in given:
        bos = given.get("add_special_tokens", True)
        tokens = tokenizer.encode(given["prompt"], bos=bos, allow_special=True)
    else:
        tools = given.get("tools", [])
        tokens = chat_prompt(given, context.with_tools(tools), tools)[1]
    names = None
    if given.get("return_token_strs"):
        names = [tokenizer.token_bytes(token, skip_special=False).decode(errors="replace") for token in tokens]
    return {"count": len(tokens), "max_model_len": context.max_model_len, "tokens": tokens, "token_strs": names}


def detokenize(body: Mapping[str, Any], context: OpenAIContext) -> dict[str, Any]:
    """The text of ``tokens``. Raises RequestError naming the field."""
    given, tokenizer = _read(body, DETOKENIZE, context)
    tokens = require(given, "tokens")
    if isinstance(tokens, str):
        raise RequestError("tokens must be a list of token ids, not a string", "tokens", "invalid_type")
    if wrong := next((token for token in tokens if token >= tokenizer.vocab_size), None):
        raise RequestError(f"tokens: {wrong} is not below {tokenizer.vocab_size}, the size of the vocabulary", "tokens")
    return {"prompt": tokenizer.decode(tokens, skip_special=False)}


def tokenizer_info(context: OpenAIContext) -> dict[str, Any]:
    """What clients that make prompts themselves ask for. Raises RequestError, 404, where there is no tokenizer."""
    tokenizer = context.tokenizer
    if tokenizer is None:
        raise RequestError("this checkpoint has no tokenizer", None, "not_found", 404)
    end = tokenizer.eos_token_ids[0] if tokenizer.eos_token_ids else None
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": context.max_model_len,
        "bos_token": _special(tokenizer, tokenizer.bos_token_id),
        "eos_token": _special(tokenizer, end),
        "chat_template": None if context.template is None else context.template.source,
    }


def _special(tokenizer: Tokenizer, token: int | None) -> str | None:
    return None if token is None else tokenizer.token_bytes(token, skip_special=False).decode(errors="replace")


def _read(
    body: Mapping[str, Any], kinds: Mapping[str, Kind], context: OpenAIContext
) -> tuple[dict[str, Any], Tokenizer]:
    given = read_fields(body, kinds, "unknown_parameter")
    context.check_model(given.get("model", context.models[0]))
    if context.tokenizer is None:
        raise RequestError("this checkpoint has no tokenizer", None, "unsupported_value")
    return given, context.tokenizer
