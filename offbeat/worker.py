"""The port between a protocol and an engine: read this before writing a protocol.

A protocol says *when* workers wait for each other, a worker says *what* happens. The verbs below
start something and return at once; those that take time return a `Handle`, and a protocol waits by
yielding it. Yielding is the only place where a protocol waits, so the same generator runs over real
processes, over virtual workers in virtual time, and over a list in a unit test.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat.protocols import Protocol


class Handle(ABC):
    """Something that was started. `wait` is the one place where engines differ."""

    @abstractmethod
    def wait(self) -> None:
        """Returns when it has happened; raises what went wrong if it could not."""


class Ready(Handle):
    """A handle of something that had nothing to wait for."""

    def wait(self) -> None:
        return None


class Batch(Handle):
    """The handle of `gradient`: whoever drives the protocol hands control back to the user's loop,
    and resumes the protocol when the user calls `sync.step()`."""

    def wait(self) -> None:
        raise RuntimeError("a batch is the user's to compute: drive the protocol by sync.step()")


class Worker(ABC):
    """One worker, as its protocol sees it. Symbols: x are this worker's parameters."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """This worker's number, 0 to `offbeat.world_size() - 1`; it never changes."""

    @property
    @abstractmethod
    def members(self) -> Sequence[int]:
        """Ranks of the workers that take part now, ascending."""

    @property
    @abstractmethod
    def clock(self) -> int:
        """Optimizer steps this worker has taken (never micro-batches), or pushes. Under shards a fast
        worker's runs ahead; after a settle all members count on from the same."""

    @property
    @abstractmethod
    def units(self) -> int:
        """Mini-batches done by all workers together. With replicas the same on every member at equal
        clocks. Under shards mini-batches are dealt as numbered tickets, each to one worker, and this is
        the number of the ticket that this worker holds: how many were dealt before its own. So it differs
        between members, until they settle."""

    @property
    @abstractmethod
    def progress(self) -> float:
        """Share of the job's work done by all workers together: `units / total`."""

    @property
    @abstractmethod
    def running(self) -> bool:
        """Whether there is another step to take. A protocol ends its loop, and then drains what it
        has in flight, when this turns false: at the end, at a switch, at a checkpoint. Under shards it is
        true while this worker's ticket lies before the boundary, so every earlier ticket is done by
        exactly one worker, and members turn at different moments."""

    @property
    def stragglers(self) -> frozenset[int]:
        """Ranks that the detector has flagged, the same on all members at equal clocks; of those that were
        flagged when shards took charge, under shards, all until nobody is slow any more."""
        return frozenset()

    @property
    def hiding(self) -> int:
        """How many steps hide an average, as the members have measured it (1 before they have): the same on
        all members at equal clocks. It changes when an average lands."""
        return 1

    def served(self, protocol: Protocol, at: float | int) -> bool:
        """Whether `at` (a share of the job, or units) has been done under `protocol`, whatever was done
        under others in between."""
        return passed(self, at)

    @property
    def looked_at(self) -> int | None:
        """The clock of the last `look`."""
        return None

    def asynchrony_is_safe(self, count: int, margin: float, by: float) -> bool:
        """Whether updates by gradients as old as ASP's would be stable from here to the end, by the largest
        of the last `count` looks (`offbeat.policies.auto`); or from the share `by` of the job on are made so,
        by a smaller learning rate. The same on all members at equal clocks; once true it stays so."""
        return False

    def look(self) -> Handle:
        """Asks the user's loop for a gradient more, on the batch that comes next, a little way along the
        steepest curvature; `step` compares it with the gradient itself and notes the curvature. Yielding the
        handle gives control back to the loop, or returns at once where that cannot be.

        Raises NotImplementedError on an engine without gradients."""
        raise NotImplementedError(f"{type(self).__name__} computes no gradients, so auto has nothing to see")

    @abstractmethod
    def gradient(self, mean: bool = False) -> Handle:
        """Asks the user's loop for the next gradient. When the coming backward has returned, `.grad`
        holds this worker's own gradient, or the members' mean (reduced bucket by bucket during
        backward). Yielding the handle gives control back to the user's loop.

        A checkpoint, or the worker's leaving, resumes a protocol that waits here without a gradient: up
        to the next look at `running` (false then) `step`, `push` and `pull` do nothing and `average`
        starts nothing new, so that what follows the loop can drain. A protocol counts by `clock`, not in
        variables."""

    @abstractmethod
    def step(self) -> None:
        """The user's optimizer steps with what is in `.grad`. Ticks `clock`."""

    @abstractmethod
    def average(self, snapshot: bool = False) -> Handle:
        """Starts averaging a snapshot of parameters and floating-point buffers over the members.
        `snapshot=True` also keeps what this worker sent, which `shift` needs."""

    @abstractmethod
    def mix(self, mean: Handle, keep: float) -> None:
        """x ← keep·x + (1 − keep)·mean, once `mean` was waited for."""

    @abstractmethod
    def shift(self, mean: Handle, keep: float) -> None:
        """x ← x + (1 − keep)·(mean − snapshot): the steps taken since the snapshot are not scaled."""

    def push(self, after: float = -inf, damped: bool = False) -> Handle:
        """Sends this worker's gradient to the shards, which apply it with their own optimizer as soon as
        every member has taken parameters at a clock of at least `after` (members that are through with
        the protocol don't count). Waiting for it waits until it is applied. Ticks `clock`.
        `damped=True` divides its learning rate by 1 + staleness; the staleness of a push is the number
        of updates that were applied since this worker took its parameters.

        Raises NotImplementedError on an engine without shards."""
        raise self._without_shards()

    def pull(self, after: float = -inf) -> Handle:
        """x ← the shards' newest parameters, as soon as every member's clock is at least `after` (members
        that are through with the protocol don't count).

        Raises NotImplementedError on an engine without shards."""
        raise self._without_shards()

    def exclude(self, ranks: frozenset[int]) -> Handle:
        """The members go on without `ranks`, while all hold the same. For one of those the wait is over when
        the members call them back; it then holds what they hold, at their clock.

        Raises NotImplementedError on an engine whose members don't change."""
        raise NotImplementedError(f"the members of {type(self).__name__} don't change")

    def readmit(self) -> Handle:
        """All that were excluded are members again and hold what the members hold; nothing if none was."""
        return Ready()

    def _without_shards(self) -> NotImplementedError:
        return NotImplementedError(
            f"{type(self).__name__} has no shards to push to or pull from, which asp and ssp need: use a "
            f"plan of protocols on replicas, such as bsp, local and dasgd"
        )

    @abstractmethod
    def settle(self, then: Protocol | None = None) -> Handle:
        """Nothing in flight; every member holds the same parameters, buffers and optimizer state (a
        copy when they already do, a mean when they don't). `then` is what comes next, by where the job is
        afterwards (`then.current`): the engine carries the hyper-parameters over to it and journals the
        switch."""


