"""The launcher of one host: starts this host's workers, shows what they say, ends them together.

It outlives its workers. The rendezvous store lives in the first host's launcher, each host's shards in
memory that its launcher holds, every worker has an elastic context of its own, and what follows from a
worker's death is decided in one place, `Launcher._on_exit`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from offbeat.cluster.spec import LaunchError as LaunchError
from offbeat.cluster.spec import LaunchSpec as LaunchSpec
from offbeat.cluster.spec import forget_place, run_directory, write_place

# c10d prints a C++ stack at every failed connection; what matters is said in a line of ours. It is read
# when torch is loaded, and must not reach the workers.
_quiet = "TORCH_CPP_LOG_LEVEL" not in os.environ and "torch" not in sys.modules
if _quiet:
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
try:
    from torch.distributed.elastic.multiprocessing import SignalException

    from offbeat.cluster.hosts import Hosts, StoreLost, World
    from offbeat.cluster.memory import drop_file, make_file
    from offbeat.cluster.process import Exit, Sink, WorkerLogs, WorkerProcess, is_stopped
    from offbeat.cluster.pulse import BEATS, ENDING, SILENT, Pulses
    from offbeat.cluster.watch import first_line
finally:
    if _quiet:
        del os.environ["TORCH_CPP_LOG_LEVEL"]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Interrupted(BaseException):
    """The person, or the system, asked the launcher to end. Nothing that handles errors may handle it."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass(frozen=True)
class Outcome:
    """How this host's part of the job ended. `code` is the launcher's exit code, `message` says what
    failed and where (None if all went well), `detail` holds the last lines of the failed worker's
    standard error that the person has not seen yet."""

    code: int
    message: str | None = None
    detail: tuple[str, ...] = ()


