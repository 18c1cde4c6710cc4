"""Where a run's output, its live line and the launcher's notes meet on a person's screen."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from offbeat import live
from offbeat.events import ALARMING, NOTED, event

if TYPE_CHECKING:
    from rich.live import Live

    from offbeat.scalars import Board

EVERY = 10.0
"""Seconds between two lines where the live line cannot stay in place."""


class Screen:
    """On a terminal one live line stays at the bottom while output scrolls above it; elsewhere a plain
    line comes every ten seconds and at every switch. `quiet` leaves only the workers' output. `prefix`
    puts each line's rank before it. With `tensorboard` the run's figures are written for TensorBoard, too.

    Raises LaunchError where TensorBoard's package is missing."""

    def __init__(self, quiet: bool = False, prefix: bool = False, label: str = "", tensorboard: bool = False):
        self.quiet, self._prefix, self._label = quiet, prefix, label
        self.view = live.View()
        self._follower: live.Follower | None = None
        self._live: Live | None = None
        self._next = 0.0
        self._board: Board | None = None
        if tensorboard:
            from offbeat.scalars import Board

            self._board = Board()
        if not quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            # Refreshed by `update` alone, so that no thread writes between our lines.
            self._live = Live(
                console=Console(stderr=True, highlight=False),
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()

    def follow(self, out: Path) -> None:
        """Shows the run whose directory is `out`."""
        self._follower = live.Follower(out / "journal.jsonl")
        if self._board is not None:
            self._board.open(out / "tensorboard")

    def update(self) -> None:
        """Reads what is new in the journal and shows it."""
        if self._follower is None:
            return
        records = self._follower.read()
        for record in records:
            self.view = live.fold(self.view, record)
            if self._board is not None:
                self._board.add(record)
            if self.quiet or record["type"] not in (NOTED if self._live is None else ALARMING):
                continue
            if text := event(record):
                self.note(self._label + text)
        now = time.monotonic()
        if self.quiet or now < self._next:
            return
        if self._live is not None:
            from rich.text import Text

            self._next = now + 0.2
            text = f"{self._label}{live.line(self.view)}"
            self._live.update(Text(text, no_wrap=True, overflow="ellipsis", style="bold"), refresh=True)
        elif self.view.now.t and self.view.end is None:
            if self._next:
                self.note(self._label + live.line(self.view))
            self._next = now + EVERY

    def output(self, rank: int, stream: str, text: str) -> None:
        """A worker's output: whole lines."""
        if self._prefix:
            text = "".join(f"[{rank}] {line}" for line in text.splitlines(keepends=True))
        file = sys.stdout if stream == "out" else sys.stderr
        if self._live is not None and file.isatty():
            from rich.text import Text

            # A progress bar rewrites its line; above ours only its newest state can stay.
            lines = [line.rsplit("\r", 1)[-1] for line in text.rstrip("\r\n").split("\n")]
            self._live.console.print(Text.from_ansi("\n".join(lines)), soft_wrap=True)
        else:
            _write(file, text)

    def note(self, text: str) -> None:
        """A line of the launcher's own, on the standard error."""
        text = "".join(f"offbeat: {line}\n" for line in text.split("\n"))
        if self._live is not None:
            from rich.text import Text

            self._live.console.print(Text(text.rstrip("\n")), soft_wrap=True)
        else:
            _write(sys.stderr, text)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()
        if self._live is not None:
            self._live.stop()
            self._live = None


def _write(file: TextIO, text: str) -> None:
    try:
        file.write(text)
        file.flush()
    except BrokenPipeError:
        # Whoever read us has gone (`| head`): the run goes on, as its journal and logs do.
        pass
