"""A checkpoint, read once, and the models that are made of it.

:class:`Checkpoint` knows the configuration, the tensors (mapped, not read), how they are quantized, what the checkpoint
says about generation, and its tokenizer. It builds the model: every parameter is allocated once, in its final dtype on
its final device, and filled from the mapped files piece by piece (stored.py), so that a load peaks at the weights it
leaves behind plus some megabytes. A Hugging Face directory is read here, a file of Meta's line by meta_files.py, a GGUF
file by gguf_models.py.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpt_fast.checkpoint.families import parse_config
from gpt_fast.checkpoint.family_table import FAMILIES
from gpt_fast.checkpoint.files import RIGHTS, companions, is_one, the_checkpoint
from gpt_fast.checkpoint.generation import GenerationDefaults, read_generation_defaults
from gpt_fast.checkpoint.gguf_models import read_gguf
from gpt_fast.checkpoint.json_values import read_json
from gpt_fast.checkpoint.lora import Adapter, adapted, open_adapters, touched
from gpt_fast.checkpoint.meta_files import read_meta_file, refuse_config
from gpt_fast.checkpoint.shard import Cut, Shard
from gpt_fast.checkpoint.stacked import unstacked
from gpt_fast.checkpoint.stored import StoredTensor, progress_bar
from gpt_fast.checkpoint.text_part import text_config, text_tensors
from gpt_fast.checkpoint.weight_files import open_weights, weight_files
from gpt_fast.config import ModelConfig
from gpt_fast.errors import CheckpointError, ConfigError, TokenizerError, TokenizerMissing, some
from gpt_fast.gguf import is_gguf
from gpt_fast.model.building import empty_model
from gpt_fast.model.describing import describe, parts
from gpt_fast.model.description import Part
from gpt_fast.model.transformer import Transformer, weight_bytes
from gpt_fast.quantize.apply import SchemeOf, quantized_part, swap_layers
from gpt_fast.quantize.compressed import METHOD as COMPRESSED
from gpt_fast.quantize.compressed import read_compressed
from gpt_fast.quantize.formats import Format, OwnFormat, RoundedFormat, Specs
from gpt_fast.quantize.fp8 import METHOD as FP8
from gpt_fast.quantize.fp8 import read_fp8
from gpt_fast.quantize.gguf import GgufFormat
from gpt_fast.quantize.hub import HubFormat, parse_header, without_empty_biases
from gpt_fast.quantize.scheme import METHOD, Scheme, Split, parse_quant_config, quant_config, smaller_modes
from gpt_fast.quantize.tinygemm import GRIDS
from gpt_fast.tokenizer import Tokenizer, load_tokenizer
from gpt_fast.tokenizer.gguf_vocabulary import tokenizer_files
from gpt_fast.tokenizer.loading import sniff

log = logging.getLogger(__name__)

_OF_QUANTIZED = (".scale", ".scales", ".row_scale", GRIDS)  # tensors whose dtype says nothing about the others


class Checkpoint:
    """A directory or a file that has been opened: see :meth:`open`.

    ``path``: what was opened, for messages. ``directory``: where it is. ``alone``: it is a GGUF file, and nothing else
    belongs to it. ``vocabulary``: what tokenizer and chat template are read from, ``directory`` or that file.
    ``raw``: the content of ``config.json``. ``config``: the model; its ``tie_embeddings`` says what the files
    have. ``files``: those that hold the weights. ``tensors``: all of theirs by name, without a head that is tied.
    ``format``: how they hold linear weights. ``defaults``: what the checkpoint says about generation. ``lora``: the
    weights of ``adapters`` by folder.
    """

    def __init__(
        self, path: Path, files: list[Path], raw: dict[str, Any], config: ModelConfig,
        tensors: Mapping[str, StoredTensor], form: Format | None = None,
    ) -> None:  # fmt: skip
        """``form``: None where ``raw`` says it."""
        self.path, self.directory = path, path if path.is_dir() else path.parent
        self.alone = is_gguf(path)
        self.vocabulary = path if self.alone else self.directory
        self.files, self.raw = files, raw
        self.lora: Mapping[str, float] = {}
        self.adapters: list[Adapter] = []
        self.defaults: GenerationDefaults = read_generation_defaults(
            None if self.alone else self.directory, raw, FAMILIES[config.family].defaults
        )
        self.config, tensors = resolve_tying(config, tensors)
        self.tensors = unstacked(tensors, (part.source for part in parts(self.config)))
        self.format = form or self._stored_format()
        check_tensors(self.format.specs(self.config), self.tensors, str(path))

    @classmethod
    def open(cls, path: str | Path, config: ModelConfig | str | Path | None = None) -> Checkpoint:
        """Read ``path``, a Hugging Face directory, a file in it, a GGUF file, or a file that meta_files.py reads; every
        file is opened once, the tokenizer's when it is asked for. A directory may hold one such file instead.

        ``config``: of a file that does not say it all (``read_meta_file``). Raises CheckpointError, naming files, keys
        and tensors, for whatever is missing, unexpected, not supported, mis-shaped or damaged. Nothing of the size that
        ``config.json`` claims is built or allocated before that.
        """
        path = the_checkpoint(Path(path))
        if path.is_dir() or is_gguf(path):
            refuse_config(config, path)
        if is_gguf(path):
            model = read_gguf(path)
            return cls(path, *model, GgufFormat(model.config, model.tensors))
        if path.is_file():
            return cls(path, [path], *read_meta_file(path, config))
        where = path / "config.json"
        raw = read_json(where)
        text = text_config(raw)
        parsed, files = parse_config(text or raw, str(where)), weight_files(path)
        tensors = open_weights(files)
        if text is not None:
            log.warning("%s: images are not read; this is its text model alone, %s", path, text["architectures"][0])
            tensors = text_tensors(tensors)
        return cls(path, files, text or raw, parsed, whole_names(parsed, tensors))

    def _stored_format(self) -> Format:
        found, where = self.raw.get("quantization_config"), str(self.directory / "config.json")
        if not found or found["quant_method"] == "mxfp4":  # which stacked.py reads as if it were not quantized
            return Format()
        if found["quant_method"] == METHOD:
            return OwnFormat(parse_quant_config(found, where))
        wanted = parts(self.config)
        if found["quant_method"] == COMPRESSED:
            self.tensors, form = read_compressed(found, where, wanted, self.tensors)
            return form
        if found["quant_method"] == FP8:
            self.tensors = read_fp8(found, where, wanted, self.tensors)
            return Format()
        header = parse_header(found, where)
        self.tensors = without_empty_biases(wanted, self.tensors)
        return HubFormat(header, wanted, self.tensors, str(self.directory))

    def with_adapters(self, lora: Mapping[str, float] | None) -> Checkpoint:
        """This checkpoint with ``EngineConfig.lora`` added to its weights while they are read (lora.py).

        Raises CheckpointError for adapters that do not fit, ConfigError for weights that are quantized.
        """
        if not lora or lora == self.lora:
            return self
        if self.lora:
            raise ConfigError(f"lora: {self.path} was opened with other adapters; open it again for these")
        if self.format.method is not None:
            why = f"is quantized already ({self.format.method}), so its weights can no longer be changed"
            todo = "Name the unquantized checkpoint, and say quantize: it is rounded with the adapter"
            raise ConfigError(f"lora: {self.path} {why}. {todo}")
        names = FAMILIES[self.config.family].names
        out, adapters = copy.copy(self), open_adapters(lora, names["output"])
        wanted = touched(adapters)
        table, head = names["tokens"] + ".weight", names["output"] + ".weight"
        tensors = dict(self.tensors)
        given_head = any(head in adapter.saved for adapter in adapters)
        if self.config.tie_embeddings and table in wanted and not given_head:
            raise CheckpointError(f"lora: {table} has an adapter, and it is the head of {self.path} as well")
        if self.config.tie_embeddings and head in wanted:  # which is from now on another matrix than the table
            out.config, tensors[head] = replace(self.config, tie_embeddings=False), tensors[table]
        transposed = {part.source for part in parts(out.config) if part.layout.kind == "transposed"}
        out.lora, out.adapters, out.tensors = lora, adapters, adapted(tensors, transposed, adapters)
        return out

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Raises TokenizerMissing where there is none, TokenizerError for one that is damaged."""
        return load_tokenizer(self.vocabulary)

    def companions(self) -> dict[str, Path | bytes]:
        """What goes along with the weights, by the name of the file: a path to copy, or the content. Where
        ``vocabulary`` is a tokenizer's file, it takes the place of all of the checkpoint's.

        Raises CheckpointError for such a file that is none, TokenizerError for a vocabulary that cannot be read.
        """
        found: dict[str, Path | bytes] = {}
        if not self.alone:
            found = {path.name: path for path in companions(self.directory)}
        if is_gguf(self.vocabulary):
            with contextlib.suppress(TokenizerMissing):
                found |= tokenizer_files(self.vocabulary)
        elif self.vocabulary != self.directory:
            kept = {name: path for name, path in found.items() if is_one(name, (*RIGHTS, "generation_config.json"))}
            found = {**kept, _tokenizer_name(self.vocabulary): self.vocabulary}
        return found

    def save_companions(self, out: Path) -> None:
        """Write :meth:`companions` into the folder ``out``. Raises OSError too."""
        for name, content in self.companions().items():
            if isinstance(content, bytes):
                (out / name).write_bytes(content)
            else:
                shutil.copyfile(content, out / name)

    @property
    def stored_dtype(self) -> torch.dtype:
        """The floating-point dtype of most bytes of the weights, quantized ones left out. Raises CheckpointError."""
        return self.format.dtype or most_common_dtype(self.tensors, str(self.path))

    @property
    def num_parameters(self) -> int:
        """Weights of the model, a head that is the embedding table counted once."""
        return describe(self.config).num_parameters

    def format_for(self, quantize: str | None) -> Format:
        """How weights are read with the mode ``quantize`` (``quant_config``). Raises ConfigError for quantized ones."""
        if quantize is None:
            return self.format
        if not self.format.has_values:
            raise ConfigError(f"quantize: {self.path} is quantized already ({self.format.method}); leave it out")
        return RoundedFormat(quant_config(quantize))

    def smaller_modes(self, quantize: str | None) -> tuple[str, ...]:
        """The modes with which the weights take less memory than with the mode ``quantize``."""
        return smaller_modes(self.format_for(quantize).quant) if self.format.has_values else ()

    def meta_model(self, dtype: torch.dtype, quantize: str | None = None, shard: Shard | None = None) -> Transformer:
        """The model that :meth:`build` makes, on the meta device: modules, shapes and dtypes without memory."""
        config = shard.config(self.config) if shard else self.config
        scheme_of = self._schemes(self.format_for(quantize), config)
        return empty_model(config, dtype, "meta", swap=lambda m: swap_layers(m, scheme_of, "meta"))

    def num_bytes(self, dtype: torch.dtype, quantize: str | None = None, shard: Shard | None = None) -> int:
        """Bytes of the weights of the model that :meth:`build` makes. Nothing is allocated."""
        return weight_bytes(self.meta_model(dtype, quantize, shard))

    def _schemes(self, form: Format, config: ModelConfig) -> SchemeOf:
        """How a model of ``config``, of this checkpoint or a rank's share of it, holds its linear layers."""

        def scheme_of(module: str) -> Scheme | Split | None:
            scheme = form.scheme(module, self.config)
            return scheme._replace(num_queries=config.q_dim) if isinstance(scheme, Split) else scheme

        return scheme_of

    def build(
        self,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        quantize: str | None = None,
        shard: Shard | None = None,
        progress: bool = False,
        column_major: bool = False,
        layer_devices: Sequence[torch.device] = (),
    ) -> Transformer:
        """The model, its unquantized weights in ``dtype`` on ``device``, without gradients.

        ``quantize``: a mode of ``quant_config``; each weight is rounded as it is read, so that the whole model is never
        held unquantized. ``shard``: only what that tensor-parallel rank holds is read (shard.py). ``progress``: a bar
        by bytes, when stderr is a terminal. ``column_major``, ``layer_devices``: see ``empty_model``.

        Raises ConfigError for a mode that is not known or does not apply, and for a shape that ranks do not divide.
        """
        form = self.format_for(quantize)
        config = shard.config(self.config) if shard else self.config
        scheme_of = self._schemes(form, config)
        plan = [_read_by(part, shard, scheme_of) for part in parts(self.config)]
        model = empty_model(
            config, dtype, device, column_major, lambda m: swap_layers(m, scheme_of, "meta"), layer_devices
        )
        total = sum(tensor.num_bytes for tensor in self.tensors.values()) // (shard.num_ranks if shard else 1)
        with progress_bar(total, progress, "loading weights") as report, torch.no_grad():
            for part, cut in plan:
                form.load(model, part, self.tensors, cut, report)
        _warn_not_finite(model, str(self.path))
        return model


