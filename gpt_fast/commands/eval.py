"""``gpt-fast eval``: how good a checkpoint is: perplexity of a text, or tasks of lm-evaluation-harness."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpt_fast.commands import options, values
from gpt_fast.config import EngineConfig

if TYPE_CHECKING:
    from gpt_fast.model.steps import Served
    from gpt_fast.tokenizer import Tokenizer


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("eval", help="perplexity, or evaluation tasks", description=__doc__)
    options.add_options(parser, options.CHECKPOINT | options.MODEL | options.CACHE)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--perplexity", metavar="FILE", help="a text file; documents end with the separator")
    examples = "accuracy on lines of choices, or of contexts and continuations"
    what.add_argument("--examples", metavar="FILE.jsonl", help=examples)
    what.add_argument("--tasks", metavar="NAME,...", help="tasks of lm-evaluation-harness; needs the extra eval")
    add = parser.add_argument
    absent = argparse.SUPPRESS
    add("--separator", default=absent, metavar="TEXT", help="'' for none (default: <|endoftext|>)")
    add("--context", type=values.whole(2), metavar="N", help="tokens of a window (default: the model's)")
    add("--stride", type=values.whole(1), metavar="N", help="tokens that windows move on by (default: half of it)")
    add("--max-tokens", type=values.whole(1), metavar="N", help="stop after scoring so many")
    add("--limit", type=values.whole(1), metavar="N", help="so many examples, of each task")
    options.add_output_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Load the model without an engine, measure, print. Of several ranks all do the same, and rank 0 prints."""
    import torch

    from gpt_fast.checkpoint.shard import Shard
    from gpt_fast.errors import ConfigError
    from gpt_fast.foreign.checkpoint import open_checkpoint
    from gpt_fast.memory import check_weights
    from gpt_fast.model.steps import serve
    from gpt_fast.parallel.group import Group, device_of_rank
    from gpt_fast.parallel.ranks import Ranks
    from gpt_fast.placement import choose_placement, usable_threads

    options.set_up_logging(arguments.verbose)
    options.refuse_absent(arguments.checkpoint)
    _refuse_without_effect(arguments)
    o = EngineConfig(**options.engine_options(arguments))
    if o.threads is not None:
        torch.set_num_threads(usable_threads(o.threads))
    opened = open_checkpoint(arguments.checkpoint).with_adapters(o.lora)
    wanted: dict[str, Any] = {"device": o.device, "dtype": o.dtype, "kernels": o.kernels}
    where = choose_placement(opened.num_parameters, opened.stored_dtype, **wanted)
    tokenizer = opened.tokenizer
    device = device_of_rank(where.device)
    group = Group.from_environment(device)
    if group is not None and arguments.tasks:
        raise ConfigError("tasks: some want completions, which several ranks do not make here; start one process")
    leads, shard = group is None or group.rank == 0, None if group is None else Shard(group.rank, group.count)
    modes = opened.smaller_modes(o.quantize)
    check_weights(opened.num_bytes(where.dtype, o.quantize, shard), device, modes)
    how: dict[str, Any] = {"quantize": o.quantize, "column_major": where.column_major, "shard": shard}
    loaded = opened.build(where.dtype, device, progress=leads, **how)
    model = serve(loaded, kernels=where.kernels, compile=False, ranks=Ranks.of(group))
    if group is not None:
        group.wait()  # until all can compute
    say = print if leads else _say_nothing
    found = _measure(arguments, model, tokenizer, o.kv_cache_dtype, say)
    if arguments.json:
        facts: dict[str, Any] = {
            "checkpoint": arguments.checkpoint,
            "kernels": where.kernels,
            "dtype": str(where.dtype).removeprefix("torch."),
            "quantize": o.quantize,
            "kv_cache_dtype": o.kv_cache_dtype,
            "bytes_per_token": model.bytes_per_token(0, where.dtype.itemsize),
        }
        say(json.dumps(facts | found))
    if group is not None:
        group.close()
    return 0


def _measure(
    arguments: argparse.Namespace, model: Served, tokenizer: Tokenizer, cache: str, say: Callable[[str], None]
) -> dict[str, Any]:
    """What ``arguments`` ask for: said to people, and returned for --json. ``cache``: dtype of keys and values."""
    import torch

    from gpt_fast.evaluate import Scorer, evaluate_tasks, perplexity, read_examples
    from gpt_fast.text_files import read_text

    cache_dtype = None if cache == "auto" else getattr(torch, cache)
    if arguments.perplexity is not None:
        text = read_text(arguments.perplexity)
        chosen = options.given(arguments, ("context", "stride", "max_tokens", "separator"))
        found = perplexity(model, tokenizer, text, cache_dtype=cache_dtype, **chosen)
        say(
            f"perplexity {found.perplexity:.4f} over {found.num_tokens} tokens of {found.num_documents} documents, "
            f"{found.bits_per_byte:.4f} bits per byte"
        )
        return {"perplexity_of": arguments.perplexity, **found._asdict()}
    if arguments.examples is not None:
        examples = read_examples(arguments.examples, arguments.limit)
        accuracy = Scorer(model, tokenizer, arguments.context, cache_dtype).accuracy(examples)
        say(f"accuracy {accuracy['accuracy']:.4f} on {accuracy['num_examples']} examples")
        return {"examples_of": arguments.examples, **accuracy}
    scorer = Scorer(model, tokenizer, arguments.context, cache_dtype)
    results = evaluate_tasks(scorer, arguments.tasks.split(","), arguments.limit)
    for name, metrics in results.items():
        say(f"{name}: " + ", ".join(f"{k} {v:.4f}" for k, v in metrics.items() if isinstance(v, float)))
    return {"tasks": results}


def _refuse_without_effect(arguments: argparse.Namespace) -> None:
    """Raise ValueError for an option of another kind of evaluation."""
    kind = next(name for name in ("perplexity", "examples", "tasks") if getattr(arguments, name) is not None)
    for name in ("limit",) if kind == "perplexity" else ("separator", "stride", "max_tokens"):
        if vars(arguments).get(name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} means nothing with --{kind}")


def _say_nothing(*_: object) -> None:
    """What ranks print that another one prints."""