class Launcher:
    """`start()`, then `poll()` a few times a second until it returns an `Outcome`.

        with Launcher(spec) as launcher:
            launcher.start()
            while (outcome := launcher.poll()) is None:
                time.sleep(0.05)

    While it is open in the main thread it answers SIGINT, SIGTERM, SIGHUP and SIGQUIT by stopping the
    workers, a second one by killing them. `sink` takes the workers' output, `note` lines for the person.
    """

    def __init__(self, spec: LaunchSpec, sink: Sink | None = None, note: Callable[[str], None] | None = None):
        self.spec = spec
        self.workers: dict[int, WorkerProcess] = {}
        self.world: World | None = None
        self._sink = sink or _print
        self._note = note or (lambda line: print(f"offbeat: {line}", file=sys.stderr, flush=True))
        self._hosts: Hosts | None = None
        self._shards: str | None = None
        self._signals: list[int] = []
        self._handlers: dict[int, Any] = {}
        self._reported_done = False
        self._listened = 0.0
        self._pulses: Pulses | None = None
        self._beats: dict[int, tuple[int, float]] = {}  # each process's last, and when it was new
        self._attempts: dict[int, int] = {}  # how often each rank was started again
        self._outcome: Outcome | None = None
        self._last_words: list[str] = []
        # The contexts log each failure; the person hears it once, from us.
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)

    def __enter__(self) -> Launcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._outcome is None:
            self._finish(Outcome(1, None if error is None else f"the launcher failed: {error!r}"))
        self._give_signals_back()

    @property
    def out(self) -> Path:
        """The run's directory, once `start` has returned."""
        if self.world is None:
            raise RuntimeError("the run's directory is known once the launcher has started")
        return self.world.out

    def start(self) -> None:
        """Meets the other hosts and starts this host's workers.

        Raises LaunchError when that cannot be; then no worker is left running. A signal that comes
        meanwhile is answered by the first `poll`."""
        self._take_signals()
        try:
            self._hosts = Hosts(self.spec, self._check_signals, self._note)
            self.world = self._hosts.meet(lambda: run_directory(self.spec))
            self.spec = self._hosts.spec  # one that has come later has a place of its own
            self._tell_where()
            with contextlib.suppress(OSError):  # other platforms have no such files
                self._shards = make_file()
            if self.spec.minimum is not None and self.spec.virtual is None:
                self._pulses = Pulses()
            first = self.world.first
            for local_rank in range(self.spec.workers):
                self._check_signals()
                self._start_worker(first + local_rank, local_rank)
        except Interrupted:
            return
        except (LaunchError, OSError) as error:
            problem = error if isinstance(error, LaunchError) else LaunchError(f"no start: {error}")
            self._finish(Outcome(2, str(problem)))
            raise problem from None

    def poll(self) -> Outcome | None:
        """Forwards output, looks after the workers and the other hosts. None while the job runs."""
        if self._outcome is None:
            outcome = self._look()
            if outcome is not None:
                self._finish(outcome)
        return self._outcome

    def stop(self, message: str = "stopped", code: int = 1) -> Outcome:
        """Ends the job on all hosts."""
        if self._outcome is None:
            self._finish(Outcome(code, message))
        return self._outcome or Outcome(code, message)

    # One look

    def _look(self) -> Outcome | None:
        if self._signals:
            name = signal.Signals(self._signals[0]).name
            return Outcome(128 + self._signals[0], f"stopped by {name} on {self._place()}")
        if self._pulses is not None and time.monotonic() > self._listened + self.spec.heartbeat / BEATS:
            self._listened = time.monotonic()
            self._end_the_silent()
        ended = [(worker, exit) for worker in self.workers.values() if (exit := worker.poll())]
        failed = [(worker, exit) for worker, exit in ended if exit.code]
        if failed:  # who was replaced has not ended: the next look counts anew
            return self._on_exit(failed)
        assert self._hosts is not None
        try:
            if trouble := self._hosts.trouble():
                return Outcome(1, trouble["message"], tuple(trouble["detail"]))
            if len(ended) < len(self.workers):
                return None
            if not self._reported_done:
                self._reported_done = True
                self._hosts.done(len(ended))
            if not self._hosts.all_done():
                return None
            if ended or self._hosts.ended():
                return Outcome(0)
            allowed = f"--restarts {self.spec.restarts}"
            return Outcome(1, f"no worker is left: each has died more often than {allowed} allows")
        except (StoreLost, RuntimeError) as error:
            return Outcome(
                1,
                f"node 0's launcher, at {self.spec.endpoint}, was lost during the run ({first_line(error)})",
            )

    def _on_exit(self, failed: list[tuple[WorkerProcess, Exit]]) -> Outcome | None:
        """What follows from the death of workers. One that was killed is started again, if the job can go on
        without it meanwhile; one that failed, by its script's own error, ends the job. The first to have
        failed is the cause, the others mostly miss it."""
        if self.spec.minimum is not None and all(self._replace(*pair) for pair in failed):
            return None
        failed = sorted(failed, key=lambda pair: (pair[0].missed_another(), pair[0].spoke_at()))
        worker, exit = failed[0]
        others = [f"rank {other.rank} ({after.text})" for other, after in failed[1:]]
        who = f"rank {exit.rank} on {self._place()}" if self.spec.virtual is None else "the virtual run"
        message = f"{who} failed with {exit.text}"
        if others:
            message += f"; so did {', '.join(others)}"
        self._last_words = worker.last_words()
        return Outcome(1, message, () if worker.shown else tuple(self._last_words))

    def _end_the_silent(self) -> None:
        """Kills this host's workers that give no sign of life any more: stopped, or hung for good."""
        assert self.world is not None
        assert self._pulses is not None
        now = time.monotonic()
        for rank, worker in self.workers.items():
            if worker.exit is not None:
                continue
            beat = self._pulses.last(rank - self.world.first)
            known, since = self._beats.setdefault(worker.pid, (beat, now))
            # One that has given none yet is still starting, unless it was stopped meanwhile.
            lives = beat > ENDING or is_stopped(worker.pid)
            limit = SILENT * self.spec.heartbeat if lives else self.spec.rdzv_timeout
            if beat != known:
                self._beats[worker.pid] = beat, now
            elif now - since > limit:
                silence = f"no sign of life for {now - since:.1f} s (--heartbeat {self.spec.heartbeat:g})"
                self._note(f"rank {rank} on {self._place()} has given {silence}: it is killed")
                worker.signal(signal.SIGKILL)

    def _replace(self, worker: WorkerProcess, exit: Exit) -> bool:
        """Tells the others that this worker is dead, and starts it again, unless it was so too often: then
        they go on without it. False: that may not be."""
        rank, attempt = worker.rank, self._attempts.get(worker.rank, 0)
        alone = len(self.workers) == 1 == self.spec.nnodes and self.spec.maximum is None
        if exit.code >= 0 or alone:
            return False
        assert self._hosts is not None
        assert self.world is not None
        with contextlib.suppress(RuntimeError):
            self._hosts.tell_death(rank, attempt)
        self._attempts[rank] = attempt + 1
        said = f"rank {rank} on {self._place()} died ({exit.text})"
        if attempt == self.spec.restarts:
            self._note(f"{said} and was started {attempt} times already: the others go on without it")
            del self.workers[rank]
            return True
        self._note(f"{said} and starts again ({attempt + 1} of {self.spec.restarts} times)")
        self._start_worker(rank, rank - self.world.first, attempt + 1)
        return True

    def _place(self) -> str:
        name = self._hosts.name if self._hosts else "this host"
        return f"{name} (node {self.spec.node_rank})" if self.spec.nnodes > 1 else name

    def _tell_where(self) -> None:
        """Node 0 writes down, for `offbeat ctl`, where the job can be spoken to."""
        assert self.world is not None
        assert self._hosts is not None
        if self.spec.node_rank == 0 and self.spec.virtual is None:
            with contextlib.suppress(OSError):
                write_place(self.world.out, *self._hosts.address)

    # Workers

    def _start_worker(self, rank: int, local_rank: int, attempt: int = 0) -> None:
        assert self.world is not None
        if self._pulses is not None:
            self._pulses.forget(local_rank)
        shown = self.spec.show == "all" or (self.spec.show == "first" and rank == 0)
        try:
            self.workers[rank] = WorkerProcess(
                (*self._module, self.spec.script, *self.spec.args),
                self._environment(rank, local_rank, attempt),
                WorkerLogs(self.world.out / "logs", rank, attempt),
                self._sink if shown else None,
            )
        except SignalException as signalled:
            self._signals.append(signalled.sigval)
            raise Interrupted(signalled.sigval) from None
        finally:
            self._take_signals()  # the context puts handlers of its own

    @property
    def _module(self) -> tuple[str, ...]:
        return () if self.spec.virtual is None else ("-m", "offbeat.virtual")

    def _environment(self, rank: int, local_rank: int, attempt: int) -> dict[str, str]:
        assert self.world is not None
        assert self._hosts is not None
        spec, world = self.spec, self.world
        address, port = self._hosts.address
        env = {
            "RANK": rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": world.size,
            "LOCAL_WORLD_SIZE": spec.workers,
            "GROUP_RANK": spec.node_rank,
            "GROUP_WORLD_SIZE": spec.nnodes,
            "ROLE_NAME": "default",
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": world.size,
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_RESTART_COUNT": attempt,
            "TORCHELASTIC_MAX_RESTARTS": 0 if spec.minimum is None else spec.restarts,
            "TORCHELASTIC_RUN_ID": world.run_id,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", 1),
            "OFFBEAT_OUT": world.out,
            "OFFBEAT_LAUNCHER": os.getpid(),
            "OFFBEAT_RDZV_TIMEOUT": f"{spec.rdzv_timeout:g}",
            "OFFBEAT_SPAWNED": f"{time.time():.6f}",
            "OFFBEAT_PLAN": spec.plan,
            "OFFBEAT_TOTAL": spec.total,
            "OFFBEAT_SEED": spec.seed,
            "OFFBEAT_WIRE": spec.wire,
            "OFFBEAT_ON_DIVERGE": spec.on_diverge,
            "OFFBEAT_STRAGGLERS": spec.stragglers,
            "OFFBEAT_PROFILE": spec.profile,
            "OFFBEAT_MIN": spec.minimum,
            "OFFBEAT_MAX": spec.maximum,
            "OFFBEAT_HEARTBEAT": None if spec.minimum is None else f"{spec.heartbeat:g}",
            "OFFBEAT_SHARDS": self._shards,
            "OFFBEAT_BEATS": self._pulses and self._pulses.path,
            "OFFBEAT_VIRTUAL": spec.virtual,
            "OFFBEAT_CLUSTER": spec.cluster,
            "OFFBEAT_TIMING_ONLY": spec.timing_only or None,
            "OFFBEAT_SHOW_ALL": 1 if spec.show == "all" and spec.virtual else None,
        }
        return {name: str(value) for name, value in env.items() if value is not None}

    def _finish(self, outcome: Outcome) -> None:
        """Ends what still runs here, tells the other hosts, and lets the shards and the store go."""
        self._outcome = outcome
        if self.world is not None and self.spec.node_rank == 0:
            forget_place(self.world.out)
        retires = outcome.message is not None and self._retires()
        if outcome.message is not None and self._hosts is not None and not retires:
            self._hosts.fail(outcome.message, self._last_words)
        self._end_workers()
        if retires and self._hosts is not None:
            self._hosts.retire({rank: self._attempts.get(rank, 0) for rank in self.workers})
        if self._shards is not None:
            drop_file(self._shards)
            self._shards = None
        if self._pulses is not None:
            self._pulses.close()
        if self._hosts is not None:
            self._hosts.leave()

    def _retires(self) -> bool:
        """Whether the others go on without this host: it is asked to stop, or was given up."""
        hosts, spec = self._hosts, self.spec
        may = spec.minimum is not None and spec.node_rank > 0 and self.world is not None
        return may and hosts is not None and (bool(self._signals) or hosts.lost)

    def _end_workers(self) -> None:
        signals = len(self._signals)
        left = [worker for worker in self.workers.values() if worker.poll() is None]
        for worker in left:
            worker.signal(signal.SIGTERM)
        end = time.monotonic() + self.spec.grace
        while left and time.monotonic() < end and len(self._signals) == signals:
            time.sleep(0.02)
            left = [worker for worker in left if worker.poll() is None]
        for worker in left:
            worker.reap(self.spec.grace)

    # Signals

    def _check_signals(self) -> None:
        if self._signals:
            raise Interrupted(self._signals[0])

    def _take_signals(self) -> None:
        for number in SIGNALS:
            with contextlib.suppress(ValueError):  # not the main thread: signals are somebody else's
                before = self._handlers.get(number, signal.getsignal(number))
                # What was ignored before (nohup, a shell's background job) stays ignored.
                signal.signal(number, before if before == signal.SIG_IGN else self._on_signal)
                self._handlers[number] = before

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _give_signals_back(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()


def _print(rank: int, stream: str, text: str) -> None:
    file = sys.stdout if stream == "out" else sys.stderr
    file.write(text)
    file.flush()
