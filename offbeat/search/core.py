"""The offline policy of Sync-Switch (section IV-B1, Algorithm B): a binary search for the smallest share of
BSP that ends at BSP's accuracy. Pure: it is told what trials have given and says which it needs.

    low, high = 0, 1                        # ASP alone and BSP alone
    repeat `depth` times:
        share = (low + high) / 2
        if the mean accuracy of `runs` trials of share >= target - tolerance:
            high = share                    # enough: try to switch earlier
        else:
            low = share
    the answer is high

The target is the mean accuracy of `target_runs` trials of BSP alone, or known. Among the shares that pass,
the smallest is the fastest; that, and the search itself, rests on two assumptions, which every trial is
checked against (`doubts`): BSP is slower than what follows it, and accuracy does not fall as its share rises.

What the search knows is a function of the trials alone, in any order: `look(settings, trials)`. So a search
that was interrupted goes on from what its trials have left."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import fsum, inf, sqrt
from statistics import NormalDist

BSP = 1.0
"""The share of a trial that is BSP from beginning to end."""


class SearchError(ValueError):
    """A search that cannot be, or cannot go on."""


@dataclass(frozen=True)
class Settings:
    """How a search is made.

    runs: trials of a share (the paper's r). target_runs: trials of BSP alone (n_bsp), unless the `target`
    accuracy is known from earlier ones. depth: how often the interval is halved. tolerance: how far below the
    target a share's mean may lie, in accuracy (0.01 is a point; the paper's alpha_threshold). grain: shares
    are multiples of it, as a job of `total` units of `n` workers knows only multiples of n / total; 0: any.

    Beyond the paper. early: a share gets no more trials when no accuracies of the rest, from 0 to 1, could
    change its verdict. confidence: a share's mean must lie on one side of the bar beyond the trials' own
    noise, with at most the chance `1 - confidence` of the wrong side; else it gets more trials, up to
    `max_runs`, after which the mean decides.

    Raises SearchError for values that cannot be meant.
    """

    runs: int = 3
    target_runs: int = 3
    depth: int = 5
    tolerance: float = 0.01
    target: float | None = None
    grain: float = 0.0
    early: bool = False
    confidence: float | None = None
    max_runs: int = 10

    def __post_init__(self) -> None:
        for name in ("runs", "target_runs", "depth"):
            if getattr(self, name) < 1:
                raise SearchError(f"{_option(name)} {getattr(self, name)}: a whole number from 1")
        if not 0 <= self.tolerance < 1:
            raise SearchError(f"--tolerance {self.tolerance:g}: a share of 1, such as 0.01 for a point")
        if self.target is not None and not 0 < self.target <= 1:
            raise SearchError(f"--target {self.target:g}: an accuracy above 0 and up to 1, such as 0.92")
        if not 0 <= self.grain < 0.5:
            raise SearchError(f"the job is too short: its switch points are {self.grain:.0%} of it apart")
        if self.confidence is not None:
            if not 0.5 < self.confidence < 1:
                raise SearchError(f"--confidence {self.confidence:g}: above 0.5 and below 1, such as 0.95")
            if self.max_runs < max(self.runs, 2):
                raise SearchError(
                    f"--max-runs {self.max_runs}: at least the {max(self.runs, 2)} that a share begins with"
                )
            if self.early:
                raise SearchError("--early and --confidence are two rules for when to stop: give one of them")

    @property
    def first(self) -> int:
        """Trials that every share gets, if none diverges and `early` doesn't end it: noise shows in two."""
        return self.runs if self.confidence is None else max(2, self.runs)


@dataclass(frozen=True)
class Trial:
    """A training that is over. share: of BSP, from 0 to 1. number: among the share's trials, from 0.
    accuracy: at its end, from 0 to 1; None: it has diverged. seconds: how long it took."""

    share: float
    number: int
    accuracy: float | None
    seconds: float


@dataclass(frozen=True)
class Wish:
    """A trial that is needed: the `number`-th of `share`."""

    share: float
    number: int


@dataclass(frozen=True)
class Point:
    """What is known of a share. `passed` is None while it isn't decided; `why` says how it was."""

    share: float
    trials: tuple[Trial, ...]
    passed: bool | None = None
    why: str = ""

    @property
    def mean(self) -> float | None:
        """Mean accuracy of the trials; None where one diverged or none is there."""
        values = [trial.accuracy for trial in self.trials]
        return None if not values or None in values else mean(v for v in values if v is not None)

    @property
    def seconds(self) -> float | None:
        """Mean time of the trials that did not diverge."""
        times = [trial.seconds for trial in self.trials if trial.accuracy is not None]
        return mean(times) if times else None


