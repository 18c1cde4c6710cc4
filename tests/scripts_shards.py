"""User's scripts of the contract suite: asynchronous training over parameter shards."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import offbeat
from offbeat.cluster import real, shards, sizes
from tests.models import Muon, compose, flat, loss_of, slots, unit
from tests.reference import usual
from tests.reference_shards import Log, joined
from tests.scripts import Result, Setup, schedule_of, table

Losses = Callable[[Any, int, int], Tensor]


_log: ContextVar[Log] = ContextVar("log")


class Recorded(shards.ShardHome):
    """Writes down what it does in its worker's log."""

    def begin(self, clock: int, units: int) -> None:
        self.trace = _log.get().events
        self.trace.append({"kind": "cut", "clock": clock, "units": units})
        super().begin(clock, units)


@dataclass(frozen=True)
class Job(Setup):
    """kind: see `models.compose`. shard: bytes worth a shard of their own. slow: seconds that a rank's steps
    take longer. zero: all parameters begin at 0. looks: ranks that evaluate after every step."""

    kind: str = "one"
    shard: int = 1 << 20
    slow: Mapping[int, float] = field(default_factory=dict)
    zero: bool = False
    looks: tuple[int, ...] = ()

    def compose(self, rank: int = 0) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
        settings = (self.lr, self.momentum, self.decay, self.dtype, 3 + rank)
        models, optimizers = compose(self.kind, self.model, self.optimizer, *settings)
        if self.zero:
            for p in models[0].parameters():
                p.data.zero_()
        return models, optimizers

    def begin(self) -> tuple[list[nn.Module], list[torch.optim.Optimizer], offbeat.Synchronizer, Log]:
        """The log tells of this worker's pushes, pulls and cuts, from the first one on."""
        sizes.SHARD = self.shard
        log = Log()
        _log.set(log)
        real.ShardHome = Recorded  # type: ignore[misc]
        models, optimizers = self.compose(offbeat.rank())
        sync = offbeat.Synchronizer(models, optimizers, self.plan, self.total, **self.options)
        return models, optimizers, sync, log

    def pause(self) -> None:
        if offbeat.rank() in self.slow:
            time.sleep(self.slow[offbeat.rank()])


def noted(sync: offbeat.Synchronizer, log: Log, clock: int, ticket: int) -> None:
    """After a step."""
    pulled = sync._loop.worker.sharded and log.events[-1]["kind"] == "pull"
    log.steps.append((clock, ticket, None if pulled else sync._loop.worker.team.units))


def told(
    models: Sequence[nn.Module], optimizers: Sequence[Any], sync: offbeat.Synchronizer, log: Log, **more: Any
) -> Result:
    whole = nn.ModuleList(models)
    return Result(
        rank=offbeat.rank(),
        units=sync.units,
        clock=sync._loop.worker.clock,
        done=sync.done,
        final=flat(whole),
        parameters=flat(whole, buffers=False),
        slots=[row for optimizer in optimizers for row in slots(optimizer)],
        counters=[int(b) for b in whole.buffers() if not b.is_floating_point()],
        used=getattr(optimizers[0], "used", []),
        trace=more.pop("trace", []),
        notes={"log": log, **more},
    )


Ready = Callable[[Sequence[torch.optim.Optimizer], offbeat.Synchronizer], Any]


def train(job: Job, loss: Losses = usual, ready: Ready | None = None) -> Result:
    """A loop of the user's own; `ready` is called before it begins."""
    models, optimizers, sync, log = job.begin()
    if ready is not None:
        ready(optimizers, sync)
    trace = []
    with sync:
        while not sync.done:
            clock, ticket = sync._loop.worker.clock, sync.units
            loss(joined(models), offbeat.rank(), clock).backward()
            job.pause()
            sync.step()
            noted(sync, log, clock, ticket)
            trace.append(flat(nn.ModuleList(models)))
            if offbeat.rank() in job.looks and sync._loop.worker.sharded:
                with sync.consensus():
                    time.sleep(0.002)
    return told(models, optimizers, sync, log, trace=trace)


