"""The documentation: what a newcomer is told to do works, and the site builds."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def blocks(page: str, language: str) -> list[str]:
    """The code of a page in a language; "" for commands."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    return [code for name, code in found if name == language]


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words = shlex.split(command)
    program = [sys.executable, *(["-m", "offbeat"] if words[0] == "offbeat" else [])]
    return subprocess.run([*program, *words[1:]], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)


def prepare(folder: Path) -> list[str]:
    """Writes the files of start.md; returns its commands, in order."""
    (script,) = blocks("start.md", "python")
    (cluster,) = blocks("start.md", "toml")
    (folder / "first.py").write_text(script)
    (folder / "slow.toml").write_text(cluster)
    lines = [line for block in blocks("start.md", "") for line in block.splitlines()]
    return [line for line in lines if not line.startswith("pip ")]


@pytest.mark.slow
def test_the_first_script_runs_as_one_worker(tmp_path: Path) -> None:
    assert prepare(tmp_path)[0] == "python first.py"
    done = run("python first.py", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_every_command_of_the_first_five_minutes(tmp_path: Path) -> None:
    commands = prepare(tmp_path)
    assert len(commands) == 5
    for command in commands:
        done = run(command, tmp_path)
        assert done.returncode == 0, done.stderr
    for place in ("first", "plans", "virtual"):
        page = (tmp_path / "runs" / place / "report.html").read_text()
        assert "accuracy" in page
    assert "reached" in page


def test_pages_that_are_linked_are_there() -> None:
    for page in [*DOCS.glob("*.md"), ROOT / "README.md"]:
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_commands_in_the_documentation_have_options_that_exist() -> None:
    from typer.main import get_command

    from offbeat.cli import app

    known: dict[str, set[str]] = {}
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        known[name] = {option for param in getattr(command, "params", []) for option in param.opts}
    for page in [*DOCS.glob("*.md"), ROOT / "README.md"]:
        for line in re.findall(r"^(?:\$ )?offbeat (.*)$", page.read_text(), re.MULTILINE):
            words = line.split("#")[0].split()
            if words[0] not in known or not known[words[0]]:
                continue
            script = next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))
            for word in words[1:script]:
                if word.startswith("--"):
                    assert word.split("=")[0] in known[words[0]], f"{page.name}: offbeat {line}"


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (make docs)")
    pytest.importorskip("mkdocstrings")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**ENVIRONMENT, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    page = (tmp_path / "site" / "commands" / "report.html").read_text()
    assert "offbeat report runs/a runs/b -o report.html" in page
    assert "Synchronizer" in (tmp_path / "site" / "api.html").read_text()
