"""How a shard lies in its block of bytes, and a gradient in its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from offbeat.cut import Piece
from offbeat.twin import Slot

ALIGN = 64
"""Bytes. Everything in a block begins at a multiple."""
BLOCK = 1 << 16
"""Elements that are updated at a time where a push is written out: parameters, momentum and gradient fit
into a processor's second cache."""


class Run:
    """Neighbouring pieces that one tensor of the optimizer's can stand for; in `tensors`, one piece."""

    def __init__(self, first: int, pieces: Sequence[Piece], kept: tuple[Slot, ...]):
        self.first, self.pieces, self.slots = first, list(pieces), kept
        self.kind = pieces[0].kind
        self.size = sum(piece.size for piece in pieces)
        self.offset = self.gradient = self.narrow = 0  # bytes: in the block, in a gradient, in a narrow one
        self.place: dict[str, int] = {}  # of each slot's values
        self.starts = list(accumulate((piece.size for piece in pieces), initial=0))


Span = tuple[Run, int, int]
"""Pieces of a run, from one number up to another."""


class Outline:
    """How a shard of these pieces lies in its block: the same for every block and process.

    slots_of: what an optimizer keeps for a piece (`slots`). members: how many ranks the job has. extra:
    64-bit counters that the block's owner wants in it.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        slots_of: Callable[[Piece], tuple[Slot, ...]],
        way: str,
        members: int,
        extra: int = 0,
    ):
        self.pieces, self.way, self.members, self.extra = list(pieces), way, members, extra
        self.runs: list[Run] = []
        begun = 0
        for i, piece in enumerate(self.pieces):
            last = i + 1 == len(self.pieces) or self.pieces[i + 1].kind != piece.kind
            if last or way == "tensors":
                self.runs.append(Run(begun, self.pieces[begun : i + 1], slots_of(piece)))
                begun = i + 1
        self.words = 1 + 5 * members + extra
        at = aligned(8 * self.words)
        self.present = at
        at = aligned(at + len(self.pieces))
        self.values = at  # parameters come first, so that they can be sent as one stretch
        for run in self.runs:
            run.offset = at
            at = aligned(at + run.size * run.kind[2].itemsize)
        self.values_end = at
        for run in self.runs:
            for slot in run.slots:
                run.place[slot.key] = at
                at = aligned(at + self._count(run, slot) * slot.dtype.itemsize)
        self.size = at
        at = 0
        for run in self.runs:
            run.gradient = at
            at = aligned(at + run.size * run.kind[2].itemsize)
        self.gradient_size = at
        at = 0
        for run in self.runs:
            run.narrow = at
            at = aligned(at + run.size * narrowed(run.kind[2]).itemsize)
        self.narrow_size = at

    @staticmethod
    def _count(run: Run, slot: Slot) -> int:
        if slot.kind == "element":
            return run.size
        return len(run.pieces) * prod(slot.shape)

    def spans(self, missing: frozenset[int], single: bool) -> list[Span]:
        """The pieces whose parameters are not missing: as few spans as there can be, or each alone."""
        found: list[Span] = []
        for run in self.runs:
            begun = 0
            for i, piece in enumerate(run.pieces):
                if piece.parameter in missing:
                    begun = i + 1
                elif single or i + 1 == len(run.pieces) or run.pieces[i + 1].parameter in missing:
                    found.append((run, begun, i + 1))
                    begun = i + 1
        return found

    def values_of(self, region: Tensor) -> list[Tensor]:
        """Every piece's parameter, in a copy of a block's stretch from `values` to `values_end`."""
        return self.cut_up([region[run.offset - self.values :] for run in self.runs])

    def cut_up(self, begins: Sequence[Tensor]) -> list[Tensor]:
        """Every piece's values, where each run's lie from `begins` on."""
        return [
            view(begin, start * piece.dtype.itemsize, piece.shape, piece.dtype)
            for run, begin in zip(self.runs, begins, strict=True)
            for piece, start in zip(run.pieces, run.starts, strict=False)
        ]


def narrowed(dtype: torch.dtype) -> torch.dtype:
    """What travels of a gradient where the wire is to carry half the bytes."""
    return torch.bfloat16 if dtype == torch.float32 else dtype


class Gradient:
    """A gradient of a shard's pieces, in a region of `outline.gradient_size` bytes."""

    def __init__(self, outline: Outline, region: Tensor):
        self._outline, self.region = outline, region
        self.runs = [view(region, run.gradient, (run.size,), run.kind[2]) for run in outline.runs]
        self.pieces = outline.cut_up([region[run.gradient :] for run in outline.runs])
        self._spans: dict[Span, Tensor] = {}

    def of(self, span: Span) -> Tensor:
        """The span's gradient."""
        if span not in self._spans:
            run, i, j = span
            start, size = run.starts[i], run.starts[j] - run.starts[i]
            shape = run.pieces[i].shape if j - i == 1 else (size,)
            at = run.gradient + start * run.kind[2].itemsize
            self._spans[span] = view(self.region, at, shape, run.kind[2])
        return self._spans[span]

    @cached_property
    def blocks(self) -> list[list[Tensor]]:
        """The runs in parts that fit a processor's cache."""
        return [list(run.split(BLOCK)) for run in self.runs]

    def narrow(self) -> Tensor:
        """The same in `outline.narrow_size` bytes: float32 as bfloat16."""
        small = torch.empty(self._outline.narrow_size, dtype=torch.uint8)
        for mine, other in zip(self.runs, self._narrow_runs(small), strict=True):
            other.copy_(mine)
        return small

    def widen(self, small: Tensor) -> None:
        """Takes what `narrow` made."""
        for mine, other in zip(self.runs, self._narrow_runs(small), strict=True):
            mine.copy_(other)

    def _narrow_runs(self, small: Tensor) -> list[Tensor]:
        return [view(small, r.narrow, (r.size,), narrowed(r.kind[2])) for r in self._outline.runs]


def aligned(at: int) -> int:
    """The next place, in bytes, where something may begin."""
    return -(-at // ALIGN) * ALIGN


def view(block: Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Bytes from `offset` on as a tensor that aliases them."""
    return block[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)
