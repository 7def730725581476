"""What OpenAI's two ways to generate have in common: the server's facts, ids, usage, events, the list of models.

Format: https://platform.openai.com/docs/api-reference; streams are server-sent events.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from gpt_fast.errors import RequestError
from gpt_fast.fields import show
from gpt_fast.outputs import Completion, Delta
from gpt_fast.params import SamplingParams
from gpt_fast.serve.protocol.request import (
    WRITTEN,
    WireRequest,
    draft_counts,
    error_body,
    finite,
    stream_json,
    token_counts,
)
from gpt_fast.tokenizer import Tokenizer
from gpt_fast.tokenizer.chat import ChatTemplate
from gpt_fast.tokenizer.chat_formats import Dialect, find_dialect
from gpt_fast.tokenizer.chat_prompt import FALLBACK, special_names

_DONE = "data: [DONE]\n\n"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenAIContext:
    """What the protocol needs to know about the server. Made once, when the model is loaded."""

    models: tuple[str, ...]  # the names that requests may use
    max_model_len: int  # tokens of prompt and answer together
    tokenizer: Tokenizer | None = None
    template: ChatTemplate | None = None
    tool_template: ChatTemplate | None = None  # for requests with tools, if the checkpoint has another one for them
    default_temperature: float = 1.0  # as OpenAI documents it; a checkpoint's generation_config.json knows better
    max_sequences: int = 256  # prompts times n of one request; the default: where any number may wait
    created: int = field(default_factory=lambda: int(time.time()))  # the models' date, unix seconds
    clock: Callable[[], float] = time.time
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex

    def __post_init__(self) -> None:
        if self.tokenizer is not None and self.template is not None:
            special_names(self.tokenizer)  # slow the first time
        elif self.tokenizer is not None:
            log.warning("the checkpoint has no chat template: v1/chat/completions uses plain lines (%s)", FALLBACK)

    @cached_property
    def dialect(self) -> Dialect:
        """How the checkpoint writes tool calls and thinking."""
        return find_dialect(None if self.template is None else self.template.source)

    def with_tools(self, tools: Sequence[object]) -> OpenAIContext:
        """As it is for a request with ``tools``, which may be none."""
        return self._of_tools if tools and self.tool_template is not None else self

    @cached_property
    def _of_tools(self) -> OpenAIContext:
        return replace(self, template=self.tool_template, tool_template=None)

    def check_model(self, model: str) -> None:
        """Refuse a model that is not served: 404."""
        if model not in self.models:
            message = f"the model {show(model)} does not exist here; served: {', '.join(map(repr, self.models))}"
            raise RequestError(message, "model", "model_not_found", 404)

    def fitted(self, prompt: list[int], given: Mapping[str, Any], params: SamplingParams, param: str) -> list[int]:
        """``prompt``, the field ``param``, or of it the end that ``truncate_prompt_tokens`` leaves; -1 leaves room for
        the answer. Raises RequestError for a prompt without room behind it, and for more new tokens than fit."""
        most = given.get("truncate_prompt_tokens")
        if most is not None:
            prompt = prompt[-(most if most > 0 else max(1, self.max_model_len - (params.max_tokens or 1))) :]
        asked_as = next((name for name in WRITTEN["max_tokens"] if name in given), None)
        asked = params.max_tokens if asked_as else None
        room = self.max_model_len - len(prompt)
        if room >= (asked or 1):
            return prompt
        have = f"the context has room for {self.max_model_len} tokens, and the prompt takes {len(prompt)}"
        if room > 0:
            message = f"{have}, which leaves {room}, not the {asked} of {asked_as}"
            raise RequestError(message, asked_as, "context_length_exceeded")
        raise RequestError(f"{have}, which leaves none for an answer", param, "context_length_exceeded")

    def check_count(self, num_prompts: int, n: int, param: str) -> None:
        """Refuse a request that would take the whole queue."""
        if num_prompts * n > self.max_sequences:
            asked = f"{num_prompts} prompts with {n} samples of each are {num_prompts * n} sequences"
            message = f"{asked}; one request may have at most {self.max_sequences} here"
            raise RequestError(message, param if num_prompts > 1 else "n")

    def model_facts(self, name: str) -> dict[str, Any]:
        """The answer to ``GET v1/models/<name>``: OpenAI's fields, vLLM's ``max_model_len``, and where chats get their
        format from, null where there are none. Raises RequestError, 404."""
        self.check_model(name)
        template = None if self.tokenizer is None else FALLBACK if self.template is None else "checkpoint"
        facts = {"id": name, "object": "model", "created": self.created, "owned_by": "gpt-fast"}
        return {**facts, "max_model_len": self.max_model_len, "chat_template": template}


class OpenAIRequest(WireRequest):
    """What the two kinds of requests share; each fills in how a choice looks."""

    prompts: Sequence[list[int]]
    _stream_type = "text/event-stream; charset=utf-8"
    _prefix: str  # of the id
    _object: str
    _chunk_object: str

    def __init__(
        self, given: dict[str, Any], prompts: Sequence[list[int]], params: SamplingParams, context: OpenAIContext
    ) -> None:
        super().__init__(given, prompts, params, given.get("stream", False))
        self.context = context
        self.id = self._prefix + context.new_id()
        self.created = int(context.clock())
        self._counts_drafts: bool = given.get("draft_counts", False)
        self._returns_origins: bool = given.get("return_origins", False)
        self._returns_ids: bool = given.get("return_token_ids", False)
        self._options: dict[str, Any] = dict(given.get("stream_options", {}))
        if self._counts_drafts:
            self._options["include_usage"] = True
        self._begun: set[int] = set()  # sequences that have been streamed from
        self._num_new = 0  # tokens streamed so far, of all sequences

    @abstractmethod
    def _chunks(self, index: int, delta: Delta, first: bool) -> list[dict[str, Any]]:
        """The choice of each event that tells ``delta``, the ``first`` of its sequence or a later one."""

    @abstractmethod
    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        """The choice of an answer in one piece."""

    def write_delta(self, index: int, delta: Delta) -> str:
        first = index not in self._begun
        self._begun.add(index)
        self._num_new += len(delta.token_ids)
        counted = self._options.get("continuous_usage_stats")
        usage = token_counts(sum(map(len, self.prompts)), self._num_new) if counted else None
        choices = self._chunks(index, delta, first)
        if first and choices and self._returns_origins:
            choices[0]["prompt_tokens"] = self._prompt_tokens(index, delta.num_cached_tokens)
        if choices and self._returns_ids:
            choices[0] |= self._ids(index, delta, first)
        return "".join(self._event([choice], usage) for choice in choices)

    def write_end(self, completions: Sequence[Completion]) -> str:
        # A prompt counts once, however many samples are drawn from it.
        firsts = completions[:: self.params.n]
        num_new = sum(len(completion.token_ids) for completion in completions)
        usage = token_counts(sum(completion.num_prompt_tokens for completion in firsts), num_new)
        usage["prompt_tokens_details"] = {"cached_tokens": sum(completion.num_cached_tokens for completion in firsts)}
        if self._counts_drafts:
            usage |= draft_counts(completions)
        if self.stream:
            return (self._event([], usage) if self._options.get("include_usage") else "") + _DONE
        choices = [self._choice(i, done) | self._ids(i, done) for i, done in enumerate(completions)]
        if self._returns_origins:
            for i, completion in enumerate(completions):
                choices[i]["prompt_tokens"] = self._prompt_tokens(i, completion.num_cached_tokens)
        if "prompt_logprobs" in self.given:
            for i, completion in enumerate(completions):
                choices[i]["prompt_logprobs"] = self._of_prompt(completion)
        return json.dumps(self._frame(self._object, choices) | {"usage": usage}, ensure_ascii=False) + "\n"

    def write_error(self, error: RequestError) -> str:
        return f"data: {error_body(error).strip()}\n\n{_DONE}"

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> str:
        chunk = self._frame(self._chunk_object, choices)
        if any(self._options.values()):
            chunk["usage"] = usage
        return f"data: {stream_json(chunk)}\n\n"

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.given["model"]}
        return {**head, "system_fingerprint": None, "choices": choices}

    def _prompt(self, index: int) -> Sequence[int]:
        """The prompt of sequence ``index``."""
        return self.prompts[index // self.params.n]

    def _prompt_tokens(self, index: int, num_cached: int) -> list[dict[str, Any]]:
        """For ``return_origins``: the prompt's tokens, each with its name, its bytes, and whether its keys and values
        were found in the prefix cache."""
        return [
            {
                "token": self._token_name(token).decode(errors="replace"),
                "bytes": list(self._token_bytes(token) or b""),
                "origin": "cached" if i < num_cached else "computed",
            }
            for i, token in enumerate(self._prompt(index))
        ]

    def _ids(self, index: int, part: Delta | Completion, first: bool = True) -> dict[str, Any]:
        """For ``return_token_ids``: those of ``part``, and beside the ``first`` of a sequence those of its prompt."""
        if not self._returns_ids:
            return {}
        return {"token_ids": list(part.token_ids)} | ({"prompt_token_ids": list(self._prompt(index))} if first else {})

    def _of_prompt(self, completion: Completion) -> list[dict[str, Any] | None]:
        """For ``prompt_logprobs``, as vLLM writes them: {token id: its numbers} for each place. Of a token that is not
        among the likeliest the rank is not known."""
        places: list[dict[str, Any] | None] = []
        for entry in completion.prompt_logprobs or ():
            if entry is None:
                places.append(None)
                continue
            ranked: dict[int, tuple[float, int | None]] = {}
            ranked |= {token: (logprob, rank) for rank, (token, logprob) in enumerate(entry.top, 1)}
            ranked.setdefault(entry.token, (entry.logprob, None))
            places.append({str(token): self._ranked(token, *numbers) for token, numbers in ranked.items()})
        return places

    def _ranked(self, token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        name = self._token_name(token).decode(errors="replace")
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": name}

    def _origins(self, part: Delta | Completion, count: int) -> Sequence[str | None]:
        """Where each of the ``count`` tokens of ``part`` came from; None where nobody asked."""
        return (part.origins or ("plain",) * count) if self._returns_origins else (None,) * count

    def _token_bytes(self, token: int, skip_special: bool = True) -> bytes | None:
        """What ``token`` adds to the text; of a special token nothing, or its name; None for an id without a text."""
        tokenizer = self.context.tokenizer
        if tokenizer is None or not 0 <= token < tokenizer.vocab_size:
            return None
        return tokenizer.token_bytes(token, skip_special)

    def _token_name(self, token: int) -> bytes:
        """The bytes that stand for ``token`` in a list of tokens."""
        name = None
        if not self.given.get("return_tokens_as_token_ids"):
            name = self._token_bytes(token, skip_special=False)
        return b"token_id:%d" % token if name is None else name


def choice_of(index: int, content: dict[str, Any], logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
    """An entry of ``choices``."""
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}
