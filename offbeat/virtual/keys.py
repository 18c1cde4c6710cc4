"""Reads a cluster's description key by key: quantities with units, and errors in the user's own words."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

_DURATION = re.compile(r"([0-9.eE_+-]+)\s*([a-zµμ]+)")
_RATE = re.compile(r"([0-9.eE_+-]+?)\s*([kKMGT]?i?)(bit|bits|b|B|bytes?)(?:/s|ps)")
_PER_SECOND = {"ns": 10**9, "us": 10**6, "µs": 10**6, "μs": 10**6, "ms": 10**3, "s": 1}
_SECONDS = {"min": 60, "h": 3600}
_PREFIXES = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}

_ANY = object()


class ClusterError(ValueError):
    """A cluster's description that cannot be meant; the message names file, key, value and what is valid."""


class Table:
    """One table of a TOML file. Each method takes a key: its value once checked, or the default where there
    is none (without a default the key is needed). `close` refuses what nobody took.

    source: the file's name. path: the table's, such as `workers[2]`, "" for the file's top.
    """

    def __init__(self, source: str, path: str, values: dict[str, Any], general: Table | None = None):
        self.source, self.path, self._general = source, path, general
        self._values: dict[str, Any] = values if general is None else {**general._values, **values}
        self._own = values
        self._known: list[str] = []

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def close(self) -> None:
        for key in self._values:
            if key not in self._known:
                near = nearest(key, self._known)
                where = f"[{self.path}]" if self.path else "a cluster"
                self._raise(key, f"{where} has no such key; valid: {listed(self._known)}{near}")

    def wrong(self, key: str, valid: str) -> NoReturn:
        """Raises for a value that is there but cannot be."""
        self._raise(key, f"{self._values[key]!r} is not {valid}")

    def text(self, key: str, default: Any = _ANY) -> Any:
        return self._take(key, default, lambda v: v if isinstance(v, str) and v else None, "a text")

    def choice(self, key: str, valid: Sequence[str], default: Any = _ANY) -> Any:
        found = self._take(
            key, default, lambda v: v if isinstance(v, str) else None, f"one of {listed(valid)}"
        )
        if found not in valid and key in self._values:
            self._raise(key, f"{found!r} is not one of {listed(valid)}{nearest(found, valid)}")
        return found

    def whole(self, key: str, default: Any = _ANY, least: int = 1) -> Any:
        return self._take(key, default, lambda v: _whole(v, least), f"a whole number from {least}")

    def whole_or_all(self, key: str, default: Any = _ANY) -> Any:
        """None for "all"."""
        if self._values.get(key) == "all":
            self._known.append(key)
            return None
        return self._take(key, default, lambda v: _whole(v, 1), 'a whole number from 1, or "all"')

    def number(
        self,
        key: str,
        default: Any = _ANY,
        least: float | None = None,
        most: float = math.inf,
    ) -> Any:
        """A finite number from `least` on (None: above 0), to `most`."""
        valid = "a number " + ("above 0" if least is None else f"from {least:g}")
        valid += f" to {most:g}" if most < math.inf else ""

        def check(value: Any) -> float | None:
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                return None
            fits = (value > 0 if least is None else value >= least) and value <= most
            return float(value) if fits else None

        return self._take(key, default, check, valid)

    def duration(self, key: str, default: Any = _ANY, positive: bool = False, endless: bool = False) -> Any:
        """Seconds: a text with a unit, or a number of seconds; `endless`: "inf" too."""
        valid = 'a time such as "100 ms" (ns, us, ms, s, min, h; a number alone is seconds)'
        valid += (", above 0" if positive else "") + (', or "inf"' if endless else "")
        return self._take(key, default, lambda v: _duration(v, positive, endless), valid)

    def durations(self, key: str, default: Any = _ANY) -> Any:
        """A tuple of one or several times, in seconds."""

        def check(value: Any) -> tuple[float, ...] | None:
            rows = value if isinstance(value, list) else [value]
            found = [_duration(row, False, False) for row in rows]
            return None if not found or None in found else tuple(sorted(f for f in found if f is not None))

        valid = 'a time such as "100 s", or a list of times'
        return self._take(key, default, check, valid)

    def rate(self, key: str, default: Any = _ANY) -> Any:
        """Bytes per second."""
        return self._take(key, default, _rate, 'a rate such as "1 Gbit/s", "10 GB/s" or "inf"')

    def wholes(self, key: str, default: Any = _ANY, least: int = 0) -> Any:
        """A tuple of whole numbers: a list, or one number alone."""

        def check(value: Any) -> tuple[int, ...] | None:
            found = [_whole(row, least) for row in (value if isinstance(value, list) else [value])]
            return None if not found or None in found else tuple(f for f in found if f is not None)

        return self._take(key, default, check, f"a whole number from {least}, or a list of them")

    def samples(self, key: str) -> tuple[float, ...]:
        """Positive times, in seconds."""

        def check(value: Any) -> tuple[float, ...] | None:
            found = [_duration(row, True, False) for row in value] if isinstance(value, list) else []
            return None if not found or None in found else tuple(f for f in found if f is not None)

        found: tuple[float, ...] = self._take(key, _ANY, check, "a list of times above 0, in seconds")
        return found

    def shares(self, key: str) -> tuple[float, ...]:
        """Numbers from 0 to 1; none where the key is missing."""

        def check(value: Any) -> tuple[float, ...] | None:
            rows: list[Any] = value if isinstance(value, list) else [None]
            fits = all(isinstance(v, int | float) and not isinstance(v, bool) and 0 <= v <= 1 for v in rows)
            return tuple(map(float, rows)) if fits and rows else None

        found: tuple[float, ...] = self._take(key, (), check, "a list of numbers from 0 to 1")
        return found

    def table(self, key: str) -> Table:
        found = self._take(key, {}, lambda v: v if isinstance(v, dict) else None, f"a table: write [{key}]")
        return Table(self.source, f"{self.path}.{key}" if self.path else key, found)

    def tables(self, key: str) -> list[Table]:
        def check(value: Any) -> list[Any] | None:
            fits = isinstance(value, list) and all(isinstance(row, dict) for row in value)
            return value if fits else None

        rows = self._take(key, [], check, f"a list of tables: write [[{key}]] before each")
        return [Table(self.source, f"{key}[{i}]", row) for i, row in enumerate(rows, 1)]

    def over(self, general: Table) -> Table:
        """This table, and what it leaves out from `general`."""
        return Table(self.source, self.path, self._own, general)

    def take_known(self, keys: Iterable[str]) -> None:
        """These keys are read elsewhere."""
        self._known += keys

    def _take(self, key: str, default: Any, check: Callable[[Any], Any], valid: str) -> Any:
        self._known.append(key)
        if key not in self._values:
            if default is _ANY:
                self._raise(key, f"it is needed: {valid}")
            return default
        found = check(self._values[key])
        if found is None:
            self.wrong(key, valid)
        return found

    def _raise(self, key: str, message: str) -> NoReturn:
        path = self._general.path if self._general is not None and key not in self._own else self.path
        raise ClusterError(f"{self.source}: {path}{'.' if path else ''}{key}: {message}")


