"""A worker's sign of life, and its ear for others' deaths.

Two threads. One gives signs of life to this host's own launcher, in a file that both have open, so that it
can tell a hung worker from one that computes for long, whatever the network does meanwhile. The other
listens, on a connection of its own to the job's store, for deaths that launchers have told: it closes the
connections of an epoch that has lost a member, which a silently cut network would never tell, and ends the
wait for one that is being formed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from functools import partial
from pathlib import Path
from tempfile import mkstemp
from typing import Any

from offbeat.cluster.roll import Roll
from offbeat.exits import GRACE

BEATS = 4
"""Signs of life in a heartbeat interval."""
SILENT = 3
"""Heartbeat intervals without a sign of life after which a worker counts as dead."""
SLOT = 8
"""Bytes of a worker's sign of life in its launcher's file: the time when it was given, in nanoseconds."""


ENDING = 1
"""Instead of a time: this process ends, which may take long on a busy machine."""


class Pulse:
    """board: the job's store, on a connection that nobody else uses. heartbeat: seconds. beats, slot: the
    launcher's file, if there is one, and this worker's place there. It goes on until the interpreter ends:
    what a script does after its job may take long. Then it must stop: a thread that comes back from C++ into
    an interpreter that has gone ends the process by SIGABRT."""

    def __init__(self, roll: Roll, board: Any, heartbeat: float, beats: Path | None, slot: int):
        self._roll, self._board, self._pause = roll, board, heartbeat / BEATS
        self._known = 0
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._listen, name="offbeat-ear", daemon=True)]
        if beats is not None:
            place = os.open(beats, os.O_RDWR | os.O_CLOEXEC), slot * SLOT
            beat = partial(self._beat, *place)
            self._threads.append(threading.Thread(target=beat, name="offbeat-pulse", daemon=True))
        for thread in self._threads:
            thread.start()
        atexit.register(self._stop)

    def _stop(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join(GRACE)

    def _beat(self, file: int, place: int) -> None:
        while not self._ends.is_set():
            os.pwrite(file, time.monotonic_ns().to_bytes(SLOT, "little"), place)
            self._ends.wait(self._pause)
        os.pwrite(file, ENDING.to_bytes(SLOT, "little"), place)

    def _listen(self) -> None:
        try:
            while not self._ends.wait(self._pause):
                if (deaths := int(self._board.add("deaths", 0))) != self._known or self._roll.forming:
                    self._known = deaths
                    self._hear()
        except RuntimeError:
            return  # the store has gone, and its launcher with it

    def _hear(self) -> None:
        attempts = dict(self._roll.attempts)
        for rank in self._roll.awaited:
            if self._board.check([f"dead/{rank}/{attempts[rank]}"]):
                self._roll.hear_of(rank, attempts[rank])


class Pulses:
    """The launcher's side: the last signs of life of its workers."""

    def __init__(self) -> None:
        self._file, self.path = mkstemp(prefix="offbeat-beats-")

    def last(self, slot: int) -> int:
        """When the worker at `slot` has given its last one, in nanoseconds; 0: none yet; or ENDING."""
        return int.from_bytes(os.pread(self._file, SLOT, slot * SLOT), "little")

    def forget(self, slot: int) -> None:
        """Another process takes the place."""
        os.pwrite(self._file, bytes(SLOT), slot * SLOT)

    def close(self) -> None:
        os.close(self._file)
        with contextlib.suppress(OSError):
            os.unlink(self.path)
