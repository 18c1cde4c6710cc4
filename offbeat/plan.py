"""A plan's text, such as `bsp:6.25% dasgd(period=4,delay=2)`, and the protocols that it means.

    plan     = phase { blanks phase }
    phase    = word [ "(" [ setting { "," setting } ] ")" ] [ ":" end ]
    setting  = [ name "=" ] value           values alone come first, in the order of the fields
    value    = number | "inf" | word
    end      = share "%" | units "u"        a position in the job, not a length

Every phase but the last has an end, and the ends increase. `parse` makes right-nested switches,
`Switch(first, Switch(second, third, at), at)`; `to_text` writes every nesting of the same phases as the
same text, which names only the settings that differ from their defaults.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import MISSING, Field, fields
from decimal import Context, Decimal
from functools import reduce
from typing import Any

from offbeat.policies.auto import uses_auto  # a plan can name it
from offbeat.protocols import Protocol, Switch

End = float | int  # a share of the progress (float), or units (int)

MAX_TEXT = 4000
MAX_PHASES = 32
MAX_VALUE = 40  # characters of one name, value or end

_WORD = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
_INTEGER = re.compile(r"[-+]?[0-9]+")
_NUMBER = re.compile(r"[-+]?(?:inf|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)")
_SHARE = re.compile(r"([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:[eE]([-+]?[0-9]{1,4}))?%")
_UNITS = re.compile(r"([-+]?[0-9]+)u")
_CHUNK = re.compile(r"[^\s,()=:]+")  # a name or a value, right or wrong
_ENDING = re.compile(r"[^\s(),;]*")
_EXACT = Context(prec=40)  # more digits than any float's shortest text, whatever the caller's context


class PlanError(ValueError):
    """A plan that cannot be meant. `position` is where in the text the fault is, None where there is
    no text (a plan made of objects)."""

    def __init__(self, message: str, text: str | None = None, position: int | None = None, length: int = 1):
        self.position = position
        if text is not None and position is not None:
            message += _excerpt(text, position, length)
        super().__init__(message)


def words() -> dict[str, type[Protocol]]:
    """Every protocol that a plan can name, by its word: all dataclasses derived from `Protocol` that
    define a `word`, those of a user included. A word's first class keeps it."""
    found: dict[str, type[Protocol]] = {}
    classes = list(Protocol.__subclasses__())
    for cls in classes:  # grows as it goes
        classes += cls.__subclasses__()
        if "word" in vars(cls) and cls is not Switch and hasattr(cls, "__dataclass_fields__"):
            found.setdefault(cls.word, cls)
    return found


def parse(text: str) -> Protocol:
    """The protocol that `text` means: a single one, or right-nested switches.

    Raises PlanError, which names the bad word or setting, what is valid, and where it stands."""
    if len(text) > MAX_TEXT:
        raise PlanError(f"a plan's text has at most {MAX_TEXT} characters; got {len(text)}")
    return _Reader(text).plan()


def to_text(protocol: Protocol) -> str:
    """The canonical text of `protocol`; `parse(to_text(p)) == p` for every `p` that `parse` returns."""
    return " ".join(
        _phase_text(leaf) + ("" if end is None else f":{_end_text(end)}") for leaf, end in phases(protocol)
    )


def phases(protocol: Protocol) -> list[tuple[Protocol, End | None]]:
    """The protocols in the order of their turns, each with the position of its end: a share of the
    progress (float) or units (int), and None for the last, which runs to the end of the job."""
    found: list[tuple[Protocol, End | None]] = []
    waiting: list[tuple[Protocol, End | None]] = [(protocol, None)]
    while waiting:
        part, end = waiting.pop()
        if isinstance(part, Switch) and part.word == Switch.word:  # else it decides for itself, like auto
            waiting += [(part.then, end), (part.first, part.at)]
        else:
            found.append((part, end))
    return found


def check(protocol: Protocol, total: int) -> None:
    """Raises PlanError unless the ends increase within a job of `total` units. Only a job's total
    makes shares and units comparable; a share ends at the first whole unit that reaches it."""
    if total < 1:
        raise PlanError(f"a job has at least one unit; got total={total}")
    before: End | None = None
    for leaf, end in phases(protocol):
        if end is None:
            return
        if isinstance(end, int) and end > total:
            raise PlanError(
                f"{_phase_text(leaf)}:{end}u is beyond the end of the job, which has {total} units; "
                f"the plan is {protocol}"
            )
        if before is not None and not _increases(before, end, total):
            raise PlanError(
                f"{_phase_text(leaf)} would have no turn: it ends at {_end_text(end)}, the protocol before "
                f"it at {_end_text(before)}, in a job of {total} units. Ends are positions in the job and "
                f"must increase; the plan is {protocol}"
            )
        before = end


def check_timing(protocol: Protocol) -> None:
    """Raises PlanError for a plan that goes by gradients, where only time is simulated."""
    if uses_auto(protocol):
        raise PlanError(
            f"{protocol}: auto decides by gradients, and none are computed here; give a share, such as "
            f"bsp:25% asp"
        )


