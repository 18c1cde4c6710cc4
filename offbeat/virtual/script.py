"""A user's script in every virtual worker: run as `__main__`, with its own copies of the modules beside it.

So globals are each worker's own, as they are in processes (SimGrid's SMPI privatizes them for MPI programs
likewise). A module counts as the script's if its file lies under the script's folder, and outside of
installed packages; all others are shared.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from offbeat.site import here
from offbeat.virtual.ambient import Ambient

PACKAGES = ("site-packages", "dist-packages")


class Script:
    """`path` with its words, to be run by each of `workers`, and by some that come later. logs: directory for
    what the ranks from 1 on print; with `shown` their lines come to this process's own streams instead, with
    the rank before them.

    Raises SyntaxError or OSError for a file that cannot be run.
    """

    def __init__(self, path: str, args: Sequence[str], workers: int, logs: Path | None, shown: bool):
        self.path, self.folder = path, Path(path).resolve().parent
        source = Path(path).read_bytes()
        self._code = compile(source, path, "exec")
        self._finder = _Finder(self.folder)
        self._args, self._workers, self._logs, self._shown = args, workers, logs, shown
        self._streams, self._path = (sys.stdout, sys.stderr), list(sys.path[1:])

    def ambient(self, rank: int) -> Ambient:
        """What a new process of this rank begins with."""
        main, workers = ModuleType("__main__"), str(self._workers)
        main.__dict__.update(__file__=self.path, __builtins__=__builtins__, __cached__=None)
        environ = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": workers,
            "LOCAL_WORLD_SIZE": workers,
            "GROUP_RANK": "0",
        }
        streams: Sequence[Any] = self._streams
        if self._shown:
            streams = [_Prefixed(stream, f"[{rank}] ") for stream in streams]
        elif rank:
            logs = self._logs
            streams = [_Late(logs and logs / f"rank{rank}.{end}") for end in ("out", "err")]
        one = Ambient(main, [self.path, *self._args], environ, *streams)
        one.path = [str(self.folder), *self._path]
        return one

    def __call__(self, rank: int) -> None:
        """One worker's whole script."""
        exec(self._code, sys.modules["__main__"].__dict__)

    def __enter__(self) -> Script:
        self._main = sys.modules["__main__"]
        sys.meta_path.insert(0, self._finder)
        return self

    def __exit__(self, *error: object) -> None:
        sys.meta_path.remove(self._finder)
        sys.modules["__main__"] = self._main

    def trace_of(self, error: BaseException) -> str:
        """The traceback, from the script on."""
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != self.path:
            trace = trace.tb_next
        return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))

    def line_of(self, error: BaseException) -> str:
        """The script's own line that an error came from: "train.py:12", or ""."""
        own = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == self.path or _own(frame.filename, self.folder)
        ]
        return f"{os.path.relpath(own[-1].filename)}:{own[-1].lineno}" if own else ""


def _own(file: str, folder: Path) -> bool:
    """Whether a file belongs to the script in `folder`."""
    if file.startswith("<"):
        return False
    path = Path(file).resolve()
    library = Path(__file__).resolve().parent.parent
    if not path.is_relative_to(folder) or path.is_relative_to(library):
        return False
    return not any(part in PACKAGES for part in path.relative_to(folder).parts)


class _Finder:
    """Notes which modules are the worker's own when they are first imported."""

    def __init__(self, folder: Path):
        self._folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        ambient = getattr(here(), "ambient", None)
        if not isinstance(ambient, Ambient):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None:
            return None
        places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or [])
        if places and all(_own(str(place), self._folder) for place in places):
            ambient.private.add(name)
        return spec


class _Late:
    """A file that is made when something is written."""

    def __init__(self, path: Path | None):
        self._path = path
        self._file: TextIO | None = None

    def write(self, text: str) -> int:
        if self._path is not None and text:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("a", buffering=1)
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def isatty(self) -> bool:
        return False


class _Prefixed:
    """A stream whose lines begin with `prefix`."""

    def __init__(self, stream: TextIO, prefix: str):
        self._stream, self._prefix, self._rest = stream, prefix, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._stream.write(f"{self._prefix}{line}\n")
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return False
