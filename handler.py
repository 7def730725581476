"""The TorchServe adapter: requests in, text out as it is generated. No model code; that is the package gpt_fast.

TorchServe wants exactly one class in this module and calls its ``initialize`` once in each worker, then ``handle``.
Continuous batching (``continuousBatching: true``) is the main mode: every call brings all active requests, new ones
with their body, and returns the next piece of each answer; the engine runs in another thread meanwhile. In sync mode
(``batchSize: 1``) a call is one request from beginning to end, its pieces sent as intermediate responses.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
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
        # Not an ImportError: TorchServe would take that for "no such handler" and look for one of its handlers.
        raise RuntimeError(
            "the package gpt_fast is neither in the archive nor installed: build the archive with scripts/archive.sh, "
            "or add --extra-files gpt_fast, or pip install the project where TorchServe runs"
        )


_find_package()

from gpt_fast.errors import EngineError, RequestError, try_later  # noqa: E402
from gpt_fast.gguf import name_of_gguf  # noqa: E402
from gpt_fast.llm import LLM  # noqa: E402
from gpt_fast.parallel.group import number_of_ranks  # noqa: E402
from gpt_fast.serve.lanes import Lanes  # noqa: E402
from gpt_fast.serve.last_words import FOLLOWER_S, HELD_S, hold_open  # noqa: E402
from gpt_fast.serve.metrics import Metrics  # noqa: E402
from gpt_fast.serve.model_yaml import RESPONSE_S, serves_continuously  # noqa: E402
from gpt_fast.serve.only_worker import claim  # noqa: E402
from gpt_fast.serve.protocol.open_inference import REFUSAL, refuse_call  # noqa: E402
from gpt_fast.serve.protocol.request import JSON_TYPE, Piece, error_body  # noqa: E402
from gpt_fast.serve.routes import Routes, break_off  # noqa: E402
from gpt_fast.serve.session import TOO_MANY_LARGE, Session, as_request_error, wait_for_news  # noqa: E402
from gpt_fast.serve.settings import HandlerSettings, read_settings  # noqa: E402
from gpt_fast.serve.torchserve_metrics import NO_WORKER, worker_id, write_torchserve  # noqa: E402
from gpt_fast.serve.tracing import FirstRequest  # noqa: E402

EXIT_AFTER_S = 1.0  # a worker that cannot go on: long enough for its last answer to leave
LAST_WORDS_S = 1.0
EXCHANGE_S = 0.1  # a call returns after this long even if nobody has anything to say: new requests wait outside
PAUSE_S = 0.008  # between two pieces of one stream: a call costs TorchServe and this process 3 ms of a core
SWITCH_S = 0.001  # how long another Python thread may keep the engine's and the handler's waiting
# Bodies of requests that have not been answered yet: TorchServe sends them again with every call.
MAX_UNANSWERED_BYTES = 8 * 1024 * 1024
MAX_DIGITS = 20  # of a number in a header
STREAM_NEXT = "ts_stream_next"  # the header by which TorchServe tells a stream's last message
SILENCE = 0.9  # of responseTimeout: TorchServe kills a worker that says nothing for all of it


class GPTFastHandler:
    """One model in one worker process."""

    def __init__(self) -> None:
        self.settings: HandlerSettings
        self.llm: Any = None  # an LLM, or what tests put in its place
        self.metrics: Metrics
        self.routes: Routes
        self.trace: FirstRequest  # with ``profile: true``
        self.continuous = False
        self.silence_s = math.inf  # the most that a request may take between two messages to TorchServe
        self.place: socket.socket | None = None  # of the only worker; continuous batching alone
        self.is_ending = False  # no request can be served any more, and somebody has been told
        self.held = False  # the connection has been given to hold_open(); continuous batching alone
        self.holder: subprocess.Popen[bytes] | None = None  # what that returned
        self.lanes = Lanes.start()
        self.sessions: dict[str, Session] = {}  # by TorchServe's request id; continuous batching alone
        self.last_exchange = 0.0  # monotonic seconds

    def initialize(self, ctx: Any) -> None:
        """Load, compile and warm up. Raises RuntimeError: TorchServe passes no other exception's message on."""
        model_dir = Path(ctx.system_properties["model_dir"])
        config = ctx.model_yaml_config or {}
        try:
            self.load(ctx, config, model_dir)
        except Exception as error:
            log.error("cannot serve %s: %s", ctx.model_name, error)
            # TorchServe reads a worker's output in a thread that it stops once it hears of the failure: on a busy
            # machine that is before the last lines, which say why.
            sys.stdout.flush()
            time.sleep(LAST_WORDS_S)
            if isinstance(error, (RuntimeError, MemoryError)):
                raise
            if isinstance(error, ValueError):  # in the configuration or the checkpoint: the message says it all
                # TorchServe answers a message that contains "CUDA" with "System out of memory".
                raise RuntimeError(str(error).replace("CUDA", "Cuda")) from None
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    def load(self, ctx: Any, config: Mapping[str, Any], model_dir: Path) -> None:
        """Everything slow: weights, compilation, warm-up."""
        logging.getLogger().addFilter(_worth_a_line)
        sys.setswitchinterval(SWITCH_S)
        self.settings = read_settings(config, model_dir)
        self.continuous = serves_continuously(config)
        if not self.continuous:  # else a call returns at once
            self.silence_s = SILENCE * config.get("responseTimeout", RESPONSE_S)
        for warning in self.settings.warnings:
            log.warning("warning: %s", warning)  # TorchServe's log shows every line of a worker as INFO
        worker = worker_id(sys.argv)
        if self.continuous and worker != NO_WORKER and os.environ.get("LOCAL_RANK", "0") == "0":
            self.place = claim(f"{ctx.model_name} {model_dir}")
        options = dict(self.settings.engine)
        asked = options.get("device", "auto")
        if options.get("device_map") is None:
            options["device"] = device_of_worker(asked, ctx.system_properties.get("gpu_id"))
        if asked == "auto" and options.get("device") == "cpu" and str(config.get("deviceType")).lower() == "gpu":
            log.warning("warning: deviceType is gpu, but there is no GPU that torch can use: the CPU is used")
        log.info("loading %s with %s", self.settings.checkpoint, options)
        self.llm = self.build(self.settings.checkpoint, options)
        if self.llm.follows:
            threading.Thread(target=self.follow, name="gpt-fast-follower", daemon=True).start()
            return
        self.metrics = Metrics(self.llm.engine, ctx.model_name, worker)
        if os.environ.get("LOCAL_RANK", "0") == "0":  # TorchServe would add up the lines of every rank
            self.metrics.start(write_torchserve)
        if self.settings.profile:
            self.trace = FirstRequest(self.llm.engine, self.llm.device.type)
        names = served_names(ctx.model_name, self.settings.checkpoint)
        self.routes = Routes(self.llm, self.settings, names, self.metrics, lambda: len(self.sessions))

    def build(self, checkpoint: Path, options: Mapping[str, Any]) -> Any:
        """The engine; tests replace it."""
        return LLM(checkpoint, **options)

    def hold(self, connection: socket.socket) -> subprocess.Popen[bytes] | None:
        """See ``hold_open``; tests replace it."""
        return hold_open(connection, FOLLOWER_S if self.llm.follows else HELD_S)

    def follow(self) -> None:
        """Compute what rank 0 decides; the worker ends with it."""
        try:
            self.llm.follow()
        except Exception:
            log.exception("this rank cannot follow any more")
        sys.stdout.flush()
        os._exit(1)

    def handle(self, data: list[Mapping[str, Any]], ctx: Any) -> list[str]:
        """One piece for each entry of ``data``; a request's own fault never raises, it would fail the others."""
        if self.continuous and not data:
            self.leave()
        if self.continuous and not self.held:
            self.held, self.holder = True, self.hold(ctx.cl_socket)
        if self.llm.follows:  # TorchServe sends every request to every rank, and takes the answers of rank 0
            ctx.stopping_criteria = [stops(None)] * len(data)
            return [""] * len(data)
        if self.is_ending and self.continuous and self.sessions.keys().isdisjoint(ctx.request_ids.values()):
            self.fall_silent()
        return self.exchange(data, ctx) if self.continuous else [self.answer(i, e, ctx) for i, e in enumerate(data)]

    # Continuous batching.

    def leave(self) -> None:
        """End a worker that TorchServe has forgotten.

        TorchServe 0.12 starts a worker that has died again a while later, also where the management API has set the
        number of workers to none meanwhile. It gives such a worker batches without requests from then on, and no
        other worker could start while this one has its place (only_worker.py)."""
        log.critical("TorchServe has no requests for this worker, since it was scaled down; it ends")
        sys.stdout.flush()
        os._exit(1)

    def fall_silent(self) -> None:
        """Where another rank is lost, say nothing any more to those who come now. It will soon be that rank's
        connection that ends, and only while TorchServe waits for an answer does it tell all clients (last_words.py)."""
        if number_of_ranks() > 1:
            time.sleep(2 * EXIT_AFTER_S)  # this process ends meanwhile

    def exchange(self, data: list[Mapping[str, Any]], ctx: Any) -> list[str]:
        """Take in the ids not seen before, drop those that are missing, return what the others have to say.

        An entry without a piece is left out of the result, and TorchServe asks for it again. Its HTTP status has not
        been sent then, so that a request that fails in the queue is answered with an error, not with an empty success.
        """
        ctx.metrics.add_time = _no_line
        ids: dict[int, str] = dict(ctx.request_ids)
        for gone in self.sessions.keys() - set(ids.values()):
            self.sessions.pop(gone).cancel()
        pieces: dict[int, Piece] = {}
        for index, request_id in ids.items():
            if request_id not in self.sessions:
                opened = self.open(index, data[index], ctx)
                if isinstance(opened, Piece):
                    pieces[index] = opened
                else:
                    self.sessions[request_id] = opened
        if not pieces:
            wait_for_news(self.llm.engine, self.sessions.values(), EXCHANGE_S, PAUSE_S, self.last_exchange)
        self.last_exchange = time.monotonic()
        for index, request_id in ids.items():
            if request_id in self.sessions:
                piece = self.take(ctx, index, self.sessions[request_id])
                if piece is None:
                    del ctx.request_ids[index]
                    continue
                pieces[index] = piece
                if piece.last:
                    del self.sessions[request_id]
        # None: not a stream. A stream whose first message was its last would have no HTTP headers.
        ctx.stopping_criteria = [stops(pieces.get(index)) for index in range(len(data))]
        return [pieces[index].text if index in pieces else "" for index in range(len(data))]

    # Sync mode.

    def answer(self, index: int, entry: Mapping[str, Any], ctx: Any) -> str:
        """Serve one entry; returns its last piece of text, or the whole answer when nothing was streamed."""
        session = self.open(index, entry, ctx)
        if isinstance(session, Piece):
            return session.text
        receivers = {index: ctx.request_ids[index]}
        try:
            while True:
                wait_for_news(self.llm.engine, [session], EXCHANGE_S, 0.0, 0.0)
                piece = self.take(ctx, index, session)
                if piece is not None and piece.last:
                    return piece.text
                if piece is not None:
                    send_intermediate_predict_response({index: piece.text}, receivers, "Streaming", 200, ctx)
        except BaseException:  # the connection to TorchServe is gone, and with it whom to answer
            session.cancel()
            raise

    # Both.

    def open(self, index: int, entry: Mapping[str, Any], ctx: Any) -> Session | Piece:
        """Start serving one entry; the whole answer where it is refused at once."""
        try:
            return self.begin(index, entry, ctx)
        except Exception as error:
            return self.refused(ctx, index, as_request_error(error))

    def begin(self, index: int, entry: Mapping[str, Any], ctx: Any) -> Session | Piece:
        """:meth:`open`; raises where that is refused."""
        headers = ctx.get_all_request_header(index)
        length = content_length(headers)
        route = ctx.get_request_header(index, "url_path")
        if not isinstance(route, str):  # a field of a form or a call that has this name is there as an object
            route = ""
        if length is None:
            end_call(ctx, index)  # also if it is refused now
            if (refusal := refuse_call(entry)) is not None:
                self.metrics.count_error(RequestError(REFUSAL))
                return refusal
        elif self.continuous and not entry and not is_form(headers):
            return self.orphan(route)
        num_bytes = sum(len(value) for value in entry.values() if isinstance(value, (bytes, bytearray, str)))
        unanswered = sum(session.num_bytes for session in self.sessions.values() if not session.started)
        if unanswered and unanswered + num_bytes > MAX_UNANSWERED_BYTES:
            raise try_later(TOO_MANY_LARGE)
        one_piece_s = self.settings.one_piece_timeout_s
        read = functools.partial(self.routes.open, route, entry, length)
        return Session(
            self.llm,
            read,
            self.lanes,
            num_bytes,
            announce=self.continuous,
            one_piece_s=one_piece_s,
            silence_s=self.silence_s,
            in_one_message=length is None,
        )

    def orphan(self, route: str) -> Piece:
        """The end of a stream that another worker has begun.

        Where the management API sets the number of workers to none, TorchServe 0.12 keeps the requests for the next
        worker. Of those whose streams have begun it sends no body any more, as if this worker knew them."""
        error = RequestError("the worker that made this answer was stopped", None, "internal_error", 500)
        self.metrics.count_error(error)
        return break_off(route, error)

    def take(self, ctx: Any, index: int, session: Session) -> Piece | None:
        """The session's next piece, its status and content type set."""
        if session.in_one_message:
            end_call(ctx, index)
        try:
            piece = session.take()
        except RequestError as error:
            return self.refused(ctx, index, error)
        if session.failure is not None:
            self.metrics.count_error(session.failure)
            self.end_if_fatal(session.failure)
        if piece is not None:
            ctx.set_response_status(200, "OK", index)  # left alone, the status line would have no phrase
            ctx.set_response_content_type(index, piece.content_type)
            for name, value in piece.headers:
                ctx.set_response_header(index, name, value)
        return piece

    def refused(self, ctx: Any, index: int, error: RequestError) -> Piece:
        """The whole answer to a request that failed before its first piece."""
        self.metrics.count_error(error)
        self.end_if_fatal(error)
        ctx.set_response_status(error.status, HTTPStatus(error.status).phrase, index)
        ctx.set_response_content_type(index, JSON_TYPE)
        if error.retry_after_s is not None:
            ctx.set_response_header(index, "Retry-After", str(error.retry_after_s))
        if error.code == "timeout":  # OpenAI's clients send it twice more, unless they are told that it is no use
            ctx.set_response_header(index, "X-Should-Retry", "false")
        return Piece(error_body(error), JSON_TYPE)

    def end_if_fatal(self, error: BaseException) -> None:
        """End this worker when no request can be served any more; TorchServe starts another."""
        if fatal(error.__cause__ or error):
            log.critical("no request can be served any more; this worker ends and TorchServe starts another")
            self.is_ending = True
            threading.Timer(EXIT_AFTER_S, os._exit, (1,)).start()


