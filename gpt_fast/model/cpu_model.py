"""A model on the C++ kernels: its weights packed, its operations one program for each cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from gpt_fast.errors import UnsupportedError
from gpt_fast.kernels.cache import LayerCache, PagedLayer, StepLayout, StepNumbers, padded, whole_sequences
from gpt_fast.kernels.cpu import packing
from gpt_fast.kernels.cpu.library import available, rounded_together
from gpt_fast.kernels.cpu.program import Drawing, Program, named
from gpt_fast.kernels.cpu.translation import PackedWeights, Ranks, Weights, check
from gpt_fast.kernels.race import Draw
from gpt_fast.model import description as d
from gpt_fast.model.transformer import Block, KVCache, Transformer
from gpt_fast.quantize.linear import QuantizedLinear, SplitLinear

log = logging.getLogger(__name__)

PARTS = 4  # of a sum that ranks share: as many ranks give the same bits
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def pack_model(model: Transformer, ranks: Ranks | None = None) -> CpuModel | None:
    """``model`` for the C++ kernels, which takes its weights away; None, with a line in the log, where they cannot.
    ``ranks``: ``model`` is the share of one of them."""
    try:
        return CpuModel(model, ranks)
    except UnsupportedError as why:
        if model.device.type == "cpu":
            log.warning("the C++ kernels do not run %s: plain torch runs this model, and slower", why)
        return None


class CpuModel:
    """``model`` behind the engine (engine/model.py), by the C++ kernels.

    Takes the weights of ``model``, and lets go of each matrix when it is packed, so that only one is held twice. Raises
    UnsupportedError, before anything is taken, for a device, an operation or weights that the kernels do not run.
    """

    def __init__(self, model: Transformer, ranks: Ranks | None = None) -> None:
        self._ranks, num_ranks = ranks, 1 if ranks is None else ranks.count
        self.config, self.vocab_size = model.config, model.config.vocab_size
        heads = PagedLayer(self.config.num_kv_heads, padded(self.config.head_dim))  # filled up to whole vectors
        self.cache_layers = [heads] * self.config.num_layers
        self.device, self.dtype, self.ropes = model.device, model.dtype, model.ropes
        modules = (model.embed, *model.layers, model.head)
        _check(model, modules, ranks is not None)
        self._bytes_read = model.bytes_per_token(0, 0)
        tied = _take(model.head, model.head.block.matrix("output")) if self.config.tie_embeddings else []
        self._blocks = [(module.block.ops, pack_block(module, tied, num_ranks)) for module in modules]

    def program(self, cache: KVCache) -> Program:
        """The steps of this model over ``cache``, which are written in place."""
        caches: Sequence[LayerCache | None] = (None, *cache, None)
        blocks = [(ops, w._replace(cache=c)) for (ops, w), c in zip(self._blocks, caches, strict=True)]
        return Program(blocks, "logits", rows_before=len(blocks) - 1, ranks=self._ranks, vocab_size=self.vocab_size)

    def make_step(self, cache: KVCache, page_table: Tensor) -> CpuStep:
        """Steps over ``cache``; the layout of each brings the page table."""
        longest = page_table.shape[1] * (cache[0].k.shape[1] if cache else 0)
        return CpuStep(self, cache, longest)

    def forward(self, tokens: Tensor) -> Tensor:
        """Whole sequences [B, T] int64 -> logits [B, T, vocab_size] float32; the cache is of this call alone."""
        batch, length = tokens.shape
        c = self.config
        shape = (batch, length, c.num_kv_heads, padded(c.head_dim))  # a page for each sequence
        program = self.program([LayerCache.zeros(shape, self.dtype, self.device) for _ in range(c.num_layers)])
        positions, layout = whole_sequences(batch, length, length, self.device)
        angles = [rope(positions, torch.full_like(positions, length)) for rope in self.ropes]
        rows = torch.arange(batch * length)
        return program.run(tokens.flatten(), positions, angles, layout, rows).view(batch, length, -1)

    def bytes_per_token(self, context_len: int, cache_itemsize: float) -> int:
        """As ``Transformer.bytes_per_token``."""
        return self._bytes_read + context_len * self.config.kv_bytes_per_token(cache_itemsize)


class CpuStep:
    """Steps in C++ over one cache and page table, of sequences of at most ``longest`` tokens."""

    path, apart = "kernels", None

    def __init__(self, model: CpuModel, cache: KVCache, longest: int) -> None:
        self._ropes, self._program = model.ropes, model.program(cache)
        every = torch.arange(longest)
        fixed = all(rope.by_position for rope in self._ropes)
        self._tables = [rope(every, every) for rope in self._ropes] if fixed else None

    def __call__(self, tokens: Tensor, positions: Tensor, lengths: Tensor, layout: StepLayout, rows: Tensor) -> Tensor:
        """Logits [R, V] float32. See ``Transformer.step``."""
        angles = [rope(positions, lengths) for rope in self._ropes] if self._tables is None else self._tables
        with named("gpt_fast::cpu_step"):
            return self._program.run(tokens, positions, angles, layout, rows, by_position=self._tables is not None)

    @property
    def chain(self) -> Callable[..., list[list[int]]] | None:
        """See ``Program.chain``, which has no angles for tokens that the host does not know yet."""
        return None if self._tables is None else self._chain

    @property
    def ahead(self) -> CpuStep | None:
        """As for ``chain``."""
        return None if self._tables is None else self

    def begin(
        self,
        numbers: StepNumbers,
        page_table: Tensor,
        slots: Sequence[int],
        draws: Sequence[Draw],
        before: Drawing | None,
        index: Sequence[int],
    ) -> Drawing:
        """See ``Program.begin``."""
        assert self._tables is not None
        return self._program.begin(numbers, page_table, self._tables, slots, draws, before, index)

    def hold(self) -> None:
        """See ``Program.hold``."""
        self._program.hold()

    def _chain(
        self, numbers: StepNumbers, page_table: Tensor, slots: Sequence[int], draws: Sequence[Sequence[Draw]]
    ) -> list[list[int]]:
        assert self._tables is not None
        with named("gpt_fast::cpu_chain"):
            return self._program.chain(numbers, page_table, self._tables, slots, draws)

    def reads_host(self) -> bool:
        """Always: host and device are one."""
        return True

    def warm_up(self, run: Callable[[int], None], longest: int) -> None:
        """Nothing is to be compiled; two steps touch all weights."""
        run(1)
        run(min(2, longest))


def _check(model: Transformer, modules: Sequence[Block], divided: bool) -> None:
    if model.device.type != "cpu" or not available():
        raise UnsupportedError(f"on {model.device}")
    if model.dtype not in _DTYPES:
        raise UnsupportedError(f"activations of {model.dtype}")
    for module in modules:
        check(module.block.ops)
        if divided and any(isinstance(op, d.Heads) and op.norm == "row" for op in module.block.ops):
            raise UnsupportedError("norms of rows that ranks divide")
        for matrix in module.block.matrices:
            for part in _parts(module.get_submodule(matrix.name)):
                if not _known(part):
                    raise UnsupportedError(f"{part} ({module.block.prefix}{matrix.name})")


def _parts(module: nn.Module) -> Sequence[nn.Module]:
    return module.pieces() if isinstance(module, SplitLinear) else (module,)


def _known(module: nn.Module) -> bool:
    if isinstance(module, QuantizedLinear):
        # Columns that only fill up a group must end with the block that they are in: activations come in whole blocks.
        return module.scheme.kind != "fp8" and module.order is None and module.padding < packing.BLOCK
    return isinstance(module, nn.Linear) and module.weight.dtype in _DTYPES


def pack_block(module: Block, tied: Sequence[PackedWeights] = (), num_ranks: int = 1) -> Weights:
    """The weights of one block, packed and taken from it; ``tied``: those of a head that is the embedding table."""
    block = module.block
    matrices = {m.name: tied if m.tied else _take(module, m) for m in block.matrices}
    for m in block.matrices:
        if m.split == "columns":
            matrices[m.name] = [w._replace(parts=_num_parts(w, num_ranks)) for w in matrices[m.name]]
    vectors = {v.name: (module.vector(v.name).weight, module.vector(v.name).bias) for v in block.vectors}
    tables: dict[str, Tensor | PackedWeights]
    tables = {t.name: module.get_parameter(f"{t.name}.weight").detach() for t in block.tables}
    if tied and "tokens" in tables:
        tables["tokens"] = tied[0]
    splits = {m.name: m.split for m in block.matrices} | {t.name: t.split for t in block.tables}
    return Weights(matrices, vectors, tables, splits=splits)


def _num_parts(w: PackedWeights, num_ranks: int) -> int:
    """Parts of the inputs that one of ``num_ranks`` ranks sums by themselves: of PARTS of the whole matrix, or of as
    many as it can be cut into."""
    if w.kind in ("int8", "int4"):
        unit = max(rounded_together(), w.group_size)
    else:
        unit = packing.BLOCK if w.kind == "bfloat16" else 1
    parts = PARTS
    while parts > num_ranks and (w.in_features * num_ranks) % (parts * unit):
        parts //= 2
    return max(1, parts // num_ranks)


def _take(module: Block, matrix: d.Matrix) -> list[PackedWeights]:
    """The pieces of one matrix, in the order of its rows, for each expert its own; the module is let go of."""
    found = []
    with torch.no_grad():
        for part in _parts(module.get_submodule(matrix.name)):
            assert isinstance(part, (nn.Linear, QuantizedLinear))
            n = part.out_features // max(1, matrix.num_experts)
            found += [pack_rows(part, slice(i, i + n)) for i in range(0, part.out_features, n)]
    setattr(module, matrix.name, _Taken())
    return found


class _Taken(nn.Module):
    """In the place of a matrix whose weights were taken."""

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("the weights of this Transformer were packed for the C++ kernels; use what serve() returned")


def pack_rows(module: nn.Linear | QuantizedLinear, rows: slice) -> PackedWeights:
    """Some of the outputs of ``module``."""
    n, k = rows.stop - rows.start, module.in_features
    bias = None if module.bias is None else module.bias.detach()[rows].float()
    weight = module.weight.detach()[rows]
    if isinstance(module, nn.Linear):
        return PackedWeights(_DTYPES[weight.dtype], packing.pack_dense(weight), n, k, bias=bias)
    if module.scheme.kind == "int8":
        return PackedWeights("int8", packing.pack_int8(weight), n, k, module.scale[rows], 0, bias)
    data = packing.pack_int4(weight, module.scale[rows], module.zero[rows])
    k += module.padding
    return PackedWeights("int4", data, n, k, module.row_scale[rows], module.scheme.group_size, bias)
