"""Process groups of one membership epoch.

No process group outlives its members: whenever the members change, a new epoch builds its own groups
over a prefix of the job's store, and the old one is closed.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import re
import socket
import stat
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from offbeat.cluster.sizes import IN_FLIGHT
from offbeat.exits import GRACE
from offbeat.policies.lookout import PROBE
from offbeat.site import now

# A forked child (a data loader's process) has none of a group's threads: collecting one there would hang it.
os.register_at_fork(after_in_child=gc.freeze)

# Liveness is not judged by collectives: a straggler may take its time (DESIGN section 5).
PATIENCE = timedelta(hours=12)
FORMING = timedelta(seconds=20)
"""For the members to connect where one may have died meanwhile."""
THREADS = 2
"""Of a gloo group for what goes one after the other; torch's own default."""
LOOK = 0.02
"""Seconds between two looks whether one has."""


_retired: SimpleQueue[dict[str, Any]] = SimpleQueue()
_burying = 0  # the process whose thread does it


class PeerLost(RuntimeError):
    """A collective failed because a worker went away."""


class Work:
    """A collective under way. `wait` returns when its tensor holds the result (on CUDA: when the
    current stream will see it), or raises `PeerLost`."""

    def __init__(self, epoch: Epoch, work: Any, name: str):
        self._epoch, self._work, self._name = epoch, work, name
        self.ended: float | None = None  # when it was over, if somebody has asked

    def note_end(self) -> None:
        """`ended` is to be known."""
        if self._work is None:
            self.ended = now()
        elif not self._epoch.signals:
            self.look()
        else:
            self._work.get_future().add_done_callback(self._end)

    def _end(self, future: Any) -> None:
        self.ended = now()

    def look(self) -> None:
        """Where a collective's end isn't told, it is as late as somebody has looked."""
        if self.ended is None and (self._work is None or self._work.is_completed()):
            self.ended = now()

    def wait(self) -> None:
        if self._work is None:
            return
        try:
            self._work.wait()
        except RuntimeError as error:
            self._epoch.close()
            raise PeerLost(
                f"a worker went away during {self._name} (members {list(self._epoch.members)}): {error}"
            ) from error
        self._work = None


