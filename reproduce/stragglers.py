"""Sync-Switch's fig. 15: policies for transient stragglers, on virtual clusters."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean
from typing import Any

from reproduce import ROOT, beside, logs
from reproduce.item import ACCURACY, LOGS, MARGIN, Found, Item, accuracy, counted, row, side_by_side
from reproduce.rule import Claim, exact, gap
from reproduce.runs import Run
from reproduce.scale import SEEDS, START

described = beside("benchmarks/policies")
CLUSTERS = ROOT / "build" / "reproduce" / "clusters"
PLAN = "bsp:6.25% asp"
SCALE = 5
"""A fifth of the job, of the stragglers' and the switch's seconds; a step is not shorter."""
DETECTOR = {1: "(window=10,count=3,min_slowdown=1.05)", SCALE: "(window=2,count=2,min_slowdown=1.05)"}
"""The detector looks at as much of the job; by the defaults mild stragglers are nobody's concern."""
SWITCH = {"greedy": "36 s", "elastic": "own", "off": "own"}
"""Whose switch the accuracy runs have: greedy's loss comes of the paper's long ones."""

PAPER = {
    ("mild", "greedy"): (0.98, "2 % faster", "2 points lower"),
    ("mild", "elastic"): (0.98, "2 % faster", "equal"),
    ("moderate", "elastic"): (1 / 1.11, "1.11X as fast", "equal"),
}
"""Time over the baseline's, and what the paper says of time and accuracy."""
CASES = (*((scenario, "off") for scenario in described.STRAGGLERS), *PAPER)


def cluster(scenario: str, switch: str, scale: int) -> str:
    """Writes a description of the paper's scenario; returns where, from the repository's root."""
    path = CLUSTERS / f"{scenario}-{switch.replace(' ', '')}-{scale}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(described.description(scenario, switch, scale))
    return str(path.relative_to(ROOT))


def quiet(scenario: str) -> str:
    """... the same cluster without its stragglers."""
    path = CLUSTERS / f"{scenario}-quiet.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'base = "sync-switch-1-{scenario}"\nname = "{scenario}, without stragglers"\nstragglers = []\n'
    )
    return str(path.relative_to(ROOT))


def policy(name: str, scale: int) -> str:
    return name if name == "off" else name + DETECTOR[scale]


SMALL = "--model resnet8 --width 0.25 --subset 10240 --batch-size 8 --lr 0.0125"
FULL = "--device cuda --model resnet32 --batch-size 128 --lr 0.1"
QUICK = "--subset 256 --width 0.125 --test-subset 100 --last-subset 100"
TRAINED = {
    "small": "ResNet-8 with 8 channels, 10,240 images of CIFAR-10, batches of 8, 12,800 units",
    "full": "ResNet-32, CIFAR-10, batches of 128, 64,000 units",
}
UNIT_MS = 12


def runs(mode: str) -> dict[str, list[Run]]:
    """Accuracy needs virtual stragglers, so --full has the published size on the virtual cluster."""
    scale, units, seeds = SCALE, described.UNITS // SCALE, SEEDS
    words = f"--lr-reference worker --schedule step --evaluate 50% {SMALL}"
    if mode == "full":
        scale, units, seeds = 1, described.UNITS, 5
        words = words.replace(SMALL, FULL)
    elif mode == "quick":
        units, seeds, words = 64, 2, f"{words} {QUICK}"
    minutes = (START + units * UNIT_MS / 1e3) / 60
    found = {}
    for scenario, name in CASES:
        launch = ["--virtual", "8", "--cluster", cluster(scenario, SWITCH[name], scale)]
        launch += ["--total", str(units), "--stragglers", policy(name, scale)]
        found[f"{scenario}, {name}"] = [
            Run(PLAN, seed, tuple(launch), tuple(words.split()), minutes=minutes) for seed in range(seeds)
        ]
    return found


LOGGED = {
    "off": "bsp>asp",
    "greedy": "bsp>asp>bsp>asp (greedy)",
    "elastic": "bsp>asp (elastic)",
}


def told(scenario: str, name: str, column: str) -> list[float]:
    return [
        float(one[column])
        for one in logs.rows()
        if one["group"] == f"straggler-{scenario}" and one["protocol"] == LOGGED[name]
    ]


def faster(ratio: float, paper: float) -> Claim:
    """That a policy's time over the baseline's is the paper's, to half of its effect."""
    reach = abs(1 - paper) / 2
    return exact("time over the baseline's", ratio, paper - reach, paper + reach)


