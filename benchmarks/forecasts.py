"""What the planner predicts against what happens: benchmarks/planner.py in a few networks."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from record import ROOT, Record, Row, Setup

TITLE = "The planner: predicted against measured"
MINUTES = 3.0
SETTINGS = {"model": "resnet8", "a unit, ms": 100, "jitter": 0.1, "seconds of a job": 5}
PLANS = "bsp; local(4); dasgd(2,1); dasgd(4,2); asp"


def measure(setup: Setup) -> Iterator[Row]:
    if setup.hosts_tool is None:
        return
    with TemporaryDirectory(prefix="offbeat-forecasts-") as folder:
        answer = Path(folder) / "answer.json"
        words = [sys.executable, str(ROOT / "benchmarks" / "planner.py"), "--hosts-tool", setup.hosts_tool]
        words += ["--models", "resnet8", "--plans", PLANS, "--out", f"{folder}/out", "--json", str(answer)]
        words += ["--seconds", "5", "--delays", "0", "--hosts", "2", "--rates"]
        words += ["50mbit"] if setup.quick else ["50mbit", "200mbit", "1gbit"]
        subprocess.run(words, check=True)
        for row in json.loads(answer.read_text())["cases"]:
            where = {name: row[name] for name in ("hosts", "rate", "delay", "model")}
            values = {f"{name}_ms": round(row[name] * 1e3, 1) for name in ("predicted", "measured")}
            yield Row(row["plan"], where, values, round(row["measured"] / row["predicted"], 4), "predicted")


def page(record: Record) -> list[str]:
    from page import paragraph, table

    cells: dict[str, dict[str, str]] = {}
    plans = list(dict.fromkeys(row.name for row in record.rows))
    errors = []
    for row in record.rows:
        of, value = row.settings, row.values
        error = (row.ratio or 1.0) - 1
        errors.append(abs(error))
        where = f"{of['hosts']} hosts, {of['rate']}" + (f", {of['delay']}" if of["delay"] != "0" else "")
        text = f"{value['predicted_ms']:.0f} / {value['measured_ms']:.0f} ({100 * error:+.0f} %)"
        cells.setdefault(where, {})[row.name] = text
    within = sum(error <= 0.1 for error in errors)
    lines = [
        paragraph(
            """Milliseconds of an iteration, predicted from a profile taken in the same network / measured.
            More networks, and what misses: [the planner](planner.md#errors-measured)."""
        ),
        *table(["where", *plans], [[where, *map(its.get, plans)] for where, its in cells.items()]),
    ]
    share = f"{within} of {len(errors)} within 10 %, largest {100 * max(errors):.0f} %"
    return [*lines, f"\nMedian error {100 * statistics.median(errors):.1f} %, {share}."]
