"""Makes the pictures of docs/img: runs three jobs on virtual clusters, and photographs their reports.

make pictures
python docs/pictures/make.py --runs DIR     # keeps the runs in DIR, and uses those that are there
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, sync_playwright

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
IMAGES = HERE.parent / "img"
DIGITS = "examples/digits.py"
PLANS = "bsp; local(period=4); dasgd(period=4,delay=2); asp; bsp:12.5% asp"
JOBS = {
    "five-plans": [
        *("compare", "--virtual", "8", "--cluster", HERE / "slow-links.toml", "--repeat", "3", "--jobs", "2"),
        *("--plans", PLANS, DIGITS, "--epochs", "20"),
    ],
    "one-run": [
        *("run", "--virtual", "4", "--cluster", HERE / "one-bad-day.toml", "--min", "2"),
        *("--stragglers", "observe", "--plan", "bsp:60% asp", DIGITS, "--epochs", "50"),
    ],
    "256-workers": [
        *("run", "--virtual", "256", "--cluster", HERE / "many.toml", "--timing-only"),
        *("--plan", "bsp:50% dasgd(period=4,delay=2):75% asp", "--total", "60000", DIGITS),
    ],
}
WIDE, PHONE = 1120, 390


def make_runs(home: Path) -> None:
    for name, words in JOBS.items():
        if not (home / name).exists():
            command = [sys.executable, "-m", "offbeat", *map(str, words), "--out", str(home / name)]
            print(" ".join(command), flush=True)
            subprocess.run(command, cwd=ROOT, check=True)
        subprocess.run([sys.executable, "-m", "offbeat", "report", str(home / name)], check=True)


def settle(page: Page) -> None:
    """Has every plot drawn."""
    height = page.evaluate("document.documentElement.scrollHeight")
    for y in range(0, height, 400):
        page.evaluate(f"scrollTo({{top: {y}, behavior: 'instant'}})")
        page.wait_for_timeout(80)
    page.evaluate("scrollTo({top: 0, behavior: 'instant'})")
    page.wait_for_timeout(300)


def save(page: Page, name: str, clip: dict[str, Any] | None = None) -> None:
    """A picture in 256 colours, which is a third of the size."""
    file = IMAGES / f"{name}.png"
    page.screenshot(path=file, full_page=True, **({"clip": clip} if clip else {}))
    with Image.open(file) as image:
        few = image.convert("RGB").quantize(
            256, Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE
        )
        few.save(file, optimize=True)
    print(f"{file.relative_to(ROOT)}: {file.stat().st_size // 1000} kB")


def span(page: Page, first: str, last: str, pad: int = 12) -> dict[str, Any]:
    """The part of the page from one element to another."""
    a, b = (page.locator(one).bounding_box() for one in (first, last))
    assert a is not None
    assert b is not None
    return {
        "x": 0,
        "y": max(a["y"] - pad, 0),
        "width": page.viewport_size["width"],
        "height": b["y"] + b["height"] + pad - max(a["y"] - pad, 0),
    }


def photograph(home: Path, chromium: str) -> None:
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])

        def visit(name: str, width: int, scheme: str = "light") -> Page:
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page.goto((home / name / "report.html").absolute().as_uri())
            page.wait_for_selector("#verdict")
            settle(page)
            return page

        page = visit("five-plans", WIDE)
        save(page, "report", span(page, "header", "#evaluated-0"))
        save(page, "report-time", span(page, "#time-title", "#shares"))
        page = visit("five-plans", WIDE, "dark")
        save(page, "report-dark", span(page, "header", "#evaluated-0"))
        page = visit("one-run", WIDE)
        save(page, "report-run", span(page, "header", "#verdict"))
        save(page, "report-workers", span(page, "#workers-0-title", "#speeds-0"))
        page = visit("one-run", PHONE, "dark")
        save(page, "report-phone", {**span(page, "header", "#evaluated-0"), "width": PHONE})
        page = visit("256-workers", WIDE)
        save(page, "report-256", span(page, "#workers-0-title", "#timeline-0"))
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=Path, help="where the runs are kept")
    args = parser.parse_args()
    chromium = next((path for name in ("chromium", "google-chrome") if (path := shutil.which(name))), None)
    if chromium is None:
        sys.exit("docs/pictures/make.py: there is no chromium on this machine (make browser)")
    with tempfile.TemporaryDirectory() as scratch:
        home = (args.runs or Path(scratch)).absolute()
        home.mkdir(parents=True, exist_ok=True)
        make_runs(home)
        photograph(home, chromium)


if __name__ == "__main__":
    main()