def most_common_dtype(tensors: Mapping[str, StoredTensor], where: str) -> torch.dtype:
    """The floating-point dtype of most bytes of ``tensors``, of ``where``, what belongs to quantized ones left out.
    Raises CheckpointError where there is none."""
    num_bytes: dict[torch.dtype, int] = {}
    for name, tensor in tensors.items():
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1 and not name.endswith(_OF_QUANTIZED):
            num_bytes[tensor.dtype] = num_bytes.get(tensor.dtype, 0) + tensor.num_bytes
    if not num_bytes:
        raise CheckpointError(f"{where} holds no floating-point weights")
    return max(num_bytes, key=lambda dtype: num_bytes[dtype])


def _tokenizer_name(path: Path) -> str:
    """What the tokenizer's file ``path`` is called in a checkpoint. Raises CheckpointError for a file that is none."""
    if not path.is_file():
        raise CheckpointError(f"tokenizer {path} does not exist")
    with open(path, "rb") as file:
        start = file.read(4096)
    try:
        return "tokenizer.json" if sniff(start, str(path)) == "json" else "tokenizer.model"
    except TokenizerError as e:
        hint = "llama2.c's tokenizer.bin does not hold all of a tokenizer, give the tokenizer.model it was made from"
        raise CheckpointError(f"tokenizer {e}; {hint}") from None


