"""What can go wrong, for people: each error says what was wrong, which field or file, and what to do."""

from __future__ import annotations

import traceback
from collections.abc import Collection

MAX_SHOWN = 300  # characters of a failure that are logged or told: it may quote what a client sent
_RETRY_AFTER_S = 1  # what a client is told to wait whom the server is too busy for
_NAMES = 5  # listed in an error


def some(names: Collection[str]) -> str:
    """The first of ``names``, and how many more there are."""
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return ", ".join(list(names)[:_NAMES]) + more


class ConfigError(ValueError):
    """A configuration value or key is wrong; the message names the key and what would be accepted."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read or is not supported; the message names the file and the key or tensor."""


class UnknownFamilyError(CheckpointError):
    """A checkpoint is of an architecture that has no description here; the message names those that have."""


class DownloadError(CheckpointError):
    """A checkpoint cannot be fetched; the message says what to do about it."""


class ServerError(RuntimeError):
    """A server cannot be started, asked or stopped; the message is for the person at the terminal."""


class TokenizerError(ValueError):
    """A tokenizer file or a token id is wrong; the message names it and says what to do."""


class TokenizerMissing(TokenizerError):  # noqa: N818 - absence is a state, not always an error
    """A checkpoint has no tokenizer at all; it can still be given token ids."""


class RequestError(ValueError):
    """A request cannot be served as written. ``message`` is for the person who wrote it, ``param`` names the field,
    ``code`` is a stable identifier, ``status`` the HTTP status. ``retry_after_s``: when trying again makes sense."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str = "invalid_value",
        status: int = 400,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.code = message, param, code
        self.status, self.retry_after_s = status, retry_after_s


def try_later(message: str) -> RequestError:
    """The refusal of a request that could be served at another time: 503, with the seconds to wait."""
    return RequestError(f"{message}; try again later", None, "queue_full", 503, _RETRY_AFTER_S)


class EngineError(RuntimeError):
    """The engine has stopped; the message says why."""


class RankError(RuntimeError):
    """One of the processes that share a model is lost, or does not do what rank 0 expects; the message says which."""


class RequestFailedError(RuntimeError):
    """One request failed inside the engine, which goes on; the message says why."""


class UnavailableError(RuntimeError):
    """The kernels cannot run here; the message says why."""


class CompilerError(UnavailableError):
    """The compiler did not accept the sources or the flags."""


class UnsupportedError(ValueError):
    """An executor does not run an operation, or weights of a kind; the message names what and why."""


class MissingPackageError(RuntimeError):
    """An optional package is not installed; the message names it and the pip command."""


class BatchError(RuntimeError):
    """A batch cannot go on: a file, a lock, workers; the message says what is kept and what to do."""


class LoadError(RuntimeError):
    """The endpoint of a load test does not answer as it should; a measurement would mean nothing."""


class TransferError(Exception):
    """A connection of the load client, or what came over it, broke; the same cause has the same short message."""


class AnswerError(Exception):
    """The server said in the body that the request failed, or the body is not what the protocol promises."""


def first_line(error: BaseException) -> str:
    """Of what ``error`` says, no more than MAX_SHOWN; its type where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:MAX_SHOWN]


def brief(error: BaseException) -> str:
    """For the log: where ``error`` was raised, and the beginning of what it says."""
    return f"{type(error).__name__}: {str(error)[:MAX_SHOWN]}\n" + "".join(traceback.format_tb(error.__traceback__))


def without_frames(error: Exception) -> Exception:
    """``error``, to be kept: it no longer holds the variables of the functions that it was raised through."""
    error.__context__ = None
    return error.with_traceback(None)
