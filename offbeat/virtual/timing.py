"""Timing-only runs: how long a plan takes on a cluster of any size, from the very protocol code that runs in
production, without gradients.

What takes time is what the real engine does: units and optimizer steps, buckets, averages, pushes and pulls,
the words before each collective, settles and what they carry. Gradients, averages and words have a group
each and don't slow each other down. Merges, claims of units and the start of a job take no time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from offbeat.cluster import sizes
from offbeat.plan import check, check_timing
from offbeat.protocols import Protocol
from offbeat.virtual.asynchronous import Shards
from offbeat.virtual.clock import Clock
from offbeat.virtual.cost import Costs
from offbeat.virtual.diary import Diary, Recorder
from offbeat.virtual.light import Computing, LightWorker
from offbeat.virtual.meetings import Averages, Reduction, Settlement
from offbeat.virtual.model import Model as Model

WORD = 88
"""Bytes of a word of `offbeat.cluster.control`, without its bit for each parameter."""
ROW = 512
"""Bytes that a member tells the others at the end of a phase on shards, about."""


class Figures(NamedTuple):
    """What one worker did: its steps, the units it has done, and its virtual seconds."""

    rank: int
    clock: int
    units: int
    busy: float
    waited: float


@dataclass(frozen=True)
class Outcome:
    """A run's virtual seconds, the units done, and each worker's part."""

    seconds: float
    units: int
    workers: tuple[Figures, ...]

    @property
    def waiting(self) -> float:
        """Share of the workers' time that they waited for each other."""
        waited, busy = (sum(getattr(w, name) for w in self.workers) for name in ("waited", "busy"))
        return waited / (waited + busy) if waited + busy else 0.0


def simulate(
    plan: Protocol,
    total: int,
    costs: Costs,
    model: Model,
    *,
    wire: float = 1.0,
    journal: Recorder | None = None,
    clock: Clock | None = None,
    batch_size: int | None = None,
    about: Mapping[str, Any] | None = None,
    watch: Callable[[float, float], None] | None = None,
) -> Outcome:
    """Runs `plan` over `total` units on the workers of `costs`, in virtual time.

    wire: bytes of a gradient, and of a change of parameters, by those of the parameters: 0.5 for bf16.
    journal: gets a real run's records; loss and lr are None. clock: the run's, where the journal is to read
    it. batch_size: samples of a unit. about: fields of the journal's `run` record. watch: called now and
    then with virtual time and progress.

    The same for the same arguments, whatever the machine. Raises PlanError for a plan that doesn't fit
    `total`; PeerLost when a worker dies; RuntimeError when no worker can go on, with who waits for what.
    """
    check(plan, total)
    check_timing(plan)
    job = Simulation(plan, total, costs, model, wire, clock or Clock())
    job.diary = Diary(job, journal, batch_size, watch)
    return job.run(about or {})


