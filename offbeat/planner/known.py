"""What a profile is made by, and how it knows its script again."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

ALONE = "local(period=1000000000)"
"""Each worker for itself."""
ENDLESS = 10**9
"""Units of a job that is profiled."""


def environment(path: str | Path, steps: int, workers: int, shards: bool = True) -> dict[str, str]:
    """What makes a script's workers measure, and write a profile to `path`, instead of training: each alone
    for `steps` units, then on shards."""
    plan = f"{ALONE}:{steps * workers}u asp" if shards and workers > 1 else ALONE
    return {
        "OFFBEAT_MEASURE": f"{steps} {Path(path).absolute()}",
        "OFFBEAT_PLAN": plan,
        "OFFBEAT_TOTAL": str(ENDLESS),
    }


def text_of(path: str) -> str:
    """A hash of what a script says."""
    return sha256(Path(path).read_bytes()).hexdigest()[:16]
