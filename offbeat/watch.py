"""`offbeat watch`: looks at a run while it goes on, or at one that is over."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.options import refuse
from offbeat.runs import Run

if TYPE_CHECKING:
    from offbeat.live import View

EVERY = 0.5
"""Seconds between two looks at the journal."""
QUIET = 10.0
"""Seconds without a record after which that is said."""


def watch(
    run: Run,
    once: Annotated[
        bool,
        typer.Option("--once", help="Show how it stands and leave (so it is where there is no terminal)."),
    ] = False,
) -> None:
    """Shows a run live: members, protocol, speeds, waiting, staleness, loss, events.

    offbeat watch runs/20260101-120000-train

    Reads the journal and nothing else, so it works wherever the run's directory can be read: on another host,
    of a virtual run, of one that is over. It leaves when the run has ended; Ctrl-C leaves at any time, and
    the run goes on. Exit codes: 0, or 2 if there is no such run.
    """
    import sys

    from rich.console import Console
    from rich.live import Live

    from offbeat.live import Follower, View, fold
    from offbeat.panel import panel

    path = run / "journal.jsonl" if run.is_dir() else run
    if not path.exists():
        refuse(f"{run} holds no journal.jsonl")
    # A file or a pipe has no width of its own; lines must not be cut there.
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    follower, view = Follower(path), View()
    alive = not once and sys.stdout.isatty()
    fresh = time.monotonic()

    def read() -> int:
        nonlocal view
        records = follower.read()
        for record in records:
            view = fold(view, record)
        return len(records)

    read()
    if not alive:
        console.print(panel(view, console.width, 40))
        return
    try:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            while view.end is None:
                note = _note(view, time.monotonic() - fresh)
                live.update(panel(view, console.width, console.height - 1, note), refresh=True)
                time.sleep(EVERY)
                if read():
                    fresh = time.monotonic()
    except KeyboardInterrupt:
        pass
    console.print(panel(view, console.width, console.height - 1))


def _note(view: View, quiet: float) -> str:
    from offbeat.live import clock

    if quiet < QUIET:
        return "Ctrl-C leaves; the run goes on"
    return f"nothing new for {clock(quiet)}: the run may be over, or waits. Ctrl-C leaves"
