"""How long averages and local steps take, as all members know it: what `dasgd(auto)` goes by.

The figures travel with the words that go with every average: what the sender's last average took, and its
own time for a step since then. All members read the same words when an average lands, so all choose the same
delay at the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from offbeat.cluster.control import Event, Word
from offbeat.planner.auto import Auto, Choice
from offbeat.protocols import is_auto

if TYPE_CHECKING:
    from offbeat.cluster.average import Mean
    from offbeat.cluster.replicas import ReplicaWorker


class Pacing:
    """One worker's."""

    def __init__(self, worker: ReplicaWorker):
        self._worker, self.auto = worker, Auto()
        self._took = 0  # microseconds of the last average
        self._since = 0, 0.0  # the clock and the seconds of own work at its beginning
        self._mean: Mean | None = None

    @property
    def timed(self) -> bool:
        """Whether the protocol in charge goes by it."""
        return is_auto(self._worker.protocol)

    def begin(self) -> None:
        """Another protocol takes charge: what was measured doesn't count."""
        self._took, self._mean = 0, None
        self._since = self._worker.clock, self._worker.watch.worked
        self.auto.forget()

    def own(self) -> dict[str, int]:
        """This worker's part of the word of an average that it begins."""
        if not self.timed:
            return {}
        (clock, worked), self._since = self._since, (self._worker.clock, self._worker.watch.worked)
        steps = max(self._since[0] - clock, 1)
        return {"took": self._took, "step": max(round((self._since[1] - worked) / steps * 1e6), 0)}

    def started(self, mean: Mean) -> None:
        self._mean = mean if self.timed else None

    def stepped(self) -> None:
        if self._mean is not None:
            self._mean.look()

    def landed(self, words: Sequence[Word], mean: Mean) -> None:
        """An average has landed, with these words."""
        if not self.timed:
            return
        self._took, self._mean = max(round(mean.took * 1e6), 1), None
        active = [word for word in words if word.event == Event.AVERAGE]
        if len(active) < 2 or any(word.took == 0 for word in active):
            return
        # Who was last to begin has waited for nobody; the slowest worker sets the pace.
        t_c, t_p = min(word.took for word in active), max(word.step for word in active)
        if choice := self.auto.measured(t_c / 1e6, t_p / 1e6):
            self._note(choice)

    def _note(self, choice: Choice) -> None:
        self._worker.journal.record("delay", **choice.record(), units=self._worker.units)

    # What travels with the job's place

    def state(self) -> list[int]:
        return [self.auto.delay, int(self.auto.chosen)]

    def take(self, state: Sequence[int]) -> None:
        """By all members, at one place."""
        self.auto = Auto(state[0], bool(state[1]))
        self.begin()
