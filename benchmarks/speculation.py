"""Tokens per second against the share of drafts that are right, for fixed numbers of drafts and for the controller.

    python benchmarks/speculation.py --shape tinyllama-1.1b --quantize int8 --drafter lookup --threads 2 --plot FILE
    python benchmarks/speculation.py --shape tinyllama-1.1b --dtype bfloat16 --drafter int4 --batch-sizes 1,2,4
    python benchmarks/speculation.py --quantize int8 --changing --shares "" --threads 2

Random weights agree with nothing, so the drafts come from somebody who knows the answer of the plain run, and each is
wrong with a set probability. They cost what such drafts cost: nothing (lookup), or the steps of the model's int4 copy,
which is run for each draft (int4).

Everything that is compared runs at the same time, in lanes: one without drafts, one for each fixed number, one with a
controller that knows nothing at first. Each lane is an engine, all share the weights, and one step of one lane runs at
a time: of the lane that has the fewest tokens so far. All lanes complete the same prompts, and the same drafts are
wrong in all of them. So a machine that is not equally fast all the time is so for all lanes alike.

``--changing``: then clients come and go and the share of right drafts jumps (PHASES), in the same lanes. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
from gpt_fast.model.steps import Served, serve
from gpt_fast.quantize.apply import quantize_model
from gpt_fast.quantize.scheme import quant_config

PROMPT_TOKENS = 16
PROMPTS = 16
POLL_S = 0.002
MAX_ROWS = 96  # of a step with a fixed number of drafts
PHASES = ((1, 0.9), (1, 0.2), (4, 0.7), (16, 0.9), (16, 0.0), (8, 0.6), (2, 0.9), (1, 0.0), (1, 0.7))  # clients, share
PHASE_TOKENS = 96  # of each client in a phase
PARTS = 5  # of a run, for the scatter
Answers = dict[tuple[int, ...], list[int]]  # by prompt


class Watched(NamedTuple):
    """What one step was: ``tokens`` that it gave in ``seconds``."""

    tokens: int
    seconds: float


def rate(steps: Sequence[Watched]) -> float:
    """Tokens per second."""
    return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)


class Knowing(Drafter):
    """Drafts the true tokens. Each is wrong with probability 1 - ``share``, and which ones are is a matter of prompt
    and place. ``by``: whose drafts are made, for their cost, and thrown away."""

    def __init__(self, answers: Answers, by: ModelDrafter | None) -> None:
        self.answers, self.by, self.share = answers, by, 1.0

    def draft(self, wishes: Sequence[Wish]) -> list[tuple[int, ...]]:
        if self.by is not None:
            self.by.draft(wishes)
        drafts = [self._known(request, most) for request, most in wishes]
        if self.by is not None:
            for (request, _), tokens in zip(wishes, drafts, strict=True):
                self.by._known[request].ahead = tokens[:-1]  # as if they were its own
        return drafts

    def _known(self, request: Request, most: int) -> tuple[int, ...]:
        prompt, begin = tuple(request.token_ids[:PROMPT_TOKENS]), request.num_output
        true = self.answers.get(prompt, [])[begin : begin + most]
        return tuple(
            t if random.Random(f"{prompt}{begin + i}").random() < self.share else t ^ 1 for i, t in enumerate(true)
        )

    def missing(self, request: Request) -> int:
        return self.by.missing(request) if self.by is not None else 0

    def measure(self) -> DraftTimes | None:
        return self.by.measure() if self.by is not None else None

    def end(self, request: Request) -> None:
        if self.by is not None:
            self.by.end(request)


class Turns:
    """One step of one lane at a time: of the one that has the fewest tokens among those that want to run one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._wanting: dict[Lane, int] = {}
        self._busy = False

    def step(self, lane: Lane, step: Callable[[], None]) -> None:
        """Run ``step`` of ``lane`` when it is its turn."""
        with self._changed:
            self._wanting[lane] = lane.num_tokens
            self._changed.wait_for(lambda: not self._busy and min(self._wanting, key=self._wanting.__getitem__) is lane)
            del self._wanting[lane]
            self._busy = True
        try:
            lane.llm.engine._began = time.perf_counter()  # what it waited for its turn does not count
            step()
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()


