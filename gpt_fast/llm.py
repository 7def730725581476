"""``LLM``: a checkpoint, ready to generate. The front door for Python programs, the command line and the handler."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import secrets
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, cast, overload

import torch

from gpt_fast import __version__, devices, memory
from gpt_fast.cgroups import num_cores
from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.checkpoint.draft import open_draft
from gpt_fast.checkpoint.families import GenerationDefaults
from gpt_fast.checkpoint.shard import Shard
from gpt_fast.config import EngineConfig, ModelConfig, from_mapping
from gpt_fast.engine.compute import probe
from gpt_fast.engine.engine import Engine
from gpt_fast.engine.following import LeadingRunner, follow
from gpt_fast.engine.grammar import GrammarCompiler
from gpt_fast.engine.handle import Handle
from gpt_fast.engine.pages import PageAllocator
from gpt_fast.engine.request import Request
from gpt_fast.engine.runner import Runner
from gpt_fast.engine.scheduler import Scheduler
from gpt_fast.engine.speculate.drafter import Drafter
from gpt_fast.engine.speculate.lookup import LookupDrafter
from gpt_fast.engine.speculate.model import ModelDrafter
from gpt_fast.engine.speculate.speculation import Speculation
from gpt_fast.engine.text import TextStream
from gpt_fast.engine.token_rules import TokenRules
from gpt_fast.errors import ConfigError, RankError, RequestError, TokenizerMissing
from gpt_fast.fields import refuse
from gpt_fast.foreign.checkpoint import ForeignCheckpoint, open_checkpoint
from gpt_fast.foreign.model import ForeignModel, Loaded
from gpt_fast.kernels.roofline import Roofline, read_bandwidth
from gpt_fast.model.compile_cache import default_file, kept
from gpt_fast.model.description import describe
from gpt_fast.model.steps import Served, serve
from gpt_fast.model.transformer import Transformer
from gpt_fast.outputs import Completion, Delta
from gpt_fast.parallel.cores import bind
from gpt_fast.parallel.group import Group, device_of_rank, number_of_ranks, ranks_here
from gpt_fast.parallel.ranks import Ranks
from gpt_fast.params import SamplingParams
from gpt_fast.placement import choose_placement, usable_threads
from gpt_fast.quantize.apply import check_device, quantize_model
from gpt_fast.quantize.scheme import quant_config
from gpt_fast.tokenizer import IncrementalDetokenizer, Tokenizer

log = logging.getLogger(__name__)

SMALL_MODEL_BYTES = 32 * 2**20  # read per token

Prompt = str | Sequence[int]
Opened = Checkpoint | ForeignCheckpoint


def _tokenizer_of(opened: Opened) -> Tokenizer | None:
    """None, with a warning, where there is none."""
    try:
        return opened.tokenizer
    except TokenizerMissing as error:
        # As a text: whoever keeps the record would keep the error's frames, and the whole model with them.
        log.warning("%s; until then prompts must be token ids, and completions have no text", str(error))
        return None


def _listed(value: Any, name: str, takes: str) -> Any:
    """``value``, a string or a sequence, as a list if it is an array of numpy or a tensor. Raises RequestError."""
    given = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        refuse(name, takes, value, "invalid_type")
    return given


def _begun(handle: Handle) -> Iterator[Delta]:
    """The pieces of ``handle``. Python runs the end of a generator only if it has begun."""

    def pieces() -> Iterator[Any]:
        try:
            yield None
            yield from handle
        finally:
            handle.cancel()

    begun = pieces()
    next(begun)
    return begun


def _check_ranks(opened: Opened, options: EngineConfig, num_ranks: int) -> None:
    """Raise ConfigError for ``options`` that ``num_ranks`` processes cannot follow, or transformers' models cannot."""
    if isinstance(opened, ForeignCheckpoint):
        opened.check(options, num_ranks)
    if num_ranks > 1 and options.device_map is not None:
        raise ConfigError(f"device_map: {num_ranks} processes share this model already; leave it out")
    if num_ranks > 1 and options.drafter in ("int8", "int4"):
        raise ConfigError(f"draft: {options.drafter} is the whole model, which no rank holds; take lookup or a folder")


