"""``gpt-fast generate``: complete a prompt, stream it to stdout, say on stderr how fast it was.

stdout carries the completion and nothing else, byte for byte; with ``--json`` one JSON object follows on a last line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt_fast.commands import options, values
from gpt_fast.outputs import Completion
from gpt_fast.params import SamplingParams

if TYPE_CHECKING:
    from gpt_fast.commands.origins import OriginReport
    from gpt_fast.llm import LLM


TRACE = "generate.trace.json"
METHODS = ("coupled", "leviathan", "chen")  # the engine's rule, and published ones (commands/published.py)
_SAMPLING: options.Table = {  # fields of SamplingParams
    "--max-new-tokens": {"type": int, "metavar": "N", "help": "most tokens to generate (default: 128)"},
    "--temperature": {"type": float, "metavar": "T", "help": "0 is greedy (default: the checkpoint's own, else 0)"},
    "--top-k": {"type": int, "metavar": "K", "help": "keep the K likeliest tokens; 0: all"},
    "--top-p": {"type": float, "metavar": "P", "help": "keep the likeliest tokens up to probability P; 1: all"},
    "--min-p": {"type": float, "metavar": "P", "help": "drop tokens less likely than P times the likeliest"},
    "--seed": {"type": int, "help": "makes sampling repeatable"},
    "--stop": {"action": "append", "metavar": "TEXT", "help": "end before TEXT (may be repeated)"},
    "--ignore-eos": {"action": "store_true", "help": "go on past the end-of-sequence token"},
}


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("generate", help="complete a prompt", description=__doc__)
    text = "what to complete; '-' reads stdin, without its last line end; empty: start from nothing"
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="TEXT", help=text)
    what.add_argument("--interactive", action="store_true", help="a conversation: one prompt a line, until end of file")
    add = parser.add_argument
    add("--system", metavar="TEXT", help="with --interactive: the system message")
    add("--num-samples", type=values.whole(1), default=1, metavar="N", help="repeat N times, for timing (default: 1)")
    add("--profile", metavar="DIR", help="write a trace of the generation to DIR (chrome://tracing, Perfetto)")
    options.add_output_options(parser, "; with drafts: colours tokens by origin, and says whether drafts pay")
    engine = parser.add_argument_group("engine")
    options.add_options(engine, options.CHECKPOINT | options.ENGINE | options.MAX_SEQ_LEN)
    rule = "how drafts are judged: coupled, or as published: leviathan, chen (slow, to compare)"
    engine.add_argument("--method", choices=METHODS, default="coupled", help=rule + " (default: %(default)s)")
    parser.set_defaults(run=run, sampling=options.add_options(parser.add_argument_group("sampling"), _SAMPLING))


def run(arguments: argparse.Namespace) -> int:
    """Load, generate, report."""
    options.set_up_logging(arguments.verbose)
    options.refuse_absent(arguments.checkpoint)
    if arguments.system is not None and not arguments.interactive:
        raise ValueError("--system means nothing without --interactive")
    if arguments.interactive:
        refuse_of_one_prompt(arguments)
    params = SamplingParams(**options.given(arguments, arguments.sampling))
    prompt = told_of_stdin(sys.stdin.read).removesuffix("\n") if arguments.prompt == "-" else arguments.prompt

    if arguments.method != "coupled":
        from gpt_fast.commands.published import generate_published

        return generate_published(arguments, params, prompt)

    if arguments.profile:
        options.check_traces(arguments.profile, TRACE)
    from gpt_fast.llm import LLM

    with LLM(arguments.checkpoint, progress=True, **options.engine_options(arguments)) as llm:
        origins = report_origins(llm) if arguments.verbose else None
        if arguments.interactive:
            converse(llm, params, arguments.system, origins)
        else:
            llm.prepare(prompt, params)  # refuses before the profiler starts
            complete(llm, prompt, params, arguments, origins)
        for line in origins.lines() if origins is not None else ():
            print(line, file=sys.stderr)
    return 0


def refuse_of_one_prompt(arguments: argparse.Namespace) -> None:
    """Raise ValueError for an option that a conversation does nothing with."""
    for option, given in {
        "num-samples": arguments.num_samples > 1,
        "profile": arguments.profile,
        "json": arguments.json,
    }.items():
        if given:
            raise ValueError(f"--{option} means nothing with --interactive")


def told_of_stdin(read: Callable[[], str]) -> str:
    """What ``read`` reads of stdin. Raises ValueError where that is no text."""
    try:
        return read()
    except UnicodeDecodeError as error:
        raise ValueError(f"stdin is not a text in {error.encoding.upper()}") from None


def report_origins(llm: LLM) -> OriginReport | None:
    """What --verbose tells about drafts; None without a drafter. Prints what the colours mean, if there are any."""
    from gpt_fast.commands.origins import OriginReport, legend, shows_colours

    if llm.engine.speculation is None:
        return None
    if shows_colours(sys.stdout):
        print(legend(coloured=shows_colours(sys.stderr)), file=sys.stderr)
    return OriginReport(llm, llm.engine.speculation, coloured=shows_colours(sys.stdout))


def complete(
    llm: LLM, prompt: str, params: SamplingParams, arguments: argparse.Namespace, origins: OriginReport | None
) -> None:
    """Complete ``prompt`` as often as was asked for; each time say how fast that was."""
    from gpt_fast.serve.tracing import traced

    for i in range(arguments.num_samples):
        if i:
            sys.stdout.write("\n")
        trace = Path(arguments.profile, TRACE) if arguments.profile else None
        with traced(trace, llm.device.type) if trace else contextlib.nullcontext():
            completion = print_stream(llm, prompt, params, origins)
        report = measurements(llm, completion)
        end_line(completion.text, own_line=sys.stdout.isatty() or arguments.json or arguments.num_samples > 1)
        print(summary(report), file=sys.stderr)
    if arguments.json:
        print(json.dumps({**facts_of(completion), **report}, ensure_ascii=False))


def facts_of(completion: Completion) -> dict[str, Any]:
    """What --json says of ``completion`` itself. ``acceptance``: the share of the drafts that were right."""
    names = ("text", "token_ids", "finish_reason", "num_prompt_tokens", "num_drafted", "num_accepted")
    drafted, accepted = completion.num_drafted, completion.num_accepted
    return {
        **{name: getattr(completion, name) for name in names},
        "num_new_tokens": len(completion.token_ids),
        "acceptance": round(accepted / drafted, 4) if drafted else None,
    }


def print_stream(
    llm: LLM, prompt: str | list[int], params: SamplingParams, origins: OriginReport | None = None
) -> Completion:
    """Write the completion to stdout as it is generated, and tell ``origins`` of it."""
    paint = origins.painter(prompt) if origins is not None else lambda delta: delta.text
    for delta in llm.stream(prompt, params):
        sys.stdout.write(paint(delta))
        sys.stdout.flush()
        if delta.completion is not None:
            if origins is not None:
                origins.add(prompt, params, delta.completion)
            return delta.completion
    raise AssertionError("a stream ended without a completion")


def end_line(text: str, own_line: bool) -> None:
    """After ``text`` on stdout: let what follows begin a line. On stderr unless stdout may hold more than the text."""
    if own_line or not text.endswith("\n"):
        (sys.stdout if own_line else sys.stderr).write("\n")
    sys.stdout.flush()


def converse(llm: LLM, params: SamplingParams, system: str | None, origins: OriginReport | None) -> None:
    """A conversation on stdin and stdout: the checkpoint's chat template where it has one, else plain completion."""
    from gpt_fast.tokenizer.chat import DEFAULT

    chats = DEFAULT in llm.chat_templates and llm.tokenizer is not None
    if not chats:
        ignored = ", and --system has no effect" if system else ""
        print(f"this checkpoint has no chat template: every line is completed by itself{ignored}", file=sys.stderr)
    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system and chats else []
    while True:
        try:
            line = told_of_stdin(lambda: input("> " if sys.stdin.isatty() else ""))
        except EOFError:
            return
        if not line.strip():
            continue
        prompt: str | list[int] = line
        asked = [*messages, {"role": "user", "content": line}]
        try:
            if chats:
                prompt = llm.encode_chat(asked)
            answer = print_stream(llm, prompt, params, origins).text
            messages = [*asked, {"role": "assistant", "content": answer}]  # a question without an answer is forgotten
        except KeyboardInterrupt:
            print(" (interrupted)", file=sys.stderr)  # ends this answer, not the conversation
        except ValueError as error:
            print(error, file=sys.stderr)
        sys.stdout.write("\n")


