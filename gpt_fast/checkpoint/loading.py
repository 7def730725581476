"""Checkpoints on disk to a ready Transformer, and back.

Reads Hugging Face directories as they are: ``model.safetensors`` or ``pytorch_model.bin``, whole or sharded with an
index. The model is built on the ``meta`` device and each parameter is then allocated once, in its final dtype on
its final device, and filled from the mapped file piece by piece (stored.py): a load peaks at the weights it leaves
behind plus some megabytes. Other formats go through importers.py first.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

from gpt_fast.checkpoint.families import FAMILIES, Part, parts, read_config, read_json, to_hf_config
from gpt_fast.checkpoint.safetensors_file import read_safetensors, write_safetensors
from gpt_fast.checkpoint.stored import Slice, StoredTensor, read_torch_file, stored_tensors
from gpt_fast.config import ModelConfig
from gpt_fast.errors import CheckpointError
from gpt_fast.model.transformer import Transformer

__all__ = [
    "CheckpointError",
    "Slice",
    "build",
    "load_model",
    "open_checkpoint",
    "open_weights",
    "random_model",
    "save_checkpoint",
    "stored_dtype",
    "write_safetensors",
]

log = logging.getLogger(__name__)

_SINGLE = ("model.safetensors", "pytorch_model.bin")
_SHOWN = 5  # names listed in an error
_OF_QUANTIZED = (".scale", ".scales", ".row_scale")  # of their own dtypes whatever the rest is
_REPEATED = 4_194_301  # elements, a prime: rows of a filled matrix are not copies of each other


def load_model(
    directory: str | Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: bool = False,
    *,
    column_major: bool = False,
    local: ModelConfig | None = None,
    take: Callable[[Part], Slice | None] | None = None,
) -> Transformer:
    """The model in a Hugging Face directory, every weight in ``dtype`` on ``device``, without gradients.

    ``progress``: a bar by bytes, when stderr is a terminal. ``column_major``: see :func:`build`. A tensor-parallel
    rank gives ``local``, the shape of what it holds, and ``take``, which slice of each stored tensor fills the same
    part of it (None: all of it).

    Raises CheckpointError, naming files and tensors, for whatever is missing, unexpected, mis-shaped or damaged.
    """
    directory = Path(directory)
    config, weights = open_checkpoint(directory)
    shape = replace(local, tie_embeddings=config.tie_embeddings) if local else config
    model = build(shape, dtype, device, column_major)
    fill(model, config, weights, progress=progress, take=take)
    return model


def open_checkpoint(directory: str | Path) -> tuple[ModelConfig, dict[str, StoredTensor]]:
    """The configuration and the weights, mapped, of an unquantized directory; they fit each other.

    Raises CheckpointError where they do not. Nothing is built or allocated by what ``config.json`` says before that.
    """
    config, weights = resolve_tying(read_config(directory), open_weights(directory))
    check_weights(parts(config), weights, str(directory))
    return config, weights


class _NoDraws(TorchFunctionMode):
    """Leaves out random initialisation: meta tensors have no values, and their ``normal_`` imports for two seconds."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def build(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    column_major: bool = False,
    swap: Callable[[Transformer], object] | None = None,
) -> Transformer:
    """A Transformer whose weights are allocated and not yet written. ``swap`` may exchange modules before that.

    ``column_major`` lays the matrices out transposed (their shape stays), which torch's float32 products on a CPU are
    faster with when there are few rows: docs/log.md. A head that is also the embedding table stays as it is.
    """
    with torch.device("meta"), _NoDraws():
        model = Transformer(config)
    if swap:
        swap(model)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            turned = column_major and isinstance(module, nn.Linear) and parameter.dim() == 2
            shape = parameter.shape[::-1] if turned else parameter.shape
            data = torch.empty(shape, dtype=dtype, device=device)
            data = data.t() if turned else data
            setattr(module, name, nn.Parameter(data, requires_grad=False))
    model.tie()
    model.ropes.to(device)  # float32 in every model; made on the CPU, meta or not
    return model.eval()