def stops(piece: Piece | None) -> Callable[[Any], bool | None]:
    """What TorchServe asks after each piece: True, it was the last; False, more follows; None, it was all there is."""
    return lambda _: None if piece is None or piece.plain else piece.last


def end_call(ctx: Any, index: int) -> None:
    """Tell TorchServe that the message to this call over gRPC is the last. Such a call has no Content-Length, which
    TorchServe gives to all that comes over HTTP.

    TorchServe 0.12 ends the worker over a message to ``StreamPredictions`` without this header. It ends a call of
    ``Predictions`` at the first message, and with continuous batching takes every client for gone that another message
    is to follow to. So there is one message.
    """
    ctx.set_response_header(index, STREAM_NEXT, "false")


def device_of_worker(name: str, gpu_id: int | None) -> str:
    """``auto`` is the GPU that TorchServe gave this worker, else the CPU (``deviceType: cpu``, or there is none)."""
    if name != "auto":
        return name
    return f"cuda:{gpu_id}" if gpu_id is not None and gpu_id >= 0 and torch.cuda.is_available() else "cpu"


# TorchServe's worker writes two lines for every exchange, so for every token, into a pipe that Java reads and parses.
# They say nothing of requests that share exchanges and cost the two processes almost a millisecond.


def _no_line(*_: Any, **__: Any) -> None:
    """In the place of what reports the time of an exchange."""


