"""A user's optimizer over other tensors: its hyper-parameters as numbers, a twin that steps as it does,
and what it keeps for a parameter."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_SKIPPED = ("params", "initial_lr", "foreach", "fused", "capturable", "differentiable")


class Settings:
    """The numbers in the optimizers' parameter groups (lr, momentum, betas, weight_decay, ...), as one row
    of floats that travels with every push: each push is applied with its own."""

    def __init__(self, optimizers: Sequence[Optimizer]):
        self._optimizers = list(optimizers)
        # Optimizer, group, key, type, and how many values (None: a plain one).
        self._rows: list[tuple[int, int, str, Callable[[Any], Any], int | None]] = []
        for o, optimizer in enumerate(optimizers):
            for g, group in enumerate(optimizer.param_groups):
                for key in sorted(group):
                    value = group[key]
                    if key in _SKIPPED:
                        continue
                    if isinstance(value, tuple | list) and value and all(map(_number, value)):
                        self._rows.append((o, g, key, type(value), len(value)))
                    elif _number(value):
                        kind = type(value) if isinstance(value, bool | int) else float
                        self._rows.append((o, g, key, kind, None))
        self.count = sum(1 if width is None else width for *_, width in self._rows)

    def read(self) -> tuple[float, ...]:
        """The optimizers' values now."""
        found: list[float] = []
        for o, g, key, _, width in self._rows:
            value = self._optimizers[o].param_groups[g][key]
            found.extend([float(value)] if width is None else map(float, value))
        return tuple(found)

    def adopt(self, row: Sequence[float]) -> None:
        """Sets the optimizers' own values to another worker's, where they differ."""
        at = 0
        for o, g, key, kind, width in self._rows:
            values = row[at : at + (width or 1)]
            at += len(values)
            group = self._optimizers[o].param_groups[g]
            if width is not None:
                if [*map(float, group[key])] != [*values]:
                    group[key] = kind(values)
            elif float(group[key]) != values[0]:
                if isinstance(group[key], Tensor):
                    group[key].fill_(values[0])
                else:
                    group[key] = values[0]

    def write(self, groups: dict[tuple[int, int], dict[str, Any]], row: Sequence[float], lr: float) -> None:
        """Sets the values of `row` in `groups` (by optimizer and group), learning rates times `lr`."""
        at = 0
        for o, g, key, kind, width in self._rows:
            values = row[at : at + (width or 1)]
            at += len(values)
            if (o, g) not in groups:
                continue
            value = kind(values) if width is not None else values[0] * lr if key == "lr" else values[0]
            if kind is bool or (kind is int and value == int(value)):
                value = kind(value)
            groups[o, g][key] = value


def _number(value: Any) -> bool:
    return isinstance(value, bool | int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def twin(optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> Optimizer:
    """An optimizer that steps as `optimizer` does, over other parameters: `groups` are its groups.

    Raises TypeError for one that holds on to its parameters in ways of its own."""
    made: Optimizer = object.__new__(type(optimizer))
    for name, value in list(vars(optimizer).items()):  # another thread may be using it
        if isinstance(value, Optimizer | nn.Parameter):
            what = "another optimizer" if isinstance(value, Optimizer) else "a parameter"
            raise TypeError(
                f"{type(optimizer).__name__} holds {what} in its attribute {name!r}, so it cannot step for "
                f"a shard: use a protocol that keeps replicas (bsp, local, dasgd)"
            )
        # Learning rate schedulers put a wrapper of the user's step here, hooks belong to the user's.
        if name != "step" and not name.endswith("_hooks"):
            made.__dict__[name] = copy.copy(value) if isinstance(value, dict | list | set) else value
        elif name.endswith("_hooks"):
            made.__dict__[name] = OrderedDict()
    made.state = defaultdict(dict)
    made.param_groups = [dict(group) for group in groups]
    for group in made.param_groups:
        if group.get("capturable"):
            group["capturable"] = False  # the shard's tensors are in the CPU's memory
        for key, value in group.items():
            if isinstance(value, Tensor) and key != "params":
                group[key] = float(value)
    return made


@dataclass(frozen=True)
class Slot:
    """One entry of an optimizer's state for one piece. kind: "element" (as many values as the piece),
    "scalar" (a tensor of one value), "number" (a plain one, of `type`), or "tensor" (any other shape)."""

    key: str
    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    type: type = float


def slots(
    optimizer: Optimizer, group: int, shape: tuple[int, ...], dtype: torch.dtype, way: str
) -> tuple[Slot, ...]:
    """What `optimizer` keeps for a parameter of this shape, found by letting a twin take one step.

    Raises TypeError for what a shard cannot hold."""
    name = type(optimizer).__name__
    p = nn.Parameter(torch.zeros(shape, dtype=dtype))
    p.grad = torch.zeros_like(p)
    one = twin(optimizer, [{**optimizer.param_groups[group], "params": [p]}])
    before = _outside(one)
    try:
        one.step()
    except Exception as error:
        raise TypeError(
            f"{name} cannot step for a shard, which calls step() without a closure after a dense gradient "
            f"({type(error).__name__}: {error}); use a protocol that keeps replicas (bsp, local, dasgd)"
        ) from error
    if changed := sorted(key for key, value in _outside(one).items() if before.get(key) != value):
        raise TypeError(
            f"{name} counts in {', '.join(changed)} and not in its state: with shards each process would "
            f"count for itself; use a protocol that keeps replicas (bsp, local, dasgd)"
        )
    found = []
    for key, value in sorted(one.state[p].items()):
        if isinstance(value, Tensor):
            if value.is_sparse:
                raise TypeError(
                    f"{name} keeps a sparse tensor in its state {key!r}, which shards cannot hold"
                )
            kind = "scalar" if value.dim() == 0 else "element" if value.shape == p.shape else "tensor"
            if kind == "tensor" and way == "elements":
                raise TypeError(
                    f"cut='elements': {name} keeps {key!r} in the shape {tuple(value.shape)} for a parameter "
                    f"of shape {shape}, so its update is not element-wise; cut='tensors' is right for it"
                )
            found.append(Slot(key, kind, value.dtype, tuple(value.shape)))
        elif isinstance(value, bool | int | float):
            found.append(Slot(key, "number", torch.float64, (), type(value)))
        elif value is not None:
            raise TypeError(
                f"{name} keeps a {type(value).__name__} in its state {key!r}, which shards cannot hold"
            )
    return tuple(found)


def _outside(optimizer: Optimizer) -> dict[str, Any]:
    """Numbers that an optimizer keeps outside of its state."""
    found = {f"its attribute {k!r}": v for k, v in vars(optimizer).items()}
    found.update({f"its group's {k!r}": v for group in optimizer.param_groups for k, v in group.items()})
    # A flag is no count: torch's fused optimizers have one that says what they have checked already.
    plain = {k: float(v) for k, v in found.items() if _number(v) and not isinstance(v, bool)}
    return {k: v for k, v in plain.items() if v == v}


def strange(optimizer: Optimizer, known: set[str], expected: set[str]) -> TypeError:
    return TypeError(
        f"{type(optimizer).__name__} keeps {sorted(known)} for a parameter, but {sorted(expected)} when the "
        f"job began: shards cannot follow that"
    )