class Epoch:
    """The members of one stretch of a job and the groups that join them.

    Three groups, so that an average under way never delays a gradient, and neither delays the small
    words of the control group: `control` (always gloo), `gradients` and `averages` (NCCL where `on` is a
    CUDA device, else gloo). An epoch of one member has no groups: its collectives are done at once.

    forming: how long the members may take to connect; gone: asked meanwhile, whether one of them has died.
    Raises PeerLost when they don't come together.
    """

    def __init__(
        self,
        number: int,
        members: Sequence[int],
        rank: int,
        store: Store | None,
        on: torch.device,
        forming: timedelta = PATIENCE,
        gone: Callable[[], bool] | None = None,
    ):
        self.number, self.members, self.rank = number, tuple(members), rank
        self.index, self.size = self.members.index(rank), len(self.members)
        self._groups: dict[str, Any] = {}
        self._sockets: set[tuple[int, int]] = set()
        self.closed = False  # by `close`: whoever waits for a member in whatever way must learn of it
        if self.size == 1:
            return
        if store is None:
            raise ValueError(f"{self.size} members need a store to meet in")
        _bury()
        before = _sockets()
        own: set[tuple[int, int]] = set()
        if gone is not None:  # who gives up leaves a thread that waits there; a connection serves one call
            store = store.clone()  # type: ignore[attr-defined]
            own = _sockets() - before
        try:
            for name in ("control", "gradients", "averages"):
                place = PrefixStore(f"epoch{number}/{name}", store)
                where = torch.device("cpu") if name == "control" else on
                threads = IN_FLIGHT if name == "gradients" else THREADS
                make = partial(_group, place, self.index, self.size, where, threads, forming)
                self._groups[name] = _unless(gone, make)
        except RuntimeError as error:
            raise PeerLost(f"the members {list(members)} did not come together: {error}") from error
        finally:
            self._sockets = own | _joined(before)
            if len(self._groups) < 3:
                self.close()

    def __del__(self) -> None:
        """A gloo group may wait for ever where it is collected while others have gone: not in a thread that
        has something else to do."""
        if groups := self.__dict__.pop("_groups", None):
            _retired.put(groups)

    @property
    def signals(self) -> bool:
        """Whether an average's end is told at once (NCCL tells when it was enqueued)."""
        return not self._groups or not self._mixed("averages")

    def _of(self, group: str, tensor: torch.Tensor) -> Any:
        """NCCL moves nothing that lies in the CPU's memory: the control group does."""
        return self._groups["control" if tensor.device.type == "cpu" and self._mixed(group) else group]

    def _mixed(self, group: str) -> bool:
        return not isinstance(self._groups[group], ProcessGroupGloo)

    def _start(self, what: str, group: str, tensor: torch.Tensor, start: Any) -> Work:
        if self.size == 1:
            return Work(self, None, what)
        try:
            return Work(self, start(self._of(group, tensor)), what)
        except RuntimeError as error:
            self.close()
            raise PeerLost(f"a worker went away before {what}: {error}") from error

    def sum(self, tensor: torch.Tensor, group: str, passed: float = 1.0) -> Work:
        """Starts summing `tensor` (contiguous) over the members, in place. passed: the share of the running
        backward that is over, by which an engine in virtual time knows when this was."""
        return self._start(f"a sum of {group}", group, tensor, lambda g: g.allreduce([tensor]))

    def broadcast(self, tensor: torch.Tensor, source: int, group: str = "averages") -> Work:
        """Starts copying `tensor` from the member with rank `source` to all, in place."""
        options = torch.distributed.BroadcastOptions()
        options.rootRank = self.members.index(source)
        return self._start("a broadcast", group, tensor, lambda g: g.broadcast([tensor], options))

    def gather(self, row: torch.Tensor) -> tuple[torch.Tensor, Work]:
        """Starts gathering one row of bytes (on the CPU, the same length everywhere) from each member;
        the result is [size, len(row)], in the order of `members`."""
        rows = torch.empty((self.size, row.numel()), dtype=row.dtype)
        if self.size == 1:
            rows[0] = row
        work = self._start("an exchange", "control", row, lambda g: g._allgather_base(rows.view(-1), row))
        return rows, work

    def probe(self, shifts: Sequence[int]) -> list[list[float]]:
        """Every member sends a message to the one `shift` places after it, which sends it back, all at once,
        for each shift in turn. Collective; returns the seconds from sending to having it back, by member and
        shift."""
        took = []
        for shift in shifts:
            self._tell(0.0)  # so that all begin together
            took.append(self._echo(shift))
        return [list(row) for row in zip(*(self._tell(seconds) for seconds in took), strict=True)]

    def _tell(self, value: float) -> list[float]:
        """Every member's number, once all are here."""
        rows, work = self.gather(torch.tensor([value], dtype=torch.float64).view(torch.uint8))
        work.wait()
        return [float(row.view(torch.float64)) for row in rows]

    def _echo(self, shift: int, size: int = PROBE) -> float:
        """This member's part of a probe: seconds until its message of `size` bytes is back."""
        mine, others, back = torch.empty(3, size, dtype=torch.uint8)
        after, before = (self.index + shift) % self.size, (self.index - shift) % self.size
        there, again = 2 * shift, 2 * shift + 1  # tags

        def send(tensor: torch.Tensor, to: int, tag: int) -> Work:
            return self._start("a probe", "control", tensor, lambda g: g.send([tensor], to, tag))

        def take(tensor: torch.Tensor, source: int, tag: int) -> Work:
            return self._start("a probe", "control", tensor, lambda g: g.recv([tensor], source, tag))

        begun = now()
        sent = [send(mine, after, there)]
        take(others, before, there).wait()
        sent.append(send(others, before, again))
        take(back, after, again).wait()
        seconds = now() - begun
        for work in sent:
            work.wait()
        return seconds

    def check(self) -> None:
        """Raises PeerLost when a member has gone: for workers that wait for each other in other ways."""
        if not self.closed and any(_closed(fd, inode) for fd, inode in self._sockets):
            self.close()
        if self.closed:
            raise PeerLost(f"a worker went away (members {list(self.members)})")

    def close(self) -> None:
        """Shuts the epoch's connections, so that every member waiting in one of its collectives learns
        at once that the epoch is over (gloo tells only the neighbours of a worker that died)."""
        self.closed = True
        for fd, inode in self._sockets:
            # A descriptor that gloo has closed may be somebody else's by now.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                if os.fstat(connection.fileno()).st_ino == inode:
                    connection.shutdown(socket.SHUT_RDWR)
        self._sockets = set()
        for group in self._groups.values():
            if not isinstance(group, ProcessGroupGloo):
                with contextlib.suppress(RuntimeError):
                    group.abort()


