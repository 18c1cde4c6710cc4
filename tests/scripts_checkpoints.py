"""User's scripts of the contract suite: saving and resuming."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from tests.models import flat, loss_of, slots, unit
from tests.reference import usual
from tests.scripts import Result, Setup, result, seeds, table


def seeded_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Draws from all three generators."""
    return loss_of(model, x, y) * (1 + 0.1 * random.random() + 0.1 * float(numpy.random.rand()))


def batches_of(sync: offbeat.Synchronizer, loop: str, dtype: torch.dtype) -> Any:
    """The batches of three kinds of loop."""
    if loop == "own":
        while not sync.done:
            yield unit(offbeat.rank(), sync._loop.worker.clock, dtype)
    elif loop == "batches":
        yield from ((x, y) for x, y, _ in sync.batches(table(22, dtype), 4))
    else:
        x, y, _ = table(24, dtype)
        share = (
            slice(offbeat.rank() * 12, offbeat.rank() * 12 + 12) if offbeat.world_size() == 2 else slice(None)
        )
        yield from sync.batches(DataLoader(TensorDataset(x[share], y[share]), 4, shuffle=True))


def generators() -> list[Any]:
    return [torch.rand(3).tolist(), numpy.random.rand(3).tolist(), random.random()]


def saves(
    setup: Setup, path: str, at: int, loop: str, half: Callable[[float], float] | None = None
) -> Result:
    """Saves after `at` steps and goes on."""
    model, optimizer, sync = setup.start()
    if half is not None:
        sync.scheduler(half)
    seeds(40 + offbeat.rank())
    trace = []
    for x, y in batches_of(sync, loop, setup.dtype):
        seeded_loss(model, x, y).backward()
        sync.step()
        if sync._loop.worker.clock == at:
            sync.save(path)
        if sync._loop.worker.clock > at:
            trace.append(flat(model))
    return result(model, optimizer, sync, trace=trace, notes={"random": generators()})


def resumes(setup: Setup, path: str, loop: str, half: Callable[[float], float] | None = None) -> Result:
    """Another process, other seeds, goes on from the checkpoint."""
    model, optimizer, sync = setup.start()
    if half is not None:
        sync.scheduler(half)
    seeds(90 + offbeat.rank())
    sync.restore(path)
    trace, begun = [], sync.units
    for x, y in batches_of(sync, loop, setup.dtype):
        seeded_loss(model, x, y).backward()
        sync.step()
        trace.append(flat(model))
    notes = {"random": generators(), "begun": begun}
    return result(model, optimizer, sync, trace=trace, notes=notes)


class Ramp:
    """Something of the user's own with a state."""

    def __init__(self, value: int):
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def saves_also(setup: Setup, path: str) -> int:
    model, _, sync = setup.start()
    ramp = Ramp(5)
    usual(model, offbeat.rank(), 0).backward()
    sync.step()
    sync.save(path, also={"ramp": ramp})
    return ramp.value


def restores_also(setup: Setup, path: str) -> int:
    _, _, sync = setup.start()
    ramp = Ramp(0)
    sync.restore(path, also={"ramp": ramp})
    return ramp.value


def refuses(setup: Setup, paths: Sequence[str]) -> tuple[list[tuple[str, str, bool]], Result]:
    """Tries each path; what was raised, and whether anything had changed. Then trains."""
    model, optimizer, sync = setup.start()
    rows = []
    for path in paths:
        before = (flat(model), slots(optimizer), torch.get_rng_state(), random.getstate(), sync.units)
        lr = optimizer.param_groups[0]["lr"]
        error: Exception | None = None
        try:
            sync.restore(path)
        except Exception as raised:
            error = raised
        same = (
            torch.equal(before[0], flat(model))
            and str(before[1]) == str(slots(optimizer))
            and torch.equal(before[2], torch.get_rng_state())
            and before[3] == random.getstate()
            and before[4] == sync.units
            and lr == optimizer.param_groups[0]["lr"]
        )
        rows.append((type(error).__name__, str(error), same))
    trace = []
    while not sync.done:
        usual(model, offbeat.rank(), sync._loop.worker.clock).backward()
        sync.step()
        trace.append(flat(model))
    return rows, result(model, optimizer, sync, trace=trace)


def cannot_write(setup: Setup, path: str) -> tuple[str, str, Result]:
    """Saves where it cannot be, and goes on."""
    model, optimizer, sync = setup.start()
    trace, name, message = [], "", ""
    while not sync.done:
        usual(model, offbeat.rank(), sync._loop.worker.clock).backward()
        sync.step()
        trace.append(flat(model))
        if sync._loop.worker.clock == 3:
            try:
                sync.save(path)
            except OSError as error:
                name, message = type(error).__name__, str(error)
    return name, message, result(model, optimizer, sync, trace=trace)


def killed_while_saving(setup: Setup, path: str) -> None:
    import os
    import signal

    model, _, sync = setup.start()
    for _ in range(2):
        usual(model, offbeat.rank(), sync._loop.worker.clock).backward()
        sync.step()
    os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,misc]
    sync.save(path)


def saves_while_leaving(setup: Setup, path: str, steps: int, leaver: int) -> Result:
    """One rank stops after `steps`, where the other saves."""
    model, optimizer, sync = setup.start()
    while not sync.done:
        usual(model, offbeat.rank(), sync._loop.worker.clock).backward()
        sync.step()
        if sync._loop.worker.clock == steps:
            if offbeat.rank() == leaver:
                break
            sync.save(path)
    sync.close()
    return result(model, optimizer, sync)


def saves_alone_at_the_end(setup: Setup, path: str) -> float:
    """As DDP scripts do: rank 0 alone saves when all is done."""
    model, _, sync = setup.start()
    step = 0
    while not sync.done:
        usual(model, offbeat.rank(), step).backward()
        sync.step()
        step += 1
    if offbeat.rank() == 0:
        sync.save(path)
    return sync.progress


def saves_before_the_step(setup: Setup, path: str) -> None:
    model, _, sync = setup.start()
    usual(model, offbeat.rank(), 0).backward()
    sync.save(path)
