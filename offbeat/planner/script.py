"""What a user's script would train, and what that costs: the script runs, in this process, up to its model's
first forward, and no further."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from offbeat.planner.flops import Inputs, ModelCost, count
from offbeat.planner.remembered import Job, remember
from offbeat.virtual.model import Model, model_of
from offbeat.virtual.probe import Found, ProbeSite
from offbeat.virtual.script import Script

if TYPE_CHECKING:
    from offbeat.loop import Loop


class ScriptFailed(ValueError):
    """The script's beginning failed; the message says where."""


class _Looking(ProbeSite):
    """Goes on to the first forward of the model."""

    def __init__(self, workers: int):
        super().__init__(workers)
        self.inputs: dict[int, Inputs] = {}
        self._hooks: list[RemovableHandle] = []

    def begins(self, loop: Loop, data: bool) -> None:
        if self.loop is None:
            self.loop = loop
            for module in loop.worker.state.modules:
                self._hooks.append(module.register_forward_pre_hook(self._called, with_kwargs=True))

    def finish(self) -> None:
        """The modules are as they were."""
        for hook in self._hooks:
            hook.remove()

    def _called(self, module: nn.Module, args: Any, named: Any) -> None:
        self.inputs.setdefault(id(module), (args, named))
        assert self.loop is not None
        if len(self.inputs) == len(self.loop.worker.state.modules):
            raise Found

    def computed(self) -> None:
        raise Found


def look_at(path: str, args: Sequence[str], workers: int) -> Job:
    """What the script would train on `workers` workers, which is remembered. Raises ScriptFailed,
    SyntaxError or OSError."""
    before = set(sys.modules)
    with redirect_stdout(sys.stderr):  # what it says is no part of the answer
        script = Script(path, args, workers, None, False)
    site = _Looking(workers)
    if (error := site.run(script)) is not None:
        where, last = script.line_of(error), traceback.format_exception_only(type(error), error)[-1].strip()
        raise ScriptFailed(f"the beginning of {path} failed{f' at {where}' if where else ''}: {last}")
    site.finish()
    loop = site.loop
    if loop is None:
        raise ScriptFailed(
            f"{path} came to no Synchronizer with a length: what is to be planned is not known"
        )
    job = _job(loop, site.inputs)
    remember(path, args, workers, job, [file for name, file in site.loaded if name not in before])
    return job


def _job(loop: Loop, inputs: dict[int, Inputs]) -> Job:
    model, cost, problem = model_of(loop.worker.state), None, ""
    try:
        cost = cost_of(loop, inputs)
    except ValueError as error:
        problem = str(error)
    if cost is not None and cost.sizes == model.sizes:
        model = Model(model.sizes, model.width, model.buffers, model.state, cost.passed)
    stream = loop.stream
    return Job(
        model,
        0.0 if cost is None else cost.flop,
        problem,
        str(loop.plan),
        str(loop.settings["wire"]),
        loop.batch_size or (None if cost is None else cost.batch),
        None if stream is None else stream.samples,
        loop.total,
    )


def cost_of(loop: Loop, inputs: dict[int, Inputs]) -> ModelCost:
    """Raises ValueError where a model's operations cannot be counted."""
    modules = loop.worker.state.modules
    if len(inputs) < len(modules):
        raise ValueError("the model was not called as a whole: its operations are not known")
    with torch.enable_grad():
        return count(modules, [inputs[id(module)] for module in modules], loop.batch_size)
