"""How a model's parameters are cut into shards, and tensors laid flat.

elements  all parameters are laid end to end and cut into slices of equal size. Only for optimizers whose
          update of an element depends on that element alone: `ELEMENTWISE`, by exact type, or any that the
          user says is (`Synchronizer(..., cut="elements")`).
tensors   each shard gets whole parameters, balanced by size. For every other optimizer (LARS, Muon,
          Adafactor, ...), and right for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    [
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.Adagrad,
        optim.Adadelta,
        optim.RMSprop,
        optim.Rprop,
        optim.ASGD,
    ]
)
"""Optimizers of torch whose update of an element depends on that element alone."""

CUTS = ("elements", "tensors")


@dataclass(frozen=True)
class Piece:
    """A parameter, or elements `start` to `stop` of it laid flat, in one shard."""

    parameter: int
    optimizer: int
    group: int
    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def kind(self) -> tuple[int, int, torch.dtype]:
        return self.optimizer, self.group, self.dtype


def way_of(optimizers: Sequence[Optimizer], asked: str | None = None) -> str:
    """How parameters are cut for these optimizers: see the module's text."""
    if asked is not None:
        if asked not in CUTS:
            raise ValueError(f"cut is one of {' and '.join(CUTS)}; got cut={asked!r}")
        return asked
    return "elements" if all(type(one) in ELEMENTWISE for one in optimizers) else "tensors"


def cut(
    parameters: Sequence[nn.Parameter], optimizers: Sequence[Optimizer], shards: int, way: str
) -> list[list[Piece]]:
    """The pieces of each of `shards` shards, the same on every worker. Parameters that no optimizer has
    are in none: nothing ever updates them."""
    places: dict[int, tuple[int, int]] = {}
    for o, optimizer in enumerate(optimizers):
        for g, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                if places.setdefault(id(p), (o, g)) != (o, g):
                    raise ValueError(
                        f"a parameter of shape {tuple(p.shape)} is in two optimizers: asp and ssp let each "
                        f"parameter be stepped by one"
                    )
    whole = [
        Piece(number, *places[id(p)], 0, p.numel(), tuple(p.shape), p.dtype)
        for number, p in enumerate(parameters)
        if id(p) in places
    ]
    # Those of one group and dtype are neighbours, so that a step can treat them as one tensor.
    whole.sort(key=lambda piece: (piece.optimizer, piece.group, str(piece.dtype), piece.parameter))
    return _by_elements(whole, shards) if way == "elements" else _by_tensors(whole, shards)


def _by_elements(whole: Sequence[Piece], shards: int) -> list[list[Piece]]:
    total = sum(piece.size for piece in whole)
    step = -(-total // shards // 16) * 16 if total >= 16 * shards else -(-total // shards)
    found: list[list[Piece]] = [[] for _ in range(shards)]
    at = 0
    for piece in whole:
        start = 0
        while start < piece.size:
            shard = (at + start) // step if step else 0
            stop = min(piece.size, (shard + 1) * step - at)
            found[shard].append(
                Piece(piece.parameter, *piece.kind[:2], start, stop, (stop - start,), piece.dtype)
            )
            start = stop
        at += piece.size
    return found


def _by_tensors(whole: Sequence[Piece], shards: int) -> list[list[Piece]]:
    found: list[list[Piece]] = [[] for _ in range(shards)]
    filled = [0] * shards
    for number, piece in sorted(enumerate(whole), key=lambda pair: (-pair[1].size, pair[0])):
        least = filled.index(min(filled))
        found[least].append(whole[number])
        filled[least] += max(piece.size, 1)
    return [sorted(pieces, key=whole.index) for pieces in found]


# Tensors laid flat


def flat(tensor: Tensor, like: Tensor | None) -> Tensor:
    """`tensor` as one dimension, in the order in which `like` lies in memory (None: in its logical order):
    a view where `tensor` lies that way, else a copy."""
    tensor = tensor.detach()
    if like is None or like.is_contiguous() or not dense(like):
        return tensor.reshape(-1)
    if tensor.stride() != like.stride():
        tensor = torch.empty_like(like, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def dense(tensor: Tensor) -> bool:
    """Whether its elements fill a stretch of memory without gaps, in whatever order of dimensions."""
    expected = 1
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(pair for pair in pairs if pair[1] != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def part(piece: Piece, tensor: Tensor, p: Tensor) -> Tensor:
    """The piece's share of `tensor`, which belongs to parameter p and has its shape: the whole, or a stretch
    of it laid flat."""
    return tensor if piece.size == p.numel() else flat(tensor, p)[piece.start : piece.stop]


def shaped(piece: Piece, values: Tensor, p: Tensor) -> Tensor:
    """The piece's values, which lie flat in a shard, in the shape that `part` has."""
    if piece.size != p.numel():
        return values.view(piece.size)
    if len(piece.shape) != 1 or p.dim() == 1 or p.is_contiguous():
        return values.view(p.shape)
    return values.as_strided(p.shape, p.stride(), values.storage_offset())


def copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source into its target, without a gradient."""
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(list(targets), list(sources))
