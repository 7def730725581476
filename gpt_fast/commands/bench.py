"""``gpt-fast bench``: measure how fast the engine decodes here, with ``--draft`` what each way to speculate does to
that, or with ``--url`` how a running server does under load.

stdout carries the tables; with ``--json`` one JSON object follows on a last line, the one that ``--output`` writes.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt_fast.commands import options, values

if TYPE_CHECKING:
    from gpt_fast.bench.load.options import LoadOptions
    from gpt_fast.bench.load.prompts import Prompt

_MODES = {"engine": "--checkpoint and --shape without --draft", "drafts": "--draft", "load": "--url"}
_DEFAULT_INPUT_LEN = 128
_DEFAULT_VOCAB_SIZE = 500  # below that of any model, so that the ids exist wherever they are sent


def add_parser(subparsers: Any) -> None:
    """Declare the command. Options of one mode default to absent, so that the others can refuse them by name."""
    parser = subparsers.add_parser("bench", help="measure the engine or a server under load", description=__doc__)
    of_server = (
        "load a running server: the whole address that requests go to, e.g. http://HOST:PORT/predictions/gpt-fast"
    )
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--url", help=of_server)
    target.add_argument(
        "--checkpoint", metavar="DIR", help="measure the engine: a Hugging Face directory or GGUF file, as it is"
    )
    target.add_argument("--shape", metavar="NAME", help="measure the engine: random weights of a named shape")
    parser.add_argument("--seed", type=int, default=0, help="prompts, arrivals, sampling (default: %(default)s)")
    options.add_output_options(parser)
    parser.add_argument("--output", metavar="FILE.json", help="write that object to a file")
    engine = _add_engine_options(parser.add_argument_group("engine, with --checkpoint or --shape"))
    of_load = "load, with --url; --dataset, --temperature and --plot also with --checkpoint and --draft"
    load = _add_load_options(parser.add_argument_group(of_load))
    drafts = engine - {"speculate", "prompt_tokens"} | {"dataset", "temperature", "plot"}
    plain = engine - {"draft", "method", "profile", "speculate", "speculate_k"}
    modes = {"engine": plain, "drafts": drafts, "load": load}
    parser.set_defaults(run=run, modes=modes, names=engine | load)


def _add(group: argparse._ArgumentGroup, names: set[str], *flags: str, **settings: Any) -> None:
    names.add(group.add_argument(*flags, default=argparse.SUPPRESS, **settings).dest)


def _add_engine_options(group: argparse._ArgumentGroup) -> set[str]:
    """Returns the names of what it adds."""
    names: set[str] = set()
    add = functools.partial(_add, group, names)
    add("--batch-sizes", type=values.wholes, metavar="B,...", help="sequences decoded together (default: 1)")
    prompts = "tokens of each prompt, which is the context that decoding starts from; a row for each (default: 128)"
    add("--prompt-tokens", "--context", type=values.wholes, metavar="P,...", help=prompts)
    add("--new-tokens", type=int, metavar="N", help="tokens to decode (default: 64; with --draft 128 or fewer)")
    add("--repeats", type=int, metavar="R", help="runs of each row, the median counts (default: 3; with --draft 5)")
    rules = "with --draft: published rules as well (leviathan, chen; coupled in their form), slow; see generate"
    add("--method", type=_names, metavar="RULE,...", help=rules)
    traces = "with --draft: then run each way once more, and write a trace of it (chrome://tracing, Perfetto)"
    add("--profile", metavar="DIR", help=traces)
    # No mode takes it: bench --draft measures every way to speculate. It is declared to be refused by name.
    unasked = {"--speculate": options.ENGINE["--speculate"] | {"help": argparse.SUPPRESS}}
    return {*names, *options.add_options(group, options.ENGINE | unasked)}


def _add_load_options(group: argparse._ArgumentGroup) -> set[str]:
    """Returns the names of what it adds."""
    names: set[str] = set()
    add = functools.partial(_add, group, names)
    add("--protocol", metavar="NAME", help="native, openai-completions or openai-chat (default: native)")
    add("--model", metavar="NAME", help="the model that OpenAI requests name (default: gpt-fast)")
    add("--header", action="append", metavar="NAME:VALUE", help="send this header as well (may be repeated)")
    add("--dataset", metavar="FILE", help="prompts: .jsonl or .json (prompt, turns, conversations), or .txt")
    add("--random-input-len", type=int, metavar="N", help="without a dataset: tokens of each prompt (default: 128)")
    add("--random-output-len", type=int, metavar="N", help="generate exactly N tokens (same as the two options below)")
    add("--max-new-tokens", type=int, metavar="N", help="most tokens to generate (default: 128)")
    eos = "go on past the end-of-sequence token, so that the length is known (default: on without a dataset)"
    add("--ignore-eos", action=argparse.BooleanOptionalAction, help=eos)
    add("--random-vocab-size", type=int, metavar="V", help="draw token ids below V (default: 500)")
    add("--temperature", type=float, metavar="T", help="0 is greedy (default: 0)")
    add("--stream", action=argparse.BooleanOptionalAction, help="stream the answers (default: on)")
    add("--num-prompts", type=int, metavar="N", help="requests to send, at each level (default: 100)")
    add("--duration", dest="duration_s", type=float, metavar="S", help="instead: send for so many seconds, each level")
    add("--request-rate", type=float, metavar="R", help="arrivals per second, Poisson (default: inf, all at once)")
    add("--burstiness", type=float, metavar="B", help="1: Poisson; less: in bursts; more: regular (default: 1)")
    add("--max-concurrency", type=int, metavar="N", help="requests under way at most (default: any number)")
    add("--sweep", type=values.wholes, metavar="N,...", help="measure at each of these concurrencies")
    add("--sweep-rate", type=values.numbers, metavar="R,...", help="measure at each of these request rates")
    add("--abort-fraction", type=float, metavar="F", help="share of requests that hang up after the first text")
    add("--timeout", dest="timeout_s", type=float, metavar="S", help="for one whole request (default: 600)")
    add("--keep-alive", action="store_const", const=True, help="reuse connections (default: one for each request)")
    add("--goodput", nargs="+", metavar="METRIC:MS", help="limits that a good request keeps: ttft, tpot, e2el")
    add("--percentiles", type=values.numbers, metavar="P,...", help="of every latency (default: 99)")
    add("--tokenizer", metavar="DIR", help="count tokens of text by this tokenizer where the server does not say")
    add("--plot", metavar="FILE.png", help="draw the results against load, or against drafts; needs the extra plot")
    return names


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, write."""
    mode = "load" if arguments.url else "drafts" if "draft" in arguments else "engine"
    for name in sorted(arguments.names - arguments.modes[mode]):
        if name in arguments:
            print(f"gpt-fast bench: {_flag(name)} means nothing with {_MODES[mode]}", file=sys.stderr)
            return 2
    options.engine_options(arguments)  # refuses by name
    options.refuse_absent(arguments.checkpoint)
    for option, path in (("--output", arguments.output), ("--plot", vars(arguments).get("plot"))):
        if path:
            options.check_place(option, Path(path).resolve())
    if "profile" in arguments:
        options.check_traces(arguments.profile, "target.trace.json")
    options.set_up_logging(arguments.verbose)
    given = {name: value for name, value in vars(arguments).items() if name in arguments.modes[mode]}
    given["seed"] = arguments.seed
    found = {"load": run_load, "drafts": run_drafts, "engine": run_engine}[mode](arguments, given)
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if arguments.json:
        print(json.dumps(found))
    return 0 if mode != "load" or any(row["completed"] for row in found["results"]) else 1


