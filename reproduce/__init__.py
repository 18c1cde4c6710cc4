"""The figures and tables of the two papers, each by one command: `python reproduce`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent


def beside(path: str) -> ModuleType:
    """A module of this repository that is no part of a package, such as "benchmarks/record", by its file:
    plain names like `models` are several modules'."""
    name = path.replace("/", "_")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / f"{path}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