def line_of(text: str, error: str) -> int | None:
    """The line of a description's `text` with the key that an error begins with ("workers[2].slow: …");
    None where it is not written there (a key that is missing, or a base's)."""
    found = re.match(r"(?:(?P<table>[\w.]+?)(?:\[(?P<index>\d+)\])?\.)?(?P<key>\w+): ", error)
    if not found:
        return None
    table, count, here = found["table"] or "", int(found["index"] or 0), ""
    seen = 0
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*(\[\[?)\s*([\w.]+)\s*\]", line):
            here = header[2]
            seen += here == table
        elif here == table and seen >= count and re.match(rf"\s*{found['key']}\s*=", line):
            return number
    return None


def _whole(value: Any, least: int) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= least else None


def _duration(value: Any, positive: bool, endless: bool) -> float | None:
    seconds: float | None = None
    if isinstance(value, str):
        if value.strip() == "inf":
            return math.inf if endless else None
        if found := _DURATION.fullmatch(value.strip()):
            number, unit = _number(found[1]), found[2]
            if number is not None and unit in _PER_SECOND:
                seconds = number / _PER_SECOND[unit]
            elif number is not None and unit in _SECONDS:
                seconds = number * _SECONDS[unit]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
        if seconds == math.inf and endless:
            return seconds
    if seconds is None or not math.isfinite(seconds) or seconds < 0 or (positive and seconds == 0):
        return None
    return seconds


def _rate(value: Any) -> float | None:
    if not isinstance(value, str):
        return None
    if value.strip() == "inf":
        return math.inf
    found = _RATE.fullmatch(value.strip())
    number = _number(found[1]) if found else None
    if found is None or number is None or found[2] == "i":
        return None
    base = 1024 if found[2].endswith("i") else 1000
    bits = found[3] in ("bit", "bits", "b")
    rate = number * base ** _PREFIXES[found[2].removesuffix("i")] / (8 if bits else 1)
    return rate if 0 < rate < math.inf else None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def nearest(word: str, valid: Iterable[str]) -> str:
    near = difflib.get_close_matches(word.lower(), list(valid), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
