"""``POST v1/completions``: prompts in, their continuations out.

A prompt is a string or a list of token ids; several of either make several choices. Tokens in ``logprobs`` are named
as OpenAI does: by their text, and as ``bytes:\\xe2\\x82`` where that is no text. ``text_offset`` counts characters of
the choice's own ``text``. With ``echo``, ``max_tokens`` may be 0: nothing but the prompt, to score it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from gpt_fast.errors import RequestError
from gpt_fast.outputs import Completion, Delta, TokenLogprobs
from gpt_fast.serve.protocol.openai_common import OpenAIContext, OpenAIRequest, check_count, check_length, finite
from gpt_fast.serve.protocol.openai_fields import COMPLETION, read_params, read_request, require
from gpt_fast.tokenizer import IncrementalDetokenizer, Tokenizer

DEFAULT_MAX_TOKENS = 16  # as OpenAI documents it
Prompt = str | list[int]


class CompletionRequest(OpenAIRequest):
    """A completion request that is understood. ``echoes``: what is put in front of each prompt's completions."""

    _prefix = "cmpl-"
    _object = "text_completion"
    _chunk_object = "text_completion"

    def __init__(self, *facts: Any, echoes: Sequence[str] | None, scores_only: bool) -> None:
        super().__init__(*facts)
        self._echoes, self._scores_only = echoes, scores_only
        self._streamed: dict[int, _Offsets | None] = {}  # the sequences that have begun

    def write_delta(self, index: int, delta: Delta) -> str:
        if self._scores_only:
            if delta.finish_reason is None:
                return ""
            delta = Delta("", (), "length", delta.completion)
        return super().write_delta(index, delta)

    def write_end(self, completions: Sequence[Completion]) -> str:
        if self._scores_only:  # one token was generated all the same: the engine ends a request with a token
            nothing: dict[str, Any] = {"text": "", "token_ids": (), "finish_reason": "length"}
            nothing["logprobs"] = None if self.params.logprobs is None else ()
            completions = [dataclasses.replace(completion, **nothing) for completion in completions]
        return super().write_end(completions)

    def _chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        text = delta.text
        if index not in self._streamed:
            text = self._echo(index) + text
            self._streamed[index] = self._offsets(index) if self._wants_logprobs else None
        if not (text or delta.logprobs or delta.finish_reason):
            return []
        offsets = self._streamed[index]
        logprobs = None if offsets is None else self._logprobs(offsets, delta.logprobs)
        return [_choice(index, text, logprobs, delta.finish_reason)]

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        echo = self._echo(index)
        logprobs = None
        if self._wants_logprobs:
            logprobs = self._logprobs(self._offsets(index), completion.logprobs or ())
            if completion.prompt_logprobs is not None:
                front = self._prompt_logprobs(index, completion.prompt_logprobs, len(echo))
                logprobs = {name: front[name] + logprobs[name] for name in front}
        return _choice(index, echo + completion.text, logprobs, completion.finish_reason)

    def _prompt(self, index: int) -> list[int]:
        return self.prompts[index // self.params.n]

    def _echo(self, index: int) -> str:
        return self._echoes[index // self.params.n] if self._echoes is not None else ""

    def _offsets(self, index: int) -> _Offsets:
        return _Offsets(self.context.tokenizer, self._prompt(index), len(self._echo(index)))

    def _prompt_logprobs(
        self, index: int, entries: Sequence[TokenLogprobs | None], length: int
    ) -> dict[str, list[Any]]:
        offsets = _Offsets(self.context.tokenizer, (), 0, length)
        prompt = self._prompt(index)
        # Nothing predicts the first token; it has a place in the lists, and null for its numbers.
        known = [entry or TokenLogprobs(prompt[i], 0.0) for i, entry in enumerate(entries)]
        lists = self._logprobs(offsets, known)
        for i, entry in enumerate(entries):
            if entry is None:
                lists["token_logprobs"][i] = lists["top_logprobs"][i] = None
        return lists

    def _logprobs(self, offsets: _Offsets, entries: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in map(finite, entries):
            name = self._name(entry.token)
            top: dict[str, float] = {}
            for token, logprob in (*entry.top, (entry.token, entry.logprob)):
                top.setdefault(self._name(token), logprob)  # likeliest first: of equal names, that one
            lists["tokens"].append(name)
            lists["token_logprobs"].append(entry.logprob)
            lists["top_logprobs"].append(top)
            lists["text_offset"].append(offsets.push(entry.token))
        return lists

    def _name(self, token: int) -> str:
        name = self._token_name(token)
        try:
            return name.decode()
        except UnicodeDecodeError:
            # Two halves of characters must not get one name: they are keys of top_logprobs.
            return "bytes:" + "".join(f"\\x{value:02x}" for value in name)


class _Offsets:
    """Where each token begins in a text that starts behind ``prompt`` and counts from ``start``, at most ``end``."""

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int], start: int, end: int | None = None) -> None:
        self._stream = IncrementalDetokenizer(tokenizer, prompt)
        self._next = start
        self._end = end

    def push(self, token: int) -> int:
        offset = self._next
        self._next += len(self._stream.push(token))
        return offset if self._end is None else min(offset, self._end)


def parse_completion(body: Mapping[str, Any], context: OpenAIContext) -> CompletionRequest:
    """``body``, understood. Raises RequestError naming the field that is wrong."""
    given = read_request(body, COMPLETION, context.models)
    prompts = require(given, "prompt")
    echo = given.get("echo", False)
    num_new = given.get("max_tokens")
    scores_only = num_new == 0 and not isinstance(num_new, bool)
    if scores_only and not echo:
        raise RequestError("max_tokens 0 needs echo: there would be no answer", "max_tokens")
    logprobs = given.get("logprobs")
    if echo and given.get("stream") and logprobs is not None:
        message = "echo with logprobs cannot be streamed; the prompt's log probabilities come with the whole answer"
        raise RequestError(message, "stream", "unsupported_value")
    params = read_params(
        given,
        DEFAULT_MAX_TOKENS,
        context.default_temperature,
        max_tokens=1 if scores_only else num_new,
        prompt_logprobs=logprobs if echo else None,
    )
    check_count(len(prompts), params.n, context, "prompt")
    echoes = [_text(prompt, context) for prompt in prompts] if echo else None
    encoded = [_encode(prompt, context) for prompt in prompts]
    for i, ids in enumerate(encoded):
        path = "prompt" if len(prompts) == 1 else f"prompt.{i}"
        check_length(ids, params.max_tokens if num_new else None, context, path, "max_tokens")
    return CompletionRequest(given, encoded, params, context, echoes=echoes, scores_only=scores_only)


def _choice(index: int, text: str, logprobs: dict[str, list[Any]] | None, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _encode(prompt: Prompt, context: OpenAIContext) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    if context.tokenizer is None:
        raise RequestError("this checkpoint has no tokenizer: prompt must be a list of token ids", "prompt")
    return context.tokenizer.encode(prompt)


def _text(prompt: Prompt, context: OpenAIContext) -> str:
    if isinstance(prompt, str):
        return prompt
    if context.tokenizer is None:
        raise RequestError("echo needs a tokenizer, and this checkpoint has none", "echo")
    size = context.tokenizer.vocab_size
    return context.tokenizer.decode([token for token in prompt if token < size])
