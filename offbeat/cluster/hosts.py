"""The hosts of a job meet in node 0's store: who is there, how many workers each brings, who failed.

Keys, all under "launcher/":

job          node 0's: settings that all hosts must share, the run's directory and id
host/<r>     node r is here: {"workers", "host", "id"}
world        node 0's: [[host, workers], …] in node order; once it is there, the job starts
failed       the first failure anywhere: {"node", "message", "detail"}
refused      why a host could not take part (node 0 says so too)
beat/<r>     counts up while node r's launcher lives
done/<r>     node r's workers have all ended
ended        counts those that ended well
left/<r>     node r's launcher needs the store no more
later        how many hosts have come while the job ran (--max): they are the nodes from nnodes on
ranks        how many workers they have brought
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from offbeat.cluster.spec import LaunchError, LaunchSpec
from offbeat.cluster.watch import StoreLost as StoreLost
from offbeat.cluster.watch import Watch, first_line


@dataclass(frozen=True)
class World:
    """Who took part in the beginning: `hosts[r]` is node r's name and `workers[r]` its number of workers.
    `first` is the first rank of this host."""

    hosts: tuple[str, ...]
    workers: tuple[int, ...]
    out: Path
    run_id: str
    first: int

    @property
    def size(self) -> int:
        return sum(self.workers)


class Hosts:
    """This host's seat at the store. Node 0 opens the store, the others connect to it.

    `idle` is called while waiting; it may raise to give up."""

    def __init__(self, spec: LaunchSpec, idle: Callable[[], None], note: Callable[[str], None]):
        self.spec, self._idle, self._note = spec, idle, note
        self.name = socket.gethostname()
        self._id = uuid.uuid4().hex
        self._watch: Watch | None = None
        self._registered = False
        host, port = spec.address
        # The same command again, while the job runs: its workers come to those that are there.
        self._comes_later = spec.maximum is not None and spec.node_rank == 0 and _reachable(host, port, 2.0)
        if spec.node_rank == 0 and not self._comes_later:
            self.store, port = _open(host, port, spec.several, spec.endpoint)
            if spec.several and not _reachable(host, port):
                raise LaunchError(
                    f"--rdzv-endpoint {spec.endpoint}: node 0 hosts the rendezvous, so {host} must be an "
                    f"address of this machine ({self.name}), which cannot reach itself there"
                )
        else:
            self.store = self._join(host, port)
        self.address = (host, port)

    # Meeting

    def meet(self, directory: Callable[[], Path]) -> World:
        """Waits until every host is there. Node 0 calls `directory` for the run's directory.

        Raises LaunchError when a host does not come, does not fit, or has failed."""
        spec, end = self.spec, time.monotonic() + self.spec.rdzv_timeout
        try:
            if spec.node_rank == 0 and not self._comes_later:
                job = {**self._shared(), "out": str(directory()), "id": f"offbeat-{self._id[:12]}"}
                self.store.set("launcher/job", json.dumps(job))
            else:
                while not self.store.check(["launcher/job"]):
                    self._rest(end, "node 0's launcher does not begin")
                job = json.loads(self.store.get("launcher/job"))
                self._compare(job)
            if spec.maximum is not None and spec.node_rank > 0 and self.store.check(["launcher/world"]):
                self._comes_later = True  # its seat was another process's, whose workers have gone
            if not self._comes_later:
                self._register()
            while not self.store.check(["launcher/world"]):
                missing = self._missing()
                if not missing and spec.node_rank == 0 and not self._comes_later:
                    rows = [json.loads(self.store.get(f"launcher/host/{r}")) for r in range(spec.nnodes)]
                    self.store.set("launcher/world", json.dumps([[r["host"], r["workers"]] for r in rows]))
                    break
                self._rest(end, self._absence(missing))
            rows = json.loads(self.store.get("launcher/world"))
            first = sum(row[1] for row in rows[: spec.node_rank])
            if self._comes_later:
                first = self._come_later(sum(row[1] for row in rows))
        except (RuntimeError, OSError) as error:
            raise LaunchError(f"the rendezvous at {self._where} was lost: {first_line(error)}") from None
        hosts, workers = tuple(row[0] for row in rows), tuple(row[1] for row in rows)
        spec = self.spec
        if spec.several:
            self._watch = Watch(self._client(*self.address, patience=spec.silence), spec, workers, self._note)
        return World(hosts, workers, Path(job["out"]), job["id"], first)

    def _come_later(self, began: int) -> int:
        """Takes a place in a job that runs; `began` workers were there in the beginning. Returns the first
        rank of this host's."""
        spec, maximum = self.spec, self.spec.maximum or 0
        first = began + int(self.store.add("launcher/ranks", spec.workers)) - spec.workers
        if first + spec.workers > maximum:
            self.store.add("launcher/ranks", -spec.workers)
            raise LaunchError(
                f"-n {spec.workers}: the job at {spec.endpoint} has had {first} workers, and there may be "
                f"{maximum} (--max)"
            )
        node = spec.nnodes + int(self.store.add("launcher/later", 1)) - 1
        self.spec = replace(spec, nnodes=node + 1, node_rank=node)
        self._note(f"comes to the job at {spec.endpoint} as {_ranks(first, spec.workers)}")
        self._register(first)
        return first

    def _register(self, first: int | None = None) -> None:
        me = {"workers": self.spec.workers, "host": self.name, "id": self._id, "first": first}
        key = f"launcher/host/{self.spec.node_rank}"
        there = json.loads(self.store.compare_set(key, "", json.dumps(me)))
        if there["id"] != self._id:
            raise self._refusal(
                f"--node-rank {self.spec.node_rank} is taken by {there['host']}; every host needs its own"
            )
        self._registered = True

    def _shared(self) -> dict[str, Any]:
        spec = self.spec
        return {
            "--nnodes": spec.nnodes,
            "SCRIPT": Path(spec.script).name,
            "--plan": spec.plan,
            "--total": spec.total,
            "--seed": spec.seed,
            "--wire": spec.wire,
            "--on-diverge": spec.on_diverge,
            "--stragglers": spec.stragglers,
            "--min": spec.minimum,
            "--max": spec.maximum,
            "--heartbeat": spec.heartbeat if spec.minimum is not None else None,
        }

    def _compare(self, job: dict[str, Any]) -> None:
        for name, mine in self._shared().items():
            if job.get(name) != mine:
                there, here = (("none" if v is None else repr(v)) for v in (job.get(name), mine))
                raise self._refusal(
                    f"{name} differs between the hosts: {here} on node {self.spec.node_rank} ({self.name}), "
                    f"{there} on node 0"
                )

    def _refusal(self, message: str) -> LaunchError:
        with contextlib.suppress(RuntimeError):
            self.store.set("launcher/refused", f"a host was turned away: {message}")
        return LaunchError(message)

    def _missing(self) -> list[int]:
        return [r for r in range(self.spec.nnodes) if not self.store.check([f"launcher/host/{r}"])]

    def _absence(self, missing: list[int]) -> str:
        spec = self.spec
        if not missing:
            return "node 0 does not begin"
        plan = f' --plan "{spec.plan}"' if spec.plan else ""
        given = {
            "total": spec.total,
            "seed": spec.seed,
            "wire": spec.wire,
            "on-diverge": spec.on_diverge,
            "stragglers": spec.stragglers,
            "min": spec.minimum,
            "max": spec.maximum,
        }
        more = "".join(f" --{name} {value}" for name, value in given.items() if value is not None)
        # Behind "--" every word is the script's.
        words = shlex.join([spec.script, *(["--", *spec.args] if spec.args else [])])
        command = (
            f"offbeat run --nnodes {spec.nnodes} --node-rank {missing[0]} --rdzv-endpoint {spec.endpoint} "
            f"-n {spec.workers}{plan}{more} {words}"
        )
        which = f"node rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        return f"{which} of {spec.nnodes} did not come; start there: {command}"

    def _rest(self, end: float, why: str) -> None:
        """A pause while waiting for others; the one place where a rendezvous gives up."""
        self._idle()
        if self.store.check(["launcher/refused"]) and self.spec.node_rank == 0:
            self._note(self.store.get("launcher/refused").decode())
            self.store.delete_key("launcher/refused")
        if self.store.check(["launcher/failed"]):
            raise LaunchError(json.loads(self.store.get("launcher/failed"))["message"])
        if time.monotonic() > end:
            message = f"after {self.spec.rdzv_timeout:g} s (--rdzv-timeout), {why}"
            self.fail(message)
            raise LaunchError(message)
        time.sleep(0.1)

    # During the run

    def fail(self, message: str, detail: Sequence[str] = ()) -> None:
        """Tells all hosts that the job is over, and the failed worker's last lines; the first is kept.
        A host that was turned away has no say."""
        if not self._registered and (self.spec.node_rank != 0 or self._comes_later):
            return
        value = {"node": self.spec.node_rank, "message": message, "detail": list(detail)}
        self._tell(lambda: self.store.compare_set("launcher/failed", "", json.dumps(value)))

    @property
    def lost(self) -> bool:
        """Whether this host has lost the others, or they have given it up."""
        return self._watch is not None and self._watch.lost is not None

    def trouble(self) -> dict[str, Any] | None:
        """What went wrong on another host, if anything (the record "failed"). Raises StoreLost."""
        return None if self._watch is None else self._watch.trouble()

    def tell_death(self, rank: int, attempt: int) -> None:
        """Tells the workers of all hosts that this process of a rank is gone (see `roll`)."""
        self.store.set(f"offbeat/dead/{rank}/{attempt}", "1")
        self.store.set(f"offbeat/attempt/{rank}", str(attempt + 1))
        self.store.add("offbeat/deaths", 1)

    def retire(self, workers: Mapping[int, int]) -> None:
        """This host's part is over, the others go on without its workers (ranks, with their attempts)."""

        def tell() -> None:
            self.store.set(f"launcher/lost/{self.spec.node_rank}", "1")
            for rank, attempt in workers.items():
                self.tell_death(rank, attempt)

        self._tell(tell, though_lost=True)

    def done(self, count: int) -> None:
        """This host's workers have all ended: well, or without being started again. count: the former."""
        self.store.add("launcher/ended", count)
        self.store.set(f"launcher/done/{self.spec.node_rank}", "1")

    def ended(self) -> int:
        """How many workers have ended well, on all hosts that are done."""
        return int(self.store.add("launcher/ended", 0))

    def all_done(self) -> bool:
        """Whether those of every host have. Raises StoreLost."""
        if self._watch is None:
            return True
        self._watch.trouble()
        return self._watch.all_done

    def leave(self) -> None:
        """Nothing more to say. Node 0 keeps the store until the others have left, for a bounded time."""
        spec = self.spec
        if spec.several and self._registered:  # one turned away has no seat to give up
            self._tell(lambda: self.store.set(f"launcher/left/{spec.node_rank}", "1"))
            if spec.node_rank == 0:
                with contextlib.suppress(RuntimeError):
                    self._outlast(time.monotonic() + spec.grace + 5)
        if self._watch is not None:
            self._watch.stop()

    def _tell(self, action: Callable[[], object], patience: float = 3.0, though_lost: bool = False) -> None:
        """Last words: a store that has gone, or is cut off without a word, must not hold up the end."""

        def speak() -> None:
            with contextlib.suppress(RuntimeError):
                action()

        if self._watch is None or not self._watch.lost or though_lost:
            thread = threading.Thread(target=speak, name="offbeat-tell", daemon=True)
            thread.start()
            thread.join(patience)

    def _outlast(self, end: float) -> None:
        while time.monotonic() < end:
            count = self.spec.nnodes + int(self.store.add("launcher/later", 0))
            here = [r for r in range(count) if self.store.check([f"launcher/host/{r}"])]
            if all(self.store.check([f"launcher/left/{r}"]) for r in here):
                return
            time.sleep(0.05)

    # Connections

    @property
    def _where(self) -> str:
        return self.spec.endpoint or "this host"

    def _join(self, host: str, port: int) -> TCPStore:
        end = time.monotonic() + self.spec.rdzv_timeout
        try:
            socket.getaddrinfo(host, port)
        except OSError:
            raise LaunchError(f"--rdzv-endpoint {self.spec.endpoint}: no host is named {host}") from None
        while not _reachable(host, port, 2.0):
            self._idle()
            if time.monotonic() > end:
                raise LaunchError(
                    f"after {self.spec.rdzv_timeout:g} s (--rdzv-timeout), nothing answers at "
                    f"{self.spec.endpoint}; is node 0's launcher running there?"
                )
            time.sleep(0.2)
        return self._client(host, port, patience=min(self.spec.rdzv_timeout, self.spec.host_timeout))

    def _client(self, host: str, port: int, patience: float) -> TCPStore:
        """A connection whose calls wait at most `patience` seconds. It is made in a thread, because a
        stranger who listens at that port and says nothing would hold it for ever."""
        made: list[TCPStore | Exception] = []

        def connect() -> None:
            try:
                made.append(
                    TCPStore(
                        host,
                        port,
                        is_master=False,
                        wait_for_workers=False,
                        timeout=timedelta(seconds=patience),
                    )
                )
            except (RuntimeError, ValueError) as error:
                made.append(error)

        thread = threading.Thread(target=connect, name="offbeat-connect", daemon=True)
        thread.start()
        end = time.monotonic() + patience
        while thread.is_alive() and time.monotonic() < end:
            self._idle()
            thread.join(0.1)
        if not made or isinstance(made[0], Exception):
            raise LaunchError(
                f"--rdzv-endpoint {self.spec.endpoint}: what listens there is no launcher of offbeat"
            )
        return made[0]


