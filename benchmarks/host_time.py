"""What a decode step costs the host, whatever the model: scheduling, tensors, page table, sampling, handing out tokens.

A model without any computation stands behind the engine. Sequences that fill ``max_seq_len`` decode side by side, and
the median step is reported for each length: it should not depend on it.

    python benchmarks/host_time.py --plot docs/host_time.svg
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from gpt_fast.engine.engine import Engine
from gpt_fast.engine.pages import PageAllocator
from gpt_fast.engine.request import Request
from gpt_fast.engine.runner import Runner
from gpt_fast.engine.scheduler import Scheduler, StepPlan
from gpt_fast.engine.text import TextStream
from gpt_fast.kernels.cache import LayerCache, PagedLayer, StepLayout
from gpt_fast.params import SamplingParams
from gpt_fast.tokenizer import IncrementalDetokenizer

LENGTHS = [512, 2048, 8192, 32768, 131072]
PAGE_SIZE = 16
CHUNK = 2048  # prompt tokens per step


class IdleModel:
    """Satisfies engine.model.Model. Every token is followed by token 0."""

    dtype = torch.float32
    vocab_size = 32
    cache_layers = (PagedLayer(1, 1),)

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def bytes_per_token(self, context_len: int, cache_itemsize: float) -> int:
        return 0

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.zeros(*tokens.shape, self.vocab_size, device=self.device)

    def make_step(self, cache: Sequence[LayerCache], page_table: Tensor) -> IdleStep:
        return IdleStep(self.forward)


class IdleStep:
    path = "eager"
    apart = chain = ahead = None

    def __init__(self, forward: Callable[[Tensor], Tensor]) -> None:
        self._forward = forward

    def __call__(self, tokens: Tensor, positions: Tensor, lengths: Tensor, layout: StepLayout, rows: Tensor) -> Tensor:
        return self._forward(rows)

    def reads_host(self) -> bool:
        return False

    def warm_up(self, run: Callable[[int], None], longest: int) -> None:
        run(1)


def step_seconds(max_seq_len: int, num_sequences: int, num_steps: int, device: torch.device) -> list[float]:
    """Seconds of each decode step of ``num_sequences`` sequences that reach ``max_seq_len`` tokens."""
    num_pages = 1 + num_sequences * -(-max_seq_len // PAGE_SIZE)
    runner = Runner(
        IdleModel(device),
        max_batch=num_sequences,
        max_seq_len=max_seq_len,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        prefill_chunk=CHUNK,
    )
    found: list[float] = []

    def watch(plan: StepPlan, seconds: float) -> None:
        if plan.num_tokens == len(plan.sequences) == num_sequences:
            found.append(seconds)

    scheduler = Scheduler(PageAllocator(num_pages, PAGE_SIZE), num_sequences, CHUNK)
    engine = Engine(runner, scheduler, threads=1)
    engine.on_step = watch
    engine.start(runner.warm_up)
    # While the later prompts are computed the first sequences decode already: there is room for those tokens, too.
    waiting = num_sequences * -(-max_seq_len // (CHUNK // 4))
    params = SamplingParams(temperature=0.0).resolved()
    num_new = num_steps + waiting
    requests = [
        Request(
            id=str(i),
            token_ids=[i] * max(1, max_seq_len - num_new),
            params=params,
            seed=0,
            max_tokens=num_new,
            end_ids=frozenset(),
            text=TextStream(IncrementalDetokenizer(None)),
        )
        for i in range(num_sequences)
    ]
    for handle in engine.add_all(requests):
        for _ in handle:
            pass
    engine.close()
    return found


def draw(lengths: Sequence[int], medians: Sequence[float], path: Path, title: str) -> None:
    """One line of the medians."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(lengths, medians, "o-")
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set_ylim(bottom=0)
    axes.set(title=title, xlabel="max_seq_len, nearly filled by each sequence", ylabel="microseconds")
    axes.grid(alpha=0.3)
    figure.savefig(path)


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="max_seq_len of each point")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300, help="decode steps of each point")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--plot", type=Path, help="draw the medians into this file")
    args = parser.parse_args()
    found: dict[int, list[float]] = {length: [] for length in args.lengths}
    for _ in range(args.rounds):  # all lengths in turns, so that what else runs here meets each of them
        for length, seconds in found.items():
            seconds += step_seconds(length, args.sequences, args.steps, torch.device(args.device))
    medians = [1e6 * statistics.median(seconds) for seconds in found.values()]
    for length, median in zip(args.lengths, medians, strict=True):
        print(f"max_seq_len {length:6d}: {median:6.1f} microseconds per step, median of {len(found[length])} steps")
    if args.plot:
        draw(args.lengths, medians, args.plot, f"Host time of a decode step, {args.sequences} sequences")
    print(json.dumps({"max_seq_len": args.lengths, "step_us": medians}))


if __name__ == "__main__":
    main()
