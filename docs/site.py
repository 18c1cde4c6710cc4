"""What mkdocs does besides: a page for every command, made of its own --help, and links to source files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer
from mkdocs.structure.files import File, Files
from typer.testing import CliRunner

from offbeat.cli import app

SOURCE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]+\)")
"""A link from a page to a file of the repository, which the site doesn't hold."""


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
    return f"# offbeat {' '.join(words)}\n\n```text\n{shown.output.strip()}\n```\n"


def on_config(config: Any) -> Any:
    pages = [{" ".join(words): _path(words)} for words in sorted(commands())]
    for section in config.nav:
        if "Reference" in section:
            section["Reference"].append({"Commands": pages})
    return config


def on_files(files: Files, config: Any) -> Files:
    for words in commands():
        files.append(File.generated(config, _path(words), content=text(words)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return SOURCE.sub(r"\1", markdown)


def _path(words: list[str]) -> str:
    return f"commands/{'-'.join(words)}.md"
