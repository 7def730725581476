"""``gpt-fast convert``: a foreign checkpoint (gpt-fast .pth, llama2.c .pt or .bin) to a Hugging Face directory."""

from __future__ import annotations

import argparse
import sys
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("convert", help="import a foreign checkpoint", description=__doc__)
    parser.add_argument("source", metavar="SOURCE", help="a file in one of those formats, or a Hugging Face directory")
    parser.add_argument("--out", required=True, metavar="DIR", help="where the Hugging Face directory goes")
    parser.add_argument(
        "--tokenizer", metavar="FILE", help="tokenizer to put beside it (default: found next to SOURCE)"
    )
    parser.add_argument("--config", metavar="FILE", help="config.json or params.json of a .pth that has none beside it")
    parser.add_argument("--dtype", metavar="DTYPE", help="float32, bfloat16, float16 (default: as stored)")
    parser.add_argument("--force", action="store_true", help="replace DIR if it exists")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Convert; the directory appears whole or not at all."""
    from gpt_fast.importers import convert

    convert(
        arguments.source,
        arguments.out,
        tokenizer=arguments.tokenizer,
        config=arguments.config,
        dtype=arguments.dtype,
        force=arguments.force,
    )
    print(f"wrote {arguments.out}", file=sys.stderr)
    return 0
