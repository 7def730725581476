"""The TorchServe adapter: requests in, text out as it is generated. No model code; that is the package gpt_fast.

TorchServe wants exactly one class in this module and calls its ``initialize`` once in each worker, then ``handle``
with a batch. This is the sync mode (``batchSize: 1``): one request at a time, each new piece of text sent at once
as an intermediate response, the last one returned.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import torch
from ts.handler_utils.utils import send_intermediate_predict_response

ARCHIVE = Path(__file__).resolve().parent
log = logging.getLogger(__name__)


def _find_package() -> None:
    """Make ``import gpt_fast`` work in a worker.

    An archive from scripts/archive.sh holds the package as a folder and needs nothing. ``torch-model-archiver
    --extra-files gpt_fast`` unpacks that folder into the archive's root, where it is found by its modules.
    """
    flat = ARCHIVE / "__init__.py"
    if flat.is_file() and (ARCHIVE / "llm.py").is_file():
        spec = importlib.util.spec_from_file_location("gpt_fast", flat, submodule_search_locations=[str(ARCHIVE)])
        assert spec is not None
        assert spec.loader is not None
        sys.modules["gpt_fast"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["gpt_fast"])
    elif importlib.util.find_spec("gpt_fast") is None:
        # Not an ImportError: TorchServe would take that for "no such handler" and look for one of its own.
        raise RuntimeError(
            "the package gpt_fast is neither in the archive nor installed: build the archive with scripts/archive.sh, "
            "or add --extra-files gpt_fast, or pip install the project where TorchServe runs"
        )


_find_package()

from gpt_fast.engine.engine import EngineError  # noqa: E402
from gpt_fast.llm import LLM  # noqa: E402
from gpt_fast.outputs import Delta  # noqa: E402
from gpt_fast.params import RequestError  # noqa: E402
from gpt_fast.protocol import native  # noqa: E402
from gpt_fast.protocol.body import read_body  # noqa: E402
from gpt_fast.settings import HandlerSettings, read_settings  # noqa: E402

EXIT_AFTER_S = 1.0  # a worker that cannot go on: long enough for its last answer to leave


class GPTFastHandler:
    """One model in one worker process."""

    def __init__(self) -> None:
        self.settings: HandlerSettings
        self.llm: Any = None  # an LLM, or what tests put in its place

    def initialize(self, ctx: Any) -> None:
        """Load, compile and warm up. Raises RuntimeError: TorchServe passes no other exception's message on."""
        model_dir = Path(ctx.system_properties["model_dir"])
        config = ctx.model_yaml_config or {}
        try:
            refuse_modes(config)
            self.settings = read_settings(config, model_dir)
            for warning in self.settings.warnings:
                log.warning("warning: %s", warning)  # TorchServe's log shows every line of a worker as INFO
            options = dict(self.settings.engine)
            options["device"] = pick_device(options.get("device", "auto"), ctx.system_properties.get("gpu_id"))
            log.info("loading %s with %s", self.settings.checkpoint, options)
            self.llm = self.build(self.settings.checkpoint, options)
        except (RuntimeError, MemoryError):
            raise
        except ValueError as error:  # something in the configuration or the checkpoint: the message says it all
            # TorchServe answers a message that contains "CUDA" with "System out of memory".
            raise RuntimeError(str(error).replace("CUDA", "Cuda")) from None
        except Exception as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    def build(self, checkpoint: Path, options: Mapping[str, Any]) -> Any:
        """The engine; tests replace it."""
        return LLM(checkpoint, **options)

    def handle(self, data: list[Mapping[str, Any]], ctx: Any) -> list[str]:
        """One answer for each entry of ``data``; a request's own fault never raises, it would fail the others."""
        return [self.answer(index, entry, ctx) for index, entry in enumerate(data)]

    def answer(self, index: int, entry: Mapping[str, Any], ctx: Any) -> str:
        """Serve one entry; returns its last piece of text, or the whole answer when nothing was streamed."""
        try:
            request = self.parse(index, entry, ctx)
            deltas = self.llm.stream(request.prompt, request.params)
        except RequestError as error:
            return refuse(ctx, index, error.status, error.message, error.param, error.code)
        except Exception as error:
            return self.failed(ctx, index, error, sent=False)
        ctx.set_response_status(200, "OK", index)  # left alone, the status line would have no phrase
        if request.stream:
            return self.stream(index, deltas, ctx)
        try:
            completion = next(d.completion for d in deltas if finished(d) and d.completion is not None)
        except Exception as error:
            return self.failed(ctx, index, error, sent=False)
        ctx.set_response_content_type(index, native.JSON_TYPE)
        return native.completion_body(completion, request.return_token_ids)

    def parse(self, index: int, entry: Mapping[str, Any], ctx: Any) -> native.NativeRequest:
        """The request in ``entry``. Raises RequestError."""
        route = ctx.get_request_header(index, "url_path")
        if route:
            raise RequestError(f"there is no route {route[:100]!r}", None, "not_found", 404)
        body = read_body(entry, self.settings.max_body_bytes, content_length(ctx.get_all_request_header(index)))
        return native.parse_request(body, self.settings.max_new_tokens, self.settings.stream)

    def stream(self, index: int, deltas: Iterator[Delta], ctx: Any) -> str:
        """Send every piece but the last as soon as it is there."""
        ctx.set_response_content_type(index, native.TEXT_TYPE)
        receivers = {index: ctx.request_ids[index]}
        sent = False
        try:
            for delta in deltas:
                if finished(delta):
                    return delta.text
                if delta.text:
                    send_intermediate_predict_response({index: delta.text}, receivers, "Streaming", 200, ctx)
                    sent = True
        except Exception as error:
            return self.failed(ctx, index, error, sent)
        return ""

    def failed(self, ctx: Any, index: int, error: Exception, sent: bool) -> str:
        """Answer a request that the engine could not finish, and end the worker if no other can be either."""
        log.error("request %s failed", ctx.get_request_id(index), exc_info=error)
        if isinstance(error, OSError):
            raise error  # the connection to TorchServe is gone, and with it whom to answer
        if fatal(error):
            log.critical("no request can be served any more; this worker ends and TorchServe starts another")
            threading.Timer(EXIT_AFTER_S, os._exit, (1,)).start()
        message = f"the request failed: {type(error).__name__}; see the worker's log"
        if sent:  # status and headers are gone; the body is the only place left to say it
            return "\n" + native.error_body(message, 500, None, "internal_error")
        return refuse(ctx, index, 500, message, None, "internal_error")


