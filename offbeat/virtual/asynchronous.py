"""The shards of a timing-only run: tickets, versions, staleness, SSP's bounds. Their queues and links are the
cluster's `Traffic`."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import count
from math import ceil, inf
from typing import TYPE_CHECKING

from offbeat.virtual.light import Later, LightWorker

if TYPE_CHECKING:
    from offbeat.virtual.timing import Simulation


class Slowest:
    """The least of many counters that only go up; no counter is looked at to know it."""

    __slots__ = ("_counts", "least")

    def __init__(self, values: Iterable[int]):
        self._counts: dict[int, int] = dict(Counter(values))
        self.least: float = min(self._counts, default=inf)

    def move(self, old: int, new: int) -> bool:
        """One goes from `old` to `new`. Returns whether that was what the least waited for."""
        counts = self._counts
        counts[new] = counts.get(new, 0) + 1
        left = counts[old] - 1
        if left:
            counts[old] = left
            return False
        return self._emptied(old)

    def leave(self, value: int) -> bool:
        """One that stands at `value` doesn't count any more."""
        counts = self._counts
        left = counts[value] - 1
        if left:
            counts[value] = left
            return False
        return self._emptied(value)

    def _emptied(self, value: int) -> bool:
        del self._counts[value]
        if value != self.least:
            return False
        self.least = min(self._counts, default=inf)
        return True


class Bounds:
    """Who may go, as `offbeat.shard.Shard` says it: pushes wait until all have taken parameters at a clock,
    pulls until all have come to one. Kept from the first push or pull on that has a bound.

    reads: at what time the last worker's parameters of a clock were read, for clocks from the slowest on
    whose time was to come.
    """

    __slots__ = ("clocks", "pullers", "pulls", "pushers", "reads")

    def __init__(self, workers: Iterable[LightWorker]):
        workers = list(workers)
        self.clocks = Slowest(worker.landed for worker in workers)
        self.pulls = Slowest(worker.pulled for worker in workers)
        self.reads: dict[int, float] = {}
        for worker in workers:
            self.reads[worker.pulled] = max(self.reads.get(worker.pulled, 0.0), worker.read)
        self.pullers: dict[int, list[LightWorker]] = {}  # by the clock that they wait for
        self.pushers: dict[int, list[LightWorker]] = {}

    def push_at(self, after: int) -> float:
        """From when on a push may be applied; infinity where that is not known yet."""
        least = self.pulls.least
        if after < least:
            return 0.0
        return self.reads.get(after, 0.0) if after == least else inf

    def reading(self, old: int, new: int, at: float) -> None:
        """A worker that has the parameters of clock `old` is to have those of `new`, which are read `at`."""
        for clock in range(old + 1, new + 1):
            self.reads[clock] = max(at, self.reads.get(clock, 0.0))


def released(waiting: dict[int, list[LightWorker]], least: float) -> Iterator[tuple[int, LightWorker]]:
    """Takes out whoever waits for a clock up to `least`: the clock and the worker."""
    for after in sorted(after for after in waiting if after <= least):
        for worker in waiting.pop(after):
            yield after, worker


class Pushing(Later):
    """A push under way."""

    __slots__ = ("_clock", "_push", "_shards", "_size")

    def __init__(self, shards: Shards, size: float):
        self._shards, self._size = shards, size
        self._clock, self._push = shards.clock, shards.traffic.push

    def later(self, worker: LightWorker) -> bool:
        clock = self._clock
        if worker.now > clock.now:
            clock.at(worker.now, partial(self.later, worker))
        else:
            clock.at(self._push(worker.rank, self._size, clock.now), worker.applies)
        return True


class Pulling(Later):
    """A pull under way."""

    __slots__ = ("_clock", "_shards")

    def __init__(self, shards: Shards):
        self._shards, self._clock = shards, shards.clock

    def later(self, worker: LightWorker) -> bool:
        shards, after = self._shards, worker.after
        if worker.now > self._clock.now:
            self._clock.at(worker.now, partial(self._ask, worker))
            return True
        if after != -inf and after > (shards.bounds or shards.bounded()).clocks.least:
            shards.hold(worker)
            return True
        shards.take(worker)
        return False

    def _ask(self, worker: LightWorker) -> None:
        """The same for a worker whose time has come."""
        if not self.later(worker):
            worker.advance()


