"""Steps that have no closed form, followed in the virtual cluster: a timing-only run, in its steady state."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

from offbeat.protocols import Protocol
from offbeat.virtual.sharing import WORKERS
from offbeat.virtual.timing import Outcome, simulate

if TYPE_CHECKING:
    from offbeat.planner.workers import Kind, Workers
    from offbeat.virtual.model import Model

_UNITS = 8_000, 800
"""That all workers do together, about: the second where every stream to the shards is followed, which takes
long."""
_STEPS = 32, 240
"""Of each worker, at least and at most."""


def seconds(protocol: Protocol, workers: Workers, model: Model, wire: float) -> float:
    """In which all workers together do one unit each, after a while. The same for the same arguments.

    What was drawn for the kind of workers that sets the pace is no fair sample of its units: by how much its
    mean is off is put right."""
    period = getattr(protocol, "period", 1)
    period = period if isinstance(period, int) else 1
    few = protocol.home == "shards" and workers.count <= WORKERS and workers.costs.hosts > 1
    steps = min(max(_UNITS[few] // workers.count, _STEPS[0]), _STEPS[1])
    warm, whole = (-(-count // period) * period for count in (steps // 4, steps))
    begun, ended = (
        simulate(protocol, count * workers.count, workers.fresh(), model, wire=wire)
        for count in (warm, whole)
    )
    bounded = getattr(protocol, "bound", 0) < inf
    pace = max(workers.kinds, key=lambda kind: kind.mean)
    kinds = [pace] if bounded else workers.kinds
    return (ended.seconds - begun.seconds) / (whole - warm) + _missed(kinds, begun, ended, protocol.home)


def _missed(kinds: Sequence[Kind], begun: Outcome, ended: Outcome, home: str) -> float:
    """By how much a unit's mean time is longer than that of the units between two ends."""
    found, units = 0.0, 0
    for kind in kinds:
        update = kind.update if home == "replicas" else 0.0
        for rank in kind.ranks:
            done = ended.workers[rank].units - begun.workers[rank].units
            busy = ended.workers[rank].busy - begun.workers[rank].busy
            found += done * (kind.mean + update) - busy
            units += done
    return found / units if units else 0.0