def refuse(ctx: Any, index: int, status: int, message: str, param: str | None, code: str | None) -> str:
    """Set the status and content type of one entry's answer, and return its body."""
    ctx.set_response_status(status, HTTPStatus(status).phrase, index)
    ctx.set_response_content_type(index, native.JSON_TYPE)
    return native.error_body(message, status, param, code)


def refuse_modes(config: Mapping[str, Any]) -> None:
    """Raise ValueError for the ways of TorchServe to call a handler that this one does not serve."""
    for mode in ("continuousBatching", "asyncCommunication", "sequenceBatching"):
        if config.get(mode):
            raise ValueError(f"{mode} in model_config.yaml is not supported; leave it out")
    if config.get("batchSize", 1) != 1:
        raise ValueError("batchSize in model_config.yaml must be 1: requests of one batch would wait for each other")


def pick_device(name: str, gpu_id: int | None) -> str:
    """``auto`` is the GPU that TorchServe gave this worker, else the CPU (``deviceType: cpu``, or there is none)."""
    if name != "auto":
        return name
    return f"cuda:{gpu_id}" if gpu_id is not None and gpu_id >= 0 and torch.cuda.is_available() else "cpu"


def content_length(headers: Mapping[str, Any]) -> int | None:
    """The header of that name, however it is spelled; None if there is none."""
    for name, value in headers.items():
        if name.lower() == "content-length" and isinstance(value, str) and value.isdecimal():
            return int(value)
    return None


def finished(delta: Delta) -> bool:
    """Whether ``delta`` is the last one. Raises EngineError if the engine gave the request up; nobody cancels here."""
    if delta.finish_reason == "abort":
        raise EngineError("the engine stopped in the middle of the request")
    return delta.finish_reason is not None


def fatal(error: Exception) -> bool:
    """Whether every later request would fail as well: the engine has stopped, or the device is lost to this process.

    A CUDA assertion is such a loss: TorchServe would answer 507 for ever and call itself healthy. Running out of
    memory is not.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return False
    lost: Any = getattr(torch, "AcceleratorError", ())
    return isinstance(error, (EngineError, lost)) or "CUDA error" in str(error)
