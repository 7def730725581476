"""A model on its devices, with its KV cache and what runs its steps: one process' part of an :class:`gpt_fast.LLM`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gpt_fast import __version__, devices, memory
from gpt_fast.cgroups import num_cores
from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.checkpoint.draft import open_draft
from gpt_fast.checkpoint.shard import Shard
from gpt_fast.config import EngineConfig, ModelConfig
from gpt_fast.engine.compute import probe
from gpt_fast.engine.engine import Engine
from gpt_fast.engine.following import LeadingRunner, follow
from gpt_fast.engine.pages import PageAllocator
from gpt_fast.engine.runner import Runner
from gpt_fast.engine.scheduler import Scheduler
from gpt_fast.engine.speculate.drafter import Drafter
from gpt_fast.engine.speculate.lookup import LookupDrafter
from gpt_fast.engine.speculate.model import ModelDrafter
from gpt_fast.engine.speculate.speculation import Speculation
from gpt_fast.errors import ConfigError
from gpt_fast.foreign.checkpoint import ForeignCheckpoint
from gpt_fast.foreign.model import ForeignModel, Loaded
from gpt_fast.kernels.cpu.library import CACHE_FORMATS, runs
from gpt_fast.model.compile_cache import default_file, kept
from gpt_fast.model.cpu_model import CpuModel
from gpt_fast.model.steps import Served, serve
from gpt_fast.model.transformer import Transformer
from gpt_fast.parallel.cores import bind
from gpt_fast.parallel.group import Group, device_of_rank, number_of_ranks, ranks_here
from gpt_fast.parallel.ranks import Ranks
from gpt_fast.placement import choose_placement, usable_threads
from gpt_fast.quantize.apply import check_device, quantize_model
from gpt_fast.quantize.scheme import quant_config
from gpt_fast.tokenizer import Tokenizer

log = logging.getLogger(__name__)

SMALL_MODEL_BYTES = 32 * 2**20  # read per token

Opened = Checkpoint | ForeignCheckpoint


class Site(NamedTuple):
    """Where a model is computed, and with whom."""

    device: torch.device
    dtype: torch.dtype
    group: Group | None = None  # the ranks that share the model; None: this process has all of it
    spans: tuple[devices.Span, ...] = ()  # of layers, where there is a device_map

    @property
    def follows(self) -> bool:
        """Whether this process is a rank for which another one decides."""
        return self.group is not None and self.group.rank > 0

    @property
    def sharing(self) -> int:
        """How many ranks have the memory of this device together."""
        return ranks_here() if self.group is not None and self.device.type == "cpu" else 1

    def join(self, config: ModelConfig) -> Shard | None:
        """Take this process' place among the ranks of ``config``: its cores, what all have to agree on, its share."""
        if self.group is None:
            return None
        if self.device.type == "cpu":
            torch.set_num_threads(bind(*self.group.place_here))
        self.group.agree("gpt-fast", __version__)
        self.group.agree("checkpoint", repr(config))
        return Shard(self.group.rank, self.group.count)

    def wait(self) -> None:
        """For all ranks."""
        if self.group is not None:
            self.group.wait()

    def check_cache(self, options: EngineConfig) -> None:
        """Raise ConfigError for a KV cache that the C++ kernels do not have, where they would run steps."""
        asked = self.dtype if options.kv_cache_dtype == "auto" else getattr(torch, options.kv_cache_dtype)
        if options.kernels and runs(self.dtype, self.device) and asked not in CACHE_FORMATS:
            todo = "take bfloat16 or int8, or set kernels: false"
            raise ConfigError(f"kv_cache_dtype: the C++ kernels have no cache of {options.kv_cache_dtype}; {todo}")

    def plan_cache(
        self, held: ModelConfig, draft: ModelConfig | None, options: EngineConfig, missing: int = 0
    ) -> memory.CachePlan:
        """The KV cache for ``held``, the model or this rank's share of it, when ``missing`` bytes more of weights are
        there. Raises ConfigError."""
        if self.spans:
            shapes = devices.Shapes(held, draft, options, self.dtype)
            return devices.plan_cache(self.spans, shapes, loaded=not missing)
        free = memory.free_bytes(self.device) // self.sharing - missing
        where: dict[str, Any] = {"dtype": self.dtype, "free": free, "device_type": self.device.type}
        return memory.plan_cache(held, options, **where, draft=draft)


