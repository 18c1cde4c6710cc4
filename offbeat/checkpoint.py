"""The checkpoint file: one `torch.save` of plain containers and tensors, written atomically, checked
before any of it is used."""

from __future__ import annotations

import os
import random
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch
from torch import nn
from torch.optim import Optimizer

FORMAT = "offbeat-checkpoint"
VERSION = 1
PARTS = (
    "modules",
    "optimizers",
    "kinds",
    "schedules",
    "also",
    "position",
    "plan",
    "total",
    "seed",
    "workers",
    "ranks",
)


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; nothing has been changed."""


class Stateful(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


def write(path: Path, content: dict[str, Any]) -> None:
    """Writes `content` to `path`: beside it first, flushed to the disk, then renamed over it, so that
    `path` always holds a whole checkpoint, the old or the new one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            torch.save({"format": FORMAT, "version": VERSION, **content}, out)
            out.flush()
            os.fsync(out.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read(path: Path) -> dict[str, Any]:
    """The content of a checkpoint, on the CPU.

    Raises CheckpointError for a file that is missing, cut off, damaged, foreign or from a newer
    Offbeat."""
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint {path}")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise CheckpointError(f"{path} is damaged (its part {damaged} fails its check sum)")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # zipfile and torch raise whatever the bytes lead them to
        raise CheckpointError(
            f"{path} is no whole checkpoint: {str(error).splitlines()[0] if str(error) else error!r}"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} was not written by sync.save()")
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has checkpoint version {content.get('version')}; this Offbeat reads version {VERSION}: "
            f"it needs the Offbeat that wrote it ({content.get('offbeat', 'unknown')}) or a newer one"
        )
    missing = [part for part in PARTS if part not in content]
    if missing:
        raise CheckpointError(f"{path} is no whole checkpoint: it has no {', '.join(missing)}")
    return content


def check_fits(
    path: Path, content: Mapping[str, Any], modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]
) -> None:
    """Raises CheckpointError, naming the first difference, where the content is not of these modules
    and optimizers."""
    if len(content["modules"]) != len(modules) or len(content["optimizers"]) != len(optimizers):
        raise CheckpointError(
            f"{path} holds {len(content['modules'])} modules and {len(content['optimizers'])} optimizers; "
            f"this job has {len(modules)} and {len(optimizers)}"
        )
    for module, saved in zip(modules, content["modules"], strict=True):
        own = module.state_dict()
        for name in sorted(own.keys() | saved.keys()):
            if name not in saved or name not in own:
                where = "the checkpoint" if name in saved else "this model"
                raise CheckpointError(f"{path} is of another model: only {where} has {name}")
            a, b = own[name], saved[name]
            if isinstance(a, torch.Tensor) and (a.shape != b.shape or a.dtype != b.dtype):
                raise CheckpointError(
                    f"{path} is of another model: {name} is {tuple(b.shape)} {b.dtype} there and "
                    f"{tuple(a.shape)} {a.dtype} here"
                )
    for number, (optimizer, saved) in enumerate(zip(optimizers, content["optimizers"], strict=True)):
        kind, saved_kind = type(optimizer).__name__, content["kinds"][number]
        if kind != saved_kind:
            raise CheckpointError(
                f"{path} is of another optimizer: optimizer {number} is {saved_kind} there and {kind} here"
            )
        here = [len(group["params"]) for group in optimizer.param_groups]
        there = [len(group["params"]) for group in saved["param_groups"]]
        if here != there:
            raise CheckpointError(
                f"{path} is of another optimizer: optimizer {number} has groups of {there} parameters "
                f"there and {here} here"
            )


def random_state() -> dict[str, Any]:
    """This process's random generators, in types that a weights-only load accepts."""
    own = numpy.random.get_state(legacy=False)
    version, words, following = random.getstate()
    state = {
        "torch": torch.get_rng_state().tolist(),
        "numpy": [
            own["bit_generator"],
            own["state"]["key"].tolist(),
            int(own["state"]["pos"]),
            int(own["has_gauss"]),
            float(own["gauss"]),
        ],
        "random": [version, list(words), following],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().tolist()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    kind, keys, place, has_gauss, gauss = state["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), place, has_gauss, gauss))
    version, words, following = state["random"]
    random.setstate((version, tuple(words), following))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))
