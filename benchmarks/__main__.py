"""The benchmarks: every part, or those named, each into benchmarks/results/PART.json; then the page.

    python benchmarks                              all but the long ones: make bench
    python benchmarks throughput recovery          make bench PARTS="throughput recovery"
    python benchmarks --page                       the page alone, from the results that are there

Parts that need several hosts use an emulator of them, hosts.py, which is no part of this repository: give
--hosts-tool PATH or HOSTS_TOOL. Without it those parts, or what of a part needs it, are skipped by name.
Peers are installed by pinned versions into environments of their own under --peers, once.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import page
from parts import LONG, PARTS, measured, module
from record import ROOT, Record, Setup


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--hosts-tool", help="the emulator's hosts.py", default=os.environ.get("HOSTS_TOOL"))
    parser.add_argument("--data", help="CIFAR-10's folder", default=os.environ.get("CIFAR10_DIR"))
    parser.add_argument("--peers", type=Path, default=ROOT / "build" / "peers", help="their environments")
    parser.add_argument("--results", type=Path, default=page.RESULTS, help="folder of the JSON files")
    parser.add_argument(
        "--only",
        metavar="TEXT",
        help="of throughput and correctness, the cases whose name has this in it, "
        'such as "2 hosts, 50 Mbit"; the other rows of the JSON file stay',
    )
    parser.add_argument("--quick", action="store_true", help="only see that everything runs; no figures")
    parser.add_argument("--page", action="store_true", help="measure nothing, write docs/benchmarks.md")
    parser.add_argument("--list", action="store_true", help="say what there is")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if args.hosts_tool and not Path(args.hosts_tool).is_file():
        parser.error(f"--hosts-tool {args.hosts_tool}: there is no such file")
    return args


def main() -> int:
    args = options()
    if args.list:
        for part in PARTS:
            print(f"{part:12} {module(part).MINUTES:4.0f} min  {module(part).TITLE}")
        return 0
    if args.quick and args.results == page.RESULTS:
        raise SystemExit("--quick gives no figures to keep: give --results FOLDER too")
    setup = Setup(args.hosts_tool or None, args.quick, args.data, args.peers, args.only)
    usual = [part for part in PARTS if part not in LONG]
    for part in () if args.page else args.parts or usual:
        print(f"{part}: {module(part).TITLE}, about {module(part).MINUTES:g} minutes", flush=True)
        record = measured(part, setup)
        if not record.rows:
            print(f"  skipped: {'; '.join(record.skipped) or 'nothing was measured'}")
            continue
        before = args.results / f"{part}.json"
        if args.only and before.exists():
            record = record.merged(Record.read(before))
        print(f"  {record.minutes:.1f} minutes, {record.write(args.results)}", flush=True)
    if args.results == page.RESULTS:
        page.PAGE.write_text(page.written(args.results))
        print(f"{page.PAGE.relative_to(ROOT)} is written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
