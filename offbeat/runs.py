"""Commands about a run that is there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
        typer.echo(f"offbeat: error: {reason}", err=True)
        raise typer.Exit(2) from None
    for one in found:
        for line in one.lines():
            typer.echo(line)
    raise typer.Exit(0 if found and all(one.clean for one in found) else 1)
