"""A profile's text: a cluster's description in TOML, as `offbeat.virtual.cluster` reads it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from offbeat.planner.asynchronous import Queues
from offbeat.planner.devices import Device
from offbeat.planner.fit import Fit
from offbeat.planner.known import text_of
from offbeat.planner.workers import Workers
from offbeat.virtual.cluster import Allreduce, Cluster, Compute, Group, Link, ShardService
from offbeat.virtual.model import Model

INSIDE = Link(2e9, 5e-5)
"""Between processes of one host, where nothing was measured."""
OVERHEAD = 1e-4
"""Seconds of a push at a host, at most: what more it takes grows with its bytes."""


@dataclass(frozen=True)
class About:
    """What was profiled. passed: share of backward after which each parameter's gradient is there. wire:
    bytes of a gradient by the parameters' own. known: the device of the catalogue. in_flight: how many
    all-reduces may be under way at a time. notes: what could not be told."""

    script: str
    model: Model
    passed: Sequence[float]
    wire: float
    batch: int | None
    samples: int | None
    forward: float
    backward: float
    device: str
    known: Device | None
    in_flight: int
    notes: Sequence[str]

    def efficiency(self, unit: float) -> float | None:
        """Share of the device's float32 rate that a unit of `unit` seconds reaches."""
        if self.known is None or self.batch is None or not self.forward:
            return None
        return self.batch * (self.forward + self.backward) / unit / self.known.peak()


def toml(fit: Fit, about: About) -> str:
    """The description."""
    samples = fit.samples()
    unit = sum(samples) / len(samples)
    link, inside = links(fit)
    shards = _shards(fit, about, link, inside)
    rows = [
        f"# {Path(about.script).name} on {fit.workers} workers of {fit.hosts} hosts, "
        f"profiled {time.strftime('%Y-%m-%d %H:%M')}; keys: docs/cluster.md",
        *(f"# {note}" for note in about.notes),
        f"name = {_text(f'{Path(about.script).stem} as profiled')}",
        f"size = {fit.workers}",
        "",
        "[compute]",
        f"unit = {_time(unit)}",
        'kind = "samples"',
        f"samples = [{', '.join(f'{one:.6g}' for one in samples)}]",
        f"update = {_time(fit.update)}",
        f"backward = {fit.backward:.4f}",
    ]
    for kind in fit.kinds():
        rows += ["", "[[workers]]", f"per_host = {fit.per_host}"]
        rows += [] if kind.count is None else [f"count = {kind.count}"]
        rows += [] if kind.slow == 1 else [f"slow = {kind.slow:g}"]
    assumed = [] if fit.hosts > 1 else ["# assumed: only one host was measured"]
    rows += ["", "[link]", *assumed, f"rate = {_rate(link.rate)}", f"latency = {_time(link.latency)}"]
    rows += ["", "[host]", f"rate = {_rate(inside.rate)}", f"latency = {_time(inside.latency)}"]
    rows += ["", "[allreduce]", 'algorithm = "ring"', f"overhead = {_time(fit.overhead)}"]
    rows += [f"in_flight = {about.in_flight}"]
    rows += ["", "[shards]", f"apply = {_rate(shards.apply)}", f"overhead = {_time(shards.overhead)}"]
    rows += ["", "[model]", f"parameters = {about.model.parameters}"]
    several = len(about.model.sizes) > 1
    rows += [f"tensors = [{', '.join(map(str, about.model.sizes))}]" if several else "tensors = 1"]
    rows += [f"bytes_per_parameter = {about.model.width}", f"buffers = {about.model.buffers}"]
    rows += [f"state = {about.model.state:g}"]
    if about.passed and several:
        rows += [f"passed = [{', '.join(f'{one:.4f}' for one in about.passed)}]"]
    return "\n".join([*rows, "", *_profile(fit, about, unit)]) + "\n"


def links(fit: Fit) -> tuple[Link, Link]:
    """Between hosts, and within one: what was measured is the slowest link's rate."""
    rate = fit.rate
    if fit.hosts > 1:
        assert fit.between is not None
        inside = replace(INSIDE, latency=fit.inside) if fit.inside is not None else INSIDE
        return Link(rate or INSIDE.rate, fit.between), inside
    inside = INSIDE if rate is None else Link(rate, fit.inside or INSIDE.latency)
    return Link(1.25e9, 5e-5), inside


def _shards(fit: Fit, about: About, link: Link, inside: Link) -> ShardService:
    """What is left of a push and its pull when what their way takes is taken off."""
    if fit.push is None or fit.pull is None:
        return ShardService(2e9, OVERHEAD)
    group = Group(fit.workers, fit.per_host, 1.0, Compute(1.0), link)
    free = ShardService(1e18, 0.0)
    cluster = Cluster("profile", "profile", fit.workers, (group,), 0.5, inside, Allreduce(), free)
    way = Queues(Workers(cluster.sized()), about.model, about.wire).alone
    service = max(fit.push + fit.pull - way, 2e-5)
    overhead = min(OVERHEAD, service / 2)
    return ShardService(about.model.size * about.wire / fit.hosts / (service - overhead), overhead)


def _profile(fit: Fit, about: About, unit: float) -> list[str]:
    rows = ["[profile]", f"script = {_text(Path(about.script).name)}"]
    if Path(about.script).is_file():
        rows.append(f"text = {_text(text_of(about.script))}")
    efficiency = about.efficiency(unit)
    for key, value in (
        ("batch_size", about.batch),
        ("samples", about.samples),
        ("forward", f"{about.forward:.6g}" if about.forward else None),
        ("backward", f"{about.backward:.6g}" if about.backward else None),
        ("device", _text(about.device)),
        ("efficiency", None if efficiency is None else f"{efficiency:.4f}"),
        ("units", f"[{', '.join(f'{one:.6g}' for one in fit.medians)}]"),
        ("push", None if fit.push is None else _time(fit.push)),
        ("pull", None if fit.pull is None else _time(fit.pull)),
    ):
        rows += [] if value is None else [f"{key} = {value}"]
    return rows


def _text(text: str) -> str:
    return json.dumps(text)


def _time(seconds: float) -> str:
    return f'"{seconds * 1e3:.6g} ms"'


def _rate(rate: float) -> str:
    return f'"{rate * 1e-6:.6g} MB/s"'
