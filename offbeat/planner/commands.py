"""`offbeat plan` and `offbeat profile`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offbeat.options import (
    Endpoint,
    Nnodes,
    NodeRank,
    Quiet,
    Rest,
    Script,
    Wire,
    Workers,
    refuse,
    split_plans,
    units,
)

if TYPE_CHECKING:
    from offbeat.cluster.spec import LaunchSpec
    from offbeat.planner.choice import Question, Size
    from offbeat.planner.remembered import Job
    from offbeat.virtual.cluster import Cluster

SIZES = "2,4,8,16,32"
LEAST = 10
"""Steps of a profile."""


def plan(
    script: Annotated[
        str | None,
        typer.Argument(
            metavar="[SCRIPT]",
            help="The training script; without it the cluster's file must have a [model].",
            show_default=False,
        ),
    ] = None,
    args: Rest = None,
    cluster: Annotated[
        str, typer.Option("--cluster", help="A profile, another cluster's TOML file, or a preset.")
    ] = "here",
    workers: Annotated[
        str, typer.Option("-n", "--workers", help='Numbers of workers, such as "8,16,…,256".')
    ] = SIZES,
    plans: Annotated[
        str | None,
        typer.Option("--plans", help='To compare, with ";" between them, instead of the usual five.'),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="Compute on this one instead: TITAN X, K80, V100, A100, …")
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", help="What --device computes in: its peak rate.")
    ] = "float32",
    efficiency: Annotated[
        float | None,
        typer.Option("--efficiency", help="Share of its peak that is reached (the profile's, else 0.5)."),
    ] = None,
    batch: Annotated[
        str | None, typer.Option("--batch", help="Samples of a unit, instead of the script's.")
    ] = None,
    samples: Annotated[
        str | None, typer.Option("--samples", help="Of the data set, for the time of an epoch.")
    ] = None,
    total: Annotated[str | None, typer.Option("--total", help="Length of the job in units.")] = None,
    wire: Wire = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Write the picture too: an .svg or .html file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON instead of tables.")] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Look at the script again, even where it has not changed.")
    ] = False,
) -> None:
    """Says what every protocol would do on a cluster, and which to take, without running it there.

    offbeat plan train.py --cluster profile.toml --workers 8,16,…,256

    offbeat plan train.py --cluster ethernet-256 --device A100 --dtype tf32 -n 8,64 --plot plan.svg

    The script runs up to its model's first forward, which tells its size and its operations; the next time
    that is remembered. The formulas, and what they leave out: docs/planner.md.
    """
    from offbeat.planner.choice import parse_plans, parse_workers
    from offbeat.virtual.description import ClusterError, find

    try:
        sizes = parse_workers(workers)
        if plot is not None and plot.suffix not in (".svg", ".html"):
            raise ValueError(f"--plot {plot}: an .svg or an .html file")
        found = find(cluster)
        asked = _Asked(
            batch=None if batch is None else units(batch, "--batch", "samples"),
            samples=None if samples is None else units(samples, "--samples", "samples"),
            total=None if total is None else units(total),
            wire=wire,
            device=device,
            dtype=dtype,
            efficiency=efficiency,
            again=again,
        )
        question, notes = asked.question(found, script, args or [], sizes)
        if plans is not None:
            question = replace(question, plans=parse_plans(split_plans(plans)))
        answers = [question.answer(size) for size in sizes]
    except (ClusterError, ValueError, OSError, SyntaxError) as error:
        refuse(str(error))
    title = f"{Path(script).name if script else 'the model'} on {found.name}"
    if plot is not None:
        from offbeat.planner import picture

        draw = picture.svg if plot.suffix == ".svg" else picture.html
        plot.write_text(draw(answers, title))
    if as_json:
        about = {"script": script, "cluster": found.source, "batch_size": question.batch, "notes": notes}
        typer.echo(json.dumps({**about, "sizes": [one.as_json() for one in answers]}, indent=2))
        return
    _print(answers, title, notes)
    if plot is not None:
        typer.echo(f"picture: {plot}")


def profile(
    script: Script,
    args: Rest = None,
    workers: Workers = 1,
    steps: Annotated[int, typer.Option("--steps", help="Units that each worker computes alone.")] = 50,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to write it.")] = Path("profile.toml"),
    nnodes: Nnodes = 1,
    node_rank: NodeRank = 0,
    rdzv_endpoint: Endpoint = None,
    wire: Wire = None,
    shards: Annotated[
        bool, typer.Option("--shards/--no-shards", help="Measure pushes and pulls of asp and ssp.")
    ] = True,
    quiet: Quiet = False,
) -> None:
    """Measures a script on the machines at hand, and writes profile.toml.

    offbeat profile train.py -n 4

    offbeat profile train.py -n 2 --nnodes 2 --node-rank 0 --rdzv-endpoint 10.0.0.1:29500

    The script's workers compute a few units alone, then exchange messages, all-reduces and pushes, and end
    there, in less than a minute for most models. The file describes the cluster for `offbeat plan`, for
    `offbeat run --virtual`, and for `offbeat run --profile`. With several hosts node 0 writes it.
    """
    import tempfile

    from offbeat.cluster.spec import LaunchError, LaunchSpec
    from offbeat.planner.known import environment
    from offbeat.virtual.description import read

    try:
        if steps < LEAST:
            raise ValueError(f"--steps {steps}: at least {LEAST}, the first of which don't count")
        asked = environment(out, steps, workers * nnodes, shards)
        with tempfile.TemporaryDirectory(prefix="offbeat-profile-") as place:
            spec = LaunchSpec(
                script=script,
                args=tuple(args or ()),
                workers=workers,
                nnodes=nnodes,
                node_rank=node_rank,
                endpoint=rdzv_endpoint,
                out=str(Path(place) / "run"),
                plan=asked.pop("OFFBEAT_PLAN"),
                total=int(asked.pop("OFFBEAT_TOTAL")),
                wire=wire,
                show="none",
            )
            before = out.stat().st_mtime_ns if out.exists() else None
            code = _measure(spec, asked, quiet)
        if code:
            raise typer.Exit(code)
        if node_rank:
            return
        if not out.exists() or out.stat().st_mtime_ns == before:
            raise ValueError(f"{script} ended before it had done {steps} steps: give fewer --steps")
        found = read(out)
    except (LaunchError, ValueError, OSError) as error:
        refuse(str(error))
    if not quiet:
        _tell(found, out)


def _measure(spec: LaunchSpec, asked: dict[str, str], quiet: bool) -> int:
    """Runs the script's workers to their end. Returns the exit code."""
    import os
    import time

    os.environ.update(asked)  # the workers inherit it
    from offbeat.cluster.launcher import Launcher

    with Launcher(spec) as launcher:
        launcher.start()
        while (outcome := launcher.poll()) is None:
            time.sleep(0.05)
    for name in asked:
        del os.environ[name]
    if outcome.message is not None:
        for line in outcome.detail:
            typer.echo(f"  | {line}", err=True)
        typer.echo(f"offbeat: {outcome.message}", err=True)
    return outcome.code


