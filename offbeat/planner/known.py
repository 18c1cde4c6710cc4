"""How a profile knows its script again."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path


def text_of(path: str) -> str:
    """A hash of what a script says."""
    return sha256(Path(path).read_bytes()).hexdigest()[:16]
