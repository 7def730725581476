"""A model behind the engine in a few lines, and an LLM around it: what the engine does is then tested in milliseconds.

The next token depends on every token before it, read from the cache through the page table as attention reads keys. So
a wrong page, slot, position or row gives another answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gpt_fast import LLM, SamplingParams
from gpt_fast.checkpoint.generation import GenerationDefaults
from gpt_fast.engine.engine import Engine
from gpt_fast.engine.grammar import GrammarCompiler
from gpt_fast.engine.pages import PageAllocator
from gpt_fast.engine.runner import Runner
from gpt_fast.engine.scheduler import Scheduler
from gpt_fast.engine.speculate.drafter import Drafter
from gpt_fast.engine.speculate.speculation import Speculation
from gpt_fast.kernels.cache import LayerCache, PagedLayer
from gpt_fast.loading import Site
from gpt_fast.model.attention import StepLayout
from gpt_fast.tokenizer import Tokenizer

VOCAB_SIZE = 260  # of the model; the tokenizer has two ids less, as where a vocabulary is padded
EOS = 257
_STATES = 997
_TABLE = 3 * torch.randn(_STATES, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))


class FakeModel:
    """Logits are a row of a fixed random table; which row, all tokens up to the position say."""

    device = torch.device("cpu")
    dtype = torch.float32
    vocab_size = VOCAB_SIZE
    cache_layers = (PagedLayer(1, 1),)  # the keys are the token ids

    def bytes_per_token(self, context_len: int, cache_itemsize: float) -> int:
        return int(context_len * cache_itemsize)

    def forward(self, tokens: Tensor) -> Tensor:
        assert bool((tokens < self.vocab_size).all()), "as in an embedding table"
        weights = 7 + 31 * torch.arange(tokens.shape[-1])
        return _TABLE[((tokens + 1) * weights).cumsum(-1) % _STATES]

    def make_step(self, cache: Sequence[LayerCache], page_table: Tensor) -> FakeStep:
        return FakeStep(self, cache[0], page_table)


class FakeStep:
    path = "eager"
    chain = ahead = apart = None

    def __init__(self, model: FakeModel, cache: LayerCache, page_table: Tensor) -> None:
        self._model, self._cache, self._page_table = model, cache, page_table

    def __call__(self, tokens: Tensor, positions: Tensor, lengths: Tensor, layout: StepLayout, rows: Tensor) -> Tensor:
        assert layout.page_table is self._page_table
        keys = tokens.float()[:, None, None]
        self._cache.write(keys, keys, layout.write_slots)
        logits = torch.empty(len(tokens), self._model.vocab_size)
        for slot, (begin, end) in enumerate(itertools.pairwise(layout.query_start.tolist())):
            if begin < end:
                known = self._cache.k[layout.page_table[slot]].flatten()[: int(layout.context_len[slot])]
                assert positions[end - 1] == len(known) - 1
                logits[begin:end] = self._model.forward(known.long())[begin - end :]
        return logits[rows]

    def reads_host(self) -> bool:
        return False

    def warm_up(self, run: Callable[[int], None], longest: int) -> None:
        run(1)


class Bytes(Tokenizer):
    """One token a byte, then a beginning and an end."""

    def __init__(self) -> None:
        pieces = {value: bytes([value]) for value in range(256)}
        super().__init__(pieces, {256: "<bos>", EOS: "<eos>"}, bos_token_id=256, eos_token_ids=(EOS,))

    def _encode(self, text: str, allow_special: bool) -> list[int]:
        return list(text.encode())


class FakeModelLLM(LLM):
    """An LLM whose model is a FakeModel. ``drafter`` makes a drafter of the engine's pages and sizes of a runner."""

    def __init__(
        self,
        *,
        max_batch: int = 8,
        max_seq_len: int = 128,
        num_pages: int | None = None,
        page_size: int = 16,
        prefill_chunk: int = 512,
        prefix_cache: bool = True,
        max_waiting: int | None = None,
        drafter: Callable[[PageAllocator, dict[str, int]], Drafter] | None = None,
        num_drafts: int = 4,
    ) -> None:
        self.model: Any = FakeModel()
        site = Site(self.model.device, self.model.dtype)
        self._loaded: Any = SimpleNamespace(site=site, close=lambda: None)
        self.config: Any = SimpleNamespace(vocab_size=VOCAB_SIZE)
        self.tokenizer, self.max_seq_len = Bytes(), max_seq_len
        self.defaults = GenerationDefaults((), None, SamplingParams())
        self._grammars = GrammarCompiler(self.tokenizer, VOCAB_SIZE, (EOS,))
        self._ids = itertools.count()
        num_pages = 1 + (num_pages or max_batch * -(-max_seq_len // page_size))
        sizes = {"max_batch": max_batch, "max_seq_len": max_seq_len, "num_pages": num_pages, "page_size": page_size,
                 "prefill_chunk": prefill_chunk}  # fmt: skip
        runner = Runner(self.model, **sizes)
        pages = PageAllocator(num_pages, page_size, prefix_cache)
        self.engine = Engine(runner, Scheduler(pages, max_batch, prefill_chunk), max_waiting=max_waiting, threads=1)
        self.engine.speculation = None if drafter is None else Speculation(drafter(pages, sizes), num_drafts)
        self.engine.start(runner.warm_up)


def check_idle(llm: LLM, timeout_s: float = 5.0) -> None:
    """Wait until nothing runs; then every page must be free or cached, and accounted for."""
    engine = llm.engine
    with engine.changed:
        assert engine.changed.wait_for(lambda: not engine._handles and not engine._inbox, timeout_s), "still running"
        engine.scheduler.check_integrity()
        assert engine.scheduler.pages.num_used == 0


def hit_rate(llm: LLM) -> float:
    """Share of all prompt tokens that were found in the prefix cache."""
    pages = llm.engine.scheduler.pages
    return pages.hits / pages.queries