def _bury() -> None:
    """Begins the thread in which epochs' groups are collected."""
    global _burying
    if _burying == os.getpid():
        return
    _burying = os.getpid()

    def work() -> None:
        while groups := _retired.get():
            groups.clear()
            del groups

    def stop() -> None:
        _retired.put({})
        thread.join(GRACE)

    thread = threading.Thread(target=work, name="offbeat-burial", daemon=True)
    thread.start()
    atexit.register(stop)


def _closed(fd: int, inode: int) -> bool:
    """Whether the connection is over: its other end closed it, or gloo has, and perhaps somebody else has
    the descriptor now."""
    try:
        with socket.socket(fileno=os.dup(fd)) as connection:
            if os.fstat(connection.fileno()).st_ino != inode:
                return True
            return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except (BlockingIOError, InterruptedError):
        return False
    except OSError:
        return True


def _unless(gone: Callable[[], bool] | None, make: Callable[[], Any]) -> Any:
    """What `make` makes, which may take long. As soon as `gone`, raises PeerLost; then a thread is left that
    waits until its time is up, or its connections are closed."""
    if gone is None:
        return make()
    found: list[Any] = []
    failed: list[RuntimeError] = []

    def run() -> None:
        try:
            found.append(make())
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="offbeat-forming", daemon=True)
    thread.start()
    while thread.is_alive():
        if gone():
            raise PeerLost("a worker has died meanwhile")
        thread.join(LOOK)
    if failed:
        raise failed[0]
    return found[0]


def _group(
    store: Store, index: int, size: int, device: torch.device, threads: int, forming: timedelta
) -> Any:
    """threads: of a gloo group; as many of its collectives are under way at a time."""
    if device.type == "cuda":
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = PATIENCE
        return ProcessGroupNCCL(store, index, size, options)
    # What torch itself chooses, but for the threads.
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    devices = [ProcessGroupGloo.create_device(interface=name) for name in names]
    chosen = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    chosen._devices = devices or [ProcessGroupGloo.create_default_device()]
    chosen._threads, chosen._timeout = threads, forming
    group = ProcessGroupGloo(store, index, size, chosen)
    if forming != PATIENCE:
        group._set_default_timeout(PATIENCE)
    return group


def _sockets() -> set[tuple[int, int]]:
    """TCP sockets of this process, listening or connected, as pairs of descriptor and inode."""
    found = set()
    for name in _descriptors():
        with contextlib.suppress(OSError):
            fd = int(name)
            status = os.fstat(fd)
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(fd)) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        found.add((fd, status.st_ino))
    return found


def _joined(before: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """The connections that gloo's groups have made since: gloo watches them in one event loop together with
    the new door at which it lets others in. What the user's threads have opened meanwhile is theirs. Where
    no such loop is seen, all that are new."""
    new = _sockets() - before
    connections = {one for one in new if _connected(one[0])}
    found: set[tuple[int, int]] = set()
    for watched in map(_watched, _descriptors()):
        if watched & (new - connections):
            found |= watched & connections
    return found or connections


def _watched(name: str) -> set[tuple[int, int]]:
    """What an event loop watches (epoll; nothing for other descriptors), as pairs of descriptor and inode."""
    try:
        if "eventpoll" not in os.readlink(f"/proc/self/fd/{name}"):
            return set()
        with open(f"/proc/self/fdinfo/{name}") as file:
            found = re.findall(r"^tfd:\s*(\d+).* ino:([0-9a-f]+)", file.read(), re.MULTILINE)
    except OSError:
        return set()
    return {(int(fd), int(inode, 16)) for fd, inode in found}


def _connected(fd: int) -> bool:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
        connection.getpeername()
        return True
    return False


def _descriptors() -> list[str]:
    return os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