def _tell(found: Cluster, out: Path) -> None:
    """The main figures, and what next."""
    from offbeat.virtual.show import rate, time

    profile, group = found.profile, found.groups[0]
    assert profile is not None
    typer.echo(
        f"a unit takes {time(group.compute.unit)} (backward {100 * found.backward:.0f}%), an optimizer's "
        f"step {time(group.compute.update)}; each worker's median: {', '.join(map(time, profile.units))}"
    )
    if found.size != 1:
        several = (group.per_host or 1) < (found.size or 1)
        link = group.link if several else found.host
        typer.echo(
            f"links {'between hosts' if several else 'within the host'}: {rate(link.rate)}, "
            f"{time(link.latency)} one way; beside them an all-reduce takes {time(found.allreduce.overhead)}"
        )
    if profile.push is not None and profile.pull is not None:
        typer.echo(f"a push takes {time(profile.push)}, its pull {time(profile.pull)}")
    if profile.flop:
        reached = f", {100 * profile.efficiency:.0f}% of its peak" if profile.efficiency else ""
        typer.echo(f"{profile.flop / 1e9:.4g} GFLOP a sample on {profile.device}{reached}")
    typer.echo(f"wrote {out}: offbeat plan SCRIPT --cluster {out}")


class _Asked:
    """What the options say."""

    def __init__(self, **options: Any):
        self.batch, self.samples, self.total = options["batch"], options["samples"], options["total"]
        self.wire, self.device, self.dtype = options["wire"], options["device"], options["dtype"]
        self.again = options["again"]
        self.efficiency = options["efficiency"]
        if self.efficiency is not None and not 0 < self.efficiency <= 1:
            raise ValueError(
                f"--efficiency {self.efficiency:g}: a share of the peak rate, above 0 and up to 1"
            )

    def question(
        self, cluster: Cluster, script: str | None, args: list[str], sizes: list[int]
    ) -> tuple[Question, list[str]]:
        """What is to be planned, and how it is known."""
        from offbeat.planner.choice import Question
        from offbeat.planner.workers import scaled
        from offbeat.virtual.model import Model

        notes: list[str] = []
        profile = cluster.profile
        model, flop, batch, samples, total, wire = None, 0.0, None, None, None, "fp32"
        if profile is not None:
            batch, samples, flop = profile.batch, profile.samples, profile.flop
        if script is not None and not self._is_profiled(cluster, script):
            job = self._job(script, args, max(sizes))
            model, batch, samples, total = job.model, job.batch, job.samples, job.total
            wire, flop = job.wire, job.flop
            if job.remembered:
                notes.append(f"{script} has not changed since it was looked at: --again looks once more")
            if job.problem:
                notes.append(job.problem)
            unit = batch if profile is None else profile.batch
            if unit != batch and unit is not None and batch is not None and self.device is None:
                cluster = scaled(cluster, batch / unit)
                notes.append(f"units were profiled with {unit} samples, and are taken to grow with them")
        elif cluster.model is None:
            raise ValueError(
                f"what is to be trained? give SCRIPT, or a cluster with a [model] ({cluster.source})"
            )
        if model is None:
            assert cluster.model is not None
            model = Model.of(cluster.model)
        if self.batch is not None and batch is not None and self.device is None and self.batch != batch:
            cluster = scaled(cluster, self.batch / batch)
            notes.append(
                f"a unit of {self.batch} samples is taken to need {self.batch / batch:.3g} times as long"
            )
        batch = self.batch or batch
        if self.device is not None:
            cluster, note = self._on_device(cluster, flop, batch)
            notes.append(note)
        elif profile is None and flop:
            notes.append(
                f"a unit takes what {cluster.source} says, whatever the script computes: "
                f"--device, or a profile, would tell"
            )
        if flop:
            what = f"{model.parameters:,} parameters, {model.size / 1e6:.4g} MB"
            notes.insert(0, f"{what}, {flop / 1e9:.4g} GFLOP a sample (forward and backward)")
        narrow = 0.5 if (self.wire or wire) == "bf16" else 1.0
        return (
            Question(cluster, model, narrow, batch, self.samples or samples, self.total or total),
            notes,
        )

    def _job(self, script: str, args: list[str], workers: int) -> Job:
        from offbeat.planner.remembered import recall

        if not self.again and (found := recall(script, args, workers)):
            return found
        from offbeat.planner.script import look_at  # with torch

        return look_at(script, args, workers)

    def _is_profiled(self, cluster: Cluster, script: str) -> bool:
        """Whether the cluster's file was measured with this very script, and knows its model."""
        profile = cluster.profile
        if profile is None or cluster.model is None or not profile.text:
            return False
        from offbeat.planner.known import text_of

        return text_of(script) == profile.text

    def _on_device(self, cluster: Cluster, flop: float, batch: int | None) -> tuple[Cluster, str]:
        from offbeat.planner import devices, rule

        chosen = devices.find(self.device)
        if not flop or batch is None:
            raise ValueError(
                f"--device {self.device} needs the model's operations and a batch size: give SCRIPT, and "
                f"--batch where it uses a DataLoader of its own"
            )
        known = None if cluster.profile is None else cluster.profile.efficiency
        share = self.efficiency or known or devices.ASSUMED
        how = "given" if self.efficiency else "as profiled" if known else "assumed"
        unit = rule.computing(batch, flop, chosen.peak(self.dtype), share)
        groups = tuple(
            replace(g, compute=replace(g.compute, unit=unit, kind=_steady(g.compute.kind), samples=()))
            for g in cluster.groups
        )
        note = (
            f"a unit of {batch} samples takes {unit * 1e3:.4g} ms on {chosen.name}: "
            f"{chosen.peak(self.dtype) / 1e12:.4g} TFLOPS in {self.dtype}, {100 * share:.0f}% of them "
            f"reached ({how})"
        )
        return replace(cluster, groups=groups), note


