"""Runs operations of a model's description in C++, step after step.

A :class:`Program` runs any list of operations: those of a whole model, or a single one on an input buffer, which is how
tests look at kernels one by one.
"""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from ctypes import Structure

import torch
from torch import Tensor

from gpt_fast.kernels.cache import StepLayout, StepNumbers
from gpt_fast.kernels.cpu import structs
from gpt_fast.kernels.cpu.library import library
from gpt_fast.kernels.cpu.translation import Ranks, Translation, Weights
from gpt_fast.kernels.race import Draw, draw_table
from gpt_fast.model import description as d
from gpt_fast.model.rope import Angles

_NOTHING = torch.zeros(1, dtype=torch.int32)
_NO_LAYOUT = StepLayout(_NOTHING, _NOTHING[:0], _NOTHING[:0].view(0, 1), torch.zeros(0, dtype=torch.int64))


def named(name: str) -> AbstractContextManager[object]:
    """``name`` in a profiler's trace. Without a profiler it costs nothing (record_function takes 7 us)."""
    return torch.profiler.record_function(name) if torch.autograd.profiler._is_profiler_enabled else nullcontext()


class Drawing:
    """A step that another thread computes, and the tokens that it draws. What it reads and writes is kept until it is
    done."""

    def __init__(self, library: ctypes.CDLL, number: int, tokens: array[int], kept: object) -> None:
        self.tokens = tokens  # [R], written when the step is done
        self._library, self._number, self._kept = library, number, kept

    def tolist(self) -> list[int]:
        """Waits for the tokens of each row; -1 for one that could not be drawn."""
        with named("gpt_fast::cpu_wait"):
            self._library.gpt_fast_wait(self._number)
        return self.tokens.tolist()

    def __del__(self) -> None:
        self._library.gpt_fast_wait(self._number)