class LLM:
    """Loads ``checkpoint`` (what ``Checkpoint.open`` takes, opened or not), compiles, warms up; then generates. Any
    number of threads may call its methods: all requests share one batch.

    Keyword arguments are the fields of :class:`gpt_fast.config.EngineConfig`. ``progress`` shows bars on a terminal.
    Raises ConfigError, CheckpointError or TokenizerError (all ValueError)."""

    _spans: Sequence[devices.Span] = ()  # of layers, where there is a device_map

    def __init__(self, checkpoint: str | Path | Opened, *, progress: bool = False, **options: Any) -> None:
        self.engine_config = o = from_mapping(EngineConfig, options, "LLM()")
        begin = time.perf_counter()
        opened = open_checkpoint(checkpoint) if isinstance(checkpoint, str | Path) else checkpoint
        opened = opened.with_adapters(o.lora)
        self.checkpoint, self.config, self.defaults = opened.vocabulary, opened.config, opened.defaults
        self.num_parameters = opened.num_parameters
        self.tokenizer = _tokenizer_of(opened)
        _check_ranks(opened, o, number_of_ranks())
        rooms = devices.rooms(o)
        named: dict[str, Any] = {"device": str(rooms[0].device) if rooms else o.device, "dtype": o.dtype}
        named["kernels"] = o.kernels and len(rooms) < 2
        where = choose_placement(self.num_parameters, opened.stored_dtype, **named)
        self.device, self.dtype = device_of_rank(where.device), where.dtype
        check_device(opened.format_for(o.quantize).quant, self.device)
        self.group = Group.from_environment(self.device)
        shard = self._join(self.group) if self.group is not None else None
        held = shard.config(self.config) if shard else self.config
        weight_bytes = opened.num_bytes(self.dtype, o.quantize, shard)
        draft = None if self.follows else open_draft(opened, self.tokenizer, o)  # only guesses: rank 0 runs it alone
        draft_bytes = draft.checkpoint.num_bytes(self.dtype, draft.quantize) if draft else 0
        draft_config = draft.checkpoint.config if draft else None
        smaller = opened.smaller_modes(o.quantize)
        if rooms:
            assert isinstance(opened, Checkpoint)
            weights = devices.Weights.of(opened.meta_model(self.dtype, o.quantize), draft_bytes, smaller)
            self._spans = devices.plan_spans(rooms, weights, devices.Shapes(held, draft_config, o, self.dtype))
            for span in self._spans:
                check_device(opened.format_for(o.quantize).quant, span.device)
        else:
            memory.check_weights(weight_bytes * self._sharing + draft_bytes, self.device, smaller)
        self._plan_cache(held, draft_config, weight_bytes + draft_bytes)  # refuses what cannot fit
        if self.group is not None:
            self.group.wait()  # until all know what is free, which changes now
        how: dict[str, Any] = {"progress": progress and not self.follows, "column_major": where.column_major}
        places = devices.of_layers(self._spans)
        model = opened.build(self.dtype, self.device, quantize=o.quantize, shard=shard, layer_devices=places, **how)
        guessing = draft.checkpoint.build(self.dtype, self.device, quantize=draft.quantize, **how) if draft else None
        self._start(model, time.perf_counter() - begin, guessing)

    def _join(self, group: Group) -> Shard:
        """Take this process' place among the ranks: its cores, what all have to agree on, its share of the model."""
        if self.device.type == "cpu":
            torch.set_num_threads(bind(*group.place_here))
        group.agree("gpt-fast", __version__)
        group.agree("checkpoint", repr(self.config))
        return Shard(group.rank, group.count)

    @classmethod
    def from_model(cls, model: Transformer | Served, *, tokenizer: Tokenizer | None = None, **options: Any) -> LLM:
        """Serve a model that was built in memory, on its device and in its dtype. ``options`` are the other fields of
        EngineConfig. ``quantize`` and ``kernels`` change ``model`` itself: its linear layers are packed, and it is for
        inference from then on. Without a ``tokenizer`` prompts are token ids and completions have no text. There is no
        ``checkpoint`` attribute. Raises ConfigError."""
        for name in ("device", "device_map", "dtype", "lora"):
            if options.get(name) is not None:
                raise ConfigError(f"{name} is the model's own here; leave it out")
        self = cls.__new__(cls)
        self.engine_config = from_mapping(EngineConfig, options, "LLM()")
        self.config, self.tokenizer, self.group = model.config, tokenizer, None
        self.defaults = GenerationDefaults((), None, SamplingParams())
        self.device, self.dtype = model.device, model.dtype
        if isinstance(model, ForeignModel):
            self.num_parameters = model.num_parameters
        else:
            self.num_parameters = describe(model.config).num_parameters
        if self.engine_config.drafter not in (None, "lookup"):
            raise ConfigError("draft: a model that was built in memory is served without a draft model, or with lookup")
        if self.engine_config.quantize is not None:
            if not isinstance(model, Transformer):
                raise ConfigError("quantize: the weights of this model are packed already")
            quant = quant_config(self.engine_config.quantize)
            check_device(quant, self.device)
            quantize_model(model, quant)
        self._start(model, load_s=0.0)
        return self

    def _start(self, model: Transformer | Loaded | Served, load_s: float, draft: Transformer | None = None) -> None:
        """Build the engine around ``model``, and a ``draft`` model if there is one, and warm it up."""
        begin, o = time.perf_counter(), self.engine_config
        self._ranks = ranks = Ranks.of(self.group)
        how: dict[str, Any] = {"kernels": o.kernels, "compile": o.compile}
        self.model = serve(model, ranks=ranks, layer_devices=devices.of_layers(self._spans), **how)
        if isinstance(self.model, ForeignModel):
            o = self.engine_config = self.model.adapted(o)
        if self.group is not None:
            self.group.wait()  # until all have loaded: then what is free is free
        plan = self._plan_cache(self.model.config, draft.config if draft else None)
        plan = plan if self.group is None else self.group.say(plan)
        log.info("%s", plan)
        if plan.max_seq_len < plan.wished:
            log.warning("%s", plan.shortened)
        self.max_seq_len = plan.max_seq_len
        num_pages, chunk = 1 + plan.num_pages, plan.prefill_chunk
        sizes = {"max_batch": plan.max_batch, "max_seq_len": plan.max_seq_len, "prefill_chunk": chunk}
        sizes |= {"num_pages": num_pages, "page_size": plan.page_size}
        make: Callable[..., Runner] = partial(LeadingRunner, ranks) if ranks and not self.follows else Runner
        self._runner = runner = make(self.model, cache_dtype=plan.dtype, **sizes)
        if self.group is not None:
            self.group.wait()  # until all can compute: from now on they wait for each other a few seconds only
        if self.follows:
            return
        scaling = self.config.rope_scaling
        long_from = scaling.original_max_seq_len if scaling is not None and scaling.grows else 0
        anew = scaling is not None and scaling.type == "longrope"
        pages = PageAllocator(num_pages, plan.page_size, o.prefix_cache)
        whole = isinstance(self.model, ForeignModel) and not self.model.takes_pieces
        scheduler = Scheduler(pages, plan.max_batch, chunk, long_from, anew, whole)
        drafter: Drafter | None = LookupDrafter(o.lookup_history) if o.drafter == "lookup" else None
        runners = [runner]
        if draft is not None:
            guessing = Runner(serve(draft, **how), cache_dtype=plan.dtype, **sizes)
            drafter = ModelDrafter(guessing, pages, self.config.vocab_size, draft.config.max_seq_len)
            runners.append(guessing)
        threads = self._threads()
        if runner.begins and self.group is None and num_cores() > threads:  # Python has a core for itself
            runner.runs_ahead = True
        self.engine = Engine(runner, scheduler, max_waiting=o.max_waiting, threads=threads)
        weakref.finalize(self, self.engine.close_soon).atexit = False  # its thread would keep the model for ever
        if drafter is not None:
            self.engine.speculation = Speculation(drafter, o.speculate_k)
        self._grammars = GrammarCompiler(self.tokenizer, self.config.vocab_size, self.eos_token_ids)
        self._ids = itertools.count()
        self.engine.start(partial(self._warm_up, runners))
        self.load_s, self.warm_up_s = load_s, time.perf_counter() - begin
        log.info("ready: loaded in %.1f s, compiled and warmed up in %.1f s", self.load_s, self.warm_up_s)

    @property
    def follows(self) -> bool:
        """Whether this process is a rank for which another one decides: :meth:`follow` is all that it can do."""
        return self.group is not None and self.group.rank > 0

    @property
    def _sharing(self) -> int:
        """How many ranks have the memory of this device together."""
        return ranks_here() if self.group is not None and self.device.type == "cpu" else 1

    def follow(self) -> None:
        """Compute this rank's share of what rank 0 decides, until that is closed."""
        assert self._ranks is not None
        torch.set_num_threads(self._threads())
        self._warm_up([self._runner])
        with torch.inference_mode():
            follow(self._runner, self._ranks)

    def _plan_cache(self, held: ModelConfig, draft: ModelConfig | None, missing: int = 0) -> memory.CachePlan:
        """The KV cache for ``held``, the model or this rank's share of it, when ``missing`` bytes more of weights are
        there. Raises ConfigError."""
        if self._spans:
            shapes = devices.Shapes(held, draft, self.engine_config, self.dtype)
            return devices.plan_cache(self._spans, shapes, loaded=not missing)
        free = memory.free_bytes(self.device) // self._sharing - missing
        where: dict[str, Any] = {"dtype": self.dtype, "free": free, "device_type": self.device.type}
        return memory.plan_cache(held, self.engine_config, **where, draft=draft)

    def _threads(self) -> int:
        """Threads of the engine: no more than there are cores."""
        # A model that fits a core's share of the cache gains nothing from a second one, and on a busy machine threads
        # that wait for each other lose a lot: 25 instead of 300 tokens/s were seen with a model of 260,000 weights.
        small = self.model.bytes_per_token(0, self.dtype.itemsize) < SMALL_MODEL_BYTES and self.device.type == "cpu"
        return usable_threads(self.engine_config.threads or (1 if small else torch.get_num_threads()))

    def _warm_up(self, runners: Sequence[Runner]) -> None:
        runner, o = runners[0], self.engine_config
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # of this thread, which computes from now on: there Triton launches
        named = Path(o.compile_cache).expanduser() if o.compile_cache else None
        cache = kept(named or default_file(self.model.config, self.dtype, o), lambda: runner.path == "compiled")
        with cache if runner.path == "compiled" else nullcontext():
            for each in runners:
                each.warm_up()
            if not self.follows and self.engine.speculation is not None and o.speculate != "always":
                self.engine.speculation.control(partial(probe, runner, 0), runner.max_batch, self.max_seq_len)

    @overload
    def generate(self, prompts: str, params: SamplingParams | None = None) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Completion | list[Completion]: ...

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Completion | list[Completion]:
        """Complete one prompt (a string or token ids) or a list of them; returns one completion or a list in order.

        ``params``: for all prompts, or a list with one entry for each prompt. With ``n`` > 1 a prompt has that many
        completions, one after the other. Raises RequestError, before anything runs, for what cannot be served."""
        prompts = _listed(prompts, "prompts", "a string, a list of token ids, or a list of these")
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
        several = [cast(Prompt, prompts)] if single else list(cast(Sequence[Prompt], prompts))
        params = SamplingParams() if params is None else params
        each = [params] * len(several) if isinstance(params, SamplingParams) else params
        if not isinstance(each, Sequence) or not all(isinstance(own, SamplingParams) for own in each):
            refuse("params", "SamplingParams, or a list with one for each prompt", params, "invalid_type")
        if len(each) != len(several):
            message = f"{len(each)} sampling parameters for {len(several)} prompts: give one for all, or one for each"
            raise RequestError(message, "params")
        parts = zip(several, each, strict=True)
        handles = self.submit_all([(prompt, sample) for prompt, own in parts for sample in own.samples()])
        try:
            completions = [d.completion for handle in handles for d in handle if d.completion is not None]
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise
        return completions[0] if single and each[0].n == 1 else completions

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Complete ``prompt`` piece by piece. Raises RequestError at once; leaving the iterator, or dropping it before
        its first piece, cancels the request."""
        return _begun(self.submit(prompt, params))

    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, max_uncollected: int | None = None
    ) -> Handle:
        """Queue ``prompt`` and return its handle: poll, wait, cancel. ``max_uncollected``: see ``Handle``."""
        return self.submit_all([(prompt, params)], max_uncollected)[0]

    def submit_all(
        self, parts: Sequence[tuple[Prompt, SamplingParams | None]], max_uncollected: int | None = None
    ) -> list[Handle]:
        """Queue several prompts and return their handles. When one is refused, none is queued. Prompts are encoded and
        grammars compiled in the calling thread."""
        if self.follows:
            raise RankError("this rank of the model can only follow() rank 0, which takes all requests")
        requests = list[Request]()
        for prompt, params in parts:
            requests.append(self.prepare(prompt, params, like=requests[0] if requests else None))
            requests[-1].group = requests[0].id
        return self.engine.add_all(requests, max_uncollected, owner=self)

    def prepare(self, prompt: Prompt, params: SamplingParams | None = None, like: Request | None = None) -> Request:
        """Check and encode one request. ``like``: one that has not been queued yet, whose grammar and rules it shares
        if its params are the same but for the seed. Raises RequestError naming the field that is wrong."""
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            refuse("params", "SamplingParams", params, "invalid_type")
        if params.n != 1:
            raise RequestError(f"n must be 1 here, not {params.n}: generate alone makes several completions", "n")
        resolved = params.resolved(self.defaults.sampling)
        token_ids = self.encode(prompt)
        room = self.max_seq_len - len(token_ids)
        if room < 1:
            most = f"at most {self.max_seq_len - 1} leave room for an answer in a context of {self.max_seq_len}"
            message = f"the prompt has {len(token_ids)} tokens; {most}"
            raise RequestError(message, "prompt", "context_length_exceeded")
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            self._check_ids(getattr(resolved, name) or (), name)
        eos_ids = () if resolved.ignore_eos else self.eos_token_ids
        shown: Collection[int] = resolved.shown_special_tokens
        if not resolved.skip_special_tokens and self.tokenizer is not None:
            shown = self.tokenizer.special
        detokenizer = IncrementalDetokenizer(self.tokenizer, token_ids, shown)
        if like is not None and dataclasses.replace(like.params, seed=resolved.seed) == resolved:
            grammar, rules = like.grammar and like.grammar.copy(), like.rules
        else:
            grammar = self._grammars.compile(resolved)
            rules = TokenRules.of(resolved, self.tokenizer, self.config.vocab_size)
        return Request(
            id=f"{os.getpid()}-{next(self._ids)}",
            token_ids=token_ids,
            params=resolved,
            seed=secrets.randbits(63) if resolved.seed is None else resolved.seed,
            max_tokens=min(room, resolved.max_tokens or room),
            end_ids=frozenset((*eos_ids, *resolved.stop_token_ids)),
            text=TextStream(detokenizer, resolved.stop, resolved.include_stop_str_in_output),
            grammar=grammar,
            rules=rules,
        )

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of ``prompt``, with the beginning-of-sequence token where the checkpoint wants one. Token ids are
        taken as they are. Raises RequestError for an id out of range or an empty prompt."""
        takes = "a string or a list of token ids"
        prompt = _listed(prompt, "prompt", takes)
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("this checkpoint has no tokenizer: prompt must be a list of token ids", "prompt")
            ids = self.tokenizer.encode(prompt)
        else:
            for token in prompt:
                if isinstance(token, bool) or not isinstance(token, Integral):
                    refuse("prompt", takes, token, "invalid_type")
            ids = [int(token) for token in prompt]
        if not ids:
            raise RequestError("prompt is empty, and this tokenizer has no beginning-of-sequence token", "prompt")
        self._check_ids(ids, "prompt")
        return ids

    def _check_ids(self, ids: Iterable[int], name: str) -> None:
        for token in ids:
            if not 0 <= token < self.config.vocab_size:
                message = f"token id {token} in {name} is not between 0 and {self.config.vocab_size - 1}"
                raise RequestError(message, name)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every token that ends a completion: generation_config.json's, else the tokenizer's."""
        return self.defaults.eos_token_ids or (self.tokenizer.eos_token_ids if self.tokenizer is not None else ())

    def roofline(self, context_len: int = 0) -> Roofline:
        """The ceiling of decoding one sequence here, by this machine's measured bandwidth."""
        bandwidth = read_bandwidth(self.device.type, torch.get_num_threads())
        return Roofline(self.model.bytes_per_token(context_len, self.engine.runner.cache_itemsize), bandwidth)

    def status(self) -> dict[str, Any]:
        """What is loaded and what it is busy with, for people and probes."""
        scheduler = self.engine.scheduler
        return {
            "pid": os.getpid(),
            "compiled": self.engine.runner.path != "eager",
            "path": self.engine.runner.path,
            "family": self.config.family,
            "parameters": self.num_parameters,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
            "max_seq_len": self.max_seq_len,
            "load_s": round(self.load_s, 3),
            "warm_up_s": round(self.warm_up_s, 3),
            "running": len(scheduler.running),
            "waiting": self.engine.num_waiting,
            "since_last_step_s": round(self.engine.since_last_step_s, 3),
            "pages_used": scheduler.pages.num_used,
            "pages_total": scheduler.pages.num_pages - 1,
        }

    def close(self) -> None:
        """End the engine, and with it the ranks that follow this one. Once is enough, and more does no harm."""
        if not self.follows:
            self.engine.close()
        if self.group is None or self.group.closed:
            return
        if isinstance(self._runner, LeadingRunner):
            self._runner.leader.end()
        self.group.close()

    def __enter__(self) -> LLM:
        """Of several ranks only rank 0 goes on; the others :meth:`follow` here, and then raise SystemExit."""
        if self.follows:
            self.follow()
            self.close()
            raise SystemExit(0)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
