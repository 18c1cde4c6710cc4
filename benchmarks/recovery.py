"""How soon a job goes on after kill -9 of one of its workers, and how soon a new process trains in its place.

    python benchmarks/recovery.py --kills 5

One job of `--workers` workers on this host, under `--plan` (of protocols on replicas); ranks are killed in
turn, rank 0 too. All times are from the kill, by the job's journal: until the survivors' next step, until
the new process is a member, and until the first step with it, torch's import included. Medians.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, TypeVar

from offbeat import journal

TRAIN = """
import os, time
from pathlib import Path
import torch, offbeat
offbeat.init(seed=3)
data = torch.randn(4096, 64), torch.randn(4096, 1)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
mine, told = Path(f"pid{offbeat.rank()}"), False
sync = offbeat.Synchronizer(model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), total=10**7)
for x, y in sync.batches(data, batch_size=8):
    torch.nn.functional.mse_loss(model(x), y).backward()
    time.sleep(0.02)
    sync.step()
    if not told:
        told = True
        mine.with_suffix(".new").write_text(str(os.getpid()))
        mine.with_suffix(".new").rename(mine)
"""
T = TypeVar("T")


def wait_for(find: Callable[[], T | None], what: str, seconds: float = 120.0) -> T:
    """What `find` finds, once it finds something. Ends the program where that takes too long."""
    end = time.monotonic() + seconds
    while (found := find()) is None:
        if time.monotonic() > end:
            raise SystemExit(f"{what} did not come within {seconds:g} s")
        time.sleep(0.05)
    return found


def after(rows: list[dict[str, Any]], moment: float, kind: str, rank: int | None = None) -> float | None:
    """When there was the next record of a kind; with a rank, one of members among whom it is."""
    for row in rows:
        if row["type"] == kind and row["t"] > moment and (rank is None or rank in row["members"]):
            return float(row["t"])
    return None


def kill(out: Path, folder: Path, rank: int) -> dict[str, Any]:
    """Kills a rank's process. Seconds until each thing that follows."""
    pid = int((folder / f"pid{rank}").read_text())
    started = next(row["started"] for row in journal.read(out) if row["type"] == "run")
    killed = time.time() - started
    os.kill(pid, signal.SIGKILL)
    (folder / f"pid{rank}").unlink()

    def found() -> dict[str, Any] | None:
        rows = journal.read(out)
        lost = after(rows, killed, "members")
        back = after(rows, killed, "members", rank)
        if lost is None or back is None or (again := after(rows, back, "step")) is None:
            return None
        step = after(rows, lost, "step")
        moments = {"survivors": step, "member": back, "trains": again}
        return {name: round(one - killed, 3) for name, one in moments.items() if one is not None}

    return {"rank": rank, **wait_for(found, f"the process in rank {rank}'s place")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--heartbeat", type=float, default=2.0, help="seconds")
    parser.add_argument("--plan", default="bsp")
    parser.add_argument("--between", type=float, default=3.0, help="seconds from a recovery to the next kill")
    parser.add_argument("--json", help="where to write the results")
    args = parser.parse_args()
    folder = Path(mkdtemp(prefix="offbeat-recovery-"))
    (folder / "train.py").write_text(TRAIN)
    print(
        f"{args.workers} workers, {args.plan}, heartbeat {args.heartbeat:g} s, {args.kills} kills, "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, in {folder}",
        flush=True,
    )
    words = [sys.executable, "-m", "offbeat", "run", "-q", "-n", str(args.workers), "--min", "1"]
    words += ["--restarts", str(args.kills + 1), "--heartbeat", str(args.heartbeat), "--plan", args.plan]
    path = os.pathsep.join([str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")])
    place = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    rows = []
    with (folder / "log").open("wb") as log:
        job = subprocess.Popen(
            [*words, "--out", "run", "train.py"], cwd=folder, env=place, stdout=log, stderr=log
        )
    try:
        for number in range(args.kills):
            rank = (number + 1) % args.workers
            wait_for(lambda: (folder / f"pid{rank}").exists() or None, f"rank {rank}'s first step")  # noqa: B023
            time.sleep(args.between)
            rows.append(kill(folder / "run", folder, rank))
            print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    finally:
        job.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(20)
        job.kill()
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0] if name != "rank"}
    print(
        f"medians from the kill: survivors' next step {medians['survivors']:.2f} s, the new process is a "
        f"member after {medians['member']:.2f} s and trains after {medians['trains']:.2f} s"
    )
    if args.json:
        Path(args.json).write_text(json.dumps({"settings": vars(args), "kills": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
