"""Virtual workers' ways to each other: collectives and a store in virtual time.

They stand in for `offbeat.cluster.epoch` and the job's store, so that all that is built on those (the
reducer, averages, settling, checkpoints, membership) is the real engine's own code. A collective takes
what the cluster's costs say, from the moment its last member is there; collectives of one group follow
each other, but for the gradients': some of those may be under way at a time (`flight.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offbeat.cluster.epoch import Epoch, PeerLost, Work
from offbeat.policies.lookout import PROBE
from offbeat.virtual.flight import Flight, cost

if TYPE_CHECKING:
    from offbeat.virtual.engine import Engine, VirtualSite


class Collective:
    """One collective of a group: what each member gave, by its index among the members."""

    __slots__ = ("done", "ended", "given", "group", "here", "kind", "root", "waiting")

    def __init__(self, group: Group, kind: str):
        self.group, self.kind = group, kind
        self.given: dict[int, Any] = {}  # tensors; for a gather, pairs of a row and where the rows go
        self.here = 0  # members that have come
        self.root = 0
        self.done = False
        self.ended = 0.0  # when it was over
        self.waiting: list[VirtualSite] = []

    def arrive(self) -> None:
        """One more member is there."""
        self.here += 1
        if self.here == len(self.group.room.members):
            self.group.begin(self)

    def finish(self) -> None:
        """Everybody gets the result."""
        if self.group.room.closed:
            return
        self.done = True
        with torch.no_grad():
            self._compute([self.given[index] for index in range(self.here)])
        self.given = {}
        self.wake()

    def _compute(self, given: list[Any]) -> None:
        if self.kind == "gather":
            whole = torch.stack([row for row, _ in given])
            for _, rows in given:
                rows.copy_(whole)
        elif self.kind == "broadcast":
            for index, tensor in enumerate(given):
                if index != self.root:
                    tensor.copy_(given[self.root])
        else:
            first, *rest = given
            for tensor in rest:
                first.add_(tensor)
            for tensor in rest:
                tensor.copy_(first)

    def wake(self) -> None:
        engine = self.group.room.engine
        for site in self.waiting:
            engine.events.at(engine.events.now, site.resume)
        self.waiting = []

    def missing(self) -> list[int]:
        """Ranks of the members that have not begun it."""
        return [rank for index, rank in enumerate(self.group.room.members) if index not in self.given]


class Group:
    """A sequence of collectives, begun in order."""

    def __init__(self, room: Room, name: str):
        self.room, self.name = room, name
        costs = room.engine.costs
        most = costs.in_flight if name == "gradients" else 1
        self._flight = Flight(most, costs.lockstep(room.members))
        self._found: dict[int, Collective] = {}

    def at(self, number: int, kind: str) -> Collective:
        """The `number`-th collective; the last member to ask is the last to need it by number."""
        one = self._found.get(number)
        if one is None:
            one = self._found[number] = Collective(self, kind)
        if len(one.given) == len(self.room.members) - 1:
            del self._found[number]
        return one

    def begin(self, one: Collective) -> None:
        """All members are there."""
        costs, members = self.room.engine.costs, self.room.members
        given = one.given[0]
        tensor = given[0] if one.kind == "gather" else given
        size = tensor.numel() * tensor.element_size()
        if one.kind == "sum":
            taking = cost(costs, size, members)
        else:
            alone = costs.broadcast if one.kind == "broadcast" else costs.gather
            taking = lambda at: (alone(size, members, at), 0.0)  # noqa: E731
        self._flight.add(self.room.engine.events.now, taking, one)
        self._land()

    def _land(self) -> None:
        """Ends what has landed by now, and comes again when more may have."""
        flight, events = self._flight, self.room.engine.events
        if self.room.closed:
            return
        flight.run(events.now)
        landed, flight.landed = flight.landed, []
        for at, one in landed:
            one.ended = at
            one.finish()
        if (then := flight.next()) < inf:
            events.at(then, self._land)


class Room:
    """Where the members of one epoch meet."""

    def __init__(self, engine: Engine, members: Sequence[int]):
        self.engine, self.members = engine, tuple(members)
        self.closed = False
        self.groups = {name: Group(self, name) for name in ("control", "gradients", "averages")}
        self.under_way: set[Collective] = set()

    def close(self) -> None:
        """Whoever waits here learns that a member has gone."""
        if self.closed:
            return
        self.closed = True
        for one in self.under_way:
            one.wake()
        self.under_way = set()


class VirtualWork(Work):
    """A virtual worker's part of a collective."""

    def __init__(self, epoch: VirtualEpoch, one: Collective, name: str):
        super().__init__(epoch, None, name)
        self._at, self._one = epoch, one

    def note_end(self) -> None:
        return

    def look(self) -> None:
        return

    def wait(self) -> None:
        one, epoch = self._one, self._at
        if not one.done and not epoch.room.closed:
            one.waiting.append(epoch.site)
            epoch.room.under_way.add(one)
            epoch.site.suspend(lambda: _waits(self._name, one))
            epoch.room.under_way.discard(one)
        self.ended = one.ended
        if not one.done:
            raise PeerLost(f"a worker went away during {self._name} (members {list(epoch.members)})")


