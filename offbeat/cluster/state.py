"""All that makes two workers equal: parameters, buffers and the optimizers' state."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.cluster.epoch import Epoch
from offbeat.cluster.flat import Layout, copy

_KINDS = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class State:
    """A user's modules and optimizers, as lists of tensors in an order that all workers share.

    `parameters` are the trainable ones, `names` theirs. Frozen parameters are copied when a worker
    receives its state, and never averaged.
    """

    def __init__(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]):
        self.modules, self.optimizers = list(modules), list(optimizers)
        self.parameters: list[nn.Parameter] = []
        self.names: list[str] = []
        self.frozen: list[nn.Parameter] = []
        self._buffers: list[tuple[nn.Module, str]] = []
        seen: set[int] = set()
        for number, module in enumerate(modules):
            prefix = f"{number}." if len(modules) > 1 else ""
            for name, p in module.named_parameters():
                if id(p) in seen:
                    continue
                seen.add(id(p))
                if p.requires_grad:
                    self.parameters.append(p)
                    self.names.append(prefix + name)
                else:
                    self.frozen.append(p)
            for owner in module.modules():
                if id(owner) not in seen:
                    seen.add(id(owner))
                    self._buffers += [(owner, name) for name, b in owner._buffers.items() if b is not None]

    def buffers(self, floating: bool) -> list[Tensor]:
        """The modules' buffers of a kind, as they are now (a module may have replaced its tensor)."""
        found = [owner._buffers[name] for owner, name in self._buffers]
        once = {id(b): b for b in found if b is not None}  # two modules may share a buffer
        return [b for b in once.values() if _floating(b) == floating]

    def averaged(self) -> list[Tensor]:
        """What an average is taken of: trainable parameters and floating-point buffers."""
        return [*self.parameters, *self.buffers(floating=True)]

    def everything(self) -> list[Tensor]:
        return [*self.averaged(), *self.frozen, *self.buffers(floating=False), *self._slots(None)]

    def model_text(self) -> str:
        """What must be the same on every worker, a line each."""
        rows = [
            f"{name} {tuple(p.shape)} {p.dtype} strides {p.stride()}"
            for name, p in zip(self.names, self.parameters, strict=True)
        ]
        rows += [f"a frozen parameter {tuple(p.shape)} {p.dtype}" for p in self.frozen]
        rows += [f"buffer {tuple(b.shape)} {b.dtype}" for f in (True, False) for b in self.buffers(f)]
        for number, optimizer in enumerate(self.optimizers):
            sizes = [len(group["params"]) for group in optimizer.param_groups]
            rows.append(f"optimizer {number}: {type(optimizer).__name__}, groups of {sizes} parameters")
        return "\n".join(rows)

    def _owners(self) -> list[tuple[Optimizer, nn.Parameter]]:
        return [(o, p) for o in self.optimizers for group in o.param_groups for p in group["params"]]

    def _slots(self, floating: bool | None) -> list[Tensor]:
        return [
            value
            for optimizer, p in self._owners()
            if p in optimizer.state
            for _, value in sorted(optimizer.state[p].items())
            if isinstance(value, Tensor) and floating in (None, _floating(value))
        ]

    def describe(self, counts: bool = False) -> list[dict[str, Any]]:
        """The optimizers' state without the tensors' contents: for each parameter in order,
        {key: [dtype, shape, device type] or a plain number}; with `counts`, a step count's tensor has its
        value as a fourth item."""
        rows = []
        for optimizer, p in self._owners():
            row: dict[str, Any] = {}
            for key, value in sorted(optimizer.state[p].items() if p in optimizer.state else ()):
                if isinstance(value, Tensor):
                    row[key] = [str(value.dtype), list(value.shape), value.device.type]
                    if counts and key == "step":
                        row[key].append(float(value))
                elif isinstance(value, bool | int | float | str) or value is None:
                    row[key] = value
                else:
                    raise TypeError(
                        f"{type(optimizer).__name__} keeps a {type(value).__name__} in its state {key!r}, "
                        f"which cannot be carried to another worker"
                    )
            rows.append(row)
        return rows

    def conform(self, description: list[dict[str, Any]]) -> None:
        """Makes the optimizers' state have this description; tensors that were missing are zero, which is
        what SGD, Adam and most others start from, but for step counts: they are what the description says."""
        for (optimizer, p), row in zip(self._owners(), description, strict=True):
            state = optimizer.state[p] if row or p in optimizer.state else {}
            for key in [key for key in state if key not in row]:
                del state[key]
            for key, value in row.items():
                if not isinstance(value, list):
                    state[key] = value
                    continue
                kind, shape, place = _KINDS[value[0]], torch.Size(value[1]), value[2]
                count = value[3] if len(value) > 3 else 0.0
                old = state.get(key)
                if not (isinstance(old, Tensor) and old.shape == shape and old.dtype == kind):
                    where = p.device if place == p.device.type else torch.device(place)
                    state[key] = torch.full(shape, count, dtype=kind, device=where)

    def mark(self) -> int:
        """A check value of the description, equal on members whose state can be averaged as it is."""
        return check(json.dumps(self.describe()))

    def average(self, epoch: Epoch, own: bool) -> None:
        """Every member gets the mean: of floating-point buffers, and where the members' parameters
        differ (`own`) of parameters and the optimizers' floating-point state. What is not floating-point
        (counters) comes from the first member."""
        tensors = self.buffers(floating=True)
        if own:
            tensors = [*self.parameters, *tensors, *self._slots(floating=True)]
        layout = Layout(tensors)
        buffers = layout.empty()
        copy(layout.views(buffers), tensors)
        works = [epoch.sum(buffer, "averages") for buffer in buffers]
        others = self.buffers(floating=False)
        if own:
            others += self._slots(floating=False)
        send(epoch, others, epoch.members[0])  # meanwhile
        for work in works:
            work.wait()
        for buffer in buffers:
            buffer.div_(epoch.size)
        copy(tensors, layout.views(buffers))