def fill(
    model: Transformer,
    config: ModelConfig,
    weights: Mapping[str, StoredTensor],
    *,
    progress: bool = False,
    take: Callable[[Part], Slice | None] | None = None,
    place: Callable[[Part], Part] | None = None,
    store: Callable[[Part, StoredTensor, Slice | None, Callable[[int], object] | None], bool] | None = None,
) -> None:
    """Write ``weights``, a whole checkpoint of ``config`` (:func:`open_checkpoint`), into the allocated ``model``.

    ``place`` says where a model with other modules holds a part. ``store`` may write a part itself, for modules that
    hold no plain weight: it returns whether it has.
    """
    wanted = parts(config)
    parameters = dict(model.named_parameters())
    total = sum(weights[part.source].num_bytes for part in wanted)
    with progress_bar(total, progress, "loading weights") as report, torch.no_grad():
        for part, own in zip(wanted, parts(model.config), strict=True):
            chosen = take(part) if take else None
            own = place(own) if place else own
            if store is None or not store(own, weights[part.source], chosen, report):
                target = parameters[own.target][own.start : own.start + own.shape[0]]
                weights[part.source].copy_to(target, chosen, report)


def resolve_tying(
    config: ModelConfig, weights: Mapping[str, StoredTensor]
) -> tuple[ModelConfig, dict[str, StoredTensor]]:
    """``config`` and ``weights`` agreeing on whether the head is the embedding table; a tied head is left out.

    The file has the last word, as in transformers: a missing head is tied, two tables that differ are not.
    """
    names = FAMILIES[config.family].names
    table, head = names["tokens"] + ".weight", names["output"] + ".weight"
    weights = dict(weights)
    tied = config.tie_embeddings
    if head not in weights:
        tied = True
    elif tied and table not in weights:
        weights[table] = weights.pop(head)
    elif tied and weights[head].equals(weights[table]):
        del weights[head]
    else:
        tied = False
    return replace(config, tie_embeddings=tied), weights


def check_weights(wanted: Sequence[Part], weights: Mapping[str, StoredTensor], where: str) -> None:
    """Raise CheckpointError unless ``weights`` are exactly ``wanted``."""
    sources = {part.source: part.shape for part in wanted}
    problems = [
        ("missing", [name for name in sources if name not in weights]),
        ("unexpected", [name for name in weights if name not in sources]),
        (
            "of the wrong shape",
            [
                f"{name} {list(weights[name].shape)}, not {list(shape)}"
                for name, shape in sources.items()
                if name in weights and weights[name].shape != shape
            ],
        ),
        (
            "not floating-point",
            [
                f"{name} ({str(weights[name].dtype).removeprefix('torch.')})"
                for name in sources
                if name in weights and not weights[name].dtype.is_floating_point
            ],
        ),
    ]
    found = [f"{len(names)} tensors {what}: {_some(names)}" for what, names in problems if names]
    if found:
        raise CheckpointError(f"{where} does not fit its configuration: " + "; ".join(found))


