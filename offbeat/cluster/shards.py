"""All shards of a job as one worker sees them: those of its own host in shared memory, the others' over
the wire.

Shards belong to hosts. They are cut anew whenever a protocol with shards begins, from replicas that are
all the same: the workers of a host write the host's shards, and nothing travels. When it ends every worker
reads all of them back.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf
from typing import Any

import torch
from torch import Tensor

from offbeat.cluster import memory, sizes
from offbeat.cluster.bridge import Bridge, Gathered, Local, Remote
from offbeat.cluster.client import Client, flush, receive
from offbeat.cluster.counts import Counts
from offbeat.cluster.flat import copy
from offbeat.cluster.members import Members
from offbeat.cluster.memory import Memory
from offbeat.cluster.server import Server
from offbeat.cluster.state import State, collect, share
from offbeat.cluster.wire import Keys, bind_address
from offbeat.cut import cut, dense, way_of
from offbeat.outline import Outline, aligned
from offbeat.shard import Push, Shard
from offbeat.site import here
from offbeat.twin import Settings, Slot, slots


class ShardHome:
    """One worker's way to all shards. Opened by all members together; `begin` and `gather` are collective.

    node: number of this worker's host; path: of the memory that its launcher holds, if any; towards: the
    address (host, port) where the job meets, for choosing the interface to serve at. cut: how to cut (None:
    by the optimizers' kind). narrow: gradients travel between hosts as bfloat16. check: called while
    waiting; it raises when a worker has died or when all are called together.
    """

    def __init__(
        self,
        team: Members,
        state: State,
        node: int,
        path: str | None,
        towards: tuple[str, int],
        cut: str | None,
        narrow: bool,
        check: Callable[[], None],
    ):
        self._team, self._state, self._node, self._path = team, state, node, path
        self._towards, self._narrow, self._check = towards, narrow, check
        self.way = way_of(state.optimizers, cut)
        self.settings = Settings(state.optimizers)
        self.counts = Counts()
        self.staleness: int | None = None  # of the last push
        self.trace: list[dict[str, Any]] | None = None  # of pushes and pulls, for whom wants to replay them
        self._server: Server | None = None
        self._generation = 0
        self._open()

    # Opening

    def _open(self) -> None:
        """Collective: agrees on who serves what, and makes the room."""
        state, team = self._state, self._team
        for name, p in zip(state.names, state.parameters, strict=True):
            if not (p.is_contiguous() or dense(p)):
                raise ValueError(
                    f"{name} lies in memory with gaps (strides {p.stride()}): asp and ssp need it contiguous"
                )
        self._generation += 1
        nodes = [int(text) for text in collect(team.epoch, str(self._node))]
        hosts = sorted(set(nodes))
        size = sum(p.numel() * p.element_size() for p in state.parameters)
        self.per_host = sizes.shards(size, len(hosts))
        narrow = [False] * (self.per_host * len(hosts))  # gradients that travel
        if here().virtual:  # one memory stands for all hosts'
            mine = hosts.index(self._node)
            narrow = [self._narrow and g // self.per_host != mine for g in range(len(narrow))]
            self.per_host, hosts, nodes = len(narrow), [self._node], [self._node] * len(nodes)
        self.ranks = [[r for r, n in zip(team.members, nodes, strict=True) if n == host] for host in hosts]
        self.here = hosts.index(self._node)
        pieces = cut(state.parameters, state.optimizers, self.per_host * len(hosts), self.way)
        self._stepped = sorted({piece.parameter for one in pieces for piece in one})
        kept = lru_cache(maxsize=None)(self._slots_of)
        self.outlines = [
            Outline(
                one,
                lambda piece: kept(piece.kind, (2,) if self.way == "elements" else piece.shape),
                self.way,
                team.room,
                len(self.ranks[number // self.per_host]) + 1,
            )
            for number, one in enumerate(pieces)
        ]
        sent = (one.narrow_size if self._narrow else one.gradient_size for one in self.outlines)
        self._sizes = sum(sent), sum(one.values_end - one.values for one in self.outlines)
        bridges = [Bridge(outline, state.parameters) for outline in self.outlines]
        self.local = range(self.here * self.per_host, (self.here + 1) * self.per_host)
        self.memory = self._make_memory()
        self._local = [
            Local(bridges[g], self.memory.gradient(s), narrow[g]) for s, g in enumerate(self.local)
        ]
        client = self.ranks[self.here].index(team.rank)
        self._published = self._buffers_in(self.memory.published[client])
        self._remote: list[Remote] = []
        self.dealer: Client | None = None  # of units, where they are dealt on another host
        if len(hosts) > 1:
            self._connect(bridges)

    def _slots_of(self, kind: tuple[int, int, torch.dtype], shape: tuple[int, ...]) -> tuple[Slot, ...]:
        optimizer, group, dtype = kind
        return slots(self._state.optimizers[optimizer], group, shape, dtype, self.way)

    def _buffers_in(self, region: Tensor) -> list[Tensor]:
        """The floating-point buffers' places in one worker's stretch of bytes."""
        found, at = [], 0
        for b in self._state.buffers(floating=True):
            size = b.numel() * b.element_size()
            found.append(region[at : at + size].view(b.dtype).view(b.shape))
            at += aligned(size)
        return found

    def _make_memory(self) -> Memory:
        team, clients = self._team, self.ranks[self.here]
        lead = team.rank == clients[0]

        def made(path: str, base: int) -> Memory:
            return Memory(
                path,
                base,
                [self.outlines[g] for g in self.local],
                self._state.optimizers,
                self.settings,
                len(clients),
                clients.index(team.rank),
                len(self._state.parameters),
                self._buffer_bytes,
                first=lead,
            )

        place: dict[str, Any] = {}
        if lead:
            path = self._path or memory.make_file()
            one = made(path, memory.end_of(path))
            place = {"path": path, "base": one.base}
        rows = [json.loads(text) for text in collect(team.epoch, place_text(place))]
        if not lead:
            row = rows[team.members.index(clients[0])]
            one = made(row["path"], row["base"])
        return one

    @property
    def _buffer_bytes(self) -> int:
        sizes = (b.numel() * b.element_size() for b in self._state.buffers(floating=True))
        return sum(map(aligned, sizes))

    def _connect(self, bridges: Sequence[Bridge]) -> None:
        """Collective: every host's first worker serves its shards, all connect to those of other hosts."""
        team = self._team
        mine: dict[str, Any] = {}
        if team.rank == team.members[0]:
            mine["keys"] = Keys.make().to_text()
        first = collect(team.epoch, json.dumps(mine))[0]
        keys = Keys.from_text(json.loads(first)["keys"])
        others = collect(team.epoch, bind_address(self._towards))
        served: dict[str, str] = {}
        if team.rank == self.ranks[self.here][0]:
            at = self._address(others)
            self._server = Server(self.memory, keys, self._generation, range(team.room), at)
            served = {"address": self._server.address, "public": self._server.public}
        rows = [json.loads(text) for text in collect(team.epoch, json.dumps(served))]
        for host, ranks in enumerate(self.ranks):
            if host == self.here:
                continue
            row = rows[team.members.index(ranks[0])]
            client = Client(row["address"], row["public"], keys, self._generation, team.rank)
            shards = range(host * self.per_host, (host + 1) * self.per_host)
            self._remote.append(Remote(client, [bridges[g] for g in shards], shards))
            if host == 0:
                self.dealer = client
        for remote in self._remote:
            remote.client.ready(self._check)

    def _address(self, others: Sequence[str]) -> str:
        """Where to serve. The host where the job meets may know its own name as the loopback's: then the way
        to another host tells."""
        mine = others[self._team.members.index(self._team.rank)]
        away = [at for at in others if not _loopback(at)]
        return bind_address((away[0], 1)) if _loopback(mine) and away else mine

    def close(self) -> None:
        """Ends the server and the connections. All members are through."""
        for remote in self._remote:
            remote.client.close()
        if self._server is not None:
            self._server.close()
        self.memory.release()
        self._remote, self._server, self.dealer = [], None, None

    # A phase

    def begin(self, clock: int, units: int) -> None:
        """Cuts this worker's part of its host's shards, while all members hold the same; after the next
        exchange of words everybody may push."""
        team = self._team
        if any(not set(ranks) & set(team.members) for ranks in self.ranks):  # a whole host has left
            self.close()
            self._open()
        here = [r for r in self.ranks[self.here] if r in team.members]
        if team.rank == here[0]:
            self.memory.begin(clock, team.members, units)
        for s in range(self.per_host):
            if here[s % len(here)] == team.rank:
                self.memory.load(s, self._state.parameters, self._state.optimizers)
        self.staleness = None
        self._seen = [0] * len(self.outlines)
        self._clock = clock
        self._pending, self._counted = 0, clock
        self._uncommitted = False
        self._asked = False  # for a unit
        self._bounded = True  # until a push says otherwise
        copy(self._published, self._state.buffers(floating=True))

    def ask(self) -> None:
        """Asks for the next unit's number early, where it comes from another host."""
        if self.dealer is not None and not self._asked:
            self._asked = True
            self.dealer.claim(1)

    @property
    def leader(self) -> int:
        """The member that watches over a phase: one on the host that deals the units."""
        return next(rank for rank in self.ranks[0] if rank in self._team.members)

    def stop(self, reason: int) -> None:
        """Tells whoever claims a unit from here on: see `memory.CALM` and `KNOCK`. By the leader."""
        self.memory.stop(reason)

    def claim(self) -> int:
        """The next unit's number, with what the leader has told in it."""
        if self.dealer is None:
            return self.memory.claim(self._team.rank)
        self.ask()
        self._asked = False
        return self.dealer.ticket(self._team.epoch.check)

    def push(self, push: Push, skip: bool) -> None:
        """Sends what `.grad` holds on its way (nothing at all, if `skip`); `push` lacks only what each shard
        adds."""
        missing = self._missing(skip)
        self._push = push = replace(push, missing=missing)
        self._clock, self._bounded = push.clock, push.after != -inf
        for remote in self._remote:
            remote.push(push, self._seen, self._narrow, skip, self._take_remote)
        if not skip:
            for local in self._local:
                local.write()
        copy(self._published, self._state.buffers(floating=True))
        self._uncommitted = True

    def pushed(self) -> None:
        """Returns when the push is applied here; elsewhere, it is by the next pull."""
        push, local = self._push, self.local
        here().pushed(self._sizes[0])
        if push.after != -inf:
            ready = self._until(lambda s: self.memory.may_push(s, push.after))
            self.counts.waited(here().wait_until(ready, self._check))
        self._commit()
        applied = {g: self.memory.applied(s, push.member) for s, g in enumerate(local)}
        self._note(applied)
        if not self._remote:
            self._count()

    def _commit(self) -> None:
        local = self.local
        self.memory.commit(self._push, self._seen[local.start : local.stop])
        self._uncommitted = False
        self.memory.finish()

    def complete(self, patience: float = 2.0) -> None:
        """A loss has interrupted this worker: what it was pushing is pushed, whatever the bound, as far as
        the other hosts' servers still answer within `patience` seconds."""
        if self._uncommitted:
            self._commit()
        end = time.monotonic() + patience

        def check() -> None:
            if time.monotonic() > end:
                raise TimeoutError

        with contextlib.suppress(TimeoutError, ConnectionError):
            flush([remote.client for remote in self._remote], check)

    def hand_over(self, pushes: int) -> None:
        """Collective, after `complete`: what a survivor has pushed and another host has not got, since who
        served its shards there has died, goes to a member that is left there. pushes: this worker's, in this
        phase."""
        if len(self.ranks) == 1:
            return
        if self._server is not None:  # from here on nobody else applies anything
            self._server.close()
            self._server = None
        team = self._team
        mine = [pushes, self.memory.pushes() if self.leads else []]
        rows = [json.loads(text) for text in collect(team.epoch, json.dumps(mine))]
        for host, ranks in enumerate(self.ranks):
            if host in self.lost:
                continue
            lead = self._lead(host)
            applied = rows[team.members.index(lead)][1]
            for rank, (made, _) in zip(team.members, rows, strict=True):
                for shard in range(self.per_host):
                    if rank not in ranks and applied[shard][rank] < made:
                        self._hand(rank, lead, host, shard)

    def _hand(self, rank: int, lead: int, host: int, shard: int) -> None:
        """`rank` gives its last push to a shard of another host to `lead`, which applies it."""
        epoch, outline = self._team.epoch, self.outlines[host * self.per_host + shard]
        data = torch.empty(outline.narrow_size if self._narrow else outline.gradient_size, dtype=torch.uint8)
        text = ""
        if rank == self._team.rank:
            remote = next(one for one in self._remote if one.shards[0] == host * self.per_host)
            push, sent = remote.sent[shard]
            data.copy_(memory.tensor_of(memoryview(sent.numpy())))  # type: ignore[arg-type]
            text = json.dumps({**vars(push), "missing": push.missing.hex()})
        row = json.loads(share(epoch, text, rank))
        epoch.broadcast(data, rank).wait()
        if self._team.rank == lead:
            row["settings"], row["missing"] = tuple(row["settings"]), bytes.fromhex(row["missing"])
            self.memory.apply(shard, Push(**row), memoryview(data.numpy()), self._narrow)  # type: ignore[arg-type]

    def _lead(self, host: int) -> int:
        """The member that reads a host's shards for the others."""
        return next(rank for rank in self.ranks[host] if rank in self._team.members)

    @property
    def lost(self) -> list[int]:
        """Hosts without a member that could read their shards."""
        return [host for host, ranks in enumerate(self.ranks) if not set(ranks) & set(self._team.members)]

    def salvage(self) -> int | None:
        """Collective, after `gather`: of the shards of lost hosts, all take the parameters of the member that
        has pulled last; the optimizer begins anew there. Returns how many updates are in what they have, at
        least; None if no host is lost."""
        team, versions = self._team, []
        for host in self.lost:
            remote = next(one for one in self._remote if one.shards[0] == host * self.per_host)
            rows = [json.loads(text) for text in collect(team.epoch, json.dumps(self._seen))]
            for bridge, g in zip(remote.bridges, remote.shards, strict=True):
                version, at = max((row[g], -i) for i, row in enumerate(rows))
                versions.append(version)
                for view in bridge.own():
                    values = view.detach().clone(memory_format=torch.contiguous_format)
                    team.epoch.broadcast(values, team.members[-at]).wait()
                    view.copy_(values)
                bridge.forget(self._state.optimizers)
        return min(versions, default=None)

    @property
    def leads(self) -> bool:
        """Whether this member reads its host's shards for the others."""
        return self._team.rank == self._lead(self.here)

    def pull(self, after: float) -> None:
        """Asks the other hosts for their parameters."""
        self._after = after
        for remote in self._remote:
            remote.pull(after, self._take_remote)

    def pulled(self) -> None:
        """Returns when the replica holds the newest parameters."""
        after = self._after
        if after != -inf:
            ready = self._until(lambda s: self.memory.may_pull(s, after))
            self.counts.waited(here().wait_until(ready, self._check))
        with here().pulling(self._sizes[1]):
            self._take_all(self._check)

    def _take_all(self, check: Callable[[], None]) -> None:
        for s, (g, local) in enumerate(zip(self.local, self._local, strict=True)):
            self._seen[g] = self.memory.pull(s, self._team.rank, local.take)
        if self._remote:
            receive([remote.client for remote in self._remote], check)
            self._count()
        if self.trace is not None:
            self.trace.append({"kind": "pull", "clock": self._clock, "seen": list(self._seen)})

    def _until(self, may: Callable[[int], bool]) -> Callable[[], bool]:
        return lambda: all(may(s) for s in range(self.per_host))

    def _missing(self, skip: bool) -> bytes:
        parameters = self._state.parameters
        if not skip and all(parameters[i].grad is not None for i in self._stepped):
            return b""
        bits = 0
        for i in self._stepped:
            if skip or parameters[i].grad is None:
                bits |= 1 << i
        return bits.to_bytes((len(parameters) + 7) // 8, "little")

    def _take_remote(self, remote: Remote, shard: int, version: int, applied: int, data: memoryview) -> None:
        g = remote.shards[shard]
        copy(remote.bridges[shard].own(), remote.views(shard, data))
        if self._clock != self._counted:  # else the push was noted with the pull before
            self._note({g: applied})
        self._seen[g] = version

    def _note(self, applied: dict[int, int]) -> None:
        """How stale the last push was where it came to be version `applied` of a shard."""
        for g, version in applied.items():
            if version:
                self._pending = max(self._pending, version - 1 - self._seen[g])
        if self.trace is not None and (rows := {g: v for g, v in applied.items() if v}):
            push = self._push
            self.trace.append(
                {
                    "kind": "push",
                    "clock": push.clock,
                    "applied": rows,
                    "seen": {g: self._seen[g] for g in rows},
                    "settings": push.settings,
                }
            )

    def _count(self) -> None:
        """The last push is applied everywhere: counts how stale it was, as its stalest slice was."""
        if self._clock != self._counted:
            self._counted = self._clock
            self.staleness, self._pending = self._pending, 0
            self.counts.staleness[self.staleness] += 1

    # Outside of steps

    @contextlib.contextmanager
    def newest(self) -> Iterator[None]:
        """Inside, the model holds the newest parameters and the mean of the buffers that the workers last
        published. Afterwards it holds its own buffers again, to the bit, and without a bound the parameters
        that are newest then: gradients of those from before would be as stale as the visit was long. With a
        bound, which keeps the others from going far meanwhile, those that it may compute on: the ones from
        before. Nobody waits for anybody."""
        buffers, check = self._state.buffers(floating=True), self._team.epoch.check
        tensors = self._state.averaged() if self._bounded else buffers
        kept = [tensor.detach().clone() for tensor in tensors]
        try:
            for remote in self._remote:
                remote.pull(-inf, self._show_remote, note=False)
            for s, local in enumerate(self._local):
                self.memory.pull(s, None, local.take)
            receive([remote.client for remote in self._remote], check)
            rows = [self._buffers_in(one) for one in self._everyones_buffers()]
            if rows:
                copy(buffers, [torch.stack(column).mean(0) for column in zip(*rows, strict=True)])
            yield
        except BaseException:
            copy(tensors, kept)
            raise  # and pull nothing: whoever serves may be what was lost
        copy(tensors, kept)
        if not self._bounded:
            self.pull(-inf)
            self._take_all(check)

    def _show_remote(self, remote: Remote, shard: int, version: int, applied: int, data: memoryview) -> None:
        copy(remote.bridges[shard].own(), remote.views(shard, data))

    def _everyones_buffers(self) -> list[Tensor]:
        size = self._buffer_bytes
        if not size:
            return []
        texts = [(self.memory.buffers(), self.ranks[self.here])]
        for remote in self._remote:
            texts.append(
                (remote.client.buffers(self._team.epoch.check), self.ranks[remote.shards[0] // self.per_host])
            )
        return [
            memory.tensor_of(bytearray(text[i * size : (i + 1) * size]))
            for text, ranks in texts
            for i, rank in enumerate(ranks)
            if rank in self._team.members
        ]

    def rest(self) -> None:
        """Nobody waits for this worker at a bound; all it has pushed is applied."""
        self.memory.rest(self._team.rank)
        for remote in self._remote:
            remote.client.rest()
        flush([remote.client for remote in self._remote], self._team.epoch.check)

    @property
    def alarm(self) -> int:
        """Not 0 when somebody has called all workers together."""
        return self.memory.alarm or max((remote.client.alarm for remote in self._remote), default=0)

    def raise_alarm(self, value: int) -> None:
        self.memory.alarm = value
        for remote in self._remote:
            remote.client.raise_alarm(value)
        flush([remote.client for remote in self._remote], self._team.epoch.check)

    def gather(self) -> None:
        """Collective, when all are through: every replica gets parameters and optimizer state from the
        shards. What is on this host needs no traffic."""
        target = Gathered(self._state)
        for s in range(self.per_host):
            self.memory.current(s).store(target.write)
        here().gathering([outline.size for outline in self.outlines])
        team = self._team
        for host in range(len(self.ranks)):
            if len(self.ranks) == 1:
                break
            if host in self.lost:
                continue
            lead = self._lead(host)
            for g in range(host * self.per_host, (host + 1) * self.per_host):
                block = torch.empty(self.outlines[g].size, dtype=torch.uint8)
                if team.rank == lead:
                    block.copy_(self.memory.current(g - self.local.start).block)
                team.epoch.broadcast(block, lead).wait()
                if host != self.here:
                    Shard(self.outlines[g], block, self._state.optimizers, self.settings).store(target.write)
        target.done()


def place_text(place: dict[str, Any]) -> str:
    """As long whatever number the process has whose memory it is, so that virtual time is the same."""
    return json.dumps(place).ljust(64)


def _loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
