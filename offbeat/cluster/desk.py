"""What a person asks of a running job, by the job's store: `offbeat ctl` puts requests there, the members
take them at their next common place, all together.

Keys, all in the job's part of the store:

ctl                how many requests there are
ctl/<n>            request n, from 1: {"do": "drop" | "switch" | "checkpoint", …}
ctl/<n>/answer     {"ok": whether it was done, "text": what to tell the person}
"""

from __future__ import annotations

import json
import time
from typing import Any

from offbeat.site import now

LOOK = 0.5
"""Seconds between two looks for requests."""


class Desk:
    """One worker's view. board: the job's store. known: requests that were taken, the same on all members."""

    def __init__(self, board: Any):
        self._board, self.known = board, 0
        self._looked, self._waits = 0.0, False

    def news(self) -> bool:
        """Whether there is a request, as far as this worker has looked: it does so now and then."""
        moment = now()
        if moment > self._looked + LOOK:
            self._looked = moment
            self._waits = int(self._board.add("ctl", 0)) > self.known
        return self._waits

    def read(self) -> list[dict[str, Any]]:
        """The requests that were not taken yet, each with its number; for all members."""
        self._waits = False
        numbers = range(self.known + 1, int(self._board.add("ctl", 0)) + 1)
        return [{**json.loads(self._board.get(f"ctl/{n}")), "number": n} for n in numbers]

    def answer(self, number: int, ok: bool, text: str) -> None:
        self._board.set(f"ctl/{number}/answer", json.dumps({"ok": ok, "text": text}))


def ask(board: Any, request: dict[str, Any], patience: float) -> dict[str, Any] | None:
    """A person's request. Returns the answer, None if there is none within `patience` seconds."""
    number = int(board.add("ctl/numbers", 1))
    board.set(f"ctl/{number}", json.dumps(request))
    while int(board.add("ctl", 0)) < number - 1:  # somebody else's comes first
        time.sleep(0.01)
    board.add("ctl", 1)
    end = time.monotonic() + patience
    while not board.check([f"ctl/{number}/answer"]):
        if time.monotonic() > end:
            return None
        time.sleep(0.05)
    return dict(json.loads(board.get(f"ctl/{number}/answer")))
