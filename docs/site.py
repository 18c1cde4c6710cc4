"""What mkdocs does besides: a page for every command, made of its own --help, one for every recipe, and links
to source files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.structure.files import File, Files
from typer.testing import CliRunner

from offbeat.cli import app

GUIDES = {
    "audit": ("failures.md#the-ledger-and-its-audit", "Workers that die and come"),
    "cluster list": ("cluster.md#presets", "Describing a cluster"),
    "cluster show": ("cluster.md", "Describing a cluster"),
    "compare": ("choosing.md", "Choosing a protocol"),
    "ctl": ("failures.md#a-person-at-the-keyboard", "Workers that die and come"),
    "jobs": ("search.md#the-next-time", "When to switch"),
    "plan": ("planner.md", "The planner"),
    "profile": ("planner.md#a-profile", "The planner"),
    "report": ("report.md#the-report", "Looking at runs"),
    "run": ("start.md#3-several-workers", "Getting started"),
    "search": ("search.md", "When to switch"),
    "watch": ("report.md#the-live-view", "Looking at runs"),
}
"""Where more is told of each command."""
SOURCE = re.compile(r"\[([^\]]+)\]\(\.\./([^)]+)\)")
"""A link from a page to a file of the repository. The site holds the recipes, and nothing else of it."""
RECIPES = Path(__file__).parents[1] / "examples" / "launch"
LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml"}


def commands() -> Iterator[list[str]]:
    """The words of every command."""
    waiting: list[tuple[list[str], Any]] = [([], typer.main.get_command(app))]
    while waiting:
        words, one = waiting.pop(0)
        if hasattr(one, "commands"):
            waiting += [([*words, name], inner) for name, inner in one.commands.items()]
        else:
            yield words


def text(words: list[str]) -> str:
    """The page of one command."""
    shown = CliRunner().invoke(
        app, [*words, "--help"], prog_name="offbeat", env={"COLUMNS": "100", "TERMINAL_WIDTH": "100"}
    )
    page, title = GUIDES[" ".join(words)]
    return (
        f"# offbeat {' '.join(words)}\n\n```text\n{shown.output.strip()}\n```\n\n"
        f"What it does, and why: [{title}](../{page}).\n"
    )


def on_config(config: Any) -> Any:
    pages = [{" ".join(words): _path(words)} for words in sorted(commands())]
    for section in config.nav:
        if "Reference" in section:
            section["Reference"].append({"Commands": pages})
    return config


def on_files(files: Files, config: Any) -> Files:
    for words in commands():
        files.append(File.generated(config, _path(words), content=text(words)))
    for path in sorted(RECIPES.iterdir()):
        if path.suffix in LANGUAGES:
            code = f"# {path.name}\n\n```{LANGUAGES[path.suffix]}\n{path.read_text()}```\n"
            files.append(File.generated(config, f"recipes/{path.name}.md", content=code))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return SOURCE.sub(_link, markdown)


def _link(found: re.Match[str]) -> str:
    path = Path(found[2])
    shown = path.parent == Path("examples/launch") and path.suffix in LANGUAGES
    return f"[{found[1]}](recipes/{path.name}.md)" if shown else found[1]


def _path(words: list[str]) -> str:
    return f"commands/{'-'.join(words)}.md"
