"""The routes below ``/predictions/<model>/<version>/``: which protocol answers where.

Nothing: native.py. ``v1/...``: OpenAI's. ``tokenize``, ``detokenize``, ``tokenizer_info``: token_routes.py.
``predict``: predict.py. ``health``: whether the model is loaded, compiled and warm, and what runs. ``metrics``:
Prometheus' text format under vLLM's names; ``stats``: the same numbers as JSON. ``page``: for people.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gpt_fast.errors import RequestError
from gpt_fast.fields import show
from gpt_fast.serve.closing import is_closed, refuse_if_closed
from gpt_fast.serve.metrics import CONTENT_TYPE, Metrics
from gpt_fast.serve.page import page
from gpt_fast.serve.protocol import native
from gpt_fast.serve.protocol.body import read_body
from gpt_fast.serve.protocol.openai_chat import parse_chat
from gpt_fast.serve.protocol.openai_common import OpenAIContext
from gpt_fast.serve.protocol.openai_completions import parse_completion
from gpt_fast.serve.protocol.openai_responses import parse_responses
from gpt_fast.serve.protocol.predict import parse_predict
from gpt_fast.serve.protocol.request import JSON_TYPE, Piece, WireRequest, error_body
from gpt_fast.serve.protocol.token_routes import detokenize, tokenize, tokenizer_info
from gpt_fast.serve.settings import HandlerSettings
from gpt_fast.tokenizer.chat import DEFAULT, TOOL_USE

if TYPE_CHECKING:
    from gpt_fast.llm import LLM

ROUTES = (
    *("v1/chat/completions", "v1/completions", "v1/responses", "v1/models", "tokenize", "detokenize", "tokenizer_info"),
    *("health", "metrics", "stats", "page", "predict"),
)


class Routes:
    """What one model answers under its routes. ``names``: what requests may call it in OpenAI's ``model``.
    ``num_open``: tells how many HTTP requests are being answered."""

    def __init__(
        self, llm: LLM, settings: HandlerSettings, names: tuple[str, ...], metrics: Metrics, num_open: Callable[[], int]
    ) -> None:
        self._llm, self._settings, self._metrics, self._num_open = llm, settings, metrics, num_open
        self._openai = openai_context(llm, names)

    def open(self, route: str, entry: Mapping[str, Any], content_length: int | None) -> WireRequest | Piece:
        """What one request asks of the engine, or its whole answer. Raises RequestError. ``entry``: the body as
        TorchServe delivers it (protocol/body.py)."""
        route = route.strip("/")
        if route == "health":  # only a model that is ready answers at all
            state = {"status": "stopping" if is_closed() else "ready", "loaded": True, "warm": True}
            return _json({**state, "open": max(0, self._num_open() - 1), **self._llm.status()})  # without this one
        if route == "metrics":
            return Piece(self._metrics.exposition(), CONTENT_TYPE)
        if route == "stats":
            return _json(self._metrics.stats())
        if route == "page":
            return page()
        if route == "v1/models":
            models = [self._openai.model_facts(name) for name in self._openai.models]
            return _json({"object": "list", "data": models})
        if route.startswith("v1/models/"):
            return _json(self._openai.model_facts(route.removeprefix("v1/models/")))
        if route == "tokenizer_info":
            return _json(tokenizer_info(self._openai))
        if route and route not in ROUTES:
            message = f"there is no route {show(route)}; there are {', '.join(ROUTES)}, and the model itself"
            raise RequestError(message, None, "not_found", 404)
        refuse_if_closed()
        body = read_body(entry, self._settings.max_body_bytes, content_length)
        if route in ("tokenize", "detokenize"):
            return _json((tokenize if route == "tokenize" else detokenize)(body, self._openai))
        return parse(route, body, self._openai, self._settings.max_new_tokens, self._settings.stream)


def openai_context(llm: LLM, names: tuple[str, ...]) -> OpenAIContext:
    """What OpenAI's routes need to know about ``llm``, which requests may call ``names``."""
    templates = llm.chat_templates
    max_waiting = llm.engine.max_waiting
    temperature = llm.defaults.sampling.temperature
    return OpenAIContext(
        models=names,
        max_model_len=llm.max_seq_len,
        tokenizer=llm.tokenizer,
        template=templates.get(DEFAULT),
        tool_template=templates.get(TOOL_USE),
        default_temperature=1.0 if temperature is None else temperature,
        # Half of the queue, so that one request never fills it for the others.
        max_sequences=OpenAIContext.max_sequences if max_waiting is None else max(1, max_waiting // 2),
    )


def parse(
    route: str,
    body: Mapping[str, Any],
    openai: OpenAIContext,
    default_max_tokens: int | None = None,
    default_stream: bool = True,
) -> WireRequest:
    """The request ``body`` of one of OpenAI's routes, of ``predict``, or of our own; the defaults are for the
    latter. Raises RequestError."""
    if route == "v1/chat/completions":
        return parse_chat(body, openai)
    if route == "v1/completions":
        return parse_completion(body, openai)
    if route == "v1/responses":
        return parse_responses(body, openai)
    if route == "predict":
        return parse_predict(body)
    return native.parse_request(body, default_max_tokens, default_stream)


def break_off(route: str, error: RequestError) -> Piece:
    """The last piece of a stream of ``route`` whose request is not known any more."""
    told = error_body(error)
    text = f"data: {told}\n" if route.strip("/").startswith("v1/") else f"\n{told}"
    return Piece(text, JSON_TYPE, plain=False)


def _json(answer: dict[str, Any]) -> Piece:
    return Piece(json.dumps(answer) + "\n", JSON_TYPE)
