"""`offbeat report`: a page for a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offbeat.cluster.spec import LaunchError
from offbeat.options import refuse


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Directories of runs, their journals, or directories of `offbeat compare`.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="The file (default: report.html in RUN, or here for several)."),
    ] = None,
    tensorboard: Annotated[
        Path | None,
        typer.Option("--tensorboard", metavar="DIR", help="Write the runs' figures for TensorBoard, too."),
    ] = None,
) -> None:
    """Makes a page that shows a run, or compares several: one file, to be opened in any browser.

    offbeat report runs/20260101-120000-train

    offbeat report runs/a runs/b -o report.html

    The page needs no network. Runs with the same plan and settings are repetitions of each other. Exit codes:
    0 it is made, 2 there is nothing to report.
    """
    from offbeat.report.history import ReportError
    from offbeat.report.page import write_report

    alone = runs[0] if len(runs) == 1 and runs[0].is_dir() else Path()
    to = alone / "report.html" if out is None else out
    try:
        shows = write_report(runs, to)
        if tensorboard is not None:
            _write_boards(runs, tensorboard)
    except (ReportError, LaunchError, OSError) as error:
        refuse(f"{to} cannot be written: {error.strerror}" if isinstance(error, OSError) else str(error))
    typer.echo(f"{to}: {', '.join(shows)}")


def _write_boards(runs: list[Path], directory: Path) -> None:
    from offbeat.journal import rows
    from offbeat.report.history import expand
    from offbeat.scalars import Board

    board = Board()
    for place in expand(runs)[0]:
        home = place if place.is_dir() else place.parent
        board.open(directory / home.absolute().name)
        for record in rows(place):
            board.add(record)
        board.close()
