"""docs/reproduce.md, which is what the results say and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from reproduce import ROOT
from reproduce.item import Item, record
from reproduce.items import ITEMS
from reproduce.rule import Claim, verdict

RESULTS = ROOT / "reproduce" / "results"
PAGE = ROOT / "docs" / "reproduce.md"
HEAD = """# The papers, reproduced

<!-- Written by `python reproduce --page` from reproduce/results/. -->

A command for each figure and each table of the two papers, beside what they say. `python reproduce` lists
them, `python reproduce dasgd-fig7` does one, `python reproduce all` those that have no results yet. Trainings
are `offbeat run` commands (`--dry-run` shows them), kept in `build/reproduce/`: items share them, and a
command that was interrupted goes on where it was. They need CIFAR-10 (`--data DIR`, as
`examples/cifar10.py`) and `pip install .[examples]`. `--known` leaves them out. `--full` is the published
size, on GPUs and real workers; its results go to `reproduce/results/full/`. Times are those of two cores.
Earlier runs, at other sizes: [results](results.md).

**When a row counts as reproduced** is computed: a claim of the paper is a bound, and holds when the measured
interval lies inside it: two standard errors to each side of a mean or of a difference of means, the figure
itself where chance has no part. *yes*: all claims of the row hold. *partly*: some. *no*: none, and one is
refuted. *undecided*: intervals reach over the bounds, and more seeds would tell. Figures with ± are means and
standard deviations over the seeds.
"""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Of Markdown. Raises ValueError for an empty cell."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        for name, cell in zip(head, row, strict=True):
            if not cell.strip():
                raise ValueError(f"the row {row[0]!r} says nothing in the column {name!r}")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    return lines


def shown(row: record.Row) -> list[str]:
    """A row's cells."""
    claims = [Claim.of(claim) for claim in row.values["claims"]]
    found = verdict(claims)
    return [
        row.name,
        f"{row.settings['metric']}; {row.settings['size']}; seeds: {row.settings['seeds']}",
        row.values["paper"],
        row.values["ours"],
        "; ".join(claim.rule for claim in claims),
        found if found == "yes" else f"**{found}**",
        row.values["difference"],
    ]


COLUMNS = ("row", "metric, size, seeds", "the paper", "here", "counts if", "reproduced", "difference")


def minutes(number: float) -> str:
    return "a minute" if number <= 1 else f"{number:.0f} minutes"


def about(item: Item, found: record.Record | None) -> list[str]:
    command = f"`python reproduce {item.name}`"
    lines = [f"## {item.title}\n", f"{item.about}\n"]
    if found is None:
        runs = len(set(item.all_runs("small")))
        trained = f", {runs} trainings, some of them other items' too" if runs else ""
        return [*lines, f"Not run yet: {command}, about {minutes(item.time('small'))}{trained}.\n"]
    lines += [*table(COLUMNS, [shown(row) for row in found.rows]), ""]
    lines += [f"Left out: {one}, about {minutes(item.time('small'))}.\n" for one in found.skipped]
    facts = {**found.settings, **found.versions, **found.machine}
    told = ", ".join(f"{name} {value}" for name, value in facts.items())
    return [*lines, f"<small>{command}, {found.minutes:g} minutes; {told}.</small>\n"]


def summary(found: dict[str, record.Record]) -> list[str]:
    """How many rows of each item are reproduced."""
    rows = []
    for name, item in ITEMS.items():
        if name in found:
            counts = Counter(shown(row)[5].strip("*") for row in found[name].rows)
            kinds = ("yes", "partly", "no", "undecided")
            cell = ", ".join(f"{counts[key]} {key}" for key in kinds if counts[key])
            cell += "; trainings not run yet" if found[name].skipped else ""
        else:
            cell = "not run yet"
        rows.append([item.title, cell, minutes(item.time("small")), f"`{name}`"])
    everything = {run for item in ITEMS.values() for run in item.all_runs("small")}
    hours = (sum(i.minutes for i in ITEMS.values()) + sum(run.minutes for run in everything) / 2) / 60
    rows.append(["all of them", f"{len(everything)} trainings", f"{hours:.0f} hours", "`all`"])
    return [*table(("figure or table", "rows reproduced", "time", "name"), rows), ""]


def read(results: Path) -> dict[str, record.Record]:
    return {name: record.Record.read(path) for name in ITEMS if (path := results / f"{name}.json").exists()}


def written(results: Path) -> str:
    found = read(results)
    lines = [HEAD, *summary(found)]
    for name, item in ITEMS.items():
        lines += about(item, found.get(name))
    return "\n".join(lines).rstrip() + "\n"
