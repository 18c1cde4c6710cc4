"""Between a worker's replica and the shards: what is written where, on this host and on others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.cluster.client import Client
from offbeat.cluster.flat import copy
from offbeat.cluster.memory import tensor_of
from offbeat.cluster.state import State
from offbeat.cut import Piece, part, shaped
from offbeat.outline import Gradient, Outline
from offbeat.shard import Push, Shard
from offbeat.twin import Slot


class Bridge:
    """Joins a replica's tensors to the pieces of one shard."""

    def __init__(self, outline: Outline, parameters: Sequence[nn.Parameter]):
        self.outline = outline
        self._mine = [parameters[piece.parameter] for piece in outline.pieces]
        self._places: list[int] = []
        self._own: list[Tensor] = []

    def shaped(self, views: Sequence[Tensor]) -> list[Tensor]:
        """The pieces' places in a shard's memory, each in the shape of what `own` has for it."""
        rows = zip(self.outline.pieces, views, self._mine, strict=True)
        return [shaped(piece, view, p) for piece, view, p in rows]

    def write_gradient(self, places: Sequence[Tensor]) -> None:
        """Writes every `.grad` there is into its place (as `shaped`); where there is none, the push says so.

        Raises TypeError for a sparse one."""
        targets, sources = [], []
        for piece, p, place in zip(self.outline.pieces, self._mine, places, strict=True):
            if p.grad is None:
                continue
            if p.grad.is_sparse:
                raise TypeError("asp and ssp push dense gradients: use Embedding(sparse=False)")
            targets.append(place)
            sources.append(part(piece, p.grad, p))
        copy(targets, sources)

    def own(self) -> list[Tensor]:
        """The parameters themselves, for writing: each whole, or its stretch laid flat."""
        places = [p.data_ptr() for p in self._mine]
        if places != self._places:  # the user may have moved them
            pairs = zip(self.outline.pieces, self._mine, strict=True)
            self._places, self._own = places, [part(piece, p.detach(), p) for piece, p in pairs]
        return self._own

    def forget(self, optimizers: Sequence[Optimizer]) -> None:
        """The optimizer's state of these pieces begins anew, where it is one number per element."""
        for piece, p in zip(self.outline.pieces, self._mine, strict=True):
            for value in optimizers[piece.optimizer].state.get(p, {}).values():
                if isinstance(value, Tensor) and value.shape == p.shape and p.dim():
                    part(piece, value, p).zero_()


class Local:
    """A shard of this host: where this worker's gradient goes, and whence its parameters come. narrow: the
    gradient is rounded as if it had travelled."""

    def __init__(self, bridge: Bridge, gradient: Gradient, narrow: bool = False):
        self._bridge, self._gradient, self._narrow = bridge, gradient, narrow
        self._places = bridge.shaped(gradient.pieces)
        self._shaped: dict[int, list[Tensor]] = {}  # of each half

    def write(self) -> None:
        self._bridge.write_gradient(self._places)
        if self._narrow:
            self._gradient.widen(self._gradient.narrow())

    def take(self, shard: Shard) -> None:
        key = id(shard)
        if key not in self._shaped:
            self._shaped[key] = self._bridge.shaped(shard.parameters)
        copy(self._bridge.own(), self._shaped[key])


class Remote:
    """Another host's shards."""

    def __init__(self, client: Client, bridges: Sequence[Bridge], shards: range):
        self.client, self.bridges, self.shards = client, list(bridges), shards
        self._gradients = [
            Gradient(bridge.outline, torch.zeros(bridge.outline.gradient_size, dtype=torch.uint8))
            for bridge in bridges
        ]
        self._shaped = [b.shaped(g.pieces) for b, g in zip(self.bridges, self._gradients, strict=True)]
        self.sent: list[tuple[Push, Tensor]] = []  # by shard; until the next pull they must not change
        self._asked = False

    def push(
        self, push: Push, seen: Sequence[int], narrow: bool, skip: bool, take: Callable[..., None]
    ) -> None:
        """Where nothing is bounded the parameters are asked for at once, shard by shard: one comes while
        the next one's gradient is still going."""
        self.sent, self._asked = [], push.after == -inf
        for shard, (bridge, gradient) in enumerate(zip(self.bridges, self._gradients, strict=True)):
            if not skip:
                bridge.write_gradient(self._shaped[shard])
            data = gradient.narrow() if narrow else gradient.region
            one = replace(push, seen=seen[self.shards[shard]])
            self.sent.append((one, data))
            self.client.push(shard, one, memoryview(data.numpy()), narrow)  # type: ignore[arg-type]
            if self._asked:
                self._pull(-inf, take, [shard], note=True)

    def pull(self, after: float, take: Callable[..., None], note: bool = True) -> None:
        if not (self._asked and note and after == -inf):
            self._pull(after, take, None, note)
        self._asked = False

    def _pull(self, after: float, take: Callable[..., None], shards: list[int] | None, note: bool) -> None:
        self.client.pull(after, lambda *found: take(self, *found), shards, note)

    def views(self, shard: int, data: memoryview) -> list[Tensor]:
        bridge = self.bridges[shard]
        return bridge.shaped(bridge.outline.values_of(tensor_of(data)))


class Gathered:
    """A replica that takes whole shards."""

    def __init__(self, state: State):
        self._state = state
        self._found: set[int] = set()
        self._targets: list[Tensor] = []
        self._sources: list[Tensor] = []

    def write(self, piece: Piece, slot: Slot | None, values: Tensor) -> None:
        p = self._state.parameters[piece.parameter]
        if slot is None:
            self._take(part(piece, p.detach(), p), shaped(piece, values, p))
            return
        self._found.add(piece.parameter)
        state = self._state.optimizers[piece.optimizer].state[p]
        old = state.get(slot.key)
        if slot.kind == "number":
            state[slot.key] = slot.type(float(values))
        elif slot.kind == "element":
            if not (isinstance(old, Tensor) and old.shape == p.shape and old.stride() == p.stride()):
                old = state[slot.key] = torch.zeros_like(p, dtype=slot.dtype)
            self._take(part(piece, old, p), shaped(piece, values, p))
        else:
            if not (isinstance(old, Tensor) and old.shape == values.shape and old.dtype == slot.dtype):
                group = self._state.optimizers[piece.optimizer].param_groups[piece.group]
                # As torch does: step counts stay on the CPU unless the step runs on the device as a whole.
                on_device = group.get("fused") or group.get("capturable") or p.dim() == 0
                where = p.device if on_device or slot.kind != "scalar" else torch.device("cpu")
                old = state[slot.key] = torch.zeros(values.shape, dtype=slot.dtype, device=where)
            self._take(old, values)

    def _take(self, target: Tensor, source: Tensor) -> None:
        self._targets.append(target)
        self._sources.append(source)

    def done(self) -> None:
        """Copies all; state that the shards don't have, no replica has."""
        copy(self._targets, self._sources)
        for number, p in enumerate(self._state.parameters):
            for optimizer in self._state.optimizers:
                if number not in self._found:
                    optimizer.state.pop(p, None)
