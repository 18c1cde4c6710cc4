"""A parameter shard: one part of a model's parameters, a real `torch.optim` optimizer over them, and who
has pushed and pulled what. How bytes get here is not its business.

A shard's whole content lies in one block of bytes that its owner provides, so that it can be shared between
processes, copied and sent as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import inf, prod
from types import MethodType
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.cut import ELEMENTWISE, Piece, copy, part, shaped
from offbeat.outline import BLOCK, Gradient, Outline, Run, Span, view
from offbeat.twin import Settings, Slot, strange, twin

KEPT = 8
"""Sets of optimizers that a shard keeps, one for each pattern of missing gradients."""


@dataclass(frozen=True)
class Push:
    """What travels with a gradient.

    member: the pusher's rank; clock: its clock after this push; seen: the shard's version at its last pull;
    after: applied once every member has taken parameters at clock `after` or later; damped: the learning
    rate is divided by 1 + staleness; settings: the step's hyper-parameters (`Settings`); missing: a bit
    for each of the model's parameters, set where it has no gradient (b"" for none).
    """

    member: int
    clock: int
    seen: int
    after: float = -inf
    damped: bool = False
    settings: tuple[float, ...] = ()
    missing: bytes = b""


class _Stepper:
    """Optimizers bound to one block. Each of their tensors stands for a span, neighbouring pieces."""

    def __init__(
        self, outline: Outline, block: Tensor, optimizers: Sequence[Optimizer], spans: Sequence[Span]
    ):
        self.spans = list(spans)
        self.parameters: list[nn.Parameter] = []
        self.slots: list[tuple[Slot, ...]] = []
        self.views: list[dict[str, Tensor]] = []
        self.rows: list[list[numpy.ndarray[Any, Any]]] = []  # scalars of all the span's pieces
        groups: dict[tuple[int, int], dict[str, Any]] = {}
        for run, i, j in spans:
            o, g, dtype = run.kind
            start = run.starts[i]
            shape = run.pieces[i].shape if j - i == 1 else (run.starts[j] - start,)
            p = nn.Parameter(view(block, run.offset + start * dtype.itemsize, shape, dtype))
            views, rows = {}, []
            for slot in run.slots:
                place, width = run.place[slot.key], slot.dtype.itemsize
                if slot.kind == "element":
                    views[slot.key] = view(block, place + start * width, shape, slot.dtype)
                else:
                    each = prod(slot.shape) * width
                    views[slot.key] = view(block, place + i * each, slot.shape, slot.dtype)
                    if j - i > 1:
                        rows.append(view(block, place + i * width, (j - i,), slot.dtype).numpy())
            self.parameters.append(p)
            self.slots.append(run.slots)
            self.views.append(views)
            self.rows.append(rows)
            if (o, g) not in groups:
                groups[o, g] = {**optimizers[o].param_groups[g], "params": []}
            groups[o, g]["params"].append(p)
        self.owner = [run.kind[0] for run, _, _ in spans]
        self.optimizers: dict[int, Optimizer] = {}
        self.groups: dict[tuple[int, int], dict[str, Any]] = {}
        for o in sorted({o for o, _ in groups}):
            mine = [key for key in sorted(groups) if key[0] == o]
            self.optimizers[o] = twin(optimizers[o], [groups[key] for key in mine])
            self.groups.update(zip(mine, self.optimizers[o].param_groups, strict=True))
        self.numbers = any(slot.kind == "number" for row in self.slots for slot in row)
        # Those of torch change their state in place; another may put new tensors there.
        self.replaces = self.numbers or any(type(one) not in ELEMENTWISE for one in optimizers)
        self.bound = [False] * len(self.parameters)
        # Without torch's wrapper for profilers and hooks, of which a twin has none.
        self.steps = [_plain_step(one) for one in self.optimizers.values()]
        self.written: tuple[Sequence[float], float] | None = None

    def set(self, settings: Settings, push: Push, staleness: int) -> None:
        """The optimizers get the push's hyper-parameters."""
        lr = 1 / (1 + staleness) if push.damped else 1.0
        if self.written != (push.settings, lr):
            settings.write(self.groups, push.settings, lr)
            self.written = push.settings, lr

    def uniform(self, present: numpy.ndarray[Any, Any]) -> bool:
        """Whether the pieces of each span may be treated as one."""
        for (run, i, j), rows in zip(self.spans, self.rows, strict=True):
            if j - i > 1:
                there = present[run.first + i : run.first + j]
                if (there != there[0]).any() or any((row != row[0]).any() for row in rows):
                    return False
        return True

    def step(self, gradients: Sequence[Tensor], present: numpy.ndarray[Any, Any]) -> None:
        for i, (p, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            p.grad = gradient
            there = bool(present[self.spans[i][0].first + self.spans[i][1]])
            if self.bound[i] != there or self.numbers:
                self._bind(i, there)
        with torch.no_grad():
            for step in self.steps:
                step()
        for i in range(len(self.spans)):
            if not self.bound[i] or self.replaces:
                self._keep(i, present)
            for row in self.rows[i]:
                row[1:] = row[0]

    def _bind(self, i: int, present: bool) -> None:
        """The optimizer's state is what the block holds, or nothing."""
        state = self.optimizers[self.owner[i]].state
        state.pop(self.parameters[i], None)
        if present:
            state[self.parameters[i]] = {
                slot.key: slot.type(float(place)) if slot.kind == "number" else place
                for slot, place in zip(self.slots[i], self.views[i].values(), strict=True)
            }
        self.bound[i] = present

    def _keep(self, i: int, present: numpy.ndarray[Any, Any]) -> None:
        """What the optimizer has made goes into the block."""
        owner = self.optimizers[self.owner[i]]
        state = owner.state.get(self.parameters[i])
        if not state:
            return
        known = {key for key, value in state.items() if value is not None}
        if known != set(self.views[i]):
            raise strange(owner, known, set(self.views[i]))
        for slot in self.slots[i]:
            value, place = state[slot.key], self.views[i][slot.key]
            if slot.kind == "number":
                place.fill_(float(value))
            elif value.data_ptr() != place.data_ptr():
                place.copy_(value)
                state[slot.key] = place
        run, first, last = self.spans[i]
        present[run.first + first : run.first + last] = 1
        self.bound[i] = True


def sgd(p2: Tensor, m2: Tensor, p: Tensor, m: Tensor, g: Tensor, group: dict[str, Any]) -> None:
    """torch.optim.SGD's step from parameters p and momentum m to p2 and m2: the same operations in the same
    order, so the same bits."""
    if group["maximize"]:
        g = -g
    if group["weight_decay"] != 0:
        g = g.add(p, alpha=group["weight_decay"])
    if group["momentum"] == 0:
        m2.copy_(m)
    else:
        torch.mul(m, group["momentum"], out=m2)
        m2.add_(g, alpha=1 - group["dampening"])
        g = g.add(m2, alpha=group["momentum"]) if group["nesterov"] else m2
    torch.add(p, g, alpha=-group["lr"], out=p2)


class Shard:
    """A shard whose content is `block` (`outline.size` bytes of the CPU's memory, zero at first).

    Counters, all exact: `version` (pushes applied), and for each rank `clock` (steps), `pulled` (its clock
    at its last pull), `pushes` (applied, of its own), `at` (the version right after its last push),
    `resting` (nobody waits for it). `extra` are the owner's.
    """

    def __init__(self, outline: Outline, block: Tensor, optimizers: Sequence[Optimizer], settings: Settings):
        self.outline, self.block = outline, block
        self._optimizers, self._settings = optimizers, settings
        self._words = block[: outline.values]  # with `present`
        words = block[: 8 * outline.words].view(torch.int64).numpy()
        m = outline.members
        self._head = words[:1]  # version
        self.clock, self.pulled, self.pushes, self.at, self.resting = (
            words[1 + k * m : 1 + (k + 1) * m] for k in range(5)
        )
        self.extra = words[1 + 5 * m :]
        self.present = block[outline.present : outline.present + len(outline.pieces)].numpy()
        self.values = block[outline.values : outline.values_end]
        self.parameters = outline.values_of(self.values)
        self._steppers: dict[tuple[frozenset[int], bool], _Stepper] = {}

    @property
    def version(self) -> int:
        return int(self._head[0])

    # Who may go

    def may_push(self, after: float) -> bool:
        """Whether every member has taken parameters at clock `after` or later."""
        return after == -inf or bool(((self.pulled >= after) | (self.resting != 0)).all())

    def may_pull(self, after: float) -> bool:
        """Whether every member's clock is at least `after`."""
        return after == -inf or bool(((self.clock >= after) | (self.resting != 0)).all())

    def pull(self, member: int) -> int:
        """`member` takes the parameters now; returns their version."""
        self.pulled[member] = self.clock[member]
        self.resting[member] = 0
        return self.version

    # A push

    def push(self, push: Push, gradient: Gradient) -> int:
        """Applies a gradient with the push's own hyper-parameters; returns its staleness, the number of
        updates applied since its parameters were pulled."""
        staleness = self.version - push.seen
        missing = _bits(push.missing)
        if missing and all(piece.parameter in missing for piece in self.outline.pieces):
            self._count(push)
            return staleness
        stepper = self._stepper(missing)
        stepper.set(self._settings, push, staleness)
        stepper.step([gradient.of(span) for span in stepper.spans], self.present)
        self._count(push)
        return staleness

    def push_from(self, now: Shard, push: Push, gradient: Gradient) -> None:
        """The same as copying `now` into this shard and pushing here; for SGD with momentum in two thirds
        of the memory traffic, to the bit."""
        if push.missing or not now.sgd or not now.present.all():
            self.block.copy_(now.block)
            self.push(push, gradient)
            return
        self._words.copy_(now._words)
        staleness = self.version - push.seen
        stepper = self._stepper(frozenset())
        stepper.set(self._settings, push, staleness)
        with torch.no_grad():
            for i, (mine, theirs) in enumerate(zip(self._sgd_blocks, now._sgd_blocks, strict=True)):
                group = stepper.groups[self.outline.runs[i].kind[:2]]
                for (p2, m2), (p, m), g in zip(mine, theirs, gradient.blocks[i], strict=True):
                    sgd(p2, m2, p, m, g, group)
        self._count(push)

    @cached_property
    def sgd(self) -> bool:
        """Whether all is torch's own SGD with momentum."""
        return self.outline.way == "elements" and all(
            type(self._optimizers[run.kind[0]]) is torch.optim.SGD
            and list(run.place) == ["momentum_buffer"]
            and run.kind[2].is_floating_point
            for run in self.outline.runs
        )

    @cached_property
    def _sgd_blocks(self) -> list[list[tuple[Tensor, Tensor]]]:
        found = []
        for run in self.outline.runs:
            places = run.offset, run.place["momentum_buffer"]
            parts = [view(self.block, at, (run.size,), run.kind[2]).split(BLOCK) for at in places]
            found.append(list(zip(*parts, strict=True)))
        return found

    def _count(self, push: Push) -> None:
        m = push.member
        self._head[0] += 1
        self.clock[m] = push.clock
        self.pushes[m] += 1
        self.at[m] = self.version
        self.resting[m] = 0

    def _stepper(self, missing: frozenset[int]) -> _Stepper:
        """Optimizers for a push that lacks the gradients of `missing`."""
        for single in (False, True):
            key = missing, single
            if key not in self._steppers:
                if len(self._steppers) >= KEPT:
                    self._steppers.pop(next(iter(self._steppers)))
                spans = self.outline.spans(missing, single)
                self._steppers[key] = _Stepper(self.outline, self.block, self._optimizers, spans)
            if single or self._steppers[key].uniform(self.present):
                break
        return self._steppers[key]

    # From a replica and back

    def begin(self, clock: int, members: Sequence[int]) -> None:
        """Nobody has pushed yet; all `members` are at `clock` and hold the parameters."""
        self._head[0] = 0
        self.clock[:] = self.pulled[:] = clock
        self.pushes[:] = self.at[:] = 0
        self.resting[:] = 1
        self.resting[list(members)] = 0
        self.extra[:] = 0

    def load(self, parameters: Sequence[nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
        """Cuts this shard's part out of a replica: parameters and optimizer state."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for run in self.outline.runs:
            for i, piece in enumerate(run.pieces):
                p, optimizer = parameters[piece.parameter], optimizers[piece.optimizer]
                state = {k: v for k, v in (optimizer.state.get(p) or {}).items() if v is not None}
                targets.append(shaped(piece, self.parameters[run.first + i], p))
                sources.append(part(piece, p.detach(), p))
                expected = {slot.key for slot in run.slots}
                if state and state.keys() != expected:
                    raise strange(optimizer, set(state), expected)
                self.present[run.first + i] = bool(state)
                for slot in run.slots if state else ():
                    entry, value = self._entry(run, i, slot), state[slot.key]
                    if slot.kind == "element":
                        targets.append(shaped(piece, entry, p))
                        sources.append(part(piece, value, p))
                    elif slot.kind == "tensor":
                        entry.copy_(value)
                    else:
                        entry.fill_(value)
        copy(targets, sources)

    def store(self, write: Callable[[Piece, Slot | None, Tensor], None]) -> None:
        """Gives out this shard's part: `write(piece, None, values)` for a piece's parameter, and
        `write(piece, slot, values)` for each entry of its state."""
        for run in self.outline.runs:
            for i, piece in enumerate(run.pieces):
                write(piece, None, self.parameters[run.first + i])
                if self.present[run.first + i]:
                    for slot in run.slots:
                        write(piece, slot, self._entry(run, i, slot))

    def _entry(self, run: Run, i: int, slot: Slot) -> Tensor:
        place, width = run.place[slot.key], slot.dtype.itemsize
        if slot.kind == "element":
            piece = run.pieces[i]
            return view(self.block, place + run.starts[i] * width, piece.shape, slot.dtype)
        return view(self.block, place + i * prod(slot.shape) * width, slot.shape, slot.dtype)


def _plain_step(optimizer: Optimizer) -> Callable[[], object]:
    step: Any = type(optimizer).step
    return MethodType(step.__wrapped__, optimizer) if getattr(step, "hooked", False) else optimizer.step


@lru_cache(maxsize=64)
def _bits(mask: bytes) -> frozenset[int]:
    """The numbers of the bits that are set."""
    return frozenset(8 * i + bit for i, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1)
