"""The picture of the DaSGD paper's fig. 7: for each number of workers a bar for each plan, cut into what its
time is spent on."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import floor, log10

from offbeat.planner.choice import PARTS, Size

COLORS = {
    "forward": "#4477aa",
    "backward": "#66ccee",
    "update": "#228833",
    "exposed": "#ee6677",
    "waiting": "#ccbb44",
}
NAMES = {
    "forward": "forward",
    "backward": "backward",
    "update": "local update",
    "exposed": "exposed communication",
    "waiting": "waiting",
}
_BAR, _GAP, _HEIGHT, _LEFT, _TOP, _LABELS = 16, 22, 260, 64, 64, 132


def svg(sizes: Sequence[Size], title: str) -> str:
    """Stacked bars; their labels are the plans, and each part says its time when pointed at."""
    tallest = max(row.iteration.seconds for size in sizes for row in size.rows)
    scale, unit = (1.0, "s") if tallest >= 1 else (1e3, "ms")
    step = _step(tallest * scale)
    top = step * (floor(tallest * scale / step) + 1)
    bars = sum(len(size.rows) for size in sizes)
    width = _LEFT + bars * _BAR + len(sizes) * _GAP + 20
    width, base = max(width, 640), _TOP + _HEIGHT
    rows = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{base + _LABELS + 24}" '
        f'viewBox="0 0 {width} {base + _LABELS + 24}" font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="18" font-size="13">{escape(title)}</text>',
        *_legend(),
        *_axis(top, step, unit, width, base),
    ]
    x = float(_LEFT + _GAP / 2)
    for size in sizes:
        begun = x
        for row in size.rows:
            rows += _bar(
                row.plan, row.iteration, x, base, _HEIGHT / top * scale, row.plan == size.recommended
            )
            x += _BAR
        middle = (begun + x) / 2
        noun = "worker" if size.workers == 1 else "workers"
        place = f'x="{middle:.1f}" y="{base + _LABELS + 14}" text-anchor="middle"'
        rows.append(f"<text {place}>{size.workers} {noun}</text>")
        x += _GAP
    return "\n".join([*rows, "</svg>"]) + "\n"


def html(sizes: Sequence[Size], title: str) -> str:
    """The same as a page."""
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f"<body>\n{svg(sizes, title)}</body></html>\n"
    )


def _step(most: float) -> float:
    """A round number of which about five fit."""
    rough: float = most / 5
    power: float = 10 ** floor(log10(rough))
    return next((power * factor for factor in (1, 2, 5) if power * factor >= rough), 10 * power)


def _legend() -> list[str]:
    rows, x = [], float(_LEFT)
    for part in PARTS:
        rows.append(f'<rect x="{x:.0f}" y="30" width="10" height="10" fill="{COLORS[part]}"/>')
        rows.append(f'<text x="{x + 14:.0f}" y="39">{NAMES[part]}</text>')
        x += 30 + 6.2 * len(NAMES[part])
    return rows


def _axis(top: float, step: float, unit: str, width: float, base: float) -> list[str]:
    rows = [
        f'<text transform="translate(14 {base - _HEIGHT / 2:.0f}) rotate(-90)" text-anchor="middle">'
        f"time per iteration, {unit}</text>"
    ]
    for number in range(round(top / step) + 1):
        y = base - _HEIGHT * number * step / top
        rows.append(f'<line x1="{_LEFT}" x2="{width - 8}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        rows.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number * step:g}</text>')
    return rows


def _bar(plan: str, iteration: object, x: float, base: float, scale: float, chosen: bool) -> list[str]:
    rows, y = [], base
    for part in PARTS:
        seconds = getattr(iteration, part)
        height = seconds * scale
        if height <= 0:
            continue
        y -= height
        rows.append(
            f'<rect x="{x + 1:.1f}" y="{y:.2f}" width="{_BAR - 2}" height="{height:.2f}" '
            f'fill="{COLORS[part]}">'
            f"<title>{escape(plan)}: {NAMES[part]} {seconds * 1e3:.4g} ms</title></rect>"
        )
    weight = ' font-weight="bold"' if chosen else ""
    middle = x + _BAR / 2 + 3
    rows.append(
        f'<text transform="translate({middle:.1f} {base + 6}) rotate(-90)" text-anchor="end" '
        f'font-size="9"{weight}>{escape(plan)}</text>'
    )
    return rows
