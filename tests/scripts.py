"""What workers run in the contract suite: each function is a user's script."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import offbeat
from tests.models import CLASSES, WIDTH, build, flat, loss_of, optimize, slots, unit
from tests.reference import usual


@dataclass(frozen=True)
class Setup:
    """A job: `options` go to the Synchronizer."""

    plan: Any = "bsp"
    total: int | None = 24
    model: str = "mlp"
    optimizer: str = "sgd"
    lr: float = 0.05
    momentum: float = 0.0
    decay: float = 0.0
    dtype: torch.dtype = torch.float64
    options: dict[str, Any] = field(default_factory=dict)

    def parts(self, rank: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Another model on every rank: the first one's is to count."""
        model = build(self.model, 3 + rank, self.dtype)
        return model, optimize(self.optimizer, model.parameters(), self.lr, self.momentum, self.decay)

    def start(self) -> tuple[nn.Module, torch.optim.Optimizer, offbeat.Synchronizer]:
        model, optimizer = self.parts(offbeat.rank())
        return model, optimizer, offbeat.Synchronizer(model, optimizer, self.plan, self.total, **self.options)


@dataclass
class Result:
    """What a worker saw: `trace[k]` is its parameters and buffers after step k + 1."""

    rank: int
    units: int
    clock: int
    done: bool
    final: Tensor
    parameters: Tensor
    slots: list[dict[str, Any]]
    counters: list[int]
    used: list[tuple[float, float]]
    trace: list[Tensor] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)


def result(
    model: nn.Module, optimizer: torch.optim.Optimizer, sync: offbeat.Synchronizer, **more: Any
) -> Result:
    return Result(
        rank=offbeat.rank(),
        units=sync.units,
        clock=sync._loop.worker.clock,
        done=sync.done,
        final=flat(model),
        parameters=flat(model, buffers=False),
        slots=slots(optimizer),
        counters=[int(b) for b in model.buffers() if not b.is_floating_point()],
        used=getattr(optimizer, "used", []),
        **more,
    )


Losses = Callable[[nn.Module, int, int], Tensor]


def train(setup: Setup, loss: Losses = usual) -> Result:
    """A loop of the user's own."""
    model, optimizer, sync = setup.start()
    trace = []
    with sync:
        while not sync.done:
            loss(model, offbeat.rank(), sync._loop.worker.clock).backward()
            sync.step()
            trace.append(flat(model))
    return result(model, optimizer, sync, trace=trace)


def sweep(setups: Sequence[Setup]) -> list[Result]:
    """Several jobs, one after the other, in one process."""
    return [train(setup) for setup in setups]


