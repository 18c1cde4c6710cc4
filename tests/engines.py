"""Engines that the contract suite runs over: `run(workers, function, *args)` gives each rank's return value.

A function is the user's script: it lies in a module, builds what it needs, and its value can be pickled.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

from offbeat import journal
from offbeat.audit import Audit, audit
from tests.forks import context

CLUSTER = Path(__file__).with_name("cluster.toml")
PATIENCE = 60.0
"""Seconds after which a run counts as hung."""


class RemoteError(Exception):
    """What a worker's function raised: its rank, the exception's type by name, its text."""

    def __init__(self, rank: int, type: str, message: str, trace: str = ""):
        super().__init__(rank, type, message, trace)
        self.rank, self.type, self.message, self.trace = rank, type, message, trace

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.type}: {self.message}\n{self.trace}"


@dataclass(frozen=True)
class Died:
    """A worker's process ended without an answer; a negative code is the signal's number."""

    rank: int
    code: int | None


class Hang(AssertionError):
    """Workers that did not come back in time, with where they stood."""


def audit_of(out: Path) -> list[Audit]:
    """What the run's journal proves; whatever the run was about, nothing in it may be wrong."""
    path = out / "journal.jsonl"
    found = audit(journal.read(path)) if path.exists() else []
    if wrong := [line for one in found for line in one.wrong]:
        raise AssertionError("\n".join(wrong))
    return found


