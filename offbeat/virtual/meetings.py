"""Where all light workers meet: BSP's reductions, averages, settles, readmissions. Each takes one event."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy

from offbeat.planner.auto import Auto
from offbeat.protocols import is_auto
from offbeat.virtual.flight import reductions
from offbeat.virtual.light import Later, LightWorker

if TYPE_CHECKING:
    from offbeat.virtual.timing import Simulation


class Reduction(Later):
    """The members' mean gradient. A bucket's all-reduce starts when the last member's backward has come to
    it and few enough are under way (`flight.py`); backward returns when all buckets have landed and the
    members' words are there.

    sizes: bytes of the buckets, as they travel. ready: share of backward that has passed when each is full.
    """

    __slots__ = ("_begins", "_job", "_points", "_seconds", "_sizes", "_told", "_unit", "workers")

    def __init__(self, job: Simulation, sizes: Sequence[float], ready: Sequence[float]):
        self._job, self._unit = job, job.costs.unit
        backward = job.costs.backward
        self._sizes, self._points = sizes, [1 - backward + backward * share for share in ready]
        self.workers: list[LightWorker] = []
        self._begins: list[float] = []
        self._seconds: list[float] = []

    def later(self, worker: LightWorker) -> bool:
        begun = worker.now
        seconds = self._unit(worker.rank, begun)
        worker.busy += seconds
        worker.now = begun + seconds
        self._begins.append(begun)
        self._seconds.append(seconds)
        if self._job.watching is not None:
            self._job.watching.tell(worker)
        workers = self.workers
        workers.append(worker)
        job = self._job
        if len(workers) == len(job.members):
            landed = self._landing()
            if job.watching is not None:
                landed = job.watching.exchanged(worker.clock, landed, probes=True)
            job.clock.at(landed, self._release)
        return True

    def _landing(self) -> float:
        """When backward returns."""
        begins, seconds = self._begins, self._seconds
        if min(begins) == max(begins):
            first, most = begins[0], max(seconds)
            ready = [first + most * point for point in self._points]
            end = first + most
        else:
            ends = numpy.add.outer(numpy.zeros(len(self._points)), begins)
            ready = (ends + numpy.outer(self._points, seconds)).max(1).tolist()
            end = max(map(float.__add__, begins, seconds))
        begins.clear()
        seconds.clear()
        landed = reductions(self._job.costs, self._sizes, ready, self._job.members)
        return max(landed, end + self._job.words(end))

    def _release(self) -> None:
        now, workers, self.workers = self._job.clock.now, self.workers, []
        watching = self._job.watching
        for worker in workers:
            worker.now = now
            if watching is not None:
                worker.flagged = watching.stragglers
            worker.advance()


class Average(Later):
    """One average of the members' parameters and buffers."""

    __slots__ = ("delay", "done", "flagged", "last", "missing", "told", "waiting")

    def __init__(self, members: int):
        self.missing = members  # that have not begun it
        self.last = 0.0  # when the last one did
        self.told = self.done = -1.0  # when the words were there, and when it landed
        self.delay = 1  # that holds from then on
        self.flagged: frozenset[int] | None = None  # who is a straggler by the words that went with it
        self.waiting: list[LightWorker] = []

    def later(self, worker: LightWorker) -> bool:
        if self.missing:
            self.waiting.append(worker)
            return True
        self._land(worker)
        return False

    def _land(self, worker: LightWorker) -> None:
        worker.delay = self.delay
        wait = self.done - worker.now
        if wait > 0:
            worker.met_at, worker.met = worker.now, min(max(self.told - worker.now, 0.0), wait)
            worker.now = self.done
        if self.flagged is not None:
            worker.flagged = self.flagged

    def release(self) -> None:
        workers, self.waiting = self.waiting, []
        for worker in workers:
            self._land(worker)
            worker.advance()


class Averages:
    """The averages under way: one after the other, and beside all else."""

    __slots__ = ("_auto", "_free", "_job", "_last", "_size", "_steps", "open")

    def __init__(self, job: Simulation, size: float):
        self._job, self._size = job, size
        self._free = 0.0  # when the last one has landed
        self._auto, self._last = Auto(), 0.0
        self._steps: list[tuple[int, float]] = []  # of each worker, its clock and what it has computed
        self.open: dict[int, Average] = {}  # not begun by all yet; by number

    def join(self, worker: LightWorker) -> Average:
        """`worker` begins its next average."""
        worker.averages += 1
        average = self.open.get(worker.averages)
        if average is None:
            average = self.open[worker.averages] = Average(len(self._job.members))
        average.missing -= 1
        if self._job.watching is not None:
            self._job.watching.tell(worker)
        if worker.now > average.last:
            average.last = worker.now
        if not average.missing:
            del self.open[worker.averages]
            self._start(average, worker.clock)
        return average

    def _start(self, average: Average, clock: int) -> None:
        job, begun = self._job, max(average.last, self._free)
        average.told = average.last + job.words(average.last)
        self._free = begun + job.costs.allreduce(self._size, job.members, begun)
        average.done = max(self._free, average.told)
        if is_auto(job.protocol):
            self._choose(self._free - begun)
        average.delay = self._auto.delay
        if job.watching is not None:
            job.watching.exchanged(clock, average.done)
            average.flagged = job.watching.stragglers
        if average.waiting:
            job.clock.at(average.done, average.release)

    def _choose(self, took: float) -> None:
        """As `offbeat.cluster.pacing` does: by what the average before took, and steps since then."""
        before, self._steps = self._steps, [(worker.clock, worker.busy) for worker in self._job.workers]
        t_c, self._last = self._last, took
        if not before or not t_c:
            return
        pairs = zip(before, self._steps, strict=True)
        t_p = max((busy - b) / max(clock - c, 1) for (c, b), (clock, busy) in pairs)
        if choice := self._auto.measured(t_c, t_p):
            self._job.diary.delay(choice)


class Settlement(Later):
    """All members come to the same state, at a switch and at the plan's end."""

    __slots__ = ("_job", "workers")

    def __init__(self, job: Simulation):
        self._job = job
        self.workers: list[LightWorker] = []

    def later(self, worker: LightWorker) -> bool:
        if worker.shards is None:
            self._join(worker)
        else:
            self._job.clock.at(worker.now, partial(self._rest, worker))
        return True

    def _rest(self, worker: LightWorker) -> None:
        assert worker.shards is not None
        worker.shards.rest(worker)
        self._join(worker)

    def _join(self, worker: LightWorker) -> None:
        self.workers.append(worker)
        if len(self.workers) == len(self._job.members):
            self._job.settle(max(one.now for one in self.workers))


class Forming(Later):
    """Other members go on: those who stay, as soon as they have come together, and those who are excluded
    when they are called back."""

    def __init__(self, job: Simulation):
        self._job = job

    def later(self, worker: LightWorker) -> bool:
        worker.now += self._job.costs.membership
        return worker.rank in self._job.outside


class Readmission(Later):
    """The members call back whoever is outside."""

    def __init__(self, job: Simulation):
        self._job = job
        self._workers: list[LightWorker] = []

    def later(self, worker: LightWorker) -> bool:
        self._workers.append(worker)
        if len(self._workers) == len(self._job.members):
            met, self._workers = max(one.now for one in self._workers), []
            self._job.readmit(met)
        return True
