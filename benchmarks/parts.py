"""The parts of `make bench`, each a module beside this one.

A part's module has `TITLE`; `MINUTES`, what it takes on two cores; `SETTINGS`, what its rows have in common;
`measure(setup)`, which yields rows; and `page(record)`, which says in Markdown what they are.
"""

from __future__ import annotations

import importlib
import time
from types import ModuleType

from record import Record, Setup, machine, versions

PARTS = (
    "throughput",
    "accuracy",
    "switching",
    "recovery",
    "correctness",
    "simulator",
    "forecasts",
    "growth",
    "choice",
)
LONG = ("choice",)
"""Parts that are run only when they are named."""
HOSTS = ("accuracy", "forecasts")
"""Parts that are nothing without emulated hosts."""
PARTLY = ("throughput",)
"""Parts of which some need them."""


def module(part: str) -> ModuleType:
    return importlib.import_module(part)


def measured(part: str, setup: Setup) -> Record:
    """Runs a part. What needs emulated hosts, where there are none, is left out and said so."""
    import json

    found = module(part)
    record = Record(part, dict(found.SETTINGS), machine=machine(), versions=versions())
    if setup.hosts_tool is None and part in HOSTS + PARTLY:
        record.skipped.append("what needs emulated hosts: no --hosts-tool was given")
    begun = time.monotonic()
    if part not in HOSTS or setup.hosts_tool is not None or setup.quick:
        for row in found.measure(setup):
            record.rows.append(row)
            told = f" {row.ratio:.3f} of {row.against}" if row.ratio is not None else ""
            print(f"  {row.name}{told}  {json.dumps(row.values)}  {json.dumps(row.settings)}", flush=True)
    record.minutes = round((time.monotonic() - begun) / 60, 1)
    return record
