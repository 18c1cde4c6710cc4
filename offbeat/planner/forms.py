"""How long a protocol's steps take on a cluster, in closed form.

Symbols: n workers, B_l samples of a unit; t_f, t_b seconds of a unit's forward and backward, t_l of the local
update; t_p = t_f + t_b + t_l; t_c seconds of one average; τ the period, d the delay. The DaSGD paper's

    t_total = n_s / (m·p) · (t_f + t_b + t_l + exposed t_c)

is `Iteration.epoch`: m workers, p samples in parallel on each, n_s samples.

All-reduces, words and shards cost what they cost in the virtual cluster (`offbeat.virtual.cost`); tests hold
these forms to its timing-only runs. What they leave out: starts, settles at the end, what goes on beside
training.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from math import inf

import numpy

from offbeat.plan import phases
from offbeat.planner import followed, recurrence
from offbeat.planner.asynchronous import LIGHT, Queues
from offbeat.planner.auto import first
from offbeat.planner.spread import mean_of_slowest, slowest
from offbeat.planner.workers import Workers, states
from offbeat.protocols import BSP, DaSGD, LocalSGD, Protocol
from offbeat.virtual.cluster import Cluster
from offbeat.virtual.flight import reductions
from offbeat.virtual.model import Model
from offbeat.virtual.timing import WORD

_NOTHING = 1e-9
_QUANTILES = 96
"""Of the slowest worker's time, at which BSP's buckets are followed."""


@dataclass(frozen=True)
class Iteration:
    """Seconds in which all workers together do as many units as they are, on average.

    ideal: units per second that they would do if each worked for itself. forward, backward, update: a
    worker's own; where fast workers do more units, theirs count more. exposed: communication that nothing
    hides, were all workers equally fast. waiting: for slower workers, and in queues.
    """

    workers: int
    ideal: float
    forward: float
    backward: float
    update: float
    exposed: float
    waiting: float

    @property
    def computing(self) -> float:
        """t_p."""
        return self.forward + self.backward + self.update

    @property
    def seconds(self) -> float:
        return self.computing + self.exposed + self.waiting

    @property
    def efficiency(self) -> float:
        """Share of the speed that the workers would have without any communication or waiting."""
        return min(self.units_per_s / self.ideal, 1.0)  # shards spare a worker its update

    @property
    def units_per_s(self) -> float:
        return self.workers / self.seconds

    def epoch(self, samples: int, batch: int) -> float:
        """t_total: seconds of a pass over `samples` with units of `batch`."""
        return samples / (self.workers * batch) * self.seconds


class Forms:
    """The forms for a cluster of known size (`Cluster.sized`) and a model. wire: bytes of a gradient, and of
    a change of parameters, by those of the parameters: 0.5 for bf16."""

    def __init__(self, cluster: Cluster, model: Model, wire: float = 1.0):
        self.cluster, self.model, self.wire = cluster, model, wire
        self._known: dict[Protocol, Iteration] = {}
        self._states = [
            (share, State(workers, model, wire, cluster.backward)) for share, workers in states(cluster)
        ]

    def __len__(self) -> int:
        return self._states[0][1].workers.count

    @property
    def computing(self) -> float:
        """t_p, of an average worker without stragglers."""
        return self._states[0][1].computing

    @property
    def pace(self) -> float:
        """t_p of the slowest kind of worker, which sets a local protocol's pace."""
        kinds = self._states[0][1].workers.kinds
        return max(kind.mean + kind.update for kind in kinds)

    @property
    def averaging(self) -> float:
        """t_c: seconds of one average, without stragglers."""
        return self._states[0][1].averaging

    def without_overlap(self) -> float:
        """Seconds of a mini-batch SGD step that sends its gradient when backward is over, as in the paper."""
        return self._states[0][1].without_overlap()

    def of(self, plan: Protocol, total: int | None = None) -> Iteration:
        """A plan's mean iteration: every protocol's for its share of the units. total: units of the job,
        needed where an end is in units.

        Raises ValueError where that is missing."""
        begun, rows = 0.0, []
        for leaf, end in phases(plan):
            if isinstance(end, int):
                if total is None:
                    raise ValueError(f"{plan}: an end in units needs the job's length (--total)")
                end = end / total
            end = 1.0 if end is None else min(end, 1.0)
            rows.append((end - begun, self._steady(leaf)))
            begun = end
        return _mixed(rows)

    def _steady(self, protocol: Protocol) -> Iteration:
        """Over the cluster's states, each for its share of the time: their speeds add up."""
        if protocol not in self._known:
            self._known[protocol] = self._over_states(protocol)
        return self._known[protocol]

    def _over_states(self, protocol: Protocol) -> Iteration:
        found = [(share, state.of(protocol)) for share, state in self._states if share]
        if len(found) == 1:
            return found[0][1]
        speed = sum(share / one.seconds for share, one in found)
        rows = [(share / one.seconds / speed, one) for share, one in found]
        # A straggler's own slowness is the others' waiting, not the cluster's computing.
        calm, mixed = found[0][1], _mixed(rows)
        waiting = mixed.seconds - calm.computing - calm.exposed
        parts = calm.forward, calm.backward, calm.update, calm.exposed
        return Iteration(calm.workers, calm.ideal, *parts, max(waiting, 0.0))


