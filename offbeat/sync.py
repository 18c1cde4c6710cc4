"""`Synchronizer` joins a user's model, optimizer and loop to a worker that follows a plan."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from offbeat import checkpoint, job
from offbeat.checks import (
    check_auto,
    check_parts,
    length_of,
    modules_of,
    on_diverge_of,
    plan_of,
    share_of,
    stragglers_of,
    wire_of,
)
from offbeat.cluster.state import State
from offbeat.cut import way_of
from offbeat.hyper import Configuration, stepper
from offbeat.loop import Loop
from offbeat.plan import check as plan_check
from offbeat.policies.switches import Stragglers
from offbeat.protocols import Protocol
from offbeat.stream import dealt, loaded


class Synchronizer:
    """Keeps the workers' copies of a model in step, as a plan says.

    model: a module, or several; not wrapped, moved or changed. Rank 0's parameters, buffers and
        optimizer state are copied to the others here.
    optimizer: one over the model's parameters, or several that step together.
    plan: text such as `"bsp:6.25% dasgd(period=4,delay=2)"`, or a protocol; `--plan` overrides it.
    total: the job's length in units, mini-batches of all workers together; `--total` overrides it.
        Or `epochs`, passes over what `batches` is given.
    lr_reference, warmup, momentum: the configuration policy at switches (`offbeat.hyper.Configuration`).
    wire: "bf16" sends gradients and changes of parameters in half the bytes.
    cut: how asp and ssp cut the parameters into shards: "elements" or "tensors" (`offbeat.cut`); by
        default elements for the optimizers of torch.optim that are element-wise, tensors for all others.
    stragglers: what is done about slow workers: "off" (default), "observe", "greedy" or "elastic", with
        settings in brackets (`offbeat.policies`). `--stragglers` overrides it.
    on_diverge: "raise" `Diverged` (default), "rollback" to the last `save` and go on with bsp (under asp and
        ssp), or "ignore", which warns. `--on-diverge` overrides it.

    Use it as a context manager, or call `close`, where the loop may stop before the total is done.
    Models that train together (a GAN's two) belong into one Synchronizer, with all their optimizers: of
    two at once, a worker that ends early would leave one while the others wait for it in the other.

    Raises ValueError or TypeError for settings that cannot work, on every worker.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
        plan: str | Protocol = "bsp",
        total: int | None = None,
        *,
        epochs: float | None = None,
        lr_reference: str = "global",
        warmup: float = 0.0,
        momentum: str = "keep",
        wire: str | None = None,
        cut: str | None = None,
        stragglers: str | Stragglers = "off",
        on_diverge: str = "raise",
    ):
        modules = modules_of(model)
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        state = State(modules, optimizers)
        check_parts(state)
        config = Configuration(lr_reference, warmup, momentum)
        policy = stragglers_of(stragglers)
        first = policy.apply(plan_of(os.environ.get("OFFBEAT_PLAN") or plan))
        total, epochs = length_of(total, epochs)
        if total is not None:
            plan_check(first, total)
        wire = wire_of(wire)
        on_diverge = on_diverge_of(on_diverge)
        way_of(optimizers, cut)
        check_auto(first, optimizers)
        self._loop = Loop(
            state,
            first,
            total,
            epochs,
            config=config,
            wire=wire,
            cut=cut,
            policy=policy,
            on_diverge=on_diverge,
        )

    # Facts

    @property
    def progress(self) -> float:
        """Share of the job that is done, by all workers together."""
        return self._loop.progress

    @property
    def units(self) -> int:
        """Mini-batches done, by all workers together."""
        return self._loop.units

    @property
    def total(self) -> int | None:
        """The job's length in units; None while only `epochs` is known."""
        return self._loop.total

    @property
    def protocol(self) -> Protocol:
        """The protocol in charge."""
        return self._loop.protocol

    @property
    def members(self) -> Sequence[int]:
        """Ranks that take part now."""
        return self._loop.worker.members

    @property
    def done(self) -> bool:
        """Whether the job is over: all workers hold the same model."""
        return self._loop.done

    @property
    def stepping(self) -> bool:
        """Whether the coming `step()` is one: False for all but the last of a unit's micro-batches.
        Clip gradients under `if sync.stepping:`."""
        return not self._loop.worker.reducer.hold

    @property
    def plan(self) -> Protocol:
        """The plan that is followed; a person (`offbeat ctl`) or a rollback may have changed it."""
        return self._loop.plan

    # The loop

    def batches(
        self,
        data: Any,
        batch_size: int | None = None,
        *,
        micro_batches: int = 1,
        shuffle: bool = True,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> Iterator[Any]:
        """This worker's batches, on its device, until the job is done.

        data: a map-style data set or tensors of equal length: shuffled per epoch and dealt in units of
            `batch_size` samples, a different one to each worker. Or a DataLoader of your own, whose
            sampler divides the data among the ranks as under DDP: it is gone through again and again;
            a worker whose loader ends (with `epochs`) leaves, and the others go on without it.
        micro_batches: each unit comes in this many pieces (of a loader: batches) to accumulate
            gradients over; `step()` steps after the last. Divide your loss by it.
        num_workers: processes that fetch ahead, as in DataLoader. Tensors are fetched ahead by a thread.

        Raises ValueError or TypeError for data that cannot be dealt.
        """
        if not isinstance(micro_batches, int) or micro_batches < 1:
            raise ValueError(f"micro_batches is a whole number from 1; got {micro_batches!r}")
        if isinstance(data, DataLoader) or not hasattr(data, "__getitem__"):
            if batch_size is not None:
                raise ValueError("a DataLoader has its own batch size: leave out batch_size")
            stream = loaded(self._loop, data, micro_batches, self._loop.epochs)
        else:
            options = (batch_size, micro_batches, shuffle, num_workers, collate_fn)
            stream = dealt(self._loop, data, *options)
        return self._loop.feed(stream, micro_batches)

    def step(self, scaler: Any = None) -> None:
        """Takes this worker's next step, as the plan says; gradients are cleared. Call it after backward
        (and after clipping) instead of `optimizer.step()`; with a GradScaler, `sync.step(scaler)` instead
        of `scaler.step(optimizer)` and `scaler.update()`.

        The step that completes the job returns when all workers hold the same model.

        Raises RuntimeError without a gradient, inside `consensus`, or when the job is over.
        """
        self._loop.step(scaler)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backwards inside add to this worker's gradients without joining the others (DDP's `no_sync`).
        The last backward before `step()` must be outside."""
        reducer = self._loop.worker.reducer
        held, reducer.hold = reducer.hold, True
        try:
            yield
        finally:
            reducer.hold = held

    def every(self, text: str) -> bool:
        """True once in each `text` of the job, such as "5%" or "500u" (units), and at its end; the same
        on every worker, so it may stand before what joins them. Ask it once per step. Under asp and ssp
        each worker is told when it comes there; one that was elsewhere when a phase ended isn't told of
        what the others were told before.

        Raises ValueError for another text."""
        share = share_of(text, self.total)
        return self._loop.marks.passed(text, share, self.progress, self.total, self.done)

    def consensus(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the model holds the members' mean (parameters and floating-point buffers); afterwards
        what it held before, to the bit. All members must enter it together: `sync.every` tells all the
        same. Under asp and ssp it holds the shards' newest parameters, nobody waits for anybody, and under
        asp this worker goes on with the parameters that are newest when it leaves."""
        return self._loop.consensus()

    def scheduler(self, schedule: Any, steps: float | None = None) -> Any:
        """Lets a learning rate schedule follow the job's progress, the same under every plan. Don't step
        it yourself. Returns `schedule`.

        schedule: a function from progress (0.0 to 1.0) to a factor of the optimizers' first learning
            rates; or a `torch.optim.lr_scheduler` object, which is stepped `steps` times in the whole job.
        steps: as many as the scheduler was made for; by default the steps of each worker under BSP,
            total / workers, which are those of a DDP script.

        Call it before `restore`. Raises TypeError for ReduceLROnPlateau, whose metric is yours to give.
        """
        if isinstance(schedule, torch.optim.lr_scheduler.LRScheduler) or not callable(schedule):
            if self.total is None and steps is None:
                raise ValueError(
                    "with epochs= the length is known after sync.batches(...): give steps=, or call "
                    "scheduler after it"
                )
            rows = stepper(schedule, steps, self.total or 1, job.world_size())
            self._loop.worker.schedules.add_stepper(schedule, rows)
        else:
            self._loop.worker.schedules.add_shape(schedule, self._loop.worker.state.optimizers)
        if self.total is not None:
            self._loop.worker.schedules.move(self.units, self.total)
        return schedule

    def log(self, **values: float) -> None:
        """Notes an evaluation, such as `accuracy=0.93`, in the journal (rank 0's is kept)."""
        plain = {key: float(value) for key, value in values.items()}
        progress = round(self.progress, 6) if self.total else 0.0
        self._loop.journal.record("evaluation", units=self.units, progress=progress, values=plain)

    # Checkpoints and the end

    def save(self, path: str | Path, also: Mapping[str, checkpoint.Stateful] | None = None) -> None:
        """Writes a checkpoint of the whole job to `path`, by rank 0; all members must call it.

        It is a switch to itself: what is in flight lands first and the members settle, so a local
        protocol's trajectory is not the one without the checkpoint; a run resumed from it equals the
        run that saved it, to the bit, if its batches come from `sync.batches`. After the job's end rank
        0 alone may call it. `also` names more objects with a `state_dict` (a GradScaler, an
        average of the model); rank 0's are saved.

        Raises OSError on every worker when it cannot be written, CheckpointError when something in it
        could not be read back.
        """
        self._loop.save(Path(path), also or {})

    def restore(self, path: str | Path, also: Mapping[str, checkpoint.Stateful] | None = None) -> None:
        """Goes on from a checkpoint; only rank 0 reads the file. All members must call it, before their
        first step. The number of workers may be another one; what changes with it is said. A worker that
        comes to a job which is under way has the others' state, and this does nothing there.

        Raises CheckpointError on every worker, with nothing changed, for a file that doesn't fit.
        """
        self._loop.restore(Path(path), also or {})

    def close(self) -> None:
        """Ends this worker's part; all workers come here sooner or later. One that stops before the job
        is done leaves: the others don't wait for it, and it returns when they have finished, with the
        final model. Further calls do nothing."""
        self._loop.close()

    def __enter__(self) -> Synchronizer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            self._loop.fail(error)
        self.close()