def _waits(name: str, one: Collective) -> str:
    missing = one.missing()
    if not missing:
        return f"for {name}"
    return f"in {name} for {'ranks' if len(missing) > 1 else 'rank'} {', '.join(map(str, missing))}"


class VirtualEpoch(Epoch):
    """The members of one stretch of a job, as one of them sees them."""

    def __init__(self, number: int, room: Room, site: VirtualSite):
        self.number, self.members, self.rank = number, room.members, site.rank
        self.index, self.size = self.members.index(site.rank), len(self.members)
        self.room, self.site = room, site
        self._counts = dict.fromkeys(room.groups, 0)

    @property
    def closed(self) -> bool:  # type: ignore[override]
        return self.room.closed

    def sum(self, tensor: Tensor, group: str, passed: float = 1.0) -> Work:
        return self._begin("sum", group, tensor, f"a sum of {group}", passed)

    def broadcast(self, tensor: Tensor, source: int, group: str = "averages") -> Work:
        return self._begin("broadcast", group, tensor, "a broadcast", root=self.members.index(source))

    def gather(self, row: Tensor) -> tuple[Tensor, Work]:
        rows = torch.empty((self.size, row.numel()), dtype=row.dtype)
        if self.size == 1:
            rows[0] = row
        return rows, self._begin("gather", "control", (row, rows), "an exchange")

    def _begin(
        self, kind: str, group: str, given: Any, name: str, passed: float = 1.0, root: int = 0
    ) -> Work:
        if self.size == 1:
            return Work(self, None, name)
        if self.room.closed:
            raise PeerLost(f"a worker went away before {name} (members {list(self.members)})")
        one = self.room.groups[group].at(self._counts[group], kind)
        self._counts[group] += 1
        one.given[self.index] = given
        one.root = root
        self.site.launch(one, passed)
        return VirtualWork(self, one, name)

    def _echo(self, shift: int, size: int = PROBE) -> float:
        other, costs, begun = (
            self.members[(self.index + shift) % self.size],
            self.site.engine.costs,
            self.site.now(),
        )
        seconds = sum(costs.message(size, *way, begun) for way in ((self.rank, other), (other, self.rank)))
        self.site.sleep_until(begun + seconds)
        return seconds

    def check(self) -> None:
        if self.room.closed:
            raise PeerLost(f"a worker went away (members {list(self.members)})")

    def close(self) -> None:
        if self.size > 1:
            self.room.close()


class VirtualStore:
    """What a TCPStore does for a job, in virtual time (its messages take none)."""

    def __init__(self, engine: Engine, prefix: str = ""):
        self._engine, self._prefix = engine, prefix

    def part(self, name: str) -> VirtualStore:
        return VirtualStore(self._engine, f"{self._prefix}{name}/")

    def room(self, number: int, members: Sequence[int]) -> Room:
        """Where the members of an epoch meet."""
        key = f"{self._prefix}epoch{number}"
        if key not in self._engine.rooms:
            self._engine.rooms[key] = Room(self._engine, members)
        return self._engine.rooms[key]

    def set(self, key: str, value: str) -> None:
        self._engine.kept[self._prefix + key] = value.encode()
        self._engine.look_again()

    def add(self, key: str, amount: int) -> int:
        found = int(self._engine.kept.get(self._prefix + key, b"0")) + amount
        self.set(key, str(found))
        return found

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if not self.check([key]):  # as torch's, with nothing expected
            self.set(key, desired)
        return self.get(key)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._engine.kept[self._prefix + key]

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._prefix + key in self._engine.kept for key in keys)

    def wait(self, keys: Sequence[str], timeout: object = None) -> None:
        self._engine.current().wait_for(lambda: self.check(keys), lambda: f"for {', '.join(keys)}")

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def set_timeout(self, timeout: object) -> None:
        return
