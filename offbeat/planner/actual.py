"""What a profile predicted for a run, held to what the run does: both are journalled, and it is said when
they part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offbeat.planner.forms import Forms, Iteration
from offbeat.planner.workers import scaled
from offbeat.protocols import Protocol
from offbeat.virtual.cluster import Cluster, ClusterError
from offbeat.virtual.description import find
from offbeat.virtual.model import Model

APART = 0.10
"""Share of the predicted time by which the actual one must differ to be told of."""
WARM = 2.0
"""Seconds of a phase that don't count."""
ENOUGH = 5.0
"""Seconds that must have been seen before it is judged."""
AGAIN = 30.0
"""Seconds between two records of a phase."""


@dataclass(frozen=True)
class Seen:
    """Where the job is: seconds, units done by all, and all workers' own steps and the seconds they have
    spent on them."""

    at: float
    units: int
    steps: int = 0
    busy: float = 0.0


@dataclass(frozen=True)
class Comparison:
    """Seconds in which all workers together do one unit each. unit: seconds that a worker spends on a unit of
    its own, predicted and actual."""

    predicted: Iteration
    actual: float
    unit: float | None

    @property
    def error(self) -> float:
        """By how much it took longer than predicted, as a share."""
        return self.actual / self.predicted.seconds - 1

    @property
    def text(self) -> str:
        predicted = self.predicted
        found = (
            f"an iteration takes {self.actual * 1e3:.3g} ms, {abs(self.error) * 100:.0f}% "
            f"{'more' if self.error > 0 else 'less'} than the {predicted.seconds * 1e3:.3g} ms of the profile"
        )
        if self.unit is None:
            return found
        own = predicted.computing
        if abs(self.unit - own) > abs(self.actual - predicted.seconds) / 2:
            return f"{found}: a worker's own part takes {self.unit * 1e3:.3g} ms, not {own * 1e3:.3g} ms"
        return f"{found}, though a worker's own part takes {self.unit * 1e3:.3g} ms: it is the links"


class Forecast:
    """Compares, phase by phase. cluster, model: the profile and what is trained. batch: samples of a unit.
    record, warn: where it is told."""

    def __init__(
        self,
        cluster: Cluster,
        model: Model,
        wire: float,
        record: Callable[..., None],
        warn: Callable[[str], None],
        batch: int | None = None,
    ):
        profile = cluster.profile
        if profile is not None and profile.batch and batch and profile.batch != batch:
            cluster = scaled(cluster, batch / profile.batch)
        shape = cluster.model
        if shape is not None and shape.sizes == model.sizes and shape.passed:
            model = replace(model, passed=shape.passed)
        self._cluster, self._model, self._wire = cluster, model, wire
        self._record, self._warn = record, warn
        self._key: tuple[str, int] | None = None
        self._predicted: Iteration | None = None
        self._begun = self._first = self._last = Seen(0.0, 0)
        self._told = 0.0
        self._said = self._refused = False

    def look(self, protocol: Protocol, members: int, now: Seen) -> None:
        """Where the job is now; about once a second, and at the end of each phase if that can be."""
        key = str(protocol), members
        if key != self._key:
            self.end()
            self._key, self._begun, self._first, self._last = key, now, now, now
            self._told, self._said = now.at, False
            self._predicted = self._predict(protocol, members)
            return
        if now.at < self._begun.at + WARM:
            self._first = now
        self._last = now
        found = self.compare()
        if found is None or now.at < self._first.at + ENOUGH:
            return
        if abs(found.error) > APART and not self._said:
            self._said = True
            self._warn(f"under {protocol} {found.text}")
            self._tell(found)
        elif now.at > self._told + AGAIN:
            self._tell(found)

    def compare(self) -> Comparison | None:
        """Of the phase so far; None where there is nothing to compare yet."""
        units, seconds = self._last.units - self._first.units, self._last.at - self._first.at
        if self._predicted is None or self._key is None or units <= 0 or seconds <= 0:
            return None
        steps, busy = self._last.steps - self._first.steps, self._last.busy - self._first.busy
        own = busy / steps if steps > 0 else None
        return Comparison(self._predicted, seconds / units * self._key[1], own)

    def end(self) -> None:
        """The phase is over."""
        if (found := self.compare()) is not None:
            self._tell(found)
        self._predicted = None

    def _predict(self, protocol: Protocol, members: int) -> Iteration | None:
        try:
            return Forms(self._cluster.sized(members), self._model, self._wire).of(protocol)
        except ClusterError as error:
            if not self._refused:
                self._refused = True
                self._warn(f"nothing is predicted for {members} members: {error}")
            return None

    def _tell(self, found: Comparison) -> None:
        assert self._key is not None
        self._told = self._last.at
        predicted = found.predicted
        parts = ("forward", "backward", "update", "exposed", "waiting")
        self._record(
            "forecast",
            protocol=self._key[0],
            members=self._key[1],
            units=self._last.units,
            predicted_ms=round(predicted.seconds * 1e3, 4),
            actual_ms=round(found.actual * 1e3, 4),
            error=round(found.error, 4),
            own_ms=None if found.unit is None else round(found.unit * 1e3, 4),
            parts={name: round(getattr(predicted, name) * 1e3, 4) for name in parts},
        )


def seen(at: float, units: int, rows: Sequence[Mapping[str, Any]]) -> Seen:
    """From the `workers` record's rows."""
    return Seen(at, units, sum(row["units"] for row in rows), sum(row["busy_s"] for row in rows))


def profile_of(path: str) -> Cluster:
    """The profile that a run is given. Raises ValueError for one that cannot be read."""
    if not Path(path).is_file():
        raise ValueError(f"--profile {path}: there is no such file; `offbeat profile SCRIPT` makes one")
    return find(path)
