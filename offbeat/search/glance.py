"""A short look at a script: which job it is, before anything of it is decided."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from offbeat.cluster.launcher import Launcher
from offbeat.cluster.spec import LaunchSpec
from offbeat.identity import identity
from offbeat.journal import read
from offbeat.search.core import SearchError

POLL = 0.05
PATIENCE = 600.0
"""Seconds until a script should have come to its first step."""


def glance(spec: LaunchSpec) -> dict[str, Any]:
    """Starts the script with one worker and ends it when its journal says what job it is
    (`offbeat.identity`), with the workers that `spec` asks for. Raises SearchError when it never does,
    LaunchError when it cannot start."""
    with TemporaryDirectory(prefix="offbeat-glance-") as folder:
        one = replace(
            spec,
            workers=1,
            virtual=None,
            cluster=None,
            timing_only=False,
            nnodes=1,
            node_rank=0,
            endpoint=None,
            minimum=None,
            maximum=None,
            stragglers=None,
            plan="bsp",
            out=str(Path(folder) / "run"),
            show="none",
        )
        with Launcher(one, lambda rank, stream, text: None, lambda text: None) as launcher:
            launcher.start()
            end = time.monotonic() + PATIENCE
            while True:
                outcome = launcher.poll()
                found = None
                if (launcher.out / "journal.jsonl").exists():
                    found = identity(read(launcher.out))
                if found is not None:
                    launcher.stop()
                    return {**found, "workers": spec.virtual or spec.workers * spec.nnodes}
                if outcome is not None:
                    detail = "".join(f"\n  | {line}" for line in outcome.detail)
                    why = outcome.message or "it ended before its first step"
                    raise SearchError(f"{spec.script} cannot be looked at: {why}{detail}")
                if time.monotonic() > end:
                    raise SearchError(f"{spec.script} came to no step in {PATIENCE:g} s")
                time.sleep(POLL)