def _increases(before: End, end: End, total: int) -> bool:
    if isinstance(before, int) == isinstance(end, int):
        return before < end
    return _first_unit(before, total) < _first_unit(end, total)


def _first_unit(end: End, total: int) -> int:
    """The number of units done at which `offbeat.worker.passed` turns true."""
    if isinstance(end, int):
        return end
    unit = math.ceil(end * total)
    if unit > 0 and (unit - 1) / total >= end:  # the product was rounded up
        return unit - 1
    return unit if unit / total >= end else unit + 1


class _Reader:
    """Reads one text from left to right; `at` is the position of the next character."""

    def __init__(self, text: str):
        self.text, self.at, self.words = text, 0, words()

    def plan(self) -> Protocol:
        ended: list[tuple[Protocol, End]] = []
        self.blanks()
        if not self.peek():
            raise PlanError(f"a plan names at least one protocol of {_listed(self.words)}; got {self.text!r}")
        while True:
            if len(ended) == MAX_PHASES:
                raise self.wrong(f"a plan has at most {MAX_PHASES} protocols", self.at)
            start = self.at
            protocol = self.protocol()
            stop = self.at
            end = self.end(ended[-1][1] if ended else None)
            separated = self.blanks()
            self.expect_turn(start, stop, end, separated)
            if end is None:
                return reduce(lambda then, part: Switch(part[0], then, part[1]), reversed(ended), protocol)
            ended.append((protocol, end))

    def expect_turn(self, start: int, stop: int, end: End | None, separated: bool) -> None:
        """Raises unless the phase just read has an end exactly if another one follows."""
        name = self.text[start:stop]
        if not self.peek():
            if end is not None:
                raise self.wrong(
                    f"the last protocol runs to the end of the job and takes no end: write {name}, or name "
                    f"the protocol that follows it",
                    stop,
                    len(self.text[stop:].rstrip()),
                )
        elif _WORD.match(self.text, self.at) is None:
            raise self.stray()
        elif not separated:
            raise self.wrong(f"a blank belongs before {self.peek()!r}", self.at)
        elif end is None:
            raise self.wrong(
                f"{name} is not the last protocol, so it needs an end, such as {name}:10% or {name}:4000u",
                start,
                stop - start,
            )

    def protocol(self) -> Protocol:
        start = self.at
        match = _WORD.match(self.text, start)
        if match is None:
            raise self.stray()
        word = match.group()
        cls = self.words.get(word)
        if cls is None:
            raise self.wrong(
                f"there is no protocol {word!r}; valid are {_listed(self.words)}{_nearest(word, self.words)}",
                start,
                len(word),
            )
        self.at = match.end()
        settings = self.settings(word, _settings(cls)) if self.peek() == "(" else {}
        missing = [f.name for f in _settings(cls) if _required(f) and f.name not in settings]
        if missing:
            raise self.wrong(f"{word} needs {_listed(missing)}", start, self.at - start)
        try:
            return cls(**settings)
        except ValueError as error:
            raise self.wrong(str(error), start, self.at - start) from None

    def settings(self, word: str, valid: list[Field[Any]]) -> dict[str, Any]:
        opened, names = self.at, [f.name for f in valid]
        found: dict[str, Any] = {}
        named = False
        self.at += 1
        self.blanks()
        if self.peek() == ")":
            self.at += 1
            return found
        while True:
            start = self.at
            name, raw, where = self.setting(word, opened)
            if name is None:
                name = self.positional(word, raw, where, names, len(found), named)
            else:
                named = True
            if name not in names:
                raise self.wrong(
                    f"{word} has no setting {name!r}; {_valid(names)}{_nearest(name, names)}",
                    start,
                    len(name),
                )
            if name in found:
                raise self.wrong(f"{word} is given {name} twice", start, self.at - start)
            found[name] = self.value(raw, where)
            self.blanks()
            if self.peek() == ")":
                self.at += 1
                return found
            if self.peek() == "":
                raise self.wrong(f"the parenthesis of {word} is not closed", opened)
            if self.peek() != ",":
                raise self.wrong(f"a comma or a closing parenthesis belongs before {self.peek()!r}", self.at)
            self.at += 1
            self.blanks()

    def setting(self, word: str, opened: int) -> tuple[str | None, str, int]:
        """One `name=value` or `value`: the name if there is one, the value's text and its position."""
        where, first = self.chunk(word, opened)
        after = self.at
        self.blanks()
        if self.peek() != "=":
            self.at = after
            return None, first, where
        self.at += 1
        self.blanks()
        where, raw = self.chunk(word, opened)
        return first, raw, where

    def chunk(self, word: str, opened: int) -> tuple[int, str]:
        match = _CHUNK.match(self.text, self.at)
        if match is None:
            if self.peek() == "":
                raise self.wrong(f"the parenthesis of {word} is not closed", opened)
            raise self.wrong(f"a setting of {word} is missing before {self.peek()!r}", self.at)
        self.at = match.end()
        self.short(match)
        return match.start(), match.group()

    def positional(self, word: str, raw: str, where: int, names: list[str], index: int, named: bool) -> str:
        if named:
            raise self.wrong(
                f"{raw} needs its setting's name here, after a setting that has one", where, len(raw)
            )
        if index >= len(names):
            raise self.wrong(f"{raw} is one setting too many for {word}; {_valid(names)}", where, len(raw))
        return names[index]

    def value(self, raw: str, where: int) -> float | int | str:
        if _INTEGER.fullmatch(raw):
            return int(raw)
        if _NUMBER.fullmatch(raw):
            return float(raw)
        if _WORD.fullmatch(raw):
            return raw
        raise self.wrong(f"{raw!r} is neither a number nor a word", where, len(raw))

    def end(self, before: End | None) -> End | None:
        """The position after a colon, None where there is none."""
        if self.peek() != ":":
            return None
        start = self.at
        match = _ENDING.match(self.text, start + 1)
        raw = self.short(match) if match else ""
        self.at += 1 + len(raw)
        found: End
        if share := _SHARE.fullmatch(raw):
            found = float(f"{share[1]}e{int(share[2] or 0) - 2}") + 0.0  # + 0.0: there is no end at -0 %
        elif units := _UNITS.fullmatch(raw):
            found = int(units[1])
        else:
            hint = f"; did you mean :{raw}u or :{raw}%?" if _INTEGER.fullmatch(raw) else ""
            raise self.wrong(
                f"{raw or 'nothing'} is no end: it is a share of the progress, such as :6.25%, or whole "
                f"units, such as :4000u{hint}",
                start,
                1 + len(raw),
            )
        if found < 0 or (isinstance(found, float) and found > 1):
            raise self.wrong(
                f"{raw} lies outside the job: ends are positions in it, from 0% to 100% of the progress or "
                f"from 0u on",
                start,
                1 + len(raw),
            )
        if before is not None and isinstance(before, int) == isinstance(found, int) and found <= before:
            raise self.wrong(
                f"{raw} does not come after {_end_text(before)}: ends are positions in the job, not lengths, "
                f"and must increase",
                start,
                1 + len(raw),
            )
        return found

    def short(self, match: re.Match[str]) -> str:
        raw = match.group()
        if len(raw) > MAX_VALUE:
            raise self.wrong(
                f"{raw[:MAX_VALUE]}… is too long: names, values and ends have at most {MAX_VALUE} characters",
                match.start(),
                len(raw),
            )
        return raw

    def blanks(self) -> bool:
        """Skips blanks; whether there were any."""
        start = self.at
        while self.peek().isspace():
            self.at += 1
        return self.at > start

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def stray(self) -> PlanError:
        character = self.peek()
        if character == "(":
            hint = ": settings follow their protocol without a blank, as in local(period=4)"
        else:
            hint = f": protocols are separated by blanks, and valid are {_listed(self.words)}"
        return self.wrong(f"a protocol belongs where {character!r} stands{hint}", self.at)

    def wrong(self, message: str, position: int, length: int = 1) -> PlanError:
        return PlanError(message, self.text, position, length)


