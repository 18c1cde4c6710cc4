"""User's scripts of the contract suite: stragglers, and what is done about them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import offbeat
from offbeat.cluster.control import Exchange, Word
from offbeat.cluster.stragglers import Watch
from tests.models import flat, loss_of
from tests.reference import usual
from tests.scripts import Result, Setup, result, seeds, table

Flags = Mapping[int, Sequence[int]]
"""From the exchange of the step at a clock on, these ranks are stragglers."""


class Planted(Watch):
    """Flags by a table. On shards, nobody is one any more after `calm` pushes of the leader."""

    def __init__(self, sync: offbeat.Synchronizer, flags: Flags, calm: int):
        super().__init__(sync._loop.worker)
        self.settings = sync._loop.worker.watch.settings
        self._flags, self._calm, self._pushes = flags, calm, 0

    def begin(self) -> None:
        return

    def own_time(self) -> dict[str, int]:
        return {}

    def exchanged(self, exchange: Exchange, words: Sequence[Word], probe: bool = False) -> None:
        clock = words[0].clock
        at = max((one for one in self._flags if one <= clock), default=None)
        self.stragglers = frozenset() if at is None else frozenset(self._flags[at])

    def due(self, pushes: int) -> bool:
        self._pushes += 1  # of all phases: each checkpoint begins another
        if self._worker.rank != self._worker.members[0]:
            time.sleep(0.005)  # the leader counts: on a busy machine too it comes to its turn
        return True

    def look(self, phase: str, members: Sequence[int]) -> bool:
        return self._pushes >= self._calm

    def forget(self) -> None:
        self.stragglers = frozenset()


def plant(sync: offbeat.Synchronizer, flags: Flags, calm: int) -> None:
    sync._loop.worker.watch = Planted(sync, flags, calm)


def trained(setup: Setup, flags: Flags, calm: int = 5) -> Result:
    """A loop of the user's own."""
    model, optimizer, sync = setup.start()
    plant(sync, flags, calm)
    trace, clocks, members = [], [], []
    with sync:
        while not sync.done:
            clocks.append(sync._loop.worker.clock)
            usual(model, offbeat.rank(), sync._loop.worker.clock).backward()
            sync.step()
            trace.append(flat(model))
            members.append(list(sync.members))
    return result(model, optimizer, sync, trace=trace, notes={"clocks": clocks, "members": members})


def dealt(setup: Setup, flags: Flags, samples: int, batch_size: int, calm: int = 5, **more: Any) -> Result:
    """A loop over sync.batches; `seen` are the samples of every unit. Evaluates all together now and then."""
    model, optimizer, sync = setup.start()
    plant(sync, flags, calm)
    seeds(100 + offbeat.rank())
    seen: list[list[int]] = []
    looks = 0
    for x, y, rows in sync.batches(table(samples, setup.dtype), batch_size, **more):
        loss_of(model, x, y).backward()
        sync.step()
        seen.append(rows.tolist())
        if sync.every("10%"):
            with sync.consensus():
                looks += 1
    return result(model, optimizer, sync, notes={"seen": seen, "looks": looks})


def uneven(setup: Setup, flags: Flags, lengths: Sequence[int]) -> Result:
    """Each rank has data for so many steps."""
    model, optimizer, sync = setup.start()
    plant(sync, flags, 5)
    with sync:
        for _ in range(lengths[offbeat.rank()]):
            if sync.done:
                break
            usual(model, offbeat.rank(), sync._loop.worker.clock).backward()
            sync.step()
    return result(model, optimizer, sync)


def saved(setup: Setup, flags: Flags, path: Path, at: int) -> Result:
    """Saves once in `at` units; `held` is what was held the first time. A detour lasts beyond the first."""
    model, optimizer, sync = setup.start()
    plant(sync, flags, 24)
    held = None
    with sync:
        while not sync.done:
            usual(model, offbeat.rank(), sync._loop.worker.clock).backward()
            sync.step()
            if sync.every(f"{at}u"):
                sync.save(path if held is None else path.with_name("later.pt"))
                held = flat(model) if held is None else held
    return result(model, optimizer, sync, notes={"held": held})


def restored(setup: Setup, path: Path) -> Result:
    model, optimizer, sync = setup.start()
    with sync:
        sync.restore(path)
        held, units = flat(model), sync.units
        while not sync.done:
            usual(model, offbeat.rank(), sync._loop.worker.clock).backward()
            sync.step()
    return result(model, optimizer, sync, notes={"held": held, "units": units})


def slowed(setup: Setup, slow: Mapping[int, float], begin: int, end: int, base: float = 0.01) -> Result:
    """Every step takes `base` seconds, and `slow[rank]` times that from this rank's step `begin` to `end`."""
    model, optimizer, sync = setup.start()
    steps = 0
    with sync:
        while not sync.done:
            time.sleep(base * (slow.get(offbeat.rank(), 1.0) if begin <= steps < end else 1.0))
            steps += 1
            usual(model, offbeat.rank(), sync._loop.worker.clock).backward()
            sync.step()
    return result(model, optimizer, sync)


def probed(rounds: int) -> list[list[list[float]]]:
    """What probes over three shifts find."""
    model = torch.nn.Linear(2, 2)
    with contextlib.closing(
        offbeat.Synchronizer(model, torch.optim.SGD(model.parameters(), 0.1), total=1)
    ) as sync:
        found = [
            sync._loop.worker.epoch.probe(range(1, min(3, offbeat.world_size() - 1) + 1))
            for _ in range(rounds)
        ]
        model(torch.randn(1, 2)).sum().backward()
        sync.step()
    return found