def _steady(kind: str) -> str:
    return "constant" if kind == "samples" else kind


def _print(answers: list[Size], title: str, notes: list[str]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from offbeat.planner.choice import PARTS

    console = Console(
        width=None if sys.stdout.isatty() else 150, highlight=False, soft_wrap=True, markup=False
    )
    console.print(title)
    for note in notes:
        console.print(f"  {note}")
    for size in answers:
        noun = "worker" if size.workers == 1 else "workers"
        figures = f"t_p {_ms(size.t_p)} ms, t_c {_ms(size.t_c)} ms, delay {size.delay}"
        console.print(f"\n{size.workers} {noun}: {figures}")
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("plan")
        for head in (*PARTS, "iteration ms", "epoch s", "samples/s", "efficiency"):
            table.add_column(head, justify="right")
        for row in size.rows:
            one = row.iteration
            table.add_row(
                ("* " if row.plan == size.recommended else "  ") + row.plan,
                *(_ms(getattr(one, part)) for part in PARTS),
                _ms(one.seconds),
                "" if row.epoch is None else f"{row.epoch:.4g}",
                "" if row.samples_per_s is None else f"{row.samples_per_s:,.0f}",
                f"{one.efficiency:.2f}",
            )
        console.print(table)
        console.print(f"  take {size.recommended}: {size.reason}")
        for warning in size.warnings:
            console.print(f"  warning: {warning}")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g}"
