"""Training speed of every replica protocol, as a share of the speed without any communication.

    python benchmarks/throughput.py                              two workers here
    python benchmarks/throughput.py --rate 50mbit --hosts-tool PATH/hosts.py
                                                                 two emulated hosts on slow links

All methods run in the same processes and take turns, beginning with another one each time: in a turn a
method does `--warm` steps (so that an average is under way when the clock starts, as in the middle of a
job) and then `--steps` timed ones; `--turns` of them make a round. Printed are the median and the spread
(lowest to highest) over the rounds, as shares of the rounds' own no-communication speed. Peers are set up
as their documentation says.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import emulated

ROOT = Path(__file__).resolve().parent.parent


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--model", choices=("resnet8", "mlp"), default="resnet8")
    parser.add_argument("--batch", type=int, default=32, help="samples of a worker's step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=2, help="turns of a method in a round")
    parser.add_argument("--steps", type=int, default=8, help="timed steps in a turn")
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--only", help="methods to run beside 'none', separated by ';'")
    parser.add_argument("--rate", help="of every host's link, such as 50mbit: emulated hosts")
    parser.add_argument("--delay", default="0", help="one way, such as 10ms")
    parser.add_argument("--hosts-tool", help="the emulator's hosts.py", default=os.environ.get("HOSTS_TOOL"))
    parser.add_argument("--json", help="where to write the results")
    return parser.parse_args()


def methods(args: argparse.Namespace) -> dict[str, Callable[[], Callable[[], None]]]:
    """Each makes its own model and returns one training step."""
    import torch
    import torch.nn.functional as F
    from torch import distributed as dist
    from torch import nn

    import offbeat

    sys.path.insert(0, str(ROOT / "examples"))
    from models import resnet8

    x = torch.randn(args.batch, 3, 32, 32)
    y = torch.randint(0, 10, (args.batch,))

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model: nn.Module = resnet8()
        if args.model == "mlp":  # 9.9 M parameters
            layers = [nn.Linear(3072, 2048), nn.ReLU(), nn.Linear(2048, 1750), nn.ReLU(), nn.Linear(1750, 10)]
            model = nn.Sequential(nn.Flatten(), *layers)
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def loop(model: Callable[[torch.Tensor], torch.Tensor], then: Callable[[], None]) -> Callable[[], None]:
        def step() -> None:
            F.cross_entropy(model(x), y).backward()
            then()

        return step

    def none() -> Callable[[], None]:
        model, optimizer = make()

        def then() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return loop(model, then)

    def ddp() -> Callable[[], None]:
        model, optimizer = make()
        wrapped = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)

        def then() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return loop(wrapped, then)

    def post_local() -> Callable[[], None]:
        from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hook
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        model, inner = make()
        wrapped = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
        subgroup = [dist.new_group([rank]) for rank in range(args.workers)][dist.get_rank()]
        state = hook.PostLocalSGDState(None, subgroup, start_localSGD_iter=1)
        wrapped.register_comm_hook(state, hook.post_localSGD_hook)
        optimizer = PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=4, warmup_steps=1))

        def then() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return loop(wrapped, then)

    def flat_local() -> Callable[[], None]:
        model, optimizer = make()
        parameters = list(model.parameters())
        taken = 0

        def then() -> None:
            nonlocal taken
            optimizer.step()
            optimizer.zero_grad()
            taken += 1
            if taken % 4 == 0:
                with torch.no_grad():
                    flat = torch.cat([p.reshape(-1) for p in parameters])
                    dist.all_reduce(flat)
                    flat /= args.workers
                    for p, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                        p.copy_(piece.view_as(p))

        return loop(model, then)

    def ours(plan: str, wire: str | None = None) -> Callable[[], Callable[[], None]]:
        def build() -> Callable[[], None]:
            model, optimizer = make()
            sync = offbeat.Synchronizer(model, optimizer, plan=plan, total=10**9, wire=wire)
            return loop(model, sync.step)

        return build

    def formula() -> str:
        """The paper's rule: the smallest delay d with t_c < d·t_p, and a period of d + 1."""
        step, parameters = none(), sum(p.numel() for p in make()[0].parameters())
        flat = torch.zeros(parameters)
        computing, averaging = [], []
        for _ in range(7):
            dist.barrier()
            begun = time.perf_counter()
            step()
            computing.append(time.perf_counter() - begun)
            dist.barrier()
            begun = time.perf_counter()
            dist.all_reduce(flat)
            averaging.append(time.perf_counter() - begun)
        both = torch.tensor([statistics.median(averaging), statistics.median(computing)])
        dist.all_reduce(both)
        t_c, t_p = (both / args.workers).tolist()
        delay = int(t_c / t_p) + 1
        if dist.get_rank() == 0:
            print(
                f"t_p {t_p * 1e3:.1f} ms, t_c {t_c * 1e3:.1f} ms: delay {delay}, period {delay + 1}",
                flush=True,
            )
        return f"dasgd(period={delay + 1},delay={delay})"

    chosen = formula()
    found: dict[str, Callable[[], Callable[[], None]]] = {
        "none": none,
        "DDP": ddp,
        "DDP + PostLocalSGD(4)": post_local,
        "flat local SGD(4) by hand": flat_local,
        "bsp": ours("bsp"),
        "local(period=4)": ours("local(period=4)"),
        "dasgd(period=2,delay=1)": ours("dasgd"),
        "dasgd(period=4,delay=2)": ours("dasgd(period=4,delay=2)"),
        f"{chosen}, by the formula": ours(chosen),
        "dasgd(auto)": ours("dasgd(auto)"),
        "bsp, bf16 wire": ours("bsp", "bf16"),
        "dasgd(period=4,delay=2), bf16 wire": ours("dasgd(period=4,delay=2)", "bf16"),
    }
    if args.only:
        asked = ["none", *(word.strip() for word in args.only.split(";"))]
        unknown = [name for name in asked if name not in found]
        if unknown:
            raise SystemExit(f"no method {unknown[0]!r}; there are: {'; '.join(found)}")
        found = {name: found[name] for name in asked}
    return found


