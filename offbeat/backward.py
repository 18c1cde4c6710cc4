"""The one seam in autograd: hear when `torch.autograd.backward` is about to run and has returned.

`.grad` becomes the members' mean after backward has returned, never inside it, where the thread of
control is autograd's (DESIGN section 5). A callback queued inside backward would come too early under
activation checkpointing, whose inner backward is a task of its own.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any, Protocol

import torch

from offbeat.site import here


class Listener(Protocol):
    def backward_begins(self) -> None:
        """An outermost backward is about to run."""

    def backward_returned(self, roots: Any) -> None:
        """An outermost backward from `roots` (a tensor or several) has returned on this thread."""

    def backward_failed(self) -> None:
        """It raised."""


_lock = threading.Lock()


def listen(listener: Listener) -> None:
    """`listener` hears of every backward from now on, as long as it lives."""
    # In the order of their making, which is the same on all workers: they wait for each other in it.
    here().listeners[id(listener)] = weakref.ref(listener)
    current = torch.autograd.backward
    if getattr(current, "_offbeat", False):
        return

    @functools.wraps(current)
    def backward(tensors: Any, *args: Any, **settings: Any) -> None:
        if _deepen(1) == 1:
            for one in _living():
                one.backward_begins()
        try:
            current(tensors, *args, **settings)
        except BaseException:
            if _deepen(-1) == 0:
                for one in _living():
                    one.backward_failed()
            raise
        if _deepen(-1) == 0:
            for one in _living():
                one.backward_returned(tensors)

    backward._offbeat = True  # type: ignore[attr-defined]
    torch.autograd.backward = backward


def ignore(listener: Listener) -> None:
    here().listeners.pop(id(listener), None)


def _deepen(by: int) -> int:
    site = here()
    with _lock:  # under activation checkpointing on CUDA the inner backward has a thread of its own
        site.depth += by
        return site.depth


def _living() -> list[Any]:
    listeners = here().listeners
    for key in [key for key, reference in listeners.items() if reference() is None]:
        del listeners[key]
    return [one for reference in listeners.values() if (one := reference()) is not None]