def several(calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Several scripts with their arguments, one after the other, in one process."""
    return [script(*arguments) for script, *arguments in calls]


def pair_loss(models: Any, rank: int, step: int) -> Tensor:
    """Two models that train together: each one's output is the other's business."""
    x, y = unit(rank, step, next(models.parameters()).dtype)
    one, two = models
    return loss_of(one, x, y) + (one(x) - two(x)).square().mean()


def asking(job: Job, texts: Sequence[str], do: str = "", path: str = "") -> dict[str, Any]:
    """Asks sync.every after each step, and does something where it is true: `consensus` on all, `lonely`
    consensus on rank 0, `save`. For each text, units and whether the job was over when it was told."""
    models, optimizers, sync, log = job.begin()
    rows: dict[str, list[tuple[int, bool]]] = {text: [] for text in texts}
    with sync:
        while not sync.done:
            clock, ticket = sync._loop.worker.clock, sync.units
            usual(joined(models), offbeat.rank(), clock).backward()
            job.pause()
            sync.step()
            noted(sync, log, clock, ticket)
            for text in texts:
                if not sync.every(text):
                    continue
                rows[text].append((sync.units, sync.done))
                if "consensus" in do or (
                    "lonely" in do and offbeat.rank() == 0 and sync.protocol.home == "shards"
                ):
                    with sync.consensus():
                        usual(joined(models), 0, 0)
                if "save" in do:
                    sync.save(path)
    return {"told": rows, "result": told(models, optimizers, sync, log)}


def dealt(
    job: Job,
    samples: int = 22,
    batch_size: int = 4,
    micro: int = 1,
    how: str = "tensors",
    every: str = "",
    path: str = "",
    stop: Mapping[int, int] | None = None,
    **settings: Any,
) -> Result:
    """A loop over sync.batches; `seen` are the samples of every unit. how: what is dealt. every: when to
    save. stop: after how many steps a rank leaves."""
    models, optimizers, sync, log = job.begin()
    seen, rows, steps = [], [], 0
    columns = table(samples, job.dtype)
    data: Any = columns if how == "tensors" else Plain(columns)
    for x, y, numbers in sync.batches(data, batch_size, micro_batches=micro, **settings):
        (loss_of(joined(models), x, y) / micro).backward()
        rows += numbers.tolist()
        if not sync.stepping:
            continue
        clock, ticket = sync._loop.worker.clock, sync.units
        job.pause()
        sync.step()
        noted(sync, log, clock, ticket)
        seen.append(rows)
        rows, steps = [], steps + 1
        if (stop or {}).get(offbeat.rank()) == steps:
            break
        if every and sync.every(every):
            sync.save(path)
    sync.close()
    return told(models, optimizers, sync, log, seen=seen)


class Plain:
    """A map-style data set."""

    def __init__(self, columns: Sequence[Tensor]):
        self._columns = columns

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, at: int) -> tuple[Tensor, ...]:
        return tuple(column[at] for column in self._columns)


def dealt_workers(job: Job, processes: int, *more: Any) -> Result:
    """`dealt` with processes that fetch ahead."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    multiprocessing.set_start_method(
        "fork", force=True
    )  # as in a script of its own; a new server costs seconds
    return dealt(job, *more, num_workers=processes)


def diverging(
    job: Job,
    bad: tuple[int, int],
    first: str = "",
    path: str = "",
    leaves: Mapping[int, int] | None = None,
    evaluates: bool = False,
) -> Result:
    """Rank `bad[0]` has a loss that is no number at its step `bad[1]`. first: saves when told so for the
    first time. leaves: after how many steps a rank closes. evaluates: enters consensus after every step."""
    models, optimizers, sync, log = job.begin()
    steps, saved, went_back = 0, False, False
    losses: list[float] = []
    with sync:
        while not sync.done and (leaves or {}).get(offbeat.rank()) != steps:
            clock, ticket, was = sync._loop.worker.clock, sync.units, str(sync.protocol)
            loss = usual(joined(models), offbeat.rank(), clock)
            if (offbeat.rank(), steps) == bad:
                loss = loss * float("nan")
            losses.append(float(loss))
            loss.backward()
            job.pause()
            sync.step()
            steps += 1
            noted(sync, log, clock, ticket)
            went_back = went_back or (was != "bsp" and str(sync.plan) == "bsp")
            if evaluates:
                with sync.consensus():
                    pass
            if first and not saved and sync.every(first):
                saved = True
                sync.save(path)
    finite = all(bool(p.isfinite().all()) for model in models for p in model.parameters())
    return told(models, optimizers, sync, log, steps=steps, back=went_back, finite=finite, losses=losses)


def shaped(job: Job, shape: Callable[[float], float]) -> Result:
    """With a learning rate that is a function of the progress."""
    return train(job, ready=lambda optimizers, sync: sync.scheduler(shape))


def scheduled(job: Job, name: str, steps: int, path: str) -> Result:
    """With a scheduler of torch, which goes back where a checkpoint deals tickets again."""
    models, optimizers, sync, log = job.begin()
    sync.scheduler(schedule_of(name, optimizers[0], steps))
    with sync:
        while not sync.done:
            clock, ticket = sync._loop.worker.clock, sync.units
            usual(joined(models), offbeat.rank(), clock).backward()
            job.pause()
            sync.step()
            noted(sync, log, clock, ticket)
            if sync.every("40%"):
                sync.save(path)
    return told(models, optimizers, sync, log, lr=optimizers[0].param_groups[0]["lr"])


