"""The documentation: what a newcomer is told to do works, every snippet runs, and the site builds."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from browser import Visit, browser
from pages import PAGES, ROOT, Block, blocks, commands

import offbeat
from offbeat.virtual.cluster import Cluster
from offbeat.virtual.description import find

DOCS = ROOT / "docs"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
ALL = [block for page in PAGES for block in blocks(page)]

PUBLIC = {
    *("batches", "step", "stepping", "accumulate", "every", "consensus", "scheduler", "log"),
    *("save", "restore", "close", "progress", "units", "total", "plan", "protocol", "members"),
    *("done",),
}
"""Of Synchronizer."""


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words = shlex.split(command)
    program = [sys.executable, *(["-m", "offbeat"] if words[0] == "offbeat" else [])]
    return subprocess.run([*program, *words[1:]], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)


# Getting started


def prepare(folder: Path) -> list[str]:
    """Writes the files of start.md; returns its commands, in order."""
    (script,) = (block.code for block in blocks("start.md") if block.language == "python")
    (cluster,) = (block.code for block in blocks("start.md") if block.language == "toml")
    (folder / "first.py").write_text(script)
    (folder / "slow.toml").write_text(cluster)
    return [line for line in commands(DOCS / "start.md") if not line.startswith("pip ")]


@pytest.mark.slow
def test_the_first_script_runs_as_one_worker(tmp_path: Path) -> None:
    assert prepare(tmp_path)[0] == "python first.py"
    done = run("python first.py", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_every_command_of_the_first_five_minutes(tmp_path: Path) -> None:
    lines = prepare(tmp_path)
    assert len(lines) == 5
    for line in lines:
        done = run(line, tmp_path)
        assert done.returncode == 0, done.stderr
    for place in ("first", "plans", "virtual"):
        page = (tmp_path / "runs" / place / "report.html").read_text()
        assert "accuracy" in page
    assert "reached" in page


# Snippets


def test_what_is_shown_is_of_a_kind_that_is_tested() -> None:
    """Commands: test_commands. The difference: test_examples. Python: here, in test_examples (README) and in
    test_moving."""
    assert {block.language for block in ALL} == {"", "python", "toml", "diff"}
    assert [block.page for block in ALL if block.language == "diff"] == ["README"]


SCRIPTS = [b for b in ALL if b.language == "python" and b.page not in ("README", "start", "moving")]


@pytest.mark.slow
@pytest.mark.parametrize("block", SCRIPTS, ids=lambda block: block.name)
def test_scripts_run(block: Block, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(block.code)
    done = run("python script.py", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "block", [block for block in ALL if block.language == "toml"], ids=lambda block: block.name
)
def test_descriptions_of_clusters_are_valid(block: Block, tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(block.code)
    assert isinstance(find(str(tmp_path / "cluster.toml")).sized(8), Cluster)


def test_messages_that_are_quoted_are_offbeat_s() -> None:
    """faq.md and machines.md explain errors: a changed text must change there, too."""
    source = " ".join(path.read_text() for path in (ROOT / "offbeat").rglob("*.py"))
    plain = re.sub(r"[\"'{}\s]+|f\"", " ", re.sub(r"\"\s*\n\s*f?\"", "", source))
    quotes = re.findall(r"^\*\*\"(.*?)\"[.*]", (DOCS / "faq.md").read_text(), re.MULTILINE)
    table = (DOCS / "machines.md").read_text().partition("don't find each other")[2]
    quotes += re.findall(r"^\| `(.*?)` \|", table, re.MULTILINE)
    assert len(quotes) >= 8
    for quote in quotes:
        for part in re.split(r"…|\d+", quote):
            words = " ".join(part.split()).strip(" .:")
            assert words in plain, quote


# Links and the site


def test_pages_that_are_linked_are_there() -> None:
    for page in PAGES:
        for link, place in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", page.read_text()):
            if "://" in link:
                continue
            target = page.parent / link if link else page
            assert target.exists(), f"{page.name} links to {link}"
            if place and target.suffix == ".md":
                titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
                slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
                assert re.sub("-+", "-", place) in {re.sub("-+", "-", slug) for slug in slugs}, (
                    f"{link}#{place}"
                )


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("nav:")[2]
    assert set(re.findall(r": (\w+\.md)", navigation)) == {page.name for page in DOCS.glob("*.md")}


def listed(name: str) -> set[str]:
    """The members of a class that api.md shows."""
    text = (DOCS / "api.md").read_text().partition(f"::: offbeat.{name}\n")[2].partition(":::")[0]
    return set(re.findall(r"^ +- (\w+)$", text, re.MULTILINE))


def test_the_reference_shows_what_is_a_script_s_own() -> None:
    text = (DOCS / "api.md").read_text()
    assert set(re.findall(r"^::: offbeat\.(\w+)$", text, re.MULTILINE)) == set(offbeat.__all__)
    assert listed("Synchronizer") == PUBLIC
    assert {name for name in vars(offbeat.Synchronizer) if not name.startswith("_")} == PUBLIC
    for name in PUBLIC:
        assert inspect.getdoc(getattr(offbeat.Synchronizer, name)), name


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does."""
    for module, package in (
        ("mkdocs", "mkdocs"),
        ("mkdocstrings", "mkdocstrings"),
        ("material", "mkdocs-material"),
    ):
        pytest.importorskip(module, reason=f"{package} is not installed (make docs)")
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**ENVIRONMENT, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_the_site_builds_without_a_warning(site: Path) -> None:
    page = (site / "commands" / "report.html").read_text()
    assert "offbeat report runs/a runs/b -o report.html" in page
    assert 'href="../report.html#the-report"' in page, "it leads to what is told of it"
    machines = (site / "machines.html").read_text()
    for recipe in (ROOT / "examples" / "launch").glob("*.*"):
        assert f'href="recipes/{recipe.name}.html"' in machines
    reference = (site / "api.html").read_text()
    assert 'id="offbeat.Synchronizer.batches"' in reference


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_pages_fit_a_screen_and_ask_nobody(site: Path, width: int) -> None:
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]
    assert len(pages) > 30
    with browser() as chromium:
        for page in pages:
            visit = Visit(chromium, page, width)
            assert visit.page.evaluate("document.documentElement.scrollWidth") <= width, page
            assert (visit.complaints, visit.asked) == ([], []), page
            visit.close()
