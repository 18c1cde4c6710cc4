"""What happens when training diverges: an error, a return to the last checkpoint, or a warning."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from offbeat.checkpoint import Stateful
from offbeat.cluster.real import Called
from offbeat.cluster.state import collect
from offbeat.guard import Diverged, Guard
from offbeat.site import now
from offbeat.telemetry import Telemetry

if TYPE_CHECKING:
    from offbeat.loop import Loop

ON_CUDA = 0.2
"""Seconds between two looks at the loss on CUDA, where a look waits for the device."""


class Watchman:
    """Looks at this worker's loss before every step. As a context around what may wait for others, it
    answers their call when one of them has seen training diverge."""

    def __init__(self, loop: Loop, on_diverge: str):
        self._loop, self._mode, self._guard = loop, on_diverge, Guard()
        self._checkpoint: tuple[Path, Mapping[str, Stateful]] | None = None
        self._units = 0  # where it was made
        self._due = 0.0
        self._warned = False
        self._mine: Diverged | None = None

    @property
    def also(self) -> Mapping[str, Stateful]:
        """What the last checkpoint held besides."""
        return {} if self._checkpoint is None else self._checkpoint[1]

    def saved(self, path: Path, also: Mapping[str, Stateful]) -> None:
        """There is a checkpoint to return to."""
        self._checkpoint, self._units = (path, also), self._loop.units

    def look(self, telemetry: Telemetry) -> None:
        """Raises Diverged, or calls all workers together, if this worker's loss says so."""
        worker = self._loop.worker
        if worker.device.type == "cuda":
            moment = now()
            if moment < self._due:
                return
            self._due = moment + ON_CUDA
        loss = telemetry.loss
        if loss is None:
            return
        scaled = worker.scaler is not None and worker.scaler.is_enabled()
        reason = self._guard.look(loss, scaled, exploding=worker.protocol.home == "shards")
        if reason is None:
            return
        error = Diverged(reason, worker.protocol, worker.rank, worker.clock, loss, worker.staleness)
        if self._mode == "ignore":
            if not self._warned:
                self._warned = True
                self._loop.warn(str(error), own=True)
            return
        self._record(error)
        if self._mode == "raise" or not worker.sharded:
            raise error
        self._mine = error
        raise Called(worker.rank)

    def __enter__(self) -> Watchman:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Called):
            return False
        self._answer(error)
        return True

    def _answer(self, called: Called) -> None:
        loop, worker, mine = self._loop, self._loop.worker, self._mine
        self._mine = None
        units = worker.units
        worker.call(called)
        own = {
            "diverged": None if mine is None else [*mine.args[:1], *mine.args[2:]],
            "checkpoint": None if self._checkpoint is None else [self._units, str(self._checkpoint[0])],
        }
        told = [json.loads(text) for text in collect(worker.epoch, json.dumps(own))]
        reason, rank, step, loss, staleness = next(row["diverged"] for row in told if row["diverged"])
        # Who waited while others saved doesn't know of it.
        known = [row["checkpoint"] for row in told if row["checkpoint"]]
        diverged = mine or Diverged(reason, worker.protocol, rank, step, float(loss), staleness)
        if worker.rank == worker.members[0] and mine is None:
            self._record(diverged)
        if not known:
            raise diverged from None
        path = Path(max(known)[1])
        also = self.also
        loop.warn(f"{diverged}. Going back to {path} and on with bsp")
        self._guard = Guard()
        loop.go_back(path, also)
        loop.journal.record(
            "rollback", units=units, path=str(path), to_units=loop.units, reason=diverged.reason
        )

    def _record(self, error: Diverged) -> None:
        self._loop.journal.record(
            "diverged",
            rank=error.worker,
            clock=error.step,
            units=self._loop.units,
            loss=error.loss,
            staleness=error.staleness,
            reason=error.reason,
        )
