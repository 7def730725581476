"""LoRA adapters (Hu et al. 2021, arXiv 2106.09685) in PEFT's format, added to weights while those are read.

A folder holds ``adapter_config.json`` and ``adapter_model.safetensors`` (or ``.bin``). For a linear layer X of N
outputs and K inputs the file has ``base_model.model.X.lora_A.weight`` [r, K] and ``base_model.model.X.lora_B.weight``
[N, r], and the layer's weight becomes ``W + scale * B @ A``. ``scale`` is ``lora_alpha / r``, or ``lora_alpha /
sqrt(r)`` with ``use_rslora`` (Kalajdzievski 2023, arXiv 2312.03732). A table of embeddings [V, E] has
``lora_embedding_A`` [r, V] and ``lora_embedding_B`` [E, r]. Tensors with other names (``modules_to_save``) take the
place of the model's own.

The sum is made in float32, some rows at a time, before they get their dtype or are rounded (:class:`AdaptedTensor`): no
weight is ever held twice, and a rank adds its own share.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from gpt_fast.checkpoint.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from gpt_fast.checkpoint.json_values import read_json
from gpt_fast.checkpoint.stored import StoredTensor
from gpt_fast.checkpoint.weight_files import open_weights
from gpt_fast.errors import CheckpointError, some

_PREFIX = "base_model.model."
_ENDS = {  # of tensors' names: which factor it is, and whether of a table
    ".lora_A.weight": ("A", False), ".lora_B.weight": ("B", False),
    ".lora_embedding_A": ("A", True), ".lora_embedding_B": ("B", True),
}  # fmt: skip
_BASE = ".base_layer.weight"  # how PEFT saves a table that has an adapter as well
_HEAD = "lm_head"  # transformers 5's name of every head, whatever the files of a family call it

# Keys of adapter_config.json that are read here, and the values that can be served where it is not all of them.
_READ: dict[str, tuple[Any, ...] | None] = {
    "r": None, "lora_alpha": None, "use_rslora": (True, False), "rank_pattern": None, "alpha_pattern": None,
    "peft_type": ("LORA",),
    # Others, such as pissa, change the model's own weights before they train the adapter.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}  # fmt: skip
# Keys that change nothing here: about training, or said by names and shapes of the tensors as well.
_IDLE = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern",
    "fan_in_fan_out",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config", "megatron_core",
    "qalora_group_size", "ensure_weight_tying",
}  # fmt: skip


class LowRank(NamedTuple):
    """What is added to a weight as its file has it: ``scale * left @ right``; left [rows, r], right [r, columns]."""

    left: StoredTensor
    right: StoredTensor
    scale: float

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.left.shape[0], self.right.shape[1])

    def transposed(self) -> LowRank:
        return LowRank(self.right.transposed(), self.left.transposed(), self.scale)


class AdaptedTensor(StoredTensor):
    """The matrix ``base`` and ``added`` of the same shape, read as their sum in float32.

    ``dtype`` is that of ``base``: of what the model was stored in.
    """

    def __init__(self, base: StoredTensor, added: LowRank) -> None:
        self.base, self.added = base, added
        self.dtype, self.shape, self.mapped, self.order = base.dtype, base.shape, base.mapped, None

    def part(self, start: int, num_rows: int) -> StoredTensor:
        left = self.added.left.part(start, num_rows)
        return AdaptedTensor(self.base.part(start, num_rows), self.added._replace(left=left))

    def picked(self, rows: Tensor) -> StoredTensor:
        return AdaptedTensor(self.base.picked(rows), self.added._replace(left=self.added.left.picked(rows)))

    def columns(self, start: int, num_columns: int) -> StoredTensor:
        right = self.added.right.columns(start, num_columns)
        return AdaptedTensor(self.base.columns(start, num_columns), self.added._replace(right=right))

    def transposed(self) -> StoredTensor:
        return AdaptedTensor(self.base.transposed(), self.added.transposed())

    def rows(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end), float32."""
        left, right, scale = self.added
        product = left.rows(begin, end).float() @ right.whole().float()
        return product.mul_(scale).add_(self.base.rows(begin, end))

    def release(self, begin: int, end: int) -> None:
        self.base.release(begin, end)


