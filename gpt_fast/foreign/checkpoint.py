"""A checkpoint whose family has no description here, opened and built by Hugging Face's transformers."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpt_fast.checkpoint.checkpoint import Checkpoint, most_common_dtype
from gpt_fast.checkpoint.files import the_checkpoint
from gpt_fast.checkpoint.generation import read_generation_defaults
from gpt_fast.checkpoint.json_values import read_json
from gpt_fast.checkpoint.lora import Adapter, adapted, open_adapters, touched
from gpt_fast.checkpoint.shard import Shard
from gpt_fast.checkpoint.stored import StoredTensor
from gpt_fast.checkpoint.weight_files import open_weights, weight_files
from gpt_fast.config import EngineConfig, ModelConfig
from gpt_fast.errors import CheckpointError, ConfigError, UnknownFamilyError, first_line, some
from gpt_fast.foreign.linear import round_linears
from gpt_fast.foreign.model import Loaded
from gpt_fast.quantize.formats import Format, RoundedFormat
from gpt_fast.quantize.scheme import quant_config
from gpt_fast.tokenizer import Tokenizer, load_tokenizer

_USUAL_LENGTH = 2048  # tokens, of a model whose configuration says nothing
# Architectures without a head for text. With tied embeddings they would load as a causal model without a complaint.
_NO_TEXT = re.compile(r".*(For\w*(Classification|QuestionAnswering)|(?<!LMHead)(?<!DoubleHeads)Model)")


def open_checkpoint(path: str | Path) -> Checkpoint | ForeignCheckpoint:
    """``Checkpoint.open``, and by transformers what that does not know. Raises CheckpointError."""
    try:
        return Checkpoint.open(path)
    except UnknownFamilyError as unknown:
        try:
            return ForeignCheckpoint(the_checkpoint(Path(path)))
        except ImportError:
            todo = "transformers may run it: pip install 'gpt-fast-serve[hf]'"
            raise CheckpointError(f"{unknown}; {todo}") from None
        except _UnknownThereTooError as why:
            raise CheckpointError(f"{unknown}; nor does transformers run it: {why}") from None


class _UnknownThereTooError(Exception):
    """transformers has no causal model for a configuration either."""


class ForeignCheckpoint:
    """What ``Checkpoint`` is for the families that are known here: the same attributes, as far as they are needed to
    serve it. Code that lies in the checkpoint never runs. Raises CheckpointError, ImportError without transformers."""

    alone = False  # the tokenizer lies beside the weights

    def __init__(self, directory: Path) -> None:
        self.path = self.directory = self.vocabulary = directory
        self.raw = read_json(directory / "config.json")
        self._config = _read_config(directory)
        self.config, self.files = shape_of(self._config), weight_files(directory)
        self.defaults = read_generation_defaults(directory, self.raw, {})
        self.format = Format()
        self.lora: Mapping[str, float] = {}
        self.adapters: list[Adapter] = []

    def with_adapters(self, lora: Mapping[str, float] | None) -> ForeignCheckpoint:
        """As ``Checkpoint.with_adapters``."""
        if not lora or lora == self.lora:
            return self
        out = copy.copy(self)
        out.lora, out.adapters = lora, open_adapters(lora)
        _add(self._empty, out.adapters)  # which refuses what does not fit
        return out

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Raises TokenizerMissing where there is none, TokenizerError for one that is damaged."""
        return load_tokenizer(self.directory)

    @property
    def stored_dtype(self) -> torch.dtype:
        """As ``Checkpoint.stored_dtype``."""
        return most_common_dtype(open_weights(self.files), str(self.path))

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._empty.parameters())

    @cached_property
    def _empty(self) -> nn.Module:
        """The model on the meta device."""
        with torch.device("meta"):
            model: nn.Module = _class_for(self._config).from_config(self._config)
        return model

    def check(self, options: EngineConfig, num_ranks: int) -> None:
        """Raise ConfigError for ``options`` that need a description of the model."""
        if num_ranks > 1:
            raise ConfigError("torchrun: a model that transformers runs is not divided among ranks; start one process")
        if options.device_map is not None:
            raise ConfigError("device_map: a model that transformers runs is on one device; leave it out")
        if options.drafter in ("int8", "int4"):
            raise ConfigError(f"draft: {options.drafter} is not there for models that transformers runs; take lookup")

    def format_for(self, quantize: str | None) -> Format:
        """Raises ConfigError for a mode that is not int8."""
        if quantize not in (None, "int8"):
            raise ConfigError(f"quantize: {quantize} is not there for models that transformers runs, only int8")
        return self.format if quantize is None else RoundedFormat(quant_config(quantize))

    def smaller_modes(self, quantize: str | None) -> tuple[str, ...]:
        """As :meth:`Checkpoint.smaller_modes`."""
        return () if quantize else ("int8",)

    def num_bytes(self, dtype: torch.dtype, quantize: str | None = None, shard: Shard | None = None) -> int:
        """Bytes of the weights of the model that :meth:`build` makes, about. Nothing is allocated."""
        linears = [m.weight for m in self._empty.modules() if isinstance(m, nn.Linear)] if quantize else []
        return self.num_parameters * dtype.itemsize - (dtype.itemsize - 1) * sum(each.numel() for each in linears)

    def build(
        self,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        quantize: str | None = None,
        progress: bool = False,
        **_: Any,
    ) -> Loaded:
        """The model in ``dtype`` on ``device``; ``quantize``: its linear layers in int8. Raises ConfigError."""
        self.format_for(quantize)
        try:
            with _bars(progress and sys.stderr.isatty()):
                model, loading = _class_for(self._config).from_pretrained(
                    self.directory,
                    config=self._config,
                    dtype=dtype,
                    local_files_only=True,
                    trust_remote_code=False,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # so that they are named below
                )
        except (OSError, ValueError, RuntimeError) as why:
            raise CheckpointError(f"{self.path}: transformers cannot load it: {why}") from None
        # transformers has filled these with random numbers. Of mismatched ones the shapes stand beside the name.
        if missing := sorted(loading["missing_keys"]):
            raise CheckpointError(f"{self.path}: its weights lack {some(missing)}")
        if mismatched := sorted(name for name, *_ in loading["mismatched_keys"]):
            raise CheckpointError(f"{self.path}: config.json gives {some(mismatched)} another shape than the weights")
        _add(model, self.adapters)
        model = model.to(device)
        if quantize is not None:
            round_linears(model)
        return Loaded(model, self.config)


