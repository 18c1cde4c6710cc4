"""Saving and restoring a whole job: who writes, who reads, and how all workers come to agree on it."""

from __future__ import annotations

import base64
import io
import json
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import offbeat
from offbeat import job
from offbeat.checkpoint import (
    CheckpointError,
    Stateful,
    check_fits,
    random_state,
    read,
    set_random_state,
    write,
)
from offbeat.cluster.control import Event
from offbeat.cluster.state import receive, share
from offbeat.site import now

if TYPE_CHECKING:
    from offbeat.loop import Loop


def save(loop: Loop, path: Path, also: Mapping[str, Stateful]) -> None:
    """Writes the settled job to `path`; every member calls it, or after the job's end anyone. Raises
    OSError or CheckpointError on all that call it."""
    begun = now()
    worker = loop.worker
    if loop.done and worker.rank != worker.members[0]:
        return

    def gather(text: str, event: Event = Event.SAVED) -> list[str]:
        # After the end all hold the same, and rank 0 alone may save, as under DDP.
        return [text] if loop.done else worker.team.gather(event, text)

    rows = [
        json.loads(text) for text in gather(row(loop), Event.SAVE) if text
    ]  # one that leaves says nothing
    unreadable, failure = "", ""
    if worker.rank == next(one["rank"] for one in rows if not one["waits"]):
        rest = {
            "offbeat": offbeat.__version__,
            "torch": str(torch.__version__),
            "kinds": [type(optimizer).__name__ for optimizer in worker.state.optimizers],
            "schedules": worker.schedules.state_dict(),
            "also": {name: one.state_dict() for name, one in also.items()},
            "position": worker.position(),
            "plan": str(loop.plan),
            "total": loop.total,
            "batch_size": loop.batch_size,
            "seed": loop.data_seed,
            "workers": job.world_size(),
            "ranks": rows,
        }
        try:
            _unpack(_pack(rest))
        except (RuntimeError, pickle.PickleError) as error:
            reason = str(error).rpartition("WeightsUnpickler error:")[2].strip().splitlines()[0]
            unreadable = (
                f"a state_dict holds what could not be read back (tensors and plain values can): {reason}"
            )
        else:
            modules = [module.state_dict() for module in worker.state.modules]
            optimizers = [optimizer.state_dict() for optimizer in worker.state.optimizers]
            try:
                write(path, {**rest, "modules": modules, "optimizers": optimizers})
            except (OSError, RuntimeError) as error:  # torch's writer makes a RuntimeError of a full disk
                failure = f"the checkpoint {path} could not be written: {error}"
    _raise_first(gather(unreadable), CheckpointError)
    _raise_first(gather(failure), OSError)
    loop.journal.record(
        "checkpoint",
        action="saved",
        path=str(path),
        units=loop.units,
        ms=round((now() - begun) * 1e3, 3),
    )
    worker.account()


def row(loop: Loop, waits: bool = False) -> str:
    """What one worker adds to a checkpoint. `waits`: it is through with an asynchronous phase and takes part
    in what the others do, so it is not the one to write."""
    state = {"rank": loop.worker.rank, "random": random_state(), "data": loop.data_position()}
    return json.dumps({**state, "waits": waits})


def restore(loop: Loop, path: Path, also: Mapping[str, Stateful]) -> None:
    """Takes the job's state from `path`, which only the first member reads; every member calls it.
    Raises CheckpointError on all of them, before anything has been changed."""
    begun = now()
    worker, state = loop.worker, loop.worker.state
    first = worker.members[0]
    failure, text, content = "", "", {}
    if worker.rank == first:
        try:
            content = read(path)
            check_fits(path, content, state.modules, state.optimizers)
            _check_rest(path, content, loop, also)
            text = _pack(
                {key: value for key, value in content.items() if key not in ("modules", "optimizers")}
            )
        except CheckpointError as error:
            failure = str(error)
    _raise_first(worker.team.gather(Event.RESTORE, failure), CheckpointError)
    if worker.rank == first:
        for module, saved in zip(state.modules, content["modules"], strict=True):
            module.load_state_dict(saved)
        for optimizer, saved in zip(state.optimizers, content["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
    groups = [[_settings(group) for group in o.param_groups] for o in state.optimizers]
    rest = _unpack(share(worker.epoch, text, first))
    groups = _unpack(share(worker.epoch, _pack({"groups": groups}), first))["groups"]
    for optimizer, settings in zip(state.optimizers, groups, strict=True):
        for group, values in zip(optimizer.param_groups, settings, strict=True):
            group.update(values)
    worker.drop()
    receive(worker.epoch, state, first)
    worker.set_position(rest["position"])
    worker.schedules.load_state_dict(rest["schedules"])
    for name, one in also.items():
        one.load_state_dict(rest["also"][name])
    loop.data_seed = rest["seed"]
    rows = {row["rank"]: row for row in rest["ranks"]}
    if worker.rank in rows:
        set_random_state(rows[worker.rank]["random"])
        loop.resumed_data = rows[worker.rank]["data"]
    _say_what_changed(loop, path, rest)
    loop.journal.record(
        "checkpoint",
        action="restored",
        path=str(path),
        units=worker.units,
        ms=round((now() - begun) * 1e3, 3),
    )
    worker.account()


def _check_rest(path: Path, content: Mapping[str, Any], loop: Loop, also: Mapping[str, Stateful]) -> None:
    if content["also"].keys() != also.keys():
        raise CheckpointError(
            f"{path} was saved with also={sorted(content['also'])}; restore was given also={sorted(also)}"
        )
    here, there = len(loop.worker.schedules.state_dict()), len(content["schedules"])
    if here != there:
        raise CheckpointError(
            f"{path} was saved with {there} lr_scheduler objects; this job has {here}: call "
            f"sync.scheduler(...) before sync.restore(...)"
        )


def _say_what_changed(loop: Loop, path: Path, rest: Mapping[str, Any]) -> None:
    """A job may be resumed with other settings; what differs is said, not guessed at."""
    changes = [
        f"{name} was {rest[key]} and is {now}"
        for name, key, now in (
            ("the number of workers", "workers", job.world_size()),
            ("the plan", "plan", str(loop.plan)),
            ("total", "total", loop.total),
            ("the seed", "seed", job.current().seed),
        )
        if now is not None and rest[key] is not None and rest[key] != now
    ]
    if rest["workers"] < job.world_size():
        changes.append(f"ranks from {rest['workers']} on start with fresh random generators")
    if changes:
        message = f"resumed from {path}: {'; '.join(changes)}"
        loop.journal.record("warning", message=message)
        if job.rank() == 0:
            print(f"offbeat: {message}", file=sys.stderr, flush=True)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _raise_first(texts: list[str], kind: type[Exception]) -> None:
    for text in texts:
        if text:
            raise kind(text)


def _pack(content: Mapping[str, Any]) -> str:
    out = io.BytesIO()
    torch.save(dict(content), out)
    return base64.b64encode(out.getvalue()).decode()


def _unpack(text: str) -> dict[str, Any]:
    content = io.BytesIO(base64.b64decode(text))
    return dict(torch.load(content, map_location="cpu", weights_only=True))
