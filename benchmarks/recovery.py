"""How soon a job goes on after kill -9 of one of its workers, and how soon all of them train again: Offbeat,
torchrun with DDP and checkpoints (what users do today), and torchft.

    python benchmarks/recovery.py --kills 5
    python benchmarks/recovery.py --only offbeat --workers 4 --plan asp

Each job has `--workers` workers on this host, steps of some 20 ms and 0.3 M parameters; its ranks are killed
in turn, rank 0 too. Every worker writes down when it has done a step. All times are from the kill: the job
goes on when one of the others has done two more steps (one may have been under way), and is whole when the
killed rank's new process has done one. Under torchrun all begin again from the last checkpoint, of every 50
steps: what they do again is counted. torchft is set up as its example train_ddp.py; its lighthouse waits for
those that come for 2 seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from peers.environment import environment
from record import ROOT, Record, Row, Setup

JOBS = Path(__file__).resolve().parent / "jobs"
sys.path.insert(0, str(JOBS))
from log import read  # noqa: E402

TITLE = "Recovery after kill -9"
MINUTES = 4.0
SETTINGS = {
    "workers": 3,
    "parameters": "0.3M",
    "network": "loopback",
    "heartbeat": 2.0,
    "torchft's join": 2.0,
}
LONGEST = 90.0
"""Seconds after which a job counts as not come back."""
SIDES = ("offbeat", "torchrun", "torchft")
T = TypeVar("T")


class Job:
    """Processes with the file that their workers write steps to. They end with it."""

    def __init__(self, folder: Path):
        self.folder, self.steps = folder, folder / "steps"
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, words: list[Any], **extra: str) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([str(ROOT), str(JOBS), os.environ.get("PYTHONPATH", "")])
        place = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "RUST_LOG": "error", **extra}
        place["OFFBEAT_BENCHMARK_STEPS"] = str(self.steps)
        with (self.folder / "log").open("ab") as log:
            made = subprocess.Popen(
                [str(word) for word in words],
                cwd=self.folder,
                env=place,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._processes.append(made)
        return made

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGINT)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        for process in self._processes:
            process.kill()
            process.wait()
        for pid in self._left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _left(self) -> Iterator[int]:
        """What a launcher that was killed has left behind, in sessions of their own: known by the file of
        steps that was given to them."""
        mark = f"OFFBEAT_BENCHMARK_STEPS={self.steps}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes().split(b"\0"):
                    yield int(path.parent.name)

    def wait_for(self, find: Callable[[], T | None], what: str, seconds: float = 180.0) -> T:
        """What `find` finds, once it finds something.

        Raises TimeoutError, with the end of the job's log, where that takes too long."""
        end = time.monotonic() + seconds
        while (found := find()) is None:
            if time.monotonic() > end:
                log = (self.folder / "log").read_text(errors="replace")
                raise TimeoutError(f"{what} did not come within {seconds:g} s:\n{log[-3000:]}")
            time.sleep(0.05)
        return found

    def pid(self, rank: int) -> int | None:
        """Of the process that did this rank's last step."""
        return next((row[2] for row in reversed(read(self.steps)) if row[1] == rank), None)


def kill(job: Job, rank: int) -> dict[str, float]:
    """Kills a rank's process. Seconds until the job goes on and is whole, and the steps done again."""
    pid = job.pid(rank)
    assert pid is not None
    killed = time.time()
    os.kill(pid, signal.SIGKILL)

    def found() -> dict[str, float] | None:
        rows = read(job.steps)
        later = [row for row in rows if row[0] > killed]
        whole = next((row for row in later if row[1] == rank and row[2] != pid), None)
        others: dict[tuple[int, int], list[float]] = {}
        for at, who, process, _ in later:
            if who != rank:
                others.setdefault((who, process), []).append(at)
        on = min((times[1] for times in others.values() if len(times) > 1), default=None)
        if on is None or whole is None:
            return None
        reached = max(row[3] for row in rows if row[0] <= killed)
        first = min((row[3] for row in later if row[0] >= on and row[1] != rank), default=reached)
        again = max(reached - first + 2, 0)  # two steps are what "goes on" waits for
        return {"on": round(on - killed, 2), "whole": round(whole[0] - killed, 2), "again": again}

    return job.wait_for(found, f"the process in rank {rank}'s place", LONGEST)


def offbeat_job(job: Job, workers: int, plan: str, cache: Path) -> None:
    words = [sys.executable, "-m", "offbeat", "run", "-q", "-n", workers, "--min", 1, "--restarts", 100]
    job.start([*words, "--heartbeat", 2.0, "--plan", plan, "--out", "run", JOBS / "ours.py"])


