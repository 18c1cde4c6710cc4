"""A timing-only run's watch over stragglers: the real one's detector (`offbeat.cluster.stragglers`), fed with
the same figures at the same moments."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from offbeat.policies.detector import Look
from offbeat.policies.lookout import PROBE, Lookout, Pace, own_links, shifts
from offbeat.policies.switches import Stragglers

if TYPE_CHECKING:
    from offbeat.virtual.light import LightWorker
    from offbeat.virtual.timing import Simulation

NUMBER = 8
"""Bytes of a number that members tell each other."""


class Watching:
    """One watch for all workers. stragglers: by the words that were exchanged last; a worker that has not
    come to them yet knows of others (`LightWorker.flagged`)."""

    def __init__(self, job: Simulation, settings: Stragglers):
        self._job, self._detection = job, settings.detection
        self.stragglers: frozenset[int] = frozenset()
        self._lookout = Lookout(self._detection)
        self._pace = Pace(self._detection.window)
        self._clock = 0  # at the last exchange
        self._before: dict[
            int, tuple[float, float]
        ] = {}  # seconds of own work and of waiting, at the last word
        self._words: dict[int, tuple[float, float]] = {}  # those since, of who has told them
        self._paces: dict[int, tuple[int, float]] = {}

    def forget(self) -> None:
        """Nobody is a straggler until found to be one again."""
        self.stragglers = frozenset()
        for worker in self._job.workers:
            worker.flagged = self.stragglers
        self._lookout = Lookout(self._detection)
        self.begin()

    def begin(self) -> None:
        """Another protocol, or other members: what was measured doesn't count."""
        self._lookout.begin()
        self._pace = Pace(self._detection.window)
        self._clock = self._job.first.clock
        for worker in self._job.workers:
            self.own_time(worker)
            self._paces[worker.rank] = 0, worker.now - self._job.begun

    def own_time(self, worker: LightWorker) -> tuple[float, float]:
        """Seconds of the worker's own work and of waiting since it was last asked, to the microsecond."""
        before = self._before.get(worker.rank, (0.0, 0.0))
        spent = worker.busy, worker.now - self._job.begun - worker.busy
        self._before[worker.rank] = spent
        busy, waited = (round(max(b - a, 0.0) * 1e6) / 1e6 for a, b in zip(before, spent, strict=True))
        return busy, waited

    # On replicas

    def tell(self, worker: LightWorker) -> None:
        """Its part of the words that are on their way."""
        self._words[worker.rank] = self.own_time(worker)

    def exchanged(self, clock: int, at: float, probes: bool = False) -> float:
        """All members' words are there, at `at`. probes: whether the links may be probed. Returns when the
        members go on."""
        members, words, self._words = self._job.members, self._words, {}
        if len(members) < 2:
            return at
        steps, self._clock = max(clock - self._clock, 1), clock
        self._lookout.step({rank: words[rank] for rank in members}, steps, probes)
        if self._lookout.wants_probe:
            begun, (at, rows) = at, self._probe(at)
            self._lookout.probed(own_links(members, rows))
            for rank in members:  # the probe is no part of the next step
                busy, waited = self._before[rank]
                self._before[rank] = busy, waited + at - begun
        if look := self._lookout.look(at):
            self._note(look, at)
            self.stragglers = look.stragglers
        return at

    def _probe(self, at: float) -> tuple[float, list[list[float]]]:
        """As `Epoch.probe`: when it is over, and the seconds by member and shift."""
        costs, members = self._job.costs, self._job.members
        took: list[list[float]] = []
        for shift in shifts(len(members)):
            at += costs.gather(NUMBER, members, at)
            pairs = zip(members, [*members[shift:], *members[:shift]], strict=True)
            took.append([costs.message(PROBE, a, b, at) + costs.message(PROBE, b, a, at) for a, b in pairs])
            at += max(took[-1])
        for _ in took:
            at += costs.gather(NUMBER, members, at)
        return at, [list(row) for row in zip(*took, strict=True)]

    # On shards

    def pushed(self, worker: LightWorker) -> None:
        """Its push was applied, now."""
        pushes = worker.done - worker.begun
        if pushes % self._detection.window:
            return
        job, shards = self._job, worker.shards
        assert shards is not None
        self._paces[worker.rank] = pushes, worker.now - job.begun - worker.bound_wait
        if worker.rank != job.members[0]:
            return
        if (speeds := self._pace.speeds(self._paces, worker.now)) is not None:
            self._note(self._lookout.detector.look(speeds, worker.now), worker.now)
        if not self._lookout.stragglers and worker.stragglers:
            shards.calm_down()

    def _note(self, look: Look, at: float) -> None:
        job = self._job
        where = {"protocol": job.text, "units": job.first.units}
        for fields in look.records(self._detection.rule):
            job.clock.at(at, partial(job.diary.record, "straggler", **fields, **where))
