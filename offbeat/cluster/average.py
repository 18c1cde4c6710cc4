"""Averages of parameters and floating-point buffers over the members, while training goes on.

One average is one asynchronous all-reduce of a flat snapshot in its own group (chunks are slower, see
docs/design.md). With a `wire` dtype, what travels is each worker's change since the last average, in
fewer bits: the last average is the same on every member, so nothing of the parameters themselves is
rounded away, and what rounding takes off a change stays in the worker's own parameters.

Memory beside the model, in flat copies of it: 1; with a snapshot 2; with a 16-bit wire 1.5 and 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offbeat.cluster.epoch import Epoch
from offbeat.cluster.flat import Layout, copy
from offbeat.site import now
from offbeat.worker import Handle


class Averager:
    """Starts averages of what `tensors()` lists (its shapes and order never change)."""

    def __init__(self, tensors: Callable[[], Sequence[Tensor]], wire: torch.dtype | None):
        self.tensors, self.wire = tensors, wire
        self.layout = Layout(tensors())
        self.reference: list[Tensor] | None = None
        self._pool: list[list[Tensor]] = []

    def refer(self) -> None:
        """Call while all members hold the same: with a `wire`, changes count from here."""
        if self.wire is not None:
            self.reference = self.reference or self.layout.empty()
            copy(self.layout.views(self.reference), self.tensors())

    def start(self, epoch: Epoch, snapshot: bool, timed: bool = False) -> Mean:
        """Starts the average of a snapshot of the tensors over the epoch's members. timed: how long it takes
        is to be known."""
        return Mean(self, epoch, snapshot, timed)

    def release(self) -> None:
        """Gives the buffers' memory back."""
        self._pool, self.reference = [], None

    def take(self) -> list[Tensor]:
        return self._pool.pop() if self._pool else self.layout.empty(self.wire)

    def give(self, buffers: list[Tensor]) -> None:
        self._pool.append(buffers)


class Mean(Handle):
    """An average under way. After `wait`, `mix` or `shift` merges it, once."""

    def __init__(self, averager: Averager, epoch: Epoch, snapshot: bool, timed: bool = False):
        self._averager, self._size = averager, epoch.size
        self._sum = averager.take()
        views = averager.layout.views(self._sum)
        if averager.reference is None:
            copy(views, averager.tensors())
        else:
            with torch.no_grad():
                last = averager.layout.views(averager.reference)
                for view, tensor, old in zip(views, averager.tensors(), last, strict=True):
                    torch.sub(tensor, old, out=view)
        self._sent: list[Tensor] | None = None
        if snapshot:
            self._sent = averager.take()
            for sent, buffer in zip(self._sent, self._sum, strict=True):
                sent.copy_(buffer)
        self._begun = now()
        self._works = [epoch.sum(buffer, "averages") for buffer in self._sum]
        if timed:
            for work in self._works:
                work.note_end()

    @property
    def took(self) -> float:
        """Seconds of the exchange, once it was waited for, where it was `timed`."""
        moment = now()
        ends = [moment if work.ended is None else work.ended for work in self._works]
        return max(max(ends) - self._begun, 0.0)

    def look(self) -> None:
        """Another step has been taken."""
        for work in self._works:
            work.look()

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        if self._averager.reference is None:
            for buffer in self._sum:
                buffer.div_(self._size)
        else:
            for old, buffer in zip(self._averager.reference, self._sum, strict=True):
                old.add_(buffer, alpha=1 / self._size)

    def mix(self, keep: float) -> None:
        """x ← keep·x + (1 − keep)·mean, for every tensor x."""
        averager = self._averager
        means = averager.layout.views(averager.reference or self._sum)
        if keep == 0:
            copy(averager.tensors(), means)
        else:
            with torch.no_grad():
                torch._foreach_lerp_(list(averager.tensors()), means, 1 - keep)
        self._done()

    def shift(self, keep: float) -> None:
        """x ← x + (1 − keep)·(mean − snapshot), for every tensor x."""
        averager, share = self._averager, 1 - keep
        if self._sent is None:
            raise RuntimeError("shift needs the snapshot: start the average with average(snapshot=True)")
        sums, sent = averager.layout.views(self._sum), averager.layout.views(self._sent)
        with torch.no_grad():
            if averager.reference is None:
                torch._foreach_sub_(sums, sent)
                torch._foreach_add_(list(averager.tensors()), sums, alpha=share)
            else:  # the reference cancels out of mean − snapshot
                for tensor, total, own in zip(averager.tensors(), sums, sent, strict=True):
                    tensor.add_(total, alpha=share / self._size).sub_(own, alpha=share)
        self._done()

    def _done(self) -> None:
        self._averager.give(self._sum)
        if self._sent is not None:
            self._averager.give(self._sent)
        self._sum, self._sent = [], None
