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
    "audit": "failures.md#the-ledger-and-its-audit",
    "cluster list": "cluster.md#presets",
    "cluster show": "cluster.md",
    "compare": "choosing.md report.md#the-report",
    "ctl": "failures.md#a-person-at-the-keyboard",
    "jobs": "search.md#the-next-time",
    "plan": "planner.md#a-plan",
    "profile": "planner.md#a-profile",
    "report": "report.md#the-report",
    "run": "start.md machines.md failures.md virtual.md stragglers.md",
    "search": "search.md",
    "watch": "report.md#the-live-view",
}
"""Where more is told of each command."""
SOURCE = re.compile(r"\[([^\]]+)\]\(\.\./([^)]+)\)")
"""A link from a page to a file of the repository. The site holds the recipes, and nothing else of it."""
DOCS = Path(__file__).parent
RECIPES = DOCS.parent / "examples" / "launch"
WIDE = "---\nhide: [toc]\n---\n"
"""A page's head: without a table of contents its lines may be longer."""
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
    more = [f"[{_title(page)}](../{page})" for page in GUIDES[" ".join(words)].split()]
    title = f"{WIDE}# offbeat {' '.join(words)}"
    return f"{title}\n\n```text\n{shown.output.strip()}\n```\n\nMore: {', '.join(more)}.\n"


def _title(page: str) -> str:
    return (DOCS / page.partition("#")[0]).read_text().partition("\n")[0].removeprefix("# ")


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
            code = f"```{LANGUAGES[path.suffix]}\n{path.read_text()}```\n"
            told = f"`examples/launch/{path.name}`; what it is for: [several machines](../machines.md)."
            content = f"{WIDE}# {path.name}\n\n{told}\n\n{code}"
            files.append(File.generated(config, f"recipes/{path.name}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return markdown if "/" in page.file.src_uri else SOURCE.sub(_link, markdown)


def _link(found: re.Match[str]) -> str:
    path = Path(found[2])
    shown = path.parent == Path("examples/launch") and path.suffix in LANGUAGES
    return f"[{found[1]}](recipes/{path.name}.md)" if shown else found[1]


def _path(words: list[str]) -> str:
    return f"commands/{'-'.join(words)}.md"