def torchrun_job(job: Job, workers: int, plan: str, cache: Path) -> None:
    """With torch 2.13 the store of the agent outlives an attempt, and the next one finds the dead workers'
    addresses in it (gloo: connection refused); so a store for each."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", workers]
    words += ["--max-restarts", 100, JOBS / "restarted.py", "0.3M", 0]
    job.start(words, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


def torchft_job(job: Job, workers: int, plan: str, cache: Path) -> None:
    python = environment(cache, "torchft")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    lit = "import sys, time; from torchft.coordination import LighthouseServer as Server; kept = Server("
    lit += "bind=sys.argv[1], min_replicas=1, join_timeout_ms=2000); time.sleep(1e6)"
    job.start([python, "-c", lit, f"0.0.0.0:{port}"])
    for rank in range(workers):
        words = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 1]
        where = {"REPLICA_GROUP_ID": str(rank), "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}
        job.start([*words, "--max-restarts", 100, JOBS / "replica.py"], **where)


STARTS = {"offbeat": offbeat_job, "torchrun": torchrun_job, "torchft": torchft_job}
NAMES = {"offbeat": "offbeat", "torchrun": "torchrun, DDP and checkpoints", "torchft": "torchft DDP"}


def kills(
    side: str, workers: int, plan: str, count: int, cache: Path, between: float
) -> list[dict[str, float]]:
    with TemporaryDirectory(prefix="offbeat-recovery-") as folder, Job(Path(folder)) as job:
        STARTS[side](job, workers, plan, cache)
        found = []
        for number in range(count):
            rank = (number + 1) % workers

            def all_train() -> bool | None:
                recent = {row[1] for row in read(job.steps) if row[0] > time.time() - 1.0}
                return len(recent) == workers or None

            job.wait_for(all_train, "a step of every rank")
            time.sleep(between)
            try:
                found.append(kill(job, rank))
            except TimeoutError as error:  # that, too, is a result
                print(f"  {side}, rank {rank}: {error}", flush=True)
                return found
            print(f"  {side}, rank {rank}: {found[-1]}", flush=True)
        return found


def row_of(side: str, plan: str, found: list[dict[str, float]], count: int) -> Row:
    values: dict[str, Any] = {"not back": int(len(found) < count)}  # the first that isn't ends the job
    for name, key in (("goes on after, s", "on"), ("whole after, s", "whole"), ("steps done again", "again")):
        each = [one[key] for one in found] or [LONGEST]
        values[name] = [round(statistics.median(each), 2), min(each), max(each)]
    name = NAMES[side] + (f" {plan}" if side == "offbeat" else "")
    return Row(name, {"kills": count}, values)


def measure(setup: Setup) -> Iterator[Row]:
    cases = [
        ("offbeat", "bsp"),
        ("torchrun", ""),
        ("torchft", ""),
        ("offbeat", "dasgd(4,2)"),
        ("offbeat", "asp"),
    ]
    for side, plan in cases[:1] if setup.quick else cases:
        if not setup.wants(f"{side} {plan}"):
            continue
        count = 1 if setup.quick else 3
        found = kills(side, 2 if setup.quick else 3, plan, count, setup.cache, 2.0)
        yield row_of(side, plan, found, count)


def page(record: Record) -> list[str]:
    from page import paragraph, spread, table

    columns = ["goes on after, s", "whole after, s", "steps done again"]
    rows = []
    for row in record.rows:
        cells = []
        for name in columns:
            middle, low, high = row.values[name]
            digits = 0 if name == columns[-1] else 2
            cells.append(f"{middle:.{digits}f} ({spread(low, high, digits)})")
        lost = row.values["not back"]
        if lost:
            cells[1] += f"; once not within {LONGEST:g} s, which ended it"
        rows.append([row.name, *cells])
    text = paragraph(
        """One of three workers on one host is killed, in turn, rank 0 too. The job goes on when another
        worker has done two more steps, and is whole when the new process in the killed one's place has done
        one: most of that is Python importing torch. torchrun starts all of them again from the last
        checkpoint (every 50 steps of 20 ms). With torchft 0.2 the survivors die, too: an assertion in its
        DDP hook (`assert fut._fut`) fails when the all-reduce does; so its launchers start all of them again,
        and the steps so far are lost."""
    )
    return [text, *table(["", *columns], rows)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--plan", default="bsp", help="of Offbeat's job")
    parser.add_argument("--only", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--between", type=float, default=3.0, help="seconds from a recovery to the next kill")
    parser.add_argument(
        "--peers", type=Path, default=ROOT / "build" / "peers", help="where they are installed"
    )
    args = parser.parse_args()
    for side in args.only:
        each = kills(side, args.workers, args.plan, args.kills, args.peers, args.between)
        found = row_of(side, args.plan, each, args.kills)
        print(found.name, ", ".join(f"{name} {value}" for name, value in found.values.items()))


if __name__ == "__main__":
    main()
