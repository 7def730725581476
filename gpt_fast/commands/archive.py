"""``gpt-fast archive``: pack handler, package, configuration and weights into an archive for TorchServe."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from gpt_fast.serve.archive import SUFFIXES, build_archive


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("archive", help="build an archive for TorchServe", description=__doc__)
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="the model: weights, config.json, tokenizer")
    parser.add_argument("--by-reference", action="store_true", help="name the checkpoint's path, do not copy it")
    parser.add_argument("--name", default="gpt-fast", help="the model's name in TorchServe (default: %(default)s)")
    parser.add_argument("--version", default="1.0", help="the model's version in TorchServe (default: %(default)s)")
    parser.add_argument(
        "--format",
        default="no-archive",
        choices=list(SUFFIXES),
        help="no-archive: a folder; default: .mar; zip-store: .mar without compression (default: %(default)s)",
    )
    parser.add_argument("--config", metavar="FILE", help="default: model_config.yaml of the repository")
    parser.add_argument("--handler", metavar="FILE", help="default: handler.py of the repository")
    parser.add_argument(
        "--follow-links", action="store_true", help="copy files of the checkpoint that are links out of its folder, too"
    )
    parser.add_argument("--output", default="model_store", metavar="DIR", help="where to (default: %(default)s)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Build it; prints its path on stdout."""
    path = build_archive(
        arguments.checkpoint,
        name=arguments.name,
        version=arguments.version,
        archive_format=arguments.format,
        config=arguments.config,
        handler=arguments.handler,
        output=arguments.output,
        by_reference=arguments.by_reference,
        follow_links=arguments.follow_links,
        say=lambda line: print(line, file=sys.stderr),
    )
    print(path)
    return 0
