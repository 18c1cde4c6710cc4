"""What one worker did with its time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any


class Meter:
    """Seconds and samples of one worker since `begin`. On CUDA, waiting is what the host waited for."""

    def __init__(self) -> None:
        self.lr: Any = 0.0  # as applied in the last step; a tensor where the optimizer's is one
        self.samples = 0
        self.steps = 0
        self.wait_s = 0.0
        self._begun: float | None = None
        self._ended: float | None = None
        self._depth = 0

    def begin(self) -> None:
        if self._begun is None:
            self._begun = time.perf_counter()

    def end(self) -> None:
        if self._ended is None:
            self._ended = time.perf_counter()

    @property
    def seconds(self) -> float:
        if self._begun is None:
            return 0.0
        return (self._ended or time.perf_counter()) - self._begun

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        begun = time.perf_counter()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0 and self._begun is not None and self._ended is None:
                self.wait_s += time.perf_counter() - begun

    def summary(self) -> dict[str, Any]:
        seconds = self.seconds
        return {
            "units": self.steps,
            "samples": self.samples,
            "busy_s": round(max(seconds - self.wait_s, 0.0), 4),
            "wait_s": round(self.wait_s, 4),
        }