def _floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def send(epoch: Epoch, tensors: Sequence[Tensor], source: int) -> None:
    """Copies the source's tensors to all members, to the bit; shapes are the same on all."""
    layout = Layout(tensors)
    buffers = layout.empty()
    if epoch.rank == source:
        copy(layout.views(buffers), tensors)
    for work in [epoch.broadcast(buffer.view(torch.uint8), source) for buffer in buffers if buffer.numel()]:
        work.wait()
    if epoch.rank != source:
        copy(tensors, layout.views(buffers))


def share(epoch: Epoch, text: str, source: int) -> str:
    """The source's text, on every member."""
    body = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
    length = torch.tensor([body.numel()])
    epoch.broadcast(length, source, "control").wait()
    if epoch.rank != source:
        body = torch.empty(int(length), dtype=torch.uint8)
    epoch.broadcast(body, source, "control").wait()
    return body.numpy().tobytes().decode()


def collect(epoch: Epoch, text: str) -> list[str]:
    """Every member's text, on every member, in their order."""
    body = text.encode()
    lengths, work = epoch.gather(torch.tensor([len(body)]))
    work.wait()
    most = max(int(lengths.max()), 1)
    row = torch.frombuffer(bytearray(body.ljust(most, b"\0")), dtype=torch.uint8)
    rows, work = epoch.gather(row)
    work.wait()
    return [one.numpy().tobytes()[: int(length)].decode() for one, length in zip(rows, lengths, strict=True)]


def receive(epoch: Epoch, state: State, source: int) -> None:
    """A newcomer's first act: every member gets the source's parameters, buffers and optimizer state."""
    state.conform(json.loads(share(epoch, json.dumps(state.describe()), source)))
    send(epoch, state.everything(), source)


def check(text: str) -> int:
    """A 62-bit check value of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2


def union(texts: Sequence[str]) -> list[dict[str, Any]]:
    """One description that holds every member's: where one has no state yet, another's is taken."""
    merged: list[dict[str, Any]] = [{} for _ in json.loads(texts[0])]
    for text in texts:
        for row, other in zip(merged, json.loads(text), strict=True):
            for key, value in other.items():
                row.setdefault(key, value)
    return merged
