"""What a person sees of a search."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from offbeat.live import clock
from offbeat.search.core import BSP, Point, Settings, Stand, Wish
from offbeat.search.cost import Cost

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from offbeat.search.replay import Row
    from offbeat.search.store import Store


def points(stand: Stand, settings: Settings, running: Mapping[Wish, float], cost: Cost | None) -> Group:
    """The points of a search in their order, with the trials under way and what all has cost."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    made = Table(box=box.SIMPLE_HEAD)
    for name in ("BSP", "trials"):
        made.add_column(name, justify="right")
    made.add_column("accuracies", overflow="fold")
    for name in ("mean", "time"):
        made.add_column(name, justify="right")
    made.add_column("verdict", overflow="fold")
    for point in stand.points:
        live = [wish for wish in running if wish.share == point.share]
        made.add_row(
            f"{100 * point.share:.4g}%",
            f"{len(point.trials)}" + (f"+{len(live)}" if live else ""),
            "  ".join("diverged" if t.accuracy is None else f"{t.accuracy:.4f}" for t in point.trials),
            "–" if point.mean is None else f"{point.mean:.4f}",
            "–" if point.seconds is None else clock(point.seconds, precise=True),
            verdict(point),
        )
    below = []
    if (target := stand.target) is not None:
        bar = target - settings.tolerance
        below.append(f"target {target:.4f}: a mean of {bar:.4f} is enough")
    if cost is not None:
        below.append(f"cost so far {cost.trainings:.2f} trainings with BSP")
    return Group(made, Text("; ".join(below)))


def verdict(point: Point) -> str:
    if point.share == BSP:
        return "target" if point.passed else "…"
    word = {True: "enough", False: "too little", None: "…"}[point.passed]
    return word + (f" ({point.why})" if point.why else "")


def replayed(rows: list[Row], times: int) -> Group:
    """The paper's Table II."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    made = Table(box=box.SIMPLE_HEAD)
    for name in ("job", "BSP runs", "runs a point", "cost", "success", "amortized", "effective ratio"):
        made.add_column(name, justify="left" if name == "job" else "right")
    for row in rows:
        made.add_row(
            "new" if row.new else "recurring",
            str(row.target_runs) if row.new else "–",
            str(row.runs),
            f"{row.trainings:.2f}",
            f"{100 * row.success:.1f}%",
            f"{row.amortized:.2f}",
            f"{row.effective:.2f}",
        )
    return Group(
        made,
        Text(
            f"means of {times} searches; cost in trainings with BSP; success: found what the means of all "
            f"runs give; amortized: later runs after which the search has paid; effective: usable trainings "
            f"per training's worth of time"
        ),
    )


def jobs(store: Store) -> Table:
    """What a store knows, and how far each search has paid for itself."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD)
    names = ("job", "script", "workers", "plan", "target", "time vs BSP", "search cost", "runs since", "paid")
    for name in names:
        made.add_column(
            name, justify="left" if name in ("job", "script", "plan") else "right", overflow="fold"
        )
    for job in store.jobs():
        runs = len(store.recurrences(job))
        paid = runs * job.saved / job.trainings if job.trainings else 0.0
        made.add_row(
            job.name or job.fingerprint,
            job.script,
            f"{job.workers}{' virtual' if job.virtual else ''}",
            job.plan,
            f"{job.target:.4f}",
            f"{1 - job.saved:.2f}×",
            f"{job.trainings:.2f}",
            str(runs),
            f"{100 * paid:.0f}%",
        )
    return made
