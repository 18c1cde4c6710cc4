"""The virtual engine: every worker a greenlet that runs the user's script, and one clock for all.

What a worker computes is real; how long it took is what the cluster's costs say. A worker runs until it has
to wait for something; then the earliest event in virtual time is next. So of two runs with the same seed
every record is the same.
"""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import TYPE_CHECKING, Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet

from offbeat import exits, site
from offbeat.cluster import memory
from offbeat.cluster.epoch import Epoch
from offbeat.job import Job, directory_of, seed_of
from offbeat.virtual.ambient import Ambient
from offbeat.virtual.clock import Clock, ClockSite
from offbeat.virtual.network import Collective, Room, VirtualEpoch, VirtualStore

if TYPE_CHECKING:
    from offbeat.cluster.state import State
    from offbeat.virtual.cluster import Failure
    from offbeat.virtual.cost import Costs


class Deadlock(RuntimeError):
    """No virtual worker can go on; the message says who waits for what."""


class Killed(BaseException):
    """A virtual worker has died, as the cluster's description wanted."""


@dataclass
class Ending:
    """How a worker ended, and when in virtual seconds: its value, or its error."""

    rank: int
    at: float
    value: Any = None
    error: BaseException | None = None
    died: bool = False


@dataclass
class Overhead:
    """Real seconds of a run, and of the workers' own turns."""

    seconds: float = 0.0
    turns: float = 0.0

    @property
    def own(self) -> float:
        """The simulator's own seconds: exchanging workers, and what is done between their turns."""
        return self.seconds - self.turns