class RealEngine:
    """Real processes over `torch.distributed`, new ones for every run, forked from a server that has
    imported torch already (some 30 ms each), so that no run sees what another left behind."""

    def __init__(self, folder: Path):
        self._folder, self._runs = folder, 0
        self.out = folder

    def run(
        self,
        workers: int,
        function: Callable[..., Any],
        *args: Any,
        env: Mapping[str, str] | None = None,
        timeout: float = PATIENCE,
        hosts: Sequence[int] | None = None,
        **more: Any,
    ) -> list[Any]:
        """Every rank's value; raises the RemoteError that came first, or Hang."""
        found = self.outcomes(workers, function, *args, env=env, timeout=timeout, hosts=hosts, **more)
        errors = [one for one in found if isinstance(one, RemoteError | Died)]
        for one in sorted(errors, key=lambda one: isinstance(one, RemoteError) and one.type == "PeerLost"):
            raise one if isinstance(one, RemoteError) else AssertionError(f"{one}\n{self.log(one.rank)}")
        return found

    def outcomes(
        self,
        workers: int,
        function: Callable[..., Any],
        *args: Any,
        env: Mapping[str, str] | None = None,
        timeout: float = PATIENCE,
        hosts: Sequence[int] | None = None,
        minimum: int | None = None,
        later: int = 0,
    ) -> list[Any]:
        """Every rank's value, or its RemoteError, or Died. hosts: on which of several hosts each rank is.
        minimum: as many workers may go on alone; one that is killed is started again. later: so many more
        come to a job that was begun without them."""
        from torch.distributed import TCPStore

        self._runs += 1
        self.out = Path((env or {}).get("OFFBEAT_OUT") or self._folder / f"run{self._runs}")
        self.out.mkdir(parents=True, exist_ok=True)
        store = TCPStore(
            "127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout)
        )
        job = pickle.dumps((function, args))
        processes: list[Any] = [None] * (workers + later)
        pipes: list[Any] = [None] * (workers + later)

        def start(rank: int, attempt: int) -> None:
            mine, theirs = context.Pipe()
            place = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(workers),
                "LOCAL_WORLD_SIZE": str(workers),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "OMP_NUM_THREADS": "1",
                "OFFBEAT_OUT": str(self.out),
                "GROUP_RANK": str(hosts[rank] if hosts else 0),
                **({} if minimum is None else {"OFFBEAT_MIN": str(minimum)}),
                **({"OFFBEAT_MAX": str(workers + later)} if later else {}),
                "TORCHELASTIC_RESTART_COUNT": str(attempt),
                **(env or {}),
            }
            log = self.out / f"rank{rank}.log"
            process = context.Process(target=_work, args=(theirs, rank, job, place, str(log)), daemon=True)
            process.start()
            theirs.close()
            processes[rank], pipes[rank] = process, mine

        attempts = [0] * (workers + later)

        def restart(rank: int) -> bool:
            """What a launcher does."""
            if minimum is None:
                return False
            store.set(f"offbeat/dead/{rank}/{attempts[rank]}", "1")
            store.add("offbeat/deaths", 1)
            attempts[rank] += 1
            start(rank, attempts[rank])
            return True

        for rank in range(workers + later):
            start(rank, 0)
        try:
            found = self._gather(processes, pipes, timeout, restart)
        finally:
            for process in processes:
                process.join(0.0 if process.exitcode is None and not process.is_alive() else 5.0)
                _kill(process)
        audit_of(self.out)
        return found

    def _gather(
        self,
        processes: list[Any],
        pipes: list[Any],
        timeout: float,
        restart: Callable[[int], bool] = lambda rank: False,
    ) -> list[Any]:
        found: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(found) < len(pipes):
            waiting = {pipes[rank]: rank for rank in range(len(pipes)) if rank not in found}
            ready = connection.wait(list(waiting), max(deadline - time.monotonic(), 0))
            if not ready:
                raise Hang(self._stuck(processes, sorted(waiting.values()), found, timeout))
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    found[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    processes[rank].join(5)
                    code = processes[rank].exitcode
                    if not (code and restart(rank)):
                        found[rank] = Died(rank, code)
        return [found[rank] for rank in range(len(pipes))]

    def _stuck(self, processes: list[Any], ranks: list[int], found: dict[int, Any], timeout: float) -> str:
        for rank in ranks:
            with contextlib.suppress(OSError):
                os.kill(processes[rank].pid, signal.SIGUSR1)  # they write down where they stand
        time.sleep(0.3)
        for rank in ranks:
            _kill(processes[rank])
        others = "".join(f"\n{one}" for one in found.values() if isinstance(one, RemoteError | Died))
        logs = "".join(f"\nrank {rank}:\n{self.log(rank)[-3000:]}" for rank in ranks)
        return f"ranks {ranks} did not come back within {timeout:g} s{others}{logs}"

    def log(self, rank: int) -> str:
        """What a worker of the last run wrote on stdout and stderr."""
        path = self.out / f"rank{rank}.log"
        return path.read_text(errors="replace") if path.exists() else ""


def _kill(process: Any) -> None:
    """Ends it, and what it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.is_alive():
        process.kill()
    process.join()


def _work(pipe: Any, rank: int, job: bytes, place: Mapping[str, str], log: str) -> None:
    """A worker's whole life, its end included: what a script's interpreter does at exit is done here."""
    os.setpgrp()
    with open(log, "ab", buffering=0) as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    os.environ.update(place)
    import torch

    import offbeat.job

    offbeat.job.reset()
    torch.set_num_threads(1)
    try:
        function, args = pickle.loads(job)
        outcome = function(*args)
    except BaseException as error:
        outcome = RemoteError(rank, type(error).__name__, str(error), traceback.format_exc())
        if isinstance(error, SystemExit) and not error.code:
            outcome = Died(rank, 0)
        sys.excepthook(type(error), error, error.__traceback__)
    try:
        atexit._run_exitfuncs()
        answer = pickle.dumps(outcome)
    except BaseException as error:
        answer = pickle.dumps(RemoteError(rank, type(error).__name__, str(error), traceback.format_exc()))
    pipe.send_bytes(answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class VirtualEngine(RealEngine):
    """Virtual workers, all of a run in one new process; what they return and raise comes back as from
    processes of their own. cluster: a description, whose only group is everybody."""

    def __init__(self, folder: Path, cluster: Path = CLUSTER):
        super().__init__(folder)
        self._cluster = cluster

    def outcomes(
        self,
        workers: int,
        function: Callable[..., Any],
        *args: Any,
        env: Mapping[str, str] | None = None,
        timeout: float = PATIENCE,
        hosts: Sequence[int] | None = None,
        minimum: int | None = None,
        later: int = 0,
    ) -> list[Any]:
        self._runs += 1
        self.out = Path((env or {}).get("OFFBEAT_OUT") or self._folder / f"run{self._runs}")
        self.out.mkdir(parents=True, exist_ok=True)
        job = pickle.dumps((function, args))
        mine, theirs = context.Pipe()
        place = {"OMP_NUM_THREADS": "1", "OFFBEAT_OUT": str(self.out), **(env or {})}
        process = context.Process(
            target=_work_virtually,
            args=(
                *(theirs, job, place, str(self.out)),
                *(costs_of(self._cluster, list(hosts or [0] * workers)[:workers], later), minimum),
            ),
            daemon=True,
        )
        process.start()
        theirs.close()
        try:
            (found,) = self._gather([process], [mine], timeout)
        finally:
            process.join(5.0)
            _kill(process)
        if isinstance(found, RemoteError | Died):
            raise AssertionError(f"{found}\n{self.log(0)}")
        audit_of(self.out)
        return found


def _work_virtually(
    pipe: Any, job: bytes, place: Mapping[str, str], out: str, costs: Any, minimum: int | None
) -> None:
    """A virtual cluster's whole life."""
    os.setpgrp()
    with open(f"{out}/rank0.log", "ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    os.environ.update(place)
    import torch

    torch.set_num_threads(1)
    try:
        answer = [_outcome_of(ending) for ending in _run(job, out, costs, minimum)]
        sent = pickle.dumps(answer)
    except BaseException as error:
        sent = pickle.dumps(RemoteError(0, type(error).__name__, str(error), traceback.format_exc()))
    pipe.send_bytes(sent)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _run(job: bytes, out: str, costs: Any, minimum: int | None) -> list[Any]:
    from offbeat.site import here
    from offbeat.virtual.ambient import Ambient
    from offbeat.virtual.engine import Engine, Killed

    def script(rank: int) -> Any:
        function, args = pickle.loads(job)
        return function(*args)

    def kill(pid: int, number: int) -> None:
        if pid == os.getpid() and here().virtual and number == signal.SIGKILL:
            here().dying = True
            raise Killed
        ends(pid, number)

    ends, os.kill, workers = os.kill, kill, costs.workers

    def ambient(rank: int) -> Ambient:
        stream = open(f"{out}/rank{rank}.log", "a", buffering=1)  # noqa: SIM115
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(workers)}
        return Ambient(None, list(sys.argv), place, stream, stream)

    return Engine(costs, script, ambient, minimum=minimum, restart=0.2).run()


def _outcome_of(ending: Any) -> Any:
    if ending.died:
        return Died(ending.rank, -signal.SIGKILL)
    if ending.error is not None:
        trace = "".join(traceback.format_exception(ending.error))
        return RemoteError(ending.rank, type(ending.error).__name__, str(ending.error), trace)
    try:
        pickle.dumps(ending.value)
    except Exception as error:
        return RemoteError(ending.rank, type(error).__name__, str(error), traceback.format_exc())
    return ending.value


def costs_of(path: Path, hosts: Sequence[int], later: int = 0) -> Any:
    """The costs of a cluster whose ranks are on these hosts; so many come later, at once."""
    from offbeat.virtual.cluster import Join
    from offbeat.virtual.cost import Costs
    from offbeat.virtual.description import read

    cluster = read(path)
    (group,) = cluster.groups
    counts = [hosts.count(host) for host in sorted(set(hosts))]
    groups = tuple(replace(group, count=count, per_host=count) for count in counts)
    joins = (Join(0.0, later),) if later else ()
    costs = Costs(replace(cluster, groups=groups, joins=joins), seed=0)
    costs.host_of[: len(hosts)] = [sorted(set(hosts)).index(host) for host in hosts]
    return costs
