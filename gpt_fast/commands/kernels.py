"""``gpt-fast kernels``: build the C++ kernels for every CPU of this architecture, for machines without a compiler."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gpt_fast.commands import options


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("kernels", help="build the C++ kernels for other machines", description=__doc__)
    parser.add_argument("--output", required=True, metavar="DIR", help="where to; GPT_FAST_KERNEL_DIR names it later")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Build them; prints their paths on stdout. A variant that the compiler does not know is left out with a word."""
    from gpt_fast.kernels.cpu.building import build_all

    options.set_up_logging(verbose=False)
    for path in build_all(Path(arguments.output).absolute()):
        print(path)
    return 0
