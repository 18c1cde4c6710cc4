"""What a script would train, remembered: a second answer needs neither the script nor torch.

What was found is kept in the user's cache, under a hash of the script's path and words, the number of
workers, and the versions of Python, torch and offbeat. It counts as long as the script and every file of
Python that it had loaded (outside of Python, torch and offbeat) still say the same. What a script reads
otherwise, a data set say, is not looked at.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from offbeat.planner.known import text_of
from offbeat.virtual.model import Model

FORMAT = 1
"""Of what is kept; another one whenever something else would be found in the same script."""
MOST = 200
"""Scripts that are remembered."""
_INSTALLED = tuple({os.path.join(sysconfig.get_paths()[name], "") for name in ("purelib", "platlib")})
"""Where packages are."""


@dataclass(frozen=True)
class Job:
    """What a script trains. flop: operations of a sample, forward and backward; 0 where none could be
    counted, and `problem` says why. batch: samples of a unit. samples: of the data set. total: units of the
    job. remembered: whether the script was not looked at this time."""

    model: Model
    flop: float
    problem: str
    plan: str
    wire: str
    batch: int | None
    samples: int | None
    total: int | None
    remembered: bool = False


def recall(script: str, args: Sequence[str], workers: int) -> Job | None:
    """What was found before; None where that isn't known, or may be another by now."""
    try:
        kept = json.loads(_place(script, args, workers).read_text(encoding="utf-8"))
        if any(_mark(path) != mark for path, mark in kept["files"].items()):
            return None
        shape: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in kept["job"]["model"].items()
        }
        return replace(Job(**{**kept["job"], "model": Model(**shape)}), remembered=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def remember(script: str, args: Sequence[str], workers: int, job: Job, loaded: Iterable[str]) -> None:
    """loaded: files that the script has loaded. Does nothing where there is no place for it."""
    place = _place(script, args, workers)
    with contextlib.suppress(OSError):
        files = {path: _mark(path) for path in {os.path.abspath(script), *_own(loaded)}}
        place.parent.mkdir(parents=True, exist_ok=True)
        beside = place.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps({"files": files, "job": asdict(job)}), encoding="utf-8")
        beside.rename(place)
        for old in sorted(place.parent.glob("*.json"), key=_age)[MOST:]:
            old.unlink(missing_ok=True)


def _age(path: Path) -> float:
    try:
        return -path.stat().st_mtime
    except OSError:  # another process has removed it
        return 0.0


def _mark(path: str) -> str:
    """What changes with a file: its text; of an installed one its size and time, since there may be many."""
    if not path.startswith(_INSTALLED):
        return text_of(path)
    found = os.stat(path)
    return f"{found.st_size} {found.st_mtime_ns}"


def _own(loaded: Iterable[str]) -> list[str]:
    """Without Python's, torch's and offbeat's own, whose versions are known."""
    known = tuple(os.path.join(place, "torch", "") for place in _INSTALLED)
    known += (os.path.join(Path(__file__).resolve().parent.parent, ""),)
    standard = os.path.join(sysconfig.get_paths()["stdlib"], "")
    found = []
    for path in map(os.path.abspath, loaded):
        python = path.startswith(standard) and not path.startswith(_INSTALLED)
        if not python and not path.startswith(known) and os.path.isfile(path):
            found.append(path)
    return found


def _place(script: str, args: Sequence[str], workers: int) -> Path:
    versions: list[Any] = [FORMAT, platform.python_version()]
    versions += [importlib.metadata.version(name) for name in ("torch", "offbeat")]
    about = [os.getcwd(), os.path.abspath(script), list(args), workers, *versions]
    name = sha256(json.dumps(about).encode()).hexdigest()[:32]
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "offbeat" / "plan" / f"{name}.json"
