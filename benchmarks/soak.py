"""A soak: jobs under one plan after the other, and every so often a worker is killed or stopped, a host cut
off or throttled, workers come. Nothing may hang, every job must end well, its audit be clean and its loss
finite, and neither memory nor file descriptors may grow.

    python benchmarks/soak.py --minutes 30 --hosts-tool PATH/hosts.py
    python benchmarks/soak.py --minutes 5                               # on one host: no cuts, no throttling
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from emulated import tool

from offbeat import journal
from offbeat.audit import audit
from offbeat.cluster.process import is_stopped

PLANS = (
    "bsp",
    "asp",
    "local(4)",
    "bsp:30% asp",
    "dasgd(4,2)",
    "ssp(3)",
    "asp:50% bsp:80% dasgd(4,2)",
)
TRAIN = """
import sys, time
import torch, offbeat
offbeat.init(seed=3)
torch.manual_seed(0)
x = torch.randn(4096, 32); y = (x @ torch.randn(32, 1)) + 0.1 * torch.randn(4096, 1)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.5)
sync = offbeat.Synchronizer(model, optimizer, total=int(sys.argv[1]))
for a, b in sync.batches((x, y), batch_size=8):
    loss = torch.nn.functional.mse_loss(model(a), b)
    loss.backward()
    time.sleep(0.03)
    sync.step()
    if sync.every("20%"):
        with sync.consensus():
            sync.log(loss=float(torch.nn.functional.mse_loss(model(x), y)))
"""
HEARTBEAT = 1.0
PORT = 29533
MOST = 60
"""Ranks in a job."""
EACH = 30.0
"""Units a second that a worker does, nearly."""
PROGRESS = b'{"type": "step"', b'{"type": "end"'
TAIL = 64 * 1024
"""Bytes of a journal's end that are read for its last step."""


