"""ASP and SSP once more, as a slow replay in one process: the order in which pushes were applied is what a
run recorded, everything else is computed here, by plain torch optimizers over the pieces. Of offbeat there
is only `cut`, which says what lies where."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.cut import Piece, cut
from tests.models import flat, slots
from tests.reference import Phase, _copies, _mean_gradients, _means, _merge, _settle, usual


@dataclass(frozen=True)
class Turn(Phase):
    """One protocol's turn, of any kind."""

    bound: float = 3
    damped: bool = False

    @property
    def sharded(self) -> bool:
        return self.kind in ("asp", "ssp")

    @property
    def text(self) -> str:
        if not self.sharded:
            return super().text
        lr = f"lr={'staleness' if self.damped else 'plain'}"
        settings = f"({lr})" if self.kind == "asp" else f"(bound={self.bound},{lr})"
        end = "" if self.end is None else f":{self.end}u" if isinstance(self.end, int) else f":{self.end:.4%}"
        return f"{self.kind}{settings}{end}"

    def over(self, units: int, total: int) -> bool:
        if units >= total:
            return True
        if self.end is None:
            return False
        return units >= self.end if isinstance(self.end, int) else units / total >= self.end


@dataclass
class Log:
    """What one worker wrote down.

    steps: of each step the clock before it, the ticket it held, and, if it returned with a settled model, the
    units that were done then. events: in their order, `cut` (clock, units), and `push` (clock, applied, seen,
    settings) and `pull` (clock, seen) as `ShardHome.trace` has them.
    """

    steps: list[tuple[int, int, int | None]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Push:
    """A push at `clock` (after it), computed on versions `seen`, that became version `applied` of each shard;
    `then` are the versions of the pull that followed in the same step (consensus may have pulled again)."""

    rank: int
    clock: int
    ticket: int
    settled: int | None
    seen: list[int]
    settings: tuple[float, ...]
    applied: dict[int, int] = field(default_factory=dict)
    then: list[int] = field(default_factory=list)

    def staleness(self, shard: int) -> int:
        return self.applied[shard] - 1 - self.seen[shard]


def segments(log: Log, rank: int, shards: int) -> list[tuple[int, list[Push]]]:
    """Between two cuts: the units done before, and this worker's pushes."""
    found: list[tuple[int, list[Push]]] = []
    steps = {clock: (ticket, settled) for clock, ticket, settled in log.steps}
    seen: list[int] = []
    for event in log.events:
        if event["kind"] == "cut":
            found.append((event["units"], []))
            seen = [0] * shards
            continue
        pushes, clock = found[-1][1], event["clock"]
        if event["kind"] == "pull":
            seen = list(event["seen"])
            if pushes and not pushes[-1].then:
                assert pushes[-1].clock == clock
                pushes[-1].then = seen
            continue
        if not pushes or clock != pushes[-1].clock:
            pushes.append(Push(rank, clock, *steps[clock - 1], list(seen), event["settings"]))
        push = pushes[-1]
        assert not push.applied.keys() & event["applied"].keys()
        push.applied.update(event["applied"])
        assert all(push.seen[g] == version for g, version in event["seen"].items())
    return found


Losses = Callable[[Any, int, int], Tensor]
Rates = Callable[[Turn, int, int], tuple[float, float]]
"""From a turn, the units at its begin and now, to what lr and momentum are multiplied by."""


def trained(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    once = {id(p): p for module in modules for p in module.parameters() if p.requires_grad}
    return list(once.values())


def joined(modules: Sequence[nn.Module]) -> Any:
    """What a loss is given."""
    return modules[0] if len(modules) == 1 else nn.ModuleList(modules)


@dataclass
class World:
    """`trace[r][i]` is replica r after its step i + 1 (None: not known); `pushes` those of each segment."""

    models: list[list[nn.Module]]
    optimizers: list[list[Optimizer]]
    units: int = 0
    trace: list[list[Tensor | None]] = field(default_factory=list)
    pushes: list[list[Push]] = field(default_factory=list)
    last: _Segment | None = None

    def at(self, versions: Sequence[int]) -> Tensor:
        """All parameters at these versions of the last segment's shards, as one vector."""
        assert self.last is not None
        self.last.take(0, versions)
        return flat(nn.ModuleList(self.models[0]), buffers=False)

    def flat(self, rank: int) -> Tensor:
        return flat(nn.ModuleList(self.models[rank]))

    def slots(self, rank: int) -> list[dict[str, Any]]:
        return [row for optimizer in self.optimizers[rank] for row in slots(optimizer)]


def replay(
    turns: Sequence[Turn],
    total: int,
    logs: Sequence[Log],
    make: Callable[[], tuple[list[nn.Module], list[Optimizer]]],
    way: str,
    shards: int,
    loss: Losses = usual,
    rates: Rates | None = None,
    narrow: Callable[[int, int], bool] = lambda rank, shard: False,
    skip: Callable[[int, int], bool] = lambda rank, step: False,
) -> World:
    """Trains as the logs say, from the first model of `make`.

    way, shards: how parameters are cut. rates: by default lr/n for shards. narrow: whether a rank's gradient
    for a shard travels as bfloat16. skip: whether a rank's step is left out, or its push empty.
    """
    workers = len(logs)
    made = [make() for _ in logs]
    world = World([models for models, _ in made], [optimizers for _, optimizers in made])
    for models in world.models[1:]:
        for one, first in zip(models, world.models[0], strict=True):
            one.load_state_dict(first.state_dict())
    world.trace = [[] for _ in logs]
    parts = [segments(log, rank, shards) for rank, log in enumerate(logs)]
    assert len({tuple(units for units, _ in part) for part in parts}) == 1, "all cut at the same units"
    factors = rates or (lambda turn, begun, units: (1 / workers if turn.sharded else 1.0, 1.0))
    at = clock = 0
    for turn in turns:
        begun = world.units
        if not turn.sharded:
            clock = _replicas(world, turn, total, logs, clock, loss, factors, begun, skip)
            continue
        while at < len(parts[0]) and not turn.over(parts[0][at][0], total):
            assert parts[0][at][0] == world.units, (at, parts[0][at][0], world.units)
            rows = [part[at][1] for part in parts]
            segment = _Segment(world, turn, rows, way, shards, loss, factors, begun, narrow, skip)
            segment.run()
            clock = max([clock, *(push.clock for row in rows for push in row)])
            at += 1
        assert turn.over(world.units, total), (turn, world.units)
    assert at == len(parts[0]), "a segment is left"
    return world


def _replicas(
    world: World,
    turn: Turn,
    total: int,
    logs: Sequence[Log],
    clock: int,
    loss: Losses,
    factors: Rates,
    begun: int,
    skip: Callable[[int, int], bool],
) -> int:
    workers = len(logs)
    whole: Any = [nn.ModuleList(models) for models in world.models]
    flying: Any = None
    while not turn.over(world.units, total):
        for rank, models in enumerate(world.models):
            assert logs[rank].steps[len(world.trace[rank])][:2] == (clock, world.units), (rank, clock)
            loss(joined(models), rank, clock).backward()
        if turn.kind == "bsp":
            _mean_gradients(whole)
        for rank, optimizers in enumerate(world.optimizers):
            with _scaled(optimizers, *factors(turn, begun, world.units)):
                for optimizer in optimizers:
                    if not skip(rank, clock):
                        optimizer.step()
            whole[rank].zero_grad()
        clock += 1
        world.units += workers
        ended = turn.over(world.units, total)
        if turn.kind != "bsp" and clock % turn.period == 0:
            flying = (clock + turn.delay, _means(whole), [_copies(one) for one in whole])
        if flying and (flying[0] == clock or ended):
            _merge(whole, flying, turn)
            flying = None
        if ended and workers > 1:
            for row in zip(*world.optimizers, strict=True):
                _settle(whole, row, turn.kind != "bsp")
        for rank, log in enumerate(logs):
            back = log.steps[len(world.trace[rank])][2]
            world.trace[rank].append(world.flat(rank) if back == world.units else None)
    return clock


@contextlib.contextmanager
def _scaled(optimizers: Sequence[Optimizer], lr: float, momentum: float) -> Iterator[None]:
    """Inside, learning rates and momenta are multiplied."""
    kept = [(group, dict(group)) for optimizer in optimizers for group in optimizer.param_groups]
    for group, _ in kept:
        group["lr"] = float(group["lr"]) * lr
        if "momentum" in group:
            group["momentum"] = group["momentum"] * momentum
        elif "betas" in group:
            group["betas"] = (group["betas"][0] * momentum, *group["betas"][1:])
    yield
    for group, before in kept:
        group.update({key: before[key] for key in ("lr", "momentum", "betas") if key in before})


def memory_order(p: Tensor) -> Tensor:
    """For each element of p, in its own shape, the place at which it lies in memory."""
    order = torch.empty_like(p, dtype=torch.int64)
    order.as_strided((p.numel(),), (1,)).copy_(torch.arange(p.numel()))
    return order


class Cutter:
    """Takes tensors of the parameters' shapes apart, and puts them together."""

    def __init__(self, parameters: Sequence[nn.Parameter], way: str):
        self.way = way
        self.orders = [memory_order(p.detach()) for p in parameters]

    def take(self, piece: Piece, tensor: Tensor) -> Tensor:
        if self.way == "tensors":
            return tensor.detach().clone().reshape(piece.shape)
        line = torch.empty(tensor.numel(), dtype=tensor.dtype)
        line[self.orders[piece.parameter].reshape(-1)] = tensor.detach().reshape(-1)
        return line[piece.start : piece.stop].clone()

    def put(self, piece: Piece, tensor: Tensor, values: Tensor) -> None:
        """Writes the piece's values to where they belong in `tensor`."""
        if self.way == "tensors":
            tensor.copy_(values.reshape(tensor.shape))
            return
        order = self.orders[piece.parameter]
        inside = (order >= piece.start) & (order < piece.stop)
        tensor[inside] = values[order[inside] - piece.start]

    def state(self, piece: Piece, p: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        return {
            key: self.take(piece, value) if _like(key, value, p) else copy.deepcopy(value)
            for key, value in state.items()
        }


def _like(key: str, value: Any, p: Tensor) -> bool:
    """Whether it is as many numbers as the parameter has, each of one of its elements."""
    return (
        isinstance(value, Tensor)
        and value.shape == p.shape
        and key not in ("step", "mu_product", "eta", "mu")
    )


class Shard:
    """Pieces as the parameters of plain optimizers; every version is kept."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        cutter: Cutter,
        parameters: Sequence[nn.Parameter],
        theirs: Sequence[Any],
    ):
        self.pieces = list(pieces)
        self.own = [nn.Parameter(cutter.take(piece, parameters[piece.parameter])) for piece in pieces]
        self.optimizers: list[Optimizer] = []
        for o, model in enumerate(theirs):
            groups = []
            for g, settings in enumerate(model.param_groups):
                mine = [x for x, p in zip(self.own, pieces, strict=True) if (p.optimizer, p.group) == (o, g)]
                if mine:
                    groups.append({**settings, "params": mine})
            if not groups:
                continue
            one = type(model)(groups, lr=0.1)
            one.state.clear()
            for x, piece in zip(self.own, pieces, strict=True):
                p = parameters[piece.parameter]
                if piece.optimizer == o and model.state.get(p):
                    one.state[x] = cutter.state(piece, p, model.state[p])
            self.optimizers.append(one)
        self.versions = [[x.detach().clone() for x in self.own]]

    def push(self, gradients: Sequence[Tensor | None], lr: float, momentum: float) -> None:
        for x, g in zip(self.own, gradients, strict=True):
            x.grad = g
        with _scaled(self.optimizers, lr, momentum):
            for one in self.optimizers:
                one.step()
        self.versions.append([x.detach().clone() for x in self.own])


class _Segment:
    """The pushes of each rank between two cuts, in the order in which every shard applied them."""

    def __init__(
        self,
        world: World,
        turn: Turn,
        rows: Sequence[Sequence[Push]],
        way: str,
        count: int,
        loss: Losses,
        factors: Rates,
        begun: int,
        narrow: Callable[[int, int], bool],
        skip: Callable[[int, int], bool],
    ):
        self.world, self.turn, self.rows, self.loss, self.begun = world, turn, rows, loss, begun
        self.factors, self.narrow, self.skip = factors, narrow, skip
        self.parameters = [trained(models) for models in world.models]
        first = self.parameters[0]
        self.cutter = Cutter(first, way)
        theirs = world.optimizers[0]
        self.shards = [Shard(one, self.cutter, first, theirs) for one in cut(first, theirs, count, way)]
        self.pushes = [push for row in rows for push in row]
        self.gradients: dict[tuple[int, int], list[Tensor | None]] = {}
        world.pushes.append(self.pushes)
        world.last = self

    def run(self) -> None:
        every = list(range(1, len(self.pushes) + 1))
        for g in range(len(self.shards)):  # updates applied = gradients pushed
            assert sorted(push.applied[g] for push in self.pushes) == every, f"shard {g}"
        order = [{push.applied[g]: push for push in self.pushes} for g in range(len(self.shards))]
        waiting = [list(row) for row in self.rows]
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(waiting):
                while row and self._there(row[0].seen):
                    at = len(self.rows[rank]) - len(row)
                    self._compute(row.pop(0), self.rows[rank][at - 1] if at else None)
                    moved = True
            for g, shard in enumerate(self.shards):
                while self._advance(g, order[g].get(len(shard.versions))):
                    moved = True
        assert not any(waiting), "a push was computed on parameters that were never there"
        self._end()

    def _there(self, versions: Sequence[int]) -> bool:
        return all(v < len(shard.versions) for shard, v in zip(self.shards, versions, strict=True))

    def take(self, rank: int, versions: Sequence[int]) -> None:
        for shard, version in zip(self.shards, versions, strict=True):
            for piece, values in zip(shard.pieces, shard.versions[version], strict=True):
                self.cutter.put(piece, self.parameters[rank][piece.parameter].detach(), values)

    def _compute(self, push: Push, before: Push | None) -> None:
        rank, own = push.rank, self.parameters[push.rank]
        if before is not None:
            self.take(rank, before.then)
            self.world.trace[rank].append(self.world.flat(rank))
        self.take(rank, push.seen)
        self.loss(joined(self.world.models[rank]), rank, push.clock - 1).backward()
        self.gradients[rank, push.clock] = [None if p.grad is None else p.grad.clone() for p in own]
        for p in own:
            p.grad = None

    def _advance(self, g: int, push: Push | None) -> bool:
        if push is None or (push.rank, push.clock) not in self.gradients:
            return False
        shard, mine = self.shards[g], list[Tensor | None]()
        for piece in shard.pieces:
            whole = self.gradients[push.rank, push.clock][piece.parameter]
            if whole is None or self.skip(push.rank, push.clock - 1):
                mine.append(None)
                continue
            values = self.cutter.take(piece, whole)
            if values.dtype == torch.float32 and self.narrow(push.rank, g):
                values = values.to(torch.bfloat16).to(torch.float32)
            mine.append(values)
        lr, momentum = self.factors(self.turn, self.begun, push.ticket)
        damping = 1 + push.staleness(g) if self.turn.damped else 1
        shard.push(mine, lr / damping, momentum)
        return True

    def _end(self) -> None:
        """Every replica takes everything, buffers become their mean."""
        world, count = self.world, len(self.pushes)
        assert all(len(shard.versions) == count + 1 for shard in self.shards)
        world.units += count
        for rank, row in enumerate(self.rows):
            if row and row[-1].settled is None:
                self.take(rank, row[-1].then)
                world.trace[rank].append(world.flat(rank))
        for rank in range(len(self.rows)):
            self.take(rank, [count] * len(self.shards))
            for o, optimizer in enumerate(world.optimizers[rank]):
                for p, state in self._states(o).items():
                    optimizer.state.pop(self.parameters[rank][p], None)
                    if state:
                        optimizer.state[self.parameters[rank][p]] = state
        if len(self.rows) > 1:
            for row in zip(*world.optimizers, strict=True):
                _settle([nn.ModuleList(models) for models in world.models], row, False)
        for rank, row in enumerate(self.rows):
            if row and row[-1].settled is not None:  # unless it went through another turn in the same step
                world.trace[rank].append(world.flat(rank) if row[-1].settled == world.units else None)

    def _states(self, o: int) -> dict[int, dict[str, Any]]:
        """Optimizer o's state of each parameter, put together."""
        found: dict[int, dict[str, Any]] = {}
        for shard in self.shards:
            by_id = {id(x): one.state[x] for one in shard.optimizers for x in one.state}
            for x, piece in zip(shard.own, shard.pieces, strict=True):
                if piece.optimizer != o:
                    continue
                p = self.parameters[0][piece.parameter]
                state = found.setdefault(piece.parameter, {})
                for key, value in by_id.get(id(x), {}).items():
                    if _like(key, value, x):
                        if key not in state:
                            state[key] = torch.zeros_like(p, dtype=value.dtype)
                        self.cutter.put(piece, state[key], value)
                    elif key in state:
                        assert float(state[key]) == float(value), key
                    else:
                        state[key] = copy.deepcopy(value)
        return found
