"""One host's shards in memory that its workers share, safe under kill -9 at any instant.

A push is written into the pusher's slot and committed by one store of one word. Whoever holds a shard's
lock applies every committed push that the shard lacks: it copies the shard's current half of a double
buffer over the other, applies the pushes there, and flips with one store of one word. A process that dies
before the commit has pushed nothing; one that dies later has pushed, for anybody finishes what it has
committed. Several pushes that wait for one lock share one copy.

The memory is a memfd (no limit of /dev/shm applies, nothing stays behind) that the launcher holds or,
without ours, the host's first worker. Locks are `lockf` byte ranges: the kernel frees those of the dead.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.outline import Gradient, Outline, aligned
from offbeat.shard import Push, Shard
from offbeat.twin import Settings

PAGE = mmap.ALLOCATIONGRANULARITY

CALM, KNOCK = 1 << 62, 1 << 61
"""In a claimed unit's number: the last straggler has become fast again; a newcomer has knocked."""

RING = 4096
"""Units whose claimer is remembered: more than workers ever hold."""

_HEAD = 8  # words: units dealt, alarm, what comes with the numbers from now on
_files: dict[str, int] = {}
_ends: dict[str, int] = {}


class Memory:
    """One host's shards, as one of its processes sees them.

    path, base: the file that they lie in, and where; the same for every process of the host.
    outlines: one per shard, each with `clients + 1` extra counters. clients: how many of the host's workers
    push from here, and `client` is this one. parameters: of the whole model. buffers: bytes that each
    worker publishes beside its pushes. first: this process makes the room, before the others come.
    """

    def __init__(
        self,
        path: str,
        base: int,
        outlines: Sequence[Outline],
        optimizers: Sequence[Optimizer],
        settings: Settings,
        clients: int,
        client: int,
        parameters: int,
        buffers: int,
        first: bool,
    ):
        self.outlines, self.count, self.clients, self.client = list(outlines), len(outlines), clients, client
        self.fd, self._path, self.base = open_file(path), path, base
        members = max((outline.members for outline in self.outlines), default=0)
        words = _HEAD + 2 * self.count + clients + members + RING
        room = _Room(-(-8 * words // PAGE) * PAGE)
        halves = [(room.take(outline.size), room.take(outline.size)) for outline in outlines]
        slots = []
        for number in range(clients + self.count):
            # A client's slot holds a gradient of every shard, a server's that of its own.
            head = room.take(_Slot.size(self.count, settings.count, parameters))
            mine = range(self.count) if number < clients else [number - clients]
            slots.append((head, {s: room.take(outlines[s].gradient_size) for s in mine}))
        published = [room.take(buffers) for _ in range(clients)]
        self.size = -(-room.at // PAGE) * PAGE
        if first:
            _make_room(self.fd, base, self.size)
            _ends[path] = base + self.size
        self._map = mmap.mmap(
            self.fd, self.size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0), offset=base
        )
        whole = torch.from_numpy(numpy.frombuffer(self._map, dtype=numpy.uint8))
        self._words = whole[: 8 * words].view(torch.int64).numpy()
        if first:
            self._words[:] = 0
        self._which = self._words[_HEAD : _HEAD + self.count]
        pushers = slice(_HEAD + self.count, _HEAD + 2 * self.count + clients)
        self._committed = self._words[pushers]  # pushes, by slot
        self._claimed = self._words[words - RING - members : words - RING]  # units, by rank
        self._owners = self._words[words - RING :]  # of the last units, by their numbers
        self._halves = [
            [Shard(outline, whole[at : at + outline.size], optimizers, settings) for at in pair]
            for outline, pair in zip(outlines, halves, strict=True)
        ]
        self._slots = [
            _Slot(
                whole[head:],
                self.count,
                settings.count,
                {s: Gradient(outlines[s], whole[at : at + outlines[s].gradient_size]) for s, at in g.items()},
            )
            for head, g in slots
        ]
        self.published = [whole[at : at + buffers] for at in published]
        self._locks = [threading.Lock() for _ in range(self.count + 1)]

    def release(self) -> None:
        """This host's workers are through with it: its room may be used again."""
        if _ends.get(self._path) == self.base + self.size:
            _ends[self._path] = self.base

    @contextlib.contextmanager
    def _locked(self, byte: int) -> Iterator[None]:
        with self._locks[byte]:  # lockf only tells processes apart
            fcntl.lockf(self.fd, fcntl.LOCK_EX, 1, self.base + byte)
            try:
                yield
            finally:
                fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, self.base + byte)

    def current(self, shard: int) -> Shard:
        """The half that counts now."""
        return self._halves[shard][self._which[shard]]

    # A phase begins and ends

    def begin(self, clock: int, members: Sequence[int], units: int) -> None:
        """By one process, before `load`: nothing is pushed, `units` are dealt, all members are at `clock`."""
        self._words[:3] = units, 0, 0
        self._claimed[:] = 0
        self._which[:] = self._committed[:] = 0
        for shard in range(self.count):
            self.current(shard).begin(clock, members)

    def load(self, shard: int, parameters: Sequence[nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
        """Cuts a shard out of a replica, after `begin`."""
        self._halves[shard][0].load(parameters, optimizers)

    # Pushing

    def gradient(self, shard: int) -> Gradient:
        """Where this client writes its gradient before `commit`."""
        return self._slots[self.client].gradients[shard]

    def commit(self, push: Push, seen: Sequence[int]) -> None:
        """From here on this client's push will be applied to every shard; `seen` are the versions of its
        last pull."""
        self._slots[self.client].write(push, seen)
        self._committed[self.client] += 1

    def finish(self) -> None:
        """Returns when this client's committed push has been applied to every shard."""
        for k in range(self.count):  # each begins elsewhere, so that fewer wait for one lock
            shard = (k + self.client) % self.count
            which = self._which[shard]
            done = self._halves[shard][which].extra[self.client] == self._committed[self.client]
            # Once another flip has come, somebody may be building in the half that was looked at.
            if not done or self._which[shard] != which:
                with self._locked(shard):
                    self._apply(shard)

    def _apply(self, shard: int) -> None:
        """Applies every committed push that the shard lacks. Its lock is held."""
        which = int(self._which[shard])
        now, then = self._halves[shard][which], self._halves[shard][1 - which]
        waiting = []
        for k in range(self.clients + 1):
            slot = k if k < self.clients else self.clients + shard
            if (committed := int(self._committed[slot])) != now.extra[k]:
                waiting.append((k, slot, committed))
        if not waiting:
            return
        for i, (k, slot, committed) in enumerate(waiting):
            push, gradient = self._slots[slot].read(shard), self._slots[slot].gradients[shard]
            if i == 0:
                then.push_from(now, push, gradient)
            else:
                then.push(push, gradient)
            then.extra[k] = committed
        self._which[shard] = 1 - which

    def applied(self, shard: int, member: int) -> int:
        """The shard's version right after `member`'s last push."""
        return int(self.current(shard).at[member])

    # Pulling

    def pull(self, shard: int, member: int | None, take: Callable[[Shard], None]) -> int:
        """`take` copies what it wants out of the shard; with a member, it has pulled. Returns the version."""
        with self._locked(shard):
            self._apply(shard)
            now = self.current(shard)
            take(now)
            return now.version if member is None else now.pull(member)

    def rest(self, member: int) -> None:
        """Nobody waits for this member until it pushes or pulls again."""
        for shard in range(self.count):
            with self._locked(shard):
                self.current(shard).resting[member] = 1

    def may_push(self, shard: int, after: float) -> bool:
        return self.current(shard).may_push(after)

    def may_pull(self, shard: int, after: float) -> bool:
        return self.current(shard).may_pull(after)

    # Units and alarms

    def claim(self, member: int, count: int = 1) -> int:
        """Deals `count` units to a member; returns the first one's number, with what `stop` was told."""
        with self._locked(self.count):
            first = int(self._words[0])
            for number in range(first, first + count):
                self._owners[number % RING] = member
            self._claimed[member] += count
            self._words[0] = first + count
            return first | int(self._words[2])

    def undone(self, pushes: Sequence[int]) -> list[tuple[int, int]]:
        """Units that were claimed and not pushed, in their order, each with the member that claimed it.
        pushes: of this phase, by rank; each member does its units in the order of its claims."""
        left = [int(claimed) - done for claimed, done in zip(self._claimed, pushes, strict=True)]
        found: list[tuple[int, int]] = []
        number = int(self._words[0])
        while any(count > 0 for count in left):
            number -= 1
            owner = int(self._owners[number % RING])
            if left[owner] > 0:
                left[owner] -= 1
                found.append((number, owner))
        return found[::-1]

    def pushes(self) -> list[list[int]]:
        """How many pushes of each rank are applied to each shard, once all that is committed is."""
        for shard in range(self.count):
            with self._locked(shard):
                self._apply(shard)
        return [[int(one) for one in self.current(shard).pushes] for shard in range(self.count)]

    def stop(self, reason: int) -> None:
        """Whoever claims a unit from here on is told CALM or KNOCK."""
        with self._locked(self.count):
            self._words[2] |= reason

    @property
    def alarm(self) -> int:
        """Not 0 when somebody has called all workers together."""
        return int(self._words[1])

    @alarm.setter
    def alarm(self, value: int) -> None:
        self._words[1] = value

    # For the server of other hosts' workers, in one thread

    def gradient_bytes(self, shard: int, narrow: bool = False) -> int:
        outline = self.outlines[shard]
        return outline.narrow_size if narrow else outline.gradient_size

    def parameter_bytes(self, shard: int) -> int:
        return self.outlines[shard].values_end - self.outlines[shard].values

    def apply(self, shard: int, push: Push, data: memoryview | bytes, narrow: bool) -> int:
        """Applies a push that came over the wire; returns the version right after it."""
        slot = self.clients + shard
        gradient = self._slots[slot].gradients[shard]
        source = tensor_of(data)
        if narrow:
            gradient.widen(source)
        else:
            gradient.region.copy_(source)
        seen = [0] * self.count
        seen[shard] = push.seen
        self._slots[slot].write(push, seen)
        self._committed[slot] += 1
        with self._locked(shard):
            self._apply(shard)
            return self.applied(shard, push.member)

    def snapshot(self, shard: int, member: int | None) -> tuple[int, memoryview]:
        """A copy of the shard's parameters, and their version."""
        copies: list[Tensor] = []
        version = self.pull(shard, member, lambda now: copies.append(now.values.clone()))
        return version, memoryview(copies[0].numpy())  # type: ignore[arg-type]

    def buffers(self) -> bytes:
        """What this host's workers have published, one after the other."""
        return b"".join(one.numpy().tobytes() for one in self.published)


class _Room:
    """Places in a file, one after the other."""

    def __init__(self, at: int):
        self.at = at

    def take(self, size: int) -> int:
        place = self.at
        self.at += aligned(size)
        return place


class _Slot:
    """Where one pusher's push lies until it is applied."""

    def __init__(self, head: Tensor, shards: int, settings: int, gradients: dict[int, Gradient]):
        self.gradients = gradients
        # Member, clock, after, damped, bytes of `missing`, versions seen, settings.
        self._form = struct.Struct(f"<qqdqq{shards}q{settings}d")
        self._shards = shards
        self._head = memoryview(head.numpy())  # type: ignore[arg-type]

    @staticmethod
    def size(shards: int, settings: int, parameters: int) -> int:
        return 8 * (5 + shards + settings) + (parameters + 7) // 8

    def write(self, push: Push, seen: Sequence[int]) -> None:
        missing, end = push.missing, self._form.size
        self._form.pack_into(
            self._head,
            0,
            push.member,
            push.clock,
            push.after,
            push.damped,
            len(missing),
            *seen,
            *push.settings,
        )
        self._head[end : end + len(missing)] = missing

    def read(self, shard: int) -> Push:
        member, clock, after, damped, missing, *rest = self._form.unpack_from(self._head)
        end, settings = self._form.size, tuple(rest[self._shards :])
        bits = bytes(self._head[end : end + missing])
        return Push(member, clock, rest[shard], after, bool(damped), settings, bits)


def _make_room(fd: int, base: int, size: int) -> None:
    """Takes the memory now. The kernel would rather kill somebody than say that there is not enough."""
    free = 0
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as lines:
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    new = base + size - min(os.fstat(fd).st_size, base + size)
    if free and new > free:
        raise OSError(
            errno.ENOMEM,
            f"this host's shards need {new / 2**20:,.0f} MB of memory (twice the parameters and the "
            f"optimizer's state, and a gradient for each worker), and {free / 2**20:,.0f} MB are available",
        )
    os.posix_fallocate(fd, base, size)


def tensor_of(data: memoryview | bytes | bytearray) -> Tensor:
    """The bytes as a tensor, not copied."""
    return torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)


def make_file() -> str:
    """A path under which this host's processes can open a new memfd of this process."""
    if not hasattr(os, "memfd_create"):
        raise OSError("asp and ssp keep their shards in a memfd, which only Linux has")
    fd = os.memfd_create("offbeat-shards", os.MFD_CLOEXEC)
    path = f"/proc/{os.getpid()}/fd/{fd}"
    _files[path] = fd
    return path


def drop_file(path: str) -> None:
    """This process lets go of a file that it has made."""
    os.close(_files.pop(path))


def open_file(path: str) -> int:
    """A descriptor of the file, one per process: closing any would drop the process's locks."""
    if path not in _files:
        _files[path] = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    return _files[path]


def end_of(path: str) -> int:
    """Where a file is still free, as far as this process has used it: a job may keep shards several times."""
    return _ends.get(path, -(-os.fstat(open_file(path)).st_size // PAGE) * PAGE)
