"""What the members tell each other with every collective: one small word each, gathered by all.

Each collective event (a gradient's reduction, an average, a settle, a consensus, a checkpoint) starts
with an exchange of words on the epoch's control group. It makes three things possible without any
extra waiting: a worker that has run out of data leaves with its next word; members agree on the units
done; and workers that call different things at the same time get an error instead of a deadlock.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch

from offbeat.cluster.epoch import Epoch


class Event(IntEnum):
    START = 1
    REDUCE = 2
    AVERAGE = 3
    SETTLE = 4
    CONSENSUS = 5
    SAVE = 6
    RESTORE = 7
    LENGTH = 8
    LEAVE = 9
    IDLE = 10
    CUT = 11
    SAVED = 12
    ROLLBACK = 13

    @property
    def call(self) -> str:
        """What the user would recognise it by."""
        return {
            Event.START: "Synchronizer(...)",
            Event.REDUCE: "backward()",
            Event.AVERAGE: "step()",
            Event.SETTLE: "step(), at a switch or the end",
            Event.CONSENSUS: "consensus()",
            Event.SAVE: "save()",
            Event.RESTORE: "restore()",
            Event.LENGTH: "batches()",
            Event.LEAVE: "close()",
            Event.IDLE: "step(), at the end of its phase",
            Event.CUT: "step(), at the beginning of a phase",
            Event.SAVED: "save()",
            Event.ROLLBACK: "step(), going back to a checkpoint",
        }[self]


COMMITS = (Event.REDUCE, Event.AVERAGE, Event.SETTLE, Event.IDLE)
"""Events after which a leaving worker's last step is in the members' state: it may go then."""

NEWS = 1 << 32
"""In a packed word's event: a newcomer waits."""

_FIELDS = struct.Struct("<qqqqdqqQQQQ")


@dataclass(frozen=True)
class Word:
    """One member's part of an exchange.

    units: mini-batches it has done since the members last agreed; clock: its steps; scale, growth: its
    GradScaler's (0 without one); mark: a check value that has to be the same on all (what it checks
    depends on the event); flag: the event's own; unused: bit i is set when its parameter i has no
    gradient; used: the marks (`offbeat.ledger`) of the units that `units` counts; lent: the mark of the unit
    whose gradient is reduced; took, step: microseconds of its last average, and of a local step
    since; news: a newcomer waits to be let in.
    """

    event: Event
    clock: int = 0
    units: int = 0
    mark: int = 0
    scale: float = 0.0
    growth: int = 0
    flag: int = 0
    unused: int = 0
    used: int = 0
    lent: int = 0
    took: int = 0
    step: int = 0
    news: bool = False

    @property
    def leaving(self) -> bool:
        return self.event == Event.LEAVE

    @property
    def passive(self) -> bool:
        """Whether it waits for what others begin: it leaves, or is through with an asynchronous phase."""
        return self.event in (Event.LEAVE, Event.IDLE)

    def to_bytes(self, parameters: int) -> bytes:
        event = self.event | NEWS if self.news else self.event
        counts = (event, self.clock, self.units, self.mark)
        fields = (*counts, self.scale, self.growth, self.flag, self.used, self.lent, self.took, self.step)
        return _FIELDS.pack(*fields) + self.unused.to_bytes((parameters + 7) // 8, "little")

    @classmethod
    def from_bytes(cls, row: bytes) -> Word:
        event, clock, units, mark, scale, growth, flag, used, lent, took, step = _FIELDS.unpack_from(row)
        unused = int.from_bytes(row[_FIELDS.size :], "little")
        news, event = bool(event & NEWS), event & ~NEWS
        return cls(
            Event(event), clock, units, mark, scale, growth, flag, unused, used, lent, took, step, news
        )


class Exchange:
    """An exchange under way. `read` waits for the words, one per member in their order."""

    def __init__(
        self,
        epoch: Epoch,
        word: Word,
        parameters: int,
        on_read: Callable[[Exchange], None],
        apart: bool = False,
    ):
        self.epoch, self._on_read, self._apart = epoch, on_read, apart
        self._words: list[Word] | None = None
        # The sender's row must live until the exchange is over.
        self._row = torch.frombuffer(bytearray(word.to_bytes(parameters)), dtype=torch.uint8)
        self._rows, self._work = epoch.gather(self._row)

    def read(self) -> list[Word]:
        if self._words is None:
            self._work.wait()
            self._words = [Word.from_bytes(row.numpy().tobytes()) for row in self._rows]
            _agree(self.epoch, self._words, self._apart)
            self._on_read(self)
        return self._words

    def staying(self) -> list[Word]:
        """The words of the members that go on."""
        return [word for word in self.read() if not word.leaving]

    def event(self) -> Event:
        """What the members are in: that of those who begin something, else what the others wait for."""
        words = self.read()
        if any(word.event == Event.ROLLBACK for word in words):
            return Event.ROLLBACK
        for found in ([w for w in words if not w.passive], self.staying(), words):
            if found:
                return found[0].event
        raise AssertionError("an epoch has members")


def _agree(epoch: Epoch, words: list[Word], apart: bool) -> None:
    if any(word.event == Event.ROLLBACK for word in words):
        return
    seen: dict[tuple[Event, int], int] = {}
    for rank, word in zip(epoch.members, words, strict=True):
        if not word.passive:
            seen.setdefault((word.event, 0 if apart else word.clock), rank)
    if len(seen) > 1:
        (one, one_rank), (two, two_rank) = list(seen.items())[:2]
        raise RuntimeError(
            f"workers are at different places: rank {one_rank} is in {one[0].call} after {one[1]} steps, "
            f"rank {two_rank} in {two[0].call} after {two[1]}. What joins all workers (consensus, save, "
            f"restore, an evaluation inside them) must be reached by all: "
            f"sync.every('5%') gives the same answer on every worker"
        )
