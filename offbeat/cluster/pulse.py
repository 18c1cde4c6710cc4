"""A worker's sign of life, and its ear for others' deaths.

A thread, with a connection of its own to the job's store: it counts up while this process lives, so that the
launcher can tell a hung worker from one that computes for long; and it closes the members' connections when a
launcher has said that one of them is dead, which a silently cut network would never tell.
"""

from __future__ import annotations

import atexit
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offbeat.cluster.members import Members

BEATS = 4
"""Signs of life in a heartbeat interval."""
SILENT = 3
"""Heartbeat intervals without a sign of life after which a worker counts as dead."""


class Pulse:
    """board: the job's store, on a connection that nobody else uses. heartbeat: seconds. It goes on until the
    interpreter ends: what a script does after its job may take long. Then it must stop: a thread that comes
    back from C++ into an interpreter that has gone ends the process by SIGABRT."""

    def __init__(self, team: Members, board: Any, heartbeat: float):
        assert team.roll is not None
        self._team, self._board, self._heartbeat = team, board, heartbeat
        self._key = f"beat/{team.roll.rank}/{team.roll.attempt}"
        self._known = 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="offbeat-pulse", daemon=True)
        self._thread.start()
        atexit.register(self._stop)

    def _stop(self) -> None:
        self._ends.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        try:
            while not self._ends.wait(self._heartbeat / BEATS):
                self._board.add(self._key, 1)
                if (deaths := int(self._board.add("deaths", 0))) != self._known:
                    self._known = deaths
                    self._hear()
        except RuntimeError:
            return  # the store has gone, and its launcher with it

    def _hear(self) -> None:
        roll, epoch = self._team.roll, self._team.epoch
        assert roll is not None
        attempts = dict(roll.attempts)
        if any(self._board.check([f"dead/{rank}/{attempts[rank]}"]) for rank in epoch.members):
            epoch.close()