class Program:
    """Operations compiled for C++: ``blocks`` are run one after the other, each with its own weights.

    ``output``: the buffer that :meth:`run` returns. ``rows_before``: index of the block before which only the wanted
    tokens' rows are kept (the head's); None: all are. ``input``: name and width of a buffer that the caller fills.
    ``ranks``: the weights are this rank's share, of a vocabulary of ``vocab_size``; all ranks run the same steps, and
    each has the whole output. Caches are read and written in place, [pages, page_size, K, padded(D)] of one dtype,
    float32, bfloat16, or int8 with scales; paged.h has the order in that memory. The program keeps all tensors alive
    that it reads. Raises UnsupportedError.
    """

    def __init__(
        self,
        blocks: Sequence[tuple[Sequence[d.Op], Weights]],
        output: str,
        *,
        rows_before: int | None = None,
        input: tuple[str, int] | None = None,
        ranks: Ranks | None = None,
        vocab_size: int = 0,
    ) -> None:
        self._library, self._ranks = library(), ranks
        translated = Translation(
            blocks, output, rows_before=rows_before, input=input, ranks=ranks, vocab_size=vocab_size
        )
        self._translation, self._program = translated, translated.struct  # the first keeps what the second reads
        self._width, self._halves, self._in_place = translated.width, translated.halves, translated.in_place
        self._rows = rows_before is not None
        self._angles: Sequence[Angles] | None = None  # of the last step
        self._waves: tuple[list[Tensor], array[int]] = [], array("q")  # these, and where they are
        self._logits: Tensor | None = None  # of chains
        self._last = 0  # the number of what began last in another thread; 0: all of that is done

    def run(
        self,
        tokens: Tensor,  # [N] int64
        positions: Tensor,  # [N] int64
        angles: Sequence[Angles],  # of each rope table, a row for each token
        layout: StepLayout | None,
        rows: Tensor,  # [R] int64: tokens whose outputs are wanted
        input: Tensor | None = None,  # [N, width] float32
        by_position: bool = False,  # the angles have a row for each position from 0 on, not for each token
    ) -> Tensor:
        """The output buffer, float32 [R or N, width]; keys and values of all tokens go into the caches.

        Raises ValueError for rope tables of another width than the operations'.
        """
        self.finish()
        step, out, kept = self._step(tokens, positions, angles, layout, rows, by_position, input)
        self._library.gpt_fast_run(ctypes.addressof(self._program), ctypes.addressof(step), torch.get_num_threads())
        del kept
        if self._ranks is not None:
            self._ranks.check()
        return out

    def chain(
        self,
        numbers: StepNumbers,  # of the first step, whose rows are the last tokens of the slots that have one
        page_table: Tensor,  # [S, P] int32, with the pages of the later steps as well
        angles: Sequence[Angles],  # of all positions from 0 on
        row_slots: Sequence[int],  # [R], rising: the slot of each row
        draws: Sequence[Sequence[Draw]],
    ) -> list[list[int]]:
        """A step, and then one after the other those of the tokens that are drawn behind its rows: ``draws[r]`` says
        how (the fields of ``Draw``) and, by its length, how many. A row drops out after its last token, and later
        steps hold the tokens of the others in order. Returns the tokens of each row; -1 for one that cannot be drawn.

        No tensor is made here. The weights of a step push Python out of the CPU's caches, so the host is slow between
        two steps: each tensor would take 10 to 30 us.
        """
        self.finish()
        step, chain, drawn, kept = self._chain(numbers, page_table, angles, row_slots, draws)
        addresses = (ctypes.addressof(struct) for struct in (self._program, step, chain))
        self._library.gpt_fast_chain(*addresses, torch.get_num_threads())
        del kept
        return [drawn[r :: len(draws)][: len(own)].tolist() for r, own in enumerate(draws)]

    def begin(
        self,
        numbers: StepNumbers,
        page_table: Tensor,
        angles: Sequence[Angles],
        row_slots: Sequence[int],
        draws: Sequence[Draw],
        before: Drawing | None = None,
        index: Sequence[int] = (),
    ) -> Drawing:
        """A step, and a token drawn behind each of its rows, in another thread, behind all that was begun before it.
        ``before``: the tokens of the step are those that ``before`` draws behind the rows ``index`` of that step, and
        where one of these is -1, so are all of this one."""
        step, chain, drawn, kept = self._chain(numbers, page_table, angles, row_slots, [[own] for own in draws])
        rows = array("q", index)
        if before is not None:
            chain.before, chain.before_rows = structs.address(before.tokens), structs.address(rows)
        addresses = (ctypes.addressof(struct) for struct in (self._program, step, chain))
        number = self._library.gpt_fast_begin(*addresses, torch.get_num_threads())
        self._last = number
        return Drawing(self._library, number, drawn, (self, page_table, kept, rows, before and before.tokens))

    def hold(self) -> None:
        """Leave out what was begun and has not started; its tokens are -1. Any thread may call it."""
        self._library.gpt_fast_hold()

    def finish(self) -> None:
        """Wait for all that was begun."""
        if self._last:
            self._library.gpt_fast_wait(self._last)
            self._last = 0

    def _chain(
        self,
        numbers: StepNumbers,
        page_table: Tensor,
        angles: Sequence[Angles],
        row_slots: Sequence[int],
        draws: Sequence[Sequence[Draw]],
    ) -> tuple[Structure, Structure, array[int], object]:
        """The structs of a step and its chain, where the tokens go, and what must be kept meanwhile."""
        n, count = numbers, [len(each) for each in draws]
        num_tokens, num_rows, longest = len(n.tokens), len(n.rows), max(count)
        if self._logits is None or self._logits.shape[0] < num_rows:
            self._logits = torch.empty(num_rows, self._width)
        wide = array("q", [*n.tokens, *n.positions, *n.write_slots, *n.rows, *row_slots, *count])
        narrow = array("i", [*n.query_start, *n.context_len])
        sizes = (0, num_tokens, num_tokens, num_tokens, num_rows, num_rows)
        at = [structs.address(wide) + 8 * before for before in itertools.accumulate(sizes)]
        starts = structs.address(narrow)
        step = structs.Step(
            tokens=at[0], positions=at[1], turns=at[1], num_tokens=num_tokens, angles=self._angle_pointers(angles),
            query_start=starts, context_len=starts + 4 * len(n.query_start), page_table=page_table.data_ptr(),
            write_slots=at[2], slots=page_table.shape[0], pages_per_slot=page_table.shape[1],
            rows=at[3], num_rows=num_rows, output=self._logits.data_ptr(),
        )  # fmt: skip
        table = draw_table(itertools.chain(*itertools.zip_longest(*draws, fillvalue=Draw())))
        drawn = array("q", [-1]) * (longest * num_rows)
        chain = structs.Chain(
            draws=structs.address(table), counts=at[5], row_slots=at[4], num_steps=longest, vocab=self._width,
            tokens=structs.address(drawn),
        )  # fmt: skip
        return step, chain, drawn, (wide, narrow, table, self._logits)

    def _step(
        self,
        tokens: Tensor,
        positions: Tensor,
        angles: Sequence[Angles],
        layout: StepLayout | None,
        rows: Tensor,
        by_position: bool,
        input: Tensor | None = None,
    ) -> tuple[Structure, Tensor, object]:
        """The struct of a step, its output, and what must be kept while it runs."""
        given = [t.contiguous() for t in (tokens, positions, rows, *(layout or _NO_LAYOUT))]
        tokens, positions, rows, start, context_len, page_table, write_slots = given
        source = None if input is None else input.clone(memory_format=torch.contiguous_format)
        if self._in_place and source is not None:
            out = source
        else:
            out = torch.empty(rows.shape[0] if self._rows else tokens.shape[0], self._width)
        step = structs.Step(
            tokens=tokens.data_ptr(), positions=positions.data_ptr(), num_tokens=tokens.shape[0],
            angles=self._angle_pointers(angles), turns=positions.data_ptr() if by_position else None,
            query_start=start.data_ptr(), context_len=context_len.data_ptr(), page_table=page_table.data_ptr(),
            write_slots=write_slots.data_ptr(), slots=page_table.shape[0], pages_per_slot=page_table.shape[1],
            rows=rows.data_ptr(), num_rows=rows.shape[0], input=None if source is None else source.data_ptr(),
            output=out.data_ptr(),
        )  # fmt: skip
        return step, out, (given, source)

    def _angle_pointers(self, angles: Sequence[Angles]) -> int:
        """Where the addresses of ``angles`` stand, which are kept until others come: those of all positions come with
        every step. Raises ValueError."""
        if angles is not self._angles:
            for table, half in self._halves.items():
                if angles[table][0].shape[-1] != half or angles[table][1].shape[-1] != half:
                    raise ValueError(f"rope table {table} must have {half} columns, not {angles[table][0].shape[-1]}")
            waves = [t.contiguous() for pair in angles for t in pair]
            self._angles, self._waves = angles, (waves, array("q", [t.data_ptr() for t in waves]))
        return structs.address(self._waves[1])
