"""A search's trials as runs of their own, each with its journal in a folder of the search's.

What a trial gave is read from its journal, and a trial whose journal isn't complete hasn't been: so a search
that was killed at any moment goes on from its folder and repeats no finished trial."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from offbeat.cluster.launcher import Launcher
from offbeat.cluster.spec import LaunchError, LaunchSpec
from offbeat.compare import ACCURACY
from offbeat.journal import Record, read
from offbeat.live import number
from offbeat.plan import parse, to_text
from offbeat.search.core import BSP, Search, SearchError, Trial, Wish

POLL = 0.05
"""Seconds between two looks at the trials."""
TRIALS = "trials"
"""The folder of the trials, in the search's."""


@dataclass(frozen=True)
class Kind:
    """What a trial of a share is: `spec` with the plan and the seed still to be set; `second`: the plan after
    BSP; `total` and `grid`: where the job's switch points are multiples of `grid` units; `metric`: the name
    under which the script logs its accuracy (None: a usual one)."""

    spec: LaunchSpec
    second: str = "asp"
    total: int = 0
    grid: int = 0
    metric: str | None = None

    @property
    def grain(self) -> float:
        return self.grid / self.total if self.grid else 0.0

    def plan(self, share: float) -> str:
        """The plan with this share of BSP."""
        if share >= BSP:
            return "bsp"
        if self.grid:
            units = self.grid * round(share * self.total / self.grid)
            return to_text(parse(f"bsp:{units}u {self.second}"))
        return to_text(parse(f"bsp:{100 * share!r}% {self.second}"))

    def spec_of(self, wish: Wish, folder: Path) -> LaunchSpec:
        seed = (self.spec.seed or 0) + wish.number
        return replace(
            self.spec,
            plan=self.plan(wish.share),
            seed=seed,
            out=str(folder / TRIALS / name_of(wish)),
            on_diverge="raise",  # a trial that diverges fails its share
        )


def name_of(wish: Wish) -> str:
    """A trial's folder."""
    return f"{wish.share!r}-{wish.number}"


class Unlogged(SearchError):
    """A trial has come to its end and logged nothing."""


def trial_of(records: Sequence[Record], wish: Wish, metric: str | None = None) -> Trial | None:
    """What a run has given; None for one that isn't over, or was ended. Raises SearchError for one that
    logged no accuracy, `Unlogged` where it logged nothing at all."""
    began = next((number(r.get("t")) or 0.0 for r in records if r["type"] == "phase"), 0.0)
    diverged = next((r for r in records if r["type"] == "diverged"), None)
    if diverged is not None:
        return Trial(wish.share, wish.number, None, max(0.0, (number(diverged.get("t")) or 0.0) - began))
    end = next((r for r in reversed(records) if r["type"] == "end"), None)
    if end is None:
        return None
    names = ACCURACY if metric is None else (metric,)
    for record in reversed(records):
        values = record.get("values") or {} if record["type"] == "evaluation" else {}
        value = next((number(values[name]) for name in names if name in values), None)
        if value is not None:
            if math.isfinite(value) and not 0 <= value <= 1:
                raise SearchError(
                    f"the trial {name_of(wish)} logged an accuracy of {value:g}; it must be a share, 0 to 1"
                )
            seconds = number(end.get("seconds")) or 0.0
            return Trial(wish.share, wish.number, value if math.isfinite(value) else None, seconds)
    wanted = f"{metric}=..." if metric else "accuracy=..."
    nothing = all(record["type"] != "evaluation" for record in records)
    raise (Unlogged if nothing else SearchError)(
        f"the trial {name_of(wish)} logged no accuracy: call sync.log({wanted}) in the script"
    )


def found_in(folder: Path, metric: str | None = None) -> list[Trial]:
    """The finished trials of a search's folder."""
    found = []
    for path in sorted((folder / TRIALS).glob("*-*")):
        share, _, count = path.name.rpartition("-")
        try:
            wish = Wish(float(share), int(count))
            records = read(path)
        except (FileNotFoundError, ValueError):
            continue
        with contextlib.suppress(Unlogged):  # it was killed before it could
            if (trial := trial_of(records, wish, metric)) is not None:
                found.append(trial)
    return found


def spent(place: Path) -> float:
    """Seconds of a trial that was ended before it was over."""
    try:
        records = read(place)
    except (FileNotFoundError, ValueError):
        return 0.0
    times = [number(record.get("t")) or 0.0 for record in records]
    began = next((t for t, r in zip(times, records, strict=True) if r["type"] == "phase"), 0.0)
    return max(0.0, max(times, default=0.0) - began)


class Trials:
    """Makes a search's trials, `jobs` at a time. `tell(text)` is called with every end; `show()` often."""

    def __init__(
        self,
        search: Search,
        kind: Kind,
        folder: Path,
        jobs: int,
        tell: Callable[[str], None],
        show: Callable[[Mapping[Wish, float]], None],
    ):
        self._search, self._kind, self._folder, self._jobs = search, kind, folder, jobs
        self._tell, self._show = tell, show
        self._running: dict[Wish, tuple[Launcher, float]] = {}
        self.spent = 0.0
        """Seconds of trials that were ended, for their share was decided."""

    def run(self) -> int:
        """To the search's end; 0, or the code of a signal that ended it. Raises SearchError when a trial
        fails otherwise than by diverging, with all others ended."""
        code = 0
        try:
            while not code and not (self._search.over and not self._running):
                while len(self._running) < self._jobs and (wish := self._search.ask()) is not None:
                    self._begin(wish)
                for wish, (launcher, _) in list(self._running.items()):
                    if wish in self._search.vain:
                        self._stop(wish)
                    elif (outcome := launcher.poll()) is not None:
                        launcher.__exit__(None, None, None)
                        del self._running[wish]
                        if outcome.code >= 128:
                            code = outcome.code
                        else:
                            self._over(wish, outcome.message)
                    self._show({w: time.monotonic() - b for w, (_, b) in self._running.items()})
                time.sleep(POLL)
        finally:
            for launcher, _ in self._running.values():
                launcher.__exit__(None, None, None)
        return code

    def _begin(self, wish: Wish) -> None:
        spec = self._kind.spec_of(wish, self._folder)
        shutil.rmtree(spec.out or "", ignore_errors=True)  # of a trial that was ended before it was over
        launcher = Launcher(spec, lambda rank, stream, text: None, lambda text: None)
        try:
            launcher.__enter__()
            launcher.start()
        except LaunchError as problem:
            launcher.__exit__(None, None, None)
            raise SearchError(str(problem)) from None
        self._running[wish] = launcher, time.monotonic()

    def _over(self, wish: Wish, message: str | None) -> None:
        place = self._folder / TRIALS / name_of(wish)
        try:
            records: Sequence[Record] = read(place)
        except (FileNotFoundError, ValueError):
            records = []
        trial = trial_of(records, wish, self._kind.metric)
        if trial is None:
            raise SearchError(f"the trial {name_of(wish)} failed: {message or 'it did not end'} ({place})")
        self._search.tell(trial)
        value = "diverged" if trial.accuracy is None else f"accuracy {trial.accuracy:.4f}"
        self._tell(
            f"{self._kind.plan(wish.share)}, run {wish.number + 1}: {value} after {trial.seconds:.4g} s"
        )

    def _stop(self, wish: Wish) -> None:
        launcher, _ = self._running.pop(wish)
        launcher.stop()
        launcher.__exit__(None, None, None)
        self._search.out.discard(wish)
        self.spent += spent(self._folder / TRIALS / name_of(wish))
