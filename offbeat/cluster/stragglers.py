"""What a worker knows of stragglers: it tells the others how long its own work takes, and hears theirs.

On replicas the figures travel with the words that members exchange anyway, so all know the same at the same
step. On shards nobody waits for anybody: each worker puts its figures into the job's store, and the phase's
leader looks at them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from offbeat.cluster.control import Exchange, Word
from offbeat.policies.detector import Look
from offbeat.policies.lookout import Lookout, Pace, own_links, shifts
from offbeat.policies.switches import Stragglers
from offbeat.site import now

if TYPE_CHECKING:
    from offbeat.cluster.replicas import ReplicaWorker


class Watch:
    """One worker's watch over all. `settings` None: there is none. stragglers: as all members know them."""

    def __init__(self, worker: ReplicaWorker):
        self._worker = worker
        self.settings: Stragglers | None = None
        self.stragglers: frozenset[int] = frozenset()
        self.on_persistent: Callable[[int], None] = lambda rank: None
        self._lookout = Lookout()
        self._aside = self._aside_waiting = (
            0.0  # seconds of own work and of waiting that are no part of steps
        )
        self._told = (0.0, 0.0)
        self._clock = 0  # at the last exchange

    def open(self, settings: Stragglers) -> None:
        """Watches from here on."""
        self.settings = settings if settings.policy != "off" else None
        self.forget()

    def forget(self) -> None:
        """Nobody is a straggler until found to be one again."""
        if self.settings is not None:
            self.stragglers = frozenset()
            self._lookout = Lookout(self.settings.detection)
            self.begin()

    def begin(self) -> None:
        """Another protocol, or other members: what was measured doesn't count."""
        if self.settings is not None:
            self._lookout.begin()
            self._pace = Pace(self.settings.detection.window)
            self._clock = self._worker.clock
            self.own_time()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """The time inside is no part of this worker's steps."""
        begun, waited = self._spent(), self._worker.meter.wait_s
        try:
            yield
        finally:
            self._aside += self._spent() - begun
            self._aside_waiting += self._worker.meter.wait_s - waited

    def _spent(self) -> float:
        """Seconds that this worker did not wait."""
        return self._worker.meter.seconds - self._worker.meter.wait_s

    @property
    def worked(self) -> float:
        """Seconds that this worker has spent on its steps."""
        return self._spent() - self._aside

    # On replicas

    def own_time(self) -> dict[str, int]:
        """This worker's part of a word: microseconds of its own work and of waiting since the last one."""
        if self.settings is None:
            return {}
        before = self._told
        self._told = self._spent() - self._aside, self._worker.meter.wait_s - self._aside_waiting
        busy, waited = (round(max(b - a, 0.0) * 1e6) for a, b in zip(before, self._told, strict=True))
        return {"flag": busy, "mark": waited}

    def exchanged(self, exchange: Exchange, words: Sequence[Word], probe: bool = False) -> None:
        """All members' words have been read. `probe`: nothing is under way, so the links may be probed."""
        worker = self._worker
        if self.settings is None or len(words) < 2 or any(word.passive for word in words):
            return
        members = exchange.epoch.members
        steps, self._clock = max(words[0].clock - self._clock, 1), words[0].clock
        figures = {
            rank: (word.flag / 1e6, word.mark / 1e6) for rank, word in zip(members, words, strict=True)
        }
        self._lookout.step(figures, steps, probe)
        if self._lookout.wants_probe and members == worker.epoch.members:
            with self.aside():
                rows = worker.epoch.probe(shifts(len(members)))
            self._lookout.probed(own_links(members, rows))
        if look := self._lookout.look(now()):
            self._note(look)
            self.stragglers = look.stragglers

    # On shards

    def tell(self, phase: str, pushes: int, waited: float) -> None:
        """Puts this worker's figures into the store: pushes of the phase, and seconds of its own time."""
        figures = [pushes, self._worker.meter.seconds - self._aside - waited]
        self._worker.team.store.set(f"pace/{phase}/{self._worker.rank}", json.dumps(figures))

    def due(self, pushes: int) -> bool:
        """Whether this worker's window is complete."""
        return self.settings is not None and pushes % self.settings.detection.window == 0

    def look(self, phase: str, members: Sequence[int]) -> bool:
        """The leader's look at all figures. Returns whether nobody is a straggler any more."""
        rows = self._worker.team.store.multi_get([f"pace/{phase}/{rank}" for rank in members])
        figures = {rank: tuple(json.loads(row)) for rank, row in zip(members, rows, strict=True)}
        if (speeds := self._pace.speeds(figures, now())) is not None:
            self._note(self._lookout.detector.look(speeds, now()))
        return not self._lookout.stragglers

    def _note(self, look: Look) -> None:
        worker = self._worker
        where = {"protocol": str(worker.protocol), "units": worker.units}
        for fields in look.records(self._lookout.settings.rule):
            worker.journal.record("straggler", **fields, **where)
        for rank in look.persistent:
            self.on_persistent(rank)
