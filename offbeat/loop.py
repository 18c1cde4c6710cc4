"""One job on this worker, from its first step to its end: joins the worker, the plan, the batches and what
watches over them. `Synchronizer` is the user's side of it; streams of batches, checkpoints, requests and the
profiler use this one."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from offbeat import backward, checkpoint, exits, job
from offbeat.checkpoint import CheckpointError
from offbeat.checks import WIRES, traps, uses_auto
from offbeat.cluster.desk import Desk
from offbeat.cluster.epoch import PeerLost
from offbeat.cluster.pulse import Pulse
from offbeat.cluster.real import RealWorker
from offbeat.cluster.roll import Roll
from offbeat.cluster.state import State
from offbeat.course import Course
from offbeat.hyper import Configuration
from offbeat.identity import description, structure
from offbeat.journal import Journal
from offbeat.ledger import mark
from offbeat.marks import Marks
from offbeat.plan import check as plan_check
from offbeat.planner.actual import Forecast, profile_of
from offbeat.policies.detector import PERSISTENT
from offbeat.policies.switches import Stragglers
from offbeat.protocols import BSP, Protocol
from offbeat.requests import meet
from offbeat.resume import restore, row, save
from offbeat.site import here
from offbeat.stream import Stream
from offbeat.telemetry import Telemetry
from offbeat.virtual.cluster import Cluster
from offbeat.virtual.model import model_of
from offbeat.watchman import Watchman

if TYPE_CHECKING:
    from offbeat.planner.measure import Profiler

LAST = "last.pt"
"""In the run's directory: the checkpoint that is made when too few workers are left."""


class BelowMinimum(RuntimeError):
    """Fewer workers are left than `--min`; the job's state was saved."""


