"""What makes two jobs the same training: the fields of a run's first records, and their fingerprint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from offbeat.journal import Record

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

FIELDS = ("model", "optimizer", "workers", "total", "lr_reference", "momentum", "batch_size", "samples")
"""Of the records `run` and `data`: two runs with the same values in all of them are one job. Not the script's
name or its seed: a job that recurs may have moved, and has other seeds."""


def structure(modules: Sequence[nn.Module]) -> str:
    """A digest of the modules' classes and of the shapes and types of all that they hold."""
    digest = hashlib.sha256()
    for module in modules:
        for name, part in module.named_modules():
            digest.update(f"{name} {type(part).__name__}\n".encode())
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}\n".encode())
    return digest.hexdigest()[:16]


def description(optimizers: Iterable[Optimizer]) -> str:
    """The optimizers' classes and settings, such as `SGD(lr=0.1,momentum=0.9)`: what differs from the class's
    own defaults, and the learning rate as it was before any schedule."""
    found = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            defaults = dict(optimizer.defaults)
            settings = {**group, "lr": group.get("initial_lr", group.get("lr"))}
            plain = [
                f"{name}={float(settings[name]) if name == 'lr' else settings[name]}"
                for name in sorted(defaults)
                if isinstance(settings.get(name), bool | int | float | tuple) and settings[name]
            ]
            found.append(f"{type(optimizer).__name__}({','.join(plain)})")
    return " ".join(dict.fromkeys(found))


def identity(records: Iterable[Record]) -> dict[str, Any] | None:
    """The values of FIELDS in a run's journal; None while it doesn't say them yet. A loop over batches of its
    own has neither batch size nor samples."""
    found: dict[str, Any] = {}
    begun = False
    for record in records:
        if record["type"] in ("run", "data"):
            found.update({name: record[name] for name in FIELDS if name in record})
        begun = begun or record["type"] == "step"
        if "total" in found and ("batch_size" in found or begun):
            return {name: found.get(name) for name in FIELDS}
    return None


def fingerprint(values: dict[str, Any]) -> str:
    """Of a job's identity: 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
