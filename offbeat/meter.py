"""What one worker did with its time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from offbeat.site import now


class Meter:
    """Seconds and samples of one worker since `begin`. On CUDA, waiting is what the host waited for."""

    def __init__(self) -> None:
        self.lr: Any = 0.0  # as applied in the last step; a tensor where the optimizer's is one
        self.samples = 0
        self.steps = 0
        self._waited = 0.0
        self._wait_begun: float | None = None
        self._begun: float | None = None
        self._ended: float | None = None
        self._depth = 0
        self.before = 0.0  # seconds of the job before this process of a worker came
        self.earlier: dict[str, Any] = {}  # what the worker's earlier processes did

    def begin(self) -> None:
        if self._begun is None:
            self._begun = now()

    def end(self) -> None:
        if self._ended is None:
            self._ended = now()

    @property
    def seconds(self) -> float:
        if self._begun is None:
            return 0.0
        return (self._ended or now()) - self._begun

    @property
    def wait_s(self) -> float:
        """Seconds spent waiting for others, up to now: a wait under way counts."""
        begun = self._wait_begun
        if begun is None or self._begun is None:
            return self._waited
        end = now() if self._ended is None else self._ended
        return self._waited + max(end - max(begun, self._begun), 0.0)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        self._depth += 1
        if self._depth == 1:
            self._wait_begun = now()
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._waited, self._wait_begun = self.wait_s, None

    def summary(self) -> dict[str, Any]:
        seconds, wait = self.seconds, self.wait_s
        own = {
            "units": self.steps,
            "samples": self.samples,
            "busy_s": max(seconds - wait, 0.0),
            "wait_s": wait,
        }
        return {name: round(value + self.earlier.get(name, 0), 4) for name, value in own.items()}
