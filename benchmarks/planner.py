"""Predicted against measured: what a profile says of every protocol, and what real jobs do in the same
emulated network.

    python benchmarks/planner.py --hosts-tool PATH/hosts.py --json results.json
                                        measures, and prints the table of docs/planner.md; given again,
                                        it leaves out the networks that the file has already
    python benchmarks/planner.py --table results.json more.json
                                        prints it again, of several runs' results; the later ones count

One worker on each host. For every network and model the workers profile themselves, as `offbeat profile`
does, and then train under one plan after the other; nothing else is known to the prediction. Units have a
duration of their own (`--step`, lognormal with `--jitter`), in which they sleep (`emulated.sleeping`).
Measured is the slope of units over time, the first `--warm` seconds left out; under asp, whose workers begin
in step and meet on the links only when they have drifted apart, three times as many steps, and the first
third left out. Plans of a network that took more than 10 % more or less than predicted are measured again,
from the profile on, until each was measured `--times` times: of those that one counts whose error is the
median. `busy` is the share of the machine's processors that the job needed, `queued` the seconds of an
iteration in which the first worker's threads, added up, could have gone on and had no processor (Linux's
schedstat).

`--auto` measures dasgd(auto) instead: its share of the speed without communication, in turns with that; and
what it chooses when the links change their rate while it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import emulated
from emulated import environment, tool

PLANS = "bsp; local(4); dasgd(2,1); dasgd(4,2); asp"
BUSY = 0.06
"""Where units that sleep take longer than they should by such a share, other programs have the processors:
the profile is taken again."""
WRONG = 0.1
"""An error from which on a case is measured again."""
LEAST = 20
"""Steps of a job."""
ALONE = "local(period=1000000000)"


def options() -> argparse.Namespace:
    parser = emulated.parser(__doc__, [2, 4], ["50mbit", "200mbit", "1gbit"])
    parser.add_argument(
        "--delays", nargs="+", default=["0", "10ms"], help="one way, from a host to any other"
    )
    parser.add_argument("--models", nargs="+", choices=("resnet8", "mlp"), default=["resnet8", "mlp"])
    parser.add_argument("--plans", default=PLANS, help="separated by ';'")
    parser.add_argument("--step", type=float, default=0.1, help="mean seconds of a unit")
    parser.add_argument("--jitter", type=float, default=0.1, help="σ of a unit's logarithm")
    parser.add_argument("--seconds", type=float, default=7.0, help="of a job that count")
    parser.add_argument("--warm", type=float, default=1.5, help="seconds before them")
    parser.add_argument("--profile", type=int, default=30, help="units that each worker profiles")
    parser.add_argument("--times", type=int, default=3, help="a case is measured where it misses 10 %%")
    parser.add_argument("--minutes", type=float, default=60.0, help="no network begins later")
    parser.add_argument("--auto", action="store_true", help="measure dasgd(auto) instead")
    parser.add_argument("--out", default="runs/planner", help="folder for profiles")
    parser.add_argument("--table", nargs="+", help="print the table of results that were written before")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


# The workers


def network(model: str) -> Any:
    import torch
    from models import resnet8
    from torch import nn

    torch.manual_seed(0)
    if model == "resnet8":
        return resnet8()
    layers = [nn.Linear(3072, 2048), nn.ReLU(), nn.Linear(2048, 1750), nn.ReLU(), nn.Linear(1750, 10)]
    return nn.Sequential(nn.Flatten(), *layers)  # 9.9 M parameters


def trained(args: argparse.Namespace, model: str, plan: str, total: int) -> tuple[Callable[[], None], Any]:
    """A unit to compute, and what to step with."""
    import torch

    import offbeat

    net = network(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
    unit = emulated.sleeping(net, args.step, args.jitter)
    return unit, offbeat.Synchronizer(net, optimizer, plan=plan, total=total)


def profiled(args: argparse.Namespace, model: str, path: Path) -> None:
    """Profiles as `offbeat profile` does, and goes on."""
    from offbeat.planner.known import environment as asked

    world = int(os.environ["WORLD_SIZE"])
    names = asked(path, args.profile, world)
    os.environ.update(names)
    try:
        unit, sync = trained(args, model, "bsp", 1)
        while True:
            unit()
            sync.step()
    except SystemExit:
        return
    finally:
        for name in names:
            os.environ.pop(name, None)


class Step(NamedTuple):
    """After a step: the seconds, the units done, the clock, the delay in force, the seconds of a processor
    that this worker has needed, and (after the first and the last) those that its threads have waited for
    one."""

    at: float
    units: int
    clock: int
    delay: int
    busy: float
    queued: dict[str, float]


def queued() -> dict[str, float]:
    """Seconds that each of this process's threads has waited for a processor so far."""
    found = {}
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    return found


