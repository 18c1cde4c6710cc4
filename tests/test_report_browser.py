"""Reports in a real browser: they run, they can be read and used with a keyboard, and nothing gets out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from browser import Visit, browser
from journals import HOSTILE, calm, eventful, five, steps, write

from offbeat.report.page import write_report


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as one:
        yield one


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports of five plans, of an eventful run, of 256 workers, and of hostile texts."""
    home = tmp_path_factory.mktemp("reports")
    runs = {
        "five": [five(home / "five")],
        "one": [write(home / "one", eventful())],
        "many": [write(home / "many", calm("bsp", 60.0, workers=256))],
        "hostile": [],
    }
    for number, bad in enumerate(HOSTILE):
        rows = eventful(text=bad)
        rows[0] |= {"plan": bad, "script": bad, "argv": [bad], "versions": {bad: bad}}
        for row in rows:
            row |= {"values": {bad: 0.5}} if row["type"] == "evaluation" else {}
            row |= {"protocol": bad} if row["type"] in ("phase", "pushes") else {}
            row |= {"from": bad, "to": bad} if row["type"] == "switch" else {}
        runs["hostile"].append(write(home / f"hostile-{number}", rows))
    for name, places in runs.items():
        write_report(places, home / f"{name}.html")
    return {name: home / f"{name}.html" for name in runs}


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [("five", 1200, "light"), ("one", 390, "dark"), ("many", 1200, "dark"), ("hostile", 390, "light")],
)
def test_plots_are_drawn_and_nothing_complains(
    chromium: Any, reports: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    visit = Visit(chromium, reports[name], width, color_scheme=scheme)
    page = visit.page
    visit.look()
    for details in page.query_selector_all("details.run:not([open])")[:1]:
        details.query_selector("summary").click()
    visit.look()
    drawn, there = visit.drawn()
    assert drawn == there > 3
    assert visit.complaints == []
    assert visit.asked == []
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    assert page.evaluate("document.documentElement.scrollWidth") <= width  # nothing is cut off at the right
    assert page.evaluate("[...document.querySelectorAll('.canvas')].every(b => b.getAttribute('aria-label'))")
    assert page.evaluate("window.pwned") is None
    if name == "hostile":
        text = page.inner_text("body")
        for bad in HOSTILE:
            assert " ".join(bad.split()) in " ".join(text.split())
        legend = page.evaluate("[...document.querySelectorAll('.legendtext')].map(t => t.textContent).join()")
        assert "<script>window.pwned=1</script>" in legend
        links = page.evaluate("[...document.querySelectorAll('a')].map(a => a.getAttribute('href') || '#')")
        assert all(link.startswith("#") for link in links)
    visit.close()


def test_a_keyboard_is_enough(chromium: Any, reports: dict[str, Path]) -> None:
    visit = Visit(chromium, reports["five"])
    page = visit.page

    def focused(what: str) -> Any:
        return page.evaluate(f"document.activeElement.{what}")

    def tab_to(selector: str, most: int = 60) -> None:
        for _ in range(most):
            page.keyboard.press("Tab")
            if page.evaluate("(s) => document.activeElement.matches(s)", selector):
                return
        raise AssertionError(f"{selector} cannot be reached")

    page.wait_for_selector("#evaluated-0 .main-svg", state="attached")
    page.keyboard.press("Tab")
    assert focused("className") == "skip"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    assert focused("id") == "verdict"

    plot = "document.querySelector('#evaluated-0 .canvas')"
    title = f"{plot}.layout.xaxis.title.text"
    assert page.evaluate(title) == "seconds since the first step"
    tab_to("input[name=axis]")
    page.keyboard.press("ArrowRight")
    assert page.evaluate(title) == "samples, all workers"
    page.keyboard.press("ArrowRight")
    assert page.evaluate(title) == "progress, % of the job"

    span = f"(([from, to]) => to - from)({plot}._fullLayout.xaxis.range.map(Number))"
    whole = page.evaluate(span)
    tab_to("#evaluated-0 [data-zoom=in]")
    page.keyboard.press("Enter")
    assert page.evaluate(span) == pytest.approx(whole / 2)
    tab_to("#evaluated-0 [data-zoom=all]")
    page.keyboard.press("Space")
    assert page.evaluate(span) == pytest.approx(whole, rel=0.01)

    tab_to("#evaluated-0 details summary")
    page.keyboard.press("Enter")
    assert page.is_visible("#evaluated-0 table")
    tab_to("#training-loss [data-log]")
    page.keyboard.press("Space")
    assert page.evaluate("document.querySelector('#training-loss .canvas').layout.yaxis.type") == "linear"

    tab_to("#run-1 > summary")
    page.keyboard.press("Enter")
    page.wait_for_selector("#timeline-1 .main-svg", state="attached")
    page.keyboard.press("Shift+Tab")
    page.focus("#theme")
    page.keyboard.press("Enter")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert visit.complaints == []
    visit.close()


def test_for_who_cannot_see_and_on_paper(chromium: Any, reports: dict[str, Path]) -> None:
    visit = Visit(chromium, reports["one"], color_scheme="dark")
    page = visit.page
    levels = [
        int(tag[1])
        for tag in page.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map(h => h.tagName)")
    ]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert page.evaluate("document.documentElement.lang") == "en"
    controls = "[...document.querySelectorAll('button, input, summary, a')]"
    named = "e.getAttribute('aria-label') || e.textContent.trim() || e.closest('label')"
    assert page.evaluate(f"{controls}.every(e => {named})")
    assert page.evaluate("document.querySelectorAll('figure.plot').length") == page.evaluate(
        "document.querySelectorAll('figure.plot [role=img]').length"
    )
    assert page.evaluate("document.querySelectorAll('figure.plot details table').length") >= 6

    # on paper: light, all that is open, as wide as a page
    visit.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    visit.page.emulate_media(media="print")
    assert visit.drawn()[0] == visit.drawn()[1]
    assert visit.page.evaluate("document.documentElement.dataset.theme") == "light"
    widths = visit.page.evaluate("[...document.querySelectorAll('.canvas > *')].map(b => b.clientWidth)")
    assert max(widths) <= 680
    assert not visit.page.is_visible("nav")
    visit.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert visit.page.evaluate("document.documentElement.dataset.theme") == "dark"
    visit.close()


@pytest.mark.slow
def test_a_million_steps_open(chromium: Any, tmp_path: Path) -> None:
    with (tmp_path / "journal.jsonl").open("w") as file:
        file.writelines(steps(1_000_000))
    write_report([tmp_path], tmp_path / "r.html")
    visit = Visit(chromium, tmp_path / "r.html")
    visit.look()
    assert visit.drawn()[0] == visit.drawn()[1]
    assert visit.complaints == []
    visit.close()