def load(opened: Opened, tokenizer: Tokenizer | None, options: EngineConfig, *, progress: bool = False) -> LoadedModel:
    """The model of ``opened``, and the draft model that ``options`` ask for. ``progress`` shows bars on a terminal.
    Raises ConfigError, before a weight is read, for what cannot run here, and CheckpointError."""
    _check_ranks(opened, options, number_of_ranks())
    rooms = devices.rooms(options)
    named: dict[str, Any] = {"device": str(rooms[0].device) if rooms else options.device, "dtype": options.dtype}
    named["kernels"] = options.kernels and len(rooms) < 2
    where = choose_placement(opened.num_parameters, opened.stored_dtype, **named)
    device, dtype, quantize = device_of_rank(where.device), where.dtype, options.quantize
    quant = opened.format_for(quantize).quant
    check_device(quant, device)
    site = Site(device, dtype, Group.from_environment(device))
    shard = site.join(opened.config)
    held = shard.config(opened.config) if shard else opened.config
    weight_bytes = opened.num_bytes(dtype, quantize, shard)
    draft = None if site.follows else open_draft(opened, tokenizer, options)  # only guesses: rank 0 runs it alone
    if draft is not None:
        check_device(draft.checkpoint.format_for(draft.quantize).quant, device, "draft")
    draft_bytes = draft.checkpoint.num_bytes(dtype, draft.quantize) if draft else 0
    draft_config = draft.checkpoint.config if draft else None
    smaller = opened.smaller_modes(quantize)
    if rooms:
        assert isinstance(opened, Checkpoint)
        weights = devices.Weights.of(opened.meta_model(dtype, quantize), draft_bytes, smaller)
        spans = devices.plan_spans(rooms, weights, devices.Shapes(held, draft_config, options, dtype))
        for span in spans:
            check_device(quant, span.device)
        site = site._replace(spans=tuple(spans))
    else:
        memory.check_weights(weight_bytes * site.sharing + draft_bytes, device, smaller)
    site.plan_cache(held, draft_config, options, weight_bytes + draft_bytes)  # refuses what cannot fit
    if draft is not None or (isinstance(opened, Checkpoint) and len(site.spans) < 2):
        site.check_cache(options)
    site.wait()  # until all know what is free, which changes now
    how: dict[str, Any] = {"progress": progress and not site.follows, "column_major": where.column_major}
    places = devices.of_layers(site.spans)
    model = opened.build(dtype, device, quantize=quantize, shard=shard, layer_devices=places, **how)
    guessing = draft.checkpoint.build(dtype, device, quantize=draft.quantize, **how) if draft else None
    return LoadedModel(model, opened.config, options, site, guessing)


def adopt(model: Transformer | Served, options: EngineConfig) -> LoadedModel:
    """``model``, which was built in memory, as ``options`` say: its linear layers may be packed. Raises ConfigError."""
    if options.drafter not in (None, "lookup"):
        raise ConfigError("draft: a model that was built in memory is served without a draft model, or with lookup")
    site = Site(model.device, model.dtype)
    if isinstance(model, Transformer | CpuModel):
        site.check_cache(options)
    if options.quantize is not None:
        if not isinstance(model, Transformer):
            raise ConfigError("quantize: the weights of this model are packed already")
        quant = quant_config(options.quantize)
        check_device(quant, model.device)
        quantize_model(model, quant)
    return LoadedModel(model, model.config, options, site)


def _check_ranks(opened: Opened, options: EngineConfig, num_ranks: int) -> None:
    """Raise ConfigError for ``options`` that ``num_ranks`` processes cannot follow, or transformers' models cannot."""
    if isinstance(opened, ForeignCheckpoint):
        opened.check(options, num_ranks)
    if num_ranks > 1 and options.device_map is not None:
        raise ConfigError(f"device_map: {num_ranks} processes share this model already; leave it out")
    if num_ranks > 1 and options.drafter in ("int8", "int4"):
        raise ConfigError(f"draft: {options.drafter} is the whole model, which no rank holds; take lookup or a folder")