def run_engine(arguments: argparse.Namespace, given: dict[str, Any]) -> dict[str, Any]:
    """The ceiling, then a row for each batch size and prompt length."""
    from gpt_fast.bench import throughput as bench

    fields = {field.name for field in dataclasses.fields(bench.BenchOptions)}
    wanted = bench.BenchOptions(**{name: value for name, value in given.items() if name in fields})
    engine = {name: value for name, value in given.items() if name not in fields}
    bench.measure_bandwidth(engine.get("device", "auto"), engine.get("threads"))
    with bench.build(checkpoint=arguments.checkpoint, shape_name=arguments.shape, bench=wanted, **engine) as llm:
        facts = {"benchmark": "engine", "model": arguments.shape or arguments.checkpoint, **bench.ceiling(llm)}
        num_threads = facts["bandwidth_threads"]
        print(
            f"{facts['model']}: {_short(facts['parameters'])} parameters in {facts['dtype']}, on {facts['device']}\n"
            f"ceiling: {facts['machine_bandwidth_gb_s']:.1f} GB/s measured ({num_threads} thread"
            f"{'s' * (num_threads > 1)}) / {_short(facts['bytes_per_token'])}B a token = "
            f"{facts['ceiling_tokens_per_second']:.1f} tokens/s for one sequence without context"
        )
        print("  batch  prompt  first token     prefill       decode         each   bandwidth  of ceiling  peak memory")
        facts["results"] = bench.benchmark(llm, wanted, lambda row: print(_engine_row(row), flush=True))
    return facts


