"""What a person asks of a running job, by the job's store: `offbeat ctl` puts requests there, the members
take them at their next common place, all together.

Keys, all in the job's part of the store:

ctl                the requests, a line each: {"id", "do": "drop" | "switch" | "checkpoint", …}
ctl/<id>           the answer: {"ok": whether it was done, "text": what to tell the person}
"""

from __future__ import annotations

import json
import time
import uuid
from typing import Any


class Desk:
    """One worker's view. board: the job's store. known: requests that were taken, the same on all members."""

    def __init__(self, board: Any):
        self._board, self.known = board, 0

    def read(self) -> list[dict[str, Any]]:
        """The requests that were not taken yet."""
        if not self._board.check(["ctl"]):
            return []
        lines = self._board.get("ctl").decode().splitlines()
        return [json.loads(line) for line in lines[self.known :]]

    def answer(self, request: dict[str, Any], ok: bool, text: str) -> None:
        self._board.set(f"ctl/{request['id']}", json.dumps({"ok": ok, "text": text}))


def ask(board: Any, request: dict[str, Any], patience: float) -> dict[str, Any] | None:
    """A person's request. Returns the answer, None if there is none within `patience` seconds."""
    name = uuid.uuid4().hex
    board.append("ctl", json.dumps({"id": name, **request}) + "\n")
    end = time.monotonic() + patience
    while not board.check([f"ctl/{name}"]):
        if time.monotonic() > end:
            return None
        time.sleep(0.05)
    return dict(json.loads(board.get(f"ctl/{name}")))
