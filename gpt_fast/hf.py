"""GPTFast's functions, for programs that were written for them: https://github.com/MDK8888/GPTFast.

A family that is known here runs by our kernels, every other causal model of transformers as ``LLM`` runs it. What those
functions were told of a model's source code (``cache_config``) is not needed: it is taken and not looked at.

A drawn token is the sample function's own choice from the model's probabilities, whether a draft model guessed it or
not: a guess counts if the function then draws the same token. So speculation changes no answer of a function without
chance, and no distribution of one with it.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpt_fast.checkpoint.download import find
from gpt_fast.config import EngineConfig
from gpt_fast.engine.runner import Runner
from gpt_fast.engine.scheduler import SequencePlan, StepPlan
from gpt_fast.errors import ConfigError
from gpt_fast.foreign.checkpoint import open_checkpoint, shape_of
from gpt_fast.foreign.model import ForeignModel, Loaded
from gpt_fast.memory import check_weights
from gpt_fast.model.split import current
from gpt_fast.model.steps import Served, serve
from gpt_fast.placement import choose_placement, in_words

SampleFunction = Callable[..., Tensor]

_SPECULATE_K = 4  # guesses for each step where nobody says how many
_CHUNK = 512  # tokens of a prompt that are computed at once


def gpt_fast(
    model_name: str | Path,
    sample_function: SampleFunction | None = None,
    max_length: int | None = None,
    cache_config: dict[str, Any] | None = None,
    draft_model_name: str | Path | None = None,
    *,
    quantize: str | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
) -> FastModel:
    """``model_name``, a folder or a name on the Hugging Face Hub, ready to generate.

    ``sample_function``: the next token, one element, of probabilities [1, V] and what ``generate`` was given; if its
    first parameter is called ``self``, that is the model. None: the likeliest. ``max_length``: tokens that a sequence
    may have; None: as many as ``generate`` is asked for. ``draft_model_name``: a smaller model that guesses tokens
    ahead. ``quantize``, ``device``, ``dtype``: as of ``LLM``. Raises ConfigError, CheckpointError (both ValueError).
    """
    how: dict[str, Any] = {"device": device, "dtype": dtype}
    model = add_kv_cache(_load(model_name, quantize, **how), sample_function, max_length)
    if draft_model_name is None:
        return model
    return add_speculative_decode_kv_cache(model, _load(draft_model_name, None, **how), sample_function)


def load_int8(
    model_name: str | Path, *, device: str | torch.device = "auto", dtype: str | torch.dtype = "auto"
) -> FastModel:
    """``model_name`` with its weights rounded to int8 while they are read. Arguments and errors: see
    :func:`gpt_fast`."""
    return _load(model_name, "int8", device=device, dtype=dtype)


def add_kv_cache(
    transformer: nn.Module,
    sample_function: SampleFunction | None = None,
    max_length: int | None = None,
    cache_config: dict[str, Any] | None = None,
) -> FastModel:
    """``transformer``, what :func:`load_int8` returned or a causal model of transformers, with a KV cache. It is for
    inference from then on. Arguments and errors as of :func:`gpt_fast`."""
    if not isinstance(transformer, FastModel):
        if not hasattr(transformer, "config"):
            raise ConfigError(f"{type(transformer).__name__} is no causal model of transformers: it has no config")
        transformer = FastModel(serve(Loaded(transformer, shape_of(transformer.config))))
    transformer.sample_function, transformer.max_length = sample_function, max_length
    return transformer


def add_speculative_decode_kv_cache(
    model: nn.Module, draft_model: nn.Module, sample_function: SampleFunction | None = None
) -> FastModel:
    """``model``, for which ``draft_model``, of the same vocabulary, guesses tokens ahead. Both as :func:`add_kv_cache`
    takes them. Raises ConfigError for vocabularies of different sizes and for a model that cannot take guesses back."""
    target, draft = (each if isinstance(each, FastModel) else add_kv_cache(each) for each in (model, draft_model))
    if target.vocab_size != draft.vocab_size:
        raise ConfigError(f"the draft model has {draft.vocab_size} tokens, and the model {target.vocab_size}")
    for each in (target, draft):
        each.check_drafts()
    target.sample_function = sample_function or target.sample_function
    draft.sample_function = target.sample_function
    target.draft_model = draft
    return target


class FastModel(nn.Module):
    """A model with one sequence at a time. Made by the functions of this module."""

    def __init__(self, model: Served) -> None:
        super().__init__()
        self._model, self.vocab_size, self.device = model, model.vocab_size, model.device
        self.sample_function: SampleFunction | None = None
        self.max_length: int | None = None
        self.draft_model: FastModel | None = None
        self._runner: Runner | None = None
        self._count = 0  # tokens in the cache that are to be kept
        self.num_guesses = self.num_right = 0  # of the last generate

    @property
    def longest(self) -> int:
        """Tokens that a sequence may have. A table of positions ends where it ends, whatever ``max_length`` says."""
        config = self._model.config
        longest, tabled = self.max_length or config.max_seq_len, config.learned_positions is not None
        return min(longest, config.max_seq_len) if tabled and not isinstance(self._model, ForeignModel) else longest

    def forward(self, input_ids: Tensor) -> Tensor:
        """Whole sequences [B, T] int64 -> logits [B, T, V], without the cache."""
        with current(self.device):
            return self._model.forward(input_ids.to(self.device))

    def to(self, *where: Any, **more: Any) -> FastModel:
        """Itself: a model stays where it was loaded. Raises ConfigError for another device."""
        device, dtype, *_ = torch._C._nn._parse_to(*where, **more)
        if dtype is not None or (device is not None and device.type != self.device.type):
            raise ConfigError(f"the model is on {self.device} and stays as it was loaded: give device and dtype there")
        return self

    @torch.inference_mode()
    def generate(
        self, cur_tokens: Tensor, max_tokens: int, speculate_k: int | None = None, **sampling_kwargs: Any
    ) -> Tensor:
        """``cur_tokens`` [1, T] int64 and what follows: [1, max_tokens] int64, on the device of ``cur_tokens``.

        ``speculate_k``: tokens that the draft model guesses for each step (default: 4); without a draft model it has no
        effect. ``sampling_kwargs`` go to the sample function. No token ends the sequence. Raises ConfigError.
        """
        tokens, guesses = self._checked(cur_tokens, max_tokens, speculate_k)
        self._begin(max_tokens)
        draft = self.draft_model if guesses else None
        if draft is not None:
            draft._begin(min(max_tokens, draft.longest))
        self.num_guesses = self.num_right = 0
        while len(tokens) < max_tokens:
            room = min(guesses, _CHUNK - 1, max_tokens - len(tokens) - 1, draft.longest - len(tokens) if draft else 0)
            guessed = draft._guess(tokens, room, sampling_kwargs) if draft and room > 0 else []
            logits = self._extend([*tokens, *guessed], 1 + len(guessed))
            for i in range(1 + len(guessed)):
                token = self._draw(logits[i : i + 1], sampling_kwargs)
                tokens.append(token)
                if i == len(guessed) or token != guessed[i]:
                    break
            self._count += i  # guesses that were right stay
            self.num_guesses, self.num_right = self.num_guesses + len(guessed), self.num_right + i
        return torch.tensor([tokens], device=cur_tokens.device)

    def check_drafts(self) -> None:
        """Raise ConfigError for a model that cannot take tokens back."""
        if isinstance(self._model, ForeignModel):
            self._model.adapted(EngineConfig(draft="lookup"))

    def _checked(self, cur_tokens: Tensor, max_tokens: int, speculate_k: int | None) -> tuple[list[int], int]:
        if cur_tokens.dim() != 2 or cur_tokens.shape[0] != 1 or not cur_tokens.shape[1]:
            raise ConfigError(f"cur_tokens must have the shape (1, seq_len), not {tuple(cur_tokens.shape)}")
        tokens: list[int] = cur_tokens[0].tolist()
        if not all(0 <= token < self.vocab_size for token in tokens):
            raise ConfigError(f"cur_tokens has a token that is not between 0 and {self.vocab_size - 1}")
        longest = self.longest
        if not len(tokens) < max_tokens <= longest:
            limits = f"more than the {len(tokens)} tokens of cur_tokens, which it counts too, and at most {longest}"
            raise ConfigError(f"max_tokens must be {limits}, not {max_tokens}")
        count = _SPECULATE_K if speculate_k is None else speculate_k
        if count < 0:
            raise ConfigError(f"speculate_k must not be negative, and is {count}")
        return tokens, count

    def _begin(self, length: int) -> None:
        """An empty sequence of up to ``length`` tokens, in a cache that is made when it is first needed."""
        self._count = 0
        if self._runner is None or self._runner.pages_per_sequence * self._runner.page_size < length:
            options = EngineConfig(max_seq_len=self.longest if self.max_length else length, prefill_chunk=_CHUNK)
            if isinstance(self._model, ForeignModel):
                options = self._model.adapted(options)
            longest, chunk = options.max_seq_len or length, options.prefill_chunk or _CHUNK
            pages = 1 - (-longest // options.page_size)
            sizes: dict[str, Any] = {"max_seq_len": longest, "num_pages": pages, "page_size": options.page_size}
            self._runner = Runner(self._model, max_batch=1, prefill_chunk=min(chunk, longest), **sizes)
            with current(self.device):
                self._runner.warm_up()

    def _extend(self, tokens: Sequence[int], num_logits: int) -> Tensor:
        """Compute ``tokens`` from the first one on that is not in the cache; returns the logits [num_logits, V] of the
        last ones. Afterwards those behind the first of these are taken as guesses, which are not to be kept."""
        runner = self._runner
        assert runner is not None
        begin, places = min(self._count, len(tokens) - num_logits), runner.num_pages - 1
        while begin < len(tokens):
            end = min(len(tokens), begin + runner.prefill_chunk)
            if end < len(tokens):
                end = min(end, len(tokens) - num_logits)  # the rows of the logits are computed together
            new_pages = () if begin else tuple(range(1, 1 + places))
            placed, wanted = places if begin else 0, num_logits if end == len(tokens) else 0
            plan = SequencePlan(0, tuple(tokens[begin:end]), begin, placed, new_pages, wanted, len(tokens))
            with current(self.device):
                logits = runner.execute(StepPlan((plan,)))
            begin = end
        self._count = len(tokens) - num_logits + 1
        return logits

    def _guess(self, tokens: Sequence[int], count: int, sampling_kwargs: dict[str, Any]) -> list[int]:
        """``count`` tokens behind ``tokens``."""
        guessed: list[int] = []
        for _ in range(count):
            logits = self._extend([*tokens, *guessed], 1)
            guessed.append(self._draw(logits, sampling_kwargs))
        self._count = len(tokens)  # what was guessed is not certain
        return guessed

    def _draw(self, logits: Tensor, sampling_kwargs: dict[str, Any]) -> int:
        """One token by the sample function, of logits [1, V]."""
        function = self.sample_function
        if function is None:
            return int(logits.argmax())
        try:
            first = next(iter(inspect.signature(function).parameters), None)
        except ValueError:  # a built-in function, such as torch.argmax, does not tell
            first = None
        bound = types.MethodType(function, self) if first == "self" else function
        drawn = bound(logits.float().softmax(-1), **sampling_kwargs)
        if not isinstance(drawn, Tensor) or drawn.numel() != 1 or not 0 <= int(drawn) < self.vocab_size:
            raise ConfigError(f"sample_function must return one token id in a tensor, not {drawn!r}")
        return int(drawn)


def _load(model_name: str | Path, quantize: str | None, **where_and_how: str | torch.device | torch.dtype) -> FastModel:
    opened = open_checkpoint(find(in_words(model_name)))
    where = choose_placement(opened.num_parameters, opened.stored_dtype, **in_words(where_and_how))
    modes = opened.smaller_modes(quantize)
    check_weights(opened.num_bytes(where.dtype, quantize), where.device, modes)
    how: dict[str, Any] = {"quantize": quantize, "progress": True, "column_major": where.column_major}
    return FastModel(serve(opened.build(where.dtype, where.device, **how)))
