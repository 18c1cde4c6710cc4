"""What `offbeat profile` measures, inside the user's own script and workers.

Each worker first computes alone, `steps` units: how long are forward, backward, the optimizer's step, and
when is each parameter's gradient there? Then all meet: small messages tell a link's latency, all-reduces of
several sizes its rate. Then the first worker pushes to the shards and pulls from them, while the others rest.
Then it writes it all down as a cluster's description, and the script ends where it is.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offbeat import job
from offbeat.cluster.sizes import IN_FLIGHT
from offbeat.cluster.state import collect
from offbeat.planner import devices, writing
from offbeat.planner.fit import Fit, Point
from offbeat.planner.flops import Inputs, ModelCost
from offbeat.site import now
from offbeat.virtual.model import model_of

if TYPE_CHECKING:
    from offbeat.loop import Loop

WARM = 5
"""Steps that don't count."""
PUSHES = 15
_ECHOES, _SMALL = 30, 64
_SHARES = (0.125, 0.25, 0.5, 1.0, 1.5)
"""Of the model, sizes of all-reduces that are measured; the longest are left out where they take too long."""
_LEAST, _MOST = 1 << 14, 64 << 20
_PATIENCE, _TIMES = 2.5, 9
"""Seconds for the all-reduces of one size, and how many of them are enough."""
_PAUSE = 0.05
"""Seconds between two, as there are in training: a shaped link may send faster after a pause."""


