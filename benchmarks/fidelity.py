"""How well a virtual cluster predicts real throughput: measures a few costs in an emulated network, writes
them down as a cluster's description, and holds its predictions to real jobs in the same network.

    python benchmarks/fidelity.py --hosts-tool PATH/hosts.py
    python benchmarks/fidelity.py --hosts-tool PATH/hosts.py --hosts 2 --rates 200mbit --plans "bsp; asp"

A worker on each host trains ResNet-8's 0.31 million parameters. Its units have a fixed duration (`--step`),
in which they sleep (`emulated.sleeping`). Under ASP durations vary by `--jitter`: workers that began together
would stay so for long, and not meet on the links. The last cases of 2 hosts compute for real; where
processors change their speed by the minute, a unit's duration has to be that of its own job, and forward
passes tell it: the units that were measured alone are scaled by them.

Measured before, with nothing of what is predicted: units and optimizer steps of workers alone, all hosts at
once; a small message's way (latency); a stream by bytes (burst); an all-reduce by bytes (rate, overhead); a
push and a pull of two models without a limit of the rate (the shards' overhead and bytes per second). The
descriptions and the journals lie in `--out`.

Predicted and measured are units per second in the journal, from `--warm` seconds after the start on.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import emulated
from emulated import environment, tool

SIZES = tuple(quarter << 18 for quarter in range(1, 7))
"""Bytes of the all-reduces that are measured: a quarter of the model to all of it and more."""


def options() -> argparse.Namespace:
    parser = emulated.parser(__doc__, [2, 4], ["50mbit", "200mbit"])
    parser.add_argument("--plans", default="bsp; local(4); dasgd(4,2); asp", help="separated by ';'")
    parser.add_argument("--step", type=float, default=0.1, help="seconds of a unit")
    parser.add_argument("--jitter", type=float, default=0.3, help="σ of a unit's logarithm under asp")
    parser.add_argument(
        "--seconds", type=float, default=12.0, help="of a job that count; twice as many under asp"
    )
    parser.add_argument("--warm", type=float, default=2.0, help="seconds before them")
    parser.add_argument("--batch", type=int, default=16, help="samples of a unit that computes for real")
    parser.add_argument("--no-real", action="store_true", help="leave out the units that compute for real")
    parser.add_argument("--out", default="runs/fidelity", help="folder for descriptions and journals")
    for name in ("--job", "--compute"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    return parser.parse_args()


# What the hosts run


def units(net: Any, args: argparse.Namespace) -> tuple[Callable[[], None], list[float]]:
    """Computes a unit's gradient; and a list that gets the seconds of each one's forward."""
    import torch
    import torch.nn.functional as F

    forwards: list[float] = []
    if args.compute != "real":
        jitter = args.jitter if args.compute == "jitter" else 0.0
        return emulated.sleeping(net, args.step, jitter, forwards), forwards
    torch.manual_seed(int(os.environ.get("RANK", "0")))
    x, y = torch.randn(args.batch, 3, 32, 32), torch.randint(0, 10, (args.batch,))

    def compute() -> None:
        begun = time.perf_counter()
        loss = F.cross_entropy(net(x), y)
        forwards.append(time.perf_counter() - begun)
        loss.backward()

    return compute, forwards


def trained(args: argparse.Namespace, **settings: Any) -> tuple[Callable[[], None], list[float], Any]:
    import torch
    from models import resnet8

    import offbeat

    torch.manual_seed(0)
    net = resnet8()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
    unit, forwards = units(net, args)
    return unit, forwards, offbeat.Synchronizer(net, optimizer, **settings)


def train(args: argparse.Namespace) -> None:
    """The job whose throughput is predicted."""
    import offbeat

    offbeat.init()
    unit, forwards, sync = trained(args, total=1)
    with sync:
        while not sync.done:
            unit()
            sync.step()
    if args.compute == "real":
        keep(args, os.environ["RANK"], forwards[5:])


def keep(args: argparse.Namespace, rank: str, found: Any) -> None:
    (Path(args.out) / f"{args.job}-{rank}.json").write_text(json.dumps(found))


def kept(args: argparse.Namespace, job: str, hosts: int) -> list[Any]:
    """What every rank of a job has kept."""
    return [json.loads((Path(args.out) / f"{job}-{rank}.json").read_text()) for rank in range(hosts)]


def compute(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of units, of their forward parts and of steps, of a worker alone."""
    import offbeat

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    offbeat.init(out=False)
    number = 60 if args.compute == "real" else 30
    unit, forwards, sync = trained(args, plan="bsp", total=number)
    seconds, updates = [], []
    with sync:
        while not sync.done:
            begun = time.perf_counter()
            unit()
            computed = time.perf_counter()
            sync.step()
            seconds.append(computed - begun)
            updates.append(time.perf_counter() - computed)
    return {"units": seconds[5:], "forwards": forwards[5:], "updates": updates[5:]}


