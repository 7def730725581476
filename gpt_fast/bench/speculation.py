"""Ways to speculate, compared in turns: the target alone, the draft model alone, fixed numbers of drafts, ``auto``, and
on demand the rules as papers published them.

One target and one drafter are loaded for all methods. In each round every method answers the same prompts with the same
seeds, in turns for each batch of prompts, and in each round another method begins. One round before them warms up and
does not count. Prompts are real text, because random tokens say nothing about how often drafts are right.

Tokens per second: prompts are asked ``batch_size`` at a time. The tokens behind the first of each answer count, over
the time from a batch's first token to its last, stamped by the engine. A published rule caches nothing, so that its
first token costs what others cost: all its tokens count, over all of its time.

A figure is the median of the rounds. Ratios compare a round with the target alone in the same round, measured (tokens
per second) and expected: the inequality of drafting.py, of the same round's steps.

Speculation changes no answer: a method that gives another token than the target alone ends the run with an error. The
draft model alone and the published rules have their own answers.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from gpt_fast.bench import published
from gpt_fast.bench.drafting import BreakEven, DecodeStep, StepLog, Tally, break_even, plain_step_s, speculating
from gpt_fast.bench.load.prompts import Prompt, read_prompts
from gpt_fast.bench.throughput import ended
from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.config import DRAFTS, MAX_POSITIONS, read_key
from gpt_fast.engine.engine import Engine
from gpt_fast.engine.speculate.controller import Controller
from gpt_fast.engine.speculate.published import RULES, Forward
from gpt_fast.errors import ConfigError
from gpt_fast.fields import OneOf, Whole
from gpt_fast.llm import LLM
from gpt_fast.outputs import Completion
from gpt_fast.parallel.group import refuse_ranks
from gpt_fast.params import SamplingParams
from gpt_fast.serve.tracing import traced

TARGET = "target"  # the method that all others are compared with
BEGINNINGS = (
    "Once upon a time, there was a little",
    "One day, a boy named Tom went to the park with his mom. They saw a big",
    "The cat sat by the window and looked at the rain. She wanted to",
    "Lily had a red ball. She threw the ball up and",
    "In the morning the sun came out, and the birds began to",
    "There was an old house at the end of the road. Nobody knew who",
    '"Can I have a cookie?" asked Ben. His sister said',
    "The dog ran and ran until it came to a river. It",
)

Asked = list[tuple[list[int], SamplingParams]]  # token ids of prompts, and how each is sampled


@dataclass(frozen=True)
class DraftOptions:
    """What to compare. Raises ConfigError, or RequestError for ``temperature`` and ``seed``."""

    speculate_k: int = 4  # fixed numbers of drafts are 1 to this; ``auto`` may give as many
    batch_sizes: tuple[int, ...] = (1,)
    new_tokens: int = 128  # of each answer, at most
    repeats: int = 5  # rounds that count
    temperature: float = 0.0
    dataset: str | None = None  # file with prompts, see ``read_prompts``; None: BEGINNINGS
    seed: int = 0
    method: tuple[str, ...] = ()  # of RULES, compared as well; as slow as published

    def __post_init__(self) -> None:
        read_key(Whole(1, MAX_POSITIONS), min(self.batch_sizes, default=0), "batch_sizes")
        read_key(Whole(2, MAX_POSITIONS), self.new_tokens, "new_tokens")  # the first one comes from the prompt's step
        read_key(Whole(1, MAX_POSITIONS), self.repeats, "repeats")
        SamplingParams(temperature=self.temperature, seed=self.seed)  # refuses what it cannot take
        for name in self.method:
            read_key(OneOf(tuple(RULES)), name, "method")

    @property
    def prompts(self) -> list[Prompt]:
        """Raises ValueError or OSError for a file that holds none."""
        return read_prompts(self.dataset) if self.dataset else [Prompt(text) for text in BEGINNINGS]


class Answers(NamedTuple):
    """What one batch got: ``tally`` has the tokens that were made in ``seconds``."""

    completions: list[Completion]
    tally: Tally
    seconds: float


@dataclass(frozen=True)
class Method:
    """A way to answer. ``engine`` is the one that does it; ``own_tokens``: they need not be the target's."""

    name: str
    ask: Callable[[Asked], Answers]
    engine: Engine
    k: int | None = None  # drafts a step, where they are fixed
    own_tokens: bool = False


class Round(NamedTuple):
    """What one round showed of a method."""

    rate: float  # tokens per second
    tally: Tally
    steps: list[DecodeStep]


