"""`dasgd(auto)`: chooses the delay, and with it the period, from what averages and steps take, and chooses
anew when that has changed for good.

Pure, and the same on every member: all are given the same figures in the same order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any

from offbeat.planner.rule import delay, exposed, period

HEADROOM = 1.1
"""An average's time varies: the rule is asked to hide one that takes a tenth longer."""
MOST = 16
"""The largest delay that is chosen. By then a mean is so late that it hurts convergence."""
FIRST = 3
"""Averages before the first choice."""
PATIENCE = 4
"""Averages in a row that must ask for another delay, later on."""
WORTH = 0.03
"""A longer delay must save this share of a step."""


def first(t_c: float, t_p: float) -> int:
    """The delay by the paper's rule, with headroom, up to `MOST`."""
    return min(delay(HEADROOM * t_c, t_p), MOST)


@dataclass(frozen=True)
class Choice:
    """A delay (d), and the seconds of an average (t_c) and of a local step (t_p) that it was chosen by."""

    delay: int
    t_c: float
    t_p: float
    before: int

    @property
    def period(self) -> int:
        return period(self.delay)

    @property
    def reason(self) -> str:
        figures = f"an average takes {self.t_c * 1e3:.3g} ms, a local step {self.t_p * 1e3:.3g} ms"
        if HEADROOM * self.t_c >= self.delay * self.t_p:
            return f"{figures}: more than {self.delay} steps, the longest delay that is chosen, can hide"
        return f"{figures}: {self.delay} of them hide it"

    def record(self) -> dict[str, Any]:
        """The journal's."""
        return {
            "delay": self.delay,
            "period": self.period,
            "before": self.before,
            "t_c": round(self.t_c, 6),
            "t_p": round(self.t_p, 6),
            "reason": self.reason,
        }


class Auto:
    """`delay` is the one in force. The first averages are hidden behind one step."""

    def __init__(self, delay: int = 1, chosen: bool = False):
        self.delay, self.chosen = delay, chosen
        self._latest: deque[tuple[float, float]] = deque(maxlen=PATIENCE)

    def forget(self) -> None:
        """The members are others from here on: what was measured doesn't count. The delay stays."""
        self._latest.clear()

    def measured(self, t_c: float, t_p: float) -> Choice | None:
        """An average has taken `t_c` seconds, a local step `t_p`. Returns a choice, if it is the first one or
        another one than that in force.

        Hysteresis: each of the last `PATIENCE` averages must ask for a change in the same direction, and the
        change must be worth it."""
        if not (t_p > 0 and t_c >= 0):
            return None
        self._latest.append((t_c, t_p))
        if len(self._latest) < (PATIENCE if self.chosen else FIRST):
            return None
        usual, step = median(c for c, _ in self._latest), median(p for _, p in self._latest)
        wanted = first(usual, step)
        if self.chosen and not self._for_good(wanted, usual, step):
            return None
        before, self.delay, self.chosen = self.delay, wanted, True
        self._latest.clear()
        return Choice(wanted, usual, step, before)

    def _for_good(self, wanted: int, t_c: float, t_p: float) -> bool:
        now = self.delay
        votes = [first(c, p) for c, p in self._latest]
        if wanted > now:
            saved = exposed(t_c, t_p, now, period(now)) - exposed(t_c, t_p, wanted, period(wanted))
            return all(vote > now for vote in votes) and saved > WORTH * t_p
        return wanted < now and all(vote < now for vote in votes)