class LoadedModel:
    """``model`` of ``config``, or one rank's share of it, with a KV cache, and a ``draft`` model if there is one.
    ``options``: as asked for, and then as far as the model can follow them. Raises ConfigError where no cache fits."""

    def __init__(
        self,
        model: Transformer | Loaded | Served,
        config: ModelConfig,
        options: EngineConfig,
        site: Site,
        draft: Transformer | None = None,
    ) -> None:
        self.weights_at = time.perf_counter()  # when they were there
        self.config, self.site = config, site
        self._ranks = ranks = Ranks.of(site.group)
        how: dict[str, Any] = {"kernels": options.kernels, "compile": options.compile}
        self.model = serve(model, ranks=ranks, layer_devices=devices.of_layers(site.spans), **how)
        if isinstance(self.model, ForeignModel):
            options = self.model.adapted(options)
        self.options = options
        site.wait()  # until all have loaded: then what is free is free
        plan = site.plan_cache(self.model.config, draft.config if draft else None, options)
        self.plan = plan = plan if site.group is None else site.group.say(plan)
        log.info("%s", plan)
        if plan.max_seq_len < plan.wished:
            log.warning("%s", plan.shortened)
        sizes: dict[str, Any] = {"max_batch": plan.max_batch, "max_seq_len": plan.max_seq_len}
        sizes |= {"num_pages": 1 + plan.num_pages, "page_size": plan.page_size, "prefill_chunk": plan.prefill_chunk}
        make: Callable[..., Runner] = partial(LeadingRunner, ranks) if ranks and not site.follows else Runner
        self.runner = make(self.model, cache_dtype=plan.dtype, **sizes)
        self._runners = [self.runner]  # and the draft model's
        self._pages = PageAllocator(1 + plan.num_pages, plan.page_size, options.prefix_cache)
        self._speculation: Speculation | None = None
        if not site.follows and options.drafter is not None:
            drafter: Drafter = LookupDrafter(options.lookup_history)
            if draft is not None:
                longest = draft.config.max_seq_len
                sizes["prefill_chunk"] = min(plan.prefill_chunk, longest)  # behind that a table of positions may end
                self._runners.append(Runner(serve(draft, **how), cache_dtype=plan.dtype, **sizes))
                drafter = ModelDrafter(self._runners[-1], self._pages, config.vocab_size, longest)
            self._speculation = Speculation(drafter, options.speculate_k)
        site.wait()  # until all can compute: from now on they wait for each other a few seconds only

    def make_engine(self) -> Engine:
        """The engine of requests, in the one process that does not follow. :meth:`warm_up` is the first thing that its
        thread is to do."""
        scaling, plan = self.config.rope_scaling, self.plan
        long_from = scaling.original_max_seq_len if scaling is not None and scaling.grows else 0
        anew = scaling is not None and scaling.type == "longrope"
        whole = isinstance(self.model, ForeignModel) and not self.model.takes_pieces
        scheduler = Scheduler(self._pages, plan.max_batch, plan.prefill_chunk, long_from, anew, whole)
        threads = self._threads()
        if self.runner.begins and self.site.group is None and num_cores() > threads:  # Python has a core for itself
            self.runner.runs_ahead = True
        engine = Engine(self.runner, scheduler, max_waiting=self.options.max_waiting, threads=threads)
        engine.speculation = self._speculation
        return engine

    def follow(self) -> None:
        """Compute this rank's share of what rank 0 decides, until that is closed."""
        assert self._ranks is not None
        torch.set_num_threads(self._threads())
        self.warm_up()
        with torch.inference_mode():
            follow(self.runner, self._ranks)

    def warm_up(self) -> None:
        """Run what service will run, in the thread that computes from now on. Steps with drafts are timed."""
        runner, options, device = self.runner, self.options, self.site.device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread: there Triton launches
        with self._compile_cache() if runner.path == "compiled" else nullcontext():
            for each in self._runners:
                each.warm_up()
            if self._speculation is not None and options.speculate != "always":
                self._speculation.control(partial(probe, runner, 0), runner.max_batch, self.plan.max_seq_len)

    def _compile_cache(self) -> AbstractContextManager[None]:
        named = self.options.compile_cache
        file = Path(named).expanduser() if named else default_file(self.model.config, self.site.dtype, self.options)
        return kept(file, lambda: self.runner.path == "compiled")

    def close(self) -> None:
        """End the ranks that follow this one, and leave them. Once is enough, and more does no harm."""
        group = self.site.group
        if group is None or group.closed:
            return
        if isinstance(self.runner, LeadingRunner):
            self.runner.leader.end()
        group.close()

    def _threads(self) -> int:
        """Threads of the engine: no more than there are cores."""
        # A model that fits a core's share of the cache gains nothing from a second one, and on a busy machine threads
        # that wait for each other lose a lot: 25 instead of 300 tokens/s were seen with a model of 260,000 weights.
        num_bytes = self.model.bytes_per_token(0, self.site.dtype.itemsize)
        small = num_bytes < SMALL_MODEL_BYTES and self.site.device.type == "cpu"
        return usable_threads(self.options.threads or (1 if small else torch.get_num_threads()))
