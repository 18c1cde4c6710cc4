"""A plan on its way: run over a worker up to the user's next batch, interrupted, resumed, ended."""

from __future__ import annotations

from collections.abc import Callable

from offbeat.cluster.real import RealWorker
from offbeat.protocols import Program, Protocol
from offbeat.worker import Batch


class Course:
    """Drives `plan` over `worker`. `on_end` is called once, when the job is over on all workers."""

    def __init__(self, worker: RealWorker, plan: Protocol, on_end: Callable[[], None]):
        self.worker, self.plan = worker, plan
        self.ended = self._begun = False
        self._on_end = on_end
        self._program: Program | None = None
        self._replanned = False

    def resume(self) -> None:
        """Goes on from where the job is, all members holding the same, up to the next batch. The first time,
        as soon as the job's length is known, it begins."""
        if self.ended or self.worker.total is None:
            return
        if not self._begun:
            self._begun = True
            self.worker.schedules.move(self.worker.units, self.worker.total)
            self.worker.meter.begin()
        self.worker.interrupted = going_on = False
        if self.worker.paused is not None:
            going_on = not self.worker.over and self.plan.current(self.worker) == self.worker.paused
            self.worker.resume(going_on)
        if not going_on:  # else some may wait for the phase's end
            with self.worker.meter.waiting():
                self.worker.admit()
        if self.worker.over:
            self._end()
            return
        self.worker.begin(self.plan.current(self.worker), switched=self._replanned)
        self._replanned = False
        self._program = self.plan.run(self.worker)
        self.advance()

    def advance(self) -> None:
        """Runs the plan up to the next batch, or through the job's end."""
        if self._program is None:
            self.worker.whole()  # says what is missing
            return
        for handle in self._program:
            if isinstance(handle, Batch):
                return
            with self.worker.meter.waiting():
                handle.wait()
        self._program = None
        if self.worker.interrupted:
            return
        with self.worker.meter.waiting():
            self.worker.settle_now()
            self.worker.admit()
        if not self.worker.over:  # somebody came, or had left and less is done than was reckoned with
            self.resume()
            return
        with self.worker.meter.waiting():
            self.worker.finish()
        self._end()

    def recovered(self) -> None:
        """Members have died: goes on with those that are left, all holding the same."""
        self._program, self.worker.interrupted = None, False
        self.resume()

    def stop(self) -> None:
        """Interrupts the plan; what is in flight lands."""
        if self._program is not None:
            self.worker.interrupted = True
            self.advance()

    def replan(self, plan: Protocol) -> None:
        """From here on `plan` is followed; all members hold the same, and it resumes."""
        self.plan, self._replanned = plan, True

    def abandon(self, plan: Protocol) -> None:
        """Drops the plan where it is; `plan` is the one from here on."""
        self.plan, self._program = plan, None
        self.worker.interrupted = True

    def drain(self) -> None:
        """Interrupts the plan; afterwards all members hold the same."""
        if not self.ended:
            self.stop()
            with self.worker.meter.waiting():
                self.worker.settle_now(pause=True)

    def leave(self) -> None:
        """This worker has no more data; returns when the job is over."""
        if not self.ended:
            self.stop()
            self.worker.meter.end()
            self.worker.leave()
            self._end()

    def _end(self) -> None:
        self.ended = True
        self.worker.meter.end()
        self._on_end()