def _ranks(first: int, count: int) -> str:
    return f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1}"


def _open(host: str, port: int, everywhere: bool, endpoint: str | None) -> tuple[TCPStore, int]:
    """The store on a socket of ours: an address in use is told at once, and on a single host nobody
    else can connect."""
    try:
        listener = _listen_at(None if everywhere else host, port)
    except socket.gaierror:
        raise LaunchError(f"--rdzv-endpoint {endpoint}: no host is named {host}") from None
    except OSError as error:
        reason = (
            "is in use"
            if error.errno == errno.EADDRINUSE
            else f"cannot be listened at: {os.strerror(error.errno or 0)}"
        )
        raise LaunchError(f"--rdzv-endpoint {endpoint}: port {port} of this machine {reason}") from None
    port = listener.getsockname()[1]
    try:
        store = TCPStore(
            host if not everywhere else "localhost",
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=30),
            master_listen_fd=listener.detach(),
        )
    except RuntimeError as error:
        raise LaunchError(f"the rendezvous cannot be opened at port {port}: {first_line(error)}") from None
    return store, port


def _listen_at(host: str | None, port: int) -> socket.socket:
    if host is not None:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=512)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("::", port), family=socket.AF_INET6, backlog=512, dualstack_ipv6=True
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    return socket.create_server(("0.0.0.0", port), backlog=512)


def _reachable(host: str, port: int, timeout: float = 5.0) -> bool:
    try:
        with socket.create_connection((host, port), timeout=timeout):
            return True
    except OSError:
        return False
