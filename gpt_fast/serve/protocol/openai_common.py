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
from gpt_fast.serve.protocol.native import JSON_TYPE, error_body
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
    """What the protocol needs to know about the server. Made once, when the model is loaded.

    ``models``: the names that requests may use. ``max_model_len``: tokens of prompt and answer together.
    ``default_temperature``: of generation_config.json; None: the file has none.
    ``completion_max_tokens`` and ``chat_max_tokens``: for requests that do not say; None: as many as fit.
    ``max_sequences``: prompts times ``n`` of one request. ``created``: the models' date, unix seconds.
    """

    models: tuple[str, ...]
    max_model_len: int
    tokenizer: Tokenizer | None = None
    template: ChatTemplate | None = None
    default_temperature: float | None = None
    completion_max_tokens: int | None = 16  # as OpenAI documents it
    chat_max_tokens: int | None = None
    max_sequences: int = 256
    system_fingerprint: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    clock: Callable[[], float] = time.time
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex

    def __post_init__(self) -> None:
        if self.tokenizer is not None and self.template is not None:
            special_names(self.tokenizer)  # slow the first time
        elif self.tokenizer is not None:
            log.warning("the checkpoint has no chat template: v1/chat/completions uses plain lines (%s)", FALLBACK)

    @property
    def template_name(self) -> str | None:
        """Where chats get their format from; None where there can be none."""
        if self.tokenizer is None:
            return None
        return FALLBACK if self.template is None else "checkpoint"


def model_body(name: str, context: OpenAIContext) -> str:
    """The answer to ``GET v1/models/<name>``. Raises RequestError, 404."""
    if name not in context.models:
        raise RequestError(f"the model {name[:100]!r} does not exist here", "model", "model_not_found", 404)
    return json.dumps(_model(name, context)) + "\n"


def models_body(context: OpenAIContext) -> str:
    """The answer to ``GET v1/models``. OpenAI's fields, vLLM's ``max_model_len``, and where the chat template comes
    from."""
    return json.dumps({"object": "list", "data": [_model(name, context) for name in context.models]}) + "\n"


def _model(name: str, context: OpenAIContext) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "gpt-fast",
        "max_model_len": context.max_model_len,
        "chat_template": context.template_name,
    }


class OpenAIRequest:
    """A :class:`~gpt_fast.serve.protocol.request.WireRequest`; the two kinds fill in how a choice looks.

    ``given``: the fields as the client wrote them. ``prompts``: token ids. Choices are numbered as the sequences: the
    samples of the first prompt, those of the second, and so on.
    """

    _prefix: str  # of the id
    _object: str
    _chunk_object: str

    def __init__(
        self, given: Mapping[str, Any], prompts: Sequence[list[int]], params: SamplingParams, context: OpenAIContext
    ) -> None:
        self.given = given
        self.prompts = prompts
        self.params = params
        self.context = context
        self.stream: bool = given.get("stream", False)
        self.content_type = EVENT_TYPE if self.stream else JSON_TYPE
        self.sequences = tuple(SequenceRequest(prompt, params) for prompt in prompts)
        self.id = self._prefix + context.new_id()
        self.created = int(context.clock())
        self._options: Mapping[str, Any] = given.get("stream_options", {})
        self._num_new = 0  # tokens streamed so far, of all sequences
        self._closed = False  # an error has ended the stream

    def write_delta(self, index: int, delta: Delta) -> str:
        """The events that tell ``delta`` of sequence ``index``, perhaps none."""
        if self._closed:
            return ""
        if delta.finish_reason == "abort":
            return self.write_error(_aborted())
        self._num_new += len(delta.token_ids)
        return "".join(self._event([choice], self._usage_so_far()) for choice in self._chunks(index, delta))

    def write_end(self, completions: Sequence[Completion]) -> str:
        """The end of the stream, or the whole answer. Raises RequestError (500) for the whole answer if a sequence was
        aborted."""
        if self._closed:
            return ""
        if not self.stream:
            return self._answer(completions)
        self._closed = True
        return (self._event([], self._usage(completions)) if self._options.get("include_usage") else "") + _DONE

    def write_error(self, error: RequestError) -> str:
        """The error as the stream's last event."""
        if self._closed:
            return ""
        self._closed = True
        return f"data: {error_body(error).strip()}\n\n{_DONE}"

    def as_written(self, error: RequestError) -> RequestError:
        """``error`` of the engine about a sequence, with the field named as the client wrote it."""
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
        """A choice of the whole answer."""
        raise NotImplementedError

    def _answer(self, completions: Sequence[Completion]) -> str:
        if any(completion.finish_reason == "abort" for completion in completions):
            raise _aborted()
        choices = [self._choice(i, completion) for i, completion in enumerate(completions)]
        answer = self._frame(self._object, choices) | {"usage": self._usage(completions)}
        return json.dumps(answer, ensure_ascii=False) + "\n"

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> str:
        chunk = self._frame(self._chunk_object, choices)
        if any(self._options.values()):
            chunk["usage"] = usage
        # ASCII: some readers of event streams take U+2028 and U+0085 for line ends.
        return f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n"

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.given["model"],
            "system_fingerprint": self.context.system_fingerprint,
            "choices": choices,
        }

    def _usage_so_far(self) -> dict[str, Any] | None:
        if not self._options.get("continuous_usage_stats"):
            return None
        num_prompt = sum(map(len, self.prompts))
        return _counts(num_prompt, self._num_new)

    def _usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """A prompt counts once, however many samples are drawn from it."""
        firsts = completions[:: self.params.n]
        num_prompt = sum(completion.num_prompt_tokens for completion in firsts)
        num_new = sum(len(completion.token_ids) for completion in completions)
        details = {"cached_tokens": sum(completion.num_cached_tokens for completion in firsts)}
        return _counts(num_prompt, num_new) | {"prompt_tokens_details": details}


def _counts(num_prompt: int, num_new: int) -> dict[str, Any]:
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}


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
    known = tokenizer is not None and 0 <= token < tokenizer.vocab_size
    return tokenizer.token_bytes(token) if tokenizer is not None and known else None


def finite(entry: TokenLogprobs) -> TokenLogprobs:
    """``entry`` with numbers that JSON has."""
    top = tuple((token, max(_LEAST_LOGPROB, logprob)) for token, logprob in entry.top)
    return TokenLogprobs(entry.token, max(_LEAST_LOGPROB, entry.logprob), top)


def _aborted() -> RequestError:
    message = "the request was ended before its answer was complete: its time was up, or the server is stopping"
    return RequestError(message, None, "aborted", 500)
