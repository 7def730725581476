"""``gpt-fast archive``: pack handler, package, configuration and weights into an archive for TorchServe."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from gpt_fast.commands import options
from gpt_fast.serve.archive import SUFFIXES, build_archive

_FORMATS = "no-archive: a folder; default: .mar; zip-store: .mar without compression (default: no-archive)"
_LINKS = "copy files of the checkpoint that are links out of its folder, too"
_OPTIONS: options.Table = {  # the parameters of build_archive
    "--checkpoint": {"required": True, "metavar": "DIR", "help": "the model: weights, config.json, tokenizer"},
    "--draft": {"metavar": "DIR", "help": "a smaller model with the same vocabulary, which guesses tokens ahead"},
    **options.LORA,
    "--by-reference": {
        "action": "store_true",
        "help": "name the paths of checkpoint, draft and adapters, copy none",
    },
    "--name": {"help": "the model's name in TorchServe (default: gpt-fast)"},
    "--version": {"help": "the model's version in TorchServe (default: 1.0)"},
    "--format": {"dest": "archive_format", "choices": list(SUFFIXES), "help": _FORMATS},
    "--config": {"metavar": "FILE", "help": "default: model_config.yaml of the repository"},
    "--handler": {"metavar": "FILE", "help": "default: handler.py of the repository"},
    "--follow-links": {"action": "store_true", "help": _LINKS},
    "--output": {"metavar": "DIR", "help": "where to (default: model_store)"},
}


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("archive", help="build an archive for TorchServe", description=__doc__)
    parser.set_defaults(run=run, names=options.add_options(parser, _OPTIONS))


def run(arguments: argparse.Namespace) -> int:
    """Build it; prints its path on stdout."""
    print(build_archive(**options.given(arguments, arguments.names), say=lambda line: print(line, file=sys.stderr)))
    return 0
