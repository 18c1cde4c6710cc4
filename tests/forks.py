"""Where tests fork processes from: one server that has imported torch already (some 30 ms a process).
Python has one such server for a whole test session, so what it imports is said once, here."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

ROOT = Path(__file__).parent.parent

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "offbeat.cluster.launcher",  # first: it sets how torch logs in a launcher
        "offbeat.cli",
        "torch.distributed",
        "torch._dynamo",  # a process's first optimizer imports it
        "offbeat.sync",
        "offbeat.virtual.engine",
        "tests.scripts_endings",
        "tests.scripts_checkpoints",
        "tests.scripts_shards",
    ]
)
# The server finds the tests' modules as pytest does.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