class Lane:
    """An engine of the model that all lanes share. ``count``: drafts of each sequence, always; None: as many as the
    controller says."""

    def __init__(self, bench: Bench, count: int | None) -> None:
        self.count, self.bench, self.num_tokens = count, bench, 0
        self.steps: list[Watched] = []
        self._batch_size: int | None = None
        self._ended = self._known = 0
        self.llm = LLM.from_model(bench.target, **bench.sizes, prefix_cache=False, threads=bench.threads)
        self.drafter = Knowing(bench.answers, self._by() if bench.copy is not None and count != 0 else None)
        engine = self.llm.engine
        engine.on_step, engine.on_finish = self._note, self._note_end
        engine.step = partial(bench.turns.step, self, engine.step)  # type: ignore[method-assign]

    def _by(self) -> ModelDrafter:
        target, copy = self.llm.engine.runner, self.bench.copy
        assert copy is not None
        sizes = {**self.bench.sizes, "num_pages": target.num_pages, "page_size": target.page_size}
        runner = Runner(copy, **sizes, prefill_chunk=target.prefill_chunk)
        config, room = self.llm.config, self.bench.sizes["max_seq_len"]
        return ModelDrafter(runner, self.llm.engine.scheduler.pages, config.vocab_size, room)

    def begin(self, share: float, batch_size: int | None) -> None:
        """Forget everything. From now on each step counts in which ``batch_size`` sequences decode; None: every one."""
        self.drafter.share, self._batch_size = share, batch_size
        self.num_tokens, self.steps = 0, []
        engine, made = self.llm.engine, None
        if self.count != 0:
            made = Speculation(self.drafter, self.bench.most if self.count is None else self.count)
        if made is not None and self.count is None:
            with torch.inference_mode():
                made.control(lambda rows: probe(engine.runner, 0, rows), engine.runner.max_batch, self.llm.max_seq_len)
        with engine.changed:
            engine.speculation = made

    def run(self, rounds: Sequence[Sequence[list[int]]], num_tokens: int) -> None:
        """Complete the prompts of each of ``rounds`` together. Raises RuntimeError where an answer is another one."""
        for prompts in rounds:
            for prompt, answer in zip(prompts, self.complete(prompts, num_tokens), strict=True):
                if answer != self.bench.answers[tuple(prompt)][:num_tokens]:
                    raise RuntimeError("an answer with drafts differs from the plain one")

    def complete(self, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
        """The greedy answers."""
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        done = self.llm.generate(prompts, [params] * len(prompts))
        return [list(completion.token_ids) for completion in cast(list[Completion], done)]

    def run_changing(self) -> list[float]:
        """Seconds of each of PHASES. The clients of a phase ask again and again. Where the phase before had more
        clients, the last ones leave. Raises RuntimeError where an answer is another one."""
        draw, seconds = random.Random(0), []
        handles: list[tuple[list[int], Handle]] = []
        for clients, self.drafter.share in PHASES:
            first, wanted = len(self.steps), clients * PHASE_TOKENS
            for _, handle in handles[clients:]:
                handle.cancel()
            del handles[clients:]
            while sum(step.tokens for step in self.steps[first:]) < wanted:
                handles = [(prompt, handle) for prompt, handle in handles if not self._is_done(prompt, handle)]
                while len(handles) < clients:
                    prompt, count = draw.choice(self.bench.prompts), draw.randrange(24, self.bench.num_tokens)
                    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
                    handles.append((prompt, self.llm.submit(prompt, params)))
                time.sleep(POLL_S)
            seconds.append(wanted / rate(self.steps[first:]))
        for _, handle in handles:
            handle.cancel()
        while self.llm.engine.scheduler.running:
            time.sleep(POLL_S)
        return seconds

    def _is_done(self, prompt: list[int], handle: Handle) -> bool:
        if handle.error is not None:
            raise handle.error
        done = handle.completion
        if done is not None and list(done.token_ids) != self.bench.answers[tuple(prompt)][: len(done.token_ids)]:
            raise RuntimeError("an answer with drafts differs from the plain one")
        return done is not None

    def _note_end(self, request: Request) -> None:
        self._ended += request.num_output

    def _note(self, plan: StepPlan, seconds: float) -> None:
        running = self.llm.engine.scheduler.running
        before, self._known = self._known, self._ended + sum(r.num_output for r in running)
        self.num_tokens += self._known - before
        whole = len(running) == self._batch_size == len(plan.sequences)
        if self._batch_size is None or (whole and all(s.num_logits == len(s.tokens) for s in plan.sequences)):
            self.steps.append(Watched(self._known - before, seconds))


class Bench:
    """The model, its int4 or int8 copy if that drafts, and a lane for each number of drafts and for the controller."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.most, self.threads, self.num_tokens = max(arguments.k), arguments.threads, arguments.tokens
        config = shape(arguments.shape)
        room = PROMPT_TOKENS + arguments.tokens
        self.sizes: dict[str, Any] = {"max_batch": max(arguments.batch_sizes), "max_seq_len": room}
        made = partial(self._model, config, getattr(torch, arguments.dtype))
        self.target = made(arguments.quantize)
        self.copy = None if arguments.drafter == "lookup" else made(arguments.drafter)
        generator = random.Random(0)
        self.prompts = [generator.choices(range(3, config.vocab_size), k=PROMPT_TOKENS) for _ in range(PROMPTS)]
        self.answers: Answers = {}
        self.turns = Turns()
        self.lanes = [Lane(self, count) for count in (0, *arguments.k, None)]
        for i in range(0, PROMPTS, self.sizes["max_batch"]):
            some = self.prompts[i : i + self.sizes["max_batch"]]
            self.answers |= zip(map(tuple, some), self.lanes[0].complete(some, arguments.tokens), strict=True)

    @staticmethod
    def _model(config: Any, dtype: torch.dtype, quantize: str | None) -> Served:
        model = random_model(config, dtype, "cpu")
        if quantize is not None:
            quantize_model(model, quant_config(quantize))
        return serve(model)

    def together(self, lanes: Sequence[Lane], work: Callable[[Lane], Any]) -> list[Any]:
        """What ``work`` returns for each of ``lanes``, which take turns."""
        with ThreadPoolExecutor(len(lanes)) as pool:
            return list(pool.map(work, lanes))

    def rounds(self, batch_size: int, rounds: int) -> list[list[list[int]]]:
        """Prompts for ``rounds`` batches."""
        return [[self.prompts[(i * batch_size + j) % PROMPTS] for j in range(batch_size)] for i in range(rounds)]


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
    parser.add_argument("--tokens", type=int, default=160, help="of each answer")
    parser.add_argument("--rounds", type=int, default=2, help="answers of each sequence, one after the other")
    parser.add_argument("--changing", action="store_true", help="clients that come and go, too")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.plot:
        plots.check(arguments.plot)
    bench = Bench(arguments)
    cells = [(size, share) for size in arguments.batch_sizes for share in arguments.shares]
    rows = [measure(bench, size, share, arguments.rounds) for size, share in cells]
    changing = measure_changing(bench) if arguments.changing else []
    for lane in bench.lanes:
        lane.llm.close()
    if arguments.plot:
        plots.plot_shares(rows, arguments.plot)
    said = {k: str(v) for k, v in vars(arguments).items()}
    print(json.dumps({"arguments": said, "rows": rows, "phases": PHASES, "changing": changing}))
    return 0


def measure(bench: Bench, size: int, share: float, rounds: int) -> dict[str, Any]:
    """All lanes with ``size`` sequences whose drafts are right with probability ``share``."""
    lanes = [lane for lane in bench.lanes if size * ((lane.count or 0) + 1) <= MAX_ROWS]
    for lane in lanes:
        lane.begin(share, size)
    bench.together(lanes, lambda lane: lane.run(bench.rounds(size, rounds), bench.num_tokens))
    *others, auto = lanes
    fixed = {lane.count: rate(lane.steps) for lane in others}
    best = max(others, key=lambda lane: rate(lane.steps))
    row: dict[str, Any] = {"batch_size": size, "share": share, "fixed": fixed, "best_k": best.count}
    row |= {"auto": rate(auto.steps)}
    for name, lane in (("plain", others[0]), ("best", best)):
        row[f"auto_to_{name}"] = rate(auto.steps) / rate(lane.steps)
        row[f"auto_to_{name}_parts"] = sorted(
            rate(a) / rate(b) for a, b in zip(_parts(auto.steps), _parts(lane.steps), strict=True)
        )
    print(
        f"batch {size}, share {share:.2f}: " + ", ".join(f"{k}: {r:.1f}" for k, r in fixed.items()) + f" tokens/s; "
        f"controller {row['auto']:.1f}: {_range(row, 'plain')} of plain, {_range(row, 'best')} of k = {best.count}",
        flush=True,
    )
    return row


def _range(row: dict[str, Any], name: str) -> str:
    parts = row[f"auto_to_{name}_parts"]
    return f"{row[f'auto_to_{name}']:.3f} ({parts[0]:.2f}-{parts[-1]:.2f})"


def _parts(steps: Sequence[Watched]) -> list[Sequence[Watched]]:
    """PARTS runs of ``steps`` with about the same number of tokens each."""
    whole, parts, tokens = sum(step.tokens for step in steps), [list[Watched]() for _ in range(PARTS)], 0
    for step in steps:
        parts[min(PARTS - 1, tokens * PARTS // whole)].append(step)
        tokens += step.tokens
    return [*parts]


def measure_changing(bench: Bench) -> list[dict[str, Any]]:
    """PHASES in every lane."""
    for lane in bench.lanes:
        lane.begin(0.0, None)
    seconds = bench.together(bench.lanes, lambda lane: lane.run_changing())
    rows = []
    for lane, own in zip(bench.lanes, seconds, strict=True):
        each = [plain / s for plain, s in zip(seconds[0], own, strict=True)]
        name = "controller" if lane.count is None else f"k = {lane.count}"
        rows.append({"name": name, "to_plain": sum(seconds[0]) / sum(own), "phases_to_plain": each})
        print(f"{name}: {rows[-1]['to_plain']:.3f} of plain; " + ", ".join(f"{r:.2f}" for r in each), flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