@dataclass(frozen=True)
class Stand:
    """Where a search stands. `points` in the order of the search, BSP's own first unless the target was
    known; `wishes`: trials that it needs now, any of them at any time; `share`: the answer, when it is over
    (1: BSP alone)."""

    points: tuple[Point, ...]
    target: float | None
    wishes: tuple[Wish, ...]
    share: float | None

    def point(self, share: float) -> Point | None:
        return next((point for point in self.points if point.share == share), None)


def look(settings: Settings, trials: Iterable[Trial]) -> Stand:
    """Where a search stands when these trials are over. Raises SearchError when BSP itself has diverged,
    which leaves no target."""
    by_share: dict[float, dict[int, Trial]] = {}
    for trial in trials:
        by_share.setdefault(trial.share, {})[trial.number] = trial
    points: list[Point] = []
    wishes: list[Wish] = []
    target = settings.target
    if target is None:
        point, target = _bsp(settings, by_share.get(BSP, {}))
        points.append(point)
        if target is None:
            wishes += _missing(BSP, settings.target_runs, by_share)
    low, high = 0.0, 1.0
    for _ in range(settings.depth):
        share = midpoint(low, high, settings.grain)
        if share is None:
            break
        point = _judge(settings, share, by_share.get(share, {}), target, points)
        points.append(point)
        if point.passed is None:
            known = by_share.get(share, {})
            count = settings.first
            if settings.confidence is not None and target is not None:
                count = max(count, 1 + _ready(known))
            return Stand(tuple(points), target, (*wishes, *_missing(share, count, by_share)), None)
        if point.passed:
            high = share
        else:
            low = share
    if wishes:  # every trial of the first shares diverged, while BSP's go on
        return Stand(tuple(points), target, tuple(wishes), None)
    return Stand(tuple(points), target, (), high)


class Search:
    """`look`, with a memory of what was asked for."""

    def __init__(self, settings: Settings, trials: Iterable[Trial] = ()):
        self.settings = settings
        self.trials: list[Trial] = list(trials)
        self.out: set[Wish] = set()
        self.stand = look(settings, self.trials)

    @property
    def over(self) -> bool:
        return self.stand.share is not None

    def ask(self) -> Wish | None:
        """A trial to begin now, or None when all that are needed are under way."""
        wish = next((wish for wish in self.stand.wishes if wish not in self.out), None)
        if wish is not None:
            self.out.add(wish)
        return wish

    def tell(self, trial: Trial) -> None:
        """A trial is over."""
        self.out.discard(Wish(trial.share, trial.number))
        self.trials.append(trial)
        self.stand = look(self.settings, self.trials)

    @property
    def vain(self) -> set[Wish]:
        """Trials that are under way and that nothing depends on any more: their share is decided."""
        return self.out - set(self.stand.wishes)


def midpoint(low: float, high: float, grain: float = 0.0) -> float | None:
    """The share between two, as a multiple of `grain`; None when there is none between them."""
    middle = (low + high) / 2
    if grain:
        middle = round(middle / grain) * grain
        if not low + grain / 2 < middle < high - grain / 2:
            return None
    return middle


def doubts(points: Iterable[Point], tolerance: float) -> list[str]:
    """Where trials contradict the search's assumptions, beyond twice the standard error of a difference
    (where the repeats tell one) and beyond `tolerance`, or 2 % of the time."""
    known = sorted((p for p in points if p.mean is not None), key=lambda point: point.share)
    found = []
    for less, more in pairwise(known):
        a, b = (_values(point, "seconds") for point in (less, more))
        if mean(a) - mean(b) > max(2 * _error(a, b), 0.02 * mean(b)):
            found.append(
                f"{_percent(less.share)} of BSP took {mean(a):.4g} s and {_percent(more.share)} of it "
                f"{mean(b):.4g} s: BSP is not the slower protocol here, and switching earlier gains nothing"
            )
    for i, less in enumerate(known):
        for more in known[i + 1 :]:
            a, b = (_values(point, "accuracy") for point in (less, more))
            if mean(a) - mean(b) > max(2 * _error(a, b), tolerance):
                found.append(
                    f"accuracy falls as BSP's share rises: {mean(a):.4f} at {_percent(less.share)}, "
                    f"{mean(b):.4f} at {_percent(more.share)}; the search may have missed a better share"
                )
    return found


def _bsp(settings: Settings, known: dict[int, Trial]) -> tuple[Point, float | None]:
    """BSP's own point, and the target once it is known."""
    trials = tuple(known[n] for n in sorted(known) if n < settings.target_runs)
    if any(trial.accuracy is None for trial in trials):
        raise SearchError(
            "a run of BSP alone has diverged, so there is no accuracy to aim at: mend the training first "
            "(a smaller learning rate, a warm-up)"
        )
    point = Point(BSP, trials)
    if len(trials) < settings.target_runs:
        return point, None
    return Point(BSP, trials, True, f"the target is the mean of {len(trials)}"), point.mean


