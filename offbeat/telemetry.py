"""The workers' figures, gathered into rank 0's journal at a low rate and away from the training loop."""

from __future__ import annotations

import contextlib
import json
import threading
from typing import Any

from offbeat.cluster.replicas import ReplicaWorker
from offbeat.cluster.state import collect
from offbeat.journal import Journal

INTERVAL = 1.0
"""Seconds between two `workers` records."""


class Telemetry:
    """Every worker puts its summary into the store once a second; rank 0 writes all of them down."""

    def __init__(self, worker: ReplicaWorker, store: Any, world: int, journal: Journal):
        self._worker, self._store, self._world, self._journal = worker, store, world, journal
        self._stop = threading.Event()
        self._ended = False
        self._thread: threading.Thread | None = None
        if store is not None or journal.path is not None:
            self._thread = threading.Thread(target=self._run, name="offbeat-telemetry", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL):
            # A store that has gone is the training loop's to report.
            with contextlib.suppress(RuntimeError):
                self._once()

    def _once(self) -> None:
        own = self._worker.summary()
        if self._store is not None and self._worker.rank != 0:
            self._store.set(f"summary/{self._worker.rank}", json.dumps(own))
        if self._journal.path is None or not own["units"]:
            return
        rows = [own]
        for rank in range(1, self._world):
            if self._store.check([f"summary/{rank}"]):
                rows.append(json.loads(self._store.get(f"summary/{rank}")))
        self._journal.record("workers", workers=rows)

    def end(self, loss: float | None) -> None:
        """The job is over on all workers: the final figures, by a last exchange."""
        if self._ended:
            return
        self._ended = True
        rows = [json.loads(text) for text in collect(self._worker.epoch, json.dumps(self._worker.summary()))]
        seconds = self._worker.meter.seconds
        samples = sum(row["samples"] for row in rows)
        spent = sum(row["busy_s"] + row["wait_s"] for row in rows)
        self._journal.record("workers", workers=rows)
        self._journal.record(
            "end",
            seconds=round(seconds, 4),
            units=self._worker.units,
            samples=samples,
            samples_per_s=round(samples / seconds, 2) if seconds else 0.0,
            waiting=round(sum(row["wait_s"] for row in rows) / spent, 4) if spent else 0.0,
            loss=loss,
        )
        self._journal.flush()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2)
