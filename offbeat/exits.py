"""How a script ends: one that simply ends still leaves in good order, one that fails leaves at once."""

from __future__ import annotations

import atexit
import sys
import weakref
from types import TracebackType
from typing import Protocol

from offbeat.journal import Journal
from offbeat.site import here

GRACE = 10.0
"""Seconds that the interpreter's end waits for a thread that is in C++: one that comes back from there into
an interpreter that is going ends the process by SIGABRT. It may wait there for another worker's end."""


class Closes(Protocol):
    journal: Journal

    @property
    def done(self) -> bool: ...

    def close(self) -> None: ...

    def fail(self, error: BaseException) -> None: ...


_watching = False


def watch(one: Closes) -> None:
    """At the script's end `one` is closed; if an error ends it, `one.fail(error)` comes first."""
    global _watching
    # In the order of their making, which is the same on all workers: they wait for each other in it. Held
    # until the job is over, or one that the script lets go of would vanish without leaving.
    here().open[id(one)] = one
    if _watching or here().virtual:
        return
    _watching = True
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        fail(error)
        before(kind, error, trace)

    sys.excepthook = hook
    # Whoever replaced our hook has still left the error there.
    atexit.register(lambda: leave(getattr(sys, "last_value", None)))


def fail(error: BaseException) -> None:
    """The script has failed."""
    for one in _living():
        one.fail(error)


def leave(error: object = None) -> None:
    """The script has ended, with `error` if it is one."""
    for one in _living():
        if isinstance(error, BaseException):
            one.fail(error)
        elif not one.done:
            print(
                "offbeat: the script has ended before the job: this worker leaves, and waits until "
                "the others have finished (sync.close() says that this is meant)",
                file=sys.stderr,
                flush=True,
            )
        one.close()


def relax(one: Closes) -> None:
    """`one`'s job is over: it may go when the script lets go of it."""
    if id(one) in here().open:
        here().open[id(one)] = weakref.ref(one)


def forget(one: Closes) -> None:
    here().open.pop(id(one), None)


def _living() -> list[Closes]:
    held = [one() if isinstance(one, weakref.ref) else one for one in list(here().open.values())]
    return [one for one in held if one is not None]
