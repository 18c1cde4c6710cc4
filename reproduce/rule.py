"""When a row counts as reproduced: a rule computed from the figures.

A claim of the paper says that a figure lies between two bounds; what was measured lies in an interval: of a
mean, or of a difference of two, two standard errors to each side; of what is computed without chance, the
figure itself. The claim holds when the interval lies inside the bounds ("yes"), doesn't when it lies outside
("no"), and is undecided when it reaches over a bound: more seeds would tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from statistics import mean, stdev
from typing import Any

ERRORS = 2.0
"""Standard errors that an effect must exceed."""


@dataclass(frozen=True)
class Claim:
    """`what`, in `unit`, was measured to lie between low and high, and does so between least and most if the
    paper is right. middle: the measured figure."""

    what: str
    middle: float
    low: float
    high: float
    least: float = -inf
    most: float = inf
    unit: str = ""

    @property
    def verdict(self) -> str:
        if self.least <= self.low and self.high <= self.most:
            return "yes"
        return "no" if self.high < self.least or self.low > self.most else "undecided"

    @property
    def rule(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        if isfinite(self.least) and isfinite(self.most):
            return f"{self.what}: {shown(self.least)} to {shown(self.most)}{unit}"
        bound = f"≥ {shown(self.least)}" if isfinite(self.least) else f"≤ {shown(self.most)}"
        return f"{self.what} {bound}{unit}"

    @property
    def found(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        if self.low == self.high:
            return f"{shown(self.middle)}{unit}"
        if not isfinite(self.low):
            return f"{shown(self.middle)}{unit} (one seed: no error)"
        return f"{shown(self.middle)} ({shown(self.low)} to {shown(self.high)}){unit}"

    def as_json(self) -> dict[str, Any]:
        bounds = {name: getattr(self, name) for name in ("middle", "low", "high", "least", "most")}
        finite = {name: value if isfinite(value) else None for name, value in bounds.items()}
        return {"what": self.what, "unit": self.unit, **finite}

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Claim:
        """What `as_json` has made. Raises KeyError."""
        absent = {"low": -inf, "high": inf, "least": -inf, "most": inf, "middle": float("nan")}
        return cls(**{key: absent[key] if value is None else value for key, value in found.items()})


def shown(value: float) -> str:
    """Three digits, and no exponent where a person wants none."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}".replace("-", "−")


def verdict(claims: Sequence[Claim]) -> str:
    """Of a row: "yes" if all claims hold, "partly" if some do, "no" if none does and one is refuted, else
    "undecided". Raises ValueError without a claim."""
    found = [claim.verdict for claim in claims]
    if not found:
        raise ValueError("a row without a claim cannot be reproduced or not")
    if set(found) == {"yes"}:
        return "yes"
    return "partly" if "yes" in found else "no" if "no" in found else "undecided"


def error(values: Sequence[float]) -> float:
    """Standard error of the mean; infinite for a single value."""
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else inf


def average(
    what: str, values: Sequence[float], least: float = -inf, most: float = inf, unit: str = ""
) -> Claim:
    """A claim on a mean over seeds."""
    return combined(what, [(1, values)], least, most, unit)


def combined(
    what: str,
    parts: Sequence[tuple[float, Sequence[float]]],
    least: float = -inf,
    most: float = inf,
    unit: str = "",
) -> Claim:
    """A claim on a weighted sum of means: parts of (weight, values)."""
    middle = sum(weight * mean(values) for weight, values in parts)
    reach = ERRORS * sqrt(sum((weight * error(values)) ** 2 for weight, values in parts))
    return Claim(what, middle, middle - reach, middle + reach, least, most, unit)


def gap(
    what: str, a: Sequence[float], b: Sequence[float], least: float = -inf, most: float = inf, unit: str = ""
) -> Claim:
    """A claim on the mean of `a` less that of `b`."""
    return combined(what, [(1, a), (-1, b)], least, most, unit)


def exact(what: str, value: float, least: float = -inf, most: float = inf, unit: str = "") -> Claim:
    """A claim on what has no chance in it."""
    return Claim(what, value, value, value, least, most, unit)


def near(what: str, value: float, paper: float, within: float, unit: str = "") -> Claim:
    """... that it is the paper's figure, to a share `within` of it."""
    reach = abs(paper) * within
    return exact(what, value, paper - reach, paper + reach, unit)


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Mean ± standard deviation, for a table."""
    text = f"{mean(values):.{digits}f}"
    return f"{text} ± {stdev(values):.{digits}f}" if len(values) > 1 else text
