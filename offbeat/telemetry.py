"""What a run writes down about itself: rank 0's own samples, and the others' figures, gathered at a low
rate and away from the training loop."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from math import inf
from typing import Any

import torch

import offbeat
from offbeat.cluster.real import RealWorker
from offbeat.cluster.state import collect
from offbeat.job import Job
from offbeat.journal import GATHER, SAMPLE, Journal
from offbeat.planner.actual import Forecast, seen
from offbeat.site import here, now


class Telemetry:
    """One worker's part in the journal. Every worker puts its summary into the store once a second; rank
    0 writes all of them down."""

    def __init__(self, worker: RealWorker, store: Any, job: Job, journal: Journal):
        self._worker, self._store, self._job, self._journal = worker, store, job, journal
        self._loss: torch.Tensor | None = None
        self._partial: torch.Tensor | None = None
        self._sample_due = 0.0
        self.batch_samples = 0  # lent to the loop since the last step
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._gather_due = now() + GATHER if here().virtual else inf
        self.forecast: Forecast | None = None  # what a profile predicted, on the journal's keeper
        if (store is not None or journal.path is not None) and not here().virtual:
            self._thread = threading.Thread(target=self._gather, name="offbeat-telemetry", daemon=True)
            self._thread.start()

    def begin(self, **settings: Any) -> None:
        """Writes the run's first record: what it is."""
        job, worker = self._job, self._worker
        if worker.team.arrived is not None:
            if self._store is not None and self._store.check([f"summary/{worker.rank}"]):
                worker.meter.earlier = json.loads(self._store.get(f"summary/{worker.rank}"))
            return
        self._journal.record(
            "run",
            started=job.started,
            script=sys.argv[0] if sys.argv else "",
            argv=sys.argv[1:],
            seed=job.seed,
            workers=job.world_size,
            device=str(job.device),
            backend=job.backend,
            parameters=sum(p.numel() for p in worker.state.parameters),
            host=os.uname().nodename,
            versions={
                "offbeat": offbeat.__version__,
                "torch": str(torch.__version__),
                "python": sys.version.split()[0],
            },
            **settings,
        )

    def started(self) -> None:
        """Writes what the run's start has cost."""
        job, worker = self._job, self._worker
        if worker.team.arrived is not None:
            return
        costs = {**job.costs, "rendezvous_ms": worker.rendezvous_ms, "broadcast_ms": worker.broadcast_ms}
        if worker.shards_ms is not None:
            costs["shards_ms"] = worker.shards_ms
        self._journal.record("start", **{name: round(ms, 3) for name, ms in costs.items()})
        self._journal.flush()  # what a run is should be known even if it dies at once

    def backward(self, roots: Any) -> None:
        """Remembers the loss that a backward began at. Micro-batches' losses add up. Reads no tensor: on
        CUDA that would wait for the device."""
        if isinstance(roots, list | tuple):
            roots = roots[0] if len(roots) == 1 else None
        if not isinstance(roots, torch.Tensor) or roots.numel() != 1:
            return
        loss, scaler = roots.detach().float(), self._worker.scaler
        if scaler is not None and scaler.is_enabled():
            loss = loss / scaler.scale(torch.ones_like(loss))
        if self._partial is not None:
            loss = loss + self._partial
        if self._worker.reducer.hold:
            self._partial = loss
        else:
            self._loss, self._partial = loss, None

    def meet_scaler(self, scaler: Any) -> None:
        """The first step with a GradScaler: the last loss was scaled by it."""
        if self._loss is not None and scaler.is_enabled():
            self._loss = self._loss / scaler.scale(torch.ones_like(self._loss))

    @property
    def loss(self) -> float | None:
        """This worker's last loss."""
        return None if self._loss is None else round(float(self._loss), 6)

    def step(self) -> None:
        """A step was taken."""
        worker = self._worker
        worker.meter.steps += 1
        worker.meter.samples += self.batch_samples
        self.batch_samples = 0
        moment = now()
        if moment >= self._gather_due:  # no thread does it
            self._gather_due = moment + GATHER
            self._gather_once()
        if moment >= self._sample_due and self._journal.path is not None:
            self._sample_due = moment + SAMPLE
            stale = {} if worker.staleness is None else {"staleness": worker.staleness}
            self._journal.record(
                "step",
                protocol=str(worker.protocol),
                clock=worker.clock,
                units=worker.units,
                progress=round(worker.progress, 6),
                loss=self.loss,
                lr=float(worker.meter.lr),
                **stale,
            )

    def _gather(self) -> None:
        while not self._stop.wait(GATHER):
            # A store that has gone is the training loop's to report.
            with contextlib.suppress(RuntimeError):
                self._gather_once()

    def _gather_once(self) -> None:
        own = self._worker.summary()
        if self._store is not None:
            self._store.set(f"summary/{self._worker.rank}", json.dumps(own))
        if self._journal.path is None or not own["units"]:
            return
        rows = []
        for rank in range(self._worker.team.room):
            if rank == self._worker.rank:
                rows.append(own)
            elif self._store.check([f"summary/{rank}"]):
                rows.append(json.loads(self._store.get(f"summary/{rank}")))
        self._journal.record("workers", workers=rows)
        if self.forecast is not None and self._worker.total is not None:
            where = seen(now(), self._worker.units, rows)
            self.forecast.look(self._worker.protocol, len(self._worker.members), where)

    def end(self) -> None:
        """The job is over on all workers: the final figures, by a last exchange."""
        rows = [json.loads(text) for text in collect(self._worker.epoch, json.dumps(self._worker.summary()))]
        seconds = self._worker.meter.before + self._worker.meter.seconds
        samples = sum(row["samples"] for row in rows)
        spent = sum(row["busy_s"] + row["wait_s"] for row in rows)
        self._journal.record("workers", workers=rows)
        self._worker.account()
        if self.forecast is not None:
            self.forecast.end()
        self._journal.record(
            "end",
            seconds=round(seconds, 4),
            units=self._worker.units,
            samples=samples,
            samples_per_s=round(samples / seconds, 2) if seconds else 0.0,
            waiting=round(sum(row["wait_s"] for row in rows) / spent, 4) if spent else 0.0,
            loss=self.loss,
        )
        self._journal.flush()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2)
