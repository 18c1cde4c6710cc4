"""What elastic saves on real processes: 4 emulated hosts, and one of their links becomes slow for a part of
the BSP phase. Elastic and off, one after the other, `--repeat` times; medians of the BSP phase's seconds.

    python benchmarks/stragglers.py --hosts-tool PATH/hosts.py

A worker on each host trains 0.3 million parameters (1.2 MB). Its steps have a fixed duration, as the hosts
share few cores: it sleeps a third of `--step` before backward and the rest of it before the parameters'
gradients, in equal parts. The link of the last host is throttled from `--from` to `--till` of the BSP share,
counted in units, so it is slow while the same work is done. What is compared is the time of the whole share,
the detector's own included, from the first step to the switch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from emulated import tool

from offbeat import journal

TRAIN = """
import sys, time
import torch, offbeat
step = float(sys.argv[1])
offbeat.init(seed=1)
torch.manual_seed(0)
layers = [layer for _ in range(4) for layer in (torch.nn.Linear(274, 274), torch.nn.Tanh())]
model = torch.nn.Sequential(*layers)
parameters = list(model.parameters())
for p in parameters:
    p.register_hook(lambda gradient: time.sleep(step * 2 / 3 / len(parameters)))
sync = offbeat.Synchronizer(model, torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9), total=1)
x = torch.randn(8, 274)
while not sync.done:
    loss = model(x).square().mean()
    time.sleep(step / 3)
    loss.backward()
    sync.step()
"""
PORT = 29543
HOSTS = 4


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts-tool", help="the emulator's hosts.py", default=os.environ.get("HOSTS_TOOL"))
    parser.add_argument("--rate", default="200mbit", help="of every link")
    parser.add_argument("--slow", default="20mbit", help="of the straggler's, for a while")
    parser.add_argument("--units", type=int, default=960, help="of the BSP share")
    parser.add_argument("--step", type=float, default=0.1, help="seconds of computation in a step")
    parser.add_argument("--from", dest="begin", type=float, default=1 / 6, help="share of the BSP share")
    parser.add_argument("--till", dest="end", type=float, default=1 / 2, help="share of the BSP share")
    parser.add_argument("--policies", default="off; elastic", help='with ";" between them')
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", help="where to write the results")
    return parser.parse_args()


def units_of(out: Path) -> int:
    """Done so far."""
    if not (out / "journal.jsonl").exists():
        return 0
    return max((row["units"] for row in journal.read(out) if row["type"] == "step"), default=0)


def run(args: argparse.Namespace, lab: Any, policy: str, folder: Path) -> dict[str, Any]:
    """One job; what its journal tells. Ends the program where it fails."""
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(TRAIN)
    out, launchers = folder / "run", []
    extra = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path[1:])}
    for host in range(HOSTS):
        words = [
            sys.executable,
            "-m",
            "offbeat",
            "run",
            "-q",
            "-n",
            1,
            "--nnodes",
            HOSTS,
            "--node-rank",
            host,
        ]
        words += ["--rdzv-endpoint", f"{lab.address(0)}:{PORT}", "--out", out, "--stragglers", policy]
        words += ["--plan", f"bsp:{args.units}u asp", "--total", args.units + 8 * HOSTS]
        with (folder / f"h{host}.log").open("wb") as log:
            options = {"cwd": folder, "stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            text = [str(word) for word in (*words, "train.py", args.step)]
            launchers.append(lab.popen(host, text, extra=extra, **options))
    bounds = [args.begin * args.units, args.end * args.units]
    for bound, rate in zip(bounds, (args.slow, args.rate), strict=True):
        while units_of(out) < bound and all(one.poll() is None for one in launchers):
            time.sleep(0.1)
        lab.set(HOSTS - 1, rate=rate)
    codes = [one.wait(600) for one in launchers]
    if any(codes):
        raise SystemExit(f"a launcher failed, {codes}: {(folder / 'h0.log').read_text()}")
    rows = journal.read(out)
    begun = next(row["t"] for row in rows if row["type"] == "phase")
    switch = next(row for row in rows if row["type"] == "switch" and row["to"] == "asp")
    flags = [row for row in rows if row["type"] == "straggler"]
    return {
        "policy": policy,
        "seconds": round(switch["t"] - begun, 3),
        "flags": [[row["action"], row["rank"], row["units"]] for row in flags],
        "members": [row["members"] for row in rows if row["type"] == "members"],
    }


def main() -> None:
    args = options()
    policies = [text.strip() for text in args.policies.split(";")]
    lab_of = tool(args.hosts_tool)
    folder = Path(mkdtemp(prefix="offbeat-stragglers-"))
    print(
        f"{HOSTS} hosts at {args.rate}, one at {args.slow} from {args.begin:.0%} to {args.end:.0%} of "
        f"{args.units} BSP units, steps of {args.step * 1e3:g} ms, {args.repeat} times, journals in {folder}",
        flush=True,
    )
    found: dict[str, list[float]] = {policy: [] for policy in policies}
    rows = []
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(lab_of.Hosts(HOSTS, rate=args.rate, name="stragglers"))
        for host in range(HOSTS):  # a packet that waits must not be larger than a slower link's bucket
            lab.popen(host, ["ip", "link", "set", "dev", "eth0", "gso_max_size", "15000"]).wait()
        for number in range(args.repeat):
            for policy in policies:
                row = run(args, lab, policy, folder / f"{number}-{policy.split('(')[0]}")
                rows.append(row)
                found[policy].append(row["seconds"])
                print(f"{policy:20} {row['seconds']:7.2f} s  {row['flags']}  {row['members']}", flush=True)
    medians = {policy: statistics.median(seconds) for policy, seconds in found.items()}
    first = medians[policies[0]]
    for policy, seconds in medians.items():
        print(f"{policy:20} median {seconds:7.2f} s, {first / seconds:.2f} times {policies[0]}")
    if args.json:
        Path(args.json).write_text(json.dumps({"settings": vars(args), "runs": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
