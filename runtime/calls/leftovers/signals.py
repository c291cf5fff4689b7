"""The signals of zygotes and workers. The function's code may handle any signal, as in a plain program."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType

from ..link.worker_spec import OF_GATEWAY

SignalHandler = Callable[[int, FrameType | None], object] | int | None
# The handlers that a program has at its start, for the signals whose handling zygotes and workers change.
_OF_PROGRAMS: dict[signal.Signals, SignalHandler] = {
    signal.SIGCHLD: signal.SIG_DFL, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL,
    signal.SIGQUIT: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler,
}  # fmt: skip

HANDLED = tuple(_OF_PROGRAMS)


def ignore(_number: int, _frame: FrameType | None) -> None:
    """Handle a signal by doing nothing.

    With SIG_IGN instead, the programs that a handler starts would ignore the signal, too.
    """


def reset(handled: Iterable[signal.Signals]) -> None:
    """Reset the signals in `handled`, which the parent of this process handles. Signals for the gateway do nothing here."""
    signal.set_wakeup_fd(-1)
    for number in handled:
        signal.signal(number, ignore if number in OF_GATEWAY else signal.SIG_DFL)


class AuthorsHandlers:
    """The signal handlers that the import and the build of a handler set. They apply in workers only, not in the zygote."""

    def __init__(self) -> None:
        """Call this before the import."""
        self._before = {number: signal.getsignal(number) for number in _OF_PROGRAMS}
        self._found: dict[signal.Signals, SignalHandler] = {}

    def note(self) -> None:
        """After the build, remember which handlers were set, and replace them by the handlers from before the import."""
        for number, before in self._before.items():
            if (found := signal.getsignal(number)) not in (None, before):
                self._found[number] = found
                signal.signal(number, before)

    def restore(self) -> None:
        """In a worker, set the remembered handlers again."""
        for number, handler in self._found.items():
            signal.signal(number, handler)


def leave_to_forks(on_term: SignalHandler, close: Callable[[], None]) -> None:
    """Let the processes that the function's code forks handle signals as a program does. `close` is called in each of them.

    `on_term` is this worker's own handler of SIGTERM. The handlers of the function's code stay. Signals are blocked during the
    fork until the new process has reset its handlers. Otherwise this worker's handler would take a signal, and do nothing.
    """
    masks = threading.local()

    def block() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def leave() -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in _OF_PROGRAMS.items():
            if signal.getsignal(number) in (ignore, on_term):
                signal.signal(number, handler)
        close()
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=leave)
