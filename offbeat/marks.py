"""The marks that `sync.every` tells a worker of, a share of the job apart each."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

CLOSE = 1e-9
"""Of a share, that may be lost where shares are summed."""


class Marks:
    """What one worker was told. With replicas all members are at the same place, so all are told the same."""

    def __init__(self) -> None:
        self._told: dict[str, int] = {}  # marks passed, by the interval's text
        self._from = 0.0  # progress where the job, or its resumption, began
        self._known = 0  # units whose marks somebody was told of, under asp and ssp
        self.muted = False  # nobody is told of anything before the next step

    def begin(self, progress: float) -> None:
        """The job begins or goes on from here: what lies before is not told."""
        self._told, self._from, self._known, self.muted = {}, progress, 0, False

    def state(self) -> list[Any]:
        """What this worker was told, for one that returns to the members."""
        return [self._told, self._from, self._known]

    def take(self, state: list[Any]) -> None:
        """From here on as if this worker had been told what the members were."""
        self._told, self._from, self._known = dict(state[0]), state[1], state[2]

    def join(self, states: Iterable[list[Any]]) -> None:
        """A checkpoint has stopped an asynchronous phase: what some members were told of counts for all."""
        for told, _, _ in states:
            for text, count in told.items():
                self._told[text] = max(self._told.get(text, count), count)

    def settled(self, units: int) -> None:
        """An asynchronous phase, or a part of it, is over: marks up to the last of these units were told to
        those who came by."""
        self._known = units

    def passed(self, text: str, share: float, progress: float, total: int | None, done: bool) -> bool:
        """Whether this worker is to be told now of a mark of `text`, an interval of `share` of the job."""
        if self.muted and not done:
            return False
        here = min(progress, 1.0) / share
        count = math.ceil(here - CLOSE) if done else math.floor(here + CLOSE)
        before = self._told.setdefault(text, int(self._from / share + CLOSE))
        if self._known and total:
            before = max(before, math.floor((self._known - 1) / total / share + CLOSE))
        self._told[text] = max(count, before)
        return count > before
