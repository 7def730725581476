"""``gpt-fast download``: fetch a checkpoint from a model hub; keeps what is there, and checks that all of it came."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("download", help="fetch a checkpoint from a model hub", description=__doc__)
    parser.add_argument("repo", metavar="REPO", help="owner/name")
    parser.add_argument("file", nargs="?", metavar="FILE", help="a GGUF file of it, instead of its other weights")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit (default: the main branch)")
    parser.add_argument("--out", metavar="DIR", help="where to (default: the hub library's cache)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Download; prints the directory, or the file that was named, on stdout."""
    from gpt_fast.checkpoint.download import download, ended_at_once

    with ended_at_once():
        found = download(arguments.repo, arguments.file, revision=arguments.revision, out_dir=arguments.out)
    print(found)
    print(f"next: gpt-fast generate --checkpoint {shlex.quote(str(found))} --prompt TEXT", file=sys.stderr)
    return 0
