"""What `import offbeat` promises."""

from __future__ import annotations

import subprocess
import sys
import typing

import pytest

import offbeat

PUBLIC = [
    "ASP",
    "BSP",
    "BelowMinimum",
    "CheckpointError",
    "DaSGD",
    "Detection",
    "Diverged",
    "Handle",
    "LocalSGD",
    "PeerLost",
    "PlanError",
    "Protocol",
    "SSP",
    "Stragglers",
    "Switch",
    "Synchronizer",
    "Worker",
    "device",
    "init",
    "parse_plan",
    "rank",
    "world_size",
]


def test_public_names_are_these() -> None:
    assert offbeat.__all__ == PUBLIC
    assert set(PUBLIC) <= set(dir(offbeat))


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_there_and_documented(name: str) -> None:
    assert typing.cast("object", getattr(offbeat, name)).__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Syncronizer'"):
        offbeat.Syncronizer  # noqa: B018


def test_importing_offbeat_does_not_import_torch() -> None:
    code = "import sys, offbeat; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
