"""Training speed of every protocol and of the peers, as a share of the speed without any communication.

    python benchmarks/throughput.py                              two workers here
    python benchmarks/throughput.py --rate 50mbit --hosts-tool PATH/hosts.py
                                                                 two emulated hosts on slow links
    python benchmarks throughput --hosts-tool PATH/hosts.py      every network, into results/throughput.json

All methods run in the same processes and take turns, beginning with another one each time: in a turn a
method does `--warm` steps (so that an average is under way when the clock starts, as in the middle of a
job) and then `--steps` timed ones. Rounds go on for `--seconds`, three at least. Printed are the median and
the spread (lowest to highest) over the rounds, as shares of the rounds' own no-communication speed. Peers are
set up as their documentation says, in an environment of their own that this makes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import emulated
from names import SAME, of_offbeat, of_peer
from peers.environment import environment
from record import ROOT, Record, Row, Setup, compared

TITLE = "Throughput: every protocol beside its peers"
MINUTES = 17.0
SETTINGS = {"warm": 4, "optimizer": "SGD with momentum", "threads": 1}
WORKER = "OFFBEAT_BENCHMARK"
NETWORKS = {
    "loopback": (None, "0"),
    "1 Gbit": ("1gbit", "0"),
    "200 Mbit": ("200mbit", "0"),
    "50 Mbit": ("50mbit", "0"),
    "1 Gbit + 10 ms": ("1gbit", "10ms"),
}
"""Each host's rate and delay, one way."""


