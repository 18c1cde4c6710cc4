"""The emulator of several hosts on one machine, which is no part of this repository."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def tool(path: str | None) -> Any:
    """The module at PATH/hosts.py. Ends the program where there is none."""
    if not path or not Path(path).is_file():
        raise SystemExit("emulated hosts need the network emulator: give --hosts-tool PATH/hosts.py")
    spec = importlib.util.spec_from_file_location("hosts", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