def times(mode: str) -> Iterator[Any]:
    for (scenario, name), (paper, says, _) in PAPER.items():
        base, own = told(scenario, "off", "time_net_s"), told(scenario, name, "time_net_s")
        yield row(
            f"{scenario}, {name}, time in the logs",
            metric="time over the baseline's",
            size=f"{LOGS}: setup 1, {scenario} stragglers",
            seeds=counted(base, own),
            paper=f"{says} ({paper:.2f})",
            ours=f"{mean(own) / mean(base):.3f}",
            claims=[faster(mean(own) / mean(base), paper)],
            why="Net of pauses. Tested on the virtual cluster in the next rows.",
        )
    units = 6400 if mode == "quick" else described.UNITS
    seconds = {
        (scenario, switch, name): logs.simulated(
            str(ROOT / cluster(scenario, switch, 1)), PLAN, units, 8, policy(name, 1)
        )
        for scenario, name in CASES
        for switch in described.SWITCHES
    }
    for scenario, name in PAPER:
        paper, says, _ = PAPER[scenario, name]
        for switch in described.SWITCHES:
            own, base = seconds[scenario, switch, name], seconds[scenario, switch, "off"]
            yield row(
                f"{scenario}, {name}, virtual time, a switch takes {described.SWITCHES[switch]:g} s",
                metric="time over the baseline's, timing only",
                size=f"preset sync-switch-1-{scenario}, {units:,} units",
                seeds="no chance in it",
                paper=f"{says} ({paper:.2f})",
                ours=f"{own / base:.3f} ({own:.0f} s against {base:.0f})",
                claims=[faster(own / base, paper)],
                why=WHY[scenario, name],
            )
    calm = logs.simulated(str(ROOT / quiet("mild")), PLAN, units, 8)
    ratio = seconds["mild", "36 s", "off"] / calm
    yield row(
        "mild: what is there to save?",
        metric="time of the baseline over that without stragglers",
        size=f"preset sync-switch-1-mild, {units:,} units",
        seeds="no chance in it",
        paper="policies save 2 %, so stragglers cost as much at least",
        ours=f"{ratio:.4f} ({seconds['mild', '36 s', 'off']:.0f} s against {calm:.0f})",
        claims=[exact("what they cost", 100 * (ratio - 1), least=2, unit="%")],
        why="10 ms of latency for 100 s, with the latency's effect on a step as in the logs.",
    )
    fewer = logs.simulated(
        str(ROOT / cluster("moderate", "36 s", 1)), f"bsp:{FEWER}u asp", units, 8, policy("elastic", 1)
    )
    ratio = fewer / seconds["moderate", "36 s", "off"]
    yield row(
        "moderate, elastic: is it how BSP's share is counted?",
        metric="time over the baseline's, with as many BSP steps as the baseline and not as many units",
        size=f"preset sync-switch-1-moderate, bsp:{FEWER}u asp",
        seeds="no chance in it",
        paper="1.11X as fast (0.90)",
        ours=f"{ratio:.3f}",
        claims=[faster(ratio, 1 / 1.11)],
        why="The paper's elastic runs have 400 BSP steps like the others, by fewer workers: fewer units.",
    )


def accuracies(mode: str, found: Found) -> Iterator[Any]:
    for (scenario, name), (_, _, accurate) in PAPER.items():
        base, own = accuracy(found[f"{scenario}, off"]), accuracy(found[f"{scenario}, {name}"])
        logged = [100 * (mean(told(scenario, one, "acc_final"))) for one in (name, "off")]
        lower = accurate != "equal"
        yield row(
            f"{scenario}, {name}, accuracy",
            metric=ACCURACY,
            size=f"8 virtual workers, {TRAINED['full' if mode == 'full' else 'small']}",
            seeds=counted(base, own),
            paper=f"{accurate} (logs: {logged[0] - logged[1]:+.2f} points)",
            ours=side_by_side({"off": base, name: own}),
            claims=[
                gap(f"off less {name}", base, own, least=0, unit="points")
                if lower
                else gap(f"{name} less off", own, base, -MARGIN, MARGIN, "points")
            ],
            why="A fifth of the job; three seeds tell two points only where runs scatter little.",
        )


FEWER = 3100
"""Units under BSP in which elastic takes as many steps as the baseline: 622 at a fifth of the job."""
WHY = {
    ("mild", "greedy"): "A policy saves what stragglers cost, at most: tested below.",
    ("mild", "elastic"): "A policy saves what stragglers cost, at most: tested below.",
    ("moderate", "elastic"): "We count units under BSP, the paper steps: tested below.",
}
ITEM = Item(
    "sync-switch-fig15",
    "Sync-Switch, fig. 15: policies for stragglers",
    "`bsp:6.25% asp` on setup 1 with mild (1 worker, once, 10 ms) and moderate stragglers (2 workers, 4 "
    "times, 30 ms) of 100 s each. `benchmarks/policies.py` has the scenarios.",
    known=times,
    trained=accuracies,
    runs=runs,
    minutes=8,
)
