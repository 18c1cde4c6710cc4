"""A virtual cluster's description in TOML (every key: docs/cluster.md)."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from offbeat.cluster.sizes import IN_FLIGHT
from offbeat.virtual.cluster import (
    ALGORITHMS,
    KINDS,
    TENSOR,
    Allreduce,
    Cluster,
    Compute,
    Failure,
    Group,
    Join,
    Link,
    Profile,
    Shape,
    ShardService,
    Straggler,
    equal,
)
from offbeat.virtual.keys import ClusterError as ClusterError
from offbeat.virtual.keys import Table, line_of, listed, nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_HERE = Path(__file__).parent / "presets"
PRESETS = tuple(sorted(path.stem for path in _HERE.glob("*.toml")))


def find(text: str) -> Cluster:
    """The preset of that name, or the file at that path. Raises ClusterError."""
    if text in PRESETS:
        return preset(text)
    if not Path(text).is_file():
        raise ClusterError(
            f"{text!r} is neither a file nor a preset; presets: {listed(PRESETS)}{nearest(text, PRESETS)}"
        )
    return read(text)


def preset(name: str) -> Cluster:
    """Raises ClusterError for an unknown one."""
    if name not in PRESETS:
        raise ClusterError(f"there is no preset {name!r}; valid: {listed(PRESETS)}{nearest(name, PRESETS)}")
    return read(_HERE / f"{name}.toml", source=name)


def read(path: str | Path, source: str | None = None) -> Cluster:
    """The cluster that a TOML file describes. `source`: what errors call the file.

    Raises ClusterError, which names the file, the key, the value and what would be valid."""
    source = str(path) if source is None else source
    values = _values(Path(path), source, ())
    try:
        return _cluster(Table(source, "", values))
    except ClusterError as error:
        line = line_of(Path(path).read_text(encoding="utf-8"), str(error).removeprefix(f"{source}: "))
        raise ClusterError(f"{error} (line {line})" if line else str(error)) from None


def _values(path: Path, source: str, above: tuple[Path, ...]) -> dict[str, Any]:
    """A file's keys, over those of its `base`."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ClusterError(f"{source}: it cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ClusterError(f"{source}: it is no UTF-8 text") from None
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ClusterError(f"{source}: it is no TOML: {error}") from None
    base = Table(source, "", values).text("base", None)
    if base is None:
        return values
    below = _HERE / f"{base}.toml" if base in PRESETS else path.parent / base
    if not below.is_file():
        raise ClusterError(
            f"{source}: base: {base!r} is neither a file nor a preset; presets: "
            f"{listed(PRESETS)}{nearest(base, PRESETS)}"
        )
    chain = (*above, path.resolve())
    if below.resolve() in chain:
        raise ClusterError(f"{source}: base: {base!r} builds on this file itself")
    del values["base"]
    merged = _values(below, base, chain)
    for key, value in values.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = {**merged[key], **value} if both else value
    return merged


def _cluster(top: Table) -> Cluster:
    compute, link, host = top.table("compute"), top.table("link"), top.table("host")
    rows = top.tables("workers") or [Table(top.source, "workers", {})]
    backward = compute.number("backward", 2 / 3, least=0.0, most=1.0)
    groups = tuple(_group(row, compute, link) for row in rows)
    if sum(group.count is None for group in groups) > 1:
        raise ClusterError(f"{top.source}: workers: only one group can leave its count out, to be the rest")
    compute.take_known(_COMPUTE)
    link.take_known(_LINK)
    allreduce, shards = top.table("allreduce"), top.table("shards")
    switch, membership = top.table("switch"), top.table("membership")
    found = Cluster(
        name=top.text("name", Path(top.source).stem),
        source=top.source,
        size=top.whole("size", None),
        groups=groups,
        backward=backward,
        host=_link(host, Link(10e9, 5e-6)),
        allreduce=Allreduce(
            allreduce.choice("algorithm", ALGORITHMS, "ring"),
            allreduce.duration("overhead", 0.0),
            allreduce.duration("per_member", 0.0),
            allreduce.number("rounds", None, least=0.0),
            allreduce.whole("in_flight", IN_FLIGHT),
        ),
        shards=ShardService(shards.rate("apply", 2e9), shards.duration("overhead", 1e-4)),
        stragglers=tuple(map(_straggler, top.tables("stragglers"))),
        failures=tuple(map(_failure, top.tables("failures"))),
        joins=tuple(map(_join, top.tables("joins"))),
        switch=switch.duration("seconds", 0.0),
        membership=membership.duration("seconds", 0.0),
        model=_model(top.table("model")) if "model" in top else None,
        profile=_profile(top.table("profile")) if "profile" in top else None,
    )
    top.take_known(["base", "model", "profile"])
    for table in (compute, link, host, allreduce, shards, switch, membership, top):
        table.close()
    if found.size is not None and all(group.count is not None for group in groups):
        found.sized(found.size)
    return found


