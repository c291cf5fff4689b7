"""Copies per-thread state, which the import and `setup` set on the main thread, to the other threads of the handler."""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from . import fork_safety

T = TypeVar("T")


class ThreadState:
    """The state of the thread that makes this object: context variables, such as the precision of `decimal`, and settings of
    numpy and torch.
    """

    def __init__(self, threads: int) -> None:
        """`threads` is the number of threads for `fork_safety.set_threads`."""
        self._context = contextvars.copy_context()
        self._settings: list[Callable[[], object]] = [partial(fork_safety.set_threads, threads)]
        if (numpy := sys.modules.get("numpy")) is not None:
            self._settings.append(partial(numpy.seterr, **numpy.geterr()))
        if (torch := sys.modules.get("torch")) is not None:
            self._settings.append(partial(torch.set_grad_enabled, torch.is_grad_enabled()))
            # Set no default device if it would be the CPU: any default device slows each call of torch.
            if (device := torch.get_default_device()).type != "cpu":
                self._settings.append(partial(torch.set_default_device, device))

    def run(self, work: Callable[[], T]) -> T:
        """Call `work` on another thread, with a copy of the state."""
        return self._context.copy().run(self._run, work)

    def _run(self, work: Callable[[], T]) -> T:
        for set_one in self._settings:
            set_one()
        return work()