class Shards:
    """One phase on shards, which begins at time `begun`, all members at one place.

    seen: the version of each worker's parameters; where that is yet to be read, ~ of a version before.
    stale, stalest: sum and largest of the staleness of each worker's pushes.
    """

    def __init__(self, job: Simulation, begun: float):
        self.clock, self.traffic = job.clock, job.costs.traffic()
        self._first = job.first.units
        self.calm: float = inf  # from this ticket on nobody is a straggler any more
        self.tickets = count(self._first)
        self._workers = job.workers
        self._pull, self._size = self.traffic.pull, job.model.size
        self.times = array("d")  # of the pushes' applications: its length is the version
        self.staleness: list[int] = []  # how often each occurred
        # Of each worker, close together in memory: what doesn't fit the processor's cache costs most.
        self.seen, self.stale, self.stalest = (array("q", bytes(8 * len(job.workers))) for _ in range(3))
        self.bounds: Bounds | None = None
        self._resting: set[int] = set()
        self.pushing = Pushing(self, job.model.size * job.wire)
        self.pulling = Pulling(self)
        for worker in job.workers:
            worker.shards, worker.unheld = self, True
            worker.landed = worker.pulled = worker.clock
            worker.read, worker.held = begun, -1.0
            worker.begun, worker.bound_waits, worker.bound_wait = worker.done, 0, 0.0

    @property
    def units(self) -> int:
        """Done by all, this phase's pushes included."""
        return self._first + len(self.times)

    def calm_down(self) -> None:
        """Nobody is a straggler any more: whoever takes a ticket from here on knows."""
        self.calm = next(self.tickets)
        self.tickets = count(self.calm)

    def take(self, worker: LightWorker) -> None:
        """The shards read their parameters for `worker`, which goes on when it has them."""
        now, version = self.clock.now, len(self.times)
        read, arrived = self._pull(worker.rank, self._size, now)
        if read <= now:
            self.seen[worker.rank] = version
        else:
            worker.read, self.seen[worker.rank] = read, ~version
        worker.now = arrived
        bounds, pulled, worker.pulled = self.bounds, worker.pulled, worker.clock
        if bounds is not None and worker.clock > pulled:
            if read > now:
                bounds.reading(pulled, worker.clock, read)
            if bounds.pulls.move(pulled, worker.clock):
                self._release_pushes(bounds)

    # Bounds

    def bounded(self) -> Bounds:
        if self.bounds is None:
            self.bounds = Bounds(worker for worker in self._workers if worker.rank not in self._resting)
        return self.bounds

    def may_push(self, worker: LightWorker, now: float) -> bool:
        """Whether all have taken the parameters that `worker` waits for; else its push is applied later."""
        bounds, after = self.bounded(), ceil(worker.after)
        when = bounds.push_at(after)
        if when <= now:
            if worker.held >= 0:
                worker.bound_wait += now - worker.held
                worker.held = -1.0
            return True
        if worker.held < 0:
            worker.held = now
            worker.bound_waits += 1
        if when == inf:
            bounds.pushers.setdefault(after, []).append(worker)
        else:
            self.clock.at(when, worker.applies)
        return False

    def hold(self, worker: LightWorker) -> None:
        """Not all have come to the clock that `worker`'s pull waits for: it is called when they have."""
        worker.bound_waits += 1
        self.bounded().pullers.setdefault(ceil(worker.after), []).append(worker)

    def release_pulls(self, bounds: Bounds) -> None:
        for _, worker in released(bounds.pullers, bounds.clocks.least):
            worker.bound_wait += self.clock.now - worker.now
            self.take(worker)
            worker.advance()

    def _release_pushes(self, bounds: Bounds) -> None:
        now, least = self.clock.now, bounds.pulls.least
        if bounds.reads:
            bounds.reads = {clock: read for clock, read in bounds.reads.items() if clock >= least}
        for after, worker in released(bounds.pushers, least):
            self.clock.at(max(now, bounds.push_at(after)), worker.applies)

    def rest(self, worker: LightWorker) -> None:
        """Nobody waits for `worker` at a bound any more."""
        self._resting.add(worker.rank)
        bounds = self.bounds
        if bounds is not None:
            if bounds.clocks.leave(worker.landed):
                self.release_pulls(bounds)
            if bounds.pulls.leave(worker.pulled):
                self._release_pushes(bounds)

    def waiting(self) -> list[tuple[str, list[int]]]:
        """Who waits at a bound."""
        if self.bounds is None:
            return []
        kinds = (("push", self.bounds.pushers), ("pull", self.bounds.pullers))
        return [
            (f"a {kind} after clock {after}", [worker.rank for worker in workers])
            for kind, found in kinds
            for after, workers in sorted(found.items())
        ]
