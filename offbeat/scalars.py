"""A journal's figures for TensorBoard: a pure function of its records, and the writer that follows a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.cluster.spec import LaunchError
from offbeat.events import event
from offbeat.journal import Record
from offbeat.live import View, finite, fold, number


class Scalar(NamedTuple):
    """One value of one curve. `step` counts units, so that plans with unlike steps share an axis; `t` is in
    seconds since the run's start."""

    tag: str
    value: float
    step: int
    t: float


class Note(NamedTuple):
    """An event in words."""

    tag: str
    text: str
    step: int
    t: float


class Scalars:
    """Turns records, in their order, into what TensorBoard shows."""

    def __init__(self) -> None:
        self.view = View()

    def read(self, record: Record) -> Iterator[Scalar | Note]:
        """What one more record gives."""
        self.view = fold(self.view, record)
        view, t, kind = self.view, finite(record.get("t")) or 0.0, record.get("type")
        units = finite(record.get("units"))
        step = int(view.units if units is None else units)
        for tag, value in self._values(record):
            if value is not None:
                yield Scalar(tag, value, step, t)
        if kind in ("run", "evaluation", "end"):
            return
        if text := event(record):
            yield Note(f"events/{kind}", text, step, t)

    def _values(self, record: Record) -> Iterator[tuple[str, float | None]]:
        view = self.view
        match record.get("type"):
            case "step":
                yield "training/loss", number(record.get("loss"))
                yield "training/lr", number(record.get("lr"))
                yield "training/staleness", number(record.get("staleness"))
                yield "training/progress", number(record.get("progress"))
            case "evaluation":
                values = record.get("values")
                for name, value in values.items() if isinstance(values, dict) else ():
                    yield f"evaluation/{name}", number(value)
            case "workers":
                yield "workers/samples per second", view.samples_per_s
                yield "workers/waiting", view.waiting
                for rank, pace in view.paces.items():
                    yield f"units per second/worker {rank}", pace.units_per_s
                    yield f"waiting/worker {rank}", pace.waiting
            case "members":
                yield "workers/members", float(len(view.members or ()))
            case "switch":
                for part in ("drain", "meet", "settle", "transfer"):
                    yield f"switch/{part} ms", number(record.get(f"{part}_ms"))
            case "pushes":
                yield "pushes/mean staleness", number(record.get("mean_staleness"))


class Board:
    """Writes a run's figures where TensorBoard finds them (`tensorboard --logdir runs`).

    Raises LaunchError, which says what to install, where TensorBoard's package is missing."""

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise LaunchError(
                '--tensorboard needs the package tensorboard: pip install "offbeat[tensorboard]"'
            ) from None
        self._make: Any = SummaryWriter
        self._writer: Any = None
        self._scalars, self._started = Scalars(), 0.0

    def open(self, directory: Path) -> None:
        """What follows is written there."""
        self._scalars, self._started = Scalars(), 0.0
        self._writer = self._make(str(directory))

    def add(self, record: Record) -> None:
        """Writes what the record gives."""
        if record.get("type") == "run":
            self._started = finite(record.get("started")) or 0.0
        for one in self._scalars.read(record):
            when = self._started + one.t
            if isinstance(one, Note):
                self._writer.add_text(one.tag, one.text, one.step, when)
            else:
                self._writer.add_scalar(one.tag, one.value, one.step, walltime=when)

    def close(self) -> None:
        """Writes what is left."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
