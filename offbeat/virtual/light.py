"""The worker of timing-only runs: it computes nothing and moves nothing, it only knows how long that takes.

Rules that hold here:
- A worker has a time of its own, `now`. What happens to it alone (a unit's computation, an optimizer's
  step) moves that ahead of the run's clock, without an event. What workers share is done in the order
  of virtual time, by an event, or when the last of them is there.
- An event concerns as many workers as it can: a collective's end resumes all its members.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

from offbeat.protocols import Program, Protocol
from offbeat.worker import Batch, Handle, Worker

if TYPE_CHECKING:
    from offbeat.virtual.asynchronous import Shards
    from offbeat.virtual.timing import Simulation


class Later(Handle):
    """A handle in virtual time, shared by all workers that it concerns."""

    __slots__ = ()

    @abstractmethod
    def later(self, worker: LightWorker) -> bool:
        """`worker` waits. False: its `now` is when the wait is over, and it goes on at once. True: it goes
        on by an event."""

    def wait(self) -> None:
        raise RuntimeError("a light worker waits in virtual time: drive its protocol by advance()")


class Nothing(Later):
    """There is nothing to wait for."""

    __slots__ = ()

    def later(self, worker: LightWorker) -> bool:
        return False


NOTHING = Nothing()
NOBODY: frozenset[int] = frozenset()


class Computing(Batch, Later):
    """A unit's gradient, of this worker alone."""

    __slots__ = ("_at", "_job", "_unit")

    def __init__(self, job: Simulation):
        self._job, self._at, self._unit = job, job.clock.at, job.costs.unit

    def later(self, worker: LightWorker) -> bool:
        begun = worker.now
        seconds = self._unit(worker.rank, begun)
        worker.busy += seconds
        worker.now = end = begun + seconds
        job = self._job
        if worker.shards is None:
            job.own = True
            if end < job.horizon:
                return False
        self._at(end, worker.resume)
        return True


class LightWorker(Worker):
    """One worker of a `Simulation`.

    now: its time; what of it was not spent computing (`busy`) was waited. skipped: steps that its clock was
    put forward by. due: when it writes its next sample down (infinity: never). flagged: the stragglers, as it
    has heard of them.
    """

    __slots__ = (
        *("rank", "members", "clock", "units", "total", "now", "busy", "skipped", "due", "update"),
        *("resume", "program", "over", "then", "asked", "met", "met_at", "averages", "delay"),
        *("shards", "unheld", "after", "applies", "landed", "pulled", "read", "held"),
        *("begun", "bound_waits", "bound_wait"),
        *("flagged", "_job", "_computing", "_watching"),
    )

    rank: int
    members: Sequence[int]
    clock: int
    units: int

    def __init__(self, job: Simulation, rank: int):
        self._job, self.rank, self.members, self.total = job, rank, job.members, job.total
        self.clock = self.units = self.skipped = 0
        self.now, self.busy = job.clock.now, 0.0
        self.due = inf
        self.update: float = job.costs.update(rank)
        self.resume, self.applies = self.advance, self.applied  # bound once
        self.program: Program
        self.over = False  # the plan has come to its end
        self.then: Protocol | None = None  # what the settle under way leads to
        self.asked = 0.0  # when the protocol last asked whether to go on: a drain's begin
        self.met, self.met_at = 0.0, -1.0  # seconds of the last landing without all others, and its begin
        self.averages = 0  # begun so far
        self.delay = 1  # that was chosen
        self.flagged: frozenset[int] = frozenset()
        self._computing, self._watching = job.computing, job.watching
        # Under shards: see `asynchronous.py`.
        self.shards: Shards | None = None
        self.unheld = False  # it has no ticket yet
        self.after = -inf
        self.landed = self.pulled = 0
        self.read = self.held = 0.0
        self.begun = self.bound_waits = 0
        self.bound_wait = 0.0

    @property
    def done(self) -> int:
        """Units that it has done itself."""
        return self.clock - self.skipped

    @property
    def progress(self) -> float:
        return self.units / self.total

    @property
    def hiding(self) -> int:
        return self.delay

    @property
    def stragglers(self) -> frozenset[int]:
        calm = self.shards is not None and self.units >= self.shards.calm
        return NOBODY if calm else self.flagged

    def served(self, protocol: Protocol, at: float | int) -> bool:
        units = self._job.under(protocol, self.units)
        return units >= at if isinstance(at, int) else units / self.total >= at

    @property
    def running(self) -> bool:
        self.asked = self.now
        if self.unheld:
            self.unheld = False
            assert self.shards is not None
            self.units = next(self.shards.tickets)
        return self.units < self.total

    def advance(self) -> None:
        """Runs the plan up to a wait that an event is to end, or into the settle at its end."""
        for handle in self.program:
            if handle.later(self):  # type: ignore[attr-defined]  # a light worker gives out no others
                return
        self.over, self.then = True, None
        self._job.settlement.later(self)

    def gradient(self, mean: bool = False) -> Handle:
        return self._job.reduction if mean and len(self.members) > 1 else self._computing

    def step(self) -> None:
        self.clock += 1
        self.units += len(self.members)
        self.busy += self.update
        self.now += self.update
        if self.now >= self.due:
            self._job.diary.sample(self)

    def average(self, snapshot: bool = False) -> Handle:
        return NOTHING if len(self.members) == 1 else self._job.averages.join(self)

    def mix(self, mean: Handle, keep: float) -> None:
        return None

    def shift(self, mean: Handle, keep: float) -> None:
        return None

    def push(self, after: float = -inf, damped: bool = False) -> Handle:
        shards = self.shards
        if shards is None:  # alone
            self.step()
            return NOTHING
        self.after = after
        self.clock += 1
        self.units = next(shards.tickets)
        return shards.pushing

    def applied(self) -> None:
        """Its push is where it is to be applied, and now it is, if the bound allows."""
        shards, after = self.shards, self.after
        assert shards is not None
        times, now, rank = shards.times, shards.clock.now, self.rank
        if after != -inf:
            least = (shards.bounds or shards.bounded()).pulls.least
            if (after > least - 1 or self.held >= 0) and not shards.may_push(self, now):
                return
        seen = shards.seen[rank]
        stale = len(times) - (seen if seen >= 0 else bisect_right(times, self.read, ~seen))
        try:
            shards.staleness[stale] += 1
        except IndexError:
            shards.staleness += [0] * (stale - len(shards.staleness)) + [1]
        shards.stale[rank] += stale
        if stale > shards.stalest[rank]:
            shards.stalest[rank] = stale
        times.append(now)
        self.now = now
        bounds, landed, self.landed = shards.bounds, self.landed, self.clock
        if bounds is not None and bounds.clocks.move(landed, self.clock) and bounds.pullers:
            shards.release_pulls(bounds)
        if now >= self.due:
            self._job.diary.sample(self, stale)
        if self._watching is not None:
            self._watching.pushed(self)
        self.advance()

    def pull(self, after: float = -inf) -> Handle:
        shards = self.shards
        if shards is None:
            return NOTHING
        self.after = after
        return shards.pulling

    def exclude(self, ranks: frozenset[int]) -> Handle:
        return self._job.exclude(self, ranks)

    def readmit(self) -> Handle:
        return self._job.readmission if self._job.outside else NOTHING

    def settle(self, then: Protocol | None = None) -> Handle:
        self.then = then
        return self._job.settlement