def ran(args: argparse.Namespace, model: str, plan: str, total: int) -> list[Step]:
    """Trains."""
    unit, sync = trained(args, model, plan, total)
    rows = []
    with sync:
        while not sync.done:
            unit()
            sync.step()
            worker, now = sync._loop.worker, time.perf_counter()
            needed = time.process_time(), {} if rows and not sync.done else queued()
            rows.append(Step(now, sync.units, worker.clock, worker.hiding, *needed))
    return rows


def speed(rows: Sequence[Step], period: int, warm: float) -> float:
    """Units per second."""
    counted = [row for row in rows[:-1] if row.at >= rows[0].at + warm]  # the last step waits for all to end
    return emulated.slope(((row.clock, row.at, row.units) for row in counted), period)


def work(args: argparse.Namespace) -> None:
    """Does what the files "do-K" ask for, one after the other, and answers with "did-K"."""
    import offbeat

    offbeat.init(out=False)
    out, number = Path(args.out), 0
    while True:
        order = out / f"do-{number}"
        while not order.exists():
            time.sleep(0.02)
        asked = json.loads(order.read_text())
        if not asked:
            return
        answer = answers(args, **asked)
        if offbeat.rank() == 0:
            put(out / f"did-{number}", answer)
        number += 1


def answers(args: argparse.Namespace, model: str, plans: Sequence[str], name: str) -> list[Any]:
    if args.auto:
        return list(in_turns(args, model, plans))
    import offbeat
    from offbeat.plan import parse
    from offbeat.planner.forms import Forms
    from offbeat.virtual.description import read
    from offbeat.virtual.model import Model

    for number in range(4):
        path = Path(args.out) / f"{name}-{number}.toml"
        path.unlink(missing_ok=True)
        profiled(args, model, path)
        while not path.exists():
            time.sleep(0.02)
        cluster = read(path).sized(offbeat.world_size())
        if abs(cluster.groups[-1].compute.unit / args.step - 1) < BUSY:
            break
    assert cluster.model is not None
    forms, found = Forms(cluster, Model.of(cluster.model)), []
    for plan in plans:
        each = forms.of(parse(plan)).seconds
        period = getattr(parse(plan), "period", 1)
        steps, warm = max(round((args.seconds + args.warm) / each), 2 * period + 6, LEAST), args.warm
        if parse(plan).home == "shards":
            steps, warm = 3 * steps, inf
        rows = ran(args, model, plan, steps * cluster.size)
        warm = min(warm, (rows[-1].at - rows[0].at) / 3)
        measured = cluster.size / speed(rows, period, warm)
        first, last = rows[0], rows[-1]
        busy = cluster.size * (last.busy - first.busy) / (last.at - first.at) / (os.cpu_count() or 1)
        waits = sum(seconds - first.queued.get(name, 0.0) for name, seconds in last.queued.items())
        one = {"plan": plan, "predicted": each, "measured": measured, "steps": steps}
        found.append({**one, "busy": busy, "queued": waits / (len(rows) - 1)})
    return found


