"""The command line. Torch, rich and the launcher are imported by the commands that need them: `offbeat
--help` answers at once."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cluster.spec import LaunchError, LaunchSpec, Show, new_directory
from offbeat.options import (
    AllOutput,
    ClusterFile,
    Endpoint,
    Nnodes,
    NodeRank,
    OnDiverge,
    ProfileFile,
    Quiet,
    Rest,
    Script,
    ScriptCommand,
    StragglersOption,
    TensorBoard,
    TimingOnly,
    Total,
    Virtual,
    Wire,
    Workers,
    check_cluster,
    plan_text,
    policy_text,
    refuse,
    slug,
    split_plans,
    split_policies,
    units,
)
from offbeat.plan import PlanError
from offbeat.planner import commands as planner
from offbeat.report.commands import report
from offbeat.runs import audit, ctl
from offbeat.search.commands import RECURRING, JobName, Recurring, StoreOption, jobs, search
from offbeat.virtual.commands import app as cluster_app
from offbeat.watch import watch

if TYPE_CHECKING:
    from offbeat.cluster.launcher import Outcome
    from offbeat.screen import Screen

PLANS = "bsp; local; dasgd; bsp:12.5% dasgd; asp; bsp:12.5% asp"
POLL = 0.05  # seconds between two looks at the workers

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(cluster_app, name="cluster")
app.command()(audit)
app.command()(ctl)
app.command(cls=ScriptCommand)(search)
app.command()(jobs)
app.command(cls=ScriptCommand)(planner.plan)
app.command(cls=ScriptCommand)(planner.profile)
app.command()(report)
app.command()(watch)


def main() -> None:
    try:
        app(prog_name="offbeat")
    except SystemExit as ending:
        # A thread of ours may still wait, in C++, for a host that was cut off: it would come back into an
        # interpreter that has gone, and end the process by SIGABRT.
        if any(thread.name.startswith("offbeat-") for thread in threading.enumerate()):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(ending.code if isinstance(ending.code, int) else 1)
        raise


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and leave.")] = False,
) -> None:
    """Decides when data-parallel PyTorch workers wait for each other."""
    if version:
        import offbeat

        typer.echo(f"offbeat {offbeat.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@app.command(cls=ScriptCommand)
def run(
    script: Script,
    args: Rest = None,
    workers: Workers = 1,
    plan: Annotated[
        str | None,
        typer.Option(
            "--plan",
            help='Instead of the script\'s, such as "bsp:6.25% dasgd"; recurring: what a search found.',
        ),
    ] = None,
    total: Total = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of the job.")] = None,
    out: Annotated[
        str | None,
        typer.Option("--out", help="The run's directory (default: runs/<time>-<script>); node 0's counts."),
    ] = None,
    wire: Wire = None,
    on_diverge: OnDiverge = None,
    stragglers: StragglersOption = None,
    profile: ProfileFile = None,
    minimum: Annotated[
        int | None,
        typer.Option(
            "--min",
            help="Go on when workers are killed, as long as so many are left, and start each again (without "
            "it the first ends the job).",
        ),
    ] = None,
    maximum: Annotated[
        int | None,
        typer.Option(
            "--max",
            help="With --min: the same command, given again while the job runs, adds its workers to it, up "
            "to so many in all.",
        ),
    ] = None,
    restarts: Annotated[
        int, typer.Option("--restarts", help="How often a killed worker is started again, with --min.")
    ] = 3,
    heartbeat: Annotated[
        float | None,
        typer.Option(
            "--heartbeat",
            help="Seconds (2). With --min, a worker without a sign of life for three of them is killed, a "
            "host for five is given up.",
        ),
    ] = None,
    nnodes: Nnodes = 1,
    node_rank: NodeRank = 0,
    rdzv_endpoint: Endpoint = None,
    rdzv_timeout: Annotated[
        float, typer.Option("--rdzv-timeout", help="Seconds to wait for all hosts.")
    ] = 300.0,
    virtual: Virtual = None,
    cluster: ClusterFile = None,
    timing_only: TimingOnly = False,
    job: JobName = None,
    store: StoreOption = None,
    tensorboard: TensorBoard = False,
    all_output: AllOutput = False,
    quiet: Quiet = False,
) -> None:
    """Runs a training script on several workers.

    offbeat run -n 4 train.py --lr 0.1 --plan "bsp:10% dasgd"

    offbeat run --virtual 32 --cluster cluster.toml train.py

    Options of offbeat may stand before or after SCRIPT; others go to the script. Exit codes: 0 all went
    well, 1 the run failed, 2 nothing was started, 128 + a signal's number when one stopped it.
    """
    try:
        if heartbeat is not None and minimum is None:
            raise ValueError(f"--heartbeat {heartbeat:g} belongs to a job that survives deaths: add --min")
        spec = LaunchSpec(
            script=script,
            args=tuple(args or ()),
            workers=workers,
            nnodes=nnodes,
            node_rank=node_rank,
            endpoint=rdzv_endpoint,
            out=out,
            plan=None if plan in (None, RECURRING) else plan_text(plan),
            total=None if total is None else units(total),
            seed=seed,
            wire=wire,
            on_diverge=on_diverge,
            stragglers=None if stragglers is None else policy_text(stragglers),
            profile=profile,
            minimum=minimum,
            maximum=maximum,
            restarts=restarts,
            heartbeat=2.0 if heartbeat is None else heartbeat,
            rdzv_timeout=rdzv_timeout,
            show="all" if all_output else "first",
            virtual=virtual,
            cluster=cluster,
            timing_only=timing_only,
        )
        check_cluster(spec)
        found = _recurring(spec, plan, job, store, quiet)
        if found is not None:
            spec = replace(spec, plan=found.job.plan)
        outcome, directory, screen = _launch(spec, quiet, tensorboard)
    except (PlanError, LaunchError, ValueError) as error:
        refuse(str(error))
    if found is not None and outcome.code == 0 and node_rank == 0 and (text := found.ended(directory)):
        screen.note(text)
    if not quiet and outcome.code == 0 and node_rank == 0:
        if screen.view.plan:
            from offbeat.live import summary

            screen.note(summary(screen.view))
            if virtual is not None and (spent := _simulation(directory)):
                screen.note(spent)
        screen.note(f"run directory: {_short(directory)}")
    raise typer.Exit(outcome.code)


@app.command(cls=ScriptCommand)
def compare(
    script: Script,
    args: Rest = None,
    workers: Annotated[
        int | None,
        typer.Option("-n", "--workers", "--nproc-per-node", help="Processes on this host (2)."),
    ] = None,
    plans: Annotated[str, typer.Option("--plans", help='Plans with ";" between them.')] = PLANS,
    total: Total = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of every run.")] = 0,
    out: Annotated[
        str | None,
        typer.Option("--out", help="Directory of the runs (default: runs/<time>-compare-<script>)."),
    ] = None,
    wire: Wire = None,
    on_diverge: OnDiverge = None,
    stragglers: Annotated[
        str, typer.Option("--stragglers", help='Policies with ";" between them, as in "off; elastic".')
    ] = "",
    minimum: Annotated[
        int | None, typer.Option("--min", help="As in `offbeat run`: go on when workers die.")
    ] = None,
    virtual: Virtual = None,
    cluster: ClusterFile = None,
    timing_only: TimingOnly = False,
    repeat: Annotated[
        int, typer.Option("--repeat", help="Runs of each plan, with the seeds from --seed on.")
    ] = 1,
    jobs: Annotated[int, typer.Option("--jobs", help="Virtual runs that go side by side.")] = 1,
    tensorboard: TensorBoard = False,
    all_output: AllOutput = False,
    quiet: Quiet = False,
) -> None:
    """Runs a script under several plans, one after the other, and compares them in a table.

    offbeat compare -n 2 train.py --plans "bsp; local(period=4); bsp:10% dasgd"

    All plans have the same seeds. Their output is in their logs unless --all-output is given. A plan that
    fails doesn't stop the others; the exit code is 1 then.
    """
    show: Show = "all" if all_output else "none"
    try:
        if repeat < 1:
            raise ValueError(f"--repeat {repeat}: a plan is run at least once")
        if jobs < 1 or (jobs > 1 and virtual is None):
            raise ValueError(f"--jobs {jobs}: runs go side by side, 1 or more of them, if they are --virtual")
        texts, policies = split_plans(plans), split_policies(stragglers)
        specs = [
            LaunchSpec(
                script=script,
                args=tuple(args or ()),
                workers=1 if workers is None and virtual is not None else 2 if workers is None else workers,
                plan=text,
                total=None if total is None else units(total),
                seed=seed + number,
                wire=wire,
                on_diverge=on_diverge,
                stragglers=policy,
                minimum=minimum,
                show=show,
                virtual=virtual,
                cluster=cluster,
                timing_only=timing_only,
            )
            for text in texts
            for policy in policies
            for number in range(repeat)
        ]
        check_cluster(specs[0])
        if tensorboard:
            from offbeat.scalars import Board

            Board()  # refuses now where it could not write later
        directory = _compare_directory(script, out)
    except (PlanError, LaunchError, ValueError) as error:
        refuse(str(error))
    from offbeat.compare import compare as compare_runs
    from offbeat.compare import table
    from offbeat.contest import Contest

    places = [
        directory / (f"{1 + i // repeat}-{slug(spec.label)}" + (f"-{spec.seed}" if repeat > 1 else ""))
        for i, spec in enumerate(specs)
    ]
    runs, code = Contest(specs, places, jobs, quiet, tensorboard).run()
    result = compare_runs(runs)
    (directory / "compare.json").write_text(
        json.dumps(
            {
                "script": script,
                "args": args or [],
                "workers": virtual or specs[0].workers,
                "seed": seed,
                "virtual": virtual is not None,
                **result.as_json(),
            },
            indent=2,
            allow_nan=False,
        )
        + "\n"
    )
    from rich.console import Console

    # A file or a pipe has no width of its own; the table must not be cut there.
    Console(width=None if sys.stdout.isatty() else 140, highlight=False).print(table(result))
    for row in result.rows:
        if row.error is not None:
            typer.echo(f"offbeat: {row.plan} failed: {row.error}", err=True)
    if not quiet:
        typer.echo(f"offbeat: runs and compare.json are in {_short(directory)}", err=True)
    _report(directory, quiet)
    raise typer.Exit(code or int(any(row.error is not None for row in result.rows)))


def _recurring(
    spec: LaunchSpec, plan: str | None, job: str | None, store: str | None, quiet: bool
) -> Recurring | None:
    if plan != RECURRING:
        if job is not None or store is not None:
            option = f"--job {job}" if job is not None else f"--store {store}"
            raise ValueError(f"{option} belongs to --plan recurring")
        return None
    found = Recurring(spec, job, store)
    if not quiet:
        typer.echo(f"offbeat: recurring: {found.job.plan}", err=True)
    return found


def _report(directory: Path, quiet: bool) -> None:
    """Makes the comparison's report and says what it shows."""
    from offbeat.report.history import ReportError
    from offbeat.report.page import write_report

    to = directory / "report.html"
    try:
        shows = write_report([directory], to)
    except (ReportError, OSError) as error:
        typer.echo(f"offbeat: no report: {error}", err=True)
        return
    if not quiet:
        typer.echo(f"offbeat: {_short(to)} shows it in a browser: {', '.join(shows)}", err=True)


