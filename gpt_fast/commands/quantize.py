"""``gpt-fast quantize``: a checkpoint with its weights in int8, int4 or fp8, smaller and faster to read.

int4 rounds to nearest; int4-gptq needs a calibration text, takes much longer and loses less. The result is a directory
like the source, which every other command takes.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from gpt_fast.commands import options, values

_MODES = ("int8", "int4", "int4-gptq", "fp8")
_SEQUENCES = 128  # without --calibration-sequences


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("quantize", help="write a quantized checkpoint", description=__doc__)
    parser.add_argument(
        "--checkpoint", required=True, metavar="DIR", help="a Hugging Face directory, unquantized, or a GGUF file"
    )
    parser.add_argument("--mode", required=True, choices=_MODES)
    parser.add_argument("--out", required=True, metavar="DIR", help="where the quantized directory goes")
    parser.add_argument("--group-size", type=int, default=None, metavar="G", help="int4: 32, 64 or 128 (default: 32)")
    parser.add_argument("--keep-head", action="store_true", help="leave the head as it is, not in int8 or fp8")
    like = "int4-gptq: text like what the model will write"
    parser.add_argument("--calibration", nargs="+", metavar="FILE", help=like)
    size = f"int4-gptq: of 512 tokens (default: {_SEQUENCES})"
    parser.add_argument("--calibration-sequences", type=values.whole(1), metavar="N", help=size)
    options.add_options(parser, options.LORA)
    parser.add_argument("--resume", action="store_true", help="go on with what an interrupted run left behind")
    parser.add_argument("--verbose", action="store_true", help="a traceback on errors")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Quantize; the directory appears whole or not at all."""
    options.refuse_absent(arguments.checkpoint)
    try:
        _quantize(arguments)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command with --resume goes on from here") from None
    print(f"wrote {arguments.out}: {_what_became_what(arguments.out)}", file=sys.stderr)
    return 0


def _quantize(arguments: argparse.Namespace) -> None:
    from gpt_fast.checkpoint.checkpoint import Checkpoint
    from gpt_fast.quantize.scheme import quant_config
    from gpt_fast.quantize.writer import quantize_checkpoint

    mode, gptq = arguments.mode.removesuffix("-gptq"), arguments.mode.endswith("-gptq")
    if mode != "int4" and arguments.group_size is not None:
        raise ValueError(f"--group-size means nothing with --mode {arguments.mode}")
    if not gptq and arguments.calibration_sequences is not None:
        raise ValueError(f"--calibration-sequences means nothing with --mode {arguments.mode}")
    if gptq != bool(arguments.calibration):
        raise ValueError("--mode int4-gptq and --calibration need each other")
    size = 32 if arguments.group_size is None else arguments.group_size
    quant = quant_config(mode, size, quantize_head=not arguments.keep_head)
    checkpoint, out = Checkpoint.open(arguments.checkpoint), Path(arguments.out)
    checkpoint = checkpoint.with_adapters(vars(arguments).get("lora"))
    if gptq:
        from gpt_fast.evaluate import documents
        from gpt_fast.quantize.calibrate import calibration_tokens, quantize_with_text
        from gpt_fast.text_files import read_text

        text = [d for file in arguments.calibration for d in documents(read_text(file))]
        length, count = min(512, checkpoint.config.max_seq_len), arguments.calibration_sequences or _SEQUENCES
        tokens = calibration_tokens(text, checkpoint.tokenizer.encode, length, count)
        quantize_with_text(checkpoint, out, quant, tokens, resume=arguments.resume, progress=True)
    else:
        quantize_checkpoint(checkpoint, out, quant, resume=arguments.resume, progress=True)


def _what_became_what(directory: str) -> str:
    import torch

    from gpt_fast.checkpoint.checkpoint import Checkpoint
    from gpt_fast.quantize.linear import QuantizedLinear

    counts: Counter[str] = Counter()
    for module in Checkpoint.open(directory).meta_model(torch.float32).modules():
        if isinstance(module, QuantizedLinear):
            counts[str(module.scheme)] += module.in_features * module.out_features
    return ", ".join(f"{count / 1e6:,.1f} M weights in {scheme}" for scheme, count in counts.most_common())