_NIC = Link(1.25e9, 5e-5)
_COMPUTE = ("unit", "kind", "sigma", "samples", "update")
_LINK = ("rate", "latency", "burst")


def _group(row: Table, compute: Table, link: Table) -> Group:
    both, nic = row.over(compute), row.over(link)
    _fits(compute, compute)
    _fits(row, both)
    found = Group(
        count=row.whole("count", None),
        per_host=row.whole_or_all("per_host", 1),
        slow=row.number("slow", 1.0),
        compute=_compute(both),
        link=replace(_link(nic, _NIC), burst=nic.duration("burst", 0.0)),
    )
    row.take_known(_COMPUTE + _LINK)
    row.close()
    return found


def _fits(table: Table, whole: Table) -> None:
    """Raises for a setting of one kind of distribution in a table of another."""
    kind = whole.choice("kind", KINDS, "constant")
    for key, its in (("sigma", "lognormal"), ("samples", "samples")):
        if key in table and kind != its:
            table.wrong(key, f"for kind = {kind!r}: it belongs to kind = {its!r}")


def _compute(table: Table) -> Compute:
    kind = table.choice("kind", KINDS, "constant")
    if kind == "samples":
        samples = table.samples("samples")
        unit = table.duration("unit", sum(samples) / len(samples), positive=True)
        scale = unit * len(samples) / sum(samples)
        samples = tuple(sample * scale for sample in samples) if "unit" in table else samples
        return Compute(unit, kind, 0.0, samples, table.duration("update", 0.0))
    unit = table.duration("unit", positive=True)
    sigma = table.number("sigma", least=0.0, most=3.0) if kind == "lognormal" else 0.0
    return Compute(unit, kind, sigma, (), table.duration("update", 0.0))


def _link(table: Table, default: Link) -> Link:
    return Link(table.rate("rate", default.rate), table.duration("latency", default.latency))


def _straggler(table: Table) -> Straggler:
    fixed = ("worker", "workers", "at")
    if "every" in table:
        for key in fixed:
            if key in table:
                table.wrong(key, "for stragglers that come at random (every = …): those are drawn")
    elif "worker" in table and "workers" in table:
        table.wrong("workers", "needed beside worker: give one of the two")
    elif "count" in table:
        table.wrong("count", "for stragglers at fixed moments: name the workers (workers = [1, 2])")
    random = "every" in table
    found = Straggler(
        seconds=table.duration("seconds", positive=True, endless=True),
        slow=table.number("slow", 1.0, least=1.0),
        latency=table.duration("latency", 0.0),
        workers=() if random else table.wholes("worker" if "worker" in table else "workers"),
        at=() if random else table.durations("at"),
        every=table.duration("every", positive=True) if random else None,
        count=table.whole("count", 1) if random else 1,
    )
    table.take_known([*fixed, "every", "count"])
    table.close()
    if found.slow == 1 and not found.latency:
        raise ClusterError(f"{table.source}: {table.path}: a straggler needs slow, latency or both")
    return found


def _failure(table: Table) -> Failure:
    found = Failure(table.whole("worker", least=0), table.duration("at"), table.duration("restart", None))
    table.close()
    return found


def _join(table: Table) -> Join:
    found = Join(table.duration("at"), table.whole("count", 1))
    table.close()
    return found


def _model(table: Table) -> Shape:
    width = table.whole("bytes_per_parameter", 4)
    parameters = table.whole("parameters", None)
    tensors = table.wholes("tensors", None, least=1)
    buffers, state = table.whole("buffers", 0, least=0), table.number("state", 1.0, least=0.0)
    passed = table.shares("passed")
    table.close()
    if parameters is None and (tensors is None or len(tensors) == 1):
        raise ClusterError(f"{table.source}: model.parameters: it is needed: a whole number from 1")
    if tensors is not None and len(tensors) > 1:
        if parameters not in (None, sum(tensors)):
            table.wrong("parameters", f"the sum of the tensors' sizes, {sum(tensors)}")
        if passed and len(passed) != len(tensors):
            table.wrong("passed", f"a list with a number for each of the {len(tensors)} tensors")
        return Shape(tensors, width, buffers, state, passed)
    if passed:
        table.wrong("passed", "known without the sizes of all tensors: give tensors as a list")
    number = tensors[0] if tensors else -(-parameters // TENSOR)
    if number > parameters:
        table.wrong("tensors", f"a number of tensors that {parameters} parameters can fill")
    return Shape(equal(parameters, number), width, buffers, state)


def _profile(table: Table) -> Profile:
    found = Profile(
        script=table.text("script", ""),
        text=table.text("text", ""),
        batch=table.whole("batch_size", None),
        samples=table.whole("samples", None),
        forward=table.number("forward", 0.0, least=0.0),
        backward=table.number("backward", 0.0, least=0.0),
        device=table.text("device", ""),
        efficiency=table.number("efficiency", None, most=10.0),
        units=table.samples("units") if "units" in table else (),
        push=table.duration("push", None),
        pull=table.duration("pull", None),
    )
    table.close()
    return found
