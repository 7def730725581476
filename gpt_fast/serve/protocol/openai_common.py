"""What OpenAI's two ways to generate have in common: the server's facts, ids, usage, events, the list of models.

Format: https://platform.openai.com/docs/api-reference; streams are server-sent events.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpt_fast.errors import RequestError
from gpt_fast.outputs import Completion, Delta, TokenLogprobs
from gpt_fast.params import SamplingParams
from gpt_fast.serve.protocol.native import JSON_TYPE, error_body, token_counts
from gpt_fast.serve.protocol.request import SequenceRequest, as_written
from gpt_fast.tokenizer import Tokenizer
from gpt_fast.tokenizer.chat import ChatTemplate
from gpt_fast.tokenizer.chat_prompt import FALLBACK, special_names

EVENT_TYPE = "text/event-stream; charset=utf-8"
_DONE = "data: [DONE]\n\n"
_LEAST_LOGPROB = -9999.0  # OpenAI's word for "very unlikely"; JSON has no infinity

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenAIContext:
    """What the protocol needs to know about the server. Made once, when the model is loaded."""

    models: tuple[str, ...]  # the names that requests may use
    max_model_len: int  # tokens of prompt and answer together
    tokenizer: Tokenizer | None = None
    template: ChatTemplate | None = None
    default_temperature: float | None = None  # of generation_config.json; None: the file has none
    max_sequences: int = 256  # prompts times n of one request
    created: int = field(default_factory=lambda: int(time.time()))  # the models' date, unix seconds
    clock: Callable[[], float] = time.time
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex

    def __post_init__(self) -> None:
        if self.tokenizer is not None and self.template is not None:
            special_names(self.tokenizer)  # slow the first time
        elif self.tokenizer is not None:
            log.warning("the checkpoint has no chat template: v1/chat/completions uses plain lines (%s)", FALLBACK)


def model_body(name: str, context: OpenAIContext) -> str:
    """The answer to ``GET v1/models/<name>``. Raises RequestError, 404."""
    if name not in context.models:
        raise RequestError(f"the model {name[:100]!r} does not exist here", "model", "model_not_found", 404)
    return json.dumps(_model(name, context)) + "\n"


def models_body(context: OpenAIContext) -> str:
    """The answer to ``GET v1/models``."""
    return json.dumps({"object": "list", "data": [_model(name, context) for name in context.models]}) + "\n"


def _model(name: str, context: OpenAIContext) -> dict[str, Any]:
    """OpenAI's fields, vLLM's ``max_model_len``, and where chats get their format from; null where there are none."""
    template = None if context.tokenizer is None else FALLBACK if context.template is None else "checkpoint"
    facts = {"id": name, "object": "model", "created": context.created, "owned_by": "gpt-fast"}
    return {**facts, "max_model_len": context.max_model_len, "chat_template": template}


class OpenAIRequest:
    """A :class:`~gpt_fast.serve.protocol.request.WireRequest`; the two kinds fill in how a choice looks. ``given``: the
    fields as the client wrote them. ``prompts``: token ids. Choices are numbered as the sequences: the samples of the
    first prompt, those of the second, and so on."""

    _prefix: str  # of the id
    _object: str
    _chunk_object: str

    def __init__(
        self, given: Mapping[str, Any], prompts: Sequence[list[int]], params: SamplingParams, context: OpenAIContext
    ) -> None:
        self.given, self.prompts, self.params, self.context = given, prompts, params, context
        self.stream: bool = given.get("stream", False)
        self.content_type = EVENT_TYPE if self.stream else JSON_TYPE
        self.sequences = tuple(SequenceRequest(prompt, params) for prompt in prompts)
        self.id = self._prefix + context.new_id()
        self.created = int(context.clock())
        self._options: Mapping[str, Any] = given.get("stream_options", {})
        self._num_new = 0  # tokens streamed so far, of all sequences

    def write_delta(self, index: int, delta: Delta) -> str:
        self._num_new += len(delta.token_ids)
        usage = None
        if self._options.get("continuous_usage_stats"):
            usage = token_counts(sum(map(len, self.prompts)), self._num_new)
        return "".join(self._event([choice], usage) for choice in self._chunks(index, delta))

    def write_end(self, completions: Sequence[Completion]) -> str:
        if self.stream:
            return (self._event([], self._usage(completions)) if self._options.get("include_usage") else "") + _DONE
        choices = [self._choice(i, completion) for i, completion in enumerate(completions)]
        answer = self._frame(self._object, choices) | {"usage": self._usage(completions)}
        return json.dumps(answer, ensure_ascii=False) + "\n"

    def write_error(self, error: RequestError) -> str:
        return f"data: {error_body(error).strip()}\n\n{_DONE}"

    def as_written(self, error: RequestError) -> RequestError:
        return as_written(error, self.given)

    @property
    def _wants_logprobs(self) -> bool:
        return self.params.logprobs is not None

    def _token_name(self, token: int) -> bytes:
        """The bytes that stand for ``token`` in a list of tokens: its text, a special token's name, or its number."""
        tokenizer = self.context.tokenizer
        if token_bytes(tokenizer, token) is None or tokenizer is None:
            return b"token_id:%d" % token
        return tokenizer.token_bytes(token, skip_special=False)

    def _chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """The choice of each event that tells ``delta``."""
        raise NotImplementedError

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        raise NotImplementedError

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> str:
        chunk = self._frame(self._chunk_object, choices)
        if any(self._options.values()):
            chunk["usage"] = usage
        # ASCII: some readers of event streams take U+2028 and U+0085 for line ends.
        return f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n"

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.given["model"]}
        return {**head, "system_fingerprint": None, "choices": choices}

    def _usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """A prompt counts once, however many samples are drawn from it."""
        firsts = completions[:: self.params.n]
        num_prompt = sum(completion.num_prompt_tokens for completion in firsts)
        num_new = sum(len(completion.token_ids) for completion in completions)
        details = {"cached_tokens": sum(completion.num_cached_tokens for completion in firsts)}
        return token_counts(num_prompt, num_new) | {"prompt_tokens_details": details}