def _read_by(part: Part, shard: Shard | None, scheme_of: SchemeOf) -> tuple[Part, Cut]:
    """``part`` as the model that is built holds it, and what is read for it. Raises ConfigError."""
    cut, part = shard.cut(part) if shard else (Cut(), part)
    part, scheme = quantized_part(part, scheme_of)
    if scheme is not None and cut.num_columns > 1 and scheme.padded(part.shape[1]) != part.shape[1]:
        raise ConfigError(f"shard: {part.target} has {part.shape[1]} inputs a rank, no whole groups of {scheme}")
    return part, cut


def whole_names(config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    """``tensors`` with the beginning of their names that files of some families leave out."""
    row = FAMILIES[config.family]
    if any(name.startswith(row.prefix) for name in tensors):
        return tensors
    return {n if n.startswith(row.names["output"] + ".") else row.prefix + n: t for n, t in tensors.items()}


def resolve_tying(
    config: ModelConfig, tensors: Mapping[str, StoredTensor]
) -> tuple[ModelConfig, dict[str, StoredTensor]]:
    """``config`` and ``tensors`` agreeing on whether the head is the embedding table; a tied head is left out.

    The file has the last word, as in transformers: a missing head is tied, two tables that differ are not.
    """
    names = FAMILIES[config.family].names
    table, head = names["tokens"] + ".weight", names["output"] + ".weight"
    tensors = dict(tensors)
    tied = config.tie_embeddings
    if any(f"{names['output']}.{packed}" in tensors for packed in ("qweight", "weight_packed")):  # others quantized it
        return config, tensors
    if head not in tensors:
        tied = True
    elif tied and table not in tensors:
        tensors[table] = tensors.pop(head)
    elif tied and tensors[head].equals(tensors[table]):
        del tensors[head]
    else:
        tied = False
    return replace(config, tie_embeddings=tied), tensors


def check_tensors(wanted: Specs, tensors: Mapping[str, StoredTensor], where: str) -> None:
    """Raise CheckpointError unless ``tensors``, of ``where``, are exactly ``wanted``."""
    problems: dict[str, list[str]] = defaultdict(list)
    problems["missing"] = [name for name in wanted if name not in tensors]
    problems["unexpected"] = [name for name in tensors if name not in wanted]
    for name, tensor in tensors.items():
        dtype, shape = wanted.get(name, (tensor.dtype, tensor.shape))
        if tensor.shape != shape:
            problems["of the wrong shape"].append(f"{name} {list(tensor.shape)}, not {list(shape)}")
        if dtype is None and not tensor.dtype.is_floating_point:
            problems["not floating-point"].append(f"{name} ({str(tensor.dtype).removeprefix('torch.')})")
        elif dtype not in (None, tensor.dtype):
            problems["of the wrong dtype"].append(f"{name} is stored as {tensor.dtype}, not as {dtype}")
    said = [f"{len(names)} tensors {what}: {some(names)}" for what, names in problems.items() if names]
    if said:
        raise CheckpointError(f"{where} does not fit its configuration: " + "; ".join(said))


def _warn_not_finite(model: nn.Module, where: str) -> None:
    """Log a warning that names the weights of ``model``, loaded from ``where``, that hold NaN or infinity."""
    # The extremes are NaN or infinite if any value is, and are found at the speed of memory.
    tensors = {n: t for n, t in model.state_dict().items() if t.is_floating_point() and t.dtype.itemsize > 1}
    rows = {n: t if t.is_contiguous() else t.t() for n, t in tensors.items()}  # aminmax would copy columns
    damaged = [n for n, t in rows.items() if not all(extreme.isfinite() for extreme in t.aminmax())]
    if damaged:
        why = "The checkpoint is damaged, or too large in value for the dtype; what it generates means nothing"
        log.warning("%s: %d weights are not finite (NaN or infinity): %s. %s", where, len(damaged), some(damaged), why)
