"""``gpt-fast archive``: pack handler, package, configuration and weights into an archive for TorchServe."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from gpt_fast.serve.archive import SUFFIXES, build_archive


def add_parser(subparsers: Any) -> None:
    """Declare the command. Its options are the parameters of ``build_archive``."""
    parser = subparsers.add_parser("archive", help="build an archive for TorchServe", description=__doc__)
    names = set()

    def add(flag: str, **facts: Any) -> None:
        names.add(parser.add_argument(flag, **facts).dest)

    formats = "no-archive: a folder; default: .mar; zip-store: .mar without compression (default: %(default)s)"
    links = "copy files of the checkpoint that are links out of its folder, too"
    add("--checkpoint", required=True, metavar="DIR", help="the model: weights, config.json, tokenizer")
    add("--by-reference", action="store_true", help="name the checkpoint's path, do not copy it")
    add("--name", default="gpt-fast", help="the model's name in TorchServe (default: %(default)s)")
    add("--version", default="1.0", help="the model's version in TorchServe (default: %(default)s)")
    add("--format", dest="archive_format", default="no-archive", choices=list(SUFFIXES), help=formats)
    add("--config", metavar="FILE", help="default: model_config.yaml of the repository")
    add("--handler", metavar="FILE", help="default: handler.py of the repository")
    add("--follow-links", action="store_true", help=links)
    add("--output", default="model_store", metavar="DIR", help="where to (default: %(default)s)")
    parser.set_defaults(run=run, names=names)


def run(arguments: argparse.Namespace) -> int:
    """Build it; prints its path on stdout."""
    options = {name: getattr(arguments, name) for name in arguments.names}
    print(build_archive(**options, say=lambda line: print(line, file=sys.stderr)))
    return 0
