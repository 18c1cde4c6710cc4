"""The report itself: one file of HTML that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat import __version__
from offbeat.events import event
from offbeat.live import clock, finite
from offbeat.report.costs import shares, staleness, switches
from offbeat.report.curves import curves
from offbeat.report.field import SETTINGS, Entry, differing, entries, setting, told
from offbeat.report.figure import Figure
from offbeat.report.history import ReportError, expand, histories
from offbeat.report.speeds import speeds
from offbeat.report.timeline import timeline
from offbeat.report.twins import forecast, predicted
from offbeat.report.verdict import Table, verdict

if TYPE_CHECKING:
    from jinja2 import Template

EVENTS = 300
"""Events of a run that are listed, at most: the first and the last."""
SCRIPTS = ("plotly/plotly-cartesian.min.js", "page.js")
RUNS = 200
"""Runs of a report, at most."""


@dataclass(frozen=True)
class Section:
    """aside: of one run of several, what came of it. pairs: plots after the first stand two in a row."""

    name: str
    title: str
    figures: list[Figure]
    tables: list[tuple[str, Table]] = field(default_factory=list)
    aside: str = ""
    pairs: bool = False


def write_report(runs: Sequence[Path], to: Path) -> list[str]:
    """Makes `to` from the journals of the runs (directories, journals, or directories of `offbeat compare`).
    Returns what it shows, in words.

    Raises ReportError where there is nothing to report, OSError where the file cannot be written."""
    places, empty = expand(runs)
    found = [job for place in places for job in histories(place)]
    if len(found) > RUNS:
        raise ReportError(f"{len(found)} runs are too many for one page; {RUNS} at most")
    lineup = entries(found)
    text = page(lineup, [f"{place.name} left no journal." for place in empty])
    partial = to.with_name(f".{to.name}.part")
    try:
        partial.write_text(text, encoding="utf-8", newline="\n")
        partial.replace(to)
    finally:
        partial.unlink(missing_ok=True)
    return contents(lineup)


def contents(lineup: Sequence[Entry]) -> list[str]:
    """What the report of these runs shows, in words."""
    runs = [entry.history for entry in lineup]
    found = ["the verdict"]
    found += ["accuracy and loss against time, samples and progress"] if any(r.records for r in runs) else []
    found += ["what each worker did with its time"] if any(r.looks for r in runs) else []
    found += ["staleness"] if any(r.one("pushes") for r in runs) else []
    found += ["what the switches cost"] if any(r.one("switch") for r in runs) else []
    return [*found, "events and settings"]


def page(lineup: Sequence[Entry], warnings: Sequence[str] = ()) -> str:
    """The report of these runs."""
    answer = verdict(lineup)
    sections = _one(lineup[0]) if len(lineup) == 1 else _many(lineup)
    sections.append(_settings(lineup))
    figures = {figure.name: figure.as_json() for section in sections for figure in section.figures}
    template, css, scripts = _parts()
    return template.render(
        title=_title(lineup),
        about=_about(lineup),
        verdict=answer,
        warnings=[*answer.warnings, *warnings],
        sections=sections,
        several=len(lineup) > 1,
        data=_data(figures),
        css=css,
        scripts=scripts,
        policy=_policy(scripts),
        version=__version__,
        places=[entry.history.place for entry in lineup],
    )


@cache
def _parts() -> tuple[Template, str, list[str]]:
    """What is the same in every report."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("offbeat.report", "."),
        autoescape=True,  # names and plans come from journals, which may hold anything
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    here = files("offbeat.report")
    css, *scripts = ((here / name).read_text(encoding="utf-8") for name in ("page.css", *SCRIPTS))
    return environment.get_template("page.html"), css, scripts


