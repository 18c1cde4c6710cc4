"""A launcher's look-out during the run: has a host failed, fallen silent, finished?"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import TCPStore

from offbeat.cluster.spec import LaunchSpec

BEAT = 0.5  # seconds between two looks at the store, and between two signs of life


class StoreLost(ConnectionError):
    """Node 0's store does not answer any more."""


class Watch:
    """A thread that looks into the store a few times a second, through a connection of its own: a silent
    cut of the network must not stop the launcher from tending its workers."""

    def __init__(
        self, store: TCPStore, spec: LaunchSpec, workers: Sequence[int], note: Callable[[str], None]
    ):
        self._store, self._spec, self._workers, self._note = store, spec, workers, note
        self._lost_nodes: set[int] = set()
        self._failed: dict[str, Any] | None = None
        self.lost: str | None = None
        self.all_done = False
        self._answered = time.monotonic()
        self._stop = threading.Event()
        self._seen: dict[int, tuple[int, float]] = {}  # signs of life of other nodes, and when they were new
        self._thread = threading.Thread(target=self._run, name="offbeat-hosts", daemon=True)
        self._thread.start()

    def trouble(self) -> dict[str, Any] | None:
        if self._failed is not None:
            return self._failed
        # Not every call of the store keeps to its time-out when the network falls silent.
        if not self._stop.is_set() and time.monotonic() - self._answered > self._spec.silence:
            self.lost = self.lost or f"no answer for {self._spec.silence:g} s"
        if self.lost is not None:
            raise StoreLost(self.lost)
        return None

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=2)

    def _run(self) -> None:
        mine, nodes = f"launcher/beat/{self._spec.node_rank}", range(self._spec.nnodes)
        try:
            while not self._stop.wait(BEAT):
                self._store.add(mine, 1)
                self._answered = time.monotonic()
                if self._spec.node_rank == 0 and self._spec.maximum is not None:
                    nodes = range(self._spec.nnodes + int(self._store.add("launcher/later", 0)))
                if self._given_up(self._spec.node_rank):
                    self.lost = "the others have gone on without this host, which was silent for too long"
                    return
                if self._store.check(["launcher/failed"]):
                    self._failed = json.loads(self._store.get("launcher/failed"))
                    return
                if all(self._store.check([f"launcher/done/{r}"]) or self._given_up(r) for r in nodes):
                    self.all_done = True
                if self._spec.node_rank == 0:
                    self._listen(nodes[1:])
        except RuntimeError as error:
            # Node 0 may go once all hosts are done.
            if not self.all_done:
                self.lost = first_line(error)

    def _listen(self, nodes: Sequence[int]) -> None:
        """Node 0 misses a host that has fallen silent without having finished."""
        now = time.monotonic()
        for node in nodes:
            count, since = self._seen.setdefault(node, (-1, now))
            beat = self._store.add(f"launcher/beat/{node}", 0)
            if beat != count:
                self._seen[node] = (beat, now)
            elif now - since > self._spec.silence and not self._store.check([f"launcher/left/{node}"]):
                if self._spec.minimum is not None:
                    self._give_up(node)
                    continue
                name = json.loads(self._store.get(f"launcher/host/{node}"))["host"]
                message = f"node {node} ({name}) has not been heard of for {self._spec.silence:g} s"
                value = {"node": node, "message": message, "detail": []}
                self._store.compare_set("launcher/failed", "", json.dumps(value))

    def _given_up(self, node: int) -> bool:
        return bool(self._store.check([f"launcher/lost/{node}"]))

    def _give_up(self, node: int) -> None:
        """A host has fallen silent, and the job goes on without its workers."""
        if node in self._lost_nodes:
            return
        self._lost_nodes.add(node)
        row = json.loads(self._store.get(f"launcher/host/{node}"))
        first = sum(self._workers[:node]) if row["first"] is None else row["first"]
        for rank in range(first, first + row["workers"]):
            known = self._store.check([f"offbeat/attempt/{rank}"])
            attempt = int(self._store.get(f"offbeat/attempt/{rank}")) if known else 0
            self._store.set(f"offbeat/dead/{rank}/{attempt}", "1")
        self._store.add("offbeat/deaths", 1)
        self._store.set(f"launcher/lost/{node}", "1")
        self._note(
            f"node {node} has not been heard of for {self._spec.silence:g} s: the others go on without it"
        )


def first_line(error: BaseException) -> str:
    return str(error).split("\n")[0][:200]
