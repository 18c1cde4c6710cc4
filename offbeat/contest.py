"""Runs that are compared: each a job of its own, one after the other or some side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import typer

from offbeat.cluster.launcher import Launcher, Outcome
from offbeat.cluster.spec import LaunchError, LaunchSpec
from offbeat.compare import Run
from offbeat.journal import read
from offbeat.live import summary
from offbeat.screen import Screen

POLL = 0.05
"""Seconds between two looks at the runs."""


class Contest:
    """Runs `specs`, each into its place, at most `jobs` at a time. Of runs side by side the screen shows only
    their ends."""

    def __init__(
        self,
        specs: Sequence[LaunchSpec],
        places: Sequence[Path],
        jobs: int,
        quiet: bool,
        tensorboard: bool = False,
    ):
        self._specs, self._places, self._jobs, self._quiet = specs, places, jobs, quiet
        self._tensorboard = tensorboard
        self._found: dict[int, Run] = {}
        self._code = 0

    def run(self) -> tuple[list[Run], int]:
        """All runs that were begun, in their order, and the code of a signal that ended them all, or 0."""
        waiting = list(range(len(self._specs)))
        entries: list[Entry] = []
        try:
            while (waiting and not self._code) or entries:
                while waiting and len(entries) < self._jobs and not self._code:
                    if (entry := self._begin(waiting.pop(0))) is not None:
                        entries.append(entry)
                entries = [entry for entry in entries if not self._over(entry)]
                if self._code:  # the person's wish to end it all
                    for entry in entries:
                        entry.launcher.stop()
                time.sleep(POLL)
        finally:
            for entry in entries:
                entry.close()
        return [self._found[number] for number in sorted(self._found)], self._code

    def _begin(self, number: int) -> Entry | None:
        spec, place = self._specs[number], self._places[number]
        label = f"[{number + 1}/{len(self._specs)}] {spec.label}: "
        try:
            return Entry(
                number,
                replace(spec, out=str(place)),
                label,
                self._quiet,
                self._jobs > 1,
                self._tensorboard,
            )
        except LaunchError as problem:
            self._found[number] = Run(spec.label, [], str(place), str(problem))
            return None

    def _over(self, entry: Entry) -> bool:
        outcome = entry.poll()
        if outcome is None:
            return False
        spec, place = self._specs[entry.number], self._places[entry.number]
        error = outcome.message
        try:
            records = read(place)
        except (FileNotFoundError, ValueError) as problem:
            records, error = [], error or f"it left no journal: {problem}"
        self._found[entry.number] = Run(spec.label, records, str(place), error)
        if outcome.code >= 128:
            self._code = outcome.code
        return True


class Entry:
    """One run under way. Raises LaunchError when it cannot start."""

    def __init__(
        self, number: int, spec: LaunchSpec, label: str, quiet: bool, crowded: bool, tensorboard: bool
    ):
        self.number, self._label, self._quiet = number, label, quiet
        self.screen = Screen(quiet or crowded, spec.prefixed, label, tensorboard)
        if not quiet:
            self.screen.note(f"{label}begins")
        self.launcher = Launcher(spec, self.screen.output, self.screen.note)
        try:
            self.launcher.__enter__()
            self.launcher.start()
        except BaseException:
            self.close()
            raise
        if self.launcher.world is not None:
            self.screen.follow(self.launcher.out)

    def poll(self) -> Outcome | None:
        """Its outcome, once it is over."""
        outcome = self.launcher.poll()
        self.screen.update()
        if outcome is None:
            return None
        self.close()
        if not self._quiet and outcome.code == 0 and self.screen.view.end is not None:
            text = summary(self.screen.view).replace("\n", "; ")
            self.screen.note(self._label + text if self.screen.quiet else text)
        if outcome.message is not None:
            for line in outcome.detail:
                typer.echo(f"  | {line}", err=True)
            self.screen.note(outcome.message)
            if self.launcher.world is not None:
                self.screen.note(f"logs: {self.launcher.out / 'logs'}")
        return outcome

    def close(self) -> None:
        """Ends what still runs."""
        self.launcher.__exit__(None, None, None)
        self.screen.close()