class Profiler:
    """One worker's part. Its methods are called where `sync.step()` and backward begin and end.

    asked: `OFFBEAT_MEASURE` of the environment, "STEPS PATH"."""

    def __init__(self, loop: Loop, asked: str):
        steps, _, path = asked.partition(" ")
        self._loop, self.steps, self._path = loop, int(steps), Path(path)
        self._device = job.device()
        self._inputs: dict[int, Inputs] = {}
        self._begun = self._backward = self._computed = now()
        self._times: list[tuple[float, float, float]] = []  # forward, backward, update
        self._grads: list[list[float]] = []
        self._latest: list[float] = []
        self._pushes: list[tuple[float, float]] = []
        self._links: dict[str, Any] = {}
        state = loop.worker.state
        self._hooks: list[Any] = [
            module.register_forward_pre_hook(self._called, with_kwargs=True) for module in state.modules
        ]
        if self._device.type == "cpu":
            self._latest = [0.0] * len(state.parameters)
            for number, p in enumerate(state.parameters):
                self._hooks.append(p.register_post_accumulate_grad_hook(self._noting(number)))
        self._watch_shards()

    # Computing

    def _called(self, module: nn.Module, args: Any, named: Any) -> None:
        if id(module) not in self._inputs:
            self._inputs[id(module)] = _meta(args), _meta(named)

    def _noting(self, number: int) -> Any:
        def note(p: Tensor) -> None:
            self._latest[number] = now()

        return note

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return now()

    def backward_begun(self) -> None:
        self._backward = self._now()

    def computed(self) -> None:
        self._computed = self._now()

    def stepped(self) -> None:
        """A step is over. Doesn't return from the last one."""
        moment, worker = self._now(), self._loop.worker
        if worker.sharded:
            self._rest_or_end()
        elif worker.clock <= self.steps:
            self._times.append(
                (self._backward - self._begun, self._computed - self._backward, moment - self._computed)
            )
            if self._latest:
                whole = max(self._computed - self._backward, 1e-9)
                self._grads.append([min(max((t - self._backward) / whole, 0), 1) for t in self._latest])
            if worker.clock == self.steps - 1:
                self._meet()
            if worker.clock >= self.steps and not any(p.home == "shards" for p in self._to_come()):
                self._finish()
        self._begun = self._now()

    def _to_come(self) -> list[Any]:
        from offbeat.plan import phases

        return [leaf for leaf, _ in phases(self._loop.plan)]

    # The links

    def _meet(self) -> None:
        epoch = self._loop.worker.epoch
        times = self._times[WARM:]
        units = [forward + backward for forward, backward, _ in times]
        mine = {
            "node": job.current().node,
            "units": units,
            "update": median(update for _, _, update in times),
            "backward": sum(backward for _, backward, _ in times) / sum(units),
        }
        self._links["rows"] = [json.loads(text) for text in collect(epoch, json.dumps(mine))]
        if epoch.size == 1:
            return
        nodes = [row["node"] for row in self._links["rows"]]
        after = (epoch.index + 1) % epoch.size
        echoes = []
        for _ in range(_ECHOES):
            epoch._tell(0.0)
            echoes.append(epoch._echo(1, _SMALL) / 2)
        ways = [median(echoes[_ECHOES // 3 :]), float(nodes[epoch.index] != nodes[after])]
        found = [json.loads(text) for text in collect(epoch, json.dumps(ways))]
        between, inside = ([way for way, far in found if bool(far) == wanted] for wanted in (True, False))
        self._links["between"] = median(between) if between else None
        self._links["inside"] = median(inside) if inside else None
        self._links["points"] = list(self._reductions())

    def _reductions(self) -> Sequence[Point]:
        """Seconds of all-reduces by their bytes, as all members agree on: of each the slowest member's."""
        worker = self._loop.worker
        epoch, model = worker.epoch, model_of(worker.state)
        sizes = sorted({min(max(int(model.size * share), _LEAST), _MOST) // 4 * 4 for share in _SHARES})

        def reduction(size: int) -> float:
            tensor = torch.zeros(size // 4, device=self._device)
            _pause(_PAUSE)
            epoch._tell(0.0)
            begun = self._now()
            epoch.sum(tensor, "averages").wait()
            return max(epoch._tell(self._now() - begun))

        times: dict[int, list[float]] = {}
        for size in sizes:
            expected = times[last := max(times)][0] * size / last if times else 0.0
            if len(times) > 2 and expected > _PATIENCE:
                break
            reduction(size)  # the first of a size doesn't count
            times[size] = [reduction(size)]
        # In turns, as in training, and large ones first: TCP's congestion control (BBR) lets a message go no
        # faster than the largest of the last few have gone.
        while len(row := times[max(times)]) < _TIMES and sum(row) < _PATIENCE:
            for size in reversed(times):
                times[size].append(reduction(size))
        return [Point(size, median(row)) for size, row in times.items()]

    # The shards

    def _watch_shards(self) -> None:
        """Notes how long pushes and pulls take."""
        worker = self._loop.worker
        push, pushed, pulled = worker.push, worker.pushed, worker.pulled
        begun = landed = 0.0

        def pushing(*args: Any, **named: Any) -> Any:
            nonlocal begun
            begun = self._now()
            return push(*args, **named)

        def has_pushed() -> None:
            nonlocal landed
            pushed()
            landed = self._now()

        def has_pulled() -> None:
            pulled()
            self._pushes.append((landed - begun, self._now() - landed))

        worker.push, worker.pushed, worker.pulled = pushing, has_pushed, has_pulled  # type: ignore[method-assign]

    def _rest_or_end(self) -> None:
        worker = self._loop.worker
        if worker.rank != worker.members[0]:
            worker.team.store.get("profiled")
            self._loop.dismiss()
        if len(self._pushes) >= PUSHES:
            self._finish()

    # The end

    def _finish(self) -> None:
        worker = self._loop.worker
        if worker.rank == worker.members[0]:
            try:
                self._write()
            finally:
                if worker.epoch.size > 1:
                    worker.team.store.set("profiled", "")
        self._loop.dismiss()

    def _write(self) -> None:
        for hook in self._hooks:
            hook.remove()
        state, rows = self._loop.worker.state, self._links["rows"]
        stream = self._loop.stream
        passed = [median(column) for column in zip(*self._grads[WARM:], strict=True)]
        cost, note = self._cost()
        if not passed and cost is not None:
            passed = list(cost.passed)
        pushes = self._pushes[3:]
        fit = Fit(
            nodes=[row["node"] for row in rows],
            units=[row["units"] for row in rows],
            update=median(row["update"] for row in rows),
            backward=median(row["backward"] for row in rows),
            inside=self._links.get("inside"),
            between=self._links.get("between"),
            points=self._links.get("points", ()),
            push=median(one for one, _ in pushes) if pushes else None,
            pull=median(one for _, one in pushes) if pushes else None,
        )
        name = self._device_name()
        batch = self._loop.batch_size or (None if cost is None else cost.batch)
        about = writing.About(
            script=sys.argv[0],
            model=model_of(state),
            passed=passed,
            wire=0.5 if self._loop.settings["wire"] == "bf16" else 1.0,
            batch=batch,
            samples=None if stream is None else stream.samples,
            forward=0.0 if cost is None else cost.forward,
            backward=0.0 if cost is None else cost.backward,
            device=name,
            known=devices.recognized(name),
            in_flight=1 if self._device.type == "cuda" else IN_FLIGHT,  # NCCL has one stream
            notes=[note] if note else [],
        )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside = self._path.with_suffix(".new")
        beside.write_text(writing.toml(fit, about))
        beside.rename(self._path)

    def _cost(self) -> tuple[ModelCost | None, str]:
        from offbeat.planner.script import cost_of

        try:
            return cost_of(self._loop, self._inputs), ""
        except ValueError as error:
            return None, str(error)

    def _device_name(self) -> str:
        if self._device.type == "cuda":
            return torch.cuda.get_device_name(self._device)
        return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def _meta(part: Any) -> Any:
    """The same without its values, which the script may write over."""
    from torch.utils._pytree import tree_map

    return tree_map(lambda t: torch.empty_like(t, device="meta") if isinstance(t, Tensor) else t, part)


def _pause(seconds: float) -> None:
    import time

    time.sleep(seconds)