class Simulation:
    """One run. What all workers share: the clock, the protocol in charge, where they meet.

    own: whether the members' parameters may differ. horizon: no worker's time passes it without an event.
    """

    def __init__(self, plan: Protocol, total: int, costs: Costs, model: Model, wire: float, clock: Clock):
        self.plan, self.total, self.costs, self.model, self.wire = plan, total, costs, model, wire
        self.clock = clock
        self.members: Sequence[int] = tuple(range(costs.workers))
        self.diary: Diary
        self.protocol, self.text = plan, ""
        self.own = False
        self.horizon = inf
        self._word = WORD + (len(model.sizes) + 7) // 8
        self._hosts = len(set(costs.host_of))
        self._settled = 0  # the clock at which all hold the same
        self._entered = True  # a protocol is about to take charge
        self._switch: dict[str, Any] | None = None  # what it cost
        self.computing = Computing(self)
        self.reduction = Reduction(self, [size * wire for size in model.bucket_bytes()], model.ready())
        self.averages = Averages(self, (model.size + model.buffers) * wire)
        self.settlement = Settlement(self)
        self.workers = [LightWorker(self, rank) for rank in self.members]
        self.begun = clock.now
        self._seconds: float | None = None

    def run(self, about: Mapping[str, Any]) -> Outcome:
        for failure in self.costs.failures:
            self.clock.at(failure.at, lambda rank=failure.worker: self._die(rank))  # type: ignore[misc]
        self.diary.begin(about)
        for worker in self.workers:
            worker.program = self.plan.run(worker)
        self.clock.at(self._enter(self.plan.current(self.workers[0]), self.begun), self._release)
        self.clock.run()
        if self._seconds is None:
            raise RuntimeError(f"no worker can go on at {self.clock.now:.6g} s: {self._stuck()}")
        workers = tuple(
            Figures(w.rank, w.clock, w.done, w.busy, self._seconds - w.busy) for w in self.workers
        )
        return Outcome(self._seconds, self.workers[0].units, workers)

    def words(self, at: float) -> float:
        """Seconds of an exchange of words that begins at `at`."""
        return self._gathered(self._word, at)

    def _gathered(self, size: int, at: float) -> float:
        return self.costs.gather(size, self.members, at) if len(self.members) > 1 else 0.0

    # Settles

    def settle(self, met: float) -> None:
        """All members are there, at `met`, and nothing is in flight."""
        first = self.workers[0]
        told, settled = self._settling(met)
        direct = first.shards is not None
        self._agree()
        if (pushes := self.diary.pushes() if direct else None) is not None:
            self.clock.at(settled, pushes)
        for worker in self.workers:
            worker.shards, worker.unheld = None, False
        self.own, self._settled = False, first.clock
        then = first.then if not first.over else self.plan if first.running else None
        if then is None:
            self.clock.at(settled, self._release)
            return
        before, entered = self.text, self._enter(then.current(first), settled, direct)
        if not first.over:
            self._entered = True
            entered += self.costs.switch
            drained = first.met if first.met_at >= first.asked else 0.0
            self._switch = {
                "from": before,
                "to": self.text,
                "drain_ms": round((first.now - first.asked - drained) * 1e3, 3),
                "meet_ms": round((drained + told - first.now) * 1e3, 3),
                "settle_ms": round((settled - told) * 1e3, 3),
                "transfer_ms": round((entered - settled) * 1e3, 3),
            }
        self.clock.at(entered, self._release)

    def _settling(self, met: float) -> tuple[float, float]:
        """When all members know of all that they are there, and when they hold the same."""
        costs, members, model, first = self.costs, self.members, self.model, self.workers[0]
        if len(members) == 1 or (first.shards is None and first.clock == self._settled):
            return met, met
        told = at = met + self.words(met)
        size: float = model.buffers
        if first.shards is not None:
            pieces = self._hosts * sizes.shards(model.size, self._hosts)
            for _ in range(pieces if self._hosts > 1 else 0):
                at += costs.broadcast(model.size * (1 + model.state) / pieces, members, at)
        elif self.own:
            size += model.size * (1 + model.state)
        if size:
            at += costs.allreduce(size, members, at)
        if first.shards is not None:
            at += self._gathered(8, at)
            at += self._gathered(ROW, at)
        return told, at

    def _agree(self) -> None:
        """All count on from the same."""
        shards, clock = self.workers[0].shards, max(worker.clock for worker in self.workers)
        units = self.workers[0].units if shards is None else shards.units
        for worker in self.workers:
            worker.skipped += clock - worker.clock
            worker.clock, worker.units = clock, units

    def _enter(self, protocol: Protocol, at: float, direct: bool = False) -> float:
        """`protocol` takes charge; `direct`: from shards. Returns when it has."""
        self._entered = self._entered or protocol != self.protocol
        self.protocol, self.text = protocol, str(protocol)
        if protocol.home == "shards" and len(self.members) > 1:
            for _ in range(1 + direct):
                at += self.words(at)
            Shards(self, at)
        return at

    def _release(self) -> None:
        """All hold the same, and go on with the protocol in charge, or have come to the end."""
        now, switch, self.settlement.workers = self.clock.now, self._switch, []
        for worker in self.workers:
            worker.now = now
        if self.workers[0].over and not self.workers[0].running:
            self._seconds = now - self.begun
            self.clock.stop()
            self.diary.end(self._seconds)
            return
        if self._entered:
            self._switch, self._entered = None, False
            self.diary.phase(switch)
        for worker in self.workers:
            if worker.over:
                worker.over, worker.program = False, self.plan.run(worker)
            worker.advance()

    # What goes wrong

    def _die(self, rank: int) -> None:
        message = (
            f"rank {rank} died at {self.clock.now:.6g} s of virtual time, and the others cannot go on "
            f"without it"
        )
        from offbeat.cluster.epoch import PeerLost  # with torch, which nothing else here needs

        self.diary.record("error", rank=rank, message=f"PeerLost: {message}")
        raise PeerLost(message)

    def _stuck(self) -> str:
        """Who waits for what."""
        found = [("a gradient's reduction", [worker.rank for worker in self.reduction.workers])]
        for average in self.averages.open.values():
            found.append(("an average", [worker.rank for worker in average.waiting]))
        found.append(("a settle", [worker.rank for worker in self.settlement.workers]))
        if (shards := self.workers[0].shards) is not None:
            found += shards.waiting()
        return "; ".join(f"in {name} wait {_ranks(ranks)}" for name, ranks in found if ranks)


def _ranks(ranks: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:most])) + (", …" if len(ranks) > most else "")
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {shown}"
