"""``POST v1/completions``: prompts in, their continuations out.

A prompt is a string or a list of token ids; several of either make several choices. Tokens in ``logprobs`` are named
as OpenAI does: by their text, and as ``bytes:\\xe2\\x82`` where that is no text. ``text_offset`` counts characters of
the choice's own ``text``. With ``echo``, ``max_tokens`` may be 0: nothing but the prompt, to score it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from gpt_fast.errors import RequestError
from gpt_fast.outputs import Completion, Delta, TokenLogprobs
from gpt_fast.serve.protocol.openai_common import OpenAIContext, OpenAIRequest, choice_of
from gpt_fast.serve.protocol.openai_fields import COMPLETION, read_request
from gpt_fast.serve.protocol.request import Prompt, finite, read_sampling, require
from gpt_fast.tokenizer import IncrementalDetokenizer, Tokenizer

DEFAULT_MAX_TOKENS = 16  # as OpenAI documents it


class CompletionRequest(OpenAIRequest):
    """A completion request that is understood. ``echoes``: what is put in front of each prompt's completions."""

    _prefix = "cmpl-"
    _object = _chunk_object = "text_completion"

    def __init__(self, *facts: Any, echoes: Sequence[str], scores_only: bool) -> None:
        super().__init__(*facts)
        self._echoes, self._scores_only = echoes, scores_only
        if "prompt_logprobs" not in self.given:  # they come as logprobs of the echo, by the tokens' names
            self.least_bytes = 8
        self._offsets: dict[int, _Offsets] = {}  # by sequence

    def write_delta(self, index: int, delta: Delta) -> str:
        if self._scores_only:
            if delta.finish_reason is None:
                return ""
            delta = Delta("", (), "length", delta.completion)
        return super().write_delta(index, delta)

    def write_end(self, completions: Sequence[Completion]) -> str:
        if self._scores_only:  # one token was generated all the same: the engine ends a request with a token
            nothing: dict[str, Any] = {"text": "", "token_ids": (), "finish_reason": "length", "logprobs": None}
            nothing["origins"] = ()
            completions = [dataclasses.replace(completion, **nothing) for completion in completions]
        return super().write_end(completions)

    def _chunks(self, index: int, delta: Delta, first: bool) -> list[dict[str, Any]]:
        text = (self._echo(index) if first else "") + delta.text
        if not (text or delta.logprobs or delta.finish_reason or (self._returns_ids and delta.token_ids)):
            return []
        logprobs = self._logprobs(index, delta)
        return [choice_of(index, {"text": text}, logprobs, delta.finish_reason)]

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        logprobs = self._logprobs(index, completion)
        if logprobs is not None and completion.prompt_logprobs is not None and self.given.get("echo"):
            front = self._prompt_logprobs(index, completion)
            logprobs = {name: front[name] + logprobs[name] for name in front}
        return choice_of(index, {"text": self._echo(index) + completion.text}, logprobs, completion.finish_reason)

    def _echo(self, index: int) -> str:
        return self._echoes[index // self.params.n]

    def _logprobs(self, index: int, part: Delta | Completion) -> dict[str, list[Any]] | None:
        """Of the next tokens of sequence ``index``."""
        if self.params.logprobs is None:
            return None
        if index not in self._offsets:
            self._offsets[index] = self._offsets_behind(self._prompt(index), len(self._echo(index)))
        entries = part.logprobs or ()
        lists = self._lists(self._offsets[index], entries)
        if self._returns_origins:
            lists["origins"] = list(self._origins(part, len(entries)))
        return lists

    def _offsets_behind(self, prompt: Sequence[int], start: int) -> _Offsets:
        tokenizer = self.context.tokenizer
        shown: Collection[int] = ()
        if tokenizer is not None and not self.params.skip_special_tokens:
            shown = tokenizer.special
        return _Offsets(tokenizer, prompt, start, shown, self.params.grammar_field is not None)

    def _prompt_logprobs(self, index: int, completion: Completion) -> dict[str, list[Any]]:
        entries = completion.prompt_logprobs or ()
        # Nothing predicts the first token; it has a place in the lists, and null for its numbers.
        first = TokenLogprobs(self._prompt(index)[0], 0.0)
        # Special tokens are not written in an echo, whatever is in the answer behind it.
        offsets = _Offsets(self.context.tokenizer, (), 0, ())
        lists = self._lists(offsets, [entry or first for entry in entries])
        lists["token_logprobs"][0] = lists["top_logprobs"][0] = None
        lists["text_offset"] = [min(offset, len(self._echo(index))) for offset in lists["text_offset"]]
        if self._returns_origins:
            tokens = self._prompt_tokens(index, completion.num_cached_tokens)
            lists["origins"] = [token["origin"] for token in tokens]
        return lists

    def _lists(self, offsets: _Offsets, entries: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in entries:
            name = self._name(entry.token)
            top: dict[str, float] = {}
            for token, logprob in (*entry.top, (entry.token, entry.logprob)):
                top.setdefault(self._name(token), finite(logprob))  # likeliest first: of equal names, that one
            lists["tokens"].append(name)
            lists["token_logprobs"].append(finite(entry.logprob))
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
    """Where each token begins in a text that starts behind ``prompt`` and counts from ``start``. ``shown`` and
    ``every_space``: see IncrementalDetokenizer."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt: Sequence[int],
        start: int,
        shown: Collection[int],
        every_space: bool = False,
    ) -> None:
        self._stream = IncrementalDetokenizer(tokenizer, prompt, shown, every_space)
        self._next = start

    def push(self, token: int) -> int:
        offset = self._next
        self._next += len(self._stream.push(token))
        return offset


def parse_completion(body: Mapping[str, Any], context: OpenAIContext) -> CompletionRequest:
    """``body``, understood. Raises RequestError naming the field that is wrong."""
    given = read_request(body, COMPLETION, context)
    prompts = require(given, "prompt")
    echo, logprobs = given.get("echo", False), given.get("logprobs")
    scores_only = given.get("max_tokens") == 0 and not isinstance(given["max_tokens"], bool)
    if scores_only and not echo:
        raise RequestError("max_tokens 0 needs echo: there would be no answer", "max_tokens")
    if scores_only:
        given["max_tokens"] = 1  # the engine ends a request with a token
    if echo and given.get("stream") and logprobs is not None:
        message = "echo with logprobs cannot be streamed; the prompt's log probabilities come with the whole answer"
        raise RequestError(message, "stream", "unsupported_value")
    of_prompt = given.get("prompt_logprobs")
    if echo and logprobs is not None:
        if of_prompt not in (None, logprobs):
            raise RequestError("prompt_logprobs must equal logprobs beside echo", "prompt_logprobs")
        of_prompt = logprobs
    params = read_sampling(given, DEFAULT_MAX_TOKENS, prompt_logprobs=of_prompt)
    context.check_count(len(prompts), params.n, "prompt")
    whole = [_encode(prompt, context, given.get("add_special_tokens", True)) for prompt in prompts]
    names = ["prompt"] if len(prompts) == 1 else [f"prompt.{i}" for i in range(len(prompts))]
    encoded = [context.fitted(ids, given, params, name) for ids, name in zip(whole, names, strict=True)]
    # A prompt that was cut is echoed as far as it is there.
    kept = [prompts[i] if len(ids) == len(whole[i]) else ids for i, ids in enumerate(encoded)]
    echoes = [_text(prompt, context) if echo else "" for prompt in kept]
    return CompletionRequest(given, encoded, params, context, echoes=echoes, scores_only=scores_only)


def _encode(prompt: Prompt, context: OpenAIContext, bos: bool) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    if context.tokenizer is None:
        raise RequestError("this checkpoint has no tokenizer: prompt must be a list of token ids", "prompt")
    return context.tokenizer.encode(prompt, bos=bos)


def _text(prompt: Prompt, context: OpenAIContext) -> str:
    if isinstance(prompt, str):
        return prompt
    if context.tokenizer is None:
        raise RequestError("echo needs a tokenizer, and this checkpoint has none", "echo")
    return context.tokenizer.decode([token for token in prompt if token < context.tokenizer.vocab_size])