def measurements(llm: LLM, completion: Completion) -> dict[str, Any]:
    """What a run showed: tokens per second, seconds, bytes per second, and the share of this machine's ceiling."""
    timings = completion.timings
    num_new = len(completion.token_ids)
    rate = timings.tokens_per_second(num_new)
    roofline = llm.roofline(completion.num_prompt_tokens + num_new // 2)
    return {
        "tokens_per_second": round(rate, 2),
        "time_to_first_token_s": round(timings.first_token_s, 4),
        "total_s": round(timings.total_s, 4),
        "achieved_bandwidth_gb_s": round(rate * roofline.bytes_per_token / 1e9, 3),
        "machine_bandwidth_gb_s": round(roofline.bandwidth / 1e9, 2),
        "ceiling_tokens_per_second": round(roofline.ceiling, 1),
        "share_of_ceiling": round(roofline.share(rate), 4),
        "load_s": round(llm.load_s, 2),
        "warm_up_s": round(llm.warm_up_s, 2),
        "dtype": str(llm.dtype).removeprefix("torch."),
        "device": str(llm.device),
    }


def summary(report: dict[str, Any]) -> str:
    """``report`` for people."""
    return (
        f"{report['tokens_per_second']:.1f} tokens/s, the first after {1e3 * report['time_to_first_token_s']:.1f} ms; "
        f"{report['achieved_bandwidth_gb_s']:.2f} GB/s of weights and cache, "
        f"{report['share_of_ceiling']:.0%} of what {report['machine_bandwidth_gb_s']:.1f} GB/s allow "
        f"({report['ceiling_tokens_per_second']:.0f} tokens/s); {report['dtype']} on {report['device']}"
    )