class While(Worker):
    """The same worker, `running` only as long as `condition` holds."""

    def __init__(self, worker: Worker, condition: Callable[[], bool]):
        self._worker, self._condition = worker, condition

    @property
    def running(self) -> bool:
        return self._worker.running and self._condition()

    rank = property(lambda self: self._worker.rank)
    members = property(lambda self: self._worker.members)
    clock = property(lambda self: self._worker.clock)
    units = property(lambda self: self._worker.units)
    progress = property(lambda self: self._worker.progress)
    stragglers = property(lambda self: self._worker.stragglers)
    hiding = property(lambda self: self._worker.hiding)
    looked_at = property(lambda self: self._worker.looked_at)

    def asynchrony_is_safe(self, count: int, margin: float, by: float) -> bool:
        return self._worker.asynchrony_is_safe(count, margin, by)

    def look(self) -> Handle:
        return self._worker.look()

    def served(self, protocol: Protocol, at: float | int) -> bool:
        return self._worker.served(protocol, at)

    def gradient(self, mean: bool = False) -> Handle:
        return self._worker.gradient(mean)

    def step(self) -> None:
        self._worker.step()

    def average(self, snapshot: bool = False) -> Handle:
        return self._worker.average(snapshot)

    def mix(self, mean: Handle, keep: float) -> None:
        self._worker.mix(mean, keep)

    def shift(self, mean: Handle, keep: float) -> None:
        self._worker.shift(mean, keep)

    def push(self, after: float = -inf, damped: bool = False) -> Handle:
        return self._worker.push(after, damped)

    def pull(self, after: float = -inf) -> Handle:
        return self._worker.pull(after)

    def settle(self, then: Protocol | None = None) -> Handle:
        return self._worker.settle(then)

    def exclude(self, ranks: frozenset[int]) -> Handle:
        return self._worker.exclude(ranks)

    def readmit(self) -> Handle:
        return self._worker.readmit()


class Until(While):
    """The same worker, `running` only up to a boundary: a share of the progress, or units."""

    def __init__(self, worker: Worker, at: float | int):
        super().__init__(worker, lambda: not passed(worker, at))


def passed(worker: Worker, at: float | int) -> bool:
    """Whether the job has come to `at`: units if an integer, else a share of the progress."""
    return worker.units >= at if isinstance(at, int) else worker.progress >= at
