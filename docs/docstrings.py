"""Docstrings say what a parameter is in lines such as `total: the length`. The site shows them as a list."""

from __future__ import annotations

import re
from typing import Any

import griffe

ENTRY = re.compile(r"(\w+(?:, \w+)*): ")


class Lists(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = "\n\n".join(map(listed, obj.docstring.value.split("\n\n")))


def listed(paragraph: str) -> str:
    """A paragraph of entries, each with its further lines indented, as a list; any other as it is."""
    lines = paragraph.split("\n")
    if not ENTRY.match(lines[0]) or not all(ENTRY.match(line) or line.startswith("    ") for line in lines):
        return paragraph
    return "\n".join(ENTRY.sub(r"- **\1**: ", line, count=1) if ENTRY.match(line) else line for line in lines)
