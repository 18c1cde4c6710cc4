"""The real engine's worker while every member holds all parameters: BSP, LocalSGD, DaSGD."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from offbeat.cluster.average import Averager, Mean
from offbeat.cluster.control import Event, Exchange, Word
from offbeat.cluster.desk import Desk
from offbeat.cluster.epoch import Epoch
from offbeat.cluster.flat import Layout, copy
from offbeat.cluster.look import Curvature
from offbeat.cluster.members import Members
from offbeat.cluster.pacing import Pacing
from offbeat.cluster.reducer import Reducer
from offbeat.cluster.roll import Roll
from offbeat.cluster.state import State, check, collect, union
from offbeat.cluster.stragglers import Watch
from offbeat.hyper import Configuration, Schedules, applied
from offbeat.journal import Journal
from offbeat.ledger import pending
from offbeat.meter import Meter
from offbeat.policies.stability import limit
from offbeat.protocols import ASP, BSP, Protocol
from offbeat.site import here, now
from offbeat.worker import Batch, Handle, Ready, Worker

LOOKS = 100
"""Curvatures that are remembered."""


class Landing(Handle):
    """An average under way, and the words that went with it; it lands and is merged once."""

    def __init__(self, worker: ReplicaWorker, mean: Mean | None = None, exchange: Exchange | None = None):
        self._worker, self.mean, self._exchange = worker, mean, exchange
        self.clock = worker.clock

    def wait(self) -> None:
        if self.mean is not None and self._exchange is not None:
            exchange, self._exchange = self._exchange, None
            words = self._worker.meet(exchange)
            self.mean.wait()
            self._worker.take_scale(words)
            self._worker.watch.exchanged(exchange, words)
            self._worker.pacing.landed(words, self.mean)
            self._worker.team.regroup()

    def take(self) -> Mean | None:
        """The mean, the first time."""
        mean, self.mean = self.mean, None
        return mean


class Settling(Handle):
    """A settle; nothing happens before `wait`."""

    def __init__(self, worker: ReplicaWorker, then: Protocol | None):
        self._worker, self._then = worker, then

    def wait(self) -> None:
        begun = now()
        self._worker.settle_now()
        if self._then is not None:
            self._worker.enter(self._then.current(self._worker), begun, now())


class Ahead(Sequence[int]):
    """Numbers, each as `of` translates it."""

    def __init__(self, numbers: range, of: Callable[[int], int]):
        self._numbers, self._of = numbers, of

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, at: Any) -> Any:
        found = self._numbers[at]
        return self._of(found) if isinstance(found, int) else [self._of(number) for number in found]


class ReplicaWorker(Worker):
    """One real worker. `total` (units of the whole job) may be set after construction, before the
    first step."""

    def __init__(
        self,
        rank: int,
        world: int,
        device: torch.device,
        backend: str,
        store: Any,
        state: State,
        config: Configuration,
        wire: torch.dtype | None,
        journal: Journal,
        roll: Roll | None = None,
        room: int | None = None,
        desk: Desk | None = None,
    ):
        self.state, self.config, self.journal = state, config, journal
        self._wire, self.device = wire, device
        self.meter, self.schedules = Meter(), Schedules()
        self.total: int | None = None
        self.interrupted = False
        self.scaler: Any = None
        self.protocol: Protocol = BSP()
        self._entered = False
        self.after_step: Callable[[], None] = lambda: None
        self._mean = False
        self._own = False  # whether the members' parameters may differ
        self._bsp_left: float | None = None
        self._settled: tuple[int, int] | None = None
        self.redeal: dict[int, int] = {}
        self.curvature = Curvature(state)
        self.can_look = False  # whether the loop's batches can be given twice
        self.looks: list[float] = []  # the curvatures that were seen
        self.steepest: float | None = None  # the curvature that asynchrony has been found safe at
        self._looked_at: int | None = None
        self.lent = 0  # the mark of the unit that the loop was lent
        self.keeps_ledger = False  # whether all batches are dealt units
        self._under: dict[str, int] = {}  # units done under each protocol, up to `_entered_at`
        self._entered_at = 0
        self.pacing, self.watch = Pacing(self), Watch(self)
        self._asked = now()  # when the protocol last asked whether to go on: a drain's begin
        self._drain_met = self._settle_met = 0.0  # seconds of it in which the others were not there yet
        self.reducer = Reducer(state.parameters, state.names, wire)
        self.averager = Averager(state.averaged, wire)
        self.broadcast_ms = 0.0
        begun = now()
        on = device if backend == "nccl" else torch.device("cpu")
        regrouped, parameters = self._regrouped, len(state.parameters)
        self.team = Members(rank, world, store, on, parameters, journal, regrouped, roll, room, desk)
        self.rendezvous_ms = (now() - begun) * 1e3
        self._landing = Landing(self)

    # Facts

    @property
    def rank(self) -> int:
        return self.team.rank

    @property
    def epoch(self) -> Epoch:
        return self.team.epoch

    @property
    def members(self) -> Sequence[int]:
        return self.epoch.members

    @property
    def clock(self) -> int:
        return self.team.clock

    @property
    def units(self) -> int:
        return self.team.units

    @property
    def progress(self) -> float:
        return self.units / self.whole()

    @property
    def running(self) -> bool:
        self._asked, self._drain_met = now(), 0.0
        if self.team.alone and self.team.news():
            self.team.knocking = True
        return not self.interrupted and not self.team.knocking and self.units < self.whole()

    @property
    def over(self) -> bool:
        """Whether all units are done, where all members hold the same."""
        return self.units >= self.whole()

    @property
    def stragglers(self) -> frozenset[int]:
        return self.watch.stragglers

    @property
    def hiding(self) -> int:
        return self.pacing.auto.delay

    def served(self, protocol: Protocol, at: float | int) -> bool:
        units = self._under.get(str(protocol), 0)
        if protocol == self.protocol:
            units += self.units - self._entered_at
        return units >= at if isinstance(at, int) else units / self.whole() >= at

    def whole(self) -> int:
        """The job's length in units. Raises RuntimeError while it is not known."""
        if self.total is None:
            raise RuntimeError(
                "the job's length is not known yet: with epochs=, take the batches from sync.batches(...); "
                "otherwise give Synchronizer(..., total=UNITS)"
            )
        return self.total

    # Verbs

    def gradient(self, mean: bool = False) -> Handle:
        self._mean = mean
        if mean:
            self.team.catch_up()  # never without: it would wait for words that an average left under way
        if mean and not self.team.alone:
            self.reducer.arm(self.epoch, self._reducing)
        elif self.reducer.armed:
            self.reducer.disarm()
        return Batch()

    @property
    def looked_at(self) -> int | None:
        return self._looked_at

    def look(self) -> Handle:
        self._looked_at = self.clock
        if not self.can_look:
            return Ready()
        self.curvature.ask()
        return self.gradient(mean=True)

    def _compare(self) -> None:
        """The gradient of a look has its counterpart now."""
        found = self.curvature.compare(scale_of(self.scaler)[0] or 1.0)
        if found is not None:
            self.looks = [*self.looks, found][-LOOKS:]
            self.journal.record(
                "curvature", units=self.units, progress=self.progress, curvature=found, step=self._bsp_rate()
            )

    def _bsp_rate(self) -> float:
        """The learning rate of a BSP step of all members, warm-up done, or of as many pushes."""
        groups = [group for optimizer in self.state.optimizers for group in optimizer.param_groups]
        return max(group["lr"] for group in groups) * self.config.lr_factor(BSP(), self.epoch.size, 1.0)

    def asynchrony_is_safe(self, count: int, margin: float, by: float) -> bool:
        if self.steepest is None and self.looks and self.units < self.whole():
            steepest = max(self.looks[-count:]) * margin
            most = self._bsp_rate() * self.schedules.highest(self.progress)
            safe = len(self.looks) >= count and most * steepest < self._stable_step()
            if safe or by <= self.progress:
                self.steepest = steepest
        return self.steepest is not None

    def _stable_step(self) -> float:
        """The largest n·ηλ at which asynchronous updates are stable, with the momentum that they have."""
        groups = [group for optimizer in self.state.optimizers for group in optimizer.param_groups]
        momentum, members = max(group.get("momentum", 0.0) for group in groups), self.epoch.size
        return limit(momentum * self.config.momentum_factor(ASP(), members, since_bsp=1.0), members)

    def step(self) -> None:
        if self.interrupted:  # the program waited for a batch that will not come
            return
        if self.curvature.seen:
            self._compare()
        lr, momentum = self._factors(self.team.live if self._mean else self.epoch.size)
        with applied(self.state.optimizers, lr, momentum):
            self.meter.lr = self.state.optimizers[0].param_groups[0]["lr"]
            for optimizer in self.state.optimizers:
                if self.scaler is None:
                    optimizer.step()
                else:
                    self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()
        here().updated()
        self.clear_gradients()
        self.team.tick(together=self._mean, lent=self._take_lent())
        self._own = self._own or not self._mean
        self._settled = None
        self.schedules.move(self.units, self.whole())
        self.pacing.stepped()
        self.after_step()

    def _take_lent(self) -> int:
        lent, self.lent = self.lent, 0
        return lent

    def _factors(self, members: int) -> tuple[float, float]:
        """What learning rate and momentum are multiplied by in this step."""
        progress = self.progress
        since_bsp = None if self._bsp_left is None else progress - self._bsp_left
        lr = self.config.lr_factor(self.protocol, members, progress, len(self.team.outside))
        if self.steepest is not None and self.protocol.home == "shards":
            rate, most = self._bsp_rate(), self._stable_step() / self.steepest
            lr *= most / rate if rate > most else 1.0
        return lr, self.config.momentum_factor(self.protocol, members, since_bsp)

    def clear_gradients(self) -> None:
        """The next backward begins anew."""
        for optimizer in self.state.optimizers:
            optimizer.zero_grad()
        for p in self.state.parameters:
            p.grad = None

    def average(self, snapshot: bool = False) -> Handle:
        if self.interrupted:  # what this clock asked for was started before the interruption
            return self._landing if self._landing.clock == self.clock else Landing(self)
        self._landing = Landing(self)
        if self.team.alone:  # nobody to average with: plain PyTorch
            return self._landing
        exchange = self._exchange(Event.AVERAGE, **self.pacing.own())
        mean = self.averager.start(self.epoch, snapshot, self.pacing.timed)
        self.pacing.started(mean)
        self._landing = Landing(self, mean, exchange)
        return self._landing

    def mix(self, mean: Handle, keep: float) -> None:
        assert isinstance(mean, Landing)
        if (landed := mean.take()) is not None:
            landed.mix(keep)

    def shift(self, mean: Handle, keep: float) -> None:
        assert isinstance(mean, Landing)
        if (landed := mean.take()) is not None:
            landed.shift(keep)

    def settle(self, then: Protocol | None = None) -> Handle:
        return Settling(self, then)

    # Units

    def unit_of(self, number: int) -> int:
        """The unit that the job's `number`-th deal gives out: the same number, unless workers had to give
        units back, which come first then."""
        return self.redeal.get(number, number)

    def _deal_again(self, numbers: Sequence[int]) -> list[int]:
        """Units that were dealt and not done are dealt first from now on. Returns them."""
        given = sorted(self.unit_of(number) for number in numbers)
        done, dealt = self.units, self.units + len(given)
        again = {done + i: unit for i, unit in enumerate(given)}
        later = {number: unit for number, unit in self.redeal.items() if number >= dealt}
        self.redeal = {number: unit for number, unit in {**again, **later}.items() if number != unit}
        return given

    def account(self) -> None:
        """The ledger's entry, all members holding the same."""
        if self.keeps_ledger:
            waiting, used = pending(self.units, self.redeal), f"{self.team.used:016x}"
            self.journal.record("ledger", units=self.units, pending=waiting, used=used)

    def next_units(self, count: int) -> Sequence[int]:
        """Numbers of the next `count` units that are this worker's, as long as the members stay."""
        first, step = self.units + self.members.index(self.rank), len(self.members)
        numbers = range(first, first + count * step, step)
        return Ahead(numbers, self.unit_of) if self.redeal else numbers

    # Words

    def _exchange(self, event: Event, **fields: int) -> Exchange:
        # Reading a scale waits for the device: a reduction can do without, its members share one already.
        scale, growth = (0.0, 0) if event == Event.REDUCE else scale_of(self.scaler)
        own = self.watch.own_time() if event in (Event.REDUCE, Event.AVERAGE) else {}
        return self.team.exchange(event, scale=scale, growth=growth, **fields, **own)

    def meet(self, exchange: Exchange) -> list[Word]:
        """The words, once all members are there."""
        begun = now()
        words = exchange.read()
        self._drain_met += now() - begun
        return words

    def _reducing(self, unused: int) -> Exchange:
        self._reduction = self._exchange(Event.REDUCE, unused=unused, lent=self.lent)
        return self._reduction

    def _regrouped(self) -> None:
        """The members have changed, perhaps between two backwards of one step."""
        self.journal.keep(self.rank == self.members[0])
        if self.reducer.armed:
            if self.team.alone:
                self.reducer.disarm()
            else:
                self.reducer.rearm(self.epoch)

    def backward_returned(self) -> None:
        """The user's backward has returned: `.grad` becomes what the protocol promised."""
        if self.reducer.started:
            with self.meter.waiting():
                self.reducer.finish()
                self.team.catch_up()
                self.watch.exchanged(self._reduction, self._reduction.read(), probe=True)

    def backward_failed(self) -> None:
        """It raised. If some of its gradient has left, the members' buckets don't match any more."""
        if self.reducer.abandon():
            self.team.break_up(
                "backward() failed after a part of its gradient had left for the other workers, who count "
                "on the rest: the workers cannot go on together; go on from a checkpoint"
            )

    def take_scale(self, words: Sequence[Word]) -> None:
        """Members go on with the smallest GradScaler scale among them, or one rank's step would be
        silently wrong (DESIGN 4.6)."""
        self._take_least_scale([(word.scale, word.growth) for word in words])

    def _take_least_scale(self, found: Sequence[Sequence[float]]) -> None:
        if self.scaler is None or not self.scaler.is_enabled():
            return
        least = min([scale_of(self.scaler), *((scale, growth) for scale, growth in found if scale > 0)])
        if least != scale_of(self.scaler):
            self.scaler.load_state_dict(
                {**self.scaler.state_dict(), "scale": least[0], "_growth_tracker": least[1]}
            )

    # Settling, switching, leaving

    def settle_now(self, pause: bool = False) -> None:
        """After it all members hold the same, whatever came before. Costs nothing when they already do."""
        self._settle_met = 0.0
        if self.team.alone or self._settled == (self.clock, self.epoch.number):
            return
        begun = now()
        words = self._exchange(Event.SETTLE, **self._standing()).read()
        self._settle_met = now() - begun
        self._settle_with(words)
        self.team.regroup()
        self._settled = (self.clock, self.epoch.number)

    def _standing(self) -> dict[str, int]:
        """Whether this member's state may differ from the others', and what shape it has."""
        return {"flag": int(self._own), "mark": self.state.mark() if self._own else 0}

    def _settle_with(self, words: Sequence[Word]) -> None:
        self._average([word.mark for word in words], any(word.flag for word in words))
        self.take_scale(words)
        self._own = False
        self.averager.release()

    def _average(self, marks: Sequence[int], own: bool) -> None:
        """All members get the mean; marks: what shape each one's state has."""
        if len(set(marks)) > 1:
            texts = collect(self.epoch, json.dumps(self.state.describe(counts=True)))
            self.state.conform(union(texts))
        self.state.average(self.epoch, own)

    def begin(self, protocol: Protocol, switched: bool = False) -> None:
        """The plan begins or goes on with `protocol`, all members holding the same. `switched`: a person has
        asked for it."""
        if not self._entered or protocol != self.protocol:
            self._entered = True
            begun = None
            if switched:  # where the others were met already
                begun = self._asked = now()
                self._drain_met = self._settle_met = 0.0
            self.enter(protocol, begun, begun)
        self.refer()

    def enter(self, protocol: Protocol, begun: float | None = None, settled: float | None = None) -> None:
        """`protocol` takes charge; with times, it is a switch whose cost is journalled."""
        before, self.protocol = self.protocol, protocol
        self._under, self._entered_at = self._units_under(before), self.units
        self.pacing.begin()
        if isinstance(protocol, BSP):
            self._bsp_left = None
        elif isinstance(before, BSP) and begun is not None:
            self._bsp_left = self.progress
        self.refer()
        where = {"units": self.units, "progress": round(self.progress, 6)}
        if begun is not None and settled is not None:
            here().switched()
            self.journal.record(
                "switch",
                **{"from": str(before), "to": str(protocol)},
                **where,
                drain_ms=round((begun - self._asked - self._drain_met) * 1e3, 3),
                meet_ms=round((self._drain_met + self._settle_met) * 1e3, 3),
                settle_ms=round((settled - begun - self._settle_met) * 1e3, 3),
                transfer_ms=round((now() - settled) * 1e3, 3),
            )
        self.journal.record("phase", protocol=str(protocol), **where)
        self.account()
        self.watch.begin()  # last: what the switch took is no part of the first step

    def refer(self) -> None:
        """A local protocol begins or goes on while all members hold the same."""
        if not isinstance(self.protocol, BSP) and self.protocol.home == "replicas" and not self.team.alone:
            self.averager.refer()

    # Consensus

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, the modules hold the members' mean; afterwards what they held before, to the bit."""
        if self.team.alone:
            yield
            return
        with self.meter.waiting():
            words = self._exchange(Event.CONSENSUS, **self._standing()).read()
        with self._consensus_with(words), self.watch.aside():
            yield

    @contextlib.contextmanager
    def _consensus_with(self, words: Sequence[Word]) -> Iterator[None]:
        own = any(word.flag for word in words)
        tensors = self.state.averaged() if own else self.state.buffers(floating=True)
        layout = Layout(tensors)
        kept, mean = layout.empty(), layout.empty()
        copy(layout.views(kept), tensors)
        copy(layout.views(mean), tensors)
        with self.meter.waiting():
            for work in [self.epoch.sum(buffer, "averages") for buffer in mean]:
                work.wait()
        for buffer in mean:
            buffer.div_(self.epoch.size)
        copy(tensors, layout.views(mean))
        try:
            yield
        finally:
            copy(tensors, layout.views(kept))

    def _units_under(self, protocol: Protocol) -> dict[str, int]:
        """The units done under each, with those since `protocol` took charge."""
        text, since = str(protocol), self.units - self._entered_at
        return {**self._under, text: self._under.get(text, 0) + since}

    def position(self) -> dict[str, Any]:
        """Where the job is; after a settle the same on every member."""
        return {
            "clock": self.clock,
            "units": self.units,
            "used": self.team.used,
            "bsp_left": self._bsp_left,
            "under": self._units_under(self.protocol),
            "redeal": [list(pair) for pair in self.redeal.items()],
            "looks": self.looks,
            "steepest": self.steepest,
            "hiding": self.pacing.state(),
        }

    def set_position(self, position: dict[str, Any]) -> None:
        self.team.place(position["clock"], position["units"], position["used"])
        self._bsp_left, self._own, self._settled = position["bsp_left"], False, None
        self.redeal = dict(position.get("redeal", []))
        self.looks, self.steepest = list(position.get("looks", [])), position.get("steepest")
        self.pacing.take(position.get("hiding", [1, 0]))
        self._under, self._entered_at = dict(position.get("under", {})), self.units

    def summary(self) -> dict[str, Any]:
        """This worker's figures so far, for the journal's `workers` record."""
        return {"rank": self.rank, "clock": self.clock, **self.meter.summary()}

    def _same_model(self) -> None:
        if self.team.alone:
            return
        text = self.state.model_text()
        words = self._exchange(Event.START, mark=check(text)).read()
        if len({word.mark for word in words}) == 1:
            return
        texts = [one.split("\n") for one in collect(self.epoch, text)]
        for rank, rows in zip(self.epoch.members, texts, strict=True):
            if rows != texts[0]:
                pairs = zip([*texts[0], "nothing more"], [*rows, "nothing more"], strict=False)
                here, there = next(pair for pair in pairs if pair[0] != pair[1])
                raise ValueError(
                    f"workers must build the same model and optimizer: rank 0 has {here}; rank {rank} has "
                    f"{there}"
                )


def scale_of(scaler: Any) -> tuple[float, int]:
    if scaler is None or not scaler.is_enabled():
        return 0.0, 0
    return float(scaler.get_scale()), int(scaler.state_dict()["_growth_tracker"])