def _policy(scripts: Sequence[str]) -> str:
    """A browser runs our scripts and no other, and asks no network for anything."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _data(figures: dict[str, Any]) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(figures, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _title(lineup: Sequence[Entry]) -> str:
    names = list(dict.fromkeys(Path(str(e.history.about.get("script") or "")).name for e in lineup))
    script = ", ".join(name for name in names if name) or lineup[0].history.name
    groups = len({entry.group for entry in lineup})
    return f"{script}: {lineup[0].label}" if len(lineup) == 1 else f"{script}: {groups} plans"


def _about(lineup: Sequence[Entry]) -> str:
    """Who took part, and when."""
    runs = [entry.history for entry in lineup]
    workers = " or ".join(dict.fromkeys(f"{run.workers:,}" for run in runs))
    kinds = " and ".join(dict.fromkeys("virtual" if run.virtual else "real" for run in runs))
    parts = [f"{len(runs)} runs"] if len(runs) > 1 else []
    parts.append(f"{workers} {kinds} workers")
    started = [t for run in runs if (t := finite(run.about.get("started"))) and 0 < t < 1e11]
    if started:
        parts.append(time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(min(started))))
    return ", ".join(parts)


def _one(entry: Entry) -> list[Section]:
    shown = curves([entry])
    return [*([Section("curves", "Progress", shown, pairs=True)] if shown else []), *_inside(entry)]


def _inside(entry: Entry) -> list[Section]:
    """What is to be told of one run alone."""
    crew = [figure for figure in (timeline(entry), speeds(entry)) if figure is not None]
    rest = [one for one in (staleness(entry), switches(entry), forecast(entry)) if one is not None]
    sections = [Section(f"workers-{entry.number}", "Workers", crew)] if crew else []
    sections += [Section(f"protocols-{entry.number}", "Protocols", rest, pairs=len(rest) > 1)] if rest else []
    happened = _events(entry)
    if happened.rows:
        sections.append(Section(f"events-{entry.number}", "Events", [], [("", happened)]))
    return sections


def _many(lineup: Sequence[Entry]) -> list[Section]:
    costs = [figure for figure in (shares(lineup), predicted(lineup)) if figure is not None]
    shown = curves(lineup)
    sections = [Section("curves", "Progress", shown, pairs=True)] if shown else []
    sections += [Section("time", "Time", costs)] if costs else []
    labels = [entry.label for entry in lineup]
    for entry in lineup:
        inside = _inside(entry)
        title = entry.label if labels.count(entry.label) == 1 else entry.title
        sections.append(
            Section(
                f"run-{entry.number}",
                title,
                [figure for section in inside for figure in section.figures],
                [(one.title, table) for one in inside for _, table in one.tables],
                aside=verdict([entry]).sentence,
            )
        )
    return sections


def _events(entry: Entry) -> Table:
    run = entry.history
    rows = [
        [clock(max(run.time(record), 0.0), precise=True), _short(record, text)]
        for record in run.records
        if (text := event(record)) is not None
    ]
    if len(rows) > EVENTS:
        left = len(rows) - EVENTS
        rows = [*rows[: EVENTS // 2], ["…", f"{left:,} more in the journal"], *rows[-EVENTS // 2 :]]
    return Table(("at", "what happened"), rows, caption="Times are seconds since the first step")


def _short(record: dict[str, Any], text: str) -> str:
    return f"{record.get('protocol')} begins" if record["type"] == "phase" else text[:500]


def _settings(lineup: Sequence[Entry]) -> Section:
    runs = [entry.history for entry in lineup]
    differ = differing(runs)
    alike = [
        [name.replace("_", " "), told(values[0])[:300]]
        for name in SETTINGS
        if name not in differ and (values := [v for run in runs if (v := setting(run, name)) is not None])
    ]
    versions: dict[str, dict[str, None]] = {}
    for run in runs:
        table = run.about.get("versions")
        for name, value in table.items() if isinstance(table, dict) else ():
            versions.setdefault(str(name), {})[str(value)] = None
    alike += [[f"{name} version", " | ".join(values)[:300]] for name, values in versions.items()]
    hosts = dict.fromkeys(str(host) for run in runs if (host := run.about.get("host")))
    alike += [["host", " | ".join(hosts)[:300]]] if hosts else []
    each = [
        [
            entry.label,
            told(run.about.get("seed")),
            *(told(setting(run, name))[:120] for name in differ),
            _start(run.one("start")),
            run.name,
        ]
        for entry, run in zip(lineup, runs, strict=True)
    ]
    head = ("run", "seed", *(name.replace("_", " ") for name in differ), "start took", "directory")
    return Section(
        "settings",
        "Settings and versions",
        [],
        [
            ("Of all runs" if len(lineup) > 1 else "", Table(("setting", "value"), alike)),
            ("", Table(head, each)),
        ],
    )


def _start(record: dict[str, Any]) -> str:
    costs = {
        name.removesuffix("_ms"): value
        for name, one in record.items()
        if name.endswith("_ms") and (value := finite(one)) is not None and value > 0
    }
    if not costs:
        return "–"
    parts = ", ".join(f"{name} {value / 1e3:.2g}" for name, value in costs.items() if value >= 10)
    return f"{sum(costs.values()) / 1e3:.2f} s" + (f" ({parts})" if parts else "")