def table(samples: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """A data set; its third column numbers the samples."""
    source = torch.Generator().manual_seed(5)
    x = torch.randn(samples, WIDTH, generator=source, dtype=torch.float64)
    y = torch.randn(samples, CLASSES, generator=source, dtype=torch.float64)
    return x.to(dtype), y.to(dtype), torch.arange(samples)


def seeds(seed: int) -> None:
    torch.manual_seed(seed)
    numpy.random.seed(seed)
    random.seed(seed)


def dealt(setup: Setup, samples: int = 22, batch_size: int = 4, micro: int = 1, **settings: Any) -> Result:
    """A loop over sync.batches of tensors; `seen` are the samples of every unit."""
    model, optimizer, sync = setup.start()
    seeds(100 + offbeat.rank())
    trace, seen, every = [], [], []
    for x, y, rows in sync.batches(table(samples, setup.dtype), batch_size, micro_batches=micro, **settings):
        # The mean over the unit, however it is cut.
        whole = min(batch_size, samples - batch_size * (sync.units // 1 % -(-samples // batch_size)))
        share = len(x) / whole if micro > 1 and samples % batch_size == 0 else 1.0
        (loss_of(model, x, y) * share).backward()
        sync.step()
        seen.append(rows.tolist())
        every.append(sync.units)
        trace.append(flat(model))
    return result(model, optimizer, sync, trace=trace, notes={"seen": seen, "units": every})


def plain_dealt(setup: Setup, samples: int = 22, batch_size: int = 4) -> Result:
    """The same as `dealt` without offbeat in the loop, in one process."""
    from offbeat.data import Deal

    model, optimizer = setup.parts(0)
    seeds(100)
    columns, deal = table(samples, setup.dtype), Deal(samples, batch_size, 0)
    trace = []
    for number in range(setup.total or 0):
        x, y, _ = (column[deal.indices(number)] for column in columns)
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        trace.append(flat(model))
    return Result(0, 0, 0, True, flat(model), flat(model, False), slots(optimizer), [], [], trace)


def plain_own(setup: Setup) -> Result:
    """One worker's plain loop on its own units."""
    model, optimizer = setup.parts(0)
    seeds(100)
    trace = []
    for step in range(setup.total or 0):
        usual(model, 0, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        trace.append(flat(model))
    return Result(0, 0, 0, True, flat(model), flat(model, False), slots(optimizer), [], [], trace)


def own_seeded(setup: Setup) -> Result:
    model, optimizer, sync = setup.start()
    seeds(100 + offbeat.rank())
    trace = []
    while not sync.done:
        usual(model, offbeat.rank(), sync._loop.worker.clock).backward()
        sync.step()
        trace.append(flat(model))
    return result(model, optimizer, sync, trace=trace)


def one_worker_pairs(setups: Sequence[Setup]) -> list[tuple[Result, Result, Result, Result]]:
    """For each job: own loop, its plain twin, sync.batches, its plain twin."""
    return [(own_seeded(s), plain_own(s), dealt(s), plain_dealt(s)) for s in setups]


_kept: list[Any] = []  # a gloo group may hang where it is collected while others have gone


def beside_ddp(setup: Setup, steps: int) -> tuple[Tensor, Tensor]:
    """The parameters after `steps` under BSP and under DistributedDataParallel, in the same processes."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    ours = train(setup)
    assert ours.clock == steps
    model, optimizer = setup.parts(offbeat.rank())
    store = dist.PrefixStore("ddp", offbeat.job.current().store)
    dist.init_process_group("gloo", store=store, rank=offbeat.rank(), world_size=offbeat.world_size())
    try:
        wrapped = DistributedDataParallel(model)
        _kept.append(wrapped)
        for step in range(steps):
            x, y = unit(offbeat.rank(), step, setup.dtype)
            torch.nn.functional.mse_loss(wrapped(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return ours.parameters, flat(model, buffers=False)


WEIGHTY = (3000, 100, 500, 5)
"""Elements of the parameters of `weighty`'s model."""


def weighty(setup: Setup, width: int = 100) -> None:
    """With a model so large that its bytes count, and the words beside them don't."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, width), nn.Tanh(), nn.Linear(width, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=setup.momentum)
    with offbeat.Synchronizer(model, optimizer, setup.plan, setup.total, **setup.options) as sync:
        while not sync.done:
            model(torch.rand(4, 30)).square().mean().backward()
            sync.step()


# Loops with something of the user's own


def branching(model: Any, rank: int, step: int) -> Tensor:
    """Ranks use different branches; in some steps all use the same one."""
    model.use = step % 2 if step % 3 == 0 else (step + rank) % 2
    return usual(model, rank, step)


def lonely(model: Any, rank: int, step: int) -> Tensor:
    """Only rank 0 ever uses the second branch."""
    model.use = int(rank == 0 and step % 2 == 1)
    return usual(model, rank, step)


def branch_gradients(setup: Setup) -> list[list[bool]]:
    """Which parameters have a gradient after each backward."""
    model, _, sync = setup.start()
    rows = []
    while not sync.done:
        branching(model, offbeat.rank(), sync._loop.worker.clock).backward()
        rows.append([p.grad is not None for p in model.parameters()])
        sync.step()
    return rows


def accumulated(setup: Setup, pieces: int) -> Result:
    """Every step's unit in several backwards, all but the last inside sync.accumulate()."""
    model, optimizer, sync = setup.start()
    trace = []
    while not sync.done:
        x, y = unit(offbeat.rank(), sync._loop.worker.clock, setup.dtype)
        parts = list(zip(x.chunk(pieces), y.chunk(pieces), strict=True))
        for number, (a, b) in enumerate(parts):
            with sync.accumulate() if number < len(parts) - 1 else contextlib.nullcontext():
                (loss_of(model, a, b) * len(a) / len(x)).backward()
        sync.step()
        trace.append(flat(model))
    return result(model, optimizer, sync, trace=trace)


def twice(setup: Setup) -> Result:
    """Two backwards before each step, both outside sync.accumulate()."""
    model, optimizer, sync = setup.start()
    trace = []
    while not sync.done:
        x, y = unit(offbeat.rank(), sync._loop.worker.clock, setup.dtype)
        for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
            (loss_of(model, a, b) / 2).backward()
        sync.step()
        trace.append(flat(model))
    return result(model, optimizer, sync, trace=trace)


def divided(setup: Setup, how: str) -> Result:
    """The parameters in several groups, or under several optimizers, of equal settings."""
    model = build(setup.model, 3 + offbeat.rank(), setup.dtype)
    parameters = list(model.parameters())
    parts = [parameters[:1], parameters[1:]]
    settings = (setup.lr, setup.momentum, setup.decay)
    if how == "groups":
        made: Any = optimize(setup.optimizer, [{"params": part} for part in parts], *settings)
    else:
        made = [optimize(setup.optimizer, part, *settings) for part in parts]
    sync = offbeat.Synchronizer(model, made, setup.plan, setup.total, **setup.options)
    trace = []
    while not sync.done:
        usual(model, offbeat.rank(), sync._loop.worker.clock).backward()
        sync.step()
        trace.append(flat(model))
    return result(model, made if how == "groups" else made[0], sync, trace=trace)


def scaled(setup: Setup, bad: tuple[int, int] | None, start: float = 1024.0) -> Result:
    """With a GradScaler; `bad` = (rank, step) has an infinite loss."""
    model, optimizer, sync = setup.start()
    scaler = torch.amp.GradScaler("cpu", init_scale=start, growth_interval=10**6)
    trace, scales = [], []
    while not sync.done:
        here = (offbeat.rank(), sync._loop.worker.clock)
        loss = usual(model, *here)
        scaler.scale(loss * float("inf") if here == bad else loss).backward()
        sync.step(scaler)
        trace.append(flat(model))
        scales.append(scaler.get_scale())
    return result(model, optimizer, sync, trace=trace, notes={"scales": scales})


def skips_one(rank: int, step: int) -> bool:
    return (rank, step) == (1, 4)


def autocasting(setup: Setup) -> Result:
    model, optimizer, sync = setup.start()
    trace = []
    while not sync.done:
        x, y = unit(offbeat.rank(), sync._loop.worker.clock, setup.dtype)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, x, y)
        loss.backward()
        sync.step()
        trace.append(flat(model))
    return result(model, optimizer, sync, trace=trace)


def autocast_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return usual(model, rank, step)


def gradients(setup: Setup, limit: float) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Each step's gradient by hand (this worker's own), as it is after backward, and after clipping."""
    model, _, sync = setup.start()
    rows = []
    while not sync.done:
        step = sync._loop.worker.clock
        own = torch.autograd.grad(usual(model, offbeat.rank(), step), list(model.parameters()))
        usual(model, offbeat.rank(), step).backward()
        after = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).clone()  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        clipped = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).clone()  # type: ignore[union-attr]
        rows.append((torch.cat([g.reshape(-1) for g in own]), after, clipped))
        sync.step()
    return rows


def consenting(setup: Setup, at: Sequence[int]) -> Result:
    """Enters consensus after some steps, and notes what the model held before, inside and after."""
    model, optimizer, sync = setup.start()
    trace, rows = [], []
    while not sync.done:
        usual(model, offbeat.rank(), sync._loop.worker.clock).backward()
        sync.step()
        trace.append(flat(model))
        if sync._loop.worker.clock in at:
            before = flat(model)
            with sync.consensus():
                inside = flat(model)
                model.eval()
                model(unit(0, 0, setup.dtype)[0])
                model.train()
            rows.append((before, inside, flat(model)))
    return result(model, optimizer, sync, trace=trace, notes={"consensus": rows})


def asking(setup: Setup, texts: Sequence[str]) -> dict[str, list[int]]:
    """At which units sync.every said True."""
    model, _, sync = setup.start()
    rows: dict[str, list[int]] = {text: [] for text in texts}
    while not sync.done:
        usual(model, offbeat.rank(), sync._loop.worker.clock).backward()
        sync.step()
        for text in texts:
            if sync.every(text):
                rows[text].append(sync.units)
    return rows


def schedule_of(name: str, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    from torch.optim import lr_scheduler as s

    if name == "step":
        return s.StepLR(optimizer, 3, 0.5)
    if name == "cosine":
        return s.CosineAnnealingLR(optimizer, steps)
    if name == "onecycle":
        return s.OneCycleLR(optimizer, max_lr=0.2, total_steps=steps + 1)
    if name == "sequential":
        parts = [s.LinearLR(optimizer, 0.1, total_iters=4), s.CosineAnnealingLR(optimizer, steps - 4)]
        return s.SequentialLR(optimizer, parts, [4])
    raise ValueError(name)


def scheduled(setup: Setup, name: str, made_for: int, steps: int | None) -> list[tuple[int, float]]:
    """Units before each step, and the learning rate that it used."""
    model, optimizer, sync = setup.start()
    sync.scheduler(schedule_of(name, optimizer, made_for), steps)
    units = []
    while not sync.done:
        usual(model, offbeat.rank(), sync._loop.worker.clock).backward()
        units.append(sync.units)
        sync.step()
    return [(u, lr) for u, (lr, _) in zip(units, optimizer.used, strict=True)]  # type: ignore[attr-defined]


def half_cosine(progress: float) -> float:
    return 1.0 - 0.75 * progress


def shaped(setup: Setup) -> tuple[list[int], Result]:
    model, optimizer, sync = setup.start()
    sync.scheduler(half_cosine)
    units = []
    while not sync.done:
        usual(model, offbeat.rank(), sync._loop.worker.clock).backward()
        units.append(sync.units)
        sync.step()
    return units, result(model, optimizer, sync)
