"""What a user's own model costs: parameters, bytes, and the floating-point operations of a sample, layer by
layer. Counted on the meta device, where nothing is computed and no memory is needed."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments of a module's forward."""


@dataclass(frozen=True)
class Layer:
    """A module that has parameters of its own. parameters: elements of those that are trained. forward,
    backward: operations of a sample."""

    name: str
    parameters: int
    forward: float
    backward: float


@dataclass(frozen=True)
class ModelCost:
    """What a model costs.

    sizes: elements of each trained parameter, in the model's order. width: bytes of an element. forward,
    backward: floating-point operations of a sample; a multiply-add is two. passed: share of backward that is
    over when each parameter's gradient is there; empty where no operation was counted. layers: in the
    model's order. batch: samples that were counted with.
    """

    sizes: tuple[int, ...]
    width: int
    forward: float
    backward: float
    passed: tuple[float, ...]
    layers: tuple[Layer, ...]
    batch: int

    @property
    def parameters(self) -> int:
        return sum(self.sizes)

    @property
    def size(self) -> int:
        """Bytes of the trained parameters."""
        return self.parameters * self.width

    @property
    def flop(self) -> float:
        """Operations of a sample, forward and backward: the paper's FLOP."""
        return self.forward + self.backward


def count(modules: Sequence[nn.Module], inputs: Sequence[Inputs], batch: int | None = None) -> ModelCost:
    """The cost of modules that are trained together, each called once with its `inputs`.

    batch: samples in them (None: the first tensor's first dimension). The modules are not changed. A forward
    that needs values (a branch on a tensor's content) cannot run on the meta device: it is run on copies
    where the modules are.

    Raises ValueError where a forward fails there, too."""
    parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
    forward = backward = 0.0
    shares: dict[int, float] = {}
    rows: list[tuple[str, int, float, float]] = []
    for module, given in zip(modules, inputs, strict=True):
        before, after, copied = _run(module, given)
        forward += before.get("Global", 0.0)
        backward += after.get("Global", 0.0)
        prefix = type(module).__name__
        for name, part in copied.named_modules():
            own = [p for p in part.parameters(recurse=False) if p.requires_grad]
            if not own:
                continue
            path = f"{prefix}.{name}" if name else prefix
            counts = [_own(found, path, part) for found in (before, after)]
            rows.append((name or prefix, sum(p.numel() for p in own), *counts))
            origin = module.get_submodule(name)
            for p in origin.parameters(recurse=False):
                shares.setdefault(id(p), counts[1] if p.requires_grad else 0.0)
    samples = batch or _samples(inputs)
    return ModelCost(
        sizes=tuple(p.numel() for p in parameters),
        width=parameters[0].element_size() if parameters else 4,
        forward=forward / samples,
        backward=backward / samples,
        passed=_passed(modules, shares),
        layers=tuple(Layer(name, n, f / samples, b / samples) for name, n, f, b in rows),
        batch=samples,
    )


def _run(module: nn.Module, given: Inputs) -> tuple[Mapping[str, float], Mapping[str, float], nn.Module]:
    """Operations by the path of the module that they are in, of forward and of backward; and the copy that
    was run."""
    problem: Exception | None = None
    for device in ("meta", None):
        try:
            copied = copy.deepcopy(module)
            if device:
                copied = copied.to(device)
            args, named = tree_map(partial(_placed, device=device), given)
            with FlopCounterMode(display=False) as counter:
                out = copied(*args, **named)
                before = _totals(counter)
                losses = [t.float().sum() for t in tree_leaves(out) if _trains(t)]
                if losses:
                    torch.stack(losses).sum().backward()
            both = _totals(counter)
            return before, {path: n - before.get(path, 0.0) for path, n in both.items()}, copied
        except Exception as error:
            problem = error
    raise ValueError(
        f"the operations of {type(module).__name__} could not be counted: its forward failed with "
        f"{type(problem).__name__}: {problem}"
    ) from problem


def _placed(part: Any, device: str | None) -> Any:
    if not isinstance(part, Tensor):
        return part
    if device is None:
        return part.detach().clone()
    return torch.empty_like(part.detach(), device=device)


def _trains(part: Any) -> bool:
    return isinstance(part, Tensor) and part.requires_grad


def _totals(counter: FlopCounterMode) -> dict[str, float]:
    return {path: float(sum(found.values())) for path, found in counter.flop_counts.items()}


def _own(found: Mapping[str, float], path: str, part: nn.Module) -> float:
    """Operations in a module and not in its children."""
    inside = sum(found.get(f"{path}.{name}", 0.0) for name, _ in part.named_children())
    return max(found.get(path, 0.0) - inside, 0.0)


def _samples(inputs: Sequence[Inputs]) -> int:
    for part in tree_leaves(list(inputs)):
        if isinstance(part, Tensor) and part.dim():
            return max(part.shape[0], 1)
    return 1


def _passed(modules: Sequence[nn.Module], shares: Mapping[int, float]) -> tuple[float, ...]:
    """Backward comes to the layers in their reverse order; all of a layer's gradients are there when its
    operations are done."""
    owners = [
        [p for p in part.parameters(recurse=False) if p.requires_grad]
        for module in modules
        for part in module.modules()
    ]
    total = sum(max(shares.get(id(p), 0.0) for p in own) for own in owners if own)
    if not total:
        return ()
    done, over = 0.0, dict[int, float]()
    for own in reversed(owners):
        if own:
            done += max(shares.get(id(p), 0.0) for p in own)
            over.update({id(p): min(done / total, 1.0) for p in own})
    order = [p for module in modules for p in module.parameters() if p.requires_grad]
    return tuple(over[id(p)] for p in order)
