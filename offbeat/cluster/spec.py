"""What a launcher is asked to do, checked before anything is started. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Show = Literal["none", "first", "all"]
"""Whose output the person sees: nobody's, rank 0's, or every rank's with its number before each line."""

WIRES = ("bf16", "fp32")
ON_DIVERGE = ("raise", "rollback", "ignore")

HOST_SILENT = 5
"""Heartbeat intervals without a sign of life after which a host is given up, in a job that survives that."""

_ENDPOINT = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.%]+)\]|(?P<host>[^\s:\[\]/]+)):(?P<port>[0-9]{1,5})")


class LaunchError(ValueError):
    """A job that cannot be started; the message is one line for a person, and nothing was started."""


@dataclass(frozen=True)
class LaunchSpec:
    """One host's part of a job.

    `workers` is the number of processes on this host; hosts may differ. `endpoint` is "host:port" of node
    0's store, needed with several hosts. `plan`, `total` (units), `seed` and `wire` override the script's
    and must be the same on all hosts; so must `on_diverge`, what follows when training diverges: an error
    ("raise", the default), the last checkpoint and BSP from there on ("rollback"), or nothing ("ignore"); and
    `stragglers`, what is done about slow workers (`offbeat.policies`). With a `minimum` the job goes on when
    workers are killed, as long as so many are left, and each is started again, `restarts` times at most; one
    that has given no sign of life for three times `heartbeat` seconds is killed, and a host that hasn't for
    five is given up.
    With a `maximum` the same command, given again while the job runs, adds its workers to it, up to so many.
    `profile` is a file that the run's times are held to.
    `out` is the run's directory, by default a new one under runs/; node 0's counts. Times are in seconds:
    `rdzv_timeout` for all hosts to come, `host_timeout` without a sign of life until a host counts as lost,
    `grace` between TERM and KILL. `virtual` workers run in one process and in virtual time, as `cluster` (a
    file or a preset) says, with `timing_only` without computing anything.

    Raises LaunchError, which names the value that cannot be meant and what would be valid.
    """

    script: str
    args: tuple[str, ...] = ()
    workers: int = 1
    nnodes: int = 1
    node_rank: int = 0
    endpoint: str | None = None
    out: str | None = None
    plan: str | None = None
    total: int | None = None
    seed: int | None = None
    wire: str | None = None
    on_diverge: str | None = None
    stragglers: str | None = None
    profile: str | None = None
    minimum: int | None = None
    maximum: int | None = None
    restarts: int = 3
    heartbeat: float = 2.0
    rdzv_timeout: float = 300.0
    host_timeout: float = 30.0
    grace: float = 5.0
    show: Show = "first"
    virtual: int | None = None
    cluster: str | None = None
    timing_only: bool = False

    def __post_init__(self) -> None:
        self._check_virtual()
        if self.workers < 1:
            raise LaunchError(f"-n {self.workers}: a host runs at least one worker")
        if self.nnodes < 1:
            raise LaunchError(f"--nnodes {self.nnodes}: a job has at least one host")
        if not 0 <= self.node_rank < self.nnodes:
            raise LaunchError(
                f"--node-rank {self.node_rank}: with --nnodes {self.nnodes} it is 0 to {self.nnodes - 1}"
            )
        if self.nnodes > 1 and self.endpoint is None:
            raise LaunchError(
                f"--nnodes {self.nnodes} needs --rdzv-endpoint HOST:PORT, the address of node 0"
            )
        if self.endpoint is not None:
            split_endpoint(self.endpoint)
        if self.total is not None and self.total < 1:
            raise LaunchError(f"--total {self.total}: a job has at least one unit")
        if self.wire is not None and self.wire not in WIRES:
            raise LaunchError(f"--wire {self.wire}: valid are {' and '.join(WIRES)}")
        if self.on_diverge is not None and self.on_diverge not in ON_DIVERGE:
            raise LaunchError(f"--on-diverge {self.on_diverge}: valid are raise, rollback and ignore")
        if self.minimum is not None and self.minimum < 1:
            raise LaunchError(f"--min {self.minimum}: at least one worker is needed to go on")
        if self.minimum is not None and self.nnodes == 1 and self.minimum > (self.virtual or self.workers):
            count = f"{self.workers} workers of the job (-n)" if self.virtual is None else "virtual workers"
            raise LaunchError(f"--min {self.minimum}: more than the {count}")
        if self.maximum is not None:
            self._check_maximum(self.maximum)
        if self.restarts < 0:
            raise LaunchError(f"--restarts {self.restarts}: a number of times, from 0")
        if not 0.1 <= self.heartbeat <= 600:
            raise LaunchError(f"--heartbeat {self.heartbeat:g}: seconds, from 0.1 to 600")
        for name, seconds in (
            ("--rdzv-timeout", self.rdzv_timeout),
            ("host_timeout", self.host_timeout),
            ("grace", self.grace),
        ):
            if not 0 < seconds < 1e7:  # the upper bound also keeps infinity out of C++ durations
                raise LaunchError(f"{name} {seconds:g}: a positive number of seconds, below 10,000,000")
        if self.profile is not None and not Path(self.profile).is_file():
            raise LaunchError(
                f"--profile {self.profile}: there is no such file; `offbeat profile {self.script}` makes one"
            )
        script = Path(self.script)
        if script.is_dir():
            raise LaunchError(f"{self.script} is a directory, not a script")
        if not script.is_file():
            raise LaunchError(f"there is no script {self.script} (seen from {Path.cwd()})")
        if not os.access(script, os.R_OK):
            raise LaunchError(f"the script {self.script} may not be read")

    def _check_maximum(self, maximum: int) -> None:
        if self.minimum is None:
            raise LaunchError(f"--max {maximum} belongs to a job whose members may change: add --min")
        if self.endpoint is None:
            raise LaunchError(
                f"--max {maximum} needs --rdzv-endpoint HOST:PORT, where those that come later find the job"
            )
        least = max(self.minimum, self.workers)
        if maximum < least:
            raise LaunchError(
                f"--max {maximum}: less than the {least} workers that the job begins with or needs"
            )

    @property
    def several(self) -> bool:
        """Whether other hosts take part, or may."""
        return self.nnodes > 1 or self.maximum is not None

    @property
    def prefixed(self) -> bool:
        """Whether the workers' lines need their rank before them (virtual workers' have it)."""
        return self.show == "all" and self.virtual is None

    @property
    def silence(self) -> float:
        """Seconds without a sign of life until a host counts as lost."""
        return self.host_timeout if self.minimum is None else HOST_SILENT * self.heartbeat

    @property
    def label(self) -> str:
        """What tells a run apart from those that it is compared with."""
        return (self.plan or "") + (f" [{self.stragglers}]" if self.stragglers else "")

    def _check_virtual(self) -> None:
        if self.virtual is None:
            for name, given in (("--cluster", self.cluster), ("--timing-only", self.timing_only)):
                if given:
                    raise LaunchError(f"{name} belongs to a virtual run: add --virtual N, the workers")
            return
        if self.virtual < 1:
            raise LaunchError(f"--virtual {self.virtual}: a cluster has at least one worker")
        if self.workers != 1 or self.nnodes != 1:
            raise LaunchError(f"--virtual {self.virtual} is a run in one process: leave out -n and --nnodes")
        if self.maximum is not None:
            raise LaunchError(
                f"--max {self.maximum}: who comes to a virtual run is in its --cluster ([[joins]])"
            )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the store; port 0 on a single host: any free one."""
        return ("127.0.0.1", 0) if self.endpoint is None else split_endpoint(self.endpoint)


def split_endpoint(text: str) -> tuple[str, int]:
    """ "host:port", or "[address]:port" for IPv6. Raises LaunchError."""
    found = _ENDPOINT.fullmatch(text)
    if not found or not 1 <= int(found["port"]) <= 65535:
        raise LaunchError(
            f"--rdzv-endpoint {text!r}: write HOST:PORT with a port of 1 to 65535, such as 10.0.0.1:29500"
        )
    return found["six"] or found["host"], int(found["port"])


def new_directory(script: str, under: str | Path = "runs", label: str = "", now: float | None = None) -> Path:
    """Makes `<under>/<YYYYmmdd-HHMMSS>-<label><script's stem>`, with -2, -3, … where that exists."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    base = Path(under) / f"{stamp}-{label}{Path(script).stem}"
    path, number = base, 1
    while True:
        with contextlib.suppress(FileExistsError):
            _make(path, exist_ok=False)
            return path.absolute()
        number += 1
        path = base.with_name(f"{base.name}-{number}")


def run_directory(spec: LaunchSpec) -> Path:
    """The directory of `spec`'s run, made if it is not there. One that holds a journal already is refused,
    because two runs in one journal could not be told apart."""
    if spec.out is None:
        return new_directory(spec.script)
    path = Path(spec.out)
    if (path / "journal.jsonl").exists():
        raise LaunchError(f"--out {spec.out} holds the journal of an earlier run; give another directory")
    _make(path, exist_ok=True)
    return path.absolute()


PLACE = "launcher.json"
"""In a run's directory, while it runs: where its store is."""


def write_place(out: Path, host: str, port: int) -> None:
    (out / PLACE).write_text(json.dumps({"host": host, "port": port, "pid": os.getpid()}) + "\n")


def forget_place(out: Path) -> None:
    with contextlib.suppress(OSError):
        (out / PLACE).unlink(missing_ok=True)


def _make(path: Path, exist_ok: bool) -> None:
    try:
        path.mkdir(parents=True, exist_ok=exist_ok)
    except FileExistsError:
        if not exist_ok:
            raise
        raise LaunchError(f"--out {path} is a file, not a directory") from None
    except OSError as error:
        raise LaunchError(f"the run's directory {path} cannot be made: {error.strerror}") from None
