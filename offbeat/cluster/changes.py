"""The real engine's worker among members that change: they leave, are excluded and come back, die, come."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from offbeat.cluster.control import COMMITS, Event
from offbeat.cluster.epoch import PeerLost
from offbeat.cluster.replicas import Landing, ReplicaWorker, scale_of
from offbeat.cluster.roll import names_of
from offbeat.cluster.state import collect, receive, share
from offbeat.site import now
from offbeat.worker import Handle


class Excluding(Handle):
    """An exclusion; nothing happens before `wait`."""

    def __init__(self, worker: ChangingWorker, ranks: frozenset[int]):
        self._worker, self._ranks = worker, ranks

    def wait(self) -> None:
        self._worker.exclude_now(self._ranks)


class Readmitting(Handle):
    """A readmission; nothing happens before `wait`."""

    def __init__(self, worker: ChangingWorker):
        self._worker = worker

    def wait(self) -> None:
        self._worker.readmit_now()


class ChangingWorker(ReplicaWorker):
    """When it is made, all members hold the first one's state; a newcomer holds that of who is there."""

    def __init__(self, *args: Any, **more: Any):
        self._torn = False  # a state was only half received
        self.place_protocol: str | None = None  # of the job, when this worker came to it; None: none yet
        self.arrived_more: Any = None
        self.more: Callable[[], Any] = lambda: self.arrived_more  # what else who comes is to take over
        self.take_more: Callable[[Any], None] = lambda more: setattr(self, "arrived_more", more)
        self.join_more: Callable[[list[Any]], None] = lambda rows: None  # of several workers
        self.on_admission: Callable[[], None] = lambda: None
        self.on_request: Callable[[dict[str, Any]], None] = lambda request: None
        super().__init__(*args, **more)
        if self.team.arrived is None:
            self._begin()
        else:
            self._arrive(self.team.arrived)

    def _begin(self) -> None:
        """All begin with the first member's state; if some die meanwhile, with that of one who has it whole.

        Raises RuntimeError if nobody does."""
        source = self.members[0]
        while True:
            try:
                self._take_first_state(source)
                return
            except PeerLost:
                if self.team.roll is None:
                    raise
            rows = self.team.regroup_without_the_dead(self.about())
            whole = [row["rank"] for row in rows if not row["torn"]]
            if not whole:  # and nobody else may have been given the right ones by the script
                raise RuntimeError(f"rank {source} died while the others took its parameters: start again")
            source = whole[0]

    def _take_first_state(self, source: int) -> None:
        """All begin with the source's parameters, buffers and optimizer state."""
        self._same_model()
        begun = now()
        if not self.team.alone:
            self._torn = self._torn or self.rank != source
            receive(self.epoch, self.state, source)
            self._torn = False
        self.broadcast_ms = (now() - begun) * 1e3

    def exclude(self, ranks: frozenset[int]) -> Handle:
        return Excluding(self, ranks)

    def readmit(self) -> Handle:
        return Readmitting(self)

    # The end

    def leave(self) -> None:
        """This worker has no more data. It helps the others with what they have begun, and returns when
        the job is over and it holds the job's final state."""
        while not self.team.alone:
            epoch, exchange = self.epoch, self._exchange(Event.LEAVE, **self._standing())
            staying = exchange.staying()
            if not staying and self.team.outside:  # those who wait there may have data left
                self.readmit_now()
                continue
            if not staying:  # everybody leaves: this is the end
                break
            event = staying[0].event
            if event == Event.REDUCE:
                self.reducer.shadow(epoch)
            elif event == Event.AVERAGE:
                self.averager.start(epoch, snapshot=False).wait()
            elif event == Event.SETTLE:
                self._settle_with(exchange.read())
            elif event == Event.CONSENSUS:
                with self._consensus_with(exchange.read()):
                    pass
            elif event in (Event.SAVE, Event.SAVED):
                collect(self.epoch, "")
            else:
                raise RuntimeError(f"this worker has ended its part while the others call {event.call}")
            if event in COMMITS:
                self._take_over(self.team.wait_for_call())
                return
        self.settle_now()
        self.finish()

    # Excluded members

    def exclude_now(self, ranks: frozenset[int]) -> None:
        """The members go on without `ranks`; one of those returns when it was called back."""
        names = names_of(ranks)
        if self.team.exclude(ranks, f"without {names}, which {'is' if len(ranks) == 1 else 'are'} slow"):
            self.journal.keep(False)
            self._torn = True  # what it holds is of another time
            self._return(self.team.wait_outside(f"back among the members: {names}"))
        else:
            self.watch.begin()

    def readmit_now(self) -> None:
        """Whoever was excluded is called back and takes the members' state."""
        if self.team.outside:
            names = names_of(self.team.outside)
            self.settle_now()
            self._return(self.team.readmit(f"back among the members: {names}"))

    def _return(self, source: int) -> None:
        """All members of an epoch into which some come or return take the source's state and place. Who was a
        member before holds the same already, and goes on holding it if the source dies meanwhile."""
        self._take_over(source)
        self._take_rest(source)
        self._torn = False
        self._settled = (self.clock, self.epoch.number)
        self.watch.forget()

    def _take_rest(self, source: int) -> None:
        """What else belongs to the job's place."""
        mine = {
            "total": self.total,
            "left": sorted(self.team.left),
            "outside": sorted(self.team.outside),
            "readmitted": self.team.readmitted,
            "grown": self.team.grown,
            "known": 0 if self.team.desk is None else self.team.desk.known,
            "protocol": str(self.protocol) if self._entered else None,
            "ledger": self.keeps_ledger,
            "started": self.journal.started,
            "seconds": self.meter.before + self.meter.seconds,
            "more": self.more(),
        }
        rest = json.loads(share(self.epoch, json.dumps(mine), source))
        self.place_protocol, self.journal.started = rest["protocol"], rest["started"]
        if self.meter.seconds == 0:
            self.meter.before = rest["seconds"]
        self.total = self.total if rest["total"] is None else rest["total"]
        self.team.left = set(rest["left"])
        self.team.outside, self.team.readmitted = frozenset(rest["outside"]), rest["readmitted"]
        self.team.grown = self.team.grown or rest["grown"]
        self.keeps_ledger = rest["ledger"]
        if self.team.desk is not None:
            self.team.desk.known = rest["known"]
        self.take_more(rest["more"])

    # Members that die, and members that come

    def _arrive(self, source: int) -> None:
        """A newcomer's first act is to receive."""
        begun = now()
        self._torn = True
        if self.rank == self.members[0] and not self.team.unmet:
            self.journal.keep(True)
        try:
            if self.team.unmet:
                raise PeerLost("a worker went away while this one came")
            self._return(source)
        except PeerLost:
            self.recover()
        self.journal.record(
            "members", epoch=self.epoch.number, members=list(self.members), reason=f"rank {self.rank} came"
        )
        self.broadcast_ms = (now() - begun) * 1e3

    def admit(self) -> None:
        """Lets in who has knocked, and meets a person's requests, all members holding the same."""
        while self.team.knocking:
            source = self.epoch.members[0]
            newcomers, requests = self.team.hear()
            if newcomers:
                self.team.let_in(newcomers)
                self._return(source)
                self.on_admission()
            for request in requests:
                self.on_request(request)

    def recover(self) -> None:
        """A member has gone: the survivors go on without it, all from the same state and place (DESIGN 4.10).

        Of those who have learned of the latest agreement, all agree again by a mean if their parameters may
        differ; who has not learned of it takes over what they hold. Who holds it already stays whole
        meanwhile, so that another death loses nothing. Units that are in no state that is left are dealt
        again.

        Raises RuntimeError when no survivor holds a whole state."""
        while True:
            begun = now()
            self.curvature.drop()
            self.reducer.disarm()
            self.averager.release()
            self._landing = Landing(self)
            rows = self.team.regroup_without_the_dead(self.about())
            self.team.knocking = False  # who has heard of it and who has not: it will be told again
            try:
                found = self.reconcile(rows)
            except PeerLost:
                continue
            self.watch.forget()  # some may have heard the others' last figures, and some not
            self.journal.record(
                "recovery",
                units=self.units,
                ms=round((now() - begun) * 1e3, 3),
                epoch=self.epoch.number,
                **found,
            )
            self.account()
            return

    def about(self) -> dict[str, Any]:
        """What a survivor tells the others of itself."""
        return {
            "own": self._own,
            "torn": self._torn,
            "mark": self.state.mark(),
            "scale": scale_of(self.scaler),
            "more": self.more(),
        }

    def place_like(self, rows: Sequence[dict[str, Any]], source: int) -> None:
        """All survivors are where `source` is."""
        self.set_position(json.loads(share(self.epoch, json.dumps(self.position()), source)))
        self._take_rest(source)
        self.join_more([row["more"] for row in rows if not row["torn"]])
        self._take_least_scale([row["scale"] for row in rows])
        if self.total is not None:
            self.schedules.move(self.units, self.total)
        self._settled = (self.clock, self.epoch.number)

    def reconcile(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The survivors come to the same state and place. Returns which units are dealt again."""
        whole = [row for row in rows if not row["torn"]]
        if not whole:
            raise RuntimeError("no worker is left that holds the job's state: go on from a checkpoint")
        since = max(row["since"] for row in whole)
        latest = [row for row in whole if row["since"] == since]
        own = any(row["own"] for row in rows)  # replicas differ
        source = latest[0]["rank"]
        if len(latest) < len(rows):
            first = max(latest, key=lambda row: (row["clock"], -row["rank"]))
            latest, source = [first], first["rank"]
            holds = self.rank == source or any(
                row["rank"] == self.rank and row["clock"] == first["clock"] and not own for row in whole
            )
            self._torn = self._torn or not holds
            receive(self.epoch, self.state, source)
        elif own:
            self._average([row["mark"] for row in rows], own=True)
        done = {row["rank"]: max(row["clock"] - since, 0) for row in latest}
        clock = max(row["clock"] for row in latest)
        # Another may have died in a recovery before this one: units count by who took the steps.
        agreed, before = latest[0]["agreed"], latest[0]["among"]
        undone = [
            agreed + (step - since) * len(before) + index
            for step in range(since, clock)
            for index, rank in enumerate(before)
            if step >= since + done.get(rank, 0)
        ]
        spent = sum(row["spent"] for row in latest)
        self.team.place(clock, agreed + sum(done.values()), latest[0]["used"] + spent)
        again = self._deal_again(undone)
        self.place_like(rows, source)
        self._torn = False
        return {"again": again}

    def finish(self) -> None:
        """The job's end, for those who stayed: whoever was excluded or left earlier gets the final state."""
        self.readmit_now()
        source = self.team.call_back()
        if source is not None:
            self._take_over(source)

    def _take_over(self, source: int) -> None:
        """Receives the source's state and place."""
        receive(self.epoch, self.state, source)
        self.set_position(json.loads(share(self.epoch, json.dumps(self.position()), source)))
        if self.total is not None:
            self.schedules.move(self.units, self.total)