def _short(number: float) -> str:
    """260032 -> 260k, 1.1e9 -> 1.1G."""
    for unit, size in (("G", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number / 1e3:.3g} k"


def _engine_row(row: dict[str, Any]) -> str:
    memory = row.get("peak_device_gb", row["peak_rss_gb"])
    return (
        f"{row['batch_size']:7d} {row['prompt_tokens']:7d} {1e3 * row['time_to_first_token_s']:9.1f} ms"
        f"{row['prefill_tokens_per_second']:8.0f} t/s {row['decode_tokens_per_second']:8.1f} t/s"
        f"{row['decode_tokens_per_second_per_sequence']:9.1f} t/s {row['achieved_bandwidth_gb_s']:6.1f} GB/s"
        f"{row['share_of_ceiling']:12.1%} {memory:9.2f} GB"
    )


def run_drafts(arguments: argparse.Namespace, given: dict[str, Any]) -> dict[str, Any]:
    """A table for each batch size, with a row for each way to speculate."""
    from gpt_fast.bench import draft_table as table
    from gpt_fast.bench import plots
    from gpt_fast.bench import speculation as bench

    if arguments.checkpoint is None:
        raise ValueError("--draft needs --checkpoint: random weights agree with no draft")
    if "plot" in given:
        plots.check(given["plot"])
    fields = {field.name for field in dataclasses.fields(bench.DraftOptions)}
    wanted = bench.DraftOptions(**{name: value for name, value in given.items() if name in fields})
    engine = {name: value for name, value in given.items() if name not in {*fields, "plot", "profile"}}
    results: list[dict[str, Any]] = []
    with bench.Bench(arguments.checkpoint, wanted=wanted, **engine) as made, _bar(made.num_runs()) as bar:
        facts = {"benchmark": "drafts", "model": arguments.checkpoint, "draft": given["draft"], **made.facts()}
        bar.write(
            f"target {facts['model']}, draft {facts['draft']}\n{facts['dtype']} on {facts['device']}; "
            f"{facts['prompts']} prompts, at most {wanted.new_tokens} new tokens, temperature {wanted.temperature:g}; "
            f"rounds: {wanted.repeats}"
        )
        for batch_size in wanted.batch_sizes:
            rows = made.run(batch_size, bar.update)
            lines = [f"\nbatch {batch_size}", table.HEAD, *map(table.describe, rows), table.verdict(rows)]
            bar.write("\n".join(lines))
            results += rows
        if "profile" in given:
            made.trace(Path(given["profile"]))
    print(f"\n{table.NOTES}\n{table.agreement(results)}")
    if "plot" in given:
        plots.plot_drafts(results, given["plot"])
    return {**facts, "results": results}


def _bar(total: int) -> Any:
    """A progress bar on stderr, where that is a terminal. ``write`` prints to stdout beside it."""
    from tqdm import tqdm

    return tqdm(total=total, unit="run", file=sys.stderr, disable=not sys.stderr.isatty(), leave=False)


def run_load(arguments: argparse.Namespace, given: dict[str, Any]) -> dict[str, Any]:
    """One table for each level."""
    from gpt_fast.bench import plots
    from gpt_fast.bench.load.client import Level, run_level_shown, warm_up
    from gpt_fast.bench.load.metrics import describe, parse_goodput, summarize

    url = arguments.url
    prompts, first, base = load_options(url, given)
    levels = sweep_levels(base, given)
    percentiles = given.get("percentiles", (99.0,))
    if not all(0 < p <= 100 for p in percentiles):
        raise ValueError("percentiles must be above 0 and at most 100")
    goodput = parse_goodput(given.get("goodput", ()))
    count_tokens = _token_counter(given["tokenizer"]) if "tokenizer" in given else None
    if "plot" in given:
        plots.check(given["plot"])
        percentiles = sorted({*percentiles, 99.0})  # the plot shows it

    async def measure() -> list[dict[str, Any]]:
        await warm_up(base, first)
        results = []
        for level in levels:
            rate = f"rate {level.request_rate:g}" if "sweep_rate" in given else ""
            shown = rate or f"load {level.max_concurrency or 'any'}"
            await run_level_shown(done := Level(level), prompts, shown)
            result = summarize(done, percentiles=percentiles, goodput=goodput, count_tokens=count_tokens)
            print(describe(result), flush=True)
            results.append(result)
        return results

    settings = {f.name: getattr(base, f.name) for f in dataclasses.fields(base) if f.name not in ("headers", "url")}
    settings = {k: None if isinstance(v, float) and math.isinf(v) else v for k, v in settings.items()}  # inf: not JSON
    found = {"benchmark": "load", "url": url, **settings, "results": asyncio.run(measure())}
    if "plot" in given:
        plots.plot_load(found["results"], given["plot"])
    return found


def load_options(url: str, given: dict[str, Any]) -> tuple[Iterator[Prompt], Prompt, LoadOptions]:
    """What to ask, the prompt to warm up with, and how to ask. Raises ValueError for what contradicts itself."""
    from gpt_fast.bench.load.options import LoadOptions
    from gpt_fast.bench.load.prompts import read_prompts, synthetic_prompts

    if "dataset" in given:
        _exclude(given, "dataset", "random_input_len", "random_vocab_size")
    _exclude(given, "random_output_len", "max_new_tokens", "ignore_eos")
    _exclude(given, "duration_s", "num_prompts")
    fields = [field.name for field in dataclasses.fields(LoadOptions)]
    plain = {name: given[name] for name in fields if name in given}
    plain["max_new_tokens"] = given.get("random_output_len", given.get("max_new_tokens", 128))
    plain["ignore_eos"] = given.get("ignore_eos", "random_output_len" in given or "dataset" not in given)
    plain["headers"] = dict(_header(line) for line in given.get("header", ()))
    sweeping = {"max_concurrency": max(given["sweep"])} if "sweep" in given else {}
    made = LoadOptions(url, **(plain | sweeping))
    if "dataset" in given:
        known = read_prompts(given["dataset"])
        # Where lengths are taken for granted the longest is tried: if its answer fits the context, every answer does.
        fixed = made.ignore_eos and made.protocol == "native"
        longest = max(known, key=lambda p: len(p.content) + (p.max_new_tokens or 0))
        return itertools.cycle(known), longest if fixed else known[0], made
    prompts = synthetic_prompts(
        given.get("random_input_len", _DEFAULT_INPUT_LEN),
        given.get("random_vocab_size", _DEFAULT_VOCAB_SIZE),
        made.seed,
        as_text=made.protocol == "openai-chat",
    )
    return prompts, next(prompts), made


def sweep_levels(base: LoadOptions, given: dict[str, Any]) -> list[LoadOptions]:
    """One or several levels. Raises ValueError."""
    _exclude(given, "sweep", "sweep_rate", "max_concurrency")
    _exclude(given, "sweep_rate", "request_rate")
    if "sweep" in given:
        too_few = [n for n in given["sweep"] if base.duration_s is None and n > base.num_prompts]
        if too_few:
            raise ValueError(f"--num-prompts {base.num_prompts} never reaches a concurrency of {too_few[0]}")
        return [dataclasses.replace(base, max_concurrency=n) for n in given["sweep"]]
    if "sweep_rate" in given:
        return [dataclasses.replace(base, request_rate=rate) for rate in given["sweep_rate"]]
    return [base]


def _exclude(given: dict[str, Any], name: str, *others: str) -> None:
    for other in others:
        if name in given and other in given:
            raise ValueError(f"{_flag(name)} and {_flag(other)} exclude each other")


def _flag(name: str) -> str:
    return f"--{name.removesuffix('_s').replace('_', '-')}"


def _token_counter(directory: str) -> Callable[[str], int]:
    from gpt_fast.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(directory)
    return lambda text: len(tokenizer.encode(text, bos=False))


def _header(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon or not name.strip():
        raise ValueError(f"--header {line!r} is not NAME:VALUE")
    return name.strip(), value.strip()


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))