class VirtualSite(ClockSite):
    """One virtual worker: a greenlet, and what a process would keep for it."""

    def __init__(self, engine: Engine, rank: int, ambient: Ambient, attempt: int = 0):
        super().__init__(engine.events)
        self.engine, self.rank, self.ambient, self.attempt = engine, rank, ambient, attempt
        self.ending: Ending | None = None
        self.waits: Callable[[], str] = lambda: ""
        self._launched: list[tuple[Collective, float]] = []  # inside backward, and the share that had passed
        self._charged = False  # the unit's computation has taken its time
        self._owed = 0.0  # seconds slept inside backward, where nothing may wait
        self._error: BaseException | None = None  # to be raised where it waits
        self.greenlet = greenlet(self._run)
        self.greenlet.gr_context = contextvars.copy_context()

    # A worker's life

    def _run(self) -> None:
        site.move_to(self)
        ending = Ending(self.rank, 0.0)
        try:
            ending.value = self.engine.script(self.rank)
        except (Killed, GreenletExit):
            ending.died = True
        except BaseException as error:
            if not (isinstance(error, SystemExit) and not error.code):
                ending.error = error
                exits.fail(error)
        if not ending.died:
            try:
                exits.leave(ending.error)
            except (Killed, GreenletExit):
                ending.died = True
            except BaseException as error:
                ending.error = ending.error or error
        ending.at = self.engine.events.now
        self.ending = ending
        self.engine.ended(self)

    def resume(self) -> None:
        """Its turn: it goes on where it waits. By the engine alone."""
        if self.ending is None:
            self.engine.turn(self)

    def suspend(self, waits: Callable[[], str]) -> None:
        """Lets the others go on until somebody resumes this worker; `waits` says what for."""
        self.waits = waits
        self.engine.hub.switch()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def throw(self, error: BaseException) -> None:
        """Raises `error` where this worker waits, now."""
        self._error = error
        self.resume()

    def sleep_until(self, moment: float) -> None:
        events = self.engine.events
        moment = max(moment, events.now)
        self.engine.look_again()
        if events.next_at() > moment:  # nobody else's turn comes before
            events.now = moment
            return
        events.at(moment, self.resume)
        self.suspend(lambda: f"until {moment:.6g} s")

    def sleep(self, seconds: float) -> None:
        """`time.sleep` in virtual time."""
        if seconds < 0:
            raise ValueError("sleep length must be non-negative")
        if self.depth:
            self._owed += seconds
        else:
            self.sleep_until(self.now() + seconds)

    def wait_for(self, ready: Callable[[], bool], waits: Callable[[], str]) -> None:
        """Until `ready`, which is asked after every change that others may have made."""
        if not ready():
            self.engine.waiting[self] = ready
            self.suspend(waits)

    # What offbeat asks of a site

    def make_job(self, seed: int | None, out: Any) -> Job:
        engine = self.engine
        return Job(
            rank=self.rank,
            world_size=engine.workers,
            local_rank=self.rank,
            device=engine.device,
            seed=seed_of(seed),
            out=directory_of(out),
            started=0.0,
            costs={"import_ms": 0.0},
            backend="virtual",
            node=engine.costs.host_of[self.rank],
            shards=engine.shards,
            minimum=engine.minimum,
            attempt=self.attempt,
            room=engine.costs.room,
            _store=engine.store,
        )

    def part(self, store: Any, name: str) -> Any:
        return store.part(name)

    def epoch(
        self,
        number: int,
        members: Sequence[int],
        rank: int,
        store: Any,
        on: torch.device,
        lossy: bool = False,
        gone: Callable[[], bool] | None = None,
    ) -> Epoch:
        room = store.room(number, members) if len(members) > 1 else Room(self.engine, members)
        if number and self.engine.costs.membership:
            self.sleep_until(self.now() + self.engine.costs.membership)
        return VirtualEpoch(number, room, self)

    def wait_until(self, ready: Callable[[], bool], check: Callable[[], None]) -> float:
        begun = self.now()

        def ready_or_over() -> bool:
            try:
                check()
            except Exception:  # whatever it is: it is raised below, where the worker waits
                return True
            return ready()

        self.wait_for(ready_or_over, lambda: "for the slowest worker, at a bound")
        if not ready():
            check()
        return self.now() - begun

    def admit(self, state: State) -> None:
        self.engine.admit(state)

    def launch(self, one: Collective, passed: float) -> None:
        """This worker comes to a collective; inside backward when the share `passed` of it is over."""
        if self.depth:
            self._launched.append((one, passed))
        else:
            one.arrive()

    def computed(self) -> None:
        launched, self._launched = self._launched, []
        begun, costs = self.now(), self.engine.costs
        took = 0.0 if self._charged else costs.unit(self.rank, begun)
        took, self._owed = took + self._owed, 0.0
        self._charged = True
        for one, passed in launched:
            moment = begun + took * (1 - costs.backward * (1 - passed))
            self.engine.events.at(moment, one.arrive)
        if took:
            self.sleep_until(begun + took)

    def stepped(self) -> None:
        self._charged = False

    def updated(self) -> None:
        if took := self.engine.costs.update(self.rank):
            self.sleep_until(self.now() + took)

    def switched(self) -> None:
        if took := self.engine.costs.switch:
            self.sleep_until(self.now() + took)

    def pushed(self, size: int) -> None:
        self.sleep_until(self.engine.traffic.push(self.rank, size, self.now()))

    @contextlib.contextmanager
    def pulling(self, size: int) -> Iterator[None]:
        read, arrived = self.engine.traffic.pull(self.rank, size, self.now())
        self.sleep_until(read)
        yield
        self.sleep_until(arrived)

    def gathering(self, sizes: Sequence[int]) -> None:
        costs, moment = self.engine.costs, self.now()
        members = tuple(range(costs.workers))
        if len(set(costs.host_of)) > 1:
            for size in sizes:
                moment += costs.broadcast(size, members, moment)
        self.sleep_until(moment)


