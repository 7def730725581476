"""``gpt-fast generate --method leviathan|chen``: a completion by a published rule of speculative sampling.

Every call of a model computes the whole sequence, so the times compare with each other and not with the engine's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from torch import Tensor

from gpt_fast.bench.published import calling, check_drafter, load_pair
from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.commands import options
from gpt_fast.commands.generate import end_line
from gpt_fast.config import EngineConfig
from gpt_fast.engine.speculate.published import RULES, Forward, Guesses, generate, refuse
from gpt_fast.errors import ConfigError
from gpt_fast.llm import LLM
from gpt_fast.parallel.group import refuse_ranks
from gpt_fast.params import SamplingParams


class Timed:
    """``forward``, and the calls and seconds that it took."""

    def __init__(self, forward: Forward) -> None:
        self._forward, self.num_calls, self.seconds = forward, 0, 0.0

    def __call__(self, tokens: Tensor) -> Tensor:
        begin = time.perf_counter()
        logits = self._forward(tokens).cpu()  # which waits for a GPU
        self.num_calls, self.seconds = self.num_calls + 1, self.seconds + time.perf_counter() - begin
        return logits


def generate_published(arguments: argparse.Namespace, params: SamplingParams, prompt: str | None) -> int:
    """Load both models, generate by the rule ``arguments.method``, report."""
    given = options.engine_options(arguments)
    chosen = EngineConfig(**given)
    refuse_options(arguments, chosen)
    refuse_ranks(f"--method {arguments.method}")
    refuse(params)
    assert prompt is not None
    opened = Checkpoint.open(arguments.checkpoint).with_adapters(chosen.lora)
    engine = {"compile": False, **given, "draft": None, "speculate": None}  # which encodes, and gives the target
    with LLM(opened, progress=True, **engine) as llm, calling(llm):
        target, draft = map(Timed, load_pair(llm, opened, chosen))
        tally, begin = Guesses(), time.perf_counter()
        for i in range(arguments.num_samples):
            sys.stdout.write("\n" if i else "")
            request = llm.prepare(prompt, params)
            rule = RULES[arguments.method](request.seed)
            for text in generate(target, draft, rule, request, chosen.speculate_k, tally):
                sys.stdout.write(text)
                sys.stdout.flush()
            completion = request.completion()
            end_line(completion.text, own_line=sys.stdout.isatty() or arguments.json or arguments.num_samples > 1)
        report = measurements(tally, target, draft, time.perf_counter() - begin)
        print(f"{arguments.method}: {summary(report)}", file=sys.stderr)
        if arguments.json:
            names = ("text", "token_ids", "finish_reason", "num_prompt_tokens")
            facts = {"method": arguments.method, **{name: getattr(completion, name) for name in names}}
            print(json.dumps(facts | report, ensure_ascii=False))
    return 0


def refuse_options(arguments: argparse.Namespace, chosen: EngineConfig) -> None:
    """Raise ConfigError for the first option that a published rule cannot do."""
    check_drafter(arguments.method, chosen.draft)
    where = f"--method {arguments.method}"
    if chosen.speculate not in (None, "always"):
        raise ConfigError(f"{where} always guesses --speculate-k tokens: leave --speculate {chosen.speculate} out")
    if chosen.kv_cache_dtype != "auto":
        raise ConfigError(f"{where} has no KV cache: leave --kv-cache-dtype {chosen.kv_cache_dtype} out")
    for name in ("interactive", "profile"):
        if getattr(arguments, name):
            raise ConfigError(f"{where} does not do --{name}: leave it out, or take --method coupled")


def measurements(tally: Guesses, target: Timed, draft: Timed, total_s: float) -> dict[str, float]:
    """What became of the guesses, and the times."""
    return {
        "num_new_tokens": tally.num_tokens,
        "num_drafted": tally.num_drafted,
        "num_accepted": tally.num_accepted,
        "num_rejected": tally.num_rejected,
        "acceptance_rate": round(tally.acceptance_rate, 4),
        "accepted_per_call": round(tally.num_accepted / max(1, tally.num_calls), 4),
        "tokens_per_call": round(tally.tokens_per_call, 4),
        "target_calls": target.num_calls,
        "target_s": round(target.seconds, 4),
        "draft_calls": draft.num_calls,
        "draft_s": round(draft.seconds, 4),
        "total_s": round(total_s, 4),
    }


def summary(report: dict[str, float]) -> str:
    """``report`` for people."""
    judged = report["num_accepted"] + report["num_rejected"]
    return (
        f"{report['acceptance_rate']:.1%} of {judged} judged drafts accepted ({report['num_drafted']} drafted); "
        f"{report['accepted_per_call']:.2f} drafts accepted and {report['tokens_per_call']:.2f} tokens made "
        f"for each call of the target; {report['target_calls']} target calls {report['target_s']:.2f} s, "
        f"{report['draft_calls']} draft calls {report['draft_s']:.2f} s, all {report['total_s']:.2f} s (without cache)"
    )