def _worth_a_line(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("Backend received inference at")


def served_names(model_name: str, checkpoint: Path) -> tuple[str, ...]:
    """What clients may call the model: TorchServe's name for it first, and the folder's of its checkpoint. In the Hub's
    cache, models--owner--name/snapshots/COMMIT, that is owner/name. A GGUF file has a name itself."""
    if checkpoint.suffix == ".gguf":
        return tuple(dict.fromkeys((model_name, name_of_gguf(checkpoint))))
    folder = checkpoint.parent if checkpoint.is_file() else checkpoint
    kind, *repository = folder.parent.parent.name.split("--")
    in_cache = (kind, folder.parent.name, len(repository)) == ("models", "snapshots", 2)
    return tuple(dict.fromkeys((model_name, "/".join(repository) if in_cache else folder.name)))


def content_length(headers: Mapping[str, Any]) -> int | None:
    """The header of that name, however it is spelled; None if there is none."""
    for name, value in headers.items():
        if name.lower() == "content-length" and isinstance(value, str) and value.isdecimal():
            return int(value.lstrip("0")[:MAX_DIGITS] or "0")
    return None


def is_form(headers: Mapping[str, Any]) -> bool:
    """Whether TorchServe takes the body apart into fields, of which it may keep none."""
    kinds = [str(value).lower() for name, value in headers.items() if name.lower() == "content-type"]
    return any(kind.startswith(("multipart/", "application/x-www-form-urlencoded")) for kind in kinds)


def fatal(error: BaseException) -> bool:
    """Whether every later request would fail as well: the engine has stopped, or the device is lost to this process.

    A CUDA assertion is such a loss: TorchServe would answer 507 for ever and call itself healthy. Running out of
    memory is not. Nor is any refusal: its message quotes the client, who may write anything.
    """
    if isinstance(error, (torch.OutOfMemoryError, RequestError)):
        return False
    lost: Any = getattr(torch, "AcceleratorError", ())
    return isinstance(error, (EngineError, lost)) or str(error).startswith("CUDA error")
