"""Tokens per second against the share of drafts that are right, for fixed numbers of drafts and for the controller.

    python benchmarks/speculation.py --shape tinyllama-1.1b --quantize int8 --drafter lookup --threads 2 --plot FILE
    python benchmarks/speculation.py --shape tinyllama-1.1b --dtype bfloat16 --drafter int4 --batch-sizes 1,2,4
    python benchmarks/speculation.py --quantize int8 --changing --shares "" --threads 2

Random weights agree with nothing, so the drafts come from somebody who knows the answer of the plain run, and each is
wrong with a set probability. They cost what such drafts cost: nothing (lookup), or the steps of the model's int4 copy,
which is run for each draft (int4). Verification does not depend on how many drafts are right, so a fixed number of
drafts is timed once, and its tokens per second follow from the expected number of right ones. The controller is run for
each share, in turns with plain decoding and with the best fixed number. Where a machine is not equally fast all the
time, these scatter as much as it does. So what the controller did is also counted at the times of the fixed numbers
("by its rows": tokens over the sum of what a step of so many rows takes).

``--changing``: then clients come and go and the share of right drafts jumps (PHASES), in turns without drafts, with
each fixed number, and with the controller. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from gpt_fast import LLM, Completion, SamplingParams
from gpt_fast.bench import plots
from gpt_fast.engine.compute import probe
from gpt_fast.engine.handle import Handle
from gpt_fast.engine.request import Request
from gpt_fast.engine.runner import Runner
from gpt_fast.engine.scheduler import StepPlan
from gpt_fast.engine.speculate.drafter import Drafter, Wish
from gpt_fast.engine.speculate.model import ModelDrafter
from gpt_fast.engine.speculate.speculation import Speculation
from gpt_fast.engine.speculate.times import DraftTimes
from gpt_fast.model.building import random_model
from gpt_fast.model.shapes import shape
from gpt_fast.model.steps import serve
from gpt_fast.quantize.apply import quantize_model
from gpt_fast.quantize.scheme import quant_config

PROMPT_TOKENS = 16
POLL_S = 0.002
TIMED_TOKENS = 96  # of each sequence while fixed numbers of drafts are timed, all right
PHASES = ((1, 0.9), (1, 0.2), (4, 0.7), (16, 0.9), (16, 0.0), (8, 0.6), (2, 0.9), (1, 0.0), (1, 0.7))  # clients, share
PHASE_TOKENS = 96  # of each client in a phase
Answers = dict[tuple[int, ...], list[int]]  # by prompt


class Watched(NamedTuple):
    """What one step was: ``tokens`` that it gave, and ``rows`` that it computed."""

    tokens: int
    seconds: float
    rows: int


def rate(steps: Sequence[Watched]) -> float:
    """Tokens per second."""
    return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)


class Knowing(Drafter):
    """Drafts the true tokens; each is wrong with probability 1 - ``share``. ``by``: whose drafts are made, for their
    cost, and thrown away."""

    def __init__(self, answers: Answers, by: ModelDrafter | None) -> None:
        self.answers, self.by, self.share = answers, by, 1.0
        self._random = random.Random(0)

    def draft(self, wishes: Sequence[Wish]) -> list[tuple[int, ...]]:
        if self.by is not None:
            self.by.draft(wishes)
        drafts = [self._known(request, most) for request, most in wishes]
        if self.by is not None:
            for (request, _), tokens in zip(wishes, drafts, strict=True):
                self.by._known[request].ahead = tokens[:-1]  # as if they were its own
        return drafts

    def _known(self, request: Request, most: int) -> tuple[int, ...]:
        known = self.answers.get(tuple(request.token_ids[:PROMPT_TOKENS]), [])
        true = known[request.num_output : request.num_output + most]
        return tuple(t if self._random.random() < self.share else t ^ 1 for t in true)

    def missing(self, request: Request) -> int:
        return self.by.missing(request) if self.by is not None else 0

    def measure(self) -> DraftTimes | None:
        return self.by.measure() if self.by is not None else None

    def end(self, request: Request) -> None:
        if self.by is not None:
            self.by.end(request)


class Bench:
    """One loaded model, and its drafter if it has one."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.most = max(arguments.k)
        config = shape(arguments.shape)
        dtype = getattr(torch, arguments.dtype)
        room = PROMPT_TOKENS + max(arguments.tokens, TIMED_TOKENS)
        sizes: dict[str, Any] = {"max_batch": max(arguments.batch_sizes), "max_seq_len": room}
        more = {} if arguments.quantize is None else {"quantize": arguments.quantize}
        self.llm = LLM.from_model(
            random_model(config, dtype, "cpu"), **sizes, **more, prefix_cache=False, threads=arguments.threads
        )
        by = None
        if arguments.drafter != "lookup":
            copy = random_model(config, dtype, "cpu")
            quantize_model(copy, quant_config(arguments.drafter))
            target = self.llm.engine.runner
            runner = Runner(
                serve(copy), **sizes, num_pages=target.num_pages, page_size=target.page_size,
                prefill_chunk=target.prefill_chunk,
            )  # fmt: skip
            by = ModelDrafter(runner, self.llm.engine.scheduler.pages, config.vocab_size, room)
        generator = random.Random(0)
        self.prompts = [
            generator.choices(range(3, config.vocab_size), k=PROMPT_TOKENS) for _ in range(max(arguments.batch_sizes))
        ]
        self.answers: Answers = {}
        self.drafter = Knowing(self.answers, by)
        self.answers |= self._answers(max(arguments.tokens, TIMED_TOKENS))

    def _answers(self, num_tokens: int) -> Answers:
        return {
            tuple(p): tokens for p, tokens in zip(self.prompts, self._complete(self.prompts, num_tokens), strict=True)
        }

    def _complete(self, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        done = self.llm.generate(prompts, [params] * len(prompts))
        return [list(completion.token_ids) for completion in cast(list[Completion], done)]

    def fixed(self, count: int) -> Speculation | None:
        """Always ``count`` drafts."""
        return Speculation(self.drafter, count) if count else None

    def controlled(self) -> Speculation:
        """As many as the controller says, which knows nothing yet."""
        made = Speculation(self.drafter, self.most)
        engine = self.llm.engine
        made.control(lambda rows: probe(engine.runner, 0, rows), engine.runner.max_batch, self.llm.max_seq_len)
        return made

    def run(self, speculation: Speculation | None, batch_size: int, num_tokens: int) -> list[Watched]:
        """All steps in which ``batch_size`` sequences decode. Raises RuntimeError where an answer is another one."""
        prompts = self.prompts[:batch_size]
        with self._watched(speculation, batch_size) as steps:
            answers = self._complete(prompts, num_tokens)
        for prompt, answer in zip(prompts, answers, strict=True):
            if answer != self.answers[tuple(prompt)][:num_tokens]:
                raise RuntimeError("an answer with drafts differs from the plain one")
        return steps

    def run_changing(self, speculation: Speculation | None) -> list[float]:
        """Tokens per second of each of PHASES, in which so many clients ask one thing after the other; those that are
        too many leave."""
        draw, rates = random.Random(0), []
        handles: list[tuple[list[int], Handle]] = []
        with self._watched(speculation, None) as steps:
            for clients, self.drafter.share in PHASES:
                first, wanted = len(steps), clients * PHASE_TOKENS
                for _, handle in handles[clients:]:
                    handle.cancel()
                del handles[clients:]
                while sum(step.tokens for step in steps[first:]) < wanted:
                    handles = [(prompt, handle) for prompt, handle in handles if not self._ended(prompt, handle)]
                    while len(handles) < clients:
                        prompt, count = draw.choice(self.prompts), draw.randrange(24, TIMED_TOKENS)
                        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
                        handles.append((prompt, self.llm.submit(prompt, params)))
                    time.sleep(POLL_S)
                rates.append(rate(steps[first:]))
            for _, handle in handles:
                handle.cancel()
            while self.llm.engine.scheduler.running:
                time.sleep(POLL_S)
        return rates

    def _ended(self, prompt: list[int], handle: Handle) -> bool:
        """Whether ``handle`` has ended. Raises RuntimeError where its answer differs from the plain one."""
        if handle.error is not None:
            raise handle.error
        done = handle.completion
        if done is not None and list(done.token_ids) != self.answers[tuple(prompt)][: len(done.token_ids)]:
            raise RuntimeError("an answer with drafts differs from the plain one")
        return done is not None

    @contextmanager
    def _watched(self, speculation: Speculation | None, batch_size: int | None) -> Iterator[list[Watched]]:
        """Each step in which all ``batch_size`` sequences decode; None: of every step."""
        engine, steps, known, ended = self.llm.engine, list[Watched](), 0, 0

        def note_end(request: Request) -> None:
            nonlocal ended
            ended += request.num_output

        def note(plan: StepPlan, seconds: float) -> None:
            nonlocal known
            running = engine.scheduler.running
            before, known = known, ended + sum(r.num_output for r in running)
            whole = len(running) == batch_size == len(plan.sequences)
            if batch_size is None or (whole and all(s.num_logits == len(s.tokens) for s in plan.sequences)):
                steps.append(Watched(known - before, seconds, plan.num_tokens))

        with engine.changed:
            engine.speculation, engine.on_step, engine.on_finish = speculation, note, note_end
        yield steps
        with engine.changed:
            engine.speculation, engine.on_step, engine.on_finish = None, _ignore, _ignore


def _ignore(*_: object) -> None:
    """What the engine tells nobody."""


def expected(share: float, count: int) -> float:
    """Tokens of a step with ``count`` drafts."""
    return float(count + 1) if share == 1.0 else (1 - share ** (count + 1)) / (1 - share)


def cost(seconds: dict[int, float], size: int, rows: int) -> float:
    """Seconds of a step of ``rows`` for ``size`` sequences; ``seconds`` by the number of drafts of each, between which
    times are interpolated."""
    known = sorted((size * (count + 1), s) for count, s in seconds.items())
    for (a, at_a), (b, at_b) in itertools.pairwise(known):
        if rows <= b:
            return at_a + (at_b - at_a) * (rows - a) / (b - a)
    return known[-1][1] * rows / known[-1][0]


def _integers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _numbers(text: str) -> list[float]:
    return [float(word) for word in text.split(",") if word]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", default="tinyllama-1.1b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantize", choices=["int8", "int4"])
    parser.add_argument("--drafter", default="lookup", choices=["lookup", "int8", "int4"])
    parser.add_argument("--k", type=_integers, default=[1, 2, 3, 4, 6, 8])
    parser.add_argument("--batch-sizes", type=_integers, default=[1, 2, 4, 8, 16])
    parser.add_argument("--shares", type=_numbers, default=[0.0, 0.3, 0.5, 0.7, 0.9, 1.0])
    parser.add_argument("--tokens", type=int, default=160, help="of each sequence in a run of the controller")
    parser.add_argument("--changing", action="store_true", help="clients that come and go, too")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.plot:
        plots.check(arguments.plot)
    bench = Bench(arguments)
    rows = [row for size in arguments.batch_sizes for row in measure(bench, size, arguments) if arguments.shares]
    changing = measure_changing(bench, arguments) if arguments.changing else []
    bench.llm.close()
    if arguments.plot:
        plots.plot_shares(rows, arguments.plot)
    said = {k: str(v) for k, v in vars(arguments).items()}
    print(json.dumps({"arguments": said, "rows": rows, "phases": PHASES, "changing": changing}))
    return 0


def measure(bench: Bench, size: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All shares of one batch size."""
    counts = [0, *(k for k in arguments.k if size * (k + 1) <= 160)]
    bench.drafter.share = 1.0
    timed: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(arguments.rounds):
        for count in counts:
            steps = bench.run(bench.fixed(count), size, TIMED_TOKENS)
            timed[count].append(statistics.median(step.seconds for step in steps))
    seconds = {count: statistics.median(times) for count, times in timed.items()}
    print(f"batch {size}: ms a step with " + ", ".join(f"{k}: {1e3 * s:.1f}" for k, s in seconds.items()), flush=True)
    rows = []
    for share in arguments.shares:
        fixed = {count: size * expected(share, count) / seconds[count] for count in counts}
        best = max(counts, key=lambda count: fixed[count])
        bench.drafter.share = share
        auto = bench.controlled()
        first = rate(bench.run(auto, size, arguments.tokens))
        chosen: list[Watched] = []
        found: dict[str, list[float]] = {"plain": [], "best": [], "auto": []}
        for _ in range(arguments.rounds):
            found["plain"].append(rate(bench.run(None, size, arguments.tokens)))
            found["best"].append(rate(bench.run(bench.fixed(best), size, arguments.tokens)))
            chosen += (steps := bench.run(auto, size, arguments.tokens))
            found["auto"].append(rate(steps))
        by_rows = sum(step.tokens for step in chosen) / sum(cost(seconds, size, step.rows) for step in chosen)
        row = {"batch_size": size, "share": share, "fixed": fixed, "best_k": best, "first_auto": first}
        row |= {name: statistics.median(values) for name, values in found.items()}
        for name in ("plain", "best"):
            ratios = [a / b for a, b in zip(found["auto"], found[name], strict=True)]
            row[f"auto_to_{name}"] = statistics.median(ratios)
        row |= {"auto_by_rows_to_plain": by_rows / fixed[0], "auto_by_rows_to_best": by_rows / fixed[best]}
        rows.append(row)
        print(
            f"  share {share:.2f}: plain {row['plain']:.1f}, best k = {best} {row['best']:.1f}, controller "
            f"{row['auto']:.1f} tokens/s: {row['auto_to_plain']:.3f} of plain, {row['auto_to_best']:.3f} of the best; "
            f"by its rows {row['auto_by_rows_to_plain']:.3f}, {row['auto_by_rows_to_best']:.3f}; first run {first:.1f}",
            flush=True,
        )
    return rows


def measure_changing(bench: Bench, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """PHASES, in turns: without drafts, with each fixed number, with a controller that knows nothing at first."""
    found: dict[str, list[list[float]]] = {}
    for _ in range(arguments.rounds):
        for count in (0, *arguments.k):
            found.setdefault(f"k = {count}", []).append(bench.run_changing(bench.fixed(count)))
        found.setdefault("controller", []).append(bench.run_changing(bench.controlled()))
    weights = [clients * PHASE_TOKENS for clients, _ in PHASES]
    rows = []
    for name, runs in found.items():
        seconds = [[w / rate for w, rate in zip(weights, rates, strict=True)] for rates in runs]
        plain = [[w / rate for w, rate in zip(weights, rates, strict=True)] for rates in found["k = 0"]]
        whole = statistics.median(sum(p) / sum(s) for p, s in zip(plain, seconds, strict=True))
        each = [statistics.median(p[i] / s[i] for p, s in zip(plain, seconds, strict=True)) for i in range(len(PHASES))]
        rows.append({"name": name, "to_plain": whole, "phases_to_plain": each})
        print(f"{name}: {whole:.3f} of plain; " + ", ".join(f"{ratio:.2f}" for ratio in each), flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
