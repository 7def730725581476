"""``gpt-fast archive``: pack handler, package, configuration and weights into an archive for TorchServe."""

from __future__ import annotations

from typing import Any

from gpt_fast import archive


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("archive", help="build an archive for TorchServe", description=__doc__)
    archive.add_arguments(parser)
    parser.set_defaults(run=archive.run)
