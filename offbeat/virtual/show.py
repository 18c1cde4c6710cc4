"""What `offbeat cluster show` prints: a description as the cost model understands it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from offbeat.protocols import ASP, BSP
from offbeat.virtual.cluster import ALGORITHMS, Cluster, Compute, Group, Link, Shape, Straggler, equal
from offbeat.virtual.cost import Costs

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

SIZES = (64e3, 1e6, 16e6, 256e6)
"""Bytes of the all-reduces that are shown beside the model's own."""
STEPS = 100
"""Of each worker, for the speeds that are shown."""


def parts(cluster: Cluster, parameters: int | None = None) -> Iterator[RenderableType]:
    """The tables and lines for a cluster that knows its size. parameters: the model's, instead of the
    description's; without either, what depends on a model is left out."""
    shape = cluster.model if parameters is None else Shape(equal(parameters))
    costs = Costs(cluster, 0)
    hosts = len(set(costs.host_of[: costs.workers]))
    yield (
        f"{cluster.name}: {_several(costs.workers, 'worker')} on {_several(hosts, 'host')} ({cluster.source})"
    )
    yield _groups(cluster)
    inside = cluster.host
    yield (
        f"within a host: {rate(inside.rate, bits=False)}, {time(inside.latency)}; "
        f"backward: {100 * cluster.backward:.3g}% of a unit"
    )
    yield _allreduces(cluster, shape)
    service = cluster.shards
    applied = rate(service.apply, bits=False)
    yield f"shards: pushes applied at {applied} per host, {time(service.overhead)} each"
    yield from _events(cluster)
    if shape is None:
        yield "speeds: give --parameters, or [model] in the file"
    else:
        yield from _speeds(cluster, shape)


def _groups(cluster: Cluster) -> Table:
    table = _table("ranks", "hosts", "per host", "unit", "update", "NIC", "latency")
    rank = 0
    for group in cluster.groups:
        count = group.count or 0
        per_host = min(group.per_host or count, count)
        ranks = f"{rank}" if count == 1 else f"{rank}–{rank + count - 1}"
        table.add_row(
            *(ranks, str(-(-count // per_host)), str(per_host)),
            *(_unit(group), time(group.compute.update * group.slow)),
            *(_nic(group.link), time(group.link.latency)),
        )
        rank += count
    return table


def _nic(link: Link) -> str:
    return rate(link.rate) + (f", burst {time(link.burst)}" if link.burst else "")


def _unit(group: Group) -> str:
    compute: Compute = group.compute
    text = time(compute.unit * group.slow)
    if compute.kind == "lognormal":
        text += f" on average, lognormal, σ {compute.sigma:g}"
    elif compute.kind == "samples":
        text += f" on average of {len(compute.samples)} samples"
    return text + (f" ({group.slow:g}× slower)" if group.slow != 1 else "")


def _allreduces(cluster: Cluster, shape: Shape | None) -> Table:
    chosen = cluster.allreduce.algorithm
    heads = [f"{name} (used)" if name == chosen else name for name in ALGORITHMS]
    table = _table("all-reduce of", *heads)
    rows = [(amount(size), size) for size in SIZES]
    if shape is not None:
        model = float(shape.parameters * shape.width)
        rows.append((f"the model, {amount(model)}", model))
    every = {
        name: Costs(replace(cluster, allreduce=replace(cluster.allreduce, algorithm=name), stragglers=()), 0)
        for name in ALGORITHMS
    }
    members = tuple(range(cluster.size or 1))
    for label, size in rows:
        table.add_row(label, *(time(every[name].allreduce(size, members, 0.0)) for name in ALGORITHMS))
    return table


def _events(cluster: Cluster) -> Iterator[str]:
    for straggler in cluster.stragglers:
        yield f"straggler: {_straggler(straggler)}"
    for failure in cluster.failures:
        again = "" if failure.restart is None else f", and is there again {time(failure.restart)} later"
        yield f"failure: worker {failure.worker} dies at {time(failure.at)}{again}"
    for join in cluster.joins:
        yield f"join: {_several(join.count, 'newcomer')} at {time(join.at)}"
    if cluster.switch or cluster.membership:
        yield (
            f"added to each switch of protocols: {time(cluster.switch)}; to each change of members: "
            f"{time(cluster.membership)}"
        )


def _straggler(straggler: Straggler) -> str:
    how = []
    if straggler.slow != 1:
        how.append(f"{straggler.slow:g}× slower")
    if straggler.latency:
        how.append(f"exchanges {time(straggler.latency)} longer")
    if straggler.every is None:
        who = f"worker{'s' if len(straggler.workers) > 1 else ''} {', '.join(map(str, straggler.workers))}"
        when = f"at {', '.join(map(time, straggler.at))}"
    else:
        who, when = f"{_several(straggler.count, 'worker')} at random", f"every {time(straggler.every)} or so"
    length = "to the end" if straggler.seconds == inf else f"for {time(straggler.seconds)}"
    return f"{who} {when}, {length}: {' and '.join(how)}"


def _speeds(cluster: Cluster, shape: Shape) -> Iterator[str]:
    from offbeat.virtual.timing import Model, simulate

    model, workers = Model.of(shape), cluster.size or 1
    calm = replace(cluster, stragglers=(), failures=(), joins=())
    buckets = _several(len(model.buckets()), "bucket")
    yield f"without stragglers, {STEPS} steps of each worker, {shape.parameters:,} parameters in {buckets}:"
    for protocol, alike in ((BSP(), workers), (ASP(), 1)):
        units = STEPS * workers
        speed = units / simulate(protocol, units, Costs(calm, 0), model).seconds
        yield f"  {type(protocol).__name__} {speed / alike:.4g} steps/s, {speed:.4g} units/s"


def _table(*heads: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for index, head in enumerate(heads):
        table.add_column(head, justify="right" if index else "left")
    return table


def _several(count: int, name: str) -> str:
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def time(seconds: float) -> str:
    """A time in the unit that suits it, with three or four digits."""
    if seconds == 0:
        return "0"
    scale, unit = next(row for row in ((1.0, "s"), (1e-3, "ms"), (0.0, "us")) if seconds >= row[0])
    return f"{seconds / (scale or 1e-6):.4g} {unit}"


def rate(value: float, bits: bool = True) -> str:
    """Bytes per second as bits or bytes."""
    if value == inf:
        return "unlimited"
    return f"{_scaled(8 * value)}bit/s" if bits else f"{_scaled(value)}B/s"


def amount(size: float) -> str:
    return f"{_scaled(size)}B"


def _scaled(value: float) -> str:
    for prefix, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.4g} {prefix}"
    return f"{value:.4g} "