def in_turns(args: argparse.Namespace, model: str, plans: Sequence[str]) -> Iterator[Any]:
    """Seconds of a step under each plan, and the delays that were in force."""
    import offbeat

    for plan in plans:
        steps = round((args.seconds + args.warm) / args.step)
        rows = ran(args, model, plan, steps * offbeat.world_size())
        begun = rows[0].at
        delays = [(0.0, rows[0].delay)]
        for row in rows:
            if row.delay != delays[-1][1]:
                delays.append((round(row.at - begun, 2), row.delay))
        seconds = offbeat.world_size() / speed(rows, 1, args.warm)
        yield {"plan": plan, "seconds": seconds, "delays": delays}


# The one who asks


def put(path: Path, content: Any) -> None:
    """All at once."""
    path.with_suffix(".new").write_text(json.dumps(content))
    path.with_suffix(".new").rename(path)


class Lab:
    """Emulated hosts with a worker on each, that wait for what to do."""

    def __init__(self, args: argparse.Namespace, lab: Any, out: Path):
        self._out, self._number = out, 0
        for old in [*out.glob("do-*"), *out.glob("did-*")]:
            old.unlink()
        words = [sys.executable, __file__, "--worker", "--out", str(out)]
        for key in ("step", "jitter", "seconds", "warm", "profile"):
            words += [f"--{key}", str(getattr(args, key))]
        self._said = io.StringIO()
        self._job = lab.start(words + ["--auto"] * args.auto, extra=environment(), out=self._said)

    def ask(self, **order: Any) -> None:
        put(self._out / f"do-{self._number}", order)

    def answer(self) -> Any:
        path = self._out / f"did-{self._number}"
        while not path.exists():
            if any(process.poll() is not None for process in self._job.processes.values()):
                raise SystemExit(f"{self._said.getvalue()}a worker has ended")
            time.sleep(0.05)
        self._number += 1
        return json.loads(path.read_text())

    def close(self) -> None:
        put(self._out / f"do-{self._number}", {})
        self._job.wait(timeout=30)


