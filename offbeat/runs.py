"""Commands about a run that is there."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from offbeat.cluster.spec import PLACE
from offbeat.options import refuse
from offbeat.plan import PlanError, parse, to_text

Run = Annotated[
    Path, typer.Argument(metavar="RUN", help="The run's directory, or its journal.", show_default=False)
]


def audit(run: Run) -> None:
    """Proves from a run's journal that every unit was used by exactly one committed update.

    offbeat audit runs/20260101-120000-train

    Units are mini-batches that sync.batches(dataset, ...) deals. Exit codes: 0 it is proven, 1 it is not, 2
    there is no such journal.
    """
    from offbeat.audit import audit as audit_records
    from offbeat.journal import read

    try:
        found = audit_records(read(run))
    except (OSError, ValueError) as error:
        reason = f"{run} holds no journal.jsonl" if isinstance(error, OSError) else str(error)
        refuse(reason)
    for one in found:
        for line in one.lines():
            typer.echo(line)
    raise typer.Exit(0 if found and all(one.clean for one in found) else 1)


class Action(str, Enum):
    status = "status"
    checkpoint = "checkpoint"
    switch = "switch"
    drop = "drop"


def ctl(
    run: Run,
    action: Annotated[Action, typer.Argument(help="What is asked for.", show_default=False)],
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[WHAT]",
            help="checkpoint: the file (default: in RUN); switch: the plan to go on with (default: what "
            "comes next in the job's own); drop: the rank.",
            show_default=False,
        ),
    ] = None,
    patience: Annotated[float, typer.Option("--timeout", help="Seconds to wait for the members.")] = 60.0,
) -> None:
    """Asks a running job for something, on the host where it was started.

    offbeat ctl runs/20260101-120000-train status

    offbeat ctl runs/20260101-120000-train checkpoint before-lunch.pt

    offbeat ctl runs/20260101-120000-train switch "dasgd(period=4,delay=1)"

    offbeat ctl runs/20260101-120000-train drop 3

    The members do it together as soon as all hold the same: at their next step under bsp, after the next
    average under local and dasgd, and under asp and ssp by a halt of a few milliseconds. A worker that is
    dropped ends, and its host is free. Exit codes: 0 it is done, 1 it is not, 2 there is no such job.
    """
    run = run.parent if run.is_file() else run
    if action is Action.status:
        _status(run)
        return
    request: dict[str, Any] = {"do": action.value}
    if action is Action.drop:
        if what is None or not what.isdecimal():
            refuse(f"{'drop' if what is None else f'drop {what}'}: which rank? A number from 0")
        request["rank"] = int(what)
    elif action is Action.checkpoint:
        name = Path(what) if what else run / "ctl.pt"
        request["path"] = str(name.absolute())
    elif what is not None:
        try:
            request["plan"] = to_text(parse(what))
        except PlanError as error:
            refuse(str(error))
    board = _board(run)
    from offbeat.cluster.desk import ask

    try:
        answer = ask(board, request, patience)
    except RuntimeError:
        refuse(f"the job of {run} has ended")
    if answer is None:
        typer.echo(f"offbeat: the members have not answered within {patience:g} s", err=True)
        raise typer.Exit(1)
    typer.echo(("" if answer["ok"] else "offbeat: not done: ") + answer["text"], err=not answer["ok"])
    raise typer.Exit(0 if answer["ok"] else 1)


def _status(run: Path) -> None:
    from offbeat.journal import read
    from offbeat.live import line, summary, view

    try:
        records = read(run)
    except (OSError, ValueError) as error:
        refuse(f"{run} holds no journal.jsonl" if isinstance(error, OSError) else str(error))
    state = view(records)
    members, losses, checkpoint = list(range(state.workers)), 0, None
    slow: set[int] = set()
    for row in records:
        if row["type"] == "members":
            members = row["members"]
        elif row["type"] == "straggler":
            (slow.add if row["action"] == "flagged" else slow.discard)(row["rank"])
        elif row["type"] == "recovery":
            losses += 1
        elif row["type"] == "checkpoint":
            checkpoint = row
    running = (run / PLACE).exists()
    typer.echo(line(state) if running else summary(state))
    typer.echo(f"members: {', '.join(map(str, members))} of {state.workers} at the start")
    if slow:
        typer.echo(f"stragglers: {', '.join(map(str, sorted(slow)))}")
    if losses:
        typer.echo(f"recoveries: {losses}")
    if checkpoint is not None:
        typer.echo(f"last checkpoint: {checkpoint['path']} at {checkpoint['units']:,} units")
    if not running:
        typer.echo(
            "the job has ended" if state.end else "the job does not run any more, and did not end well"
        )


def _board(run: Path) -> Any:
    """The job's store."""
    place = run / PLACE
    try:
        where = json.loads(place.read_text())
    except (OSError, ValueError):
        refuse(f"no job runs in {run} (it has no {PLACE})")
    from datetime import timedelta

    from torch.distributed import PrefixStore, TCPStore

    try:
        store = TCPStore(
            where["host"],
            where["port"],
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=5),
        )
    except (RuntimeError, ValueError):
        refuse(f"the job of {run} does not answer at {where['host']}:{where['port']}: it was killed")
    return PrefixStore("offbeat", store)
