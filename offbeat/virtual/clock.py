"""Virtual time and what is to happen in it."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf

from offbeat.site import Site


class Clock:
    """An event queue. `now`: virtual seconds since the run's start; whoever runs between two events may
    move it, up to `next_at()`."""

    __slots__ = ("_events", "_number", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._number = 0
        self._events: list[tuple[float, int, Callable[[], object]]] = []

    def at(self, time: float, action: Callable[[], object]) -> None:
        """Calls `action` when it is `time`; of two at one time the one that was given first goes first.

        Raises ValueError for a time that has passed, and for NaN."""
        if not time >= self.now:
            raise ValueError(f"it is {self.now!r} s in virtual time: nothing can happen at {time!r}")
        self._number = number = self._number + 1
        heappush(self._events, (time, number, action))

    def next_at(self) -> float:
        """The next action's time; infinity where there is none."""
        return self._events[0][0] if self._events else inf

    def step(self) -> bool:
        """Lets the next action happen; False where there is none."""
        if not self._events:
            return False
        self.now, _, action = heappop(self._events)
        action()
        return True

    def run(self) -> None:
        """Lets everything happen, in order; returns when nothing is left, or after `stop`."""
        events = self._events
        while events:
            self.now, _, action = heappop(events)
            action()

    def stop(self) -> None:
        """What is still to come will not happen."""
        self._events.clear()


class ClockSite(Site):
    """A worker whose time is virtual."""

    virtual = True

    def __init__(self, clock: Clock):
        super().__init__()
        self.clock = clock

    def now(self) -> float:
        return self.clock.now

    def unix(self) -> float:
        return self.clock.now