class State:
    """The forms for one state of a cluster."""

    def __init__(self, workers: Workers, model: Model, wire: float, backward: float):
        self.workers, self.model, self.wire, self._backward = workers, model, wire, backward
        self.computing = workers.unit + workers.update

    @cached_property
    def words(self) -> float:
        """Seconds of an exchange of words."""
        return self.workers.gather(WORD + (len(self.model.sizes) + 7) // 8)

    @cached_property
    def averaging(self) -> float:
        """t_c: seconds from the moment at which the last member has begun an average."""
        if self.workers.count == 1:
            return 0.0
        size = (self.model.size + self.model.buffers) * self.wire
        return max(self.workers.allreduce(size), self.words)

    def of(self, protocol: Protocol) -> Iteration:
        """A protocol of a user's own has no form: its steps are followed in the virtual cluster."""
        if self.workers.count == 1:
            return self._iteration(0.0, self.computing)
        if isinstance(protocol, BSP):
            return self._bsp()
        if isinstance(protocol, DaSGD):
            period, delay = protocol.timing(self._hidden)
            return self._local(period, delay)
        if isinstance(protocol, LocalSGD):
            return self._local(protocol.period, 0)
        if protocol.home == "shards":
            return self._asynchronous(protocol)
        return self._iteration(0.0, followed.seconds(protocol, self.workers, self.model, self.wire))

    def _iteration(self, exposed: float, seconds: float) -> Iteration:
        workers = self.workers
        return self._split(workers.unit, workers.update, exposed, seconds)

    def _split(self, unit: float, update: float, exposed: float, seconds: float) -> Iteration:
        forward, backward = unit * (1 - self._backward), unit * self._backward
        waiting = seconds - unit - update - exposed
        if waiting < _NOTHING * seconds:  # what rounding leaves over
            waiting = 0.0
        workers = self.workers
        return Iteration(workers.count, workers.speed, forward, backward, update, exposed, waiting)

    # On shards

    @cached_property
    def _queues(self) -> Queues:
        return Queues(self.workers, self.model, self.wire)

    def _asynchronous(self, protocol: Protocol) -> Iteration:
        """t_f + t_b and what a push and its pull take beside the others'. SSP's bound makes no difference
        where all workers take the same time; where it does, all do equally many units."""
        queues, workers = self._queues, self.workers
        bounded = getattr(protocol, "bound", inf) < inf and not (workers.constant and workers.alike)
        if bounded or queues.busy > LIGHT:
            seconds = followed.seconds(protocol, workers, self.model, self.wire)
        else:
            seconds = queues.seconds
        shares = [k.count / workers.count for k in workers.kinds] if bounded else queues.shares
        unit = sum(share * kind.mean for share, kind in zip(shares, workers.kinds, strict=True))
        return self._split(unit, 0.0, queues.alone, float(seconds))

    # Mini-batch SGD

    def _bsp(self) -> Iteration:
        """t_f + t_b + t_l and what of the buckets' all-reduces backward does not hide. A bucket leaves when
        the slowest worker's backward has come to it and few enough are under way
        (`offbeat.virtual.flight`)."""
        workers, kinds = self.workers, self.workers.kinds
        even = self._landing(workers.unit + workers.update, workers.update)
        if workers.constant and workers.alike:
            return self._iteration(max(even - self.computing, 0.0), even)
        update = max(kind.update for kind in kinds)
        ends = slowest([(kind.unit.shifted(kind.update), kind.count) for kind in kinds], _QUANTILES)
        seconds = float(numpy.mean([self._landing(float(end), update) for end in ends]))
        return self._iteration(max(even - self.computing, 0.0), max(seconds, even))

    def _landing(self, end: float, update: float) -> float:
        """When backward returns, where it began after `update` and is over at `end` on the slowest."""
        unit, workers = end - update, self.workers
        ready = [update + share * unit for share in self._points]
        landed = reductions(workers.costs, self._buckets, ready, workers.members)
        return max(landed, end + self.words)

    @cached_property
    def _buckets(self) -> list[float]:
        """Bytes of each bucket, as they travel."""
        return [size * self.wire for size in self.model.bucket_bytes()]

    @cached_property
    def _points(self) -> list[float]:
        """Share of a unit after which each bucket is full."""
        return [1 - self._backward + self._backward * share for share in self.model.ready()]

    def without_overlap(self) -> float:
        """t_p + t_c: the whole gradient leaves when the slowest worker's backward is over."""
        kinds = self.workers.kinds
        spreads = [(kind.unit.shifted(kind.update), kind.count) for kind in kinds]
        return mean_of_slowest(spreads) + self.averaging

    # Local SGD, on time and late

    @cached_property
    def _hidden(self) -> int:
        kinds = self.workers.kinds
        return first(self.averaging, max(kind.mean + kind.update for kind in kinds))

    def _local(self, period: int, delay: int) -> Iteration:
        """t_p + max(0, t_c − d·t_p) / τ where all workers are alike and their times don't vary. Else they
        wait for the slowest of sums of τ (d = 0), or for a mean that began with the last of them (d > 0): a
        recurrence, followed with draws."""
        workers, t_c = self.workers, self.averaging
        exposed = max(0.0, t_c - delay * self.computing) / period
        if workers.constant and workers.alike:
            return self._iteration(exposed, self.computing + exposed)
        if workers.constant:
            return self._iteration(exposed, recurrence.delayed(workers.kinds, t_c, period, delay))
        sums = [(k.unit.sum(period).shifted(period * k.update), k.count) for k in workers.kinds]
        on_time = (mean_of_slowest(sums) + t_c) / period
        seconds = on_time
        if delay:
            seconds = min(recurrence.delayed(workers.kinds, t_c, period, delay), on_time)
        return self._iteration(exposed, max(seconds, self.computing + exposed))


def _mixed(rows: list[tuple[float, Iteration]]) -> Iteration:
    """The mean iteration, each for its share of the units."""
    if len(rows) == 1:
        return rows[0][1]
    names = [field.name for field in fields(Iteration)][1:]
    means = [sum(share * getattr(one, name) for share, one in rows) for name in names]
    return Iteration(rows[0][1].workers, *means)
