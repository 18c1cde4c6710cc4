"""What a search costs, in the paper's units (section VI-C1, Table II): trainings with BSP alone."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from offbeat.search.core import BSP, Stand, mean


@dataclass(frozen=True)
class Cost:
    """trainings: time of all trials, in trainings with BSP alone. saved: by each later run with the plan that
    was found, likewise. useful: trials that ended at the target accuracy, so that their model can be used."""

    trainings: float
    saved: float
    useful: int

    @property
    def amortized(self) -> float:
        """Later runs after which the search has paid: the paper's amortized recurrences; inf for never."""
        return self.trainings / self.saved if self.saved > 0 else inf

    @property
    def effective(self) -> float:
        """Usable trainings for each BSP training's worth of time: the paper's effective training ratio."""
        return self.useful / self.trainings if self.trainings else 0.0


def cost(stand: Stand, bsp_seconds: float | None = None, spent: float = 0.0) -> Cost | None:
    """Of a search so far. bsp_seconds: of a training with BSP alone, where the search has none of its own;
    None is returned while that isn't known. spent: seconds of trials that were ended before they were
    over."""
    own = stand.point(BSP)
    if own is not None and own.seconds is not None:
        bsp_seconds = own.seconds
    if not bsp_seconds:
        return None
    trials = [trial for point in stand.points for trial in point.trials]
    total = spent + sum(trial.seconds for trial in trials)
    passing = [point for point in stand.points if point.passed]
    fastest = min(passing, key=lambda point: point.share, default=None)
    saved = 0.0
    if fastest is not None and fastest.share < BSP:
        saved = 1 - mean(trial.seconds for trial in fastest.trials) / bsp_seconds
    return Cost(total / bsp_seconds, saved, sum(len(point.trials) for point in passing))