def check_length(prompt: Sequence[int], asked: int | None, context: OpenAIContext, param: str, asked_as: str) -> None:
    """Refuse a prompt that leaves no room, and an explicit ``asked`` number of new tokens that does not fit."""
    if len(prompt) + (asked or 1) <= context.max_model_len:
        return
    have = f"the context has room for {context.max_model_len} tokens, and the prompt takes {len(prompt)}"
    if asked is not None and len(prompt) < context.max_model_len:
        message = f"{have}, which leaves {context.max_model_len - len(prompt)}, not the {asked} of {asked_as}"
        raise RequestError(message, asked_as, "context_length_exceeded")
    raise RequestError(f"{have}, which leaves none for an answer", param, "context_length_exceeded")


def check_count(num_prompts: int, n: int, context: OpenAIContext, param: str) -> None:
    """Refuse a request that would take the whole queue."""
    if num_prompts * n > context.max_sequences:
        asked = f"{num_prompts} prompts with {n} samples of each are {num_prompts * n} sequences"
        message = f"{asked}; one request may have at most {context.max_sequences} here"
        raise RequestError(message, param if num_prompts > 1 else "n")


def token_bytes(tokenizer: Tokenizer | None, token: int) -> bytes | None:
    """What ``token`` adds to the text, nothing for a special one; None for an id that has no text at all."""
    return tokenizer.token_bytes(token) if tokenizer is not None and 0 <= token < tokenizer.vocab_size else None


def finite(entry: TokenLogprobs) -> TokenLogprobs:
    """``entry`` with numbers that JSON has."""
    top = tuple((token, max(_LEAST_LOGPROB, logprob)) for token, logprob in entry.top)
    return TokenLogprobs(entry.token, max(_LEAST_LOGPROB, entry.logprob), top)
