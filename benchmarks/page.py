"""docs/benchmarks.md, which is what the results say and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parts import PARTS, module
from record import ROOT, Record

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

<!-- Written by `python benchmarks --page` from benchmarks/results/. -->

`make bench` measures all of this but the last part, which takes an hour (`make bench PARTS=choice`);
`make bench PARTS="throughput recovery"` only some. Each part writes
`benchmarks/results/PART.json`, with the machine, the versions and the settings, and this page is made of
those files. What is compared takes turns in the same run: read the ratios, since a machine's speed drifts.
A figure in brackets is a spread, the lowest to the highest of the rounds. Peers are set up as their
documentation says, with the versions pinned in `benchmarks/peers/`, on the same PyTorch.

Hosts are emulated on one machine: each has a network of its own, and all share the processors. The emulator
is not a part of this repository (`make bench HOSTS_TOOL=PATH/hosts.py`); without it, parts that need it are
skipped.
"""


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Of Markdown. None is an empty cell."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join("" if c is None else str(c) for c in row) + " |" for row in rows]


def paragraph(text: str) -> str:
    return " ".join(text.split()) + "\n"


def spread(low: float, high: float, digits: int = 2) -> str:
    return f"{low:.{digits}f} to {high:.{digits}f}"


def told(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def written(results: Path) -> str:
    """The page. A part without results is named as not measured."""
    lines = [HEAD]
    for part in PARTS:
        found = module(part)
        lines.append(f"## {found.TITLE}\n")
        path = results / f"{part}.json"
        if not path.exists():
            lines.append(f"Not measured yet: `make bench PARTS={part}`.\n")
            continue
        record = Record.read(path)
        lines += [*found.page(record), ""]
        lines += [f"Left out: {one}.\n" for one in record.skipped]
        about = told({**record.settings, **record.versions, **record.machine})
        lines.append(f"<small>`make bench PARTS={part}`, {record.minutes:g} minutes; {about}.</small>\n")
    return "\n".join(lines).rstrip() + "\n"