def cases(args: argparse.Namespace, rows: list[dict[str, Any]], save: Callable[[], None]) -> None:
    plans, begun = [plan.strip() for plan in args.plans.split(";")], time.monotonic()
    out = Path(args.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    for hosts in args.hosts:
        for delay in args.delays:
            with tool(args.hosts_tool).Hosts(hosts, delay=delay, name="planner") as lab:
                team = Lab(args, lab, out)
                for model in args.models:
                    for rate in args.rates:
                        if any(_is(row, hosts, rate, delay, model) for row in rows):
                            continue
                        if time.monotonic() > begun + 60 * args.minutes:
                            print("out of time")
                            team.close()
                            return
                        for host in range(hosts):
                            lab.set(host, rate=rate)
                        where = {"hosts": hosts, "rate": rate, "delay": delay, "model": model}
                        for one in network_cases(args, team, plans, where):
                            rows.append(one)
                            tell(one)
                        save()
                team.close()


def _is(row: dict[str, Any], hosts: int, rate: str, delay: str, model: str) -> bool:
    return [row[name] for name in ("hosts", "rate", "delay", "model")] == [hosts, rate, delay, model]


def network_cases(
    args: argparse.Namespace, team: Lab, plans: Sequence[str], where: dict[str, Any]
) -> list[dict[str, Any]]:
    """Of each plan what counts, with the errors of all times that it was measured."""
    name, found = "-".join(map(str, where.values())), dict[str, list[dict[str, Any]]]()
    left = list(plans)
    while left:
        team.ask(model=where["model"], plans=left, name=name)
        for one in team.answer():
            found.setdefault(one["plan"], []).append({**one, "error": one["measured"] / one["predicted"] - 1})
        left = [plan for plan, tries in found.items() if 1 < len(tries) < args.times or _again(args, tries)]
    rows = []
    for tries in found.values():
        errors = [one["error"] for one in tries]
        counts = next(one for one in tries if one["error"] == statistics.median_low(errors))
        rows.append({**where, **counts, "errors": errors})
    return rows


def _again(args: argparse.Namespace, tries: Sequence[dict[str, Any]]) -> bool:
    return len(tries) == 1 < args.times and abs(tries[0]["error"]) > WRONG


def tell(row: dict[str, Any]) -> None:
    errors = [f"{100 * error:+.1f}%" for error in row["errors"]]
    print(
        f"{row['hosts']} hosts {row['rate']:8} {row['delay']:5} {row['model']:8} {row['plan']:11} "
        f"predicted {row['predicted'] * 1e3:8.1f} ms, measured {row['measured'] * 1e3:8.1f} ms "
        f"{100 * row['error']:+6.1f}%, busy {100 * row['busy']:.0f}%, queued {row['queued'] * 1e3:.1f} ms"
        + (f" (of {', '.join(errors)})" if len(errors) > 1 else ""),
        flush=True,
    )


def automatic(args: argparse.Namespace, rows: list[dict[str, Any]], save: Callable[[], None]) -> None:
    out = Path(args.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tool(args.hosts_tool).Hosts(2, rate="50mbit", name="planner") as lab:
        team = Lab(args, lab, out)
        team.ask(model="resnet8", plans=[ALONE, "dasgd(auto)"] * 4, name="")
        found = team.answer()
        shares = [
            none["seconds"] / auto["seconds"] for none, auto in zip(found[::2], found[1::2], strict=True)
        ]
        print(f"dasgd(auto) at 50 Mbit: {statistics.median(shares):.3f} of no communication, {shares}")
        print("  seconds and delays:", [auto["delays"] for auto in found[1::2]])
        rows += found
        save()
        for host in range(2):
            lab.set(host, rate="1gbit")
        team.ask(model="resnet8", plans=["dasgd(auto)"] * 1, name="")
        time.sleep((args.seconds + args.warm) / 2)
        for host in range(2):
            lab.set(host, rate="25mbit")
        found = team.answer()
        print("1 Gbit, then 25 Mbit after half of the time: seconds and delays", found[0]["delays"])
        rows += found
        save()
        team.close()


# The table


def table(files: Sequence[dict[str, Any]]) -> None:
    """In Markdown, with the settings."""
    names = ("hosts", "rate", "delay", "model", "plan")
    each = {tuple(row[name] for name in names): row for found in files for row in found["cases"]}
    rows = list(each.values())
    plans = list(dict.fromkeys(row["plan"] for row in rows))
    print("| hosts | link | delay | model |", " | ".join(plans), "|")
    print("|---|---|---|---|" + "---|" * len(plans))
    cells: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in rows:
        key = tuple(row[name] for name in names[:-1])
        times = f"{row['predicted'] * 1e3:.0f} / {row['measured'] * 1e3:.0f}"
        often = f", of {len(row['errors'])}" if len(row["errors"]) > 1 else ""
        cells.setdefault(key, {})[row["plan"]] = f"{times} ({100 * row['error']:+.1f}%{often})"
    for key, its in cells.items():
        print(f"| {' | '.join(map(str, key))} | {' | '.join(its.get(plan, '') for plan in plans)} |")
    print()
    print(summary(rows))
    for found in files:
        print(", ".join(f"{name} {value}" for name, value in found["settings"].items()))


def summary(rows: Sequence[dict[str, Any]]) -> str:
    errors = [abs(row["error"]) for row in rows]
    within = sum(error <= 0.1 for error in errors) / len(errors)
    return (
        f"{len(rows)} cases: median error {100 * statistics.median(errors):.1f}%, {100 * within:.0f}% within "
        f"10%, largest {100 * max(errors):.1f}%"
    )


def main() -> int:
    args = options()
    if args.table:
        table([json.loads(Path(path).read_text()) for path in args.table])
        return 0
    if args.worker:
        work(args)
        return 0
    names = ("step", "jitter", "seconds", "warm", "profile", "times")
    settings, rows = emulated.settings(args, *names), list[dict[str, Any]]()
    if args.json and not args.auto and Path(args.json).exists():
        rows = json.loads(Path(args.json).read_text())["cases"]

    def save() -> None:
        emulated.keep(args.json, settings, rows)

    (automatic if args.auto else cases)(args, rows, save)
    if not args.auto and rows:
        table([{"settings": settings, "cases": rows}])
    return 0


if __name__ == "__main__":
    sys.exit(main())