def ones(model: nn.Module, rank: int, step: int) -> Tensor:
    """Its gradient is 1000 ** rank for every element."""
    return torch.stack([p.sum() for p in model.parameters()]).sum() * 1000**rank


def counting(job: Job) -> Result:
    """All parameters begin at zero."""
    return train(replace(job, zero=True), ones)


def consenting(job: Job) -> Result:
    """Rank 0 looks into the shards after each step. Notes what the model held before, inside and after, the
    versions of the last pull before and after, and the time; and when this worker published which buffers."""
    models, optimizers, sync, log = job.begin()
    whole = nn.ModuleList(models)
    trace, rows = [], []
    published = [(0.0, buffers_of(whole))]
    with sync:
        while not sync.done:
            clock, ticket = sync._loop.worker.clock, sync.units
            usual(joined(models), offbeat.rank(), clock).backward()
            job.pause()
            published.append((time.monotonic(), buffers_of(whole)))
            sync.step()
            noted(sync, log, clock, ticket)
            trace.append(flat(whole))
            if offbeat.rank() == 0 and not sync.done:
                at, before, pulled = time.monotonic(), flat(whole), log.events[-1]["seen"]
                with sync.consensus():
                    inside = flat(whole)
                    with torch.no_grad():
                        for tensor in (*whole.parameters(), *whole.buffers()):
                            tensor.zero_()  # whatever is done inside is forgotten
                rows.append((before, inside, flat(whole), pulled, log.events[-1]["seen"], at))
    return told(models, optimizers, sync, log, trace=trace, consensus=rows, published=published)


def buffers_of(model: nn.Module) -> Tensor:
    return torch.cat([b.reshape(-1) for b in model.buffers() if b.is_floating_point()]).clone()


def saves(job: Job, path: str, every: str) -> Result:
    """Saves when told so for the first time, and goes on. Notes units and state right after it, and what was
    done before."""
    models, optimizers, sync, log = job.begin()
    seen: list[Any] = []
    before: list[Any] = []
    saved: Any = None
    for x, y, numbers in sync.batches(table(24, job.dtype), 4):
        loss_of(joined(models), x, y).backward()
        job.pause()
        sync.step()
        seen.append(numbers.tolist())
        if saved is None and sync.every(every) and not sync.done:
            sync.save(path)
            before = list(seen)
            saved = (sync._loop.worker.team.units, flat(nn.ModuleList(models)), slots(optimizers[0]))
    return told(models, optimizers, sync, log, seen=seen, saved=saved, before=before if saved else seen)


def resumes(job: Job, path: str) -> Result:
    models, optimizers, sync, log = job.begin()
    sync.restore(path)
    begun = (sync._loop.worker.team.units, flat(nn.ModuleList(models)), slots(optimizers[0]))
    seen = []
    for x, y, numbers in sync.batches(table(24, job.dtype), 4):
        loss_of(joined(models), x, y).backward()
        job.pause()
        sync.step()
        seen.append(numbers.tolist())
    return told(models, optimizers, sync, log, seen=seen, begun=begun)


def last_of(sync: offbeat.Synchronizer, boundary: int) -> bool:
    """Whether all others are through with the phase, and this worker holds a ticket of it."""
    if not sync._loop.worker.sharded or sync.units >= boundary:
        return False
    time.sleep(0.15)
    home = sync._loop.worker.home
    assert home is not None
    resting = home.memory.current(0).resting
    return bool(resting.sum() == offbeat.world_size() - 1)


def saves_last(job: Job, path: str, boundary: int) -> Result:
    """Rank 1 dawdles with its second ticket until the others are through, then saves with it in hand."""
    models, optimizers, sync, log = job.begin()
    saved = False
    with sync:
        while not sync.done:
            clock, ticket = sync._loop.worker.clock, sync.units
            usual(joined(models), offbeat.rank(), clock).backward()
            sync.step()
            noted(sync, log, clock, ticket)
            if offbeat.rank() == 1 and not saved:
                while not last_of(sync, boundary):
                    pass
                saved = True
                sync.save(path)
    return told(models, optimizers, sync, log)


def diverges_last(job: Job, path: str, boundary: int) -> Result:
    """All save after their first step; rank 1 dawdles until the others are through, then its loss is NaN."""
    models, optimizers, sync, log = job.begin()
    steps, back = 0, False
    with sync:
        while not sync.done:
            clock, ticket = sync._loop.worker.clock, sync.units
            loss = usual(joined(models), offbeat.rank(), clock)
            if offbeat.rank() == 1 and steps == 1:
                while not last_of(sync, boundary):
                    pass
                loss = loss * float("nan")
            loss.backward()
            was = str(sync.plan)
            sync.step()
            steps += 1
            back = back or was != str(sync.plan)
            noted(sync, log, clock, ticket)
            if steps == 1:
                sync.save(path)
    finite = all(bool(p.isfinite().all()) for model in models for p in model.parameters())
    return told(models, optimizers, sync, log, back=back, finite=finite)