@dataclass
class Found:
    """What the rounds showed of one method at one batch size."""

    method: Method
    rounds: list[Round] = field(default_factory=list)
    _answers: list[Answers] = field(default_factory=list)  # of the round that runs
    _times: list[StepLog] = field(default_factory=list)  # and of its steps

    def ask(self, asked: Asked) -> None:
        """One batch of a round."""
        self._times.append(StepLog(self.method.engine))
        self._answers.append(self.method.ask(asked))

    def end_round(self, counts: bool) -> list[tuple[int, ...]]:
        """The tokens of every answer. ``counts``: the round was no warm-up. Raises RuntimeError for no time."""
        seconds, tally = sum(answers.seconds for answers in self._answers), Tally()
        if not seconds:
            raise RuntimeError(f"{self.method.name}: no answer has a second token, so there is nothing to measure")
        for answers in self._answers:
            tally.include(answers.tally)
        if counts:
            steps = [step for times in self._times for step in times.steps]
            self.rounds.append(Round(tally.num_tokens / seconds, tally, steps))
        tokens = [done.token_ids for answers in self._answers for done in answers.completions]
        self._answers, self._times = [], []
        return tokens


class Bench:
    """Loads ``checkpoint`` with ``draft`` (see ``EngineConfig``), and the draft model by itself where it is a
    checkpoint. ``options``: other fields of EngineConfig. Raises ConfigError, CheckpointError, or what
    ``DraftOptions.prompts`` raises."""

    def __init__(self, checkpoint: str | Path, draft: str, wanted: DraftOptions, **options: Any) -> None:
        refuse_ranks("draft")
        self.wanted, opened = wanted, Checkpoint.open(checkpoint).with_adapters(options.get("lora"))
        for name in wanted.method:
            published.check_drafter(name, draft)
        prompts = [
            (opened.tokenizer.encode(p.content) if isinstance(p.content, str) else p.content, p.max_new_tokens)
            for p in wanted.prompts
        ]
        self._prompts = [(ids, limit or wanted.new_tokens) for ids, limit in prompts]
        room = max(len(ids) + limit for ids, limit in self._prompts)
        if room > opened.config.max_seq_len:
            raise ConfigError(f"a prompt and new_tokens ({room}) exceed the context of {opened.config.max_seq_len}")
        # A round must not find what the one before has computed.
        sizes = {"max_batch": max(wanted.batch_sizes), "max_seq_len": room, "prefix_cache": False}
        speculate = {"draft": draft, "speculate": "auto", "speculate_k": wanted.speculate_k}
        self.llm = LLM(opened, progress=True, **options, **sizes, **speculate)
        assert self.llm.engine.speculation is not None
        self._speculation = self.llm.engine.speculation
        self._controller = self._speculation.controller
        self.draft_llm: LLM | None = None
        if draft not in DRAFTS:
            as_target = {"dtype": str(self.llm.dtype).removeprefix("torch."), "quantize": None, "lora": None}
            self.draft_llm = LLM(draft, progress=True, **options | as_target, **sizes)
        self._pair: tuple[Forward, Forward] | None = None  # for the published rules
        if wanted.method:
            self._pair = published.load_pair(self.llm, opened, self.llm.engine_config)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.close()
        if self.draft_llm is not None:
            self.draft_llm.close()

    def methods(self) -> list[Method]:
        """What is compared; the first one is what the others are compared with."""
        most, target = self.wanted.speculate_k, self.llm.engine
        found = [Method(TARGET, partial(self._target, 0, None), target)]
        if self.draft_llm is not None:
            found.append(Method("draft alone", partial(_ask, self.draft_llm), self.draft_llm.engine, own_tokens=True))
        for k in range(1, most + 1):
            found.append(Method(f"k = {k}", partial(self._target, k, None), target, k))
        found.append(Method("auto", partial(self._target, most, self._controller), target))
        for name in self.wanted.method:
            found.append(Method(name, partial(self._published, name), target, own_tokens=True))
        return found

    def _target(self, most: int, controller: Controller | None, asked: Asked) -> Answers:
        """Let the target answer; ``most`` and ``controller``: see ``speculating``."""
        with speculating(self._speculation, most, controller):
            return _ask(self.llm, asked)

    def _published(self, rule: str, asked: Asked) -> Answers:
        """Let both models answer by ``rule``, one prompt after the other."""
        assert self._pair is not None
        begin = time.perf_counter()
        made = published.answer(self.llm, self._pair, rule, asked, self.wanted.speculate_k)
        return Answers(*made, time.perf_counter() - begin)

    def facts(self) -> dict[str, Any]:
        """What is known before anything is measured."""
        return {
            "device": str(self.llm.device),
            "dtype": str(self.llm.dtype).removeprefix("torch."),
            "quantize": self.llm.engine_config.quantize,
            "path": self.llm.engine.runner.path,
            "prompts": len(self._prompts),
            **{name: value for name, value in dataclasses.asdict(self.wanted).items() if name != "batch_sizes"},
        }

    def num_runs(self) -> int:
        """How often :meth:`run` calls ``advance``, over all batch sizes."""
        batches = sum(len(self._batches(size)) for size in self.wanted.batch_sizes)
        return batches * (1 + self.wanted.repeats) * len(self.methods())

    def run(self, batch_size: int, advance: Callable[[], object] = lambda: None) -> list[dict[str, Any]]:
        """A row for each method. ``advance`` is called after each batch of each. Raises RuntimeError when a method
        gives other tokens than the target alone."""
        found = [Found(method) for method in self.methods()]
        expected: list[tuple[int, ...]] = []
        for i in range(1 + self.wanted.repeats):
            first = i % len(found)
            for asked in self._batches(batch_size):
                for each in found[first:] + found[:first]:
                    each.ask(asked)
                    advance()
            for each in found:  # the target first
                tokens = each.end_round(counts=i > 0)
                expected = expected or tokens
                if not each.method.own_tokens:
                    _check_tokens(each.method.name, tokens, expected)
        return rows(found, batch_size)

    def trace(self, folder: Path) -> None:
        """Write a profiler's trace of each method into ``folder``, of its answers to one batch of prompts."""
        for method in self.methods():
            name = method.name.replace(" = ", "").replace(" ", "-")
            with traced(folder / f"{name}.trace.json", self.llm.device.type):
                method.ask(self._batches(min(self.wanted.batch_sizes))[0])

    def _batches(self, batch_size: int) -> list[Asked]:
        """All prompts, ``batch_size`` at a time; the first ones again where the last batch would not be full."""
        count = -(-len(self._prompts) // batch_size) * batch_size
        # Whatever penalty the checkpoint asks for: the published rules serve none.
        same = SamplingParams(temperature=self.wanted.temperature, repetition_penalty=1.0)
        asked = [
            (ids, dataclasses.replace(same, max_tokens=limit, seed=self.wanted.seed + i))
            for i, (ids, limit) in enumerate(itertools.islice(itertools.cycle(self._prompts), count))
        ]
        return [asked[i : i + batch_size] for i in range(0, count, batch_size)]


def _ask(llm: LLM, asked: Asked) -> Answers:
    handles = ended(llm.submit_all(asked))
    first = min(handle.request.first_token or 0.0 for handle in handles)
    last = max(handle.request.last_token or 0.0 for handle in handles)
    completions, tally = [handle.completion for handle in handles if handle.completion is not None], Tally()
    for done in completions:
        tally.add(done)
    return Answers(completions, tally, last - first)


def _check_tokens(name: str, tokens: Sequence[tuple[int, ...]], expected: Sequence[tuple[int, ...]]) -> None:
    for number, (ours, theirs) in enumerate(zip(tokens, expected, strict=True), 1):
        if ours != theirs:
            same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))
            raise RuntimeError(
                f"{name} gave another answer than the {TARGET} alone to prompt {number}: from its token {same + 1} on. "
                "This is a mistake of the engine, and the figures would mean nothing"
            )


