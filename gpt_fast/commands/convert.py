"""``gpt-fast convert``: a foreign checkpoint (gpt-fast .pth, llama2.c .pt, .bin, GGUF) to a Hugging Face directory."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from gpt_fast.commands import options


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("convert", help="import a foreign checkpoint", description=__doc__)
    parser.add_argument("source", metavar="SOURCE", help="a file in one of those formats, or a Hugging Face directory")
    parser.add_argument("--out", required=True, metavar="DIR", help="where the Hugging Face directory goes")
    beside = "tokenizer to put beside it (default: found next to SOURCE, or in it)"
    parser.add_argument("--tokenizer", metavar="FILE", help=beside)
    parser.add_argument("--config", metavar="FILE", help="config.json, params.json or a shape's name, for a bare .pth")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: as stored")
    options.add_options(parser, options.LORA)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Convert; the directory appears whole or not at all."""
    import torch

    from gpt_fast.checkpoint.convert import convert

    a, dtype = arguments, getattr(torch, arguments.dtype) if arguments.dtype else None
    convert(a.source, a.out, a.tokenizer, dtype, config=a.config, progress=True, **options.given(a, ("lora",)))
    print(f"wrote {a.out}", file=sys.stderr)
    return 0
