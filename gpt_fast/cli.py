"""``gpt-fast``: generate, serve, batch, bench, info, download, convert, quantize, eval, archive, kernels."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from gpt_fast import __version__
from gpt_fast.commands import archive, batch, bench, convert, download, generate, info, kernels, quantize, serve
from gpt_fast.commands import eval as evaluate

COMMANDS = (generate, serve, batch, bench, info, download, convert, quantize, evaluate, archive, kernels)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 done, 1 refused or failed, 2 wrong usage, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="gpt-fast", description=__doc__.split(": ", 1)[1])
    parser.add_argument("--version", action="version", version=f"gpt-fast {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0  # the reader of our output has seen enough
    except (ValueError, OSError, RuntimeError) as error:
        if getattr(arguments, "verbose", False):
            raise
        print(f"gpt-fast {arguments.command}: {error}", file=sys.stderr)
        return 1
