"""What the documentation's pages hold: blocks of code, and commands in them and between `quotes`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
PROGRAMS = ("offbeat", "python", "make", "pip", "torchrun", "tensorboard", "sbatch", "kubectl", "scancel")


@dataclass(frozen=True)
class Block:
    page: str
    number: int
    language: str
    code: str

    @property
    def name(self) -> str:
        return f"{self.page}-{self.number}"


def blocks(page: Path | str) -> list[Block]:
    """A page's fenced blocks, in order; language "" for commands, output and formulas."""
    path = ROOT / "docs" / page if isinstance(page, str) else page
    found = re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE)
    return [Block(path.stem, number, language, code) for number, (language, code) in enumerate(found)]


def unset(line: str) -> str:
    """A line without a prompt, and without variables before its command."""
    return re.sub(r"^(?:\$ )?(?:[A-Z_0-9]+=(?:\"[^\"]*\"|\S*) )*", "", line)


def program(line: str) -> str | None:
    """Which program a line runs, if it is a command."""
    word = unset(line).split(" ")[0]
    return word if word in PROGRAMS or word.startswith("examples/") else None


def commands(page: Path) -> list[str]:
    """The commands in a page's blocks, in order, without prompts and comments."""
    lines: list[str] = []
    for block in blocks(page):
        if not block.language:
            lines += re.sub(r" *\\\n *", " ", block.code).splitlines()
    return [_bare(line) for line in lines if program(line)]


def quoted(page: Path) -> list[str]:
    """The commands between quotes in a page's text, if they are more than a name."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"`([^`\n]+)`", text)
    return [line for line in found if program(line) and len(line.split()) > 2]


def _bare(line: str) -> str:
    return re.sub(r"\s+# .*$", "", line.removeprefix("$ ")).strip()
