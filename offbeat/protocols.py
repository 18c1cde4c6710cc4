"""The ways to keep data-parallel workers in step, each written once.

A protocol is a frozen record of its settings and one generator, `run(w)`: the paper's pseudo-code on
the verbs of `offbeat.worker.Worker`. When `w.running` turns false its loop ends, and what follows the
loop drains what is still in flight.

Symbols: x parameters, η learning rate, g gradient, n workers, k a worker's own step, v an update of the
shards, σ its staleness.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from offbeat.worker import Handle, Until, Worker, passed

Program = Generator[Handle, None, None]

MERGES = ("mix", "delta")
RATES = ("plain", "staleness")
AUTO = "auto"


class Protocol(ABC):
    """Base of every protocol.

    `home` tells where the parameters live while it runs: `"replicas"` (each member holds all of them)
    or `"shards"` (the hosts hold slices of them, each with an optimizer). `word` is its name in a plan.
    """

    home: ClassVar[str] = "replicas"
    word: ClassVar[str]

    @abstractmethod
    def run(self, w: Worker) -> Program:
        """The protocol over worker `w`."""

    def current(self, w: Worker) -> Protocol:
        """The protocol in charge at `w`'s units and progress (a `Switch` holds several)."""
        return self

    def parts(self) -> tuple[Protocol, ...]:
        """The protocols that are in charge one after the other."""
        return (self,)

    def __str__(self) -> str:
        from offbeat.plan import to_text

        return to_text(self)


@dataclass(frozen=True)
class BSP(Protocol):
    """Bulk synchronous parallel, the mini-batch SGD that DDP computes:

        x_{k+1} = x_k − η · (1/n) Σ_j g(x_k, s_k^j)

    Every step waits for all members. Sync-Switch's first protocol; DaSGD's baseline.
    """

    word: ClassVar[str] = "bsp"

    def run(self, w: Worker) -> Program:
        while w.running:
            yield w.gradient(mean=True)
            w.step()


@dataclass(frozen=True)
class LocalSGD(Protocol):
    """Local SGD (Stich 2019; DaSGD, fig. 3b): every worker steps alone and all adopt the mean of their
    parameters and floating-point buffers after each `period` steps (τ in the DaSGD paper):

        x_{k+1} = x_k − η g(x_k);   x ← (1/n) Σ_j x^j   when τ divides k
    """

    word: ClassVar[str] = "local"
    period: int = 4

    def __post_init__(self) -> None:
        _whole("local", "period", self.period, 1)

    def run(self, w: Worker) -> Program:
        while w.running:
            yield w.gradient()
            w.step()
            if w.clock % self.period == 0:
                mean = w.average()
                yield mean
                w.mix(mean, keep=0)


@dataclass(frozen=True)
class DaSGD(Protocol):
    """Local SGD whose average lands `delay` steps late, hidden behind them (Zhou et al., "DaSGD:
    Squeezing SGD Parallelization Performance in Distributed Training Using Delayed Averaging").

    After every `period` local steps (τ) a worker starts averaging a snapshot x̃ of its parameters; the
    mean is merged after `delay` more steps (d), 0 ≤ d < τ:

        merge="mix", the paper's:  x ← ξ·x + (1 − ξ)·mean        ξ is `keep`, the local share
        merge="delta":             x ← x + (1 − ξ)·(mean − x̃)    keeps the d steps taken meanwhile whole

    The paper chooses the smallest d with t_c < d·t_p (one average takes less time than d steps), and
    τ = d + 1. `period="auto"` does so while the job runs, from what the members measure (`Worker.hiding`),
    and chooses anew when that has changed. `delay=0, keep=0` is LocalSGD.
    """

    word: ClassVar[str] = "dasgd"
    period: int | str = 2
    delay: int = 1
    keep: float = 0.25
    merge: str = "mix"

    def __post_init__(self) -> None:
        if self.period == AUTO:
            if self.delay != DaSGD.delay:
                raise ValueError(f"dasgd(auto) chooses the delay, too: leave out delay={self.delay!r}")
        else:
            _whole("dasgd", "period", self.period, 1, ", or auto")
        _whole("dasgd", "delay", self.delay, 0)
        if isinstance(self.period, int) and self.delay >= self.period:
            raise ValueError(
                f"dasgd needs 0 <= delay < period, so that one average lands before the next starts; "
                f"got delay={self.delay}, period={self.period}"
            )
        number = isinstance(self.keep, int | float) and not isinstance(self.keep, bool)
        if not number or not 0 <= self.keep < 1:
            raise ValueError(f"dasgd needs 0 <= keep < 1, the local share of a merge; got keep={self.keep}")
        if self.merge not in MERGES:
            raise ValueError(f"dasgd knows merge=mix and merge=delta; got merge={self.merge}")

    def timing(self, hiding: int) -> tuple[int, int]:
        """Period and delay, where `hiding` steps hide an average."""
        return (self.period, self.delay) if isinstance(self.period, int) else (hiding + 1, hiding)

    def run(self, w: Worker) -> Program:
        merge = w.mix if self.merge == "mix" else w.shift
        mean: Handle | None = None
        while w.running:
            yield w.gradient()
            w.step()
            period, delay = self.timing(w.hiding)
            if mean is None and w.clock % period == 0:
                mean, due = w.average(snapshot=self.merge == "delta"), w.clock + delay
            if mean and w.clock == due:
                yield mean
                merge(mean, self.keep)
                mean = None
        if mean:  # a switch or the end came first: take the average now
            yield mean
            merge(mean, self.keep)


