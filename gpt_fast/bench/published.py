"""The models of a target and a draft as plain functions, for the rules in ``engine/speculate/published.py``.

Every call computes whole sequences, in the caller's thread: the engine, its cache and its drafter have no part in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from gpt_fast.bench.drafting import Tally
from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.checkpoint.draft import open_draft
from gpt_fast.config import EngineConfig
from gpt_fast.engine.speculate import published
from gpt_fast.engine.speculate.model import widened
from gpt_fast.engine.speculate.published import Forward
from gpt_fast.errors import ConfigError
from gpt_fast.llm import LLM
from gpt_fast.memory import check_weights
from gpt_fast.model.split import current
from gpt_fast.model.steps import TorchModel, serve
from gpt_fast.outputs import Completion
from gpt_fast.params import SamplingParams


def check_drafter(method: str, draft: str | None) -> None:
    """Raise ConfigError where ``draft``, as in ``EngineConfig``, has no probabilities."""
    if draft in (None, "lookup"):
        why = "compares probabilities with those of a draft model"
        raise ConfigError(f"--method {method} {why}: give --draft DIR, int8 or int4")


def load_pair(llm: LLM, opened: Checkpoint, chosen: EngineConfig) -> tuple[Forward, Forward]:
    """The target ``opened``, which is in ``llm``, and the draft model of ``chosen``, which is loaded: its logits have
    the target's vocabulary. To be called within ``calling``. Raises ConfigError or CheckpointError."""
    found = open_draft(opened, llm.tokenizer, chosen)
    assert found is not None
    for checkpoint in (opened, found.checkpoint):
        scaling = checkpoint.config.rope_scaling
        if scaling is not None and scaling.grows:
            kind = f"{checkpoint.directory} rotates all tokens by the length of the sequence ({scaling.type})"
            raise ConfigError(f"{kind}, so a guess would change what is in front of it: take --method coupled")
    modes = found.checkpoint.smaller_modes(found.quantize)
    check_weights(found.checkpoint.num_bytes(llm.dtype, found.quantize), llm.device, modes)
    built = found.checkpoint.build(llm.dtype, llm.device, quantize=found.quantize, progress=True)
    draft = serve(built, kernels=chosen.kernels, compile=False)
    return (
        lambda tokens: llm.model.forward(tokens.to(llm.device)),
        lambda tokens: widened(draft.forward(tokens.to(llm.device)), llm.config.vocab_size),
    )


@contextlib.contextmanager
def calling(llm: LLM) -> Iterator[None]:
    """Inside, this thread computes by as many threads as the engine of ``llm``, which must have nothing to do, and on
    its device. What the engine has compiled is for its own steps; here it runs uncompiled."""
    before, compiled = torch.get_num_threads(), llm.engine_config.compile and isinstance(llm.model, TorchModel)
    torch.set_num_threads(llm.engine.threads or before)
    try:
        with current(llm.device), torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext():
            yield
    finally:
        torch.set_num_threads(before)


def answer(
    llm: LLM, pair: tuple[Forward, Forward], rule: str, asked: Sequence[tuple[list[int], SamplingParams]], k: int
) -> tuple[list[Completion], Tally]:
    """Complete ``asked`` by ``rule`` with up to ``k`` guesses for each call of the target, one prompt after the other.
    Steps are calls of the target, and all of them and of the tokens count: one call costs what another costs."""
    completions, made = [], published.Guesses()
    with calling(llm):
        for prompt, params in asked:
            request = llm.prepare(prompt, params)
            for _ in published.generate(*pair, published.RULES[rule](request.seed), request, k, made):
                pass
            completions.append(request.completion())
    return completions, Tally(
        num_tokens=made.num_tokens,
        num_steps=made.num_calls,
        num_drafted=made.num_drafted,
        num_accepted=made.num_accepted,
    )