class Loop:
    """total: the job's length in units, or `epochs` while it isn't known. cut: how the parameters are cut
    into shards. The other settings are `Synchronizer`'s, checked."""

    def __init__(
        self,
        state: State,
        plan: Protocol,
        total: int | None,
        epochs: float | None,
        *,
        config: Configuration,
        wire: str,
        cut: str | None,
        policy: Stragglers,
        on_diverge: str,
    ):
        self.plan, self.policy, self.epochs = plan, policy, epochs
        self._identity = {"model": structure(state.modules), "optimizer": description(state.optimizers)}
        mine = job.current()
        here().admit(state)
        path = None if mine.out is None else mine.out / "journal.jsonl"
        self.journal = Journal(path, mine.started, kept=mine.rank == 0 and not mine.attempt)
        self._store = _own_store(mine.store)
        roll = None
        if mine.minimum is not None and mine.room > 1:
            roll = Roll(self._store, mine.store, mine.rank, mine.attempt, mine.world_size)
            if not here().virtual:
                Pulse(roll, mine.connect(), mine.heartbeat, mine.beats, mine.local_rank)
        self.minimum = mine.minimum or 1
        self.void = False  # the coming step is none: its round was dropped with a member that died
        self.worker = RealWorker(
            mine.rank,
            mine.world_size,
            mine.device,
            mine.backend,
            self._store,
            state,
            config,
            WIRES[wire],
            self.journal,
            here=mine,
            cut=cut,
            roll=roll,
            room=mine.room,
            desk=Desk(mine.store) if mine.managed and self._store is not None else None,
        )
        self.stream: Stream | None = None
        self.resumed_data: dict[str, Any] | None = None
        self.data_seed = mine.seed
        self.marks = Marks()
        self._steps = 0  # calls of step()
        self._inside_consensus = False
        self._closed = self._failed = False
        self.settings = {
            "lr_reference": config.lr_reference,
            "momentum": config.momentum,
            "wire": wire,
            "on_diverge": on_diverge,
            "stragglers": str(policy),
        }
        self._profile: Cluster | None = None
        self._telemetry = Telemetry(self.worker, self._store, mine, self.journal)
        if text := os.environ.get("OFFBEAT_PROFILE"):
            self._profile = profile_of(text)
        self.worker.after_step = self._telemetry.step
        self.worker.on_ticket = self._prepare_batch
        self.worker.on_commit = self.marks.settled
        self.worker.on_deal = self._deal_anew
        self.worker.on_late = self.worker.on_admission = self._mute
        self.worker.on_request = partial(meet, self)
        self.worker.row = lambda: row(self, waits=True)
        self.worker.more, self.worker.take_more = self.marks.state, self.marks.take
        self.worker.join_more = self.marks.join
        self.worker.watch.on_persistent = self._persistent
        self._watchman = Watchman(self, on_diverge)
        self._profiler: Profiler | None = None
        if text := os.environ.get("OFFBEAT_MEASURE"):
            from offbeat.planner.measure import Profiler

            self._profiler = Profiler(self, text)
        self._course = Course(self.worker, self.plan, self._over)
        backward.listen(self)
        exits.watch(self)
        arrived = self.worker.team.arrived is not None
        if arrived:
            self.worker.join_at(self.plan)
            total = self.worker.total or total
        if total is not None:
            self._begin(total)
        if arrived:
            self.marks.take(self.worker.arrived_more)

    # Facts

    @property
    def progress(self) -> float:
        return self.worker.progress

    @property
    def units(self) -> int:
        return self.worker.units

    @property
    def total(self) -> int | None:
        return self.worker.total

    @property
    def protocol(self) -> Protocol:
        return self.worker.protocol

    @property
    def done(self) -> bool:
        """Whether the job is over: all workers hold the same model."""
        return self._course.ended

    # The user's calls

    def feed(self, stream: Stream, micro_batches: int) -> Iterator[Any]:
        """Takes the loop's batches from `stream` from now on."""
        if self.stream is not None:
            self.stream.close()
        self.stream = stream
        stream.begin()
        here().begins(self, data=True)
        self.worker.keeps_ledger = stream.deals
        self.worker.can_look = stream.deals or micro_batches == 1
        size = {"samples": stream.samples} if stream.deals else {}
        self.journal.record("data", batch_size=self.batch_size, micro_batches=micro_batches, **size)
        return stream.batches()

    def step(self, scaler: Any = None) -> None:
        if self.void:  # its round was dropped with a member that died, and its unit is dealt again
            self.void = False
            self._steps += 1
            self.worker.clear_gradients()
            if scaler is not None:  # it may have unscaled them, and must be ready to do so again
                scaler.update(scaler.get_scale())
            here().stepped()
            return
        if self.done:
            raise RuntimeError(
                f"the job is over: {self.units} of {self.total} units are done; a loop over "
                f"sync.batches(...), or `while not sync.done`, ends by itself"
            )
        self._outside_consensus("step()")
        if self.worker.reducer.hold:
            return
        self._check_step()
        if scaler is not None and self.worker.scaler is None:
            self._telemetry.meet_scaler(scaler)
        if scaler is not None:
            self.worker.scaler = scaler
        self._steps += 1
        self.marks.muted = False
        here().computed()
        if self.worker.curvature.under_way:
            self.worker.curvature.end()
            self.worker.clear_gradients()
        if self._profiler is not None:
            self._profiler.computed()
        with self._watchman:
            self._watchman.look(self._telemetry)
            self.worker.stepping = True
            try:
                self._mending(self._course.advance)
            finally:
                self.worker.stepping = False
                here().stepped()
        if self._profiler is not None:
            self._profiler.stepped()

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        if self.done or self._inside_consensus:
            yield
            return
        with contextlib.ExitStack() as stack:
            # After a loss all hold the same: that is the consensus.
            self._mending(lambda: stack.enter_context(self.worker.consensus()))
            self._inside_consensus = True
            try:
                yield
            finally:
                self._inside_consensus = False

    def save(self, path: Path, also: Mapping[str, checkpoint.Stateful]) -> None:
        self._outside_consensus("save()")
        if any(p.grad is not None for p in self.worker.state.parameters) and not self.done:
            raise RuntimeError(
                "sync.save() between backward() and sync.step() would lose the gradient: save after"
            )
        with self._watchman:
            if self._mending(lambda: self._save(path, also)):
                self.warn(f"a worker died during sync.save: {path} may be missing")

    def _save(self, path: Path, also: Mapping[str, checkpoint.Stateful]) -> None:
        self._course.drain()
        try:
            save(self, path, also)
        except (OSError, CheckpointError):
            self._course.resume()
            raise
        self._watchman.saved(path, also)
        self._course.resume()

    def restore(self, path: Path, also: Mapping[str, checkpoint.Stateful]) -> None:
        self._outside_consensus("restore()")
        if self.worker.team.arrived is not None:
            return
        self._course.stop()
        try:
            restore(self, path, also)
        except CheckpointError:
            self._course.resume()
            raise
        self.marks.begin(0.0 if self.total is None else self.progress)
        self._watchman.saved(path, also)
        self._course.resume()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self.stream is not None:
            self.stream.close()
        if not self._failed:
            self.leave()
        backward.ignore(self)
        self.worker.reducer.remove()
        self.worker.averager.release()
        self.worker.release()
        self._telemetry.close()
        self.journal.close()
        exits.forget(self)

    # What streams of batches and checkpoints use

    @property
    def batch_size(self) -> int | None:
        return None if self.stream is None else self.stream.batch_size

    def data_position(self) -> dict[str, Any] | None:
        return None if self.stream is None else self.stream.position()

    def next_units(self, count: int) -> Sequence[int]:
        """Numbers of the next `count` units that are this worker's, as long as the members stay."""
        return self.worker.next_units(count)

    def length_is(self, units: Callable[[float], int]) -> None:
        """With epochs=, the job's length in units is known when its data is."""
        if self.total is None and self.epochs is not None:
            self._begin(units(self.epochs))

    def leave(self) -> None:
        """No more data on this worker: see `close`."""
        while not self.done:
            with self._watchman:  # going back to a checkpoint it would begin anew
                self._mending(self._course.leave)

    def sum_units(self, own: int) -> int:
        """The sum of every worker's units."""
        return self.worker.team.sum(own) * here().alike

    def look(self, parts: Sequence[Any]) -> Iterator[Any]:
        """Gives the loop a unit's micro-batches for a look at the curvature, if one is asked for: the unit
        itself comes afterwards."""
        curvature = self.worker.curvature
        if curvature.asked:
            curvature.begin()
            for number, part in enumerate(parts):
                yield from self.lend(part, 0, number == len(parts) - 1)
            if curvature.under_way:  # no step was taken
                curvature.drop()

    def lend(self, batch: Any, samples: int, last: bool, unit: int | None = None) -> Iterator[Any]:
        """Gives the loop one micro-batch, and sees to it that the last one of a dealt unit ends in a step."""
        steps = self._steps
        if unit is not None:
            self.worker.lent = mark(unit)
        self._telemetry.batch_samples += samples
        self.worker.reducer.hold = not last
        try:
            yield batch
        finally:
            self.worker.reducer.hold = False
        if unit is not None and last and not self.done and self._steps == steps:
            raise RuntimeError(
                "every batch of sync.batches(...) is one unit and ends in one sync.step(), which was not "
                "called: to accumulate gradients over several, use sync.batches(..., micro_batches=k)"
            )

    # How it works

    def _begin(self, total: int) -> None:
        """The length is known: the plan begins."""
        plan_check(self.plan, total)
        here().begins(self, data=False)
        self._telemetry.begin(plan=str(self.plan), total=total, **self.settings, **self._identity)
        self._expect()
        self.worker.watch.open(self.policy)
        if job.world_size() > 1:
            for message in traps(self.plan, self.worker.state.optimizers, begins=not self.units):
                self.warn(message)
        self.marks.begin(self.worker.units / total)
        self.worker.total = total
        self._mending(self._start)

    def _expect(self) -> None:
        """What the run's profile predicts will be compared with what happens."""
        if self._profile is None or here().virtual or self.journal.path is None:
            return
        wire, model = 0.5 if self.settings["wire"] == "bf16" else 1.0, model_of(self.worker.state)
        record = self.journal.record
        self._telemetry.forecast = Forecast(
            self._profile, model, wire, record, partial(self.warn, own=True), self.batch_size
        )

    def _start(self) -> None:
        self.worker.prepare(self.plan)
        self._telemetry.started()
        self._course.resume()

    def warn(self, message: str, own: bool = False) -> None:
        """Says it on rank 0 and in its journal; `own` is this rank's alone, and is said wherever it is."""
        self.journal.record("warning", message=message)
        if own or job.rank() == 0:
            print(f"offbeat: warning: {message}", file=sys.stderr, flush=True)

    def go_back(self, path: Path, also: Mapping[str, checkpoint.Stateful]) -> None:
        """All workers return to a checkpoint of this job and go on with BSP."""
        self.plan = BSP()
        self.worker.clear_gradients()
        self._course.abandon(self.plan)
        restore(self, path, also)
        self.marks.begin(self.progress)
        self._course.resume()

    # What a person asks for

    def replan(self, plan: Protocol) -> None:
        """The job goes on with another plan. By all members, all holding the same."""
        self.worker.readmit_now()
        self.plan = plan
        self._course.replan(plan)

    def save_here(self, path: Path) -> None:
        """As `save`, where all members hold the same already."""
        also = self._watchman.also
        save(self, path, also)
        self._watchman.saved(path, also)

    def dismiss(self) -> NoReturn:
        """This worker's part is over, the others go on without it: its process ends."""
        self._failed = True  # nobody waits for it
        self.close()
        raise SystemExit(0)

    def _persistent(self, rank: int) -> None:
        if self.journal.path is not None:  # all members know it: the one that keeps the journal says it
            text = f"rank {rank} has been slow for more than {PERSISTENT:g} s: ask for a replacement"
            self.warn(text, own=True)

    def _mending(self, action: Callable[[], object]) -> bool:
        """Does `action`; when a member dies meanwhile, the others go on without it from where they all stand.
        Returns whether that has happened."""
        try:
            action()
            return False
        except PeerLost:
            if self.worker.team.roll is None:
                raise
        while True:
            with contextlib.suppress(PeerLost), self.worker.meter.waiting():
                self.worker.recover()
                self._enough_left()
                self._deal_anew()
                self._course.recovered()
                return True

    def _enough_left(self) -> None:
        left = self.worker.members
        if len(left) >= self.minimum:
            return
        where = ""
        if (out := job.current().out) is not None:
            save(self, out / LAST, {})
            where = f": its state is in {out / LAST}, for sync.restore(...)"
        raise BelowMinimum(f"{len(left)} workers are left, fewer than --min {self.minimum}{where}")

    def _prepare_batch(self) -> None:
        if self.stream is not None:
            self.stream.prepare()

    def _deal_anew(self) -> None:
        if self.stream is not None:
            self.stream.restart()

    def _mute(self) -> None:
        """A worker came to the phase's end outside of step(), in save() or at the beginning: where it stands
        it won't ask before its next step, so nobody is told before theirs of what falls due here. Likewise
        where newcomers have come, who ask first after their first step."""
        self.marks.muted = True

    def _check_step(self) -> None:
        worker, state, reducer = self.worker, self.worker.state, self.worker.reducer
        if worker.team.broken is not None:
            raise RuntimeError(worker.team.broken)
        if all(p.grad is None for p in state.parameters):
            raise RuntimeError("sync.step() needs a gradient: call backward() on a loss of the model first")
        for p in state.frozen:
            if p.requires_grad:
                raise RuntimeError(
                    "a parameter that was frozen when the Synchronizer was made now has requires_grad=True: "
                    "unfreeze it before, so that the workers agree on it"
                )
        if reducer.armed and not reducer.reduced:
            raise RuntimeError(
                "under bsp the last backward() before sync.step() must be outside sync.accumulate(): it "
                "is the one that brings the members' mean gradient"
            )

    def _outside_consensus(self, call: str) -> None:
        if self._inside_consensus:
            raise RuntimeError(
                f"sync.{call} inside sync.consensus() would take the averaged model for the workers' own: "
                f"leave it first"
            )

    def _over(self) -> None:
        backward.ignore(self)
        exits.relax(self)
        self.worker.reducer.remove()
        self.worker.release()
        if uses_auto(self.plan) and not self.worker.can_look:
            self.warn(
                "the plan auto looks at units of sync.batches(...), of which there were none: it was bsp"
            )
        with contextlib.suppress(*([PeerLost] if self.worker.team.roll else [])):
            self._telemetry.end()
        if self.worker.team.roll is not None:
            self.worker.team.roll.over()

    def fail(self, error: BaseException) -> None:
        """The script has failed: the others learn of it at once, and nothing more is waited for."""
        if here().dying:
            self._failed = True
        elif not self._closed and not self._failed:
            self._failed = True
            text = "".join(traceback.format_exception_only(type(error), error)).strip()
            self.journal.record("error", rank=self.worker.rank, message=text)
            self.journal.flush()
            self.worker.epoch.close()

    def backward_begins(self) -> None:
        if self._profiler is not None:
            self._profiler.backward_begun()

    def backward_returned(self, roots: Any) -> None:
        self._telemetry.backward(roots)
        if not self.worker.reducer.hold:
            here().computed()
        self.void = self._mending(self.worker.backward_returned) or self.void

    def backward_failed(self) -> None:
        self.worker.backward_failed()


def _own_store(store: Any) -> Any:
    """A job may make several Synchronizers, one after the other: each has its own keys."""
    site = here()
    site.synchronizers += 1
    return None if store is None else site.part(store, f"sync{site.synchronizers}")