def warn_not_finite(model: nn.Module, where: str) -> None:
    """Log a warning that names the weights of ``model``, loaded from ``where``, that hold NaN or infinity."""
    # The extremes are NaN or infinite if any value is, and are found at the speed of memory.
    tensors = {n: t for n, t in model.state_dict().items() if t.is_floating_point() and t.dtype.itemsize > 1}
    rows = {n: t if t.is_contiguous() else t.t() for n, t in tensors.items()}  # aminmax would copy columns
    damaged = [n for n, t in rows.items() if not all(extreme.isfinite() for extreme in t.aminmax())]
    if damaged:
        log.warning(
            "%s: %d weights are not finite (NaN or infinity): %s. The checkpoint is damaged, or too large in value for "
            "the dtype; what it generates means nothing",
            where,
            len(damaged),
            _some(damaged),
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def open_weights(directory: str | Path) -> dict[str, StoredTensor]:
    """Every weight of a Hugging Face directory by name, mapped and not yet read.

    Buffers that old versions saved (rotary frequencies) are left out. Raises CheckpointError.
    """
    directory = Path(directory)
    weights: dict[str, StoredTensor] = {}
    for path in weight_files(directory):
        for name, tensor in _read_file(path).items():
            if name in weights:
                raise CheckpointError(f"{path}: tensor {name!r} is in another file of {directory} as well")
            weights[name] = tensor
    return {name: t for name, t in weights.items() if not name.endswith("rotary_emb.inv_freq")}


def weight_files(directory: Path) -> list[Path]:
    """The files holding the weights of ``directory``; safetensors come before torch's format."""
    for single in _SINGLE:
        index = directory / f"{single}.index.json"
        if (directory / single).is_file():
            return [directory / single]
        if index.is_file():
            mapping = read_json(index).get("weight_map")
            if not isinstance(mapping, dict) or not all(isinstance(name, str) for name in mapping.values()):
                raise CheckpointError(f"{index} has no weight_map of tensor names to file names")
            files = [directory / name for name in sorted(set(mapping.values()))]
            for file in files:
                if file.parent != directory:
                    raise CheckpointError(f"{index} names {file.name!r} outside its own directory")
                if not file.is_file():
                    raise CheckpointError(f"{file} is missing; {index.name} needs it")
            return files
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory")
    raise CheckpointError(f"{directory} has no weights: none of {', '.join(_SINGLE)}, whole or with an index")


def _read_file(path: Path) -> dict[str, StoredTensor]:
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    return stored_tensors(read_torch_file(path), path)


def stored_dtype(directory: str | Path) -> torch.dtype:
    """The floating-point dtype most bytes of a Hugging Face directory's weights have, quantized ones left out."""
    num_bytes: dict[torch.dtype, int] = {}
    for name, tensor in open_weights(directory).items():
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1 and not name.endswith(_OF_QUANTIZED):
            num_bytes[tensor.dtype] = num_bytes.get(tensor.dtype, 0) + tensor.num_bytes
    if not num_bytes:
        raise CheckpointError(f"{directory} holds no floating-point weights")
    return max(num_bytes, key=lambda dtype: num_bytes[dtype])


def random_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
    column_major: bool = False,
) -> Transformer:
    """A model of the shape ``config`` with random weights (normal, standard deviation 0.02), for benchmarks.

    Matrices repeat one block of random numbers, because drawing billions takes minutes. The same seed gives the
    same weights on every device and in every layout.
    """
    model = build(config, dtype, device, column_major)
    generator = torch.Generator().manual_seed(seed)
    largest = max(p.numel() for p in model.parameters())
    block = (torch.randn(min(_REPEATED, largest), generator=generator) * 0.02).to(device, dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
            elif parameter.dim() == 1:  # a norm
                parameter.fill_(1.0)
            else:
                _repeat(block, parameter)
    return model


def _repeat(block: torch.Tensor, matrix: torch.Tensor) -> None:
    """Fill ``matrix`` with ``block``, shifted a little each time so that no row comes twice."""
    num_rows, width = matrix.shape
    step = max(1, block.numel() // width - 1)
    for i, begin in enumerate(range(0, num_rows, step)):
        count = min(step, num_rows - begin)
        shift = i * 37 % (block.numel() - count * width + 1)
        matrix[begin : begin + count].copy_(block[shift : shift + count * width].view(count, width))


def save_checkpoint(
    model: Transformer,
    directory: str | Path,
    dtype: torch.dtype | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write ``model`` as a Hugging Face directory: ``config.json`` and ``model.safetensors``, in ``dtype`` or as held.

    ``extra`` goes into ``config.json`` as well, such as ``eos_token_id``. Raises CheckpointError for weights that are
    not plain (quantized), OSError when a file cannot be written.
    """
    parameters = dict(model.named_parameters())
    tensors: dict[str, StoredTensor] = {}
    for part in parts(model.config):
        if part.target not in parameters:
            raise CheckpointError(f"{part.target} is not a plain weight; only unquantized models can be saved so")
        whole = StoredTensor.of(parameters[part.target], mapped=False)
        tensors[part.source] = whole.part(part.start, part.shape[0])
    write_directory(Path(directory), model.config, tensors, dtype, extra)


def write_directory(
    directory: Path,
    config: ModelConfig,
    tensors: Mapping[str, StoredTensor],
    dtype: torch.dtype | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """``config.json`` and ``model.safetensors`` of ``tensors``, named as their family names them."""
    kind = dtype or next(iter(tensors.values())).dtype
    raw = to_hf_config(config, str(kind).removeprefix("torch.")) | dict(extra or {})
    directory.mkdir(parents=True, exist_ok=True)
    write_safetensors(directory / "model.safetensors", tensors, dtype)
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def progress_bar(total: int, wanted: bool, what: str) -> Iterator[Callable[[int], object] | None]:
    """A function to report bytes to, or None when nobody would see the bar."""
    if not wanted or not sys.stderr.isatty():
        yield None
        return
    with tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, desc=what) as bar:
        yield bar.update