class Engine:
    """Runs `script(rank)` for each of the costs' workers, in virtual time.

    ambient: what a rank's process would keep for it, a new one each time. stops: the first worker that fails
    ends the run. minimum: as many may go on when others die; else a death is a failure. restart: seconds
    after which a new process is there for a worker that died on its own (None: never), and not as the
    cluster's description wanted. Raises nothing of the workers' own: `run` tells how each ended.
    """

    def __init__(
        self,
        costs: Costs,
        script: Callable[[int], Any],
        ambient: Callable[[int], Ambient],
        stops: bool = False,
        minimum: int | None = None,
        restart: float | None = None,
    ):
        self.costs, self.script, self.workers = costs, script, costs.workers
        self.minimum, self._ambient, self._restart = minimum, ambient, restart
        self.events = Clock()
        self.store = VirtualStore(self)
        self.kept: dict[str, bytes] = {}
        self.rooms: dict[str, Room] = {}
        self.waiting: dict[VirtualSite, Callable[[], bool]] = {}
        self.traffic = costs.traffic()
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self.shards = memory.make_file()
        self.overhead = Overhead()
        self.hub: greenlet = getcurrent()
        self.admit: Callable[[State], None] = lambda state: None
        self._active: VirtualSite | None = None
        self._living, self._stops, self._failed = self.workers, stops, False
        self.sites = {rank: VirtualSite(self, rank, ambient(rank)) for rank in range(self.workers)}

    def run(self) -> list[Ending]:
        """Until every worker has ended. Of a run that was stopped those who had."""
        begun, self.hub, outside = time.perf_counter(), getcurrent(), Ambient.of_process()
        for one in self.sites.values():
            self.events.at(0.0, one.resume)
        for failure in self.costs.failures:
            self.events.at(failure.at, partial(self._kill, failure))
        if self.minimum is not None:
            later = count(self.workers)
            for join in self.costs.joins:
                for rank in islice(later, join.count):
                    self.events.at(join.at, partial(self._start, rank, 0))
        try:
            with _in_virtual_time():
                self._run()
        finally:
            if self._active is not None:
                self._active.ambient.leave()
                self._active = None
            outside.enter()
            memory.drop_file(self.shards)
            self.overhead.seconds = time.perf_counter() - begun
        return [one.ending for _, one in sorted(self.sites.items()) if one.ending is not None]

    def _run(self) -> None:
        while self._living and not self._failed:
            if not self.events.step():
                left = [one for one in self.sites.values() if one.ending is None]
                left[0].throw(Deadlock(self._stuck(left)))

    def current(self) -> VirtualSite:
        """The worker whose turn it is."""
        here = site.here()
        assert isinstance(here, VirtualSite)
        return here

    def turn(self, one: VirtualSite) -> None:
        """Lets a worker go on until it waits."""
        self.waiting.pop(one, None)
        if self._active is not one:
            if self._active is not None:
                self._active.ambient.leave()
            one.ambient.enter()
            self._active = one
        begun = time.perf_counter()
        one.greenlet.switch()
        self.overhead.turns += time.perf_counter() - begun
        self.look_again()

    def look_again(self) -> None:
        """Something has changed that others may wait for."""
        for one, ready in list(self.waiting.items()):
            if ready():
                del self.waiting[one]
                self.events.at(self.events.now, one.resume)

    def ended(self, one: VirtualSite) -> None:
        """A worker's script has ended; whoever still waits for it learns of it."""
        assert one.ending is not None
        self._living -= 1
        if one.ending.died:
            for open in list(one.open.values()):
                open.journal.flush()  # as the process's thread would have by now
        if one.ending.died and self.minimum is not None:
            self.store.set(f"dead/{one.rank}/{one.attempt}", "1")
            self.store.add("deaths", 1)
            if self._restart is not None:
                self._start_after(self._restart, one)
            self._lose(one.rank)
        elif one.ending.died or one.ending.error is not None:
            self._failed = self._stops
            self._lose(one.rank)

    def _start_after(self, seconds: float, one: VirtualSite) -> None:
        self.events.at(self.events.now + seconds, partial(self._start, one.rank, one.attempt + 1))

    def _start(self, rank: int, attempt: int) -> None:
        """A process that comes to a job that runs."""
        if not self._living:
            return  # it has ended
        one = self.sites[rank] = VirtualSite(self, rank, self._ambient(rank), attempt)
        self._living += 1
        one.resume()

    def _lose(self, rank: int) -> None:
        for room in list(self.rooms.values()):
            if rank in room.members:
                room.close()
        self.look_again()

    def _kill(self, failure: Failure) -> None:
        one = self.sites[failure.worker]
        if one.ending is None:
            one.dying = True
            one.throw(Killed())
            if self.minimum is not None and failure.restart is not None:
                self._start_after(failure.restart, one)

    def _stuck(self, left: Sequence[VirtualSite]) -> str:
        rows = "; ".join(f"rank {one.rank} waits {one.waits()}" for one in left)
        return f"no worker can go on at {self.events.now:.6g} s: {rows}"


@contextlib.contextmanager
def _in_virtual_time() -> Iterator[None]:
    """Inside, `time.sleep` takes virtual time in a virtual worker, and what cannot be virtual is refused."""
    sleep, join = time.sleep, torch.distributed.init_process_group

    def sleeps(seconds: Any) -> None:
        here = site.here()
        if isinstance(here, VirtualSite):
            here.sleep(seconds)
        else:
            sleep(seconds)

    def refuses(*args: Any, **settings: Any) -> None:
        raise RuntimeError(
            "init_process_group in a virtual worker: all workers share one process, which cannot join a "
            "group as several; leave the workers' talking to offbeat, or run the script with `offbeat run -n`"
        )

    time.sleep, torch.distributed.init_process_group = sleeps, refuses
    try:
        yield
    finally:
        time.sleep, torch.distributed.init_process_group = sleep, join