def work(args: argparse.Namespace) -> None:
    """One worker: every method in turn, in every round."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    warnings.filterwarnings("ignore", message=".*broadcast_buffers.*")
    import torch
    from torch import distributed as dist

    import offbeat

    dist.init_process_group("gloo")
    offbeat.init(seed=0, out=False)
    steps = {name: build() for name, build in methods(args).items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for number in range(args.rounds + 1):  # the first one warms up
        spent = dict.fromkeys(names, 0.0)
        for turn in range(args.turns):
            shift = (number * args.turns + turn) % len(names)
            for name in names[shift:] + names[:shift]:
                spent[name] += take_turn(steps[name], args)
                time.sleep(0.4)  # what is still under way lands before the next method's turn
        if number:
            for name in names:
                seconds[name].append(spent[name] / (args.turns * args.steps))
    if dist.get_rank() == 0:
        report(args, seconds, torch.__version__)
    dist.barrier()
    os._exit(0)


def take_turn(step: Callable[[], None], args: argparse.Namespace) -> float:
    """Seconds that the timed steps took, on the slowest worker."""
    from torch import distributed as dist

    for _ in range(args.warm):
        step()
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(args.steps):
        step()
    dist.barrier()
    return time.perf_counter() - begun


def report(args: argparse.Namespace, seconds: dict[str, list[float]], version: str) -> None:
    settings = {
        "workers": args.workers,
        "model": args.model,
        "batch": args.batch,
        "rounds": args.rounds,
        "turns": args.turns,
        "steps": args.steps,
        "warm": args.warm,
        "rate": args.rate or "loopback",
        "delay": args.delay,
        "torch": version,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }
    print(", ".join(f"{key} {value}" for key, value in settings.items()))
    print(f"{'method':42} {'ms/step':>9} {'of none':>8}  {'lowest to highest':>18} {'of DDP':>8}")
    rows = {}
    for name, times in seconds.items():
        shares = [free / own for free, own in zip(seconds["none"], times, strict=True)]
        row = {"ms": statistics.median(times) * 1e3, "share": statistics.median(shares)}
        row |= {"lowest": min(shares), "highest": max(shares)}
        text = f"{name:42} {row['ms']:9.1f} {row['share']:8.3f}  {row['lowest']:8.3f} to {row['highest']:.3f}"
        if "DDP" in seconds:
            against = [ddp / own for ddp, own in zip(seconds["DDP"], times, strict=True)]
            row |= {"of_ddp": statistics.median(against), "of_ddp_range": [min(against), max(against)]}
            text += f"    {row['of_ddp']:8.3f} ({min(against):.3f} to {max(against):.3f})"
        print(text)
        rows[name] = {**row, "seconds": times}
    if args.json:
        Path(args.json).write_text(json.dumps({"settings": settings, "methods": rows}, indent=1) + "\n")


def launch(args: argparse.Namespace) -> int:
    """Starts the workers: here, or one on each emulated host."""
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]]
    ours = {"OFFBEAT_BENCHMARK": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    ours["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    if args.rate:
        emulator = emulated.tool(args.hosts_tool)
        with emulator.Hosts(args.workers, rate=args.rate, delay=args.delay, name="throughput") as hosts:
            codes = hosts.start(command, extra=ours).wait(fail_fast=True)
        return int(any(codes.values()))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(args.workers)}
    processes = [
        subprocess.Popen(command, env={**os.environ, **ours, **place, "RANK": str(r), "LOCAL_RANK": str(r)})
        for r in range(args.workers)
    ]
    return int(any(process.wait() for process in processes))


def main() -> int:
    args = options()
    if os.environ.get("OFFBEAT_BENCHMARK"):
        work(args)
    return launch(args)


if __name__ == "__main__":
    sys.exit(main())
