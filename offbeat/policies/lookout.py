"""What a detector is fed with: the time that each member spends on its own work, from what members tell each
other anyway.

Under protocols on replicas everybody's wall-clock is the same. What a member did itself is its computing,
which it knows (all its time less its waiting), and its part in the exchange, which it does not: one slow link
makes the exchange long for all. So when the exchange has become longer, a probe asks whose link it is: the
members exchange messages in pairs, and a member's link is as slow as its fastest message.

Pure, and the same on every member: all are given the same figures in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

from offbeat.policies.detector import Detection, Detector, Look

PROBES = 3
"""Members that each member sends to in a probe; one fewer than the members at most."""
PROBE = 64 << 10
"""Bytes of a probe's message: enough to tell a slow link by, and gone at once over a fast one."""
STANDS_OUT = 2.0
"""How many times slower than others a link must be to be somebody's doing: single messages are noisy."""
AFTER = 50
"""Windows after which the links are probed in any case: an exchange may become longer little by little."""


class Lookout:
    """Gathers the figures of a window and lets the detector look at it.

    `step` takes every member's figures of one exchange, `probed` what a probe has found. `wants_probe`: the
    exchange takes longer than it did, and by whose doing is not known.
    """

    def __init__(self, settings: Detection | None = None):
        self.detector = Detector(settings)
        self.settings = self.detector.settings
        self.begin()

    @property
    def stragglers(self) -> frozenset[int]:
        return self.detector.stragglers

    def begin(self) -> None:
        """The members or the protocol are others from here on: what was gathered doesn't count."""
        self._usual = inf  # seconds of an exchange when nobody's link was slow
        self._suspects = self._probes = True
        self._since_probe = 0  # windows
        self._anew()

    def _anew(self) -> None:
        self._busy: dict[int, float] = {}
        self._exchange, self._steps = 0.0, 0
        self._links: dict[int, float] | None = None

    @property
    def wants_probe(self) -> bool:
        """Whether the members are to probe their links with the step that was told last."""
        full = self._steps >= self.settings.window
        return full and self._suspects and self._probes and self._links is None

    def step(self, figures: Mapping[int, tuple[float, float]], steps: int = 1, probes: bool = True) -> None:
        """Every member's seconds of computing and of waiting since the last call, in which each has taken
        `steps` steps. What the last to come waited is the exchange itself. probes: whether the members can
        probe their links now."""
        self._probes = probes
        if self._busy.keys() != figures.keys():
            self._anew()
            self._busy = dict.fromkeys(figures, 0.0)
        for rank, (busy, _) in figures.items():
            self._busy[rank] += busy
        self._exchange += min(waited for _, waited in figures.values())
        self._steps += steps
        if self._steps >= self.settings.window and not self._suspects:
            self._suspects = self._longer() or self._since_probe >= AFTER

    def _longer(self) -> bool:
        """Whether the exchange has come to slow the steps down by more than the rule cares for."""
        exchange, most = self._exchange / self._steps, max(self._busy.values()) / self._steps
        return exchange - self._usual > (self.settings.min_slowdown - 1) * (most + self._usual)

    def probed(self, links: Mapping[int, float]) -> None:
        """Seconds that a probe took over each member's links (`own_links`)."""
        self._links = dict(links)

    def look(self, at: float) -> Look | None:
        """What the window shows, once it is complete and probed if need be. at: seconds."""
        if self._steps < self.settings.window or self.wants_probe:
            return None
        exchange = self._exchange / self._steps
        shares = self._shares(exchange)
        speeds = {r: 1 / max(busy / self._steps + shares[r], 1e-12) for r, busy in self._busy.items()}
        self._since_probe = 0 if self._links is not None else self._since_probe + 1
        if not self._slow_links():
            self._suspects = False
            known = self._links is None and self._usual < inf
            self._usual = self._usual + 0.25 * (exchange - self._usual) if known else exchange
        self._anew()
        return self.detector.look(speeds, at)

    def _shares(self, exchange: float) -> dict[int, float]:
        """Seconds of the exchange as each member's own link would have it: the slowest link's are all of
        them, those of a link that doesn't stand out are the usual."""
        shares = dict.fromkeys(self._busy, exchange)
        if self._links is None or not (slow := self._slow_links()):
            return shares
        slowest = max(self._links.values())
        for rank in shares:
            share = exchange * self._links.get(rank, 0.0) / slowest
            usual = share if self._usual == inf else min(self._usual, exchange)
            shares[rank] = max(usual, share) if rank in slow else usual
        return shares

    def _slow_links(self) -> frozenset[int]:
        """Whose links stand out, of those that were probed. Where nobody's does, a long exchange is nobody's
        doing. By the robust rule always: by the paper's some link nearly always does."""
        robust = Detector(replace(self.settings, rule="robust", min_slowdown=STANDS_OUT))
        return robust.look({rank: 1 / max(s, 1e-9) for rank, s in (self._links or {}).items()}).slow


class Pace:
    """Speeds on shards, where members tell how far they have come every `window` pushes, each when it is
    there."""

    def __init__(self, window: int):
        self._window = window
        self._last: dict[int, tuple[int, float, float]] = {}  # pushes, own seconds, when that was news
        self._speeds: dict[int, float] = {}

    def speeds(self, figures: Mapping[int, tuple[int, float]], at: float) -> dict[int, float] | None:
        """Units per second of own time of each member, from its pushes and seconds of own time so far; None
        the first time. Of a member without news it is known that the next window isn't over yet. at: seconds
        of the reader's clock."""
        first = not self._last
        for rank, (pushes, seconds) in figures.items():
            before, own, since = self._last.get(rank, (0, 0.0, at))
            if rank not in self._last or pushes > before:
                if rank in self._last:
                    self._speeds[rank] = (pushes - before) / max(seconds - own, 1e-9)
                self._last[rank] = pushes, seconds, at
            else:
                bound = self._window / max(at - since, 1e-9)
                self._speeds[rank] = min(self._speeds.get(rank, bound), bound)
        return None if first else {rank: self._speeds[rank] for rank in figures if rank in self._speeds}


def shifts(members: int) -> range:
    """How far around the ring of members a probe sends, one after the other."""
    return range(1, min(PROBES, members - 1) + 1)


def own_links(members: Sequence[int], rows: Sequence[Sequence[float]]) -> dict[int, float]:
    """How slow each member's own link is, in seconds.

    rows: [members, shifts], the seconds in which a message went from the member to the one `shift` after it,
    and back. A member's slowness is that of the fastest message that it sent or sent back: a slow link, in
    either direction, spoils all of them, and another's slow link those with it. Between two members a slow
    link is nobody's.
    """
    count, found = len(members), {}
    for index, rank in enumerate(members):
        back = [rows[(index - shift) % count][k] for k, shift in enumerate(shifts(count))]
        found[rank] = min([*rows[index], *back], default=0.0)
    return found
