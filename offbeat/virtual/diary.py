"""What a timing-only run writes into its journal: the records of a real one, in virtual time."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

import offbeat
from offbeat.journal import GATHER, SAMPLE
from offbeat.planner.auto import Choice

if TYPE_CHECKING:
    from offbeat.virtual.light import LightWorker
    from offbeat.virtual.timing import Simulation

ROWS = 10_000
"""How many rows of workers are about to be written while a run's time doubles one and a half times: of many
workers for long, the `workers` records become rarer."""


class Recorder(Protocol):
    """What a run needs of `offbeat.journal.Journal`."""

    def record(self, type: str, **fields: Any) -> None: ...


class Diary:
    """Writes for a `Simulation`; to nobody, where there is no journal.

    batch_size: samples of a unit, if known. watch: called with virtual time and progress whenever the
    workers' figures are gathered.
    """

    def __init__(
        self,
        job: Simulation,
        journal: Recorder | None,
        batch_size: int | None,
        watch: Callable[[float, float], None] | None,
    ):
        self._job, self._journal, self._batch, self._watch = job, journal, batch_size, watch

    def record(self, type: str, **fields: Any) -> None:
        if self._journal is not None:
            self._journal.record(type, **fields)

    def begin(self, about: Mapping[str, Any]) -> None:
        job = self._job
        run = {
            "started": 0.0,
            "script": "",
            "argv": [],
            "plan": str(job.plan),
            "total": job.total,
            "seed": None,
            "workers": len(job.members),
            "device": "none",
            "backend": "timing-only",
            "wire": None,
            "lr_reference": None,
            "momentum": None,
            "on_diverge": None,
            "stragglers": str(job.policy),
            "parameters": job.model.parameters,
            "host": os.uname().nodename,
            "versions": {"offbeat": offbeat.__version__, "python": sys.version.split()[0]},
        }
        self.record("run", **{**run, **about})
        self.record("start", rendezvous_ms=0.0, broadcast_ms=0.0)
        if self._batch is not None:
            self.record("data", batch_size=self._batch, micro_batches=1)
        if self._journal is not None:
            job.first.due = 0.0
        if self._journal is not None or self._watch is not None:
            job.horizon = job.clock.now + GATHER
            job.clock.at(job.horizon, self._gather)

    def sample(self, worker: LightWorker, staleness: int | None = None) -> None:
        """Rank 0 has taken a step. It may be ahead of the clock: it is written when its time has come."""
        worker.due = worker.now + SAMPLE
        fields = {
            "protocol": self._job.text,
            "clock": worker.clock,
            "units": worker.units,
            "progress": round(worker.progress, 6),
            "loss": None,
            "lr": None,
        }
        if staleness is not None:
            fields["staleness"] = staleness
        self._job.clock.at(worker.now, partial(self.record, "step", **fields))

    def delay(self, choice: Choice) -> None:
        """`dasgd(auto)` has chosen."""
        self.record("delay", **choice.record(), units=self._job.workers[0].units)

    def phase(self, switch: Mapping[str, Any] | None) -> None:
        """A protocol has taken charge; `switch`: what went before it, and what that cost."""
        where = self._where()
        if switch is not None:
            self.record("switch", **switch, **where)
        self.record("phase", protocol=self._job.text, **where)

    def pushes(self) -> Callable[[], None] | None:
        """A phase on shards has ended: writes down what all did in it; None where nothing was pushed."""
        shards, workers = self._job.first.shards, self._job.workers
        if self._journal is None or shards is None or not shards.staleness:
            return None
        fields = {
            **self._where(),
            "mean_staleness": _mean(sum(shards.stale), len(shards.times)),
            "staleness": {str(stale): times for stale, times in enumerate(shards.staleness) if times},
            "workers": [
                {
                    "rank": w.rank,
                    "pushes": w.done - w.begun,
                    "mean_staleness": _mean(shards.stale[w.rank], w.done - w.begun),
                    "max_staleness": shards.stalest[w.rank],
                    "bound_waits": w.bound_waits,
                    "bound_wait_s": round(w.bound_wait, 4),
                }
                for w in workers
            ],
        }
        return partial(self.record, "pushes", protocol=self._job.text, **fields)

    def _where(self) -> dict[str, Any]:
        first = self._job.first
        return {"units": first.units, "progress": round(first.progress, 6)}

    def _gather(self) -> None:
        job, clock = self._job, self._job.clock
        self.record("workers", workers=self._rows())
        if self._watch is not None:
            done = sum(worker.done for worker in job.workers)
            self._watch(clock.now, min(done / job.total, 1.0))
        job.horizon = inf
        if clock.next_at() < inf:  # else nobody can go on
            job.horizon = clock.now + max(GATHER, clock.now * len(job.members) / ROWS)
            clock.at(job.horizon, self._gather)

    def _rows(self) -> list[dict[str, Any]]:
        now, begun = self._job.clock.now, self._job.begun
        return [
            {
                "rank": worker.rank,
                "clock": worker.clock,
                "units": worker.done,
                "samples": worker.done * (self._batch or 0),
                "busy_s": round(worker.busy, 4),
                "wait_s": round(max(now, worker.now) - begun - worker.busy, 4),
            }
            for worker in self._job.workers
        ]

    def end(self, seconds: float) -> None:
        rows = self._rows()
        samples = sum(row["samples"] for row in rows)
        spent = sum(row["busy_s"] + row["wait_s"] for row in rows)
        self.record("workers", workers=rows)
        self.record(
            "end",
            seconds=round(seconds, 4),
            units=self._job.first.units,
            samples=samples,
            samples_per_s=round(samples / seconds, 2) if seconds else 0.0,
            waiting=round(sum(row["wait_s"] for row in rows) / spent, 4) if spent else 0.0,
            loss=None,
        )
        if self._watch is not None:
            self._watch(seconds, 1.0)


def _mean(total: float, count: int) -> float:
    return round(total / count, 4) if count else 0.0
