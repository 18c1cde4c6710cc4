"""The figures and tables of the two papers, each by one command; then docs/reproduce.md.

    python reproduce                           what there is, and how long it takes
    python reproduce dasgd-fig7 sync-switch-table2
    python reproduce all                       all that have no results yet; goes on where it was
    python reproduce dasgd-table1 --dry-run    the commands of its trainings
    python reproduce --page                    the page alone, from the results that are there

Trainings that are over are kept, and used by every item that needs them. Results go to
reproduce/results/ITEM.json.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from reproduce import ROOT, page
from reproduce.item import Item, record
from reproduce.items import ITEMS
from reproduce.runs import Run, RunError, Store

ALL = "all"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python reproduce", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("items", nargs="*", metavar="ITEM", help=f"{ALL}, or {', '.join(ITEMS)}")
    add("--full", action="store_true", help="the published size: real workers on GPUs")
    add("--quick", action="store_true", help="only see that everything runs; keeps no results")
    add("--dry-run", action="store_true", help="print the commands of the trainings, and run nothing")
    add("--known", action="store_true", help="train nothing: rows of logs, closed forms, virtual time alone")
    add("--page", action="store_true", help="write docs/reproduce.md from the results that are there")
    add("--jobs", type=int, default=2, help="trainings side by side (2; with --full 1)")
    add("--data", help="CIFAR-10's folder (or CIFAR10_DIR)", default=os.environ.get("CIFAR10_DIR"))
    add("--data-100", help="CIFAR-100's, for --full (CIFAR100_DIR)", default=os.environ.get("CIFAR100_DIR"))
    add("--runs", type=Path, help="folder of the trainings (build/reproduce)")
    args = parser.parse_args()
    if unknown := set(args.items) - {*ITEMS, ALL}:
        parser.error(f"no item is called {', '.join(sorted(unknown))}; there are {ALL}, {', '.join(ITEMS)}")
    if args.full and args.quick:
        parser.error("--full and --quick are two sizes: give one of them")
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: one training at a time, or more")
    args.data = args.data or str(ROOT / "data" / "cifar10")
    args.data_100 = args.data_100 or str(ROOT / "data" / "cifar100")
    args.mode = "full" if args.full else "quick" if args.quick else "small"
    if args.full:
        args.jobs = 1  # a training has all GPUs
    return args


def chosen(args: argparse.Namespace) -> list[Item]:
    """ALL: those that have no results of this size yet."""
    if ALL not in args.items:
        return [ITEMS[name] for name in dict.fromkeys(args.items)]
    again = args.mode == "quick" or args.dry_run
    return [item for name, item in ITEMS.items() if again or not whole(file(args, name))]


def whole(path: Path) -> bool:
    """Whether a results file is there, with nothing left out."""
    return path.exists() and not record.Record.read(path).skipped


def file(args: argparse.Namespace, name: str) -> Path:
    folder = page.RESULTS / "full" if args.mode == "full" else page.RESULTS
    return folder / f"{name}.json"


def measured(item: Item, args: argparse.Namespace, store: Store) -> record.Record:
    begun = time.monotonic()
    runs = dict.fromkeys(item.all_runs(args.mode))
    settings = {"size": args.mode, **({"trainings": len(runs)} if runs else {})}
    made = record.Record(item.name, settings, machine=record.machine(), versions=record.versions())

    def note(rows: Iterable[record.Row]) -> None:
        for row in rows:
            made.rows.append(row)
            print(f"  {row.values['reproduced']:9} {row.name}: {row.values['difference']}", flush=True)

    note(item.known(args.mode))
    if args.known and store.missing(runs):
        told = f"the rows of its {len(runs)} trainings, not run yet: `python reproduce {item.name}`"
        made.skipped.append(told)
        if whole(file(args, item.name)):
            made = replace(made.merged(record.Record.read(file(args, item.name))), skipped=[])
    else:
        trainable(item, store.missing(runs), store)
        store.complete(list(runs), args.jobs)
        found = item.runs(args.mode).items()
        note(item.trained(args.mode, {name: [store.finished(run) for run in some] for name, some in found}))
    made.minutes = round((time.monotonic() - begun) / 60, 1)
    return made


def trainable(item: Item, missing: Sequence[Run], store: Store) -> None:
    """Ends with a message where the data set isn't there."""
    for kind, option in (("cifar10", "--data"), ("cifar100", "--data-100")):
        if any(run.data == kind for run in missing) and not Path(store.data[kind]).is_dir():
            raise SystemExit(
                f"{item.name} trains on {kind}, and {store.data[kind]} is no folder: give {option} DIR"
            )


def main() -> int:
    args = options()
    data = {"cifar10": args.data, "cifar100": args.data_100}
    try:
        if args.quick and args.runs is None and not args.dry_run:
            with TemporaryDirectory(prefix="offbeat-reproduce-") as folder:
                return done(args, Store(Path(folder), data))
        return done(args, Store((args.runs or ROOT / "build" / "reproduce").absolute(), data))
    except KeyboardInterrupt:
        raise SystemExit("interrupted: the same command goes on with the trainings that are left") from None
    except RunError as error:
        raise SystemExit(str(error)) from None


def done(args: argparse.Namespace, store: Store) -> int:
    if not args.items and not args.page:
        for name, item in ITEMS.items():
            runs, missing = set(item.all_runs(args.mode)), store.missing(item.all_runs(args.mode))
            known = "results" if whole(file(args, name)) else ""
            minutes = item.time(args.mode, lambda run, left=set(missing): run not in left, args.jobs)
            trained = f"{len(runs) - len(missing)}/{len(runs)} runs" if runs else ""
            print(f"{name:22} {trained:12} {minutes:5.0f} min  {known:8} {item.title}")
        return 0
    for item in chosen(args):
        if args.dry_run:
            print(f"# {item.name}")
            for run in dict.fromkeys(item.all_runs(args.mode)):
                print(shlex.join(store.command(run)))
            continue
        left = item.time(args.mode, lambda run: args.known or store.result(run) is not None, args.jobs)
        told = "" if args.quick else f", about {left:.0f} minutes"
        print(f"{item.name}: {item.title}{told}", flush=True)
        made = measured(item, args, store)
        if args.quick:
            print(f"  {made.minutes:g} minutes, {len(made.rows)} rows, not kept")
        else:
            print(f"  {made.minutes:g} minutes, {made.write(file(args, item.name).parent)}", flush=True)
            page.PAGE.write_text(page.written(page.RESULTS))
    if args.page:
        page.PAGE.write_text(page.written(page.RESULTS))
        print(f"{page.PAGE.relative_to(ROOT)} is written")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its trainings end with it
    sys.exit(main())
