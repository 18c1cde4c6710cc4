"""What peers get wrong, and what Offbeat does in the same place: every script of benchmarks/defects/."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from record import Record, Row, Setup

TITLE = "Correctness: what peers do in places that are easy to get wrong"
MINUTES = 2.0
SETTINGS = {"workers": 2, "network": "loopback"}
SCRIPTS = ("buffers", "skipped", "warmup", "uneven", "accumulation", "bucketing")


def measure(setup: Setup) -> Iterator[Row]:
    for name in ("accumulation",) if setup.quick else filter(setup.wants, SCRIPTS):
        script = Path(__file__).resolve().parent / "defects" / f"{name}.py"
        words = [sys.executable, str(script), "--json"]
        place = {**os.environ, "OFFBEAT_PEERS": str(setup.cache)}
        done = subprocess.run(words, env=place, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        for side in found["sides"]:
            values = {"did": side["did"], "right": side["right"], "facts": side["facts"]}
            yield Row(side["side"], {"script": name, "question": found["question"]}, values)


def page(record: Record) -> list[str]:
    from page import paragraph, table

    rows, before = [], ""
    for row in record.rows:
        question, script = row.settings["question"], row.settings["script"]
        case = f"{question} (`{script}.py`)"
        mark = "yes" if row.values["right"] else "**no**"
        rows.append(["" if script == before else case, row.name, row.values["did"], mark])
        before = script
    text = paragraph(
        """Each case is a script in `benchmarks/defects/`, `python benchmarks/defects/buffers.py` for one,
        that runs the peer and Offbeat on two workers and prints what each did. A side that makes no
        progress for 12 seconds hangs."""
    )
    return [text, *table(["case", "who", "what it did", "right"], rows)]