def _judge(
    settings: Settings, share: float, known: dict[int, Trial], target: float | None, before: Sequence[Point]
) -> Point:
    most = settings.runs if settings.confidence is None else settings.max_runs
    trials = tuple(known[n] for n in sorted(known) if n < most)
    if any(trial.accuracy is None for trial in trials):
        return Point(share, trials, False, "diverged")
    if target is None:
        return Point(share, trials)
    bar = target - settings.tolerance
    values = [trial.accuracy or 0.0 for trial in trials]
    if settings.confidence is not None:
        return _test(settings, share, trials, bar, before)
    left = settings.runs - len(values)
    if left <= 0:
        return Point(share, trials, mean(values) >= bar, "")
    # Only a failure can be certain: whatever the mean so far, a trial that diverges would fail the share.
    if settings.early and fsum([*values, *[1.0] * left]) / settings.runs < bar:
        return Point(share, trials, False, "whatever the rest")
    return Point(share, trials)


def _test(
    settings: Settings, share: float, trials: tuple[Trial, ...], bar: float, before: Sequence[Point]
) -> Point:
    """A t-test after each trial from the first few on, by the noise of this share's trials and all before it
    together. The chance of an error is divided among the looks (Bonferroni), so that looking often costs none
    of it. Looks only at trials without a gap, in their order, and never at later shares: the verdict stays
    what it was when more is known."""
    assert settings.confidence is not None
    groups = [_values(point, "accuracy") for point in before if point.mean is not None]
    bsp = next((len(point.trials) for point in before if point.share == BSP), 0)
    ready = [t.accuracy or 0.0 for n, t in enumerate(trials) if t.number == n]
    chance = (1 - settings.confidence) / (settings.max_runs - settings.first + 1)
    for count in range(settings.first, len(ready) + 1):
        mine = ready[:count]
        spread, freedom = _pooled([*groups, mine])
        error = spread * sqrt(1 / count + (1 / bsp if bsp else 0.0))
        distance = mean(mine) - bar
        limit = quantile(1 - chance, freedom) * error
        seen = trials[:count]
        if abs(distance) > limit:
            return Point(share, seen, distance > 0, f"by {abs(distance):.4f}, beyond noise of {limit:.4f}")
        if count >= settings.max_runs:
            return Point(
                share, seen, distance >= 0, f"by the mean: within noise of {limit:.4f} after {count} trials"
            )
    return Point(share, trials)


def _ready(known: dict[int, Trial]) -> int:
    """Trials without a gap from the first on."""
    return next(n for n in range(len(known) + 1) if n not in known)


def _missing(share: float, count: int, known: dict[float, dict[int, Trial]]) -> list[Wish]:
    return [Wish(share, n) for n in range(count) if n not in known.get(share, {})]


def mean(values: Iterable[float]) -> float:
    """Correctly rounded sum over count: an inequality between sums holds between means too."""
    numbers = list(values)
    return fsum(numbers) / len(numbers)


def _values(point: Point, name: str) -> list[float]:
    return [getattr(trial, name) for trial in point.trials if trial.accuracy is not None]


def _pooled(groups: Iterable[Sequence[float]]) -> tuple[float, int]:
    """Standard deviation within the groups, and its degrees of freedom."""
    kept = [group for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in kept)
    squares = fsum((value - mean(group)) ** 2 for group in kept for value in group)
    return (sqrt(squares / freedom) if freedom else inf), freedom


def _error(a: Sequence[float], b: Sequence[float]) -> float:
    """Standard error of the difference of two means; 0 where there are no repeats to tell."""
    spread, freedom = _pooled([a, b])
    return spread * sqrt(1 / len(a) + 1 / len(b)) if freedom else 0.0


@lru_cache(maxsize=4096)
def quantile(chance: float, freedom: int) -> float:
    """Student's t: the value below which a share `chance` (above one half) lies."""
    if freedom < 1:
        return inf
    low, high = 0.0, 2 * NormalDist().inv_cdf(chance) + 1
    while _below(high, freedom) < chance:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _below(middle, freedom) < chance else (low, middle)
    return high


def _below(t: float, freedom: int) -> float:
    """Student's t distribution function for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and
    4)."""
    angle = math.atan2(t, sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    if freedom % 2:
        total, term = angle, cosine
        if freedom > 1:
            total += sine * term
        for k in range(3, freedom, 2):
            term *= cosine * cosine * (k - 1) / k
            total += sine * term
        inside = 2 * total / math.pi
    else:
        total = term = 1.0
        for k in range(2, freedom, 2):
            term *= cosine * cosine * (k - 1) / k
            total += term
        inside = sine * total
    return 0.5 + inside / 2


def _percent(share: float) -> str:
    return f"{100 * share:.4g}%"


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
