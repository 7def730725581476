"""``LLM``: a checkpoint, ready to generate. The front door for Python programs, the command line and the handler."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import secrets
import time
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any, cast, overload

import torch

from gpt_fast.checkpoint.generation import GenerationDefaults
from gpt_fast.config import EngineConfig, from_mapping
from gpt_fast.engine.grammar import GrammarCompiler
from gpt_fast.engine.handle import Handle
from gpt_fast.engine.request import Request
from gpt_fast.engine.text import TextStream
from gpt_fast.engine.token_rules import TokenRules
from gpt_fast.errors import ConfigError, RankError, RequestError, TokenizerMissing
from gpt_fast.fields import refuse
from gpt_fast.foreign.checkpoint import open_checkpoint
from gpt_fast.foreign.model import ForeignModel
from gpt_fast.kernels.roofline import Roofline, read_bandwidth
from gpt_fast.loading import LoadedModel, Opened, adopt, load
from gpt_fast.model.describing import describe
from gpt_fast.model.steps import Served
from gpt_fast.model.transformer import Transformer
from gpt_fast.outputs import Completion, Delta
from gpt_fast.params import SamplingParams
from gpt_fast.placement import in_words
from gpt_fast.tokenizer import IncrementalDetokenizer, Tokenizer
from gpt_fast.tokenizer.chat import DEFAULT, TOOL_USE, ChatTemplate, load_templates
from gpt_fast.tokenizer.chat_prompt import encode_chat

log = logging.getLogger(__name__)

Prompt = str | Sequence[int]


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


class LLM:
    """Loads ``checkpoint`` (what ``Checkpoint.open`` takes, opened or not), compiles, warms up; then generates. Any
    number of threads may call its methods: all requests share one batch.

    Keyword arguments are the fields of :class:`gpt_fast.config.EngineConfig`; torch's dtypes and devices are taken, and
    any path. ``progress`` shows bars on a terminal. Raises ConfigError, CheckpointError or TokenizerError (all
    ValueError)."""

    def __init__(self, checkpoint: str | Path | Opened, *, progress: bool = False, **options: Any) -> None:
        wanted, begin = from_mapping(EngineConfig, in_words(options), "LLM()"), time.perf_counter()
        opened = open_checkpoint(checkpoint) if isinstance(checkpoint, str | Path) else checkpoint
        opened = opened.with_adapters(wanted.lora)
        self.checkpoint, self.defaults, self.num_parameters = opened.vocabulary, opened.defaults, opened.num_parameters
        self.tokenizer = _tokenizer_of(opened)
        self._start(load(opened, self.tokenizer, wanted, progress=progress), begin)

    @classmethod
    def from_model(cls, model: Transformer | Served, *, tokenizer: Tokenizer | None = None, **options: Any) -> LLM:
        """Serve a model that was built in memory, on its device and in its dtype. ``options`` are the other fields of
        EngineConfig. ``quantize`` and ``kernels`` change ``model`` itself: its linear layers are packed, and it is for
        inference from then on. Without a ``tokenizer`` prompts are token ids and completions have no text. There is no
        ``checkpoint`` attribute. Raises ConfigError."""
        for name in ("device", "device_map", "dtype", "lora"):
            if options.get(name) is not None:
                raise ConfigError(f"{name} is the model's own here; leave it out")
        wanted, begin = from_mapping(EngineConfig, in_words(options), "LLM()"), time.perf_counter()
        self = cls.__new__(cls)
        self.tokenizer, self.defaults = tokenizer, GenerationDefaults((), None, SamplingParams())
        if isinstance(model, ForeignModel):
            self.num_parameters = model.num_parameters
        else:
            self.num_parameters = describe(model.config).num_parameters
        self._start(adopt(model, wanted), begin)
        return self

    def _start(self, loaded: LoadedModel, begin: float) -> None:
        """Build the engine of ``loaded``, and warm it up. ``begin``: of loading, by time.perf_counter."""
        self._loaded, self.model, self.engine_config = loaded, loaded.model, loaded.options
        self.config, self.device, self.dtype = loaded.config, loaded.site.device, loaded.site.dtype
        self.max_seq_len = loaded.plan.max_seq_len
        if self.follows:
            return
        self.engine = loaded.make_engine()
        weakref.finalize(self, self.engine.close_soon).atexit = False  # its thread would keep the model for ever
        self._grammars = GrammarCompiler(self.tokenizer, self.config.vocab_size, self.eos_token_ids)
        self._ids = itertools.count()
        self.engine.start(loaded.warm_up)
        self.load_s, self.warm_up_s = loaded.weights_at - begin, time.perf_counter() - loaded.weights_at
        log.info("ready: loaded in %.1f s, compiled and warmed up in %.1f s", self.load_s, self.warm_up_s)

    @property
    def follows(self) -> bool:
        """Whether this process is a rank for which another one decides: :meth:`follow` is all that it can do."""
        return self._loaded.site.follows

    def follow(self) -> None:
        """Compute this rank's share of what rank 0 decides, until that is closed."""
        self._loaded.follow()

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
        constrained = resolved.grammar_field is not None  # a grammar counts every space that a token has
        detokenizer = IncrementalDetokenizer(self.tokenizer, token_ids, shown, every_space=constrained)
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

    @cached_property
    def chat_templates(self) -> dict[str, ChatTemplate]:
        """The checkpoint's, by transformers' names of them: :func:`gpt_fast.tokenizer.chat.load_templates`."""
        checkpoint = getattr(self, "checkpoint", None)
        return {} if checkpoint is None else load_templates(checkpoint)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a chat by the checkpoint's template: a prompt for the other methods. What messages contain never
        becomes a special token.

        ``messages``: mappings with ``role`` and ``content``, and what else the template reads. ``tools``: JSON schemas
        of functions, as OpenAI has them. ``continue_final_message``: the answer goes on with the last message, in place
        of ``add_generation_prompt``. ``variables``: more that the template may read, such as ``enable_thinking``.
        Raises RequestError where there is no template, or it refuses the messages.
        """
        template = self.chat_templates.get(TOOL_USE if tools and TOOL_USE in self.chat_templates else DEFAULT)
        if template is None or self.tokenizer is None:
            lacking = "tokenizer" if self.tokenizer is None else "chat template"
            raise RequestError(f"this checkpoint has no {lacking}: write the prompt as its model knows it", "messages")
        takes = "a list of messages, each with a role"
        given = _listed(messages, "messages", takes)
        if isinstance(given, str) or not given or not all(isinstance(m, Mapping) and "role" in m for m in given):
            refuse("messages", takes, messages, "invalid_type")
        begins = add_generation_prompt and not continue_final_message
        return encode_chat(template, self.tokenizer, given, begins, variables, tools, continue_final_message)

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
        self._loaded.close()

    def __enter__(self) -> LLM:
        """Of several ranks only rank 0 goes on; the others :meth:`follow` here, and then raise SystemExit."""
        if self.follows:
            self.follow()
            self.close()
            raise SystemExit(0)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