class Job:
    """One plan's job on several hosts, or on one."""

    def __init__(self, plan: str, seconds: float, folder: Path, hosts: Any, draw: random.Random):
        self.plan, self.folder, self.hosts, self.draw = plan, folder, hosts, draw
        self.out = folder / "run"
        self.count = 1 if hosts is None else hosts.count
        self.total = int(seconds * EACH * 4)
        self.launchers: dict[str, tuple[int, subprocess.Popen[bytes]]] = {}
        self.done: Counter[str] = Counter()
        self.sizes: dict[int, list[tuple[float, int, int]]] = {}  # by process: when, KB of RSS, descriptors
        self.stalls: list[str] = []
        self.begun = time.monotonic()
        folder.mkdir(parents=True)
        (folder / "train.py").write_text(TRAIN)
        for host in range(self.count):
            self.launch(host, f"h{host}")

    def launch(self, host: int, name: str, workers: int = 2, later: bool = False) -> None:
        address = "127.0.0.1" if self.hosts is None else self.hosts.address(0)
        several = ["--nnodes", self.count] if self.count > 1 else []
        if several and not later:
            several += ["--node-rank", host]
        words = [sys.executable, "-m", "offbeat", "run", "-n", workers, *several, "--min", 1, "--max", MOST]
        words += ["--restarts", 1000, "--heartbeat", HEARTBEAT, "--rdzv-endpoint", f"{address}:{PORT}"]
        words += ["--plan", self.plan, "--out", self.out, "train.py", self.total]
        log = (self.folder / f"{name}.log").open("wb")
        options: dict[str, Any] = {"cwd": self.folder, "stdout": log, "stderr": subprocess.STDOUT}
        text = [str(word) for word in words]
        if self.hosts is None:
            made = subprocess.Popen(text, **options)
        else:
            made = self.hosts.popen(host, text, stdin=subprocess.DEVNULL, **options)
        self.launchers[name] = host, made

    @property
    def first(self) -> subprocess.Popen[bytes]:
        return self.launchers["h0"][1]

    def workers(self) -> dict[int, int]:
        """The training processes that live, and on which host each is."""
        found = {}
        for host, launcher in self.launchers.values():
            if launcher.poll() is None:
                for pid in children(launcher.pid):
                    if b"train.py" in words_of(pid):
                        found[pid] = host
        return found

    def trouble(self) -> str:
        """Something happens to the job; returns what."""
        workers = self.workers()
        kinds = ["kill"] * 4 + ["stop", "come"]
        if self.hosts is not None:
            kinds += ["throttle", "blink", "cut"]
        kind = self.draw.choice(kinds)
        self.about = ""
        if kind in ("kill", "stop") and len(workers) > 1:
            pid = self.draw.choice(sorted(workers))
            self.about = f"{rank_of(pid)} on host {workers[pid]}"
            if workers[pid] == 0 and not self.mates(pid, workers):
                return "nothing"  # all of the first host at once: a job may end so
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        elif kind == "come" and len(workers) < 3 * self.count:
            host = self.draw.randrange(self.count)
            self.about = f"host {host}"
            self.launch(host, f"later{len(self.launchers)}-h{host}", workers=1, later=True)
        elif kind == "throttle":
            host = self.draw.randrange(self.count)
            self.about = f"host {host}"
            self.hosts.set(host, rate="5mbit")
            self.mending = lambda: self.hosts.set(host, rate="200mbit")
        elif kind == "blink":
            host = self.draw.randrange(1, self.count)
            self.about = f"host {host}"
            self.hosts.cut(host)
            time.sleep(2 * HEARTBEAT)
            self.hosts.mend(host)
        elif kind == "cut":  # for good: its workers are given up; then it comes again
            host = self.draw.randrange(1, self.count)
            self.about = f"host {host}"
            self.hosts.cut(host)
            time.sleep(9 * HEARTBEAT)
            self.hosts.mend(host)
            self.mending = lambda: self.launch(host, f"again{len(self.launchers)}-h{host}", later=True)
        else:
            return "nothing"
        return kind

    def mates(self, pid: int, workers: dict[int, int]) -> list[int]:
        """The first host's members beside `pid` that go on: none that was stopped, or is starting."""
        rows = journal.read(self.out)
        members = [row["members"] for row in rows if row["type"] == "members"] or [range(2 * self.count)]
        ranks = {f"rank {rank}" for rank in members[-1]}
        return [
            one
            for one, host in workers.items()
            if host == 0 and one != pid and rank_of(one) in ranks and not is_stopped(one) and age(one) > 20
        ]

    mending: Any = None
    about = ""

    def measure(self) -> None:
        pids = [*self.workers(), *(made.pid for _, made in self.launchers.values() if made.poll() is None)]
        for pid in pids:
            with contextlib.suppress(OSError):
                size = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4
                row = time.monotonic(), size, len(os.listdir(f"/proc/{pid}/fd"))
                self.sizes.setdefault(pid, []).append(row)

    def run(self, every: float, seconds: float, stall: float) -> list[str]:
        """To its end. Returns what is wrong."""
        last = moved = time.monotonic()
        clock = None
        while self.first.poll() is None:
            time.sleep(0.5)
            now = time.monotonic()
            if now > self.begun + 4 * seconds + 120:
                return [f"hangs after {now - self.begun:.0f} s: {self.stand()}", *self.end()]
            self.measure()
            if (found := self.last_step()) != clock:
                clock, moved = found, now
            elif clock is not None and now > moved + stall:
                at = clock.decode(errors="replace")
                self.stalls.append(f"nothing for {stall:g} s after {at}, at {now - self.begun:.0f} s")
                self.show_stacks(len(self.stalls))
                moved = now
            if clock is not None and clock.startswith(PROGRESS[1]):
                continue  # only to end well is left
            if (
                now > last + every * self.draw.uniform(0.7, 1.3)
                and self.out.joinpath("journal.jsonl").exists()
            ):
                last = now
                if self.mending is not None:
                    self.mending()
                    self.mending = None
                found = self.trouble()
                self.done[found] += 1
                with (self.folder / "troubles.txt").open("a") as diary:
                    diary.write(f"{now - self.begun:7.1f} s  {found} {self.about}\n")
        return self.end()

    def last_step(self) -> bytes | None:
        """The journal's last word of a step, or of the end."""
        try:
            with (self.out / "journal.jsonl").open("rb") as file:
                file.seek(max(file.seek(0, os.SEEK_END) - TAIL, 0))
                lines = [line for line in file.read().splitlines() if line.startswith(PROGRESS)]
        except OSError:
            return None
        return lines[-1][:120] if lines else None

    def show_stacks(self, number: int) -> None:
        """Where every worker is, for who looks for the fault: needs py-spy."""
        with (self.folder / f"stacks{number}.txt").open("w") as file:
            for pid in [self.first.pid, *children(self.first.pid), *self.workers()]:
                with contextlib.suppress(OSError):
                    file.write(f"== {pid} {words_of(pid)!r} {rank_of(pid)}\n")
                    file.flush()
                    subprocess.run(
                        ["py-spy", "dump", "--locals", "--pid", str(pid)], stdout=file, stderr=file
                    )

    def stand(self) -> str:
        rows = journal.read(self.out) if (self.out / "journal.jsonl").exists() else []
        return json.dumps(rows[-1])[:200] if rows else "no journal"

    def end(self) -> list[str]:
        """Ends what is left, and judges."""
        wrong = list(self.stalls)
        if self.first.poll() != 0:
            tail = (self.folder / "h0.log").read_text(errors="replace")[-600:]
            wrong.append(f"the first launcher's exit code is {self.first.poll()}: {tail}")
        for _, made in self.launchers.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                made.wait(15)
            if made.poll() is None:
                made.kill()
        try:
            rows = journal.read(self.out)
        except (OSError, ValueError) as error:
            return [*wrong, f"no journal: {error}"]
        for one in audit(rows):
            if not (one.clean and one.ended):
                wrong += one.lines()
        losses = [row["loss"] for row in rows if row["type"] in ("step", "end") and row["loss"] is not None]
        if not all(isinstance(loss, float) and math.isfinite(loss) for loss in losses):
            wrong.append("a loss is not finite")
        for pid, sizes in self.sizes.items():
            sizes = [row for row in sizes if row[0] > sizes[0][0] + 20]  # once it has warmed up
            if len(sizes) > 60:
                third = len(sizes) // 3
                (memory, files), (more, handles) = (
                    [max(row[k] for row in part) for k in (1, 2)] for part in (sizes[:third], sizes[-third:])
                )
                if more > 1.25 * memory or handles > files + 60:
                    wrong.append(
                        f"process {pid} has grown: {memory} to {more} KB, {files} to {handles} descriptors"
                    )
        counts = Counter(row["type"] for row in rows)
        text = f"{self.plan:28} {self.total:7,} units  {dict(self.done)}  recoveries {counts['recovery']}, "
        print(
            "\n".join([f"{text}epochs {counts['members']}  {'WRONG' if wrong else 'OK'}", *wrong]), flush=True
        )
        return wrong


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def words_of(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def rank_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if word.startswith(b"RANK="):
                return f"rank {word[5:].decode()}"
    return ""


def age(pid: int) -> float:
    """Seconds since a process began: a rank that was started again isn't a member yet."""
    with contextlib.suppress(OSError):
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two troubles")
    parser.add_argument("--hosts-tool", default="", metavar="PATH/hosts.py")
    parser.add_argument(
        "--stall",
        type=float,
        default=45.0,
        help="seconds without a step, or from the end to the exit, that are a fault",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plans", default="; ".join(PLANS), help='with ";" between them')
    args = parser.parse_args()
    plans = [text.strip() for text in args.plans.split(";")]
    draw, folder = random.Random(args.seed), Path(mkdtemp(prefix="offbeat-soak-"))
    end, seconds = time.monotonic() + 60 * args.minutes, 60 * args.minutes / len(plans)
    print(
        f"{args.minutes:g} minutes, a trouble every {args.every:g} s, seed {args.seed}, in {folder}",
        flush=True,
    )
    wrong: list[str] = []
    made = tool(args.hosts_tool).Hosts(3, rate="200mbit", name="soak") if args.hosts_tool else None
    with made or contextlib.nullcontext() as hosts:
        number = 0
        while time.monotonic() < end:
            plan = plans[number % len(plans)]
            job = Job(plan, min(seconds, 240.0), folder / str(number), hosts, draw)
            found = job.run(args.every, min(seconds, 240.0), args.stall)
            wrong += [f"{plan}: {line}" for line in found]
            number += 1
            for host in range(0 if hosts is None else hosts.count):
                hosts.mend(host)
                hosts.set(host, rate="200mbit")
    print("\n".join(wrong) or "nothing went wrong")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
