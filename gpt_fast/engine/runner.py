"""Runs step plans on one device: builds tensors, calls the model, owns the KV cache and the page table.

A plan says only what changes in a slot's row of the page table, so a step costs the host the same after ten tokens and
after a hundred thousand.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from gpt_fast.engine.model import Drawing, Model
from gpt_fast.engine.parts import parts_of
from gpt_fast.engine.sampling import NO_TOKEN, draw_tokens
from gpt_fast.engine.scheduler import SequencePlan, StepPlan
from gpt_fast.engine.tensors import tensor_of
from gpt_fast.kernels.cache import StepLayout, StepNumbers
from gpt_fast.kernels.race import Draw

log = logging.getLogger(__name__)

_HOST = torch.device("cpu")


class Runner:
    """Executes plans of at most ``max_batch`` sequences, each of at most ``max_seq_len`` tokens. Allocates the cache,
    ``num_pages`` pages of ``page_size`` tokens. ``cache_dtype`` None: the model's."""

    def __init__(
        self,
        model: Model,
        *,
        max_batch: int,
        max_seq_len: int,
        num_pages: int,
        page_size: int,
        prefill_chunk: int,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        self.device, self.max_batch, self.prefill_chunk = model.device, max_batch, prefill_chunk
        self.vocab_size = model.vocab_size
        self.page_size, self.num_pages = page_size, num_pages
        self.pages_per_sequence = -(-max_seq_len // page_size)
        self._longest = min(prefill_chunk, max_seq_len, page_size * (num_pages - 1))  # tokens of a sequence in a step
        # Whether a step may begin before the host knows the tokens of the one before (ahead.py). On a CPU that pays
        # where Python has a core that no thread of the kernels wants.
        self.runs_ahead = self.device.type == "cuda"
        sizes = (max_batch, num_pages, page_size, cache_dtype or model.dtype, self.device)
        self.cache = [layer.allocate(*sizes) for layer in model.cache_layers]
        # The pages of each slot's sequence, on the host and [slots, pages_per_sequence] on the device.
        self._pages: list[list[int]] = [[] for _ in range(max_batch)]
        self._page_table = torch.zeros(max_batch, self.pages_per_sequence, dtype=torch.int32, device=self.device)
        self._step = model.make_step(self.cache, self._page_table)
        self.draws_at_once = self._step.chain is not None  # whether draw() is one call, so that the host has less to do
        self.begins = self._step.ahead is not None  # whether begin() can run a step

    @property
    def path(self) -> str:
        return self._step.path

    @property
    def cache_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self.cache)

    @property
    def cache_itemsize(self) -> float:
        """Bytes of the cache for each number in it, scales included."""
        return self.cache_bytes / max(1, sum(layer.k.numel() + layer.v.numel() for layer in self.cache))

    def execute(self, plan: StepPlan, tokens: Tensor | None = None) -> Tensor:
        """Run one step; returns logits [R, vocab_size] on the device: ``num_logits`` rows of each sequence in order.
        ``tokens`` [N] int64 on the device in place of the plan's."""
        return self._run(plan, tokens)

    @torch.inference_mode()
    def _run(self, plan: StepPlan, tokens: Tensor | None = None) -> Tensor:
        apart = self._step.apart
        if apart is None:
            arguments = self._arguments(plan)
            return self._step(arguments[0] if tokens is None else tokens, *arguments[1:])
        parts = parts_of(plan, apart.most)
        found = []
        for part in parts:
            arguments = self._arguments(part.plan)
            own = arguments[0]
            if tokens is not None:
                own = tokens if len(parts) == 1 else tokens[tensor_of(part.tokens, torch.int64, self.device)]
            found.append((apart.prompts if part.prompts else apart.step)(own, *arguments[1:]))
        if len(parts) == 1:
            return found[0]
        out = found[0].new_empty(sum(map(len, found)), found[0].shape[1])
        for part, logits in zip(parts, found, strict=True):
            out.index_copy_(0, tensor_of(part.rows, torch.int64, self.device), logits)
        return out

    def draw(self, plan: StepPlan, draws: Sequence[Draw]) -> list[int]:
        """Run one step and draw a token behind each row of its logits, of which there is one at least, as ``draws``
        says. NO_TOKEN for one that cannot be drawn."""
        return [token for (token,) in self.chain(plan, [[own] for own in draws])]

    def begin(
        self, plan: StepPlan, draws: Sequence[Draw], before: Drawing | None = None, index: Sequence[int] = ()
    ) -> Drawing | None:
        """:meth:`draw`, while the caller goes on. ``before``: the plan's tokens, one of each sequence, are those that
        ``before`` draws behind the rows ``index`` of its step. None where no other thread can run the step."""
        if self._step.ahead is None:
            return None
        slots = [s.slot for s in plan.sequences if s.num_logits]
        return self._step.ahead.begin(self._numbers(plan), self._page_table, slots, draws, before, index)

    def hold(self) -> None:
        """Leave out a step that :meth:`begin` began and that has not started: it has no tokens. For any thread."""
        if self._step.ahead is not None:
            self._step.ahead.hold()

    def chain(self, plan: StepPlan, draws: Sequence[Sequence[Draw]]) -> list[list[int]]:
        """Run one step, and then those of the tokens that are drawn behind it; the host waits once, at the end.
        ``draws``: of each sequence with a row of logits how its tokens are drawn, one after the other; at least one.
        Returns the tokens of each; NO_TOKEN for one that cannot be drawn, and those behind it mean nothing."""
        if self._step.chain is None:
            return self._chain_by_steps(plan, draws)
        slots = [s.slot for s in plan.sequences if s.num_logits]
        return self._step.chain(self._numbers(plan), self._page_table, slots, draws)

    @torch.inference_mode()
    def _chain_by_steps(self, plan: StepPlan, draws: Sequence[Sequence[Draw]]) -> list[list[int]]:
        """:meth:`chain` in one call for each step. The tokens go from step to step on the device."""
        sequences = [s for s in plan.sequences if s.num_logits]
        drawn = torch.full((max(map(len, draws)), len(draws)), NO_TOKEN, device=self.device)
        for i in range(len(drawn)):
            going = [j for j, own in enumerate(draws) if len(own) > i]
            where = tensor_of(going, torch.int64, self.device)
            if i == 0:
                logits = self.execute(plan)
            else:
                ends = [(s, s.end + i - 1) for s in (sequences[j] for j in going)]
                behind = [s._replace(tokens=(0,), start=end, new_pages=()) for s, end in ends]
                logits = self._run(StepPlan(tuple(behind)), drawn[i - 1, where].clamp(min=0))
            drawn[i, where] = draw_tokens(logits, [draws[j][i] for j in going])
        return [found[: len(own)] for found, own in zip(drawn.T.tolist(), draws, strict=True)]

    def _arguments(self, plan: StepPlan) -> tuple[Tensor, Tensor, Tensor, StepLayout, Tensor]:
        """What the model's step takes."""
        n = self._numbers(plan)
        home = _HOST if self._step.reads_host() else self.device
        numbers = tensor_of([*n.tokens, *n.positions, *n.lengths, *n.write_slots], torch.int64, home)
        new, places, totals, slots = numbers.chunk(4)
        query_start, context_len = (tensor_of(part, torch.int32, home) for part in (n.query_start, n.context_len))
        layout = StepLayout(query_start, context_len, self._page_table, slots)
        return new, places, totals, layout, tensor_of(n.rows, torch.int64, home)

    def _numbers(self, plan: StepPlan) -> StepNumbers:
        """Those of ``plan``, whose new pages are in the page table then."""
        self._place(plan)
        tokens, positions, lengths, write_slots, rows = (list[int]() for _ in range(5))
        counts, context_len = [0] * self.max_batch, [0] * self.max_batch
        size = self.page_size
        for s in plan.sequences:
            pages, here = self._pages[s.slot], range(s.start, s.end)
            counts[s.slot], context_len[s.slot] = s.end - s.start, s.end
            tokens += s.tokens
            rows += range(len(tokens) - s.num_logits, len(tokens))
            positions += here
            lengths += [max(s.rope_len, position + 1) for position in here]
            write_slots += [pages[position // size] * size + position % size for position in here]
        query_start = [0, *itertools.accumulate(counts)]
        return StepNumbers(tokens, positions, lengths, write_slots, rows, query_start, context_len)

    def _place(self, plan: StepPlan) -> None:
        """Send what the plan changes in the page table to the device."""
        where: list[int] = []
        new: list[int] = []
        for sequence in plan.sequences:
            if sequence.new_pages:
                if sequence.num_placed + len(sequence.new_pages) > self.pages_per_sequence:
                    raise RuntimeError(f"slot {sequence.slot} has room for {self.pages_per_sequence} pages")
                self._pages[sequence.slot][sequence.num_placed :] = sequence.new_pages
                first = sequence.slot * self.pages_per_sequence + sequence.num_placed
                where += range(first, first + len(sequence.new_pages))
                new += sequence.new_pages
        if new:
            values = tensor_of(new, torch.int32, self.device)
            self._page_table.view(-1).index_copy_(0, tensor_of(where, torch.int64, self.device), values)

    def warm_up(self) -> None:
        """Run every shape that service will see, so that nothing compiles or allocates later. Ranks of one model do it
        together, each by itself: nobody tells them."""

        def run(count: int) -> None:
            log.info("warm-up: %d token%s per step", count, "s" * (count > 1))
            pages = tuple(range(1, 2 + (count - 1) // self.page_size))
            plan = SequencePlan(0, (0,) * count, 0, 0, pages, num_logits=1, rope_len=count)
            finite.append(bool(self._run(StepPlan((plan,))).isfinite().all()))

        finite: list[bool] = []
        self._step.warm_up(run, self._longest)
        if not all(finite):
            log.warning("the model computes logits that are not finite: what it generates means nothing")