def _compare_directory(script: str, out: str | None) -> Path:
    if out is None:
        return new_directory(script, label="compare-")
    path = Path(out)
    if (path / "compare.json").exists():
        raise LaunchError(f"--out {out} holds an earlier comparison; give another directory")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"--out {out} cannot be made: {error.strerror}") from None
    return path.absolute()


def _launch(spec: LaunchSpec, quiet: bool, tensorboard: bool) -> tuple[Outcome, Path, Screen]:
    """Runs this host's part of a job to its end. Raises LaunchError when it cannot start."""
    from offbeat.cluster.launcher import Launcher
    from offbeat.screen import Screen

    screen = Screen(quiet, prefix=spec.prefixed, tensorboard=tensorboard)
    try:
        with Launcher(spec, screen.output, screen.note) as launcher:
            launcher.start()
            if spec.node_rank == 0 and launcher.world is not None:
                screen.follow(launcher.out)
            while (outcome := launcher.poll()) is None:
                screen.update()
                time.sleep(POLL)
            screen.update()
            directory = launcher.out if launcher.world is not None else Path(spec.out or "runs")
        screen.close()
        if outcome.message is not None:
            for line in outcome.detail:
                typer.echo(f"  | {line}", err=True)
            screen.note(outcome.message)
            if launcher.world is not None:
                screen.note(f"logs: {_short(directory / 'logs')}")
        return outcome, directory, screen
    finally:
        screen.close()


def _simulation(directory: Path) -> str:
    """What a virtual run cost in real time."""
    try:
        row = json.loads((directory / "virtual.json").read_text())
    except (OSError, ValueError):
        return ""
    real, own = row["real_seconds"], row["overhead_seconds"]
    faster = row["virtual_seconds"] / real if real else 0.0
    text = f"simulated in {real:.1f} s of real time ({faster:.3g} times as fast as it would run)"
    return text if real == own else f"{text}, {100 * own / real:.1f}% of it the simulator's own"


def _short(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
