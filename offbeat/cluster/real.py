"""The real engine's worker: it keeps a replica of its own, or pushes to shards and pulls from them, as the
protocol in charge wants."""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Any

from torch.optim import Optimizer

from offbeat.cluster.changes import ChangingWorker
from offbeat.cluster.control import Event, Word
from offbeat.cluster.counts import Counts, summed
from offbeat.cluster.memory import CALM, KNOCK
from offbeat.cluster.shards import ShardHome
from offbeat.cluster.state import collect, share
from offbeat.hyper import applied
from offbeat.job import Job
from offbeat.ledger import dealt, mark
from offbeat.protocols import Protocol
from offbeat.shard import Push
from offbeat.site import now
from offbeat.worker import Handle, Ready

LOOK = 0.5
"""Seconds between two looks at whether a member has died, while nobody waits for anybody."""


class Called(Exception):
    """All workers are called together because one, `rank`, saw training diverge. `met`: this worker has
    had their words already."""

    def __init__(self, rank: int, met: bool = False):
        super().__init__(rank, met)
        self.rank, self.met = rank, met


class Pushing(Handle):
    """A push under way; it has ticked the clock, and `wait` returns when it is applied here."""

    def __init__(self, worker: RealWorker):
        self._worker = worker

    def wait(self) -> None:
        self._worker.pushed()


class Pulling(Handle):
    """A pull under way. While other hosts' parameters travel, the next batch is fetched."""

    def __init__(self, worker: RealWorker):
        self._worker = worker

    def wait(self) -> None:
        self._worker.pulled()