def links(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a small message's way, and of streams and all-reduces by their bytes."""
    import torch
    from torch.distributed import TCPStore

    from offbeat.cluster.epoch import Epoch

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    where, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(where, port, world, rank == 0)
    epoch = Epoch(0, range(world), rank, store, torch.device("cpu"))
    found: dict[str, Any] = {"way": []}
    if rank == 0:
        with socket.create_server((where, port + 1)) as door:
            store.set("door", "")
            line, _ = door.accept()
            with line:
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for _ in range(100):
                    begun = time.perf_counter()
                    line.sendall(b"?")
                    line.recv(1)
                    found["way"].append((time.perf_counter() - begun) / 2)
                    time.sleep(0.002)
                for size in SIZES:
                    data, seconds = bytes(size), []
                    for _ in range(5):
                        time.sleep(0.1)
                        begun = time.perf_counter()
                        line.sendall(data)
                        line.recv(1)
                        seconds.append(time.perf_counter() - begun)
                    found[f"stream {size}"] = seconds
    elif rank == 1:
        store.wait(["door"])
        with socket.create_connection((where, port + 1)) as line:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for size in (1,) * 100 + tuple(size for size in SIZES for _ in range(5)):
                missing = size
                while missing:
                    missing -= len(line.recv(min(missing, 1 << 16)))
                line.sendall(b"!")

    row = torch.zeros(64, dtype=torch.uint8)

    def meet() -> None:
        _, work = epoch.gather(row)
        work.wait()

    for size in SIZES:
        tensor, seconds = torch.zeros(size // 4), []
        for _ in range(9):
            meet()
            time.sleep(0.1)
            meet()
            begun = time.perf_counter()
            epoch.sum(tensor, "averages").wait()
            seconds.append(time.perf_counter() - begun)
        found[str(size)] = seconds[1:]
    meet()
    return found


def shards(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a push to all other hosts and the pull from them, for models of two sizes: rank 0's, while
    nobody else does anything."""
    from shards import Bench
    from torch.distributed import TCPStore

    from offbeat.cluster.client import Client, receive
    from offbeat.cluster.memory import make_file
    from offbeat.cluster.server import Server
    from offbeat.cluster.wire import Keys, bind_address

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(*where, world, rank == 0)
    if rank == 0:
        store.set("keys", Keys.make().to_text())
    keys, found = Keys.from_text(store.get("keys").decode()), {}
    for size, number in (("0.3M", 1), ("9.9M", 8)):
        bench = Bench(make_file(), size, number, world, 1, 0, first=True)
        server = Server(bench.memory, keys, 1, range(world), bind_address(where))
        store.set(f"{size} {rank}", f"{server.address} {server.public}")
        if rank == 0:
            places = [store.get(f"{size} {other}").decode().split() for other in range(1, world)]
            clients = [Client(*place, keys, 1, rank) for place in places]
            for client in clients:
                client.ready(lambda: None)
            sizes = [client._shard(s)[0] for client in clients for s in range(number)]
            data = [memoryview(bytearray(largest)) for largest in sizes]
            seconds = []
            for _ in range(20):
                time.sleep(0.02)
                push, begun = bench.push(rank), time.perf_counter()
                for index, client in enumerate(clients):
                    for s in range(number):
                        client.push(s, push, data[index * number + s])
                        client.pull(float("-inf"), lambda *found: None, [s])
                receive(clients, lambda: None)
                seconds.append(time.perf_counter() - begun)
            found[size] = {"bytes": sum(p.numel() for p in bench.parameters) * 4, "seconds": seconds[5:]}
            for client in clients:
                client.close()
        store.set(f"{size} over {rank}", "")
        store.wait([f"{size} over 0"])
        server.close()
    store.set(f"seen{rank}", "")
    store.wait([f"seen{other}" for other in range(world if rank == 0 else 1)])
    return found


# What is measured first


def ask(args: argparse.Namespace, lab: Any, job: str, compute: str = "fixed") -> list[Any]:
    """What a job found on each host."""
    run(args, lab, job, compute, {})
    return kept(args, job, lab.count)


def run(args: argparse.Namespace, lab: Any, job: str, compute: str, settings: dict[str, str]) -> None:
    """Runs a job on all hosts. Ends the program where one fails."""
    command = [sys.executable, __file__, "--job", job, "--compute", compute, "--out", args.out]
    for name in ("step", "jitter", "batch"):
        command += [f"--{name}", str(getattr(args, name))]
    said = io.StringIO()
    codes = lab.start(command, extra={**environment(), **settings}, out=said).wait(fail_fast=True)
    if any(codes.values()):
        raise SystemExit(f"{said.getvalue()}a worker failed: {codes}")


def of_shards(args: argparse.Namespace, lab: Any) -> dict[str, float]:
    """`apply` and `overhead` of the shards: what a push and its pull take without a limit of the rate, two
    latencies included."""
    small, large = ask(args, lab, "shards")[0].values()
    seconds = [statistics.median(one["seconds"]) for one in (small, large)]
    slices = [one["bytes"] / lab.count for one in (small, large)]
    per_byte = (seconds[1] - seconds[0]) / (slices[1] - slices[0])
    return {"apply": 1 / per_byte, "push": seconds[0] - slices[0] * per_byte}


def of_links(args: argparse.Namespace, lab: Any) -> dict[str, Any]:
    """Latency, burst, rate and the all-reduce's overhead. Mean times contain what is lost on the way and sent
    again. A shaped link lets some bytes pass at once after a pause: then what is left over is negative, and
    counts as a stream's burst, and as no overhead."""
    found, hops = ask(args, lab, "links")[0], 2 * (lab.count - 1)
    latency = statistics.median(found["way"])
    seconds = [statistics.fmean(found[str(size)]) for size in SIZES]
    per_byte, fixed = line_through(seconds)
    _, early = line_through([statistics.median(found[f"stream {size}"]) for size in SIZES])
    return {
        "latency": latency,
        "burst": max(2 * latency - early, 0.0),
        "rate": hops / lab.count / per_byte,
        "fixed": fixed,
        "allreduce": max(fixed - hops * latency, 0.0),
        "seconds": seconds,
    }


def line_through(seconds: Sequence[float]) -> tuple[float, float]:
    """Of times for SIZES: the median of the slopes between any two, and of what is left over."""
    pairs = itertools.combinations(zip(SIZES, seconds, strict=True), 2)
    slope = statistics.median((t - s) / (b - a) for (a, s), (b, t) in pairs)
    return slope, statistics.median(t - slope * size for size, t in zip(SIZES, seconds, strict=True))


def of_compute(args: argparse.Namespace, lab: Any, kind: str) -> dict[str, Any]:
    """Units and optimizer steps, all hosts computing at once."""
    rows = ask(args, lab, "compute", kind)
    units, forwards, updates = (
        [t for row in rows for t in row[name]] for name in ("units", "forwards", "updates")
    )
    return {
        "units": [float(f"{seconds:.6f}") for seconds in units],
        "update": statistics.median(updates),
        "forward": statistics.fmean(forwards),
        "backward": 1 - sum(forwards) / sum(units),
    }


def describe(path: Path, name: str, hosts: int, costs: dict[str, Any], kind: str, jitter: float) -> None:
    """Writes a cluster's description."""
    rows = [
        f'name = "{name}"',
        f"size = {hosts}",
        "[compute]",
        f'unit = "{statistics.fmean(costs["units"]) * 1e3:.3f} ms"',
        f'update = "{costs["update"] * 1e3:.3f} ms"',
        f"backward = {costs['backward']:.3f}",
        *{
            "fixed": [],
            "jitter": ['kind = "lognormal"', f"sigma = {jitter}"],
            "real": ['kind = "samples"', f"samples = {costs['units']}"],
        }[kind],
        "[link]",
        f'rate = "{costs["rate"] * 8e-6:.3f} Mbit/s"',
        f'latency = "{costs["latency"] * 1e3:.4f} ms"',
        f'burst = "{costs["burst"] * 1e3:.2f} ms"',
        "[allreduce]",
        f'overhead = "{costs["allreduce"] * 1e3:.3f} ms"',
        "[shards]",
        f'apply = "{costs["apply"] * 1e-6:.1f} MB/s"',
        f'overhead = "{max(costs["push"] - 2 * costs["latency"], 0) * 1e3:.3f} ms"',
    ]
    path.write_text("\n".join(rows) + "\n")


# Throughput


class Memory:
    """A journal in memory."""

    def __init__(self, clock: Any):
        self.clock, self.rows = clock, []

    def record(self, type: str, **fields: Any) -> None:
        self.rows.append({"type": type, "t": self.clock.now, **fields})


def simulated(path: Path, plan: str, total: int) -> list[Any]:
    """The journal of a timing-only run."""
    from models import resnet8

    from offbeat.plan import parse
    from offbeat.virtual.clock import Clock
    from offbeat.virtual.cost import Costs
    from offbeat.virtual.description import read
    from offbeat.virtual.timing import Model, simulate

    net, clock = resnet8(), Clock()
    buffers = sum(b.numel() * b.element_size() for b in net.buffers() if b.is_floating_point())
    model = Model(tuple(p.numel() for p in net.parameters()), buffers=buffers)
    journal = Memory(clock)
    simulate(parse(plan), total, Costs(read(path), 0), model, journal=journal, clock=clock)
    return journal.rows


def speed(records: Sequence[Any], plan: str, warm: float) -> float:
    """Units per second."""
    from offbeat.plan import parse

    since = next(r["t"] for r in records if r["type"] == "phase") + warm
    steps = [r for r in records if r["type"] == "step" and r["t"] >= since]
    rows = ((r["clock"], r["t"], r["units"]) for r in steps)
    return emulated.slope(rows, getattr(parse(plan), "period", 1))


def real(args: argparse.Namespace, lab: Any, plan: str, kind: str, total: int) -> list[Any]:
    """The journal of a real run."""
    from offbeat.journal import read

    out = Path(args.out) / "run"
    shutil.rmtree(out, ignore_errors=True)
    settings = {"OFFBEAT_PLAN": plan, "OFFBEAT_TOTAL": str(total), "OFFBEAT_OUT": str(out)}
    run(args, lab, "train", kind, settings)
    return read(out)


def virtual(args: argparse.Namespace, cluster: Path, plan: str, total: int, workers: int) -> list[Any]:
    """The journal of a virtual run with gradients."""
    from offbeat.journal import read

    out = Path(args.out) / "virtual"
    shutil.rmtree(out, ignore_errors=True)
    words = [
        "-m",
        "offbeat",
        "run",
        "-q",
        "--virtual",
        str(workers),
        "--cluster",
        str(cluster),
        "--plan",
        plan,
    ]
    words += ["--total", str(total), "--seed", "0", "--out", str(out), "--", __file__, "--job", "train"]
    words += ["--step", "0"]  # the description has it
    command = [sys.executable, *words]
    done = subprocess.run(command, env={**os.environ, **environment()}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return read(out)


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every plan on every network."""
    plans, rows = [plan.strip() for plan in args.plans.split(";")], []
    for hosts in args.hosts:
        with tool(args.hosts_tool).Hosts(hosts, name="fidelity") as lab:
            pushes, computed = of_shards(args, lab), {"fixed": of_compute(args, lab, "fixed")}
            if hosts == 2 and not args.no_real:
                computed["real"] = of_compute(args, lab, "real")
            for rate in args.rates:
                for host in range(hosts):
                    lab.set(host, rate=rate)
                costs = {**pushes, **of_links(args, lab)}
                tell(f"{hosts} hosts at {rate}", costs)
                for compute, its in computed.items():
                    if compute == "real" and rate != args.rates[-1]:
                        continue
                    print(
                        f"  {compute}: unit {statistics.fmean(its['units']) * 1e3:.1f} ms, update "
                        f"{its['update'] * 1e3:.2f} ms, backward {its['backward']:.2f}"
                    )
                    print(f"  {'plan':12} {'measured':>9} {'predicted':>9} {'error':>7}  units/s")
                    rows += [case(args, lab, rate, plan, compute, {**costs, **its}) for plan in plans]
    return rows


def tell(where: str, costs: dict[str, Any]) -> None:
    seconds = ", ".join(f"{1e3 * one:.1f}" for one in costs["seconds"])
    print(
        f"{where}: {costs['rate'] * 8e-6:.1f} Mbit/s, {costs['latency'] * 1e3:.3f} ms one way, burst "
        f"{costs['burst'] * 1e3:.1f} ms; all-reduces "
        f"of ¼ to 1½ MiB {seconds} ms, fixed part {costs['fixed'] * 1e3:.1f} ms; shards "
        f"{costs['apply'] * 1e-6:.0f} MB/s, {costs['push'] * 1e3:.1f} ms"
    )


def case(
    args: argparse.Namespace, lab: Any, rate: str, plan: str, compute: str, costs: dict[str, Any]
) -> dict[str, Any]:
    hosts, first = lab.count, lab.count == args.hosts[0] and rate == args.rates[0]
    kind = "jitter" if compute == "fixed" and plan.startswith("asp") else compute
    name = f"{hosts}x{rate}-{kind}"

    def predict(total: int, scale: float = 1.0) -> float:
        its = {**costs, "units": [seconds * scale for seconds in costs["units"]]}
        describe(path, name, hosts, its, kind, args.jitter)
        return speed(simulated(path, plan, total), plan, args.warm)

    path = Path(args.out) / f"{name}.toml"
    seconds = args.warm + args.seconds * (1 + plan.startswith("asp"))
    total = round(predict(1000 * hosts) * seconds)
    row: dict[str, Any] = {"hosts": hosts, "rate": rate, "plan": plan, "compute": compute, "units": total}
    row["measured"] = speed(real(args, lab, plan, kind, total), plan, args.warm)
    row["scale"] = 1.0
    if compute == "real":
        forwards = [seconds for rows in kept(args, "train", hosts) for seconds in rows]
        row["scale"] = statistics.fmean(forwards) / costs["forward"]
    row["predicted"] = predict(1000 * hosts, row["scale"])
    row["error"] = row["predicted"] / row["measured"] - 1
    text = f"  {plan:12} {row['measured']:9.3f} {row['predicted']:9.3f} {100 * row['error']:+6.1f}%"
    if compute == "real":
        text += f"  units took {row['scale']:.2f} of their time alone"
    if first and compute == "fixed":
        row["gradients"] = (
            speed(virtual(args, path, plan, total, hosts), plan, args.warm) / predict(total) - 1
        )
        text += f"  with gradients {100 * row['gradients']:+.2f}% to timing only"
    print(text, flush=True)
    return row


def main() -> int:
    args = options()
    args.out = str(Path(args.out).resolve())
    Path(args.out).mkdir(parents=True, exist_ok=True)
    if args.job == "train":
        train(args)
        return 0
    if args.job:
        rank = os.environ["RANK"]
        found = {"compute": compute, "links": links, "shards": shards}[args.job](args)
        keep(args, rank, found)
        return 0
    settings = emulated.settings(args, "step", "jitter", "seconds", "warm", "batch")
    rows = cases(args)
    errors = [abs(row["error"]) for row in rows]
    print(f"error: median {100 * statistics.median(errors):.1f}%, worst {100 * max(errors):.1f}%")
    emulated.keep(args.json, settings, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
