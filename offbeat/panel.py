"""A run as `offbeat watch` shows it: a pure function of the view of its journal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from offbeat.events import event, ranks
from offbeat.live import Pace, View, amount, clock, finite, line, number, summary

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"
FEW = 12
"""So many workers have a line each; of more, the slowest and those that are flagged or absent."""
NOISY = ("evaluation", "end", "run")
"""Records that are shown in places of their own, not among the events."""


def panel(view: View, width: int, height: int, note: str = "") -> RenderableType:
    """What fits into `width` columns and `height` lines. note: what is to be said besides, such as that the
    journal doesn't grow."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    inside = max(width - 4, 20)
    parts: list[RenderableType] = [_head(view, inside), _figures(view, inside)]
    room = height - 2 - 2 - 1 - (1 if note else 0)
    if view.losses:
        parts.append(_loss(view, inside))
        room -= 1
    events = _events(view)
    team = _team(view, min(FEW, max(3, room // 2)))
    if team is not None:
        parts += [Text(), team[0]]
        room -= 2 + team[1]
    shown = events[-max(0, min(room - 1, 12)) :] if room > 1 else []
    if shown:
        parts.append(Text())
        parts += [Text(text, style=style, no_wrap=True, overflow="ellipsis") for text, style in shown]
    if note:
        parts.append(Text(note, style="dim", no_wrap=True, overflow="ellipsis"))
    title = Text(view.plan or "no plan yet", style="bold", no_wrap=True, overflow="ellipsis")
    return Panel(Group(*parts), title=title, title_align="left", width=width)


def _head(view: View, width: int) -> Text:
    from rich.text import Text

    done = min(max(view.now.progress, 0.0), 1.0)
    long = max(10, min(40, width - 40))
    full = round(done * long)
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append("━" * full, style="green" if view.end is not None else "cyan")
    text.append("━" * (long - full), style="dim")
    text.append(f" {100 * done:.1f}%", style="bold")
    if view.end is not None:
        text.append("  ended", style="bold green")
    elif (left := view.seconds_left) is not None:
        text.append(f"  {clock(left)} left")
    seconds = max(view.now.t - (view.began or 0.0), 0.0)
    text.append(f"  {clock(seconds)}{' of virtual time' if view.virtual else ''}", style="dim")
    return text


def _figures(view: View, width: int) -> Text:
    """The line that `offbeat run` shows, less what stands above it; when it is over, the summary."""
    from rich.text import Text

    if view.end is not None:
        return Text(summary(view).split("\n")[0].partition(": ")[2], no_wrap=True, overflow="ellipsis")
    shown = [
        part for part in line(view).split("  ") if part and not part.lstrip().startswith(("virtual ", "ETA "))
    ]
    text = "  ".join(part for part in shown if not part.strip().endswith("%") or "waiting" in part)
    if view.lr is not None:
        text += f"  lr {view.lr:.3g}"
    values = [(name, number(value)) for name, value in (view.evaluation or {}).items()]
    told = ", ".join(f"{name} {value:.4g}" for name, value in values[:3] if value is not None)
    text += f"  evaluated: {told}" if told else ""
    return Text(text, no_wrap=True, overflow="ellipsis")


def _loss(view: View, width: int) -> Text:
    from rich.text import Text

    text = Text("loss ", style="dim", no_wrap=True, overflow="ellipsis")
    text.append(sparkline(view.losses, max(10, min(80, width - 26))), style="cyan")
    known = [loss for loss in view.losses if math.isfinite(loss)]
    if known:
        text.append(f"  {known[0]:.3g} → {known[-1]:.3g}", style="dim")
    return text


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as bars of eight heights, means where they are more than `width`; `·` where one is no number. On
    a logarithmic scale where they are all positive, as losses fall by orders of magnitude."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    groups = [[value for value in values[a:b] if math.isfinite(value)] for a, b in pairwise(edges)]
    means = [sum(group) / len(group) if group else math.nan for group in groups]
    known = [value for value in means if not math.isnan(value)]
    if not known:
        return "·" * count
    if min(known) > 0:
        means = [math.log(value) for value in means]
        known = [math.log(value) for value in known]
    low, span = min(known), (max(known) - min(known)) or 1.0
    top = len(BARS) - 1
    return "".join("·" if math.isnan(v) else BARS[round((v - low) / span * top)] for v in means)


def _team(view: View, most: int) -> tuple[Table, int] | None:
    """The workers: a table, and how many lines it has."""
    from rich.table import Table

    paces = view.paces
    every = sorted(set(paces) | set(range(view.workers)) | set(view.members or ()))
    if not every:
        return None
    members = set(every if view.members is None else view.members)
    notable = [rank for rank in every if rank in view.slow or rank not in members]
    rest = [rank for rank in every if rank not in notable]
    if len(every) > most:
        rest.sort(key=lambda rank: _busy(paces.get(rank)))
        shown = sorted([*notable, *rest][: most - 1])
    else:
        shown = every
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, header_style="dim")
    for name in ("worker", "units", "units/s", "waiting"):
        table.add_column(name, justify="right")
    table.add_column("", justify="left", no_wrap=True, overflow="ellipsis")
    for rank in shown:
        pace = paces.get(rank)
        state, style = ("", "")
        if rank not in members:
            state, style = "absent", "dim"
        elif rank in view.slow:
            state, style = "straggler", "yellow"
        table.add_row(
            str(rank),
            "–" if pace is None else f"{pace.units:,.0f}",
            "–"
            if pace is None or pace.units_per_s is None or state == "absent"
            else amount(pace.units_per_s),
            "–"
            if pace is None or pace.waiting is None or state == "absent"
            else f"{100 * pace.waiting:.0f}%",
            state,
            style=style,
        )
    if len(shown) < len(every):
        others = [paces[rank] for rank in every if rank not in shown and rank in paces]
        rates = [pace.units_per_s for pace in others if pace.units_per_s is not None]
        waits = [pace.waiting for pace in others if pace.waiting is not None]
        table.add_row(
            f"{len(every) - len(shown)} more",
            "",
            amount(median(rates)) if rates else "–",
            f"{100 * median(waits):.0f}%" if waits else "–",
            f"medians; members {ranks(sorted(members))}",
            style="dim",
        )
    return table, len(shown) + 1 + (len(shown) < len(every))


def _busy(pace: Pace | None) -> float:
    """Those who wait least are who the others wait for: they come first."""
    return -1.0 if pace is None or pace.waiting is None else pace.waiting


def _events(view: View) -> list[tuple[str, str]]:
    """The last events, each with its style."""
    found = []
    for record in view.happened:
        if record.get("type") in NOISY or not (text := event(record)):
            continue
        seconds = max((finite(record.get("t")) or 0.0) - (view.began or 0.0), 0.0)
        alarm = record.get("type") in ("error", "diverged", "warning", "rollback")
        found.append((f"{clock(seconds):>7}  {' '.join(text.split())}", "red" if alarm else ""))
    return found
