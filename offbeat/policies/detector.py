"""Which workers are stragglers, from the time that each spends on a unit of its own work.

Pure: `look` takes the figures of one window and returns what it thinks. Speeds are units per second of a
worker's own time (computing and its own exchange, never waiting for others): under BSP everybody's wall-clock
is the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from statistics import fmean, median, pstdev
from typing import Any

RULES = ("robust", "paper")
TO_SIGMA = 1.4826
"""The median absolute deviation of normal noise, times this, is its standard deviation."""
PERSISTENT = 100.0
"""Seconds that a slowness may last and still count as transient (Sync-Switch: the time in which a new cloud
server could be had)."""


@dataclass(frozen=True)
class Detection:
    """How stragglers are told.

    rule: `"paper"`, Sync-Switch's: a worker whose speed S_k is below S̄ − σ, the members' mean less their
        standard deviation. With half of the members slow S̄ − σ is exactly their speed, so they are never
        below, and with little noise it flags a harmless 2 %.
        `"robust"`, the default: a worker that is slower than the middle of the faster half of the members by
        the factor `min_slowdown` and by `spread` of that half's standard deviations (1.4826 of its median
        absolute deviation). Up to half of the members may be slow.
    window: steps of each worker that one look takes together; windows don't overlap.
    count: windows in a row until a worker is flagged, and windows in a row until it is not any more (c).
    min_slowdown: the least factor that the robust rule cares for. spread: see `rule`.
    recovery: share of that slowdown which a flagged worker must have lost to count as recovered, so that one
        at the threshold doesn't come and go.
    """

    rule: str = "robust"
    window: int = 10
    count: int = 3
    min_slowdown: float = 1.15
    spread: float = 3.0
    recovery: float = 0.5

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"the detector's rule is one of {', '.join(RULES)}; got {self.rule!r}")
        for name in ("window", "count"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"the detector's {name} is a whole number from 1; got {value!r}")
        if not 1 < self.min_slowdown < inf:
            raise ValueError(f"min_slowdown is a factor above 1, such as 1.15; got {self.min_slowdown!r}")
        if not 0 <= self.spread < inf:
            raise ValueError(f"spread is a number of standard deviations from 0; got {self.spread!r}")
        if not 0 <= self.recovery <= 1:
            raise ValueError(f"recovery is a share, 0 to 1; got {self.recovery!r}")


@dataclass(frozen=True)
class Look:
    """One window. speeds: units per second of each member's own time. limit: a member below it was slow.
    slow: those who were. flagged, cleared: who came to be a straggler with this window, and who ceased to be.
    stragglers: who is one now. persistent: stragglers whose slowness has lasted too long to be transient,
    each told once."""

    speeds: Mapping[int, float]
    limit: float
    slow: frozenset[int]
    flagged: tuple[int, ...] = ()
    cleared: tuple[int, ...] = ()
    stragglers: frozenset[int] = frozenset()
    persistent: tuple[int, ...] = ()

    def records(self, rule: str) -> Iterator[dict[str, Any]]:
        """What a journal says of each who was flagged or cleared, with the numbers behind it."""
        for action, ranks in (("flagged", self.flagged), ("cleared", self.cleared)):
            for rank in ranks:
                yield {
                    "rank": rank,
                    "action": action,
                    "rule": rule,
                    "limit": round(self.limit, 6),
                    "speeds": {str(r): round(speed, 6) for r, speed in self.speeds.items()},
                }


class Detector:
    """Keeps count of the windows in which each member was slow, or fast again."""

    def __init__(self, settings: Detection | None = None):
        self.settings = settings or Detection()
        self.stragglers: frozenset[int] = frozenset()
        self._rows: dict[int, int] = {}  # windows in a row that speak against a member's state
        self._since: dict[int, float] = {}  # when a straggler was first slow
        self._told: set[int] = set()

    def look(self, speeds: Mapping[int, float], at: float = 0.0) -> Look:
        """One window's speeds by member (units per second, 0 for one that got nothing done). at: seconds, for
        telling how long a slowness has lasted.

        A member that is missing keeps its state, and its count begins anew. Raises ValueError for a speed
        that is no number from 0."""
        for rank, speed in speeds.items():
            if not (speed >= 0 and isfinite(speed)):
                raise ValueError(f"worker {rank}'s speed is units per second from 0; got {speed!r}")
        limit, recovered = self._limits(list(speeds.values()))
        slow = frozenset(rank for rank, speed in speeds.items() if speed < limit)
        flagged: list[int] = []
        cleared: list[int] = []
        for rank in [rank for rank in self._rows if rank not in speeds]:
            del self._rows[rank]
            if rank not in self.stragglers:
                self._since.pop(rank, None)
        for rank, speed in sorted(speeds.items()):
            is_one = rank in self.stragglers
            against = speed >= recovered if is_one else rank in slow
            if not is_one and not against:
                self._since.pop(rank, None)
            elif not is_one:
                self._since.setdefault(rank, at)
            self._rows[rank] = self._rows.get(rank, 0) + 1 if against else 0
            if self._rows[rank] >= self.settings.count:
                self._rows[rank] = 0
                (cleared if is_one else flagged).append(rank)
        self.stragglers = (self.stragglers | set(flagged)) - set(cleared)
        for rank in cleared:
            self._since.pop(rank, None)
            self._told.discard(rank)
        persistent = self._persistent(at, speeds)
        return Look(dict(speeds), limit, slow, tuple(flagged), tuple(cleared), self.stragglers, persistent)

    def _limits(self, speeds: Sequence[float]) -> tuple[float, float]:
        """Below the first a member is slow; from the second on a straggler has recovered."""
        if len(speeds) < 2:
            return 0.0, 0.0
        settings = self.settings
        if settings.rule == "paper":
            mean = fmean(speeds)
            limit = mean - pstdev(speeds, mean)
            return limit, limit + settings.recovery * (mean - limit)
        faster = sorted(speeds, reverse=True)[: (len(speeds) + 1) // 2]
        middle = median(faster)
        noise = TO_SIGMA * median(abs(speed - middle) for speed in faster)
        limit = min(middle / settings.min_slowdown, middle - settings.spread * noise)
        return limit, limit + settings.recovery * (middle - limit)

    def _persistent(self, at: float, here: Collection[int]) -> tuple[int, ...]:
        news = sorted((self.stragglers & set(here)) - self._told)
        found = [rank for rank in news if at - self._since.get(rank, at) > PERSISTENT]
        self._told.update(found)
        return tuple(found)
