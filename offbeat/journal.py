"""The journal of a run: one `journal.jsonl` of typed records, appended while the job runs.

Everything that is shown to a person (live line, comparison, report) is a function of journals. Every
record has `type` and `t`, seconds since the run's start. Types and their fields:

run         started (unix time), script, argv, plan, total, seed, workers, device, backend, wire,
            lr_reference, momentum, parameters, model, optimizer (`offbeat.identity`), host, versions
data        batch_size, micro_batches: what `sync.batches` was given; samples: of the data set, if it is dealt
start       spawn_ms, import_ms, rendezvous_ms, broadcast_ms, shards_ms (room for shards, where the plan has
            a use for them): what the start of the run cost
phase       protocol, units, progress: a protocol takes charge
switch      from, to, units, progress; what it cost: drain_ms (what was in flight lands), meet_ms (until
            the slowest member is there), settle_ms (all hold the same), transfer_ms (to the next home)
step        protocol, clock, units, progress, loss, lr (as applied, first group): a sample of steps; under
            shards also staleness, that of the step's push
pushes      protocol, units, progress: a phase on shards has ended; mean_staleness and staleness, how often
            each occurred in it ({"0": 12, "1": 40, …}, all workers); workers: a list of {rank, pushes,
            mean_staleness, max_staleness, bound_waits, bound_wait_s (waits at SSP's bound, their seconds)}
workers     workers: a list of {rank, clock, units, samples, busy_s, wait_s} so far
members     epoch, members (ranks), reason
evaluation  units, progress, values: what the script gave to `sync.log`
diverged    rank, clock, units, loss, staleness (null where nothing was pushed), reason
rollback    units (where it diverged), path, to_units, reason: on from a checkpoint, with BSP
straggler   rank, action (flagged or cleared), protocol, units, rule, limit, speeds (by rank, units per second
            of a worker's own time): what the detector has decided, and why
curvature   units, progress, curvature (of the mean loss, at its steepest), step (BSP's learning rate): a look
            of the plan auto (`offbeat.policies.auto`)
delay       delay, period, before (the delay until then), t_c, t_p (seconds of an average and of a local
            step), units, reason: what dasgd(auto) has chosen, and by which figures
forecast    protocol, members, units; what the run's profile predicts for an iteration (all workers together
            do one unit each) and what it takes: predicted_ms, actual_ms, error (a share, above 0 where it
            takes longer); own_ms (of a worker's own part); parts: the prediction's forward, backward, update,
            exposed and waiting, in ms
recovery    units, ms, epoch: members have died, the others went on; again: the units that are dealt again;
            partly: of them, those whose update a part of the shards has (none on one host); missing: how many
            updates the parameters lack at most that a dead host's shards had (only when a host is lost)
ledger      units, pending (units that were given back and not done yet), used: the sum of the marks of the
            units that the workers have used, as hexadecimal digits (`offbeat.ledger`)
request     do (checkpoint, switch or drop), ok, text (the answer), units: a person has asked for it
checkpoint  action (saved or restored), path, units, ms
warning     message
error       rank, message
end         seconds, units, samples, samples_per_s, waiting (share of the workers' time), loss
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from offbeat.site import here

Record = dict[str, Any]
GATHER = 1.0
"""Seconds between two `workers` records."""
SAMPLE = 0.2
"""Least seconds between two `step` records."""
KEPT = 100_000
"""Records that wait, at most, for a disk that fails."""


class Journal:
    """Appends records to `path`; with `path=None`, or while it is not to be kept, it forgets them (the first
    member keeps it).

    `record` only puts the record on a list; a thread writes what has gathered every `interval` seconds, so
    that a training step never waits for a disk. A disk that fails (that is full) is reported once, as a
    warning on stderr, and the run goes on; what could not be written is, as soon as it can be.
    """

    def __init__(
        self, path: Path | None, started: float | None = None, interval: float = 0.25, kept: bool = True
    ):
        self.started = here().unix() if started is None else started
        self._path = path
        self.path: Path | None = None  # where it is written now
        self._interval, self._lock, self._file = interval, threading.Lock(), threading.Lock()
        self._waiting: list[Record] = []
        self._closed = threading.Event()
        self._failed = False
        self._flushed = time.monotonic()
        self._thread: threading.Thread | None = None
        self.keep(kept)

    def keep(self, kept: bool) -> None:
        """From here on records are written, or forgotten."""
        if not kept:
            self.flush()
            self.path = None
        elif self._path is not None and self.path is None:
            self.path = self._path
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not here().virtual and self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._write, name="offbeat-journal", daemon=True)
                self._thread.start()

    def record(self, type: str, **fields: Any) -> None:
        if self.path is not None:
            row = {"type": type, "t": round(here().unix() - self.started, 6), **fields}
            with self._lock:
                self._waiting.append(row)
            if self._thread is None and time.monotonic() > self._flushed + self._interval:
                self.flush()

    def _write(self) -> None:
        while not self._closed.wait(self._interval):
            self.flush()

    def flush(self) -> None:
        """Writes what has gathered."""
        if self.path is None:
            return
        self._flushed = time.monotonic()
        with self._file:  # never held by `record`
            with self._lock:
                rows, self._waiting = self._waiting, []
            if not rows:
                return
            text = "".join(json.dumps(_plain(row), allow_nan=False) + "\n" for row in rows)
            try:
                self._append(text.encode())
            except OSError as error:
                with self._lock:  # once there is room again, nothing is missing
                    self._waiting = [*rows, *self._waiting][-KEPT:]
                if not self._failed:
                    self._failed = True
                    with contextlib.suppress(OSError):  # it may be the same disk's
                        print(
                            f"offbeat: the journal {self.path} cannot be written: {error}",
                            file=sys.stderr,
                            flush=True,
                        )

    def _append(self, text: bytes) -> None:
        """All of it, or nothing. Raises OSError."""
        assert self.path is not None
        with self.path.open("ab", buffering=0) as out:
            size = out.seek(0, os.SEEK_END)
            try:
                written = 0
                while written < len(text):
                    written += out.write(text[written:])
            except OSError:
                out.truncate(size)
                raise

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.flush()


def _plain(value: Any) -> Any:
    """JSON has no NaN or infinity: they become their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def read(path: Path | str) -> list[Record]:
    """All records of a journal. `path` is the file or its run's directory. A last line that was cut
    off (the run is being written, or was killed) is left out.

    Raises FileNotFoundError, or ValueError with the line's number where the file is no journal."""
    return list(rows(path))


def rows(path: Path | str) -> Iterator[Record]:
    """As `read`, one record after the other: a journal may be larger than memory."""
    path = Path(path)
    if path.is_dir():
        path = path / "journal.jsonl"
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line == b"\n":
                continue
            text = line.decode(errors="replace")
            try:
                row = json.loads(text)
                if not isinstance(row, dict) or "type" not in row:
                    raise ValueError("no record")
            except (ValueError, RecursionError):
                if not line.endswith(b"\n"):
                    return
                raise ValueError(
                    f"{path} is not a journal of offbeat: line {number} is {text.rstrip()[:60]!r}"
                ) from None
            yield row
