"""How long a report of a long run takes to make, and to open.

python benchmarks/report.py --steps 1000000

Making is compared with reading the journal's JSON and doing nothing with it; opening, in the system's
chromium, with opening the report of a run of 300 steps. Rounds are interleaved; medians.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from journals import steps


def seconds(action: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def read(journal: Path) -> None:
    with journal.open() as file:
        for line in file:
            json.loads(line)


def make(run: Path) -> None:
    subprocess.run([sys.executable, "-m", "offbeat", "report", str(run)], check=True, capture_output=True)


def opening(browser: Any, page: Path) -> tuple[float, float]:
    """Seconds until the first plot is there, and of the browser's main thread."""
    tab = browser.new_page()
    meter = tab.context.new_cdp_session(tab)
    meter.send("Performance.enable", {"timeDomain": "threadTicks"})
    begun = time.perf_counter()
    tab.goto(page.absolute().as_uri())
    tab.wait_for_selector(".main-svg", state="attached", timeout=120_000)
    wall = time.perf_counter() - begun
    metrics = {one["name"]: one["value"] for one in meter.send("Performance.getMetrics")["metrics"]}
    tab.close()
    return wall, metrics["TaskDuration"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        long, short = Path(scratch) / "long", Path(scratch) / "short"
        for run, count in ((long, args.steps), (short, 300)):
            run.mkdir()
            with (run / "journal.jsonl").open("w") as file:
                file.writelines(steps(count))
        size = (long / "journal.jsonl").stat().st_size
        print(f"{args.steps:,} steps, {size / 1e6:.0f} MB; {platform.processor() or platform.machine()}")
        make(short)
        reading, making = [], []
        for _ in range(args.rounds):
            reading.append(seconds(lambda: read(long / "journal.jsonl")))
            making.append(seconds(lambda: make(long)))
        a, b = statistics.median(reading), statistics.median(making)
        memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        pages = {name: run / "report.html" for name, run in (("long", long), ("short", short))}
        print(
            f"reading its JSON {a:.1f} s; the report {b:.1f} s ({b / a:.2f} times), {memory:.0f} MB of memory"
        )
        print(f"the page: {pages['long'].stat().st_size / 1e6:.1f} MB")
        chromium = next(
            (path for name in ("chromium", "google-chrome") if (path := shutil.which(name))), None
        )
        if chromium is None:
            print("no chromium: opening is not measured")
            return
        from playwright.sync_api import sync_playwright

        found: dict[str, list[tuple[float, float]]] = {"long": [], "short": []}
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            for _ in range(max(args.rounds, 5)):
                for name, page in pages.items():
                    found[name].append(opening(browser, page))
            browser.close()
        for name, rows in found.items():
            wall, thread = (statistics.median(row[i] for row in rows) for i in (0, 1))
            print(f"opening the {name} run's: {wall:.2f} s, of which the page's thread worked {thread:.2f} s")


if __name__ == "__main__":
    main()