class Adapter:
    """One folder. ``added``: by the name of the module, tables of embeddings with their transpose, as files have it.
    ``saved``: tensors that take the place of the model's, by name. ``files``: all that decides what it does.
    ``head``: the name of the model's head. Raises CheckpointError for whatever is missing, damaged or not supported,
    naming file, key or tensor."""

    def __init__(self, folder: Path, weight: float = 1.0, head: str = _HEAD) -> None:
        self.folder, self.weight, self._head = folder, weight, head
        if not (folder / ADAPTER_CONFIG).is_file():
            todo = "name the folder that PEFT's save_pretrained wrote"
            raise CheckpointError(f"lora: {folder} has no {ADAPTER_CONFIG}; {todo}")
        self._config = read_json(folder / ADAPTER_CONFIG)
        found = next((folder / name for name in ADAPTER_WEIGHTS if (folder / name).is_file()), None)
        if found is None:
            raise CheckpointError(f"lora: {folder} has no weights: none of {', '.join(ADAPTER_WEIGHTS)}")
        self.files = [folder / ADAPTER_CONFIG, found]
        _check_config(self._config, f"lora: {folder / ADAPTER_CONFIG}")
        self.added: dict[str, LowRank] = {}
        self.saved: dict[str, StoredTensor] = {}
        self._sort(open_weights([found]), f"lora: {found}")

    def _sort(self, tensors: Mapping[str, StoredTensor], where: str) -> None:
        factors: dict[tuple[str, bool], dict[str, StoredTensor]] = {}
        for name, tensor in tensors.items():
            if not name.startswith(_PREFIX) or not tensor.dtype.is_floating_point:
                raise CheckpointError(f"{where}: {name!r} is no tensor of an adapter ({_PREFIX}..., floating-point)")
            name = name.removeprefix(_PREFIX)
            end = next((end for end in _ENDS if name.endswith(end)), None)
            if end is None:
                name = name.removesuffix(_BASE) + ".weight" if name.endswith(_BASE) else name
                self.saved[self._in_model(name)] = tensor
            else:
                factor, table = _ENDS[end]
                factors.setdefault((name.removesuffix(end), table), {})[factor] = tensor
        if not factors:
            raise CheckpointError(f"{where} holds no lora_A and lora_B")
        if self.saved and self.weight != 1:
            whole = "take the place of the model's own, which they cannot do by half: leave the adapter's weight out"
            raise CheckpointError(f"{where}: {some(self.saved)} {whole}")
        for (module, table), pair in factors.items():
            self.added[self._in_model(module)] = self._low_rank(module, pair, table, where)

    def _in_model(self, name: str) -> str:
        """What the files of the model call the module or tensor ``name``."""
        module = name.partition(".")[0]
        return self._head + name.removeprefix(_HEAD) if module == _HEAD else name

    def _low_rank(self, module: str, pair: Mapping[str, StoredTensor], table: bool, where: str) -> LowRank:
        if len(pair) < 2:
            raise CheckpointError(f"{where}: {module} has lora_{next(iter(pair))} alone")
        rank = _of_pattern(self._config, "rank_pattern", module, self._config["r"])
        alpha = _of_pattern(self._config, "alpha_pattern", module, self._config["lora_alpha"])
        a, b = pair["A"], pair["B"]
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != rank or b.shape[1] != rank:
            shapes = f"{list(a.shape)} and {list(b.shape)}"
            wanted = f"[{rank}, K] and [N, {rank}]"
            raise CheckpointError(f"{where}: lora_A and lora_B of {module} are {shapes}, not {wanted}")
        scale = self.weight * alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)
        found = LowRank(b, a, scale)
        return found.transposed() if table else found


def _check_config(config: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError for a key or a value of it that cannot be served."""
    for key, allowed in _READ.items():
        value = config.get(key)
        if allowed is not None and value is not None and value not in allowed:
            known = ", ".join(map(str, allowed))
            raise CheckpointError(f"{where}: {key} {value!r} is not supported, only {known}")
    for key, value in config.items():
        if key not in _READ and key not in _IDLE and value not in (None, False, "none", [], {}):
            raise CheckpointError(f"{where}: {key} {value!r} is not supported")
    numbers: dict[str, Any] = {"r": config.get("r"), "lora_alpha": config.get("lora_alpha")}
    for key in ("rank_pattern", "alpha_pattern"):
        given = config.get(key) or {}
        if not isinstance(given, dict):
            raise CheckpointError(f"{where}: {key} must give a number for each pattern")
        numbers |= {f"{key} of {pattern!r}": number for pattern, number in given.items()}
    for what, number in numbers.items():
        whole = not what.startswith(("lora_alpha", "alpha"))
        good = isinstance(number, int if whole else (int, float)) and not isinstance(number, bool)
        if not good or not abs(number) < 1e30 or (whole and number < 1):
            raise CheckpointError(f"{where}: {what} must be a number, not {number!r:.40}")


def _of_pattern(config: Mapping[str, Any], key: str, module: str, usual: Any) -> Any:
    """The number of the first pattern that is the end of the name ``module``, as PEFT looks for it."""
    for pattern, number in (config.get(key) or {}).items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return number
        except re.error as e:
            raise CheckpointError(f"lora: {key} {pattern!r} is no regular expression: {e}") from None
    return usual


def open_adapters(lora: Mapping[str, float], head: str = _HEAD) -> list[Adapter]:
    """The folders of ``EngineConfig.lora``, each with its weight, for a model whose head is called ``head``. Raises
    CheckpointError."""
    return [Adapter(Path(folder).expanduser(), weight, head) for folder, weight in lora.items()]


def touched(adapters: Iterable[Adapter]) -> set[str]:
    """The names of all tensors of a model that ``adapters`` change."""
    return {name for a in adapters for name in (*a.saved, *(f"{module}.weight" for module in a.added))}


def adapted(
    tensors: Mapping[str, StoredTensor], transposed: Collection[str], adapters: Iterable[Adapter]
) -> dict[str, StoredTensor]:
    """``tensors`` of a model by name, changed by ``adapters``. ``transposed``: names of weights that are stored
    [inputs, outputs]. Raises CheckpointError naming what an adapter has for no tensor, or for one of another shape."""
    out, replaced = dict(tensors), set[str]()
    for adapter in adapters:
        where = f"lora: {adapter.folder} does not fit this model"
        if missing := touched([adapter]) - tensors.keys():
            raise CheckpointError(f"{where}, which has no {some(sorted(missing))}")
        if again := replaced & adapter.saved.keys():
            raise CheckpointError(f"{where}: {some(sorted(again))} were replaced by another adapter")
        replaced |= adapter.saved.keys()
        wrong = []
        for name, tensor in adapter.saved.items():
            if tensor.shape != tensors[name].shape:
                wrong.append(f"{name} is {list(tensor.shape)}, not {list(tensors[name].shape)}")
            out[name] = tensor
        for module, added in adapter.added.items():
            name = f"{module}.weight"
            added = added.transposed() if name in transposed else added
            if added.shape != tensors[name].shape:
                wrong.append(f"B @ A of {module} is {list(added.shape)}, not {list(tensors[name].shape)}")
            out[name] = AdaptedTensor(out[name], added)
        if wrong:
            raise CheckpointError(f"{where}: {some(wrong)}")
    return out
