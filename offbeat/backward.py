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


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_depth = threading.local()


def listen(listener: Listener) -> None:
    """`listener` hears of every backward from now on, as long as it lives."""
    _listeners.add(listener)
    current = torch.autograd.backward
    if getattr(current, "_offbeat", False):
        return

    @functools.wraps(current)
    def backward(tensors: Any, *args: Any, **settings: Any) -> None:
        outer = getattr(_depth, "value", 0)
        _depth.value = outer + 1
        try:
            current(tensors, *args, **settings)
        except BaseException:
            if outer == 0:
                for one in list(_listeners):
                    one.backward_failed()
            raise
        finally:
            _depth.value = outer
        if outer == 0:
            for one in list(_listeners):
                one.backward_returned(tensors)

    backward._offbeat = True  # type: ignore[attr-defined]
    torch.autograd.backward = backward


def ignore(listener: Listener) -> None:
    _listeners.discard(listener)
