"""User's scripts of the contract suite: how jobs end, well or by mistake."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from tests.models import build, flat, loss_of, optimize, unit
from tests.reference import usual
from tests.scripts import Result, Setup, dealt, result, table


def loader_of(units: int, rank: int, dtype: torch.dtype = torch.float64, size: int = 4) -> DataLoader[Any]:
    parts = [unit(rank, step, dtype, size) for step in range(units)]
    return DataLoader(TensorDataset(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])), size)


def uneven(setup: Setup, lengths: Sequence[int], epochs: int) -> Result:
    """Every rank has a loader of its own length."""
    model, optimizer = setup.parts(offbeat.rank())
    sync = offbeat.Synchronizer(model, optimizer, setup.plan, epochs=epochs, **setup.options)
    trace = []
    with sync:
        for x, y in sync.batches(loader_of(lengths[offbeat.rank()], offbeat.rank())):
            loss_of(model, x, y).backward()
            sync.step()
            trace.append(flat(model))
    return result(model, optimizer, sync, trace=trace)


def stops_early(setup: Setup, steps: Sequence[int | None], enter: bool = False) -> Result:
    """Every rank's loop breaks after its number of steps, and closes."""
    model, optimizer, sync = setup.start()
    stop = steps[offbeat.rank()]
    taken = 0
    while not sync.done:
        if taken == stop:
            break
        usual(model, offbeat.rank(), taken).backward()
        sync.step()
        taken += 1
    sync.close()
    return result(model, optimizer, sync, notes={"taken": taken})


def until_total(setup: Setup, samples: int, batch_size: int, epochs: float) -> Result:
    model, optimizer = setup.parts(offbeat.rank())
    sync = offbeat.Synchronizer(model, optimizer, setup.plan, epochs=epochs, **setup.options)
    seen = []
    for x, y, rows in sync.batches(table(samples), batch_size):
        loss_of(model, x, y).backward()
        sync.step()
        sync.log(loss=1.0)
        seen.append(rows.tolist())
    return result(model, optimizer, sync, notes={"seen": seen, "total": sync.total})


def dealt_with(setup: Setup, settings: dict[str, Any]) -> Result:
    """`dealt` over 22 samples in units of 4, with more settings for sync.batches."""
    return dealt(setup, 22, 4, 1, **settings)


def forgets_to_close(setup: Setup, steps: Sequence[int | None]) -> int:
    """The script's interpreter ends while the job goes on elsewhere."""
    model, _, sync = setup.start()
    taken = 0
    while not sync.done and taken != steps[offbeat.rank()]:
        usual(model, offbeat.rank(), taken).backward()
        sync.step()
        taken += 1
    globals()["kept"] = sync  # as a script's module would keep it
    return taken


def lets_go(setup: Setup, steps: Sequence[int | None]) -> int:
    """The script loses its Synchronizer while the job goes on elsewhere."""
    taken = forgets_to_close(setup, steps)
    del globals()["kept"]
    gc.collect()
    return taken


def rate_after(setup: Setup, steps: Sequence[int | None]) -> float:
    """The learning rate at the job's end, also of a worker that left early."""
    model, optimizer, sync = setup.start()
    sync.scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
    taken = 0
    while not sync.done and taken != steps[offbeat.rank()]:
        usual(model, offbeat.rank(), taken).backward()
        sync.step()
        taken += 1
    sync.close()
    return float(optimizer.param_groups[0]["lr"])


def uneven_with_consensus(setup: Setup, lengths: Sequence[int]) -> Result:
    model, optimizer = setup.parts(offbeat.rank())
    sync = offbeat.Synchronizer(model, optimizer, setup.plan, epochs=1)
    for x, y in sync.batches(loader_of(lengths[offbeat.rank()], offbeat.rank())):
        loss_of(model, x, y).backward()
        sync.step()
        if sync.every("20%"):
            model.eval()
            with sync.consensus():
                model(x)
            model.train()
    return result(model, optimizer, sync)


def wrongly(setup: Setup, how: str) -> Any:
    """One way of using it wrongly; returns only if nothing was said."""
    rank = offbeat.rank()
    if how == "wrapped":
        model = torch.nn.DataParallel(build("linear"))
        return offbeat.Synchronizer(model, optimize("sgd", model.parameters(), 0.1, 0, 0), total=4)
    if how == "models":
        model = build("linear" if rank else "mlp")
        return offbeat.Synchronizer(model, optimize("sgd", model.parameters(), 0.1, 0, 0), total=4)
    if how == "optimizers":
        model = build("linear")
        return offbeat.Synchronizer(
            model, optimize("adam" if rank else "sgd", model.parameters(), 0.1, 0, 0), total=4
        )
    if how == "foreign":
        model = build("linear")
        return offbeat.Synchronizer(model, optimize("sgd", build("mlp").parameters(), 0.1, 0, 0), total=4)
    if how == "lbfgs":
        model = build("linear")
        return offbeat.Synchronizer(model, torch.optim.LBFGS(model.parameters()), total=4)
    model, optimizer, sync = setup.start()
    if how == "plateau":
        return sync.scheduler(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    if how == "every":
        return sync.every("abc")
    if how == "no backward":
        return sync.step()
    if how == "only accumulate":
        with sync.accumulate():
            usual(model, rank, 0).backward()
        return sync.step()
    if how == "skipped step":
        for x, y, _ in sync.batches(table(22), 4):
            loss_of(model, x, y).backward()
        return None
    if how == "lonely consensus":
        while not sync.done:
            usual(model, rank, sync._loop.worker.clock).backward()
            sync.step()
            if rank == 0 and sync._loop.worker.clock == 2:
                with sync.consensus():
                    pass
        return None
    if how == "step inside consensus":
        usual(model, rank, 0).backward()
        with sync.consensus():
            sync.step()
        return None
    if how == "after the end":
        while not sync.done:
            usual(model, rank, sync._loop.worker.clock).backward()
            sync.step()
        usual(model, rank, 0).backward()
        return sync.step()
    if how == "sparse":
        model = nn.Embedding(4, 3, sparse=True)
        sync = offbeat.Synchronizer(model, torch.optim.SGD(model.parameters(), 0.1), "bsp", 4)
        model(torch.tensor([rank])).sum().backward()
        return sync.step()
    raise KeyError(how)
