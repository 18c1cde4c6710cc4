"""Sync-Switch's experiment on stragglers (its fig. 15) on a virtual cluster: setup 1, `bsp:6.25% asp`, mild
and moderate stragglers, each without a policy, with greedy and with elastic; with the paper's switches of
36 s and with Offbeat's own.

    python benchmarks/policies.py                                 # times only, of the paper's 64,000 units
    python benchmarks/policies.py --scale 5 --window 2 --count 2 -- examples/cifar10.py ...  # accuracy too

The clusters are the presets `sync-switch-1-mild` and `-moderate`, which say what is taken from the authors'
logs. Everything that lasts is divided by `--scale`: the job, stragglers, the paper's switches; a step is not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp

PLAN = "bsp:6.25% asp"
UNITS = 64_000
STRAGGLERS = {
    "mild": ("[1]", (100,), 10),
    "moderate": ("[1, 5]", (50, 200, 350, 500), 30),
}
"""Who, when (seconds, each time for 100), and milliseconds of latency: as in the presets."""
SWITCHES = {"36 s": 36.0, "own": 0.015}
"""Seconds of a switch; Offbeat's own is measured in milliseconds, whatever the scale (docs/results.md)."""


def description(scenario: str, switch: str, scale: float) -> str:
    workers, moments, latency = STRAGGLERS[scenario]
    seconds = SWITCHES[switch] / (1 if switch == "own" else scale)
    return f"""base = "sync-switch-1-{scenario}"
name = "Sync-Switch, setup 1 at 1/{scale:g}, {scenario} stragglers"

[switch]
seconds = {seconds}

[[stragglers]]
workers = {workers}
at = {[moment / scale for moment in moments]}
seconds = {100 / scale}
latency = "{latency} ms"
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--scenarios", nargs="+", default=list(STRAGGLERS), choices=STRAGGLERS)
    parser.add_argument("--switches", nargs="+", default=list(SWITCHES), choices=SWITCHES)
    parser.add_argument("--policies", nargs="+", default=["off", "greedy", "elastic"])
    parser.add_argument("--window", type=int, default=10, help="the detector's")
    parser.add_argument("--count", type=int, default=3, help="the detector's")
    parser.add_argument("--min-slowdown", type=float, default=1.05, help="the detector's")
    parser.add_argument("--plan", default=PLAN)
    parser.add_argument("--repeat", type=int, default=3, help="seeds, where a script is given")
    parser.add_argument("--jobs", type=int, default=2, help="runs that go side by side")
    parser.add_argument("--out", help="folder for descriptions and journals (default: a new one)")
    parser.add_argument("script", nargs="*", help="a script and its arguments; without one, times only")
    args = parser.parse_args()
    folder = Path(args.out or mkdtemp(prefix="offbeat-policies-"))
    folder.mkdir(parents=True, exist_ok=True)
    settings = f"(window={args.window},count={args.count},min_slowdown={args.min_slowdown})"
    policies = "; ".join(name + ("" if name == "off" else settings) for name in args.policies)
    print(f"{args.plan} on 8 workers, a job of {UNITS / args.scale:,.0f} units, {policies}, in {folder}")
    codes = []
    for scenario in args.scenarios:
        for switch in args.switches:
            cluster = folder / f"{scenario}-{switch.replace(' ', '')}.toml"
            cluster.write_text(description(scenario, switch, args.scale))
            words = [sys.executable, "-m", "offbeat", "compare", "-q", "--virtual", 8, "--cluster", cluster]
            words += ["--plans", args.plan, "--stragglers", policies, "--out", cluster.with_suffix("")]
            words += ["--jobs", args.jobs]
            if args.script:
                words += ["--on-diverge", "ignore", "--repeat", args.repeat, *args.script]
            else:
                words += ["--timing-only", "--total", round(UNITS / args.scale), __file__]
            print(f"\n{scenario} stragglers, a switch takes {SWITCHES[switch]:g} s", flush=True)
            codes.append(subprocess.run([str(word) for word in words]).returncode)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