def options(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--model", choices=("resnet8", "mlp"), default="resnet8")
    parser.add_argument("--batch", type=int, default=32, help="samples of a worker's step")
    parser.add_argument(
        "--sleep", type=float, default=0.0, help="seconds of a step of fixed duration, instead of computing"
    )
    parser.add_argument("--seconds", type=float, default=150.0, help="after which no round begins")
    parser.add_argument("--rounds", type=int, default=3, help="at least")
    parser.add_argument("--steps", type=int, default=8, help="timed steps in a turn")
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--only", help="methods to run beside 'none', separated by ';'")
    parser.add_argument("--rate", help="of every host's link, such as 50mbit: emulated hosts")
    parser.add_argument("--delay", default="0", help="one way, such as 10ms")
    parser.add_argument("--hosts-tool", help="the emulator's hosts.py", default=os.environ.get("HOSTS_TOOL"))
    parser.add_argument("--peers", default="build/peers", help="where the peers are installed")
    parser.add_argument("--json", help="where to write the results")
    return parser.parse_args(words)


# A worker


def work(args: argparse.Namespace) -> None:
    """Every method in turn, in every round."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    warnings.filterwarnings("ignore", message=".*broadcast_buffers.*")
    import methods
    import torch
    from torch import distributed as dist

    import offbeat

    dist.init_process_group("gloo")
    offbeat.init(seed=0, out=False)
    names = methods.DEFAULT
    if args.only:
        names = ["none", *(word.strip() for word in args.only.split(";"))]
        if unknown := [name for name in names if name not in methods.METHODS]:
            raise SystemExit(f"no method {unknown[0]!r}; there are: {'; '.join(methods.METHODS)}")
    task = methods.Work(args.model, args.batch, args.sleep)
    steps = {name: methods.step_of(methods.METHODS[name], task) for name in names}
    computing, averaging = parts_of(steps["none"], methods.network(args.model))
    rest = max(0.1, 1.5 * averaging)  # what is still under way lands before the next method's turn
    seconds: dict[str, list[float]] = {name: [] for name in names}
    begun, number = time.perf_counter(), 0
    while True:
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            spent = take_turn(steps[name], args.warm, args.steps if number else 0)
            if number:  # the first one warms up
                seconds[name].append(spent / args.steps)
            time.sleep(rest)
        number += 1
        enough = torch.tensor(float(number > args.rounds and time.perf_counter() > begun + args.seconds))
        dist.broadcast(enough, 0)
        if enough:
            break
    if dist.get_rank() == 0:
        found = {"compute_ms": computing * 1e3, "average_ms": averaging * 1e3, "seconds": seconds}
        Path(os.environ[WORKER]).write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


def parts_of(step: Callable[[], None], model: Any) -> tuple[float, float]:
    """Seconds of a step without communication, and of one average; means of the workers' medians."""
    import torch
    from torch import distributed as dist

    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    computing, averaging = [], []
    for _ in range(5):
        for action, found in ((step, computing), (lambda: dist.all_reduce(flat), averaging)):
            dist.barrier()
            begun = time.perf_counter()
            action()
            found.append(time.perf_counter() - begun)
    both = torch.tensor([statistics.median(computing), statistics.median(averaging)])
    dist.all_reduce(both)
    first, second = (both / dist.get_world_size()).tolist()
    return first, second


def take_turn(step: Callable[[], None], warm: int, steps: int) -> float:
    """Seconds that the timed steps took, on the slowest worker."""
    from torch import distributed as dist

    for _ in range(warm):
        step()
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    dist.barrier()
    return time.perf_counter() - begun


# The one who starts them


def run(args: argparse.Namespace) -> dict[str, Any]:
    """What the first worker measured. Ends the program where a worker fails."""
    python = environment(Path(args.peers), "accelerate", "torchft")
    with TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        command = [str(python), str(Path(__file__).resolve())]
        for name in ("model", "batch", "sleep", "seconds", "rounds", "steps", "warm"):
            command += [f"--{name}", str(getattr(args, name))]
        command += ["--only", args.only] if args.only else []
        extra = {WORKER: str(answer), "RUST_LOG": "error", "OMP_NUM_THREADS": "1"}
        extra["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        codes = (on_hosts if args.rate else here)(args, command, extra)
        if any(codes):
            raise SystemExit(f"a worker failed: {codes}")
        return dict(json.loads(answer.read_text()))


def on_hosts(args: argparse.Namespace, command: list[str], extra: dict[str, str]) -> list[int]:
    emulator = emulated.tool(args.hosts_tool)
    with emulator.Hosts(
        args.workers, rate=args.rate, delay=args.delay, name=f"throughput{os.getpid()}"
    ) as hosts:
        return list(hosts.start(command, extra=extra).wait(fail_fast=True).values())


def here(args: argparse.Namespace, command: list[str], extra: dict[str, str]) -> list[int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(args.workers)}
    place["LOCAL_WORLD_SIZE"] = place["WORLD_SIZE"]
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in map(str, range(args.workers)):
            own = {**os.environ, **extra, **place, "RANK": rank, "LOCAL_RANK": rank}
            processes.append(subprocess.Popen(command, env=own))
            stack.callback(processes[-1].kill)
        while all(process.poll() in (None, 0) for process in processes):
            if all(process.poll() == 0 for process in processes):
                break
            time.sleep(0.1)
        return [process.poll() or 0 for process in processes]


# The results


def rows_of(where: dict[str, Any], found: dict[str, Any]) -> Iterator[Row]:
    """Every method against no communication, and every peer against the plan that does the same."""
    times = found["seconds"]
    about = {name: round(found[name], 1) for name in ("compute_ms", "average_ms")}
    for name, own in times.items():
        values: dict[str, Any] = {"ms": round(statistics.median(own) * 1e3, 1)}
        values |= {"least_ms": round(min(own) * 1e3, 1), "rounds_ms": [round(one * 1e3, 1) for one in own]}
        for peer in SAME.get(name, ()):
            if peer in times:
                ratio, spread = compared(own, times[peer])
                values[f"speed over {peer}"] = [ratio, *spread]
        ratio, spread = compared(own, times["none"])
        yield Row(name, where, {**values, **about}, ratio, "none", spread)


@dataclass(frozen=True)
class Case:
    """`sleep` seconds are a step's fixed duration, 0 where it computes; `seconds` are those after which no
    round begins."""

    network: str
    workers: int = 2
    model: str = "resnet8"
    batch: int = 16
    sleep: float = 0.0
    steps: int = 8
    seconds: float = 60.0

    @property
    def name(self) -> str:
        return f"{self.workers} hosts, {self.network}, {self.model}, batches of {self.batch}"


def cases() -> list[Case]:
    """Two hosts compute; four share two cores, so their steps have a fixed duration."""
    found = [Case("50 Mbit", batch=32, seconds=110.0), *(Case(network) for network in NETWORKS)]
    found += [Case(network, 4, batch=0, sleep=0.1, steps=4, seconds=40.0) for network in NETWORKS]
    return [*found, Case("1 Gbit", model="mlp", batch=32, steps=4, seconds=90.0)]


def measure(setup: Setup) -> Iterator[Row]:
    for case in [Case("loopback", batch=2, steps=4, seconds=0.0)] if setup.quick else cases():
        rate, delay = NETWORKS[case.network]
        if (rate and not setup.hosts_tool) or not setup.wants(case.name):
            continue
        words = ["--delay", delay, "--peers", str(setup.cache)]
        for name in ("workers", "model", "batch", "sleep", "steps", "seconds"):
            words += [f"--{name}", str(getattr(case, name))]
        words += ["--rate", rate, "--hosts-tool", str(setup.hosts_tool)] if rate else []
        words += ["--rounds", "1", "--warm", "2"] if setup.quick else []
        where = {name: value for name, value in asdict(case).items() if name != "seconds"}
        yield from rows_of(where, run(options(words)))


def page(record: Record) -> list[str]:
    from page import paragraph, spread, table

    networks = list(NETWORKS)
    lines = [
        paragraph(
            """Shares of the speed without communication. In a turn a method does 4 steps and then 8 timed
            ones (4 with four hosts, and for the MLP); all methods take turns in the same processes. ResNet-8
            has 0.31 M parameters (1.2 MB), the MLP 9.9 M (40 MB). Two hosts compute; four share two cores,
            so their steps sleep for most of 100 ms instead."""
        ),
    ]
    groups: dict[tuple[Any, ...], dict[str, dict[str, Row]]] = {}
    for row in record.rows:
        of = row.settings
        key = (of["workers"], of["model"], of["batch"])
        groups.setdefault(key, {}).setdefault(of["network"], {})[row.name] = row
    for (workers, model, batch), found in groups.items():
        there = [network for network in networks if network in found]
        what = f"batches of {batch}" if batch else "steps of 100 ms"
        lines.append(f"**{workers} hosts, {'ResNet-8' if model == 'resnet8' else 'MLP'}, {what}**\n")
        rows: list[list[Any]] = []
        for name in next(iter(found.values())):
            cells = [found[network].get(name) for network in there]
            shares = [c and f"{c.ratio:.2f} ({spread(*c.spread)})" for c in cells]  # type: ignore[misc]
            rows.append([name, *shares])
        times = [found[network]["none"] for network in there]
        rows.insert(1, ["its step, ms", *(f"{row.values['ms']:.0f}" for row in times)])
        rows.insert(2, ["one average, ms", *(f"{row.values['average_ms']:.0f}" for row in times)])
        lines += [*table(["method", *there], rows), ""]
    lines.append("**The best of each side**\n")
    best = []
    for (workers, model, batch), found in groups.items():
        for network, its in found.items():
            sides = [[row for row in its.values() if of(row.name)] for of in (of_offbeat, of_peer)]
            if all(sides):
                a, b = (max(side, key=lambda row: row.ratio or 0.0) for side in sides)
                place = f"{workers} hosts, {network}, {model}{f', batches of {batch}' if batch else ''}"
                best.append([place, f"{a.name}: {a.ratio:.2f}", f"{b.name}: {b.ratio:.2f}"])
    lines += [*table(["where", "Offbeat", "peers"], best), ""]
    return lines + same(record)


CAUSE = """
`bsp` against DDP at 50 Mbit: in these figures BSP's last bucket, which leaves when backward is over, held
0.60 of ResNet-8's 1.23 MB. Since then it has 256 KB at most; tested in steps of 300 ms that sleep, in turns
with DDP: `bsp` had 0.64 (0.61 to 0.68) of the speed without communication with the old bucket, and 0.90
(0.86 to 1.02) of DDP's; with the small one 0.83 (0.66 to 0.86), and 1.16 (0.95 to 1.27) of DDP's. The table
has not been measured again yet."""


def same(record: Record) -> list[str]:
    """Offbeat's plans against the peers that do the same thing."""
    from page import paragraph, spread, table

    rows, slower = [], []
    for row in record.rows:
        of = row.settings
        for name, value in row.values.items():
            if name.startswith("speed over "):
                where = f"{of['workers']} hosts, {of['network']}, {of['model']}"
                where += f", batches of {of['batch']}" if of["batch"] else ""
                cell = f"{value[0]:.2f} ({spread(*value[1:])})"
                rows.append([where, row.name, name[11:], cell])
                if value[2] < 1:
                    slower.append(f"`{row.name}` against {name[11:]} ({where}): {cell}")
    text = (
        "**The same thing by Offbeat and by a peer**: how many times as fast Offbeat is, median and spread "
    )
    text += "of the rounds. Slower than a peer by more than the spread: "
    text += f"{'; '.join(slower)}." if slower else "no row."
    head = ["where", "Offbeat", "peer", "Offbeat's speed over the peer's"]
    return [text + "\n", *table(head, rows), "", paragraph(CAUSE)]


def main() -> int:
    args = options()
    if os.environ.get(WORKER):
        work(args)
    found = run(args)
    where = {name: value for name, value in vars(args).items() if name not in ("json", "hosts_tool", "peers")}
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    print(f"a step computes for {found['compute_ms']:.0f} ms, an average takes {found['average_ms']:.0f} ms")
    print(f"{'method':28} {'ms/step':>9} {'of none':>8}  {'lowest to highest':>18}")
    rows = list(rows_of({}, found))
    for row in rows:
        low, high = row.spread or (0.0, 0.0)
        print(f"{row.name:28} {row.values['ms']:9.1f} {row.ratio:8.3f}  {low:8.3f} to {high:.3f}", end="")
        others = {name[11:]: value for name, value in row.values.items() if name.startswith("speed over ")}
        told = (f"{x[0]:.2f} of {name} ({x[1]:.2f} to {x[2]:.2f})" for name, x in others.items())
        print("   ", "; ".join(told))
    if args.json:
        Path(args.json).write_text(json.dumps({"settings": where, **found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