@dataclass(frozen=True)
class SSP(Protocol):
    """Stale synchronous parallel (Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous
    Parallel Parameter Server"): workers push gradients to the shards, which apply each alone, and none
    runs more than `bound` steps (s) ahead of the slowest:

        x_{v+1} = x_v − (η/n) · g(x_{v−σ})             lr="plain"
        x_{v+1} = x_v − (η/n) · g(x_{v−σ}) / (1 + σ)   lr="staleness", after Zhang et al. 2016,
                                                       "Staleness-aware Async-SGD"

    At clock k a worker computes on parameters that hold each other worker's first k − s updates, since its
    pull waits for them (as in the paper), and none after the first k + s, since the others' pushes wait
    for its pull: else a fast worker's next push could be in a slow one's parameters. Hence `SSP(0)` is
    BSP, for plain SGD, and `SSP(inf)` is ASP.
    """

    home: ClassVar[str] = "shards"
    word: ClassVar[str] = "ssp"
    bound: float = 3
    lr: str = "plain"

    def __post_init__(self) -> None:
        if self.bound != inf:
            _whole("ssp", "bound", self.bound, 0, ", or inf")
        _rate("ssp", self.lr)

    def run(self, w: Worker) -> Program:
        while w.running:
            yield w.gradient()
            yield w.push(after=w.clock - self.bound, damped=self.lr == "staleness")
            yield w.pull(after=w.clock - self.bound)


@dataclass(frozen=True)
class ASP(Protocol):
    """Asynchronous parallel: workers push gradients to the shards, which apply each alone, and take the
    newest parameters; nobody waits for anybody. Sync-Switch's second protocol:

        x_{v+1} = x_v − (η/n) · g(x_{v−σ})             σ: updates since this worker's pull

    lr="staleness" divides by 1 + σ, as in `SSP`. `ASP()` is `SSP(inf)`.
    """

    home: ClassVar[str] = "shards"
    word: ClassVar[str] = "asp"
    lr: str = "plain"

    def __post_init__(self) -> None:
        _rate("asp", self.lr)

    def run(self, w: Worker) -> Program:
        while w.running:
            yield w.gradient()
            yield w.push(damped=self.lr == "staleness")
            yield w.pull()


@dataclass(frozen=True)
class Switch(Protocol):
    """`first` up to `at`, then `then`. Sync-Switch (Li et al., "Sync-Switch: Hybrid Parameter
    Synchronization for Distributed Deep Learning") is BSP, then ASP.

    `at` is a share of the job's progress (a float, 0.0 to 1.0) or a number of units (an int). Where
    switches nest, every `at` counts from the job's beginning.
    """

    word: ClassVar[str] = "switch"
    first: Protocol
    then: Protocol
    at: float | int

    def __post_init__(self) -> None:
        for part in (self.first, self.then):
            if not isinstance(part, Protocol):
                raise TypeError(f"a switch joins two protocols, such as BSP(); got {part!r}")
        if isinstance(self.at, int) and not isinstance(self.at, bool) and self.at >= 0:
            return
        if not (isinstance(self.at, float) and 0 <= self.at <= 1):
            raise ValueError(
                f"a switch happens at a share of the progress, 0.0 to 1.0, or at a whole number of units; "
                f"got at={self.at!r}"
            )

    def current(self, w: Worker) -> Protocol:
        return (self.then if passed(w, self.at) else self.first).current(w)

    def parts(self) -> tuple[Protocol, ...]:
        return (*self.first.parts(), *self.then.parts())

    def run(self, w: Worker) -> Program:
        while not passed(w, self.at):
            # Again, if a member has left and less is done than the others reckoned with.
            while not passed(w, self.at) and w.running:
                yield from self.first.run(Until(w, self.at))
            if not passed(w, self.at):  # a checkpoint interrupts it, or the job is over
                break
            yield w.settle(then=self)
        yield from self.then.run(w)


def is_auto(protocol: Protocol) -> bool:
    """Whether it goes by `Worker.hiding`."""
    return isinstance(protocol, DaSGD) and protocol.period == AUTO


def _whole(word: str, name: str, value: object, least: int, other: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{word} needs a whole {name} of at least {least}{other}; got {name}={value!r}")


def _rate(word: str, value: object) -> None:
    if value not in RATES:
        raise ValueError(f"{word} knows lr=plain and lr=staleness; got lr={value}")
