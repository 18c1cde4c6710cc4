"""How members learn who of them is left, and newcomers who is there: by the job's store, which outlives them.

Keys, all in the job's part of the store:

dead/<rank>/<attempt>          by a launcher: this process of the rank has ended
roll/<epoch>/called            {"members", "attempts"}: the epoch's roll is called
roll/<epoch>/<rank>            a survivor of the epoch, and where it stands
deaths                         counts them
attempt/<rank>                 by a launcher: the attempt that takes, or would take, a dead one's place
roll/<epoch>/decision          {"epoch", "members", "rows"}: how those who answered go on
knock/<rank>                   a newcomer's attempt
knocks                         counts them
over                           the job is over
members                        {<rank>: attempt}: who took part last, as far as it was decided
admit/<rank>/<attempt>         {"epoch", "members", "attempts", "source"}: where the newcomer is awaited
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from offbeat.site import now

POLL = 0.005
"""Seconds between two looks at the store, while waiting."""
AHEAD = 4
"""Epochs that others may be ahead."""
LOOK = 0.5
"""Seconds between two looks, while waiting outside, whether anybody is left inside."""


class Roll:
    """One worker's part. store: of the Synchronizer. board: of the job, where launchers tell who has died.
    attempts: which process of each rank takes part."""

    def __init__(self, store: Any, board: Any, rank: int, attempt: int, world: int):
        self._store, self._board, self.rank, self.attempt = store, board, rank, attempt
        self.attempts = dict.fromkeys(range(world), 0)  # of later ranks, once they are let in
        self._known = 0  # knocks that were answered
        self.awaited: Sequence[int] = ()  # the members of the last epoch that was to be formed
        self._epoch: Any = None  # and the epoch, once it is there
        self._heard: set[tuple[int, int]] = set()  # processes that are dead, as far as the pulse has heard
        self._looked = 0.0

    def dead(self, rank: int) -> bool:
        """Whether the launcher has said that this member's process is gone."""
        return bool(self._board.check([f"dead/{rank}/{self.attempts[rank]}"]))

    def await_all(self, members: Sequence[int]) -> None:
        """An epoch of these members is about to be formed. The first of them writes down who they are."""
        self.awaited, self._epoch = tuple(members), None
        if self.rank == members[0]:
            self._store.set("members", json.dumps({rank: self.attempts[rank] for rank in members}))

    def meets(self, epoch: Any) -> None:
        """It is there."""
        self._epoch = epoch
        if self.gone():
            epoch.close()

    @property
    def forming(self) -> bool:
        return self._epoch is None

    def gone(self) -> bool:
        """Whether somebody who is awaited, or is in the epoch, is known to be dead. Asks nobody."""
        return any((rank, self.attempts.get(rank)) in self._heard for rank in self.awaited)

    def hear_of(self, rank: int, attempt: int) -> None:
        """By the pulse's thread: this process is dead."""
        self._heard.add((rank, attempt))
        if (epoch := self._epoch) is not None and rank in epoch.members:
            epoch.close()

    def call(self, epoch: int, members: Sequence[int], row: Mapping[str, Any]) -> dict[str, Any]:
        """Every survivor of the epoch calls this; returns the decision, the same for all of them. Waits until
        each member has answered or is known to be dead. Where some have tried to form the next epoch already,
        and failed, it is that one's roll that is called."""
        store, decided, waiting = self._store, "", set(members)
        while not decided or not store.check([decided]):
            later = [n for n in range(epoch + 1, epoch + AHEAD) if store.check([f"roll/{n}/called"])]
            if later:
                epoch, called = later[-1], json.loads(store.get(f"roll/{later[-1]}/called"))
                members, decided = called["members"], ""
                for rank, attempt in called["attempts"].items():  # whoever has called may know less
                    self.attempts[int(rank)] = max(attempt, self.attempts.get(int(rank), 0))
            if not decided:
                called = {"members": list(members), "attempts": self.attempts}
                store.set(f"roll/{epoch}/called", json.dumps(called))
                store.set(f"roll/{epoch}/{self.rank}", json.dumps(row))
                decided, waiting = f"roll/{epoch}/decision", set(members)
            for rank in sorted(waiting):
                if store.check([f"roll/{epoch}/{rank}"]) or self.dead(rank):
                    waiting.discard(rank)
            if not waiting:
                here = [r for r in members if store.check([f"roll/{epoch}/{r}"]) and not self.dead(r)]
                if self.rank == here[0]:
                    rows = [json.loads(store.get(f"roll/{epoch}/{rank}")) for rank in here]
                    decision = {"epoch": epoch + 1, "members": here, "rows": rows}
                    store.compare_set(decided, "", json.dumps(decision))
            time.sleep(POLL)
        return dict(json.loads(store.get(decided)))

    # Newcomers

    def knock(self) -> dict[str, Any]:
        """A newcomer asks to be let in; returns where it is awaited. Raises SystemExit if the job is over."""
        self._store.set(f"knock/{self.rank}", str(self.attempt))
        self._store.add("knocks", 1)
        key = f"admit/{self.rank}/{self.attempt}"
        while not self._store.check([key]):
            if self._store.check(["over"]):
                raise SystemExit(0)  # too late: there is nothing left to do
            self.rest_outside()
        return dict(json.loads(self._store.get(key)))

    def rest_outside(self) -> None:
        """A pause of who waits for the members. Raises RuntimeError when none of them is left."""
        time.sleep(4 * POLL)
        if now() > self._looked + LOOK:
            self._looked = now()
            there = json.loads(self._store.get("members")) if self._store.check(["members"]) else {}
            dead = [self._board.check([f"dead/{rank}/{attempt}"]) for rank, attempt in there.items()]
            if dead and all(dead):
                raise RuntimeError("all workers that held the job's state have died: go on from a checkpoint")

    def knocked(self) -> bool:
        """Whether somebody has knocked that was not let in yet."""
        return int(self._store.add("knocks", 0)) > self._known

    def newcomers(self, room: int) -> dict[int, int]:
        """Who of the ranks below `room` has knocked, and with which attempt."""
        self._known = int(self._store.add("knocks", 0))
        found = {}
        for rank in range(room):
            if self._store.check([f"knock/{rank}"]):
                attempt = int(self._store.get(f"knock/{rank}"))
                if attempt > self.attempts.get(rank, -1) and not self._board.check(
                    [f"dead/{rank}/{attempt}"]
                ):
                    found[rank] = attempt
        return found

    def over(self) -> None:
        """The job is over on all members: whoever comes now is too late."""
        self._store.set("over", "1")

    def admit(self, ranks: Sequence[int], where: Mapping[str, Any]) -> None:
        """Lets newcomers in."""
        for rank in ranks:
            self._store.set(f"admit/{rank}/{self.attempts[rank]}", json.dumps(where))


def names_of(ranks: Collection[int]) -> str:
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, sorted(ranks)))}"
