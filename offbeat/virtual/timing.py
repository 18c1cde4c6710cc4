"""Timing-only runs: how long a plan takes on a cluster of any size, from the very protocol code that runs in
production, without gradients.

What takes time is what the real engine does: units and optimizer steps, buckets, averages, pushes and pulls,
the words before each collective, settles and what they carry. Gradients, averages and words have a group
each and don't slow each other down. Merges, claims of units and the start of a job take no time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, NamedTuple

from offbeat.cluster import sizes
from offbeat.cluster.roll import names_of
from offbeat.plan import check, check_timing
from offbeat.policies.switches import Stragglers
from offbeat.protocols import Protocol
from offbeat.virtual.asynchronous import Shards
from offbeat.virtual.clock import Clock
from offbeat.virtual.cost import Costs
from offbeat.virtual.diary import Diary, Recorder
from offbeat.virtual.light import Computing, LightWorker
from offbeat.virtual.meetings import Averages, Forming, Readmission, Reduction, Settlement
from offbeat.virtual.model import Model as Model
from offbeat.virtual.watching import NUMBER, Watching
from offbeat.worker import Handle

WORD = 88
"""Bytes of a word of `offbeat.cluster.control`, without its bit for each parameter."""
ROW = 512
"""Bytes that a member tells the others at the end of a phase on shards, about."""
TEXT = 300
"""Bytes of the job's place, about, as a member that returns is told it; as many for each parameter's name."""


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
    stragglers: Stragglers | None = None,
) -> Outcome:
    """Runs `plan` over `total` units on the workers of `costs`, in virtual time.

    wire: bytes of a gradient, and of a change of parameters, by those of the parameters: 0.5 for bf16.
    journal: gets a real run's records; loss and lr are None. clock: the run's, where the journal is to read
    it. batch_size: samples of a unit. about: fields of the journal's `run` record. watch: called now and
    then with virtual time and progress. stragglers: what is done about them (None: nothing).

    The same for the same arguments, whatever the machine. Raises PlanError for a plan that doesn't fit
    `total`; PeerLost when a worker dies; RuntimeError when no worker can go on, with who waits for what.
    """
    check(plan, total)
    check_timing(plan)
    policy = stragglers or Stragglers()
    job = Simulation(policy.apply(plan), total, costs, model, wire, clock or Clock(), policy)
    job.diary = Diary(job, journal, batch_size, watch)
    return job.run(about or {})


class Simulation:
    """One run. What all workers share: the clock, the protocol in charge, where they meet.

    own: whether the members' parameters may differ. horizon: no worker's time passes it without an event.
    first: the first member. outside: who was excluded. watching: None where nobody watches over stragglers.
    """

    def __init__(
        self,
        plan: Protocol,
        total: int,
        costs: Costs,
        model: Model,
        wire: float,
        clock: Clock,
        policy: Stragglers,
    ):
        self.plan, self.total, self.costs, self.model, self.wire = plan, total, costs, model, wire
        self.clock = clock
        self.members: Sequence[int] = tuple(range(costs.workers))
        self.outside: frozenset[int] = frozenset()
        self.policy = policy
        self.watching = None if policy.policy == "off" else Watching(self, policy)
        self.diary: Diary
        self.protocol, self.text = plan, ""
        self.own = False
        self.horizon = inf
        self._word = WORD + (len(model.sizes) + 7) // 8
        self._hosts = len(set(costs.host_of))
        self._epoch = 0  # how often the members have changed
        self._under: dict[str, int] = {}  # units done under each protocol, up to `_entered_at`
        self._entered_at = 0
        self._settled = 0  # the clock at which all hold the same
        self._entered = True  # a protocol is about to take charge
        self._switch: dict[str, Any] | None = None  # what it cost
        self.computing = Computing(self)
        self.reduction = Reduction(self, [size * wire for size in model.bucket_bytes()], model.ready())
        self.averages = Averages(self, (model.size + model.buffers) * wire)
        self.settlement, self.forming, self.readmission = Settlement(self), Forming(self), Readmission(self)
        self.workers = [LightWorker(self, rank) for rank in self.members]
        self.first = self.workers[0]
        self.begun = clock.now
        self._seconds: float | None = None

    def run(self, about: Mapping[str, Any]) -> Outcome:
        for failure in self.costs.failures:
            self.clock.at(failure.at, lambda rank=failure.worker: self._die(rank))  # type: ignore[misc]
        self.diary.begin(about)
        for worker in self.workers:
            worker.program = self.plan.run(worker)
        self.clock.at(self._enter(self.plan.current(self.first), self.begun), self._release)
        self.clock.run()
        if self._seconds is None:
            raise RuntimeError(f"no worker can go on at {self.clock.now:.6g} s: {self._stuck()}")
        workers = tuple(
            Figures(w.rank, w.clock, w.done, w.busy, self._seconds - w.busy) for w in self.workers
        )
        return Outcome(self._seconds, self.first.units, workers)

    def words(self, at: float) -> float:
        """Seconds of an exchange of words that begins at `at`."""
        return self._gathered(self._word, at)

    def _gathered(self, size: int, at: float) -> float:
        return self.costs.gather(size, self.members, at) if len(self.members) > 1 else 0.0

    # Settles

    def settle(self, met: float) -> None:
        """All members are there, at `met`, and nothing is in flight."""
        first = self.first
        told, settled = self._settling(met)
        direct = first.shards is not None
        self._agree()
        if (pushes := self.diary.pushes() if direct else None) is not None:
            self.clock.at(settled, pushes)
        if first.shards is not None and first.shards.calm < inf and self.watching is not None:
            self.watching.forget()
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
        costs, members, model, first = self.costs, self.members, self.model, self.first
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
        """All workers count on from the same."""
        shards, clock = self.first.shards, max(worker.clock for worker in self.workers)
        units = self.first.units if shards is None else shards.units
        for worker in self.workers:
            worker.skipped += clock - worker.clock
            worker.clock, worker.units = clock, units

    def _enter(self, protocol: Protocol, at: float, direct: bool = False) -> float:
        """`protocol` takes charge; `direct`: from shards. Returns when it has."""
        self._entered = self._entered or protocol != self.protocol
        done = self._under.get(self.text, 0) + self.first.units - self._entered_at
        self._under[self.text], self._entered_at = done, self.first.units
        self.protocol, self.text = protocol, str(protocol)
        if protocol.home == "shards" and len(self.members) > 1:
            for _ in range(1 + direct):
                at += self.words(at)
            Shards(self, at)
        return at

    def _release(self) -> None:
        """All hold the same, and go on with the protocol in charge, or have come to the end."""
        now, switch, self.settlement.workers = self.clock.now, self._switch, []
        members = [self.workers[rank] for rank in self.members]
        for worker in members:
            worker.now = now
        if self.first.over and not self.first.running:
            self._seconds = now - self.begun
            self.clock.stop()
            self.diary.end(self._seconds)
            return
        if self._entered:
            self._switch, self._entered = None, False
            self.diary.phase(switch)
            if self.watching is not None:
                self.watching.begin()
        for worker in members:
            if worker.over:
                worker.over, worker.program = False, self.plan.run(worker)
            worker.advance()

    def under(self, protocol: Protocol, units: int) -> int:
        """Units done under `protocol`, when as many were done in all."""
        since = units - self._entered_at if protocol == self.protocol else 0
        return self._under.get(str(protocol), 0) + since

    # Members that are excluded and come back

    def exclude(self, worker: LightWorker, ranks: frozenset[int]) -> Handle:
        """`worker`, like all members at this place of theirs, goes on without `ranks`."""
        if not ranks <= self.outside:  # it is the first one here
            staying = tuple(rank for rank in self.members if rank not in ranks)
            self.outside |= ranks
            self._regroup(
                staying,
                worker.now + self.costs.membership,
                f"without {names_of(ranks)}, which {'is' if len(ranks) == 1 else 'are'} slow",
            )
            if self.watching is not None:
                self.watching.begin()
        worker.members = self.members
        if self.watching is not None:
            self.watching.own_time(worker)
        return self.forming

    def readmit(self, met: float) -> None:
        """All members are there, at `met`, to call back whoever is outside, for what the members hold."""
        costs, model, names = self.costs, self.model, names_of(self.outside)
        at = self._settling(met)[1] + costs.membership
        self.outside = frozenset()
        self._agree()
        self._regroup(tuple(range(costs.workers)), at, f"back among the members: {names}")
        names_size, held = TEXT * len(model.sizes), model.size * (1 + model.state) + model.buffers
        for size in (NUMBER, names_size, held, NUMBER, TEXT, NUMBER, TEXT):
            at += costs.broadcast(size, self.members, at)
        self._settled = self.first.clock
        self.clock.at(at, self._go_on)

    def _go_on(self) -> None:
        for worker in self.workers:
            worker.now, worker.members = self.clock.now, self.members
        if self.watching is not None:
            self.watching.forget()
        for worker in self.workers:
            worker.advance()

    def _regroup(self, members: Sequence[int], at: float, reason: str) -> None:
        self.members, self._epoch = members, self._epoch + 1
        if (first := self.workers[members[0]]) is not self.first:  # it keeps the journal now
            first.due, self.first.due = self.first.due, inf
            self.first = first
        fields = {"epoch": self._epoch, "members": list(members), "reason": reason}
        self.clock.at(at, partial(self.diary.record, "members", **fields))

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
        if (shards := self.first.shards) is not None:
            found += shards.waiting()
        return "; ".join(f"in {name} wait {_ranks(ranks)}" for name, ranks in found if ranks)


def _ranks(ranks: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:most])) + (", …" if len(ranks) > most else "")
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {shown}"
