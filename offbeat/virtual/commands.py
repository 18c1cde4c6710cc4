"""`offbeat cluster`: looks at descriptions of virtual clusters."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Descriptions of virtual clusters: what they say, and which come along.",
)


@app.command()
def show(
    cluster: Annotated[
        str, typer.Argument(metavar="CLUSTER", help="A TOML file or a preset.", show_default=False)
    ],
    workers: Annotated[
        int | None, typer.Option("-n", "--workers", help="Number of workers, instead of the file's own.")
    ] = None,
    parameters: Annotated[
        str | None,
        typer.Option("--parameters", help="The model's, instead of the file's [model]: 25_600_000 or 25.6M."),
    ] = None,
) -> None:
    """Shows a virtual cluster: workers, links, all-reduces, shards, events and predicted speeds.

    offbeat cluster show ethernet-256 --workers 64

    The keys of a file are explained in docs/cluster.md.
    """
    from offbeat.options import refuse, units
    from offbeat.virtual.description import ClusterError, find
    from offbeat.virtual.show import parts

    try:
        found = find(cluster).sized(workers)
        number = None if parameters is None else units(parameters, "--parameters", "parameters")
    except (ClusterError, ValueError) as error:
        refuse(str(error))
    console = _console()
    for part in parts(found, number):
        console.print(part)


@app.command("list")
def list_presets() -> None:
    """Lists the clusters that come along."""
    from rich import box
    from rich.table import Table

    from offbeat.virtual.description import PRESETS, preset

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("preset")
    table.add_column("workers", justify="right")
    table.add_column("what it is")
    for name in PRESETS:
        found = preset(name)
        table.add_row(name, str(found.workers), found.name)
    _console().print(table)


def _console() -> Console:
    from rich.console import Console

    # A file or a pipe has no width of its own; tables must not be cut there.
    return Console(width=None if sys.stdout.isatty() else 140, highlight=False, soft_wrap=True, markup=False)