def rows(found: Sequence[Found], batch_size: int) -> list[dict[str, Any]]:
    """What is reported of each method. Times in seconds; None for what a method does not have. ``same_tokens``: it gave
    the target's, which is checked in every round; None where it need not."""
    plain = [plain_step_s(each.steps, batch_size) for each in found[0].rounds]
    made = []
    for each in found:
        tally, method = Tally(), each.method
        for one in each.rounds:
            tally.include(one.tally)
        rates = [one.rate for one in each.rounds]
        ratios = [ours.rate / target.rate for ours, target in zip(each.rounds, found[0].rounds, strict=True)]
        evens = [
            break_even(one.steps, one.tally.acceptance, plain_s, batch_size)
            for one, plain_s in zip(each.rounds, plain, strict=True)
        ]
        own_plain = [plain_step_s(one.steps, batch_size) for one in each.rounds] if method.own_tokens else plain
        made.append({
            "batch_size": batch_size,
            "method": method.name,
            "k": method.k,
            "same_tokens": None if method.own_tokens else True,
            "tokens_per_second": statistics.median(rates),
            "tokens_per_second_quartiles": quartiles(rates),
            "tokens_per_second_rounds": rates,
            "ratio": statistics.median(ratios),
            "ratio_quartiles": quartiles(ratios),
            "drafts_per_step": tally.drafts_per_step,
            "acceptance": tally.acceptance,
            "mean_accepted_length": tally.tokens_per_step,
            "plain_s": _median(own_plain),
            **_sides([even for even in evens if even is not None]),
        })  # fmt: skip
    return made


def _sides(evens: Sequence[BreakEven]) -> dict[str, float | None]:
    """The numbers of the inequality (drafting.py), for steps with drafts: medians of the rounds' means."""
    return {
        "draft_s": _median([even.draft_s for even in evens]),
        "verify_s": _median([even.verify_s for even in evens]),
        "accepted_per_draft": _median([even.accepted for even in evens]),
        "accepted_needed": _median([even.accepted_needed for even in evens]),
        "expected_ratio": _median([even.speedup for even in evens]),
    }


def _median(values: Sequence[float | None]) -> float | None:
    """None for rounds that have none."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The lower and the upper one; of a single value that value twice."""
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high
