"""What a virtual cluster is made of.

Times are in seconds, rates in bytes per second, sizes in bytes. A description says nothing of a job: the
number of workers, the plan and the wire's number format come from the command.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from offbeat.cluster.sizes import IN_FLIGHT
from offbeat.virtual.keys import ClusterError as ClusterError

ALGORITHMS = ("ring", "tree", "butterfly", "hierarchical")
KINDS = ("constant", "lognormal", "samples")

TENSOR = 100_000
"""Parameters of a tensor where a description doesn't say."""


@dataclass(frozen=True)
class Compute:
    """How long a worker computes. `unit` is the mean of one mini-batch's forward and backward, `sigma` the
    lognormal's standard deviation of the logarithm, `samples` what the empirical distribution draws from.
    `update` is the optimizer's step."""

    unit: float
    kind: str = "constant"
    sigma: float = 0.0
    samples: tuple[float, ...] = ()
    update: float = 0.0


@dataclass(frozen=True)
class Link:
    """`latency` is one way. A host's NIC moves `rate` in each direction at once, for all its workers; after a
    pause, what it moves in `burst` seconds passes at once."""

    rate: float
    latency: float
    burst: float = 0.0


@dataclass(frozen=True)
class Group:
    """`count` workers of one kind (None: the rest of the cluster), `per_host` of them on each host (None:
    all on one), `slow` times slower than `compute` says."""

    count: int | None
    per_host: int | None
    slow: float
    compute: Compute
    link: Link


@dataclass(frozen=True)
class Allreduce:
    """`overhead`: seconds of each call, and `per_member` for each member, beside what the links take.
    `rounds`: how often a call meets a straggler's added latency (None: as the algorithm does). `in_flight`:
    how many of BSP's may be under way at a time: the threads of the gradients' gloo group; NCCL 1."""

    algorithm: str = "ring"
    overhead: float = 0.0
    per_member: float = 0.0
    rounds: float | None = None
    in_flight: int = IN_FLIGHT


@dataclass(frozen=True)
class ShardService:
    """A host applies pushed gradients at `apply` bytes per second, each push after `overhead` seconds."""

    apply: float
    overhead: float


@dataclass(frozen=True)
class Straggler:
    """For `seconds` a worker computes `slow` times slower and each of its exchanges takes `latency` longer.

    Either `workers`, each of them at each of the moments `at`; or, where `every` is given, `count` workers
    drawn afresh each time, at the moments of a Poisson process with that mean distance."""

    seconds: float
    slow: float = 1.0
    latency: float = 0.0
    workers: tuple[int, ...] = ()
    at: tuple[float, ...] = ()
    every: float | None = None
    count: int = 1


@dataclass(frozen=True)
class Failure:
    """A worker dies; `restart` seconds later a new process of its rank is there, if at all."""

    worker: int
    at: float
    restart: float | None = None


@dataclass(frozen=True)
class Join:
    """`count` newcomers."""

    at: float
    count: int


@dataclass(frozen=True)
class Shape:
    """A model as far as a cluster's description says: elements of each parameter tensor in the model's
    order, and bytes of an element; bytes of its buffers; the optimizer's state in parameters' sizes; and the
    share of backward after which each gradient is there, if that is known."""

    sizes: tuple[int, ...]
    width: int = 4
    buffers: int = 0
    state: float = 1.0
    passed: tuple[float, ...] = ()

    @property
    def parameters(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True)
class Profile:
    """What a description was measured with (`offbeat profile`). script: its name; text: a hash of what it
    says. batch: samples of a unit. samples: of its data set. forward, backward: operations of a sample.
    device: where, and `efficiency`: the share of its peak that was reached. units: each rank's median
    seconds. push, pull: seconds of a push and of its pull."""

    script: str = ""
    text: str = ""
    batch: int | None = None
    samples: int | None = None
    forward: float = 0.0
    backward: float = 0.0
    device: str = ""
    efficiency: float | None = None
    units: tuple[float, ...] = ()
    push: float | None = None
    pull: float | None = None

    @property
    def flop(self) -> float:
        """Operations of a sample, forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Cluster:
    """`size` is the number of workers where nobody asks for another, None where the groups tell. `backward`
    is backward's share of a unit, `host` the way between workers of one host; `switch` and `membership` are
    seconds added to each switch of protocols and to each change of the members."""

    name: str
    source: str
    size: int | None
    groups: tuple[Group, ...]
    backward: float
    host: Link
    allreduce: Allreduce
    shards: ShardService
    stragglers: tuple[Straggler, ...] = ()
    failures: tuple[Failure, ...] = ()
    joins: tuple[Join, ...] = ()
    switch: float = 0.0
    membership: float = 0.0
    model: Shape | None = None
    profile: Profile | None = None

    @property
    def newcomers(self) -> int:
        """Workers that come later."""
        return sum(join.count for join in self.joins)

    @property
    def workers(self) -> int | None:
        """How many there are by itself: None where one group is the rest and there is no `size`."""
        counts = [group.count for group in self.groups]
        return self.size if None in counts else sum(count or 0 for count in counts)

    def sized(self, workers: int | None = None) -> Cluster:
        """The same with `workers` workers (None: as many as it has by itself) and every group's count known.

        Raises ClusterError when the groups don't fit that number, or an event names a worker that isn't
        there."""
        number = self.workers if workers is None else workers
        if number is None:
            raise ClusterError(
                f"{self.source}: size: how many workers? give size, a count for every group, or the number "
                f"on the command line"
            )
        if number < 1:
            raise ClusterError(f"{self.source}: a cluster has at least one worker; got {number}")
        fixed = sum(group.count or 0 for group in self.groups)
        rest = number - fixed
        if all(group.count is not None for group in self.groups):
            if rest:
                raise ClusterError(
                    f"{self.source}: workers: the groups' counts make {fixed} workers, not {number}; leave "
                    f"one group's count out, and that group is the rest"
                )
        elif rest < 1:
            raise ClusterError(
                f"{self.source}: workers: the groups with a count have {fixed} workers, which leaves none of "
                f"{number} for the rest"
            )
        groups = tuple(g if g.count is not None else replace(g, count=rest) for g in self.groups)
        self._check_events(number)
        return replace(self, size=number, groups=groups)

    def _check_events(self, number: int) -> None:
        valid = f"the {number} workers are 0 to {number - 1}"
        for i, straggler in enumerate(self.stragglers, 1):
            for worker in straggler.workers:
                if worker >= number:
                    raise ClusterError(
                        f"{self.source}: stragglers[{i}]: there is no worker {worker}: {valid}"
                    )
            if straggler.count > number:
                raise ClusterError(
                    f"{self.source}: stragglers[{i}].count: {straggler.count} is more than all "
                    f"{number} workers"
                )
        for i, failure in enumerate(self.failures, 1):
            if failure.worker >= number:
                raise ClusterError(
                    f"{self.source}: failures[{i}].worker: there is no worker {failure.worker}: {valid}"
                )


def equal(parameters: int, tensors: int | None = None) -> tuple[int, ...]:
    """Sizes of `tensors` tensors of about equal size (None: of about 100,000 elements)."""
    tensors = -(-parameters // TENSOR) if tensors is None else tensors
    return tuple(parameters * (i + 1) // tensors - parameters * i // tensors for i in range(tensors))