def scaled(job: Job, bad: tuple[int, int]) -> Result:
    """With a GradScaler; `bad` = (rank, clock) has an infinite loss."""
    models, optimizers, sync, log = job.begin()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10**6)
    trace = []
    with sync:
        while not sync.done:
            clock, ticket = sync._loop.worker.clock, sync.units
            here = (offbeat.rank(), clock)
            loss = usual(joined(models), *here)
            scaler.scale(loss * float("inf") if here == bad else loss).backward()
            job.pause()
            sync.step(scaler)
            noted(sync, log, clock, ticket)
            trace.append(flat(nn.ModuleList(models)))
    return told(models, optimizers, sync, log, trace=trace, scale=scaler.get_scale())


def dies(job: Job, victim: int, steps: int) -> None:
    """`victim` is killed after so many steps; the others note when they learn of it."""
    out = Path(os.environ["OFFBEAT_OUT"])
    models, _, sync, _ = job.begin()
    taken = 0
    try:
        while not sync.done:
            usual(joined(models), offbeat.rank(), sync._loop.worker.clock).backward()
            job.pause()
            if offbeat.rank() == victim and taken == steps:
                (out / "died").write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            sync.step()
            taken += 1
            if offbeat.rank() in job.looks:
                with sync.consensus():
                    pass
    finally:
        (out / f"ended{offbeat.rank()}").write_text(str(time.time()))


class Closing(torch.optim.SGD):
    """It wants a closure."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


class Nested(torch.optim.SGD):
    """It has another one do the work."""

    def __init__(self, params: Any, lr: float):
        params = list(params)
        super().__init__(params, lr=lr)
        self.inner = torch.optim.Adam(params, lr=lr)


class Wordy(torch.optim.SGD):
    """It keeps words in its state."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["word"] = "one"
        return super().step()


def wrongly(how: str) -> Any:
    """One way of using shards wrongly; returns only if nothing was said."""
    model: nn.Module = nn.Linear(4, 3)
    options: dict[str, Any] = {}
    kind: Any = torch.optim.SGD
    plan = "bsp:25% asp"
    if how == "closure":
        kind = Closing
    elif how == "nested":
        kind = Nested
    elif how == "text":
        kind = Wordy
    elif how == "cut":
        options["cut"] = "foo"
    elif how == "diverge":
        options["on_diverge"] = "foo"
    elif how == "rows":
        kind, options["cut"] = Muon, "elements"
    elif how == "bound":
        plan = "ssp(bound=-1)"
    elif how == "gaps":
        model.weight = nn.Parameter(torch.zeros(3, 12)[:, ::2])
    elif how == "sparse":
        plan = "asp"
        model = nn.Embedding(4, 3, sparse=True)
    sync = offbeat.Synchronizer(model, kind(model.parameters(), lr=0.1), plan, 12, **options)
    if how == "sparse":
        model(torch.tensor([offbeat.rank()])).sum().backward()
        sync.step()
    return None


def needs_no_memory(job: Job) -> tuple[int, Any]:
    from offbeat.cluster import memory

    memory.make_file = None  # type: ignore[assignment]
    models, _, sync, _ = job.begin()
    while not sync.done:
        usual(joined(models), 0, sync._loop.worker.clock).backward()
        sync.step()
    return sync.units, sync._loop.worker.home


def rolls_back(job: Job, processes: int, step: int, path: str) -> Result:
    """Rank 1's loss is no number at a step of its own. Notes the samples of the units before the checkpoint,
    and after the return to it."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    multiprocessing.set_start_method("fork", force=True)
    models, optimizers, sync, log = job.begin()
    before: list[Any] = []
    seen: list[Any] = []
    saved = False
    batches = sync.batches(Plain(table(24, job.dtype)), 4, num_workers=processes)
    for steps, (x, y, numbers) in enumerate(batches):
        loss = loss_of(joined(models), x, y)
        if (offbeat.rank(), steps) == (1, step):
            loss = loss * float("nan")
        loss.backward()
        job.pause()
        plan = sync.plan
        sync.step()
        seen.append(numbers.tolist())
        if sync.plan is not plan:
            seen = []
        if not saved and sync.every("20%"):
            saved = True
            sync.save(path)
            before = list(seen)
    return told(models, optimizers, sync, log, before=before, after=seen)
