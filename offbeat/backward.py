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


class Listener(Protocol):
    def backward_returned(self, roots: Any) -> None:
        """An outermost backward from `roots` (a tensor or several) has returned on this thread."""

    def backward_failed(self) -> None:
        """It raised."""


# In the order of their making, which is the same on all workers: they wait for each other in it.
_listeners: dict[int, weakref.ref[Any]] = {}
_lock = threading.Lock()
_depth = 0  # of all threads: under activation checkpointing on CUDA the inner backward has its own


def listen(listener: Listener) -> None:
    """`listener` hears of every backward from now on, as long as it lives."""
    _listeners[id(listener)] = weakref.ref(listener)
    current = torch.autograd.backward
    if getattr(current, "_offbeat", False):
        return

    @functools.wraps(current)
    def backward(tensors: Any, *args: Any, **settings: Any) -> None:
        _deepen(1)
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
    _listeners.pop(id(listener), None)


def _deepen(by: int) -> int:
    global _depth
    with _lock:
        _depth += by
        return _depth


def _living() -> list[Any]:
    for key in [key for key, reference in _listeners.items() if reference() is None]:
        del _listeners[key]
    return [one for reference in _listeners.values() if (one := reference()) is not None]