class RealWorker(ChangingWorker):
    """Both homes. Under shards this worker holds tickets, the numbers of units it is to do: `_tickets`, the
    next one first."""

    def __init__(self, *args: Any, here: Job, cut: str | None = None, **more: Any):
        self._here, self._cut_by = here, cut
        self.home: ShardHome | None = None
        self._tickets: deque[int] = deque()
        self._limit = inf  # from this ticket on nobody is a straggler any more
        self._halt = inf  # before this ticket the phase halts, to let newcomers in
        self._phase = 0  # how often shards were cut
        self._cut_at, self._cut_used = 0, 0  # units then, and their marks
        self._strayed = 0  # marks of the units of this phase, less those of its tickets
        self._taken = 0  # tickets done in this phase
        self._last_unit = 0
        self.paused: Protocol | None = None  # what a checkpoint has interrupted
        self._looked = 0.0
        self.on_deal: Callable[[], None] = lambda: None  # units are dealt in another way from here on
        self.on_ticket: Callable[[], None] = lambda: None
        self.on_commit: Callable[[int], None] = lambda units: None
        self.on_late: Callable[[], None] = lambda: None  # somebody came to a phase's end outside of step()
        self.stepping = False  # inside step()
        self.row: Callable[[], str] = lambda: ""
        self.shards_ms: float | None = None  # what making room for shards cost
        super().__init__(*args, **more)

    def join_at(self, plan: Protocol) -> None:
        """A newcomer is where the members are: in the same protocol of the plan, or before the first one."""
        if self.place_protocol is None:
            return
        here = [protocol for protocol in plan.parts() if str(protocol) == self.place_protocol]
        self.protocol, self._entered = here[0] if here else plan, True

    def prepare(self, plan: Protocol) -> None:
        """Collective, before the first step: makes room for shards if the plan has a use for them."""
        sharded = any(part.home == "shards" for part in plan.parts())
        if self.team.arrived is None and not self.team.alone and sharded:
            begun = now()
            self._open_home()
            self.shards_ms = (now() - begun) * 1e3

    def _open_home(self) -> None:
        """Collective: makes room for the shards of the members' hosts."""
        counts = None
        if self.home is not None:
            counts = self.home.counts
            self.home.close()
        self.team.grown = False
        self.home = ShardHome(
            self.team,
            self.state,
            self._here.node,
            self._here.shards,
            self._here.meeting,
            self._cut_by,
            self._wire is not None,
            self.check,
        )
        self.home.counts = counts or self.home.counts

    @property
    def sharded(self) -> bool:
        """Whether the parameters are in shards now."""
        return self.team.apart

    def check(self) -> None:
        """Raises PeerLost when a member has gone, Called when all are called together."""
        self.epoch.check()
        self._answer_alarm()

    def _answer_alarm(self) -> None:
        if self.sharded and self.home is not None and (alarm := self.home.alarm):
            raise Called(alarm - 1)

    # Facts

    @property
    def units(self) -> int:
        if not self.sharded:
            return super().units
        return self._tickets[0] if self._tickets else self._last_unit

    @property
    def staleness(self) -> int | None:
        return self.home.staleness if self.sharded and self.home is not None else None

    @property
    def stragglers(self) -> frozenset[int]:
        return frozenset() if self.sharded and self.units >= self._limit else super().stragglers

    @property
    def running(self) -> bool:
        if not self.sharded:
            return super().running
        self._asked, self._drain_met = now(), 0.0
        if self.interrupted:
            return False
        self._hold(1)
        if self.units >= self._halt:
            self.team.knocking = True
            return False
        return self.units < self.whole()

    # Units

    def _hold(self, count: int) -> None:
        """Claims units until this worker holds `count`."""
        assert self.home is not None
        while len(self._tickets) < count:
            ticket = self.home.claim()
            number = ticket & ~(CALM | KNOCK)
            self._limit = min(self._limit, number if ticket & CALM else inf)
            self._halt = min(self._halt, number if ticket & KNOCK else inf)
            self._tickets.append(number)

    def next_units(self, count: int) -> Sequence[int]:
        """Numbers of this worker's next units, `count` of them or as many as it knows. A large count makes
        an endless iterable (for a sampler), which claims units as it goes."""
        if not self.sharded:
            return super().next_units(count)
        if count > 2:
            return _Claims(self)  # type: ignore[return-value]
        return [self.unit_of(ticket) for ticket in list(self._tickets)[:count]]

    # Verbs

    def push(self, after: float = -inf, damped: bool = False) -> Handle:
        if self.interrupted:
            return Ready()
        if not self.sharded:  # alone: what it pushes would be applied at once
            self.step()
            return Ready()
        assert self.home is not None
        self._answer_alarm()
        skip = not self._finite()
        # Not earlier: a ticket past the boundary is never done, and schedules can't be turned back.
        self.schedules.move(self.units, self.whole())
        lr, momentum = self._factors(self.epoch.size)
        with applied(self.state.optimizers, lr, momentum):
            self.meter.lr = self.state.optimizers[0].param_groups[0]["lr"]
            settings = self.home.settings.read()
        for optimizer in self.state.optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers ask for it
        lent, ticket = self._take_lent(), self._tickets.popleft()
        if lent:
            self._strayed += lent - mark(self.unit_of(ticket))
        self.team.tick(together=False, lent=lent)
        self._last_unit = ticket + 1
        self._taken += 1
        if not self._tickets:
            self.home.ask()  # before the gradients are on the way
        self.home.push(Push(self.rank, self.clock, 0, after, damped, settings), skip)
        moment = now()
        if moment > self._looked + LOOK:  # not before this worker's own gradient has been found good
            self._looked = moment
            self.epoch.check()
        return Pushing(self)

    def pushed(self) -> None:
        assert self.home is not None
        self.home.pushed()
        self.clear_gradients()
        self._hold(1)
        self._settled = None
        self.after_step()
        if self.watch.due(self._taken):
            self._watch()
        if self._halt == inf and self.rank == self.home.leader and self.team.news():
            self.home.stop(KNOCK)

    def _watch(self) -> None:
        """A window of pushes is complete: tells the others, and watches over them if that is its part."""
        assert self.home is not None
        self.watch.tell(self._stretch, self._taken, self.home.counts.wait_s)
        if self.rank != self.home.leader:
            return
        calm = self.watch.look(self._stretch, self.members)
        if calm and self.stragglers:
            self.home.stop(CALM)

    @property
    def _stretch(self) -> str:
        """The phase, by a name that newcomers know too."""
        return f"{self.epoch.number}-{self._cut_at}"

    def _finite(self) -> bool:
        """With a GradScaler: unscales the gradients; whether all of them are finite."""
        if self.scaler is None:
            return True
        stepped = True
        for optimizer in self.state.optimizers:
            stepped = _scaled_step(self.scaler, optimizer) and stepped
        self.scaler.update()
        return stepped

    def pull(self, after: float = -inf) -> Handle:
        if self.interrupted or not self.sharded:
            return Ready()
        assert self.home is not None
        self.home.pull(after)
        return Pulling(self)

    def pulled(self) -> None:
        assert self.home is not None
        if self._tickets and self._tickets[0] < self.whole():
            self.on_ticket()
        self.home.pulled()

    # Into the shards, and out of them

    def enter(self, protocol: Protocol, begun: float | None = None, settled: float | None = None) -> None:
        direct = self.protocol.home == "shards" and self._entered
        self._into_shards(protocol, direct)
        super().enter(protocol, begun, settled)

    def begin(self, protocol: Protocol, switched: bool = False) -> None:
        again = self._entered and protocol == self.protocol
        super().begin(protocol, switched)
        if again:
            self._into_shards(protocol, direct=True)

    def _into_shards(self, protocol: Protocol, direct: bool) -> None:
        """`direct`: from shards, which others may still be reading; some may wait for the phase's end."""
        if protocol.home != "shards" or self.sharded or self.team.alone:
            return
        if direct:
            self._exchange(Event.CUT).read()
        self._cut()

    def _cut(self) -> None:
        if self.team.grown or self.home is None:
            self._open_home()
        assert self.home is not None
        self._tickets.clear()
        self._taken, self._last_unit = 0, self.units
        self._phase += 1
        self.on_deal()
        self.home.begin(self.clock, self.units)
        self._cut_at, self._cut_used, self._strayed = self.units, self.team.used, 0
        self._limit = self._halt = inf
        if self.watch.settings is not None:
            self.watch.tell(self._stretch, 0, 0.0)
        self._exchange(Event.CUT).read()
        self.team.apart = True
        self.averager.release()

    def settle_now(self, pause: bool = False) -> None:
        """After it all members hold the same. `pause`: they go on with the same phase afterwards, and who is
        through with it already waits on."""
        if not self.sharded:
            super().settle_now()
            return
        self._settle_met = 0.0
        self._wait_for_all(Event.SETTLE if pause else Event.IDLE)
        self._settled = (self.clock, self.epoch.number)
        if pause:
            self.paused = self.protocol

    def _wait_for_all(self, mine: Event) -> bool:
        """Says that this worker is through (`IDLE`), pauses (`SETTLE`) or leaves (`LEAVE`), and takes part in
        what others begin until that has come for all. Returns whether it has left the members."""
        assert self.home is not None
        if self.sharded:
            self.home.rest()
        while True:
            waited = now()
            exchange = self._exchange(mine, flag=int(not self.stepping), mark=int(self.team.knocking))
            words = exchange.read()
            self._settle_met += now() - waited
            event = exchange.event()
            if event == Event.ROLLBACK:
                raise Called(max(word.flag for word in words if word.event == event), met=True)
            if event == Event.CUT:
                self._cut()
                self.home.rest()
            elif event == Event.SAVE:
                collect(self.epoch, "" if mine == Event.LEAVE else self.row())
            elif event == Event.SAVED:
                collect(self.epoch, "")
            elif event in (Event.SETTLE, Event.IDLE, Event.LEAVE):
                if self.sharded:
                    self._gather(words, over=event != Event.SETTLE)
                elif event == Event.IDLE:  # a pause was the phase's end
                    self._report(collect(self.epoch, json.dumps(self.home.counts.row(self.rank))))
                if event == Event.IDLE:
                    # Whose last ticket was claimed before the news is through without having heard it.
                    self.team.knocking = any(word.mark for word in words)
                    if any(word.flag for word in words):
                        self.on_late()
                left = mine == Event.LEAVE and event != Event.LEAVE
                self.team.regroup()
                if left or event == mine or event == Event.LEAVE:
                    return left
            else:
                raise RuntimeError(
                    f"this worker waits for the end of {self.protocol} while others call {event.call}"
                )

    def _gather(self, words: Sequence[Word], over: bool) -> None:
        """Every replica takes the shards' content; when the phase is over, what each did is told to all."""
        assert self.home is not None
        self.home.gather()
        self.state.average(self.epoch, own=False)
        self.take_scale(words)
        mine = {
            "tickets": list(self._tickets),
            "counts": json.dumps(self.home.counts.row(self.rank)),
            "settings": self.home.settings.read(),
            "schedules": self.schedules.counts(),
            "calm": self._limit < inf,
            "more": self.more(),
        }
        rows = [json.loads(text) for text in collect(self.epoch, json.dumps(mine))]
        self.team.apart = False
        if any(row["calm"] for row in rows):
            self.watch.forget()
        self._deal_again([ticket for row in rows for ticket in row["tickets"]])
        self._tickets.clear()
        self.on_deal()
        if over:
            self._report([row["counts"] for row in rows])
        else:
            self.join_more([row["more"] for row in rows])
        self._own = False
        # Each had its own unit's learning rate: all go on from the latest.
        counts = [row["schedules"] for row in rows]
        self.schedules.catch_up(counts)
        self.home.settings.adopt(rows[counts.index(max(counts))]["settings"])
        self.schedules.move(self.units, self.whole())
        self.on_commit(self.units)

    def _report(self, texts: Sequence[str]) -> None:
        """Journals what all did in the phase that is over."""
        assert self.home is not None
        self.home.counts = Counts()
        if fields := summed([json.loads(text) for text in texts]):
            where = {"units": self.units, "progress": round(self.progress, 6)}
            self.journal.record("pushes", protocol=str(self.protocol), **where, **fields)

    # Members that die

    def about(self) -> dict[str, Any]:
        if self.sharded and self.home is not None:
            self.home.complete()
        return {
            **super().about(),
            "sharded": self.sharded,
            "strayed": self._strayed,
            "schedules": self.schedules.counts(),
            "settings": [] if self.home is None else self.home.settings.read(),
        }

    def reconcile(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        self.paused = None
        if self.home is not None and len(self.home.ranks) > 1:
            self.team.grown = True  # who served a host's shards may be gone
        if all(row["sharded"] for row in rows):
            return self._reconcile_shards(rows)
        # Somebody has taken the shards' content already: the others take it from there.
        rows = [{**row, "torn": row["torn"] or row["sharded"]} for row in rows]
        if self.sharded:
            self.drop()
        return super().reconcile(rows)

    def _reconcile_shards(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The survivors take the shards' content: all that was pushed, by the dead as well."""
        assert self.home is not None
        home = self.home
        if 0 in home.lost:
            raise RuntimeError(
                "all workers of the host that deals the units have died at once: go on from a checkpoint"
            )
        collect(self.epoch, "")  # everybody's own push is complete, as far as servers still answer
        home.hand_over(self._taken)
        mine = home.memory.pushes() if home.leads else []
        told = [json.loads(text) for text in collect(self.epoch, json.dumps(mine))]
        columns = list(zip(*(row for rows in told for row in rows), strict=True))  # by rank, of all shards
        pushes = [min(column) for column in columns]
        home.gather()
        salvaged = home.salvage()
        self.state.average(self.epoch, own=False)
        source = home.leader
        left = home.memory.undone(pushes) if self.rank == source else []
        undone = json.loads(share(self.epoch, json.dumps(left), source))
        partly = [  # applied to some hosts' shards and not to others': of each worker its first ones
            self.unit_of(number)
            for rank, column in enumerate(columns)
            for number in [n for n, owner in undone if owner == rank][: max(column) - min(column)]
        ]
        numbers = [number for number, _ in undone]
        units = self._cut_at + sum(pushes)
        marks = dealt(self._cut_at, units + len(numbers), self.redeal) - sum(
            mark(self.unit_of(number)) for number in numbers
        )
        strayed = sum(row["strayed"] for row in rows)
        self.team.apart = False
        self._tickets.clear()
        self.team.place(max(row["clock"] for row in rows), units, self._cut_used + marks + strayed)
        again = self._deal_again(numbers)
        counts = [row["schedules"] for row in rows]
        self.schedules.catch_up(counts)
        home.settings.adopt(rows[counts.index(max(counts))]["settings"])
        self.place_like(rows, source)
        missing = {} if salvaged is None else {"missing": sum(pushes) - salvaged}
        return {"again": again, "partly": partly, **missing}

    def resume(self, going_on: bool) -> None:
        """After a pause: the members go on with the phase, or it is over for those who wait too."""
        paused, self.paused = self.paused, None
        if paused is None or self.team.alone:
            return
        if not going_on:
            self._wait_for_all(Event.IDLE)

    def call(self, called: Called) -> None:
        """Everybody stops where they are."""
        assert self.home is not None
        if self.home.alarm == 0:
            self.home.raise_alarm(called.rank + 1)
        if not called.met:
            self._exchange(Event.ROLLBACK, flag=called.rank).read()

    def drop(self) -> None:
        """The shards' content doesn't count any more: another state is about to be taken."""
        self.on_deal()
        self.team.apart, self.paused = False, None
        self._tickets.clear()
        if self.home is not None:
            self.home.counts = Counts()

    def _return(self, source: int) -> None:
        super()._return(source)
        self.on_deal()

    def leave(self) -> None:
        if not self.sharded:
            super().leave()
        elif self._wait_for_all(Event.LEAVE):
            self._take_over(self.team.wait_for_call())
        else:
            self.settle_now()
            self.finish()

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        if not self.sharded:
            with super().consensus():
                yield
            return
        assert self.home is not None
        with contextlib.ExitStack() as stack:
            with self.meter.waiting():
                stack.enter_context(self.home.newest())
            with self.watch.aside():
                yield

    def release(self) -> None:
        if self.home is not None:
            self.home.close()
            self.home = None


class _Claims:
    """This worker's units from now on, claimed one by one; for a sampler that fetches ahead."""

    def __init__(self, worker: RealWorker):
        self._worker, self._at, self._phase = worker, worker._taken, worker._phase

    def __iter__(self) -> Iterator[int]:
        worker = self._worker
        while worker.sharded and worker._phase == self._phase:
            ahead = self._at - worker._taken
            worker._hold(ahead + 1)
            self._at += 1
            yield worker.unit_of(worker._tickets[ahead])


def _scaled_step(scaler: Any, optimizer: Optimizer) -> bool:
    """`scaler.step(optimizer)` without the step: unscales, and tells whether it would have been taken."""
    taken: list[bool] = []
    own = vars(optimizer).get("step")
    fused = getattr(optimizer, "_step_supports_amp_scaling", None)
    optimizer.step = lambda *args, **more: taken.append(True)  # type: ignore[method-assign,assignment]
    if fused is not None:
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    try:
        scaler.step(optimizer)
    finally:
        if own is None:
            del optimizer.step
        else:
            optimizer.step = own  # type: ignore[method-assign]
        if fused is not None:
            optimizer._step_supports_amp_scaling = fused  # type: ignore[attr-defined]
    return bool(taken)