def _settings(cls: type[Protocol]) -> list[Field[Any]]:
    return [f for f in fields(cls) if f.init]  # type: ignore[arg-type]  # `words` has seen to it


def _required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _phase_text(protocol: Protocol) -> str:
    given = [
        f"{f.name}={_value_text(getattr(protocol, f.name))}"
        for f in _settings(type(protocol))
        if f.default is MISSING or getattr(protocol, f.name) != f.default
    ]
    return protocol.word + (f"({','.join(given)})" if given else "")


def _value_text(value: object) -> str:
    if isinstance(value, float):
        return str(int(value)) if value == 0 else repr(value).removesuffix(".0")
    return str(value)


def _end_text(end: End) -> str:
    if isinstance(end, int):
        return f"{end}u"
    percent = _EXACT.scaleb(Decimal(repr(end + 0.0)), 2).normalize(_EXACT)
    return (f"{percent:f}" if not percent or percent.adjusted() >= -6 else f"{percent:e}") + "%"


def _listed(names: Any) -> str:
    names = list(names)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _valid(names: list[str]) -> str:
    return f"valid: {_listed(names)}" if names else "it has no settings"


def _nearest(word: str, valid: Any) -> str:
    near = difflib.get_close_matches(word.lower(), list(valid), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def _excerpt(text: str, position: int, length: int, width: int = 72) -> str:
    """Two lines: the part of the text around the fault, and marks below the fault."""
    start = max(0, min(position - width // 2, len(text) - width))
    line = "".join(c if c.isprintable() else " " for c in text[start : start + width])
    marks = max(1, min(length, start + width - position))
    return f"\n  {line}\n  {' ' * (position - start)}{'^' * marks}"
