"""User's scripts of the contract suite: workers that die, and those that come in their place."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import offbeat
from offbeat import resume
from offbeat.cluster import average, changes, client, memory, real, replicas
from tests.models import flat, loss_of
from tests.scripts import Result, Setup, result, seeds, table
from tests.scripts_stragglers import plant


@dataclass(frozen=True)
class Loss(Setup):
    """moment: where rank `who` dies, once it has taken `after` steps; only its first process does. Ranks that
    are not of the beginning come after `delay` seconds (negative: before those that are). flags: who is a
    straggler from which clock on."""

    who: int = 1
    too: int = -1  # another that dies likewise
    then: str = ""  # or where that one dies
    after: int = 6
    moment: str = "backward"
    samples: int = 4000
    saves: str = ""
    pace: float = 0.0
    delay: float = 0.0
    flags: dict[int, list[int]] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)


EARLY = ("meeting", "receiving", "preparing")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def mine(loss: Loss) -> bool:
    """Whether this process is to die."""
    return offbeat.rank() in (loss.who, loss.too) and not offbeat.job.current().attempt


def arm(loss: Loss, sync: offbeat.Synchronizer, model: torch.nn.Module) -> None:
    """From here on this process dies when its time has come."""
    if not mine(loss):
        return

    me = offbeat.rank()
    moment = loss.then if loss.then and me == loss.too else loss.moment

    def due() -> bool:  # what is armed may be all virtual workers'
        return offbeat.rank() == me and mine(loss) and sync._loop.worker.clock >= loss.after

    def before(owner: Any, name: str) -> None:
        plain: Callable[..., Any] = getattr(owner, name)

        def deadly(*args: Any, **more: Any) -> Any:
            if due():
                die()
            return plain(*args, **more)

        setattr(owner, name, deadly)

    if moment == "backward":
        next(model.parameters()).register_post_accumulate_grad_hook(lambda p: die() if due() else None)
    elif moment == "average":
        before(average.Mean, "wait")
    elif moment == "switch":
        before(sync._loop.worker, "settle_now")
    elif moment == "push":
        before(memory.Memory, "finish")
    elif moment == "pull":
        before(memory.Memory, "pull")
    elif moment == "claim":
        before(memory.Memory, "claim")
        before(client.Client, "claim")
    elif moment == "checkpoint":
        before(sync._loop.worker.team, "gather")
        before(resume, "write")
    elif moment == "giving":
        before(changes, "receive")
    elif moment == "reconciling":
        before(sync._loop.worker, "reconcile")
    elif moment == "telling":
        before(sync._loop.worker, "_take_rest")
    elif moment == "step":
        before(replicas.ReplicaWorker, "step")
    elif moment not in EARLY:
        raise ValueError(moment)


def arm_early(loss: Loss) -> None:
    """For deaths before there is a Synchronizer, or in its making."""
    if not mine(loss):
        return
    if loss.moment == "meeting":
        die()
    owner, name = (changes, "receive") if loss.moment == "receiving" else (real.RealWorker, "_open_home")
    plain = getattr(owner, name)

    def deadly(*args: Any) -> Any:
        return die() if mine(loss) else plain(*args)

    if loss.moment in EARLY:
        setattr(owner, name, deadly)


def mortal(loss: Loss) -> Result:
    """A loop over sync.batches; `seen` are the samples of the units that this process has done. All attempts
    of a rank write them to one file, with the unit's number."""
    if (offbeat.rank() >= offbeat.world_size()) == (loss.delay > 0):
        time.sleep(abs(loss.delay))
    arm_early(loss)
    model, optimizer, sync = loss.start()
    if loss.flags:
        plant(sync, loss.flags, 5)
    arm(loss, sync, model)
    seeds(100 + offbeat.rank())
    log = Path(os.environ["OFFBEAT_OUT"]) / f"seen{offbeat.rank()}.jsonl"
    voids = 0
    with log.open("a") as out:
        for x, y, rows in sync.batches(table(loss.samples, loss.dtype), 4):
            loss_of(model, x, y).backward()
            void = sync._loop.void
            if loss.pace:
                time.sleep(loss.pace)
            sync.step()
            voids += void
            if not void:
                out.write(json.dumps(rows.tolist()) + "\n")
                out.flush()
            if loss.saves and sync.every(loss.saves):
                sync.save(Path(os.environ["OFFBEAT_OUT"]) / "at.pt")
    attempt = offbeat.job.current().attempt
    return result(model, optimizer, sync, notes={"voids": voids, "attempt": attempt, "end": flat(model)})


def scaled(loss: Loss) -> Result:
    """A loop that clips what a GradScaler has unscaled."""
    model, optimizer, sync = loss.start()
    arm(loss, sync, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    voids, scales = 0, []
    for x, y, _ in sync.batches(table(loss.samples, loss.dtype), 4):
        scaler.scale(loss_of(model, x, y)).backward()
        voids += sync._loop.void
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        time.sleep(loss.pace)
        sync.step(scaler)
        scales.append(scaler.get_scale())
    return result(model, optimizer, sync, notes={"voids": voids, "scales": scales})


def stray(loss: Loss) -> Result:
    """Rank `who` computes each of its units twice in a row, and misses every other one."""
    model, optimizer, sync = loss.start()
    plain = sync._loop.next_units
    if offbeat.rank() == loss.who:
        wrong = lambda count: [unit // 4 * 4 for unit in plain(count)]  # noqa: E731
        sync._loop.next_units = wrong  # type: ignore[method-assign]
    for x, y, _ in sync.batches(table(400, loss.dtype), 4):
        loss_of(model, x, y).backward()
        sync.step()
    return result(model, optimizer, sync)
