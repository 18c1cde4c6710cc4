"""How a script ends: one that simply ends still leaves in good order, one that fails leaves at once."""

from __future__ import annotations

import atexit
import sys
import weakref
from types import TracebackType
from typing import Protocol


class Closes(Protocol):
    def close(self) -> None: ...

    def fail(self, error: BaseException) -> None: ...


_live: weakref.WeakSet[Closes] = weakref.WeakSet()
_watching = False


def watch(one: Closes) -> None:
    """At the interpreter's end `one` is closed; if an error ends it, `one.fail(error)` comes first."""
    global _watching
    _live.add(one)
    if _watching:
        return
    _watching = True
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        for one in list(_live):
            one.fail(error)
        before(kind, error, trace)

    def leave() -> None:
        for one in list(_live):
            one.close()

    sys.excepthook = hook
    atexit.register(leave)


def forget(one: Closes) -> None:
    _live.discard(one)
