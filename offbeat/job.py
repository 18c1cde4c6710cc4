"""Who this process is: its rank, its device, its seed, its run's directory, from the launcher.

The launcher may be `offbeat run`, torchrun, or nobody (one worker).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import torch

from offbeat import site


@dataclass
class Job:
    """One worker's place in its job. `store` is connected on first use.

    node: number of its host; shards: path of the memory for shards that the host's launcher holds, if any;
    beats: the file where its workers give their launcher signs of life;
    meeting: address and port where the job meets; minimum: members with which the job still goes on when
    others have died (None: with all or none); attempt: how often this rank's process was started again;
    heartbeat: seconds, see `cluster.pulse`; room: ranks that there may be, with those that come later;
    managed: whether `offbeat run` has started it.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    seed: int
    out: Path | None
    started: float
    costs: dict[str, float] = field(default_factory=dict)
    backend: str = "gloo"
    node: int = 0
    shards: str | None = None
    beats: Path | None = None
    meeting: tuple[str, int] = ("127.0.0.1", 1)
    minimum: int | None = None
    attempt: int = 0
    heartbeat: float = 2.0
    room: int = 1
    managed: bool = False
    _store: Any = None

    @property
    def store(self) -> Any:
        """The store that all workers of the job share; None for a job of one worker.

        Raises ConnectionError when nobody answers at MASTER_ADDR:MASTER_PORT."""
        if self._store is None and max(self.world_size, self.room) > 1:
            self._store = _connect(self.rank, self.world_size)
        return self._store

    def connect(self) -> Any:
        """The job's store on a connection of its own, for a thread."""
        return _connect(self.rank, self.world_size)


def init(seed: int | None = None, out: str | Path | bool | None = None) -> None:
    """Takes this worker's rank and device from the launcher and seeds torch, numpy and random.

    seed: of the job; rank r uses seed + r, and the model that counts is rank 0's. The command line's
        `--seed` comes first; 0 without either.
    out: the run's directory for the journal. `--out` comes first; without either
        `runs/<time>-<script>`; False keeps no journal.

    May be left out: the first use of offbeat calls it. A second call is an error if it changes anything.
    """
    here = site.here()
    if (job := here.job) is not None:
        if seed is not None and seed != job.seed:
            raise RuntimeError(
                f"offbeat is already running with seed {job.seed}: call init(seed={seed}) first"
            )
        return
    job = here.job = here.make_job(seed, out)
    torch.manual_seed(job.seed + job.rank)
    numpy.random.seed((job.seed + job.rank) % 2**32)
    random.seed(job.seed + job.rank)
    if job.device.type == "cuda":
        torch.cuda.set_device(job.device)


def current() -> Job:
    """This worker's job."""
    here = site.here()
    if here.job is None:
        init()
    assert here.job is not None
    return here.job


def reset() -> None:
    """Forgets the job, so that a test or a notebook can begin another one."""
    site.here().job = None


def rank() -> int:
    """This worker's number, 0 to `world_size() - 1`."""
    return current().rank


def world_size() -> int:
    """How many workers the job was started with. Those that come later (`--max`) have ranks from there on."""
    return current().world_size


def device() -> torch.device:
    """Where this worker computes: its own GPU, or the CPU."""
    return current().device


def from_environment(seed: int | None, out: str | Path | bool | None) -> Job:
    """The job that the launcher's environment tells of."""
    env = os.environ
    rank, size = _number("RANK", 0), _number("WORLD_SIZE", 1)
    room = max(_number("OFFBEAT_MAX", size), size)
    if size < 1 or not 0 <= rank < room:
        raise ValueError(
            f"the launcher says RANK={rank} of WORLD_SIZE={size}: it must be 0 to WORLD_SIZE - 1"
        )
    local = _number("LOCAL_RANK", rank)
    if launcher := env.get("OFFBEAT_LAUNCHER"):
        die_with(int(launcher))
    on = torch.device("cpu")
    if torch.cuda.is_available():
        on = torch.device("cuda", local % torch.cuda.device_count())
    begun = _process_start()
    now = time.time()
    costs = {"import_ms": (now - begun) * 1e3}
    if spawned := env.get("OFFBEAT_SPAWNED"):
        costs["spawn_ms"] = max(begun - float(spawned), 0) * 1e3
    return Job(
        rank=rank,
        world_size=size,
        local_rank=local,
        device=on,
        seed=seed_of(seed),
        out=directory_of(out),
        started=float(env.get("OFFBEAT_SPAWNED") or begun),
        costs=costs,
        backend=_backend(on, _number("LOCAL_WORLD_SIZE", 1)),
        node=_number("GROUP_RANK", rank // max(_number("LOCAL_WORLD_SIZE", 1), 1)),
        shards=env.get("OFFBEAT_SHARDS"),
        beats=Path(env["OFFBEAT_BEATS"]) if "OFFBEAT_BEATS" in env else None,
        meeting=(env.get("MASTER_ADDR", "127.0.0.1"), _number("MASTER_PORT", 1)),
        minimum=_number("OFFBEAT_MIN", 1) if "OFFBEAT_MIN" in env else None,
        heartbeat=float(env.get("OFFBEAT_HEARTBEAT", "2")),
        attempt=_number("TORCHELASTIC_RESTART_COUNT", 0) if "OFFBEAT_MIN" in env else 0,
        room=room,
        managed=launcher is not None,
    )


def seed_of(given: int | None) -> int:
    """The job's seed: the command line's, else the script's, else 0."""
    return _number("OFFBEAT_SEED", 0 if given is None else given)


def directory_of(given: str | Path | bool | None) -> Path | None:
    """The run's directory: the command line's, else the script's, else a new one under runs/."""
    directory = os.environ.get("OFFBEAT_OUT") or given
    if directory is None:
        script = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] not in ("", "-c") else "interactive"
        directory = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{script}"
    return None if directory is False else Path(str(directory))


def _backend(device: torch.device, neighbours: int) -> str:
    """NCCL refuses two workers on one GPU: they talk over gloo, which also moves CUDA tensors."""
    shared = device.type == "cuda" and neighbours > torch.cuda.device_count()
    return "nccl" if device.type == "cuda" and not shared else "gloo"


def _number(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be a whole number; the environment has {name}={text!r}") from None


def _connect(rank: int, size: int) -> Any:
    from torch.distributed import PrefixStore, rendezvous

    patience = float(os.environ.get("OFFBEAT_RDZV_TIMEOUT", "300"))
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        store, _, _ = next(rendezvous("env://", rank, size, timeout=timedelta(seconds=patience)))
    except (RuntimeError, OSError, ValueError) as error:
        raise ConnectionError(
            f"rank {rank} of {size} found no rendezvous at {where} (MASTER_ADDR:MASTER_PORT) within "
            f"{patience:g} s: {str(error).splitlines()[0]}"
        ) from error
    if "OFFBEAT_LAUNCHER" in os.environ or "OFFBEAT_MIN" in os.environ:
        return PrefixStore("offbeat", store)  # a worker that is started again meets those that are there
    # torchrun starts all workers again, over the store that holds what those before them have said.
    return PrefixStore(f"offbeat/{_number('TORCHELASTIC_RESTART_COUNT', 0)}/{size}", store)


def _process_start() -> float:
    """Unix time at which this process started (to a hundredth of a second)."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.time()


def die_with(launcher: int) -> None:
    """Asks the kernel to end this process when its launcher dies, however that happens."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() not in (launcher, 1) and not _alive(launcher):
            os._exit(1)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
