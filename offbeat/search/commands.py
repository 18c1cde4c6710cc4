"""`offbeat search` and `offbeat jobs`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offbeat.cluster.spec import LaunchError, LaunchSpec, new_directory
from offbeat.options import (
    ClusterFile,
    Quiet,
    Rest,
    TimingOnly,
    Total,
    Virtual,
    Wire,
    check_cluster,
    refuse,
    units,
)
from offbeat.plan import PlanError, parse, to_text
from offbeat.search.core import BSP, Search, SearchError, Settings, Stand, Wish, doubts
from offbeat.search.cost import Cost, cost
from offbeat.search.store import Job, Store, StoreError, place

if TYPE_CHECKING:
    from offbeat.search.trials import Kind

RECORD = "search.json"
"""In a search's folder: what it is, and in the end what it has found."""
EVERY = 0.2
"""Seconds between two looks of a person on a terminal."""
RECURRING = "recurring"
"""The plan that stands for what a search has found."""

StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        help="The file of known jobs (default: OFFBEAT_STORE, .offbeat/jobs.sqlite where such a folder is "
        "here or above, or the user's).",
    ),
]
JobName = Annotated[
    str | None,
    typer.Option("--job", help="The job's name in the store (default: it is recognised by what it trains)."),
]


def search(
    script: Annotated[
        str | None, typer.Argument(metavar="SCRIPT", help="The training script.", show_default=False)
    ] = None,
    args: Rest = None,
    workers: Annotated[
        int | None, typer.Option("-n", "--workers", "--nproc-per-node", help="Processes on this host (2).")
    ] = None,
    then: Annotated[str, typer.Option("--then", help="The plan after BSP, such as dasgd(period=4).")] = "asp",
    runs: Annotated[int, typer.Option("--runs", help="Trials of each share.")] = 3,
    target_runs: Annotated[
        int, typer.Option("--target-runs", help="Trials of BSP alone, whose mean accuracy is the target.")
    ] = 3,
    target: Annotated[
        float | None, typer.Option("--target", help="The accuracy to reach, known from earlier trainings.")
    ] = None,
    recurring: Annotated[
        bool, typer.Option("--recurring", help="The target and BSP's time are those of the stored search.")
    ] = False,
    depth: Annotated[int, typer.Option("--depth", help="How often the interval is halved.")] = 5,
    tolerance: Annotated[
        float, typer.Option("--tolerance", help="How far below the target a share's mean may lie.")
    ] = 0.01,
    grid: Annotated[
        str | None, typer.Option("--grid", help="Switch only at multiples of so many units: 500 or 1k.")
    ] = None,
    early: Annotated[
        bool, typer.Option("--early", help="No more trials of a share whose verdict they cannot change.")
    ] = False,
    confidence: Annotated[
        float | None,
        typer.Option(
            "--confidence",
            help="Repeat a share's trials until its verdict is right with this chance, such as 0.95.",
        ),
    ] = None,
    max_runs: Annotated[
        int, typer.Option("--max-runs", help="With --confidence: trials of a share at most.")
    ] = 10,
    metric: Annotated[
        str | None,
        typer.Option("--metric", help="What sync.log calls the accuracy, if it is no usual name."),
    ] = None,
    total: Total = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the first trial of a share; +1 for each.")] = 0,
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            help="The search's directory (default: runs/<time>-search-<script>). Of a search that was "
            "interrupted: it goes on.",
        ),
    ] = None,
    wire: Wire = None,
    virtual: Virtual = None,
    cluster: ClusterFile = None,
    timing_only: TimingOnly = False,
    jobs: Annotated[int, typer.Option("--jobs", help="Virtual trials that go side by side.")] = 1,
    job: JobName = None,
    store: StoreOption = None,
    simulate: Annotated[
        str | None,
        typer.Option(
            "--simulate",
            metavar="RUNS.csv",
            help="Train nothing: play searches over logged runs (columns share, accuracy, seconds) and "
            "print what each setting costs.",
        ),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option("--where", metavar="COLUMN=VALUE", help="With --simulate: only these rows."),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Finds when to switch from BSP: the smallest share that ends at BSP's accuracy.

    offbeat search -n 4 train.py --lr 0.1

    offbeat search --virtual 8 --cluster cluster.toml --jobs 2 train.py

    A binary search (Sync-Switch): each share of BSP is tried in a few trainings of the script, which must
    call sync.log(accuracy=...). It ends with the plan to use and what it has cost; `offbeat run --plan
    recurring` uses it. Exit codes: 0 found, 1 a trial failed, 2 nothing was started."""
    try:
        settings = Settings(runs, target_runs, depth, tolerance, target, 0.0, early, confidence, max_runs)
        if simulate is not None:
            if script is not None:
                raise SearchError(f"--simulate {simulate} trains nothing: leave out {script}")
            _simulate(simulate, where or [], settings)
            return
        if script is None:
            raise SearchError("which script? offbeat search -n 4 train.py (or --simulate RUNS.csv)")
        if where:
            raise SearchError(f"--where {where[0]} belongs to --simulate RUNS.csv")
        if timing_only:
            raise SearchError("--timing-only trains nothing, so no accuracy can be reached")
        if jobs < 1 or (jobs > 1 and virtual is None):
            raise SearchError(
                f"--jobs {jobs}: trials go side by side, 1 or more of them, if they are --virtual"
            )
        second = to_text(parse(then))
        if second.split(":")[0] == "bsp":
            raise SearchError(f"--then {then}: what comes after BSP is another protocol")
        known = Store(place(store))
        spec = LaunchSpec(
            script=script,
            args=tuple(args or ()),
            workers=1 if workers is None and virtual is not None else 2 if workers is None else workers,
            total=None if total is None else units(total),
            seed=seed,
            wire=wire,
            virtual=virtual,
            cluster=cluster,
            show="none",
        )
        check_cluster(spec)
        one = _Search(spec, settings, second, metric, grid, known, job, recurring, quiet)
        one.open(out)
    except (PlanError, LaunchError, StoreError, SearchError, ValueError) as error:
        refuse(str(error))
    raise typer.Exit(one.run(jobs))


def jobs(store: StoreOption = None) -> None:
    """Lists the jobs that searches have found a plan for, and how far each search has paid for itself."""
    from rich.console import Console

    from offbeat.search import show

    try:
        known = Store(place(store))
        if not known.jobs():
            typer.echo(f"offbeat: {known.path} knows no job yet: `offbeat search` finds them", err=True)
            return
        Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(show.jobs(known))
        typer.echo(f"offbeat: {known.path}", err=True)
    except StoreError as error:
        refuse(str(error))


class Recurring:
    """`--plan recurring`: what the store knows of a script's job. Raises StoreError, LaunchError or
    SearchError."""

    def __init__(self, spec: LaunchSpec, name: str | None, store: str | None):
        self._store = Store(place(store))
        if name is None:
            from offbeat.identity import fingerprint
            from offbeat.search.glance import glance

            self.job = self._store.find(fingerprint=fingerprint(glance(spec)))
        else:
            self.job = self._store.find(name=name)

    def ended(self, directory: Path) -> str:
        """The run with the plan is over: it counts. Returns what there is to say."""
        from offbeat.journal import read

        end = next((row for row in reversed(read(directory)) if row["type"] == "end"), None)
        if end is None:
            return ""
        self._store.count(self.job, float(end["seconds"]))
        count = len(self._store.recurrences(self.job))
        paid = count * self.job.saved / self.job.trainings if self.job.trainings else 0.0
        return (
            f"recurrence {count} of {self.job.name or self.job.fingerprint}: {100 * paid:.0f}% of what the "
            f"search cost is saved"
        )


class _Search:
    """One search, from its folder's making to its answer."""

    def __init__(
        self,
        spec: LaunchSpec,
        settings: Settings,
        second: str,
        metric: str | None,
        grid: str | None,
        store: Store,
        name: str | None,
        recurring: bool,
        quiet: bool,
    ):
        self._spec, self._settings, self._second, self._metric = spec, settings, second, metric
        self._grid = 0 if grid is None else units(grid, "--grid")
        self._store, self._name, self._recurring, self._quiet = store, name, recurring, quiet
        self._bsp_seconds: float | None = None
        if recurring and settings.target is not None:
            raise SearchError(
                f"--recurring takes the target from the store: leave out --target {settings.target:g}"
            )

    def open(self, out: str | None) -> None:
        """Makes the folder, or goes on in it."""
        from offbeat.identity import fingerprint
        from offbeat.search.glance import glance
        from offbeat.search.trials import Kind, found_in, spent

        self.say("looking at the script")
        self._identity = glance(self._spec)
        self._fingerprint = fingerprint(self._identity)
        if self._recurring:
            found = self._store.find(name=self._name, fingerprint=self._fingerprint)
            self._settings = replace(self._settings, target=found.target)
            if found.virtual == (self._spec.virtual is not None):
                self._bsp_seconds = found.bsp_seconds
        total = int(self._identity["total"])
        if self._grid > total:
            raise SearchError(f"--grid {self._grid}: the job has {total} units")
        self._kind: Kind = Kind(self._spec, self._second, total, self._grid, self._metric)
        self._settings = replace(self._settings, grain=self._kind.grain)
        asked = {
            "script": self._spec.script,
            "args": list(self._spec.args),
            "job": self._identity,
            "virtual": self._spec.virtual is not None,
            "cluster": self._spec.cluster,
            "wire": self._spec.wire,
            "seed": self._spec.seed,
            "then": self._second,
            "metric": self._metric,
            **asdict(self._settings),
        }
        if out is None:
            self.folder = new_directory(self._spec.script, label="search-")
        else:
            self.folder = Path(out).absolute()
            self.folder.mkdir(parents=True, exist_ok=True)
        earlier = self._earlier()
        for name, value in asked.items():
            if earlier is not None and earlier.get(name) != value:
                raise LaunchError(
                    f"{self.folder} holds a search with another {name}: {earlier.get(name)!r}, not "
                    f"{value!r}; give another --out, or the same words as then"
                )
        self._asked = asked
        if earlier is None:
            self._write({})
        trials = found_in(self.folder, self._metric)
        if trials:
            self.say(f"goes on with {len(trials)} trials that are over")
        self._search = Search(self._settings, trials)
        done = {(trial.share, trial.number) for trial in trials}
        self._spent = 0.0
        for path in (self.folder / "trials").glob("*-*"):
            share, _, count = path.name.rpartition("-")
            if (float(share), int(count)) not in done:
                self._spent += spent(path)

    def run(self, jobs: int) -> int:
        """The search; the command's exit code."""
        from rich.console import Console
        from rich.live import Live

        from offbeat.search import show
        from offbeat.search.trials import Trials

        console = Console(stderr=True, highlight=False)
        live = Live(console=console, auto_refresh=False, transient=True)
        watched = sys.stderr.isatty() and not self._quiet
        next_look = 0.0

        def look(running: Mapping[Wish, float]) -> None:
            nonlocal next_look
            if watched and time.monotonic() > next_look:
                next_look = time.monotonic() + EVERY
                made = show.points(self._search.stand, self._settings, running, self._cost())
                live.update(made, refresh=True)

        trials = Trials(self._search, self._kind, self.folder, jobs, self.say, look)
        trials.spent = self._spent
        self._trials = trials
        if watched:
            live.start()
        try:
            code = trials.run()
        except (SearchError, LaunchError) as error:
            code = 1
            failure: Exception | None = error
        else:
            failure = None
        finally:
            live.stop()
        stand = self._search.stand
        if stand.points:
            wide = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
            wide.print(show.points(stand, self._settings, {}, self._cost()))
        if failure is not None:
            typer.echo(f"offbeat: error: {failure}", err=True)
        if failure is not None or code:
            typer.echo(f"offbeat: the same command with --out {self.folder} goes on from here", err=True)
            return code
        self._end(stand)
        return 0

    def _cost(self) -> Cost | None:
        return cost(self._search.stand, self._bsp_seconds, self._trials.spent)

    def _end(self, stand: Stand) -> None:
        """Keeps and says what was found."""
        assert stand.share is not None
        assert stand.target is not None
        for line in doubts(stand.points, self._settings.tolerance):
            typer.echo(f"offbeat: warning: {line}", err=True)
        plan, spent = self._kind.plan(stand.share), self._cost()
        found = stand.point(stand.share)
        seconds = None if found is None else found.seconds
        bsp = stand.point(BSP)
        bsp_seconds = self._bsp_seconds if bsp is None else bsp.seconds
        result: dict[str, Any] = {
            "plan": plan,
            "share": stand.share,
            "target": stand.target,
            "seconds": seconds,
        }
        result["bsp_seconds"] = bsp_seconds
        if spent is not None:
            result["trainings"] = round(spent.trainings, 4)
            result["amortized"] = None if spent.saved <= 0 else round(spent.amortized, 4)
            result["effective"] = round(spent.effective, 4)
        result["points"] = [
            {"share": p.share, "passed": p.passed, "mean": p.mean, "seconds": p.seconds, "why": p.why}
            for p in stand.points
        ]
        self._write(result)
        self._tell(plan, seconds, bsp_seconds, spent)
        if spent is None or bsp_seconds is None or (seconds is None and stand.share < BSP):
            self.say("not kept in the store: the time of a training with BSP is not known (--target-runs)")
            return
        count = sum(len(point.trials) for point in stand.points)
        self._store.add(
            Job(
                self._name,
                self._fingerprint,
                self._spec.script,
                int(self._identity["workers"]),
                self._spec.virtual is not None,
                plan,
                stand.share,
                stand.target,
                bsp_seconds,
                bsp_seconds if seconds is None else seconds,
                spent.trainings,
                count,
                time.time(),
            )
        )

    def _tell(self, plan: str, seconds: float | None, bsp: float | None, spent: Cost | None) -> None:
        text = f'use --plan "{plan}"'
        if plan == "bsp":
            text = "no share below 100% is enough at this depth: stay with --plan bsp"
        if seconds is not None:
            text += f": {seconds:.4g} s"
            if bsp:
                text += f", {seconds / bsp:.3g} of BSP's {bsp:.4g} s"
        typer.echo(text)
        if spent is not None:
            paid = (
                f"paid for after {spent.amortized:.1f} runs with it"
                if spent.saved > 0
                else "it will not pay for itself"
            )
            typer.echo(
                f"the search cost {spent.trainings:.2f} trainings with BSP ({paid}); {spent.useful} of its "
                f"trials reached the target"
            )

    def _earlier(self) -> dict[str, Any] | None:
        path = self.folder / RECORD
        try:
            return dict(json.loads(path.read_text())["search"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError):
            raise LaunchError(f"{path} cannot be read: it is no search's") from None

    def _write(self, result: dict[str, Any]) -> None:
        made = self.folder / f"{RECORD}.new"
        made.write_text(json.dumps({"search": self._asked, "result": result}, indent=2) + "\n")
        made.replace(self.folder / RECORD)

    def say(self, text: str) -> None:
        if not self._quiet:
            typer.echo(f"offbeat: {text}", err=True)


def _simulate(path: str, where: list[str], settings: Settings, times: int = 1000) -> None:
    from rich.console import Console

    from offbeat.search import show
    from offbeat.search.replay import best, read_runs, table_ii

    wanted = dict(_pair(text) for text in where)
    try:
        pool = read_runs(path, wanted)
    except OSError as error:
        raise SearchError(f"--simulate {path}: {error.strerror}") from None
    rows = table_ii(pool, settings, times)
    typer.echo(
        f"{sum(len(runs) for runs in pool.values())} runs at {len(pool)} shares of BSP; the search over "
        f"their means finds {100 * best(pool, settings):.4g}%"
    )
    Console(width=None if sys.stdout.isatty() else 140, highlight=False).print(show.replayed(rows, times))


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign):
        raise SearchError(f"--where {text}: write COLUMN=VALUE, such as setup=1")
    return name, value
