"""``gpt-fast``: generate, serve, batch, bench, info, download, convert, quantize, eval, archive, kernels."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpt_fast import __version__

# Options that name a file or folder. An error of the system about one of these, or about what is made in or beside it,
# is told with the option.
_PATHS = (
    *("out", "output", "run_dir", "input", "calibration", "perplexity", "examples", "dataset", "plot", "profile"),
    *("request", "config", "handler", "tokenizer", "checkpoint", "draft", "source"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 done, 1 refused or failed, 2 wrong usage, 130 interrupted."""
    try:
        _prepare_streams()
        with _ended_in_good_order():
            return _run(argv)
    except KeyboardInterrupt as error:  # from anywhere, also from the imports of the commands, which take a moment
        print("\ninterrupted" + "".join(f": {words}" for words in error.args), file=sys.stderr)
        return 130
    finally:
        _settle_stdout()


def commands() -> tuple[Any, ...]:
    """The modules of the commands."""
    from gpt_fast.commands import archive, batch, bench, convert, download, generate, info, kernels, quantize, serve
    from gpt_fast.commands import eval as evaluate

    return generate, serve, batch, bench, info, download, convert, quantize, evaluate, archive, kernels


def _run(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="gpt-fast", description=(__doc__ or "").partition(": ")[2])
    parser.add_argument("--version", action="version", version=f"gpt-fast {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in commands():
        command.add_parser(subparsers)
    for declared in subparsers.choices.values():
        declared.description = _without_markup(declared.description)
    arguments = parser.parse_args(argv)
    try:
        _refuse_empty(arguments)
        status = int(arguments.run(arguments))
        _flush_stdout()
        return status
    except BrokenPipeError:
        return 0  # the reader of our output has seen enough
    except (ValueError, OSError, RuntimeError) as error:
        if getattr(arguments, "verbose", False):
            raise
        told = _told(error, arguments) if isinstance(error, OSError) else error
        print(f"gpt-fast {arguments.command}: {told}", file=sys.stderr)
        return 1


def _prepare_streams() -> None:
    """Put the null device in the place of each standard stream that was closed, so that no file opened later gets its
    number. Let stdout escape, as stderr does, what its encoding lacks: that must not end a command."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - open until the process ends
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def _ended_in_good_order() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit with their status, so that what is half made is removed on the way out. A
    second one ends the process at once. A command may hear them in its own way. Of several ranks each ends at once: one
    that waits for another in C++ would not hear."""
    # Only the main thread may ask for signals.
    hears = os.environ.get("WORLD_SIZE", "1") == "1" and threading.current_thread() is threading.main_thread()
    asked = (signal.SIGTERM, signal.SIGHUP) if hears else ()
    numbers = [number for number in asked if signal.getsignal(number) == signal.SIG_DFL]

    def end(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise SystemExit(128 + number)

    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            if signal.getsignal(number) is end:
                signal.signal(number, signal.SIG_DFL)


def _flush_stdout() -> None:
    """Write what stdout still holds, while an error can be told. Raises OSError, which names it."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, "stdout") from error


def _settle_stdout() -> None:
    """Let the null device have what cannot be written, since Python tries again when it ends, and complains."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _without_markup(docstring: str | None) -> str:
    """The sentences of "``gpt-fast verb``: sentences" in the first paragraph; none where Python left it out (-OO)."""
    text = (docstring or "").split("\n\n")[0].partition(": ")[2].replace("``", "")
    return text[:1].upper() + text[1:]


def _refuse_empty(arguments: argparse.Namespace) -> None:
    """Raise ValueError for an empty path, such as a shell makes of a variable that is not set: it would mean the
    current folder, or what holds without the option."""
    for name in (*_PATHS, "lora"):
        values = vars(arguments).get(name)
        if "" in (values if isinstance(values, (list, dict)) else [values]):
            raise ValueError(f"{_flag(name)} is empty; give a path")


def _told(error: OSError, arguments: argparse.Namespace) -> str:
    """``error`` in words, with the file and the option that named it, if one did."""
    if error.strerror is None or not isinstance(error.filename, str):
        return error.strerror or str(error)
    option = next((f"{name}: " for name, given in _named(arguments) if _concerns(Path(error.filename), given)), "")
    return f"{option}{error.filename} cannot be used: {error.strerror}"


def _named(arguments: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    """The options that name files and folders, and those."""
    for name in _PATHS:
        values = vars(arguments).get(name)
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, (str, Path)):
                yield _flag(name), Path(value)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}" if name != "source" else "SOURCE"


def _concerns(file: Path, given: Path) -> bool:
    """Whether ``file`` is ``given``, in it, a folder above it, or beside it with its name and more."""
    file, given = file.absolute(), given.absolute()
    beside = file.parent == given.parent and given.name in file.name
    return beside or file.is_relative_to(given) or given.is_relative_to(file)
