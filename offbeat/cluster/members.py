"""Who takes part now, what the members have agreed on, and how they change.

Rules that hold here:
- Members take the same collectives in the same order. Each starts with an exchange of words
  (`control.py`), and the words of one are read before the next begins.
- What the members agreed on (`units`, who has left) changes only when words are read, so it changes at
  the same step on all of them.
- When members have left, those who stay go on in a new epoch, with process groups of its own.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from offbeat.cluster.control import COMMITS, Event, Exchange, Word
from offbeat.cluster.desk import Desk
from offbeat.cluster.epoch import PATIENCE, Epoch, PeerLost
from offbeat.cluster.roll import Roll, names_of
from offbeat.cluster.state import collect, share
from offbeat.journal import Journal
from offbeat.ledger import WORD
from offbeat.site import here, now

LOOK = 0.5
"""Seconds between two looks for newcomers and requests."""


class Members:
    """One worker's view of the members.

    rank, world: this worker, and how many the job was started with.
    on: where the groups for gradients and averages work (a CUDA device means NCCL).
    parameters: how many parameters a word tells of.
    on_regroup: called after every change of `epoch`.
    roll: how to go on when a member has died, and to let newcomers in; None: neither. room: ranks that there
    may be, with those that come later. desk: where a person asks for something.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        store: Any,
        on: torch.device,
        parameters: int,
        journal: Journal,
        on_regroup: Callable[[], None],
        roll: Roll | None = None,
        room: int | None = None,
        desk: Desk | None = None,
    ):
        self.rank, self.world, self.store, self._on = rank, world, store, on
        self.roll, self.desk, self.room = roll, desk, max(room or 0, world)
        self._parameters, self._journal, self._on_regroup = parameters, journal, on_regroup
        self.clock = 0
        self.live = 1  # members whose gradient is in the last mean
        self.broken: str | None = None  # why the members cannot go on together
        self.apart = False  # under shards: members take steps of their own, until they commit
        self._agreed, self._since = 0, 0  # units agreed on, and this worker's clock then
        self._among: Sequence[int] = range(world)  # the members when it took its last step
        self._used, self._own = 0, 0  # marks of the units agreed on, and of this worker's since
        self._reduced: int | None = None  # marks of the units whose mean gradient is there
        self._last: Exchange | None = None
        self._departed: set[int] = set()
        self.left: set[int] = set()  # who have no more data, and wait for the end
        self.outside: frozenset[int] = frozenset()  # excluded, until they are readmitted
        self.readmitted = 0  # how often
        # Newcomers are to be let in, or requests to be met, as soon as all members hold the same.
        self.knocking = False
        self._looked, self._news = 0.0, False
        self.grown = False  # newcomers have come since somebody cared
        self.arrived: int | None = None  # this worker is a newcomer: whose state and place it is to take
        self.unmet = False  # and has not come together with the members, for one of them has died
        self._formed: tuple[int, Sequence[int]] = -1, range(world)  # the last epoch that was to be formed
        if roll is None:
            self.epoch = self._form(0, range(world), False)
        elif roll.attempt or rank >= world:
            self._arrive(roll)
        else:
            self._begin(roll)

    @property
    def units(self) -> int:
        """Mini-batches done by all: what was agreed on, and one per member and step since."""
        return self._agreed + max(self.clock - self._since, 0) * self.epoch.size

    @property
    def members(self) -> tuple[int, ...]:
        return self.epoch.members

    @property
    def alone(self) -> bool:
        return self.epoch.size == 1

    @property
    def used(self) -> int:
        """The sum of the marks of all units done (`offbeat.ledger`), as far as it was agreed on."""
        return (self._used + (self._own if self.alone else 0)) % WORD

    def tick(self, together: bool, lent: int = 0) -> None:
        """This worker has taken a step; `together`: the same one as the members whose mean it used. lent: the
        mark of its unit."""
        self._among = self.epoch.members
        if not together:
            self.clock += 1
            self._own = (self._own + lent) % WORD
            return
        used = self._used + (self._own + lent if self._reduced is None else self._reduced)
        self._reduced = None
        self.place(self.clock + 1, self.units + self.live, used)

    def place(self, clock: int, units: int, used: int | None = None) -> None:
        """Puts this worker to where the job is. used: the marks of the job's units, where this worker doesn't
        know them."""
        self.clock = self._since = clock
        self._agreed = units
        self._used = (self._used + self._own if used is None else used) % WORD
        self._own = 0

    # Words

    def exchange(self, event: Event, **fields: Any) -> Exchange:
        """Starts telling the others that this worker begins `event`; `fields` are the word's.

        Raises RuntimeError where the members cannot go on together."""
        if self.broken is not None:
            raise RuntimeError(self.broken)
        self.catch_up()
        news = self.rank == self.epoch.members[0] and self.news()
        word = Word(event, self.clock, self.clock - self._since, news=news, used=self._own, **fields)
        self._last = Exchange(self.epoch, word, self._parameters, self._heard, self.apart)
        return self._last

    def news(self) -> bool:
        """Whether somebody waits to be let in, or asks for something, as far as this worker has looked: it
        does so now and then."""
        roll, desk, moment = self.roll, self.desk, now()
        if moment > self._looked + LOOK:
            self._looked = moment
            self._news = (roll is not None and roll.knocked()) or (desk is not None and bool(desk.read()))
        return self._news

    def _heard(self, exchange: Exchange) -> None:
        words, staying, event = exchange.read(), exchange.staying(), exchange.event()
        self.knocking = self.knocking or any(word.news for word in words)
        if event == Event.REDUCE:
            self.live = len(staying)
            self._reduced = sum(word.used + word.lent for word in words)
        elif event in (*COMMITS, Event.LEAVE):
            self._agreed += sum(word.units for word in words)
            self._used += sum(word.used for word in words)
            self._own = (self._own - words[exchange.epoch.members.index(self.rank)].used) % WORD
            # Members that took steps of their own, and those that all leave, go on from the same clock.
            together = bool(staying) and not self.apart
            self._since = staying[0].clock if together else max(word.clock for word in words)
            if not together:
                self.clock = self._since
        if event in COMMITS:
            self._departed |= {r for r, w in zip(exchange.epoch.members, words, strict=True) if w.leaving}

    def catch_up(self) -> None:
        """Reads the words of the last exchange, if they were not yet."""
        if self._last is not None:
            self._last.read()
            self.regroup()

    def regroup(self) -> None:
        """Goes on in a new epoch when members have left."""
        if not self._departed or self.rank in self._departed:
            return
        staying = [r for r in self.epoch.members if r not in self._departed]
        left, self._departed = sorted(self._departed), set()
        self.left |= set(left)
        # What is still under way in the old epoch holds on to its groups until it lands.
        self._enter(self.epoch.number + 1, staying, f"{names_of(left)} ran out of data")
        self.live = min(self.live, self.epoch.size)

    def break_up(self, reason: str) -> None:
        """The members cannot go on together: whoever waits for this worker learns of it at once."""
        self.broken = reason
        self.epoch.close()

    # Those who wait outside

    def exclude(self, ranks: frozenset[int], reason: str) -> bool:
        """Goes on without `ranks`, all members being at the same place. Returns whether this worker is one of
        those: then it is to wait outside."""
        self.catch_up()
        self.place(self.clock, self.units)  # counted by all
        self.outside |= ranks
        if self.rank in ranks:
            return True
        staying = [rank for rank in self.epoch.members if rank not in ranks]
        self._enter(self.epoch.number + 1, staying, reason)
        self.live = self.epoch.size
        return False

    def readmit(self, reason: str) -> int:
        """Calls those outside back. Returns the rank whose state and place all are to take."""
        self.catch_up()
        number, source = self.epoch.number + 1, self.epoch.members[0]
        members = sorted({*self.epoch.members, *self.outside})
        self.place(self.clock, self.units)
        if self.rank == source:
            call = {"epoch": number, "members": members, "source": source, "attempts": self._attempts}
            self.store.set(f"readmit/{self.readmitted}", json.dumps(call))
        self._back(number, members, reason)
        return source

    def wait_outside(self, reason: str) -> int:
        """This worker was excluded: waits until it is called back. Returns the rank whose state and place it
        is to take."""
        call = self._wait_for(f"readmit/{self.readmitted}")
        self._hear_of_attempts(call["attempts"])
        self._back(call["epoch"], call["members"], reason)
        return int(call["source"])

    def _back(self, number: int, members: Sequence[int], reason: str) -> None:
        self.outside = frozenset()
        self.readmitted += 1
        self._enter(number, members, reason)
        self.live = self.epoch.size

    @property
    def _attempts(self) -> dict[int, int]:
        return {} if self.roll is None else self.roll.attempts

    def _hear_of_attempts(self, attempts: Mapping[str, int]) -> None:
        """Who was away doesn't know which process of a rank takes part now."""
        if self.roll is not None:
            self.roll.attempts.update({int(rank): attempt for rank, attempt in attempts.items()})

    def _wait_for(self, key: str) -> Any:
        if self.roll is None or here().virtual:
            self.store.wait([key], PATIENCE)
        else:
            while not self.store.check([key]):
                self.roll.rest_outside()
        return json.loads(self.store.get(key))

    # Those who die, and those who come

    def standing(self) -> dict[str, Any]:
        """Where this worker is, for the other survivors."""
        return {
            "rank": self.rank,
            "clock": self.clock,
            "agreed": self._agreed,
            "since": self._since,
            "among": list(self._among),
            "used": self._used,
            "spent": self._own,
        }

    def regroup_without_the_dead(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A member has gone: the survivors go on in a new epoch. Returns what each has said of itself, in
        their order. row: what this one says."""
        assert self.roll is not None
        number, members = self._formed  # some may be in it, and others have failed to come to it
        self._reduced = None
        while True:
            self.epoch.close()
            decision = self.roll.call(number, members, {**self.standing(), **row})
            number, before, members = decision["epoch"], members, decision["members"]
            if self.rank not in members:
                raise RuntimeError(f"the others took rank {self.rank} for dead and went on without it")
            lost = sorted(set(before) - set(members))
            try:
                self._enter(
                    number, members, f"{names_of(lost)} died" if lost else "the connection broke", True
                )
            except PeerLost:
                continue
            self.live = self.epoch.size
            return list(decision["rows"])

    def hear(self) -> tuple[dict[int, int], list[dict[str, Any]]]:
        """What the first member has heard of, all members holding the same: newcomers with their attempts,
        and requests."""
        self.knocking = self._news = False
        roll, desk, source = self.roll, self.desk, self.epoch.members[0]
        mine: list[Any] = []
        if self.rank == source:
            mine = [{} if roll is None else roll.newcomers(self.room), [] if desk is None else desk.read()]
        found, requests = json.loads(share(self.epoch, json.dumps(mine), source))
        if desk is not None:
            desk.known += len(requests)
        return {int(rank): attempt for rank, attempt in found.items()}, requests

    def let_in(self, found: Mapping[int, int]) -> None:
        """Lets newcomers in; all take the first member's state and place afterwards."""
        assert self.roll is not None
        roll, source = self.roll, self.epoch.members[0]
        self.place(self.clock, self.units)
        number, members = self.epoch.number + 1, sorted({*self.epoch.members, *found})
        roll.attempts.update(found)
        self.outside -= found.keys()  # who died there
        self.grown = True
        if self.rank == source:
            where = {"epoch": number, "members": members, "source": source}
            roll.admit(sorted(found), {**where, "attempts": roll.attempts})
        self._enter(number, members, f"{names_of(found)} came", True)
        self.live = self.epoch.size

    def drop(self, rank: int) -> bool:
        """Goes on without a member for good, all holding the same. Returns whether this worker is the one."""
        self.place(self.clock, self.units)
        if self.rank == rank:
            return True
        staying = [one for one in self.epoch.members if one != rank]
        self.grown = True  # its host's shards may be served by it
        self._enter(self.epoch.number + 1, staying, f"rank {rank} was dropped (offbeat ctl)")
        self.live = self.epoch.size
        return False

    def _begin(self, roll: Roll) -> None:
        """The job's first epoch: of those who come, for some may die before."""
        while True:
            decision = roll.call(*self._formed, {})
            with contextlib.suppress(PeerLost):
                self.epoch = self._form(decision["epoch"], decision["members"], True)
                return

    def _arrive(self, roll: Roll) -> None:
        """Where that fails (`unmet`) this worker is alone in an epoch, until it recovers with the others."""
        where = roll.knock()
        roll.attempts = {int(rank): attempt for rank, attempt in where["attempts"].items()}
        self.arrived = int(where["source"])
        try:
            self.epoch = self._form(where["epoch"], where["members"], True)
        except PeerLost:
            self.epoch = here().epoch(where["epoch"], [self.rank], self.rank, self.store, self._on, True)
            self.unmet = True
        self.live = self.epoch.size

    def _form(self, number: int, members: Sequence[int], lossy: bool) -> Epoch:
        self._formed = number, members
        if self.roll is None:
            return here().epoch(number, members, self.rank, self.store, self._on, lossy)
        self.roll.await_all(members)
        epoch = here().epoch(number, members, self.rank, self.store, self._on, lossy, self.roll.gone)
        self.roll.meets(epoch)
        return epoch

    # The end

    def call_back(self) -> int | None:
        """The job is over for those who stayed: calls those who left earlier into a last epoch of all.
        Returns the rank that holds the final state, None if nobody had left."""
        gone = self.roll.dead if self.roll is not None else lambda rank: False
        back = [rank for rank in sorted(self.left) if not gone(rank)]
        self.left = set()
        if not back:
            return None
        number, source = self.epoch.number + 1, self.epoch.members[0]
        self.place(self.clock, self.units)  # counted by those who stayed
        if self.rank == source:
            members = sorted({*self.epoch.members, *back})
            call = {"epoch": number, "source": source, "members": members, "attempts": self._attempts}
            self.store.set("final", json.dumps(call))
        self._enter(number, sorted({*self.epoch.members, *back}), "the end: those who had left are back")
        return source

    def wait_for_call(self) -> int:
        """This worker has left: waits for the last epoch. Returns the rank that holds the final state."""
        final = self._wait_for("final")
        self._hear_of_attempts(final["attempts"])
        self.outside = frozenset()
        self.left = set()
        self._enter(final["epoch"], final["members"], "the end: those who had left are back")
        return int(final["source"])

    def _enter(self, number: int, members: Any, reason: str, lossy: bool = False) -> None:
        self._last, self._departed = None, set()
        lossy = lossy or self.roll is not None
        self.epoch = self._form(number, members, lossy)
        self._on_regroup()
        self._journal.record("members", epoch=number, members=list(self.epoch.members), reason=reason)

    # Agreement outside of steps

    def sum(self, mine: int) -> int:
        """The sum of every member's number."""
        return sum(word.flag for word in self.exchange(Event.LENGTH, flag=mine).read())

    def gather(self, event: Event, text: str) -> list[str]:
        """Every member's text, in their order; `event` names what is going on."""
        self.exchange(event).read()
        return collect(self.epoch, text)
