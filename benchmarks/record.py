"""What a part of the benchmarks finds, and the file that it is kept in."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "numpy", "pyzmq", "greenlet")


@dataclass(frozen=True)
class Row:
    """One thing that was measured.

    `settings` say under what, `values` are the measured figures by name (a unit at the end of the name).
    `ratio` is the median of the rounds' ratios against the row called `against`, of the same rounds, and
    `spread` the lowest and the highest of them; None where nothing is compared.
    """

    name: str
    settings: Mapping[str, Any]
    values: Mapping[str, Any]
    ratio: float | None = None
    against: str | None = None
    spread: tuple[float, float] | None = None


def compared(own: Sequence[float], other: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """The median, and the lowest and highest, of `other` over `own`, round by round."""
    shares = [b / a for a, b in zip(own, other, strict=True)]
    return round(statistics.median(shares), 4), (round(min(shares), 4), round(max(shares), 4))


@dataclass(frozen=True)
class Setup:
    """What the parts are given. `hosts_tool` is the emulator's hosts.py, or None; `quick` makes everything as
    small as it can be, to see that it runs; `data` is CIFAR-10's folder, or None; `cache` is where the peers
    are installed; `only` is a text that names the cases to measure, where a part has several."""

    hosts_tool: str | None
    quick: bool
    data: str | None
    cache: Path
    only: str | None = None

    def wants(self, case: str) -> bool:
        return self.only is None or self.only in case


@dataclass
class Record:
    """A part's results."""

    part: str
    settings: Mapping[str, Any]
    rows: list[Row] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    minutes: float = 0.0
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """All at once. Returns the file."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.part}.json"
        fresh = path.with_suffix(".new")
        fresh.write_text(text(asdict(self)) + "\n")
        fresh.rename(path)
        return path

    def merged(self, before: Record) -> Record:
        """With those rows of an earlier record that weren't measured again."""

        def place(row: Row) -> str:
            return json.dumps([row.name, dict(row.settings)], sort_keys=True)

        rows = {place(row): row for row in [*before.rows, *self.rows]}
        return replace(self, rows=list(rows.values()), minutes=round(self.minutes + before.minutes, 1))

    @classmethod
    def read(cls, path: Path) -> Record:
        found = json.loads(path.read_text())
        rows = [Row(**{**row, "spread": row["spread"] and tuple(row["spread"])}) for row in found.pop("rows")]
        return cls(rows=rows, **found)


def text(found: Any) -> str:
    """JSON with a row in a line, so that a change of one is seen as such."""
    rows = ",\n".join(f"  {json.dumps(row)}" for row in found["rows"])
    rest = {key: value for key, value in found.items() if key != "rows"}
    return json.dumps(rest, indent=1)[:-2] + ',\n "rows": [\n' + rows + "\n ]\n}"


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    cpu = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor() or platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory GiB": round(memory),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "load at the start": round(os.getloadavg()[0], 1),
        "date": time.strftime("%Y-%m-%d"),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return found | {"offbeat": git.stdout.strip() or "not from a repository"}


def _lines(path: str) -> Iterable[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