@torch.no_grad()
def _add(model: nn.Module, adapters: list[Adapter]) -> None:
    """Add ``adapters`` to the weights of ``model``, in place, some rows at a time. Raises CheckpointError."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    own = {name: model.get_parameter(name) for name in names}
    for name in touched(adapters) & own.keys():
        if same := [n for n in names if n != name and own[n] is own[name]]:
            raise CheckpointError(f"lora: {name} has an adapter, and it is {same[0]} as well")
    tensors = {name: StoredTensor(parameter.data) for name, parameter in own.items()}
    transposed = {f"{name}.weight" for name, module in model.named_modules() if type(module).__name__ == "Conv1D"}
    for name, changed in adapted(tensors, transposed, adapters).items():
        if changed is not tensors[name] and not own[name].is_meta:
            changed.copy_to(own[name])


@contextmanager
def _bars(wanted: bool) -> Iterator[None]:
    """Whether transformers shows its bars."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    (logging.enable_progress_bar if wanted else logging.disable_progress_bar)()
    try:
        yield
    finally:
        (logging.enable_progress_bar if shown else logging.disable_progress_bar)()


def _read_config(directory: Path) -> Any:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as why:  # its validators raise many types
        raise _UnknownThereTooError(first_line(why)) from None
    if _class_for(config) is None:
        raise _UnknownThereTooError(f"it has no causal model of the type {config.model_type}")
    names = [str(name) for name in config.architectures or ()]
    if names and all(_NO_TEXT.fullmatch(name) for name in names):
        raise _UnknownThereTooError(f"a {names[0]} generates no text")
    return config


def _class_for(config: Any) -> Any:
    """The class of transformers that makes the model of ``config``; None for a model that does not write on from a
    text. One that also reads images gets none."""
    import transformers as t

    if type(config) in t.MODEL_FOR_CAUSAL_LM_MAPPING:
        return t.AutoModelForCausalLM
    seeing = type(config) in t.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return t.AutoModelForImageTextToText if seeing and not config.is_encoder_decoder else None


def shape_of(config: Any) -> ModelConfig:
    """What is known of the model of transformers' ``config`` before it is built: its vocabulary, its longest sequence,
    and about what its KV cache takes. Raises CheckpointError."""
    text = config.get_text_config(decoder=True)

    def number(*names: str, usual: int | None = None) -> int:
        for name in names:
            value = getattr(text, name, None)
            if isinstance(value, int) and value > 0:
                return value
        if usual is None:
            raise CheckpointError(f"config.json of a {config.model_type}: {names[0]} is missing")
        return usual

    dim, heads = number("hidden_size", "n_embd", "d_model"), number("num_attention_heads", usual=1)
    kv_heads = number("num_key_value_heads", usual=heads)
    length = number("max_position_embeddings", "n_positions", "context_length", "max_seq_len", usual=_USUAL_LENGTH)
    return ModelConfig(
        family=config.model_type,
        vocab_size=number("vocab_size"),
        dim=dim,
        num_layers=number("num_hidden_layers"),
        num_heads=heads if heads % kv_heads == 0 else kv_heads,
        num_kv_heads=kv_heads,
        head_dim=number("head_dim", usual=max(1, dim // heads)),
        ffn_dim=number("intermediate_size", "ffn_dim", usual=4 * dim),
        max_seq_len=length,
        rotary_dim=0,
        learned_positions=0,  # so that nobody asks for more
    )
